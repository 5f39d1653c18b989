"""Measures what docs/memory.md says: python benchmarks/memory.py

Trains a GPT with each way to store weights and slots, on three seeds, and measures by how much
memory grows with each optimizer, in new processes: some 25 minutes on one core. Prints the tables,
draws docs/memory.png and keeps the figures in benchmarks/memory.json; `--measure nothing` prints
and draws these again. `make bench` measures the growth, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import fresh
import machine
import torch
from matplotlib.figure import Figure
from memory_training import CHOICES, STEPS, corpus, state_bytes, train
from memory_training import SHAPE as GPT
from rows import Effort, Measured, Row
from workloads import parameters

import functional_optim as fo
from functional_optim.adapters import Optimizer

KEPT = Path(__file__).with_suffix(".json")
PICTURE = Path(__file__).parents[1] / "docs" / "memory.png"
SEEDS = (0, 1, 2)

STORED = ("int8", "float8_e4m3fn", "int4", "bfloat16")
GROWING = ("float32", *STORED, "torch")
WORDS = {"float32": "all in float32", "torch": "torch's, fused"}
SIXTY = "60 million parameters"


def optimizer(kind: str, params: list[Any]) -> torch.optim.Optimizer:
    """AdamW, with slots stored so, over matrices that are named as those of hidden layers."""
    if kind == "torch":
        return torch.optim.AdamW(params, fused=True)
    tx = fo.adamw(1e-3) if kind == "float32" else fo.stored(fo.adamw(1e-3), kind)
    return Optimizer([(f"layers.{i}.weight", p) for i, p in enumerate(params)], lambda: tx)


def growth(kind: str, quick: bool, saved: str = "") -> float:
    """Megabytes by which this process grows at most, from before its optimizer is made until it
    has made three steps. Parameters and gradients are there before.

    saved: a file from which a state dict is loaded before the first step.
    """
    params = parameters([(64, 64)] if quick else [(2000, 2000)] * 15)
    before = machine.resident()
    opt = optimizer(kind, params)
    if saved:
        opt.load_state_dict(torch.load(saved))
    for _ in range(3):
        opt.step()
    return machine.peak() - before


def save(kind: str, quick: bool, path: str) -> None:
    """Write the state dict of such an optimizer after a step."""
    opt = optimizer(kind, parameters([(64, 64)] if quick else [(2000, 2000)] * 15))
    opt.step()
    torch.save(opt.state_dict(), path)


def grown(
    kinds: tuple[str, ...], times: int, quick: bool = False, *, loading: bool = False
) -> dict[str, list[float]]:
    """The growth of new processes, which find the kernels that another one has kept."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            fresh.run("growth", folder, kind=kind, quick=True)
        files = {kind: str(Path(folder) / f"{kind}.pt") if loading else "" for kind in kinds}
        for kind in kinds if loading else ():
            save(kind, quick, files[kind])
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind in kinds * times:
            mine = fresh.run("growth", folder, kind=kind, quick=quick, saved=files[kind])
            found[kind].append(mine["megabytes"])
    return found


def measure(kind: str, rival: str, effort: Effort, *, loading: bool = False) -> Measured:
    times = len(fresh.processes(effort))
    found = grown((kind, rival), times, effort.quick, loading=loading)
    return Measured(found[kind], found[rival], "torch, fused" if rival == "torch" else "our AdamW")


def rows() -> list[Row]:
    """The growth with packed slots compared with float32, of int8 compared with torch's AdamW, and
    of int8 while a checkpoint is loaded."""
    found = [(f"growth-{kind}", kind, "float32") for kind in STORED]
    found += [("growth-float32", "float32", "torch"), ("growth-int8_torch", "int8", "torch")]
    made = [
        Row(
            key,
            f"Growth of memory, AdamW, slots in {kind}",
            SIXTY,
            partial(measure, kind, rival),
            (0.32,) if key == "growth-int8" else (),
            unit="MB",
        )
        for key, kind, rival in found
    ]
    loading = partial(measure, "int8", "float32", loading=True)
    what = "Growth of memory, AdamW, slots in int8, from a checkpoint"
    return [*made, Row("growth-loaded", what, SIXTY, loading, (0.35,), unit="MB")]


