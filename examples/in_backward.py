"""Steps inside the backward pass: a gradient is used, and dropped, as soon as it is there.

    python examples/in_backward.py

One optimizer object for each parameter, called by torch's hook: one gradient at a time is alive.
The price: no global norm, which needs all of them, and no accumulation over batches.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functional_optim.adapters import AdamW

LAYERS, WIDTH, BATCH = 16, 256, 8


def model_of(layers: int, width: int) -> nn.Module:
    """Layers of one width."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Something to train on."""
    return (model(x) - x).square().mean()


def usual(model: nn.Module, **options: Any) -> Callable[[Tensor], None]:
    """A train step as everybody writes it."""
    opt = AdamW(model.parameters(), **options)

    def step(x: Tensor) -> None:
        loss_of(model, x).backward()
        opt.step()
        opt.zero_grad()

    return step


def in_backward(model: nn.Module, **options: Any) -> Callable[[Tensor], None]:
    """A train step whose backward pass steps the parameters."""
    own: dict[Tensor, AdamW] = {p: AdamW([p], **options) for p in model.parameters()}

    def use(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(use)
    return lambda x: loss_of(model, x).backward()


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that were allocated during a call, above those at its start.

    From the allocator's own events, which the profiler collects: on the CPU, the same at each call.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler says when it begins
    profile: Any = torch.autograd.profiler.profile(profile_memory=True)  # torch declares too little
    with profile:
        run()
    events = sorted(profile.kineto_results.events(), key=lambda e: e.start_ns())
    return max(0, *itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


def compare(layers: int, width: int, **options: Any) -> dict[str, int]:
    """The peak of each kind of step, and the bytes of all gradients."""
    x, sizes = torch.randn(BATCH, width), {}
    for name, make in {"usual": usual, "in backward": in_backward}.items():
        model = model_of(layers, width)
        step = make(model, **options)
        step(x)  # the state is made, and kernels are compiled
        sizes[name] = peak(lambda step=step: step(x))
        sizes["gradients"] = sum([p.nbytes for p in model.parameters()])
    return sizes


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description="Memory of steps inside the backward pass.")
    parser.add_argument("--quick", action="store_true", help="fewer layers")
    quick = parser.parse_args(argv).quick
    sizes = compare(8 if quick else LAYERS, WIDTH)
    for name in ("usual", "in backward"):
        bar = "█" * round(40 * sizes[name] / sizes["usual"])
        print(f"{name:12} {sizes[name] / 1e6:6.2f} MB  {bar}")
    saved = (sizes["usual"] - sizes["in backward"]) / sizes["gradients"]
    print(f"Saved: {saved:.0%} of the {sizes['gradients'] / 1e6:.2f} MB that all gradients take.")


if __name__ == "__main__":
    main()
