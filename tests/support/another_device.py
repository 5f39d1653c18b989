"""Steps on a device that is not the CPU, as a program of its own: `python another_device.py`.

torch's lazy tensors are such a device, on every machine: they stand for operations still to be run,
and each time the host waits for a value is counted. Prints, for each row and each way to step it,
how often that was in each step, and how far the results are from the CPU's.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import cases
import loops
import torch
import torch._lazy.metrics as metrics

import functional_optim as fo

STEPS = 4
READ = "aten::_local_scalar_dense"
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3)}


def watched() -> fo.GradientTransformation:
    """Measurements before, behind and around a clip, a schedule, an average."""
    before = {"norm": fo.measures.global_norm, "size": fo.measures.rms}
    return fo.chain(
        fo.monitor(before),
        fo.monitor({"share": fo.measures.clip_share}, around=fo.clip_by_global_norm(0.5)),
        fo.snapshot("clipped", fo.measures.global_norm),
        fo.monitor(
            fo.measures.diagnostics,
            around=fo.adamw(fo.schedules.linear(0.1, 0.0, 10)),
            per_tensor=True,
        ),
        fo.params_ema(0.9),
    )


def gathered(lr: float) -> fo.GradientTransformation:
    """A gate that the host knows: torch's lazy tensors have no `where` for others."""
    return fo.accumulate(fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr)), every=2)


NAMES = ("sgd-momentum", "adamw", "adafactor", "asgd", "nadam", "composed")
ROWS = [loops.row(name) for name in NAMES]
ROWS += [cases.row("watched", watched), cases.row("gathered", gathered, lr=0.1)]


def tensors(case: cases.Case, count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    named = {n: shape for n, shape in SHAPES.items() if case.dim in (None, len(shape))}
    return [
        {n: torch.randn(shape, dtype=torch.float64) for n, shape in named.items()}
        for _ in range(count)
    ]


def reads() -> int:
    """How often the host has waited since the last call."""
    found = metrics.counter_value(READ) if READ in metrics.counter_names() else 0
    metrics.reset()
    return found


def on(device: str, x: torch.Tensor) -> torch.Tensor:
    return x.clone() if device == "cpu" else x.to(device)


def by_object(make: Callable[..., Any], loaded: bool = False) -> Callable[..., Any]:
    """An optimizer object; loaded: from a state dict after half of the steps."""

    def train(case: cases.Case, device: str) -> Any:
        first, *grads = tensors(case, STEPS + 1)
        params = {n: torch.nn.Parameter(on(device, p)) for n, p in first.items()}
        opt = make(case, params.values())
        waits = []
        for i, g in enumerate(grads):
            if loaded and i == STEPS // 2:
                saved = copy.deepcopy(opt.state_dict())
                opt = make(case, params.values())
                opt.load_state_dict(saved)
            for name, p in params.items():
                p.grad = on(device, g[name])
            reads()
            opt.step()
            waits.append(reads())
        return params, [opt.state.get(p, {}) for p in params.values()], waits

    return train


def by_functions(case: cases.Case, device: str, compiled: bool = False) -> Any:
    first, *grads = tensors(case, STEPS + 1)
    params = {n: on(device, p) for n, p in first.items()}
    tx = case.tx()
    state = tx.init(params)
    step = fo.compile(tx) if compiled else None
    waits = []
    for g in grads:
        given = {n: on(device, x) for n, x in g.items()}
        reads()
        if step is not None:
            params, state = step(given, state, params)
        else:
            updates, state = tx.update(given, state, params)
            params = fo.apply_updates(params, updates)
        waits.append(reads())
    return params, state, waits


def compiled(case: cases.Case, device: str) -> Any:
    return by_functions(case, device, compiled=True)


def distance(a: Any, b: Any) -> float:
    far = [0.0]
    for x, y in zip(fo.tree.leaves(a), fo.tree.leaves(b), strict=True):
        if isinstance(x, torch.Tensor):
            far.append((x.to("cpu").double() - y.double()).abs().max().item())
    return max(far)


def control() -> int:
    """How many waits are counted where there is one."""
    x = torch.zeros(3).to("lazy").sum()
    reads()
    x.item()
    return reads()


def ways(case: cases.Case) -> dict[str, Callable[..., Any]]:
    """How a row can be stepped."""
    found = {"recipe": by_object(loops.general), "loaded": by_object(loops.general, True)}
    if case.stock is not None:
        found["drop-in"] = by_object(loops.drop_in)
    if case.name != "gathered":
        found |= {"update": by_functions, "compile": compiled}
    return found


def main() -> None:
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    found: dict[str, Any] = {"control": control()}
    for case in ROWS:
        for name, train in ways(case).items():
            mine, state, waits = train(case, "lazy")
            here = by_functions if train is compiled else train
            theirs, wanted, _ = here(case, "cpu")
            far = distance((mine, state), (theirs, wanted))
            found[f"{case.name} {name}"] = {"waits": waits, "far": far}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
