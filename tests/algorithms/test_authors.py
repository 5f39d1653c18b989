"""Fifty steps in float64 go where those of the authors' own packages go.

`reference/make_authors.py` has written down where that is. A row here and one of the same name
there are one comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import waves

import functional_optim as fo

FOUND = json.loads(
    (Path(__file__).parents[1] / "support" / "reference" / "authors.json").read_text()
)["rows"]
ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3}


FREE: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": 0.1}


def rows() -> dict[str, fo.GradientTransformation]:
    return {
        "schedule_free_sgd": fo.schedule_free_sgd(0.2, 0.8, 0.1, warmup_steps=5, r=1.0),
        "schedule_free_adamw": fo.schedule_free_adamw(
            0.05, (0.8, 0.95), weight_decay=0.1, warmup_steps=5
        ),
        "adabelief": fo.adabelief(0.05, **ADAM, weight_decay=0.1),
        "adabelief-plain": fo.adabelief(0.05, **ADAM, weight_decay=0.1, rectify=False),
        "adam_mini": fo.adam_mini(0.05, **ADAM, blocks={"0": "entry", "1": "row", "2": "tensor"}),
        "adan": fo.adan(0.05, (0.9, 0.8, 0.95), 1e-3, 0.1),
        "ademamix": fo.ademamix(0.05, (0.8, 0.95, 0.99), eps=1e-3),
        "adopt": fo.adopt(0.05, **ADAM, weight_decay=0.1),
        "adopt-decoupled": fo.adopt(0.05, **ADAM, weight_decay=0.1, decoupled_weight_decay=True),
        "came": fo.came(0.05, (0.8, 0.95, 0.9), (1e-3, 1e-3), 0.7, 0.1),
        "lion": fo.lion(0.05, (0.8, 0.95), 0.1),
        "madgrad": fo.madgrad(0.05, 0.8, weight_decay=0.1, eps=1e-3),
        "yogi": fo.yogi(0.05, **ADAM, weight_decay=0.1),
        "lamb": fo.lamb(0.05, **ADAM, weight_decay=0.1),
        "lamb-clipped": fo.lamb(
            0.05, **ADAM, weight_decay=0.1, trust_clip=True, max_grad_norm=None
        ),
        "lamb-always": fo.lamb(0.05, **ADAM, weight_decay=0.0, always_adapt=True),
        "lars": fo.lars(1.0, 0.8, weight_decay=0.1, trust_coefficient=0.05),
        "lars-nesterov": fo.lars(1.0, 0.8, weight_decay=0.1, nesterov=True, trust_coefficient=0.05),
        "novograd": fo.novograd(0.05, **ADAM, weight_decay=0.1),
        "stable_adamw": fo.stable_adamw(0.05, **ADAM, weight_decay=0.1),
        "fromage": fo.fromage(0.05),
        "fromage-bounded": fo.fromage(0.05, p_bound=1.05),
        "sm3": fo.sm3(0.1, 0.8),
        "soap": fo.soap(0.05, **ADAM, weight_decay=0.1, precondition_frequency=5),
        "prodigy": fo.prodigy(**FREE, d0=1e-3),
        "prodigy-corrected": fo.prodigy(
            **{**FREE, "d0": 1e-3, "beta3": 0.9, "d_coef": 0.7, "growth_rate": 1.1},
            **{"decouple": False, "use_bias_correction": True, "safeguard_warmup": True, "lr": 0.5},
        ),
        "dadapt_adam": fo.dadapt_adam(**FREE, d0=1e-3),
        "dog": fo.dog(reps_rel=1e-3, weight_decay=0.1),
        "dog-eta": fo.dog(init_eta=0.01),
        "momo": fo.momo(weight_decay=0.1),
        "momo-fstar": fo.momo(lr=0.5, bias_correction=True, use_fstar=True),
        "momo_adam": fo.momo_adam(**FREE, lr=0.5),
        "momo_adam-fstar": fo.momo_adam(**FREE, lr=0.5, use_fstar=True),
        "dadapt_adam-corrected": fo.dadapt_adam(
            **{**FREE, "d0": 1e-3, "growth_rate": 1.1, "decouple": True},
            **{"use_bias_correction": True, "lr": 0.5},
        ),
    }


TOLERANCE: dict[str, float] = {"soap": 1e-5}
"""Where the authors' numbers are rounded to float32 on their way: SOAP's decompositions."""


def followed(tx: fo.GradientTransformation) -> dict[str, Any]:
    """The parameters after the steps that are written down."""
    params = [torch.as_tensor(x) for x in waves.leaves(waves.params())]
    state, found = tx.init(params), {}
    for step in range(1, waves.STEPS + 1):
        value, slopes = waves.downhill(step, [p.numpy() for p in params])
        grads = [torch.as_tensor(g) for g in slopes]
        extra = {"value": value} if "value" in tx.extra else {}
        updates, state = tx.update(grads, state, params, **extra)
        params = fo.apply_updates(params, updates)
        if step in waves.KEPT:
            found[str(step)] = params
    return found


@pytest.mark.parametrize("name", FOUND)
def test_fifty_steps_are_those_of_the_authors(name):
    tolerance = TOLERANCE.get(name, 1e-12)
    for step, params in followed(rows()[name]).items():
        for p, wanted in zip(params, FOUND[name][step], strict=True):
            wanted = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(p, wanted, rtol=tolerance, atol=tolerance)


def test_every_row_of_the_authors_has_one_here():
    assert rows().keys() == FOUND.keys()
