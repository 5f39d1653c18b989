"""How many steps Muon and SOAP need where AdamW needs all of them: `make train`'s GPT.

    python benchmarks/matrix_training.py --minutes 20

Every optimizer tries the same number of learning rates, each a factor of 2 or so from the next, on
the first seed. The best one trains on all seeds. Counted are the steps until the validation loss is
that of AdamW at its end, in runs of equal length with a warm-up and a cosine. It prints a
table after each optimizer, and ends early where the minutes are over. Counts of steps do not depend
on what else the machine does; seconds do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.combinators.hidden_matrices import HiddenMatrices

sys.path.append(str(Path(__file__).parent.parent / "examples"))
sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

import corpus
from gpt import GPT, Shape, next_byte_loss

BETAS, DECAY = (0.9, 0.99), 0.1
SPLIT = {"*.qkv.weight": {"split": 3}}
EVERY = 10
"""Steps from one look at the validation loss to the next."""


@dataclass(frozen=True)
class Size:
    """How much is trained; valid: windows of validation text."""

    shape: Shape
    batch: int
    steps: int
    valid: int


SIZES = {
    "full": Size(Shape(layers=4, heads=4, width=160, context=64), 16, 500, 512),
    "middle": Size(Shape(layers=3, heads=4, width=96, context=64), 16, 300, 128),
    "quick": Size(Shape(layers=2, heads=2, width=32, context=32), 8, 20, 16),
}
"""`full` is the model and the text of `make train`."""

Recipe = Callable[[float, int, float], fo.GradientTransformation]
"""From a learning rate, the number of steps and AdamW's best rate to a transformation."""


