"""Rules that cannot be run, or contradict their arguments: refused before anything is changed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, clone
from three_ways import WAYS, step_in
from undeclared import MODELS, ROWS
from undeclared_slots import Momentum, momentum

import functional_optim as fo


class Refusal(NamedTuple):
    """What `fo.leafwise` takes, but for the name, and what the error must say besides that."""

    says: tuple[str, ...]
    arguments: dict[str, Any]


def writes_by_out(u, slots, p):
    torch.mul(u, 2.0, out=u)
    return u, slots


def writes_into_a_view_of_u(u, slots, p):
    u.view(-1)[:1] = 0.0
    return u, slots


def writes_by_foreach(u, slots, p):
    torch._foreach_mul_([u], 2.0)
    return u, slots


def writes_one_of_several_results(u, slots, p):
    torch.sort(2 * u, out=(u, torch.empty(0, dtype=torch.int64)))
    return u, slots


def writes_by_vector_to_parameters(u, slots, p):
    torch.nn.utils.vector_to_parameters(2 * u.flatten(), [u])
    return u, slots


def sets_data(u, slots, p):
    p.data = 0.5 * p.data
    return u, slots


_made: dict[torch.dtype, torch.Tensor] = {}


def keeps_a_tensor_that_it_has_made(u, slots, p):
    if u.dtype not in _made:
        _made[u.dtype] = torch.tensor(0.5)
    return u * _made[u.dtype], slots


SHARED = torch.tensor(0.5)


def closing_over(x: torch.Tensor) -> Callable[..., Any]:
    return lambda u, slots, p: (u * x.sum(), slots)


_generator = np.random.default_rng(0)

RULES: dict[str, dict[str, Callable[..., Any]]] = {
    "in place": {
        "writes_into_u": lambda u, slots, p: (u.mul_(0.5), slots),
        "writes_into_a_view_of_u": writes_into_a_view_of_u,
        "writes_by_out": writes_by_out,
        "writes_into_p": lambda u, slots, p: (p.sub_(0.1 * u), slots),
        "writes_by_foreach": writes_by_foreach,
        "writes_one_of_several_results": writes_one_of_several_results,
        "writes_by_a_function_of_python": lambda u, slots, p: (u.apply_(lambda x: 2 * x), slots),
    },
    r"in place \(data\)": {
        "writes_by_vector_to_parameters": writes_by_vector_to_parameters,
        "sets_data": sets_data,
    },
    "closes over a tensor": {
        "keeps_a_tensor_that_it_has_made": keeps_a_tensor_that_it_has_made,
        "closes_over_a_global": lambda u, slots, p: (u * SHARED, slots),
        "closes_over_one_number": closing_over(torch.tensor(2.0)),
        "closes_over_a_vector": closing_over(torch.linspace(0.0, 1.0, 16)),
        "closes_over_a_parameter": closing_over(torch.nn.Parameter(torch.ones(3))),
    },
    "other numbers": {
        "draws_by_python": lambda u, slots, p: (u * random.choice([0.5, 0.5]), slots),
        "draws_by_a_generator_of_numpy": lambda u, slots, p: (
            u * (_generator.random() / len(u)),
            slots,
        ),
    },
    "random": {
        "draws_rand_like": lambda u, slots, p: (u + torch.rand_like(u), slots),
        "draws_randn": lambda u, slots, p: (u + torch.randn(u.shape, dtype=u.dtype), slots),
        "draws_dropout": lambda u, slots, p: (F.dropout(u, 0.5), slots),
        "draws_a_permutation": lambda u, slots, p: (
            u.flatten()[torch.randperm(u.numel())].view_as(u),
            slots,
        ),
    },
    "reads a value": {
        "reads_item": lambda u, slots, p: (u / max(1.0, u.norm().item()), slots),
        "reads_bool": lambda u, slots, p: (u if u.sum() > 0 else 2 * u, slots),
        "reads_float": lambda u, slots, p: (u * float(p.sum()), slots),
        "reads_list": lambda u, slots, p: (u * sum(u.flatten().tolist()), slots),
        "reads_equality": lambda u, slots, p: (2 * u if torch.equal(u, p) else u, slots),
    },
}


def writes_into_a_slot(u, slots, p):
    slots.exp_avg.lerp_(u, 0.1)
    return slots.exp_avg, Momentum(slots.exp_avg)


def reads_while_reducing(u, slots, p):
    return (u.sum() if u.abs().sum() > 1e9 else u.norm(),)


def divided(u, slots, p, x):
    return u / x, slots


REFUSED = {
    **{
        name: Refusal((says,), {"update": update})
        for says, every in RULES.items()
        for name, update in every.items()
    },
    "writes_into_a_slot": Refusal(("in place",), {"init": momentum, "update": writes_into_a_slot}),
    "reads_in_reduce": Refusal(
        ("reads a value",), {"update": divided, "reduce": reads_while_reducing}
    ),
    "reads_in_its_second_variant": Refusal(
        ("reads a value",),
        {
            "update": (lambda u, slots, p: (u, slots), RULES["reads a value"]["reads_bool"]),
            "runs": fo.Runs(choose=lambda t: 1),
        },
    ),
    "adds_comparisons_of_numbers": Refusal(
        ("adds two comparisons",),
        {
            "update": lambda u, slots, p, a: (u * ((a > 0.5) + (a > 0.9)), slots),
            "scalars": lambda t: (0.95,),
        },
    ),
}


CONTRADICTED = {
    f"batched_{name}": Refusal(
        ("batched", word), {"update": ROWS[name].parts[0].update, "runs": fo.Runs(batched=True)}
    )
    for name, word in {"row_trust_ratio": r"\bp\b", "unit_norm": "norm", "centred": "mean"}.items()
}
"""Rules whose arguments say what their operations deny."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*REFUSED, *CONTRADICTED])
def test_a_rule_that_cannot_be_run_is_refused_before_anything_is_changed(name, way):
    """The first use raises a sentence that has all it must say, and an advice."""
    refusal = REFUSED.get(name) or CONTRADICTED[name]
    tx = fo.leafwise(**{"init": None, **refusal.arguments}, name=name)
    for model in ("together", "scalar", "matrix", "bfloat16") if name in REFUSED else ("matrix",):
        held = MODELS[model].params(), MODELS[model].grads()[0]
        before, drawn = clone(held), torch.get_rng_state()
        with pytest.raises(ValueError, match=r"; \w+") as error:
            step_in(way, lambda: tx, *held)
        for part in (name, *refusal.says):
            assert re.search(part, str(error.value)), part
        assert_same(held, before)
        assert torch.equal(torch.get_rng_state(), drawn), "numbers were drawn"
