"""Recipes that are measured in more than one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import functional_optim as fo

Recipe = Callable[..., fo.GradientTransformation]


def averaged(lr: float = 1e-3) -> fo.GradientTransformation:
    """The composed recipe: clip, AdamW, average."""
    return fo.chain(fo.clip_by_global_norm(1.0, eps=1e-6), fo.adamw(lr), fo.params_ema(0.999))


def lamb(lr: float = 1e-3) -> fo.GradientTransformation:
    """LAMB: AdamW whose steps have the size of their parameters."""
    adapted = fo.scale_by_adam(), fo.add_decayed_weights(1e-2), fo.scale_by_trust_ratio()
    return fo.chain(*adapted, fo.scale_by_lr(lr))


def cautious(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW that moves only where update and gradient agree."""
    direction = fo.cautious(fo.scale_by_adam())
    return fo.chain(direction, fo.add_decayed_weights(1e-2), fo.scale_by_lr(lr))


def block_clipped(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW whose updates have a bounded root mean square."""
    return fo.chain(
        fo.scale_by_adam(),
        fo.clip_by_block_rms(1.0),
        fo.add_decayed_weights(1e-2),
        fo.scale_by_lr(lr),
    )


def unit_clipped(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW behind adaptive clipping of the gradient's rows."""
    return fo.chain(fo.adaptive_grad_clip(0.1), fo.adamw(lr))


def centred(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW behind gradients whose rows have the mean 0."""
    return fo.chain(fo.centralize(), fo.adamw(lr))


def plain_norm(lr: float = 1e-3) -> fo.GradientTransformation:
    """A rule that a user writes: each update has the norm 1."""

    def unit(u: Any, slots: Any, p: Any) -> Any:
        return u / (u.norm() + 1e-6), slots

    return fo.chain(fo.scale_by_adam(), fo.leafwise(None, unit, name="unit"), fo.scale_by_lr(lr))


def int8(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW with slots of a byte."""
    return fo.stored(fo.adamw(lr), "int8")


def matrix_soap(lr: float = 1e-3) -> fo.GradientTransformation:
    """SOAP with decoupled decay, whose bases are renewed every ten steps."""
    return fo.soap(lr, precondition_frequency=CYCLE)


def spread_soap(lr: float = 1e-3) -> fo.GradientTransformation:
    """The same, with a tenth of the bases renewed in each step."""
    return fo.soap(lr, precondition_frequency=CYCLE, refresh="spread")


CYCLE = 10
"""Steps of SOAP from one renewal of a basis to the next."""


MEASURING: dict[str, tuple[str, Recipe]] = {
    "lamb": ("LAMB", lamb),
    "cautious": ("Cautious AdamW", cautious),
    "block": ("AdamW, clipped by block RMS", block_clipped),
    "agc": ("AdamW, rows clipped adaptively", unit_clipped),
    "centralized": ("AdamW of centralised gradients", centred),
    "lars": ("LARS", lambda lr=1e-3: fo.lars(lr)),
    "stable": ("StableAdamW", fo.stable_adamw),
    "came": ("CAME", fo.came),
    "sm3": ("SM3", fo.sm3),
    "unit": ("Adam divided by its norm, plainly", plain_norm),
}
"""Recipes whose rules measure each tensor, or its rows."""

MATRIX: dict[str, tuple[str, Recipe]] = {"muon": ("Muon", fo.muon), "soap": ("SOAP", matrix_soap)}
"""Recipes for matrices alone."""

FIRST: dict[str, tuple[str, Recipe]] = {
    "sgd": ("SGD", lambda lr=1e-3: fo.sgd(lr, momentum=0.9)),
    "composed": ("clip, AdamW, average", averaged),
    "lion": ("Lion", fo.lion),
    "lamb": ("LAMB", lamb),
    "adafactor": ("Adafactor", fo.adafactor),
    "muon_adamw": ("MuonAdamW", lambda lr=1e-3: fo.muon_adamw(lr)),
    "int8": ("AdamW, slots in int8", int8),
}
"""Recipes whose first step is measured, one of each kind."""

WHOLE: dict[str, tuple[str, Recipe]] = {
    **MEASURING,
    "adafactor": ("Adafactor", fo.adafactor),
    **MATRIX,
}
"""All that see whole tensors."""