def falling(peak: float, steps: int) -> Any:
    """Up for a twentieth of the steps, then down a cosine to a twentieth of the peak."""
    return fo.schedules.warmup_cosine(0.0, peak, max(1, steps // 20), steps, peak / 20)


def adamw(lr: float, steps: int, best: float) -> fo.GradientTransformation:
    return fo.adamw(falling(lr, steps), BETAS, weight_decay=DECAY)


def muon_adamw(lr: float, steps: int, best: float) -> fo.GradientTransformation:
    """AdamW's own best rate for what is no hidden matrix."""
    rates = falling(lr, steps), falling(best, steps)
    return fo.muon_adamw(*rates, DECAY, DECAY, betas=BETAS, eps=1e-8, views=SPLIT)


def tied(lr: float, steps: int, best: float) -> fo.GradientTransformation:
    """One rate for both."""
    rate = falling(lr, steps)
    more: Any = {"betas": BETAS, "eps": 1e-8, "scale": "match_rms_adamw", "views": SPLIT}
    return fo.muon_adamw(rate, rate, DECAY, DECAY, **more)


def soap(lr: float, steps: int, best: float) -> fo.GradientTransformation:
    """SOAP for hidden matrices, renewed every ten steps; AdamW at the same rate for the rest."""
    rate = falling(lr, steps)
    matrices = fo.soap(rate, weight_decay=DECAY)
    parts = {"soap": matrices, "adamw": fo.adamw(rate, BETAS, weight_decay=DECAY)}
    return fo.partition(parts, HiddenMatrices("soap", ("soap", "adamw"), (), ()))


GRIDS: dict[str, tuple[str, Recipe, tuple[float, ...]]] = {
    "adamw": ("AdamW", adamw, (1.5e-3, 3e-3, 6e-3, 1.2e-2)),
    "muon_adamw": ("Muon, and AdamW at its best rate", muon_adamw, (0.01, 0.02, 0.04, 0.08)),
    "soap": ("SOAP, and AdamW at one rate", soap, (1.5e-3, 3e-3, 6e-3, 1.2e-2)),
    "tied": ("Muon and AdamW at one rate", tied, (3e-3, 6e-3, 1.2e-2, 2.4e-2)),
}


@dataclass
class Curve:
    """Validation losses by step, and seconds: of all steps, and of the optimizer in them."""

    losses: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    stepping: float = 0.0

    @property
    def last(self) -> float:
        return list(self.losses.values())[-1]

    def reaches(self, loss: float) -> int | None:
        """The first step seen with this loss or less."""
        return next((step for step, x in self.losses.items() if x <= loss), None)


class OutOfTime(Exception):
    """The minutes are over."""


@dataclass
class Trainer:
    """Training runs of one size. until: when to stop, by `time.perf_counter`."""

    size: Size
    text: corpus.Corpus
    until: float

    def train(self, make: Recipe, lr: float, best: float, seed: int) -> Curve:
        """A run from new weights."""
        torch.manual_seed(seed)
        model, curve = GPT(self.size.shape), Curve()
        tx = fo.chain(fo.clip_by_global_norm(1.0), make(lr, self.size.steps, best))
        opt = Optimizer(model.named_parameters(), lambda: tx)
        for step in range(self.size.steps):
            if time.perf_counter() > self.until:
                raise OutOfTime
            begin = time.perf_counter()
            x, y = corpus.batch(self.text.train, seed, step, self.size.batch, model.shape.context)
            opt.zero_grad()
            next_byte_loss(model(x), y).backward()
            middle = time.perf_counter()
            opt.step()
            end = time.perf_counter()
            if step:  # the first one compiles
                curve.seconds += end - begin
                curve.stepping += end - middle
            if (step + 1) % EVERY == 0 or step + 1 == self.size.steps:
                curve.losses[step + 1] = self.validate(model)
        return curve

    @torch.no_grad()
    def validate(self, model: GPT) -> float:
        """Mean loss in nats a byte, over windows spread evenly over the validation text."""
        text, context, count = self.text.valid, model.shape.context, self.size.valid
        starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
        losses: list[Tensor] = []
        for some in starts.split(64):
            x, y = corpus.windows(text, some, context)
            losses.append(next_byte_loss(model(x), y) * len(some))
        return float(sum(losses, torch.zeros(()))) / count


def line(what: str, rate: float, curves: list[Curve], adamw: list[Curve], steps: int) -> str:
    """A row of the table: means over the seeds that were trained."""
    counts = [own.reaches(other.last) for own, other in zip(curves, adamw, strict=False)]
    reached = [x for x in counts if x is not None]
    shown = f"{len(reached)} of {len(counts)} get there"
    if len(reached) == len(counts):
        mean = statistics.mean(reached)
        shown = f"{mean:.0f} ({100 * mean / steps:.0f} %)"
    loss = statistics.mean([own.last for own in curves])
    whole = statistics.mean([own.seconds for own in curves])
    stepping = statistics.mean([own.stepping for own in curves])
    each = ", ".join([str(x or "–") for x in counts])
    return (
        f"| {what} | {rate:g} | {loss:.4f} | {shown} | {each} | {whole:.0f} s | {stepping:.0f} s |"
    )


HEAD = (
    "| optimizer | lr | final loss | steps to AdamW's | each seed | seconds | of the optimizer |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def main(argv: list[str] | None = None) -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(
        description="Steps to AdamW's loss, of optimizers of matrices."
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="when to stop (default 30)")
    parser.add_argument("--seeds", type=int, default=3, help="runs at the best rate (default 3)")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the model (default full)")
    parser.add_argument("--steps", type=int, help="of each run (default: the size's)")
    parser.add_argument("--only", help="optimizers besides adamw, separated by commas")
    flags = parser.parse_args(argv)
    size = SIZES[flags.size]
    size = replace(size, steps=flags.steps or size.steps)
    text = corpus.load(None, size.shape.context)
    trainer = Trainer(size, text, time.perf_counter() + 60 * flags.minutes)
    wanted = list(GRIDS) if flags.only is None else ["adamw", *flags.only.split(",")]
    count = sum([p.numel() for p in GPT(size.shape).parameters()])
    each = size.batch * size.shape.context
    print(f"A GPT of {count:,} parameters, {size.steps} steps of {each} bytes.", flush=True)
    rows, reference, best = [], list[Curve](), 0.0
    try:
        for name in dict.fromkeys(wanted):
            what, make, rates = GRIDS[name]
            tried: dict[float, Curve] = {}
            for lr in rates:
                tried[lr] = trainer.train(make, lr, best, 0)
                print(f"{name} lr={lr:g}: {tried[lr].last:.4f}", flush=True)
            rate = min(tried, key=lambda lr: tried[lr].last)
            curves = [tried[rate]]
            for seed in range(1, flags.seeds):
                curves.append(trainer.train(make, rate, best, seed))
                print(f"{name} lr={rate:g}, seed {seed}: {curves[-1].last:.4f}", flush=True)
            if name == "adamw":
                reference, best = curves, rate
            rows.append(line(what, rate, curves, reference, size.steps))
            print("\n".join([HEAD, *rows]), flush=True)
    except OutOfTime:
        print(f"The {flags.minutes:g} minutes are over; above is what was done.")


if __name__ == "__main__":
    main()
