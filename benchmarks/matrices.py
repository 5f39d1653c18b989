"""Optimizers of matrices: ours beside torch's parts, and how even their steps are."""

from __future__ import annotations

from functools import partial

import torch
from pairs import Step
from rows import Row
from steps import evenness, of, ours, row
from torch import Tensor
from workloads import GPT, SQUARES

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


def soap(lr: float = 1e-3, *, spread: bool = False) -> fo.GradientTransformation:
    """SOAP whose bases are renewed every ten steps: all in one of them, or some in each."""
    refresh = "spread" if spread else "together"
    return getattr(fo, "soap")(lr, precondition_frequency=10, refresh=refresh)  # noqa: B009


def rows() -> list[Row]:
    """Muon with AdamW on the GPT, of SOAP the longest step, and Dion2 beside Muon."""
    rivals = {"torch: Muon, and AdamW fused": side_by_side}
    found = [row("muon_adamw", "Muon and AdamW", GPT, muon_adamw, rivals, (0.6,))]
    if hasattr(fo, "soap"):
        even = partial(evenness, SQUARES, partial(soap, spread=True), soap)
        what = "Longest step of `soap` over its median step, renewals spread"
        words = f"{SQUARES.words}, its matrices"
        found.append(
            Row("soap-even-squares", what, words, even, (EVEN,), judged="ours", unit="median steps")
        )
    if hasattr(fo, "dion2"):
        made = of(getattr(fo, "dion2"))  # noqa: B009
        found.append(row("dion2", "`dion2`", SQUARES, made, {"our Muon": ours("Muon")}))
    return found
