"""Matrix optimizers: ours compared with torch's parts, and how much the times of steps vary."""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch
from pairs import FEWEST, Step, timed
from recipes import CYCLE, Recipe, matrix_soap, spread_soap
from rows import Effort, Measured, Row
from steps import Build, of, ours, row
from torch import Tensor
from workloads import EXPERTS, GPT, KERNELS, SQUARES, WIDE, Workload

import functional_optim as fo
from functional_optim import adapters

EVEN = 3.0
"""The longest step may take this many times the median one, where renewals are spread."""


def named(params: list[Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors of the GPT with names: two embeddings, then those of the layers."""
    names = ["wte.weight", "wpe.weight", *[f"h.{i}.weight" for i in range(len(params) - 2)]]
    return list(zip(names, params, strict=True))


def muon_adamw(params: list[Tensor]) -> Step:
    """Our object for both."""
    return adapters.MuonAdamW(named(params)).step


def side_by_side(params: list[Tensor]) -> Step:
    """torch's Muon for the matrices of the layers, and its fused AdamW for the rest."""
    hidden = [p for name, p in named(params) if p.dim() == 2 and name.startswith("h.")]
    rest = [p for p in params if not any(p is x for x in hidden)]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.01)
    adamw = torch.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def evenness(workload: Workload, spread: Recipe, together: Recipe, effort: Effort) -> Measured:
    """The longest step over the median one, of SOAP with spread renewals and without.

    Of each step of a cycle the least time counts, so that both are those of a quiet machine.
    """
    builds = of(spread), of(together)
    sides = [x(workload.parameters(quick=effort.quick, matrices=True)) for x in builds]
    least = [[math.inf] * CYCLE for _ in sides]

    def cycle() -> None:
        for times, step in zip(least, sides, strict=True):
            times[:] = [min(x, timed(step)) for x in times]

    cycle()  # which compiles
    for _ in range(effort.repeats or max(FEWEST, int(effort.seconds / timed(cycle)))):
        cycle()
    ours, theirs = ([max(x) / statistics.median(x)] for x in least)
    return Measured(ours, theirs, "all in one step")


def stacked(name: str) -> Build:
    """One of our optimizer objects on all matrices as one stack."""

    def build(params: list[Tensor]) -> Step:
        stack = torch.nn.Parameter(torch.stack([p.detach() for p in params]))
        stack.grad = torch.stack([p.grad for p in params if p.grad is not None])
        views = {"experts": {"stack": True}}
        return getattr(adapters, name)([("experts", stack)], views=views).step

    return build


def flat(name: str) -> dict[str, Build]:
    """One of our optimizer objects on the same kernels as parameters of two dimensions."""

    def build(params: list[Tensor]) -> Step:
        matrices = [torch.nn.Parameter(p.detach().flatten(1)) for p in params]
        for matrix, p in zip(matrices, params, strict=True):
            matrix.grad = None if p.grad is None else p.grad.flatten(1)
        return getattr(adapters, name)(matrices).step

    return {"as matrices": build}


def rows() -> list[Row]:
    """Muon with AdamW on the GPT, the longest step of SOAP, stacks compared with single parameters,
    kernels compared with flattened matrices, and Dion2 compared with Muon."""
    rivals = {"torch: Muon, and AdamW fused": side_by_side}
    even = partial(evenness, SQUARES, spread_soap, matrix_soap)
    what = "Longest step of `soap` over its median step, renewals spread"
    words = f"{SQUARES.words}, its matrices"
    return [
        row("muon_adamw", "Muon and AdamW", GPT, muon_adamw, rivals, (0.6,)),
        Row("soap-even-squares", what, words, even, (EVEN,), judged="ours", unit="median steps"),
        *[
            row(
                f"stack-{name.lower()}",
                f"`{name}` on a stack",
                EXPERTS,
                stacked(name),
                {"single": ours(name)},
                (0.7,),
            )
            for name in ("NorMuon", "SOAP")
        ],
        *[
            row(f"kernels-{name.lower()}", f"`{name}` on kernels", KERNELS, ours(name), flat(name))
            for name in ("NorMuon", "SOAP", "Shampoo")
        ],
        *[
            row(name.lower(), f"`{name}`", WIDE, ours(name), {"our Muon": ours("Muon")})
            for name in ("SOAP", "Shampoo")
        ],
        row("dion2", "`dion2`", SQUARES, of(fo.dion2), {"our Muon": ours("Muon")}),
    ]