def keep(kept: dict[str, Any]) -> None:
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def trained(kept: dict[str, Any]) -> None:
    """Train with each choice on each seed, and keep the losses after each run."""
    text = corpus.load(None, GPT.context)
    kept.update(steps=STEPS, losses={name: [] for name in CHOICES}, exact=[])
    for seed in SEEDS:
        found = {}
        for name, choice in CHOICES.items():
            found[name] = train(choice, text, seed)
            kept["losses"][name].append(found[name].loss)
            print(f"{name}, seed {seed}: {found[name].loss:.4f}", flush=True)
            keep(kept)
        kept["exact"].append(found["exact"].bits == found["float32"].bits)


def bytes_of(name: str) -> tuple[int, int, float]:
    """Bytes per parameter of weight, gradient and state."""
    choice = CHOICES[name]
    size = choice.dtype.itemsize
    return size, size, state_bytes(choice.make(1e-3), choice.dtype)


def beside(losses: dict[str, list[float]], name: str) -> list[float]:
    """What each seed's loss is above that of float32."""
    pairs = zip(losses[name], losses["float32"], strict=True)
    return [mine - other for mine, other in pairs]


def tables(kept: dict[str, Any]) -> str:
    """Bytes and losses, and the growth of memory where it was measured."""
    losses, growing = kept["losses"], kept["growth"]
    lines = [
        "| AdamW | bytes per parameter | loss, mean ± deviation | above float32's, each seed |",
        "| --- | --- | --- | --- |",
    ]
    for name, choice in CHOICES.items():
        own = losses[name]
        each = ", ".join([f"{x:+.4f}" for x in beside(losses, name)])
        loss = f"{statistics.mean(own):.4f} ± {statistics.stdev(own):.4f}"
        lines.append(f"| {choice.what} | {sum(bytes_of(name)):.2f} | {loss} | {each} |")
    least = {kind: min(found) for kind, found in growing.items()}
    if least:
        lines += ["", "| AdamW | growth | / float32 | / torch's, fused |"]
        lines += ["| --- | --- | --- | --- |"]
    for kind, size in least.items():
        ratios = f"{size / least['float32']:.2f} | {size / least['torch']:.2f}"
        lines.append(f"| {WORDS.get(kind, f'slots in {kind}')} | {size:.0f} MB | {ratios} |")
    return "\n".join(lines)


def draw(kept: dict[str, Any]) -> None:
    """Two rows of bars: bytes per parameter, and losses compared with float32."""
    losses = kept["losses"]
    names = [name for name in CHOICES if name != "exact"]
    labels = [CHOICES[name].what for name in names]
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    done = [0.0] * len(names)
    parts = zip(*[bytes_of(name) for name in names], strict=True)
    for part, color, sizes in zip(
        ("weight", "gradient", "state"), ("#d9d9d9", "#9ecae1", "#fdae6b"), parts, strict=True
    ):
        left.barh(labels, sizes, left=done, color=color, height=0.7, label=part)
        done = [x + y for x, y in zip(done, sizes, strict=True)]
    for place, size in enumerate(done):
        left.text(size + 0.2, place, f"{size:.1f}", va="center", fontsize=8)
    left.set_xlim(0, 18)
    left.set_xticks(range(0, 17, 4))
    left.set_title("bytes per parameter", loc="left", fontsize=9.5)
    spread = statistics.stdev(losses["float32"])
    right.axvspan(-spread, spread, color="#eeeeee", label="deviation of the seeds")
    for place, name in enumerate(names):
        each = beside(losses, name)
        words = ("each seed", "mean") if place == 0 else (None, None)
        right.plot(each, [place] * len(each), "o", color="#3182bd", markersize=4, label=words[0])
        mean = [statistics.mean(each)]
        right.plot(mean, [place], "|", color="#a50f15", markersize=13, label=words[1])
    right.set_title("final loss, above that of float32", loc="left", fontsize=9.5)
    right.legend(
        ncols=3, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.06)
    )
    for axes in (left, right):
        below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.06), "handlelength": 1.2}
        axes.legend(ncols=3, fontsize=8, frameon=False, columnspacing=1.5, **below)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8.5)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    left.invert_yaxis()
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description="Memory and loss of ways to store.")
    what = "what is measured again (default all); the rest is what was kept"
    parser.add_argument("--measure", choices=("all", "growth", "nothing"), default="all", help=what)
    measure = parser.parse_args().measure
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if measure == "all":
        trained(kept)
    if measure != "nothing":
        kept["growth"] = grown(GROWING, 3)
        keep(kept)
    print(tables(kept))
    draw(kept)


if __name__ == "__main__":
    main()
