"""What a step costs: ours against torch.optim on the same tensors, A B A B … in one process.

    make bench
    make bench ARGS="--only gpt --repeats 100"

Prints the minimum and the median of each, and their ratios. The minima decide: on a busy machine
medians swing by tens of percent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters

Shapes = list[tuple[int, ...]]


def gpt_shapes(layers: int = 12, d: int = 256, vocabulary: int = 8000) -> Shapes:
    """The 148 tensors of a GPT with biases; 11.6 million parameters."""
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(vocabulary, d), (256, d), *(block * layers), (d,), (d,)]


WORKLOADS: dict[str, tuple[Shapes, int]] = {
    "mlp, 6 tensors": ([(64, 32), (64,), (64, 64), (64,), (10, 64), (10,)], 2000),
    "gpt, 148 tensors": (gpt_shapes(), 40),
    "148 tensors of 8": ([(8,)] * 148, 300),
    "12 tensors of 2048²": ([(2048, 2048)] * 12, 8),
}
"""Shapes, and how often each side is timed."""


def parameters(shapes: Shapes) -> list[Tensor]:
    """Parameters with gradients, the same at every call."""
    torch.manual_seed(0)
    params: list[Tensor] = [torch.nn.Parameter(0.02 * torch.randn(s)) for s in shapes]
    for p in params:
        p.grad = 0.01 * torch.randn(p.shape)
    return params


def recipe(lr: float = 1e-3) -> fo.GradientTransformation:
    """The composed recipe: clip, AdamW, average."""
    return fo.chain(fo.clip_by_global_norm(1.0, eps=1e-6), fo.adamw(lr), fo.params_ema(0.999))


def composed_torch(params: list[Tensor]) -> Callable[[], Any]:
    """The same from torch's parts: clip_grad_norm_, fused AdamW, a foreach lerp."""
    opt = torch.optim.AdamW(params, fused=True)
    average = [p.detach().clone() for p in params]
    lerp = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        lerp(average, params, None)

    return step


def functional_step(params: list[Tensor]) -> Callable[[], Any]:
    """`fo.compile`'s step over the same tensors."""
    tx = fo.adamw()
    step = fo.compile(tx)
    grads = [p.grad for p in params]
    tensors = [p.detach() for p in params]
    state = tx.init(tensors)
    return lambda: step(grads, state, tensors)


def changing_lr(params: list[Tensor]) -> Callable[[], Any]:
    """The adapter's step while a scheduler writes a new lr every time."""
    opt = adapters.AdamW(params)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        opt.param_groups[0]["lr"] = 1e-3 / (1 + count)
        opt.step()

    return step


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW / fused": (
        lambda p: adapters.AdamW(p).step,
        lambda p: torch.optim.AdamW(p, fused=True).step,
    ),
    "AdamW, lr changing / fused": (
        changing_lr,
        lambda p: torch.optim.AdamW(p, fused=True).step,
    ),
    "functional adamw / fused": (
        functional_step,
        lambda p: torch.optim.AdamW(p, fused=True).step,
    ),
    "SGD with momentum / fused": (
        lambda p: adapters.SGD(p, momentum=0.9).step,
        lambda p: torch.optim.SGD(p, momentum=0.9, fused=True).step,
    ),
    "clip + AdamW + average / torch's": (
        lambda p: adapters.Optimizer(p, recipe).step,
        composed_torch,
    ),
    "NAdam / foreach": (
        lambda p: adapters.NAdam(p).step,
        lambda p: torch.optim.NAdam(p, foreach=True).step,
    ),
    "AdamW eager / for-loop": (
        lambda p: adapters.AdamW(p, compile=False).step,
        lambda p: torch.optim.AdamW(p, foreach=False).step,
    ),
}
"""Ours and theirs, each a function from parameters to a step."""


def timed(step: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Time every pair on every workload, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=0, help="timed calls of each side")
    flags = parser.parse_args()
    table = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for column in ("workload", "ours / theirs", "ours µs", "theirs µs", "minima", "medians"):
        table.add_column(column, justify="left" if "µ" not in column else "right")
    for workload, (shapes, repeats) in WORKLOADS.items():
        if flags.only not in workload:
            continue
        for name, (ours, theirs) in PAIRS.items():
            a, b = ours(parameters(shapes)), theirs(parameters(shapes))
            for _ in range(3):
                a()
                b()
            pairs = [(timed(a), timed(b)) for _ in range(flags.repeats or repeats)]
            mine, other = [x for x, _ in pairs], [y for _, y in pairs]
            table.add_row(
                workload,
                name,
                f"{min(mine) * 1e6:.1f}",
                f"{min(other) * 1e6:.1f}",
                f"{min(mine) / min(other):.2f}",
                f"{statistics.median(mine) / statistics.median(other):.2f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
