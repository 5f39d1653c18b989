"""Rules that are refused: those that cannot be run, and those that contradict their arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from undeclared_numbers import centred, row_trust_ratio, unit_norm
from undeclared_slots import momentum

import functional_optim as fo


class Refusal(NamedTuple):
    """A rule that cannot be run, and what the error must say besides its name."""

    name: str
    arguments: Callable[[], dict[str, Any]]
    """Of `fo.leafwise`, but for the name."""
    says: tuple[str, ...]

    def tx(self) -> Any:
        """The transformation."""
        return fo.leafwise(**self.arguments(), name=self.name)


REFUSED: dict[str, Refusal] = {}


def refused(says: str, *more: str, **arguments: Any) -> Callable[[Callable[..., Any]], None]:
    """Add a rule that is refused, under the name of its `update`."""

    def added(update: Callable[..., Any]) -> None:
        given = {"init": None, "update": update, **arguments}
        REFUSED[update.__name__] = Refusal(update.__name__, lambda: given, (says, *more))

    return added


@refused("in place")
def writes_into_u(u, slots, p):
    return u.mul_(0.5), slots


@refused("in place")
def writes_into_a_view_of_u(u, slots, p):
    u.view(-1)[:1] = 0.0
    return u, slots


@refused("in place")
def writes_by_out(u, slots, p):
    torch.mul(u, 2.0, out=u)
    return u, slots


@refused("in place")
def writes_into_p(u, slots, p):
    p.sub_(0.1 * u)
    return u, slots


@refused("in place", init=momentum)
def writes_into_a_slot(u, slots, p):
    slots.exp_avg.lerp_(u, 0.1)
    return slots.exp_avg, slots


@refused("in place")
def writes_by_foreach(u, slots, p):
    torch._foreach_mul_([u], 2.0)
    return u, slots


@refused("in place")
def writes_one_of_several_results(u, slots, p):
    torch.sort(2 * u, out=(u, torch.empty(0, dtype=torch.int64)))
    return u, slots


@refused("in place")
def writes_by_a_function_of_python(u, slots, p):
    return u.apply_(lambda x: 2 * x), slots


@refused(r"in place \(data\)")
def writes_by_vector_to_parameters(u, slots, p):
    torch.nn.utils.vector_to_parameters(2 * u.flatten(), [u])
    return u, slots


@refused(r"in place \(data\)")
def sets_data(u, slots, p):
    p.data = 0.5 * p.data
    return u, slots


_made: dict[torch.dtype, Tensor] = {}


@refused("closes over a tensor")
def keeps_a_tensor_that_it_has_made(u, slots, p):
    if u.dtype not in _made:
        _made[u.dtype] = torch.tensor(0.5)
    return u * _made[u.dtype], slots


@refused("other numbers")
def draws_by_python(u, slots, p):
    return u * random.choice([0.5, 0.5]), slots


_generator = np.random.default_rng(0)


@refused("other numbers")
def draws_by_a_generator_of_numpy(u, slots, p):
    return u * (_generator.random() / len(u)), slots


@refused("adds two comparisons", scalars=lambda t: (0.95,))
def adds_comparisons_of_numbers(u, slots, p, a):
    return u * ((a > 0.5) + (a > 0.9)), slots


@refused("reads a value")
def reads_item(u, slots, p):
    return u / max(1.0, u.norm().item()), slots


@refused("reads a value")
def reads_bool(u, slots, p):
    return (u if u.sum() > 0 else 2 * u), slots


@refused("reads a value")
def reads_float(u, slots, p):
    return u * float(p.sum()), slots


@refused("reads a value")
def reads_list(u, slots, p):
    return u * sum(u.flatten().tolist()), slots


@refused("reads a value")
def reads_equality(u, slots, p):
    return (2 * u if torch.equal(u, p) else u), slots


def reads_while_reducing(u, slots, p):
    return (u.sum() if u.abs().sum() > 1e9 else u.norm(),)


@refused("reads a value", reduce=reads_while_reducing)
def reads_in_reduce(u, slots, p, total):
    return u / total, slots


@refused("random")
def draws_rand_like(u, slots, p):
    return u + torch.rand_like(u), slots


@refused("random")
def draws_randn(u, slots, p):
    return u + torch.randn(u.shape, dtype=u.dtype, device=u.device), slots


@refused("random")
def draws_dropout(u, slots, p):
    return F.dropout(u, 0.5), slots


@refused("random")
def draws_a_permutation(u, slots, p):
    return u.flatten()[torch.randperm(u.numel(), device=u.device)].view_as(u), slots


def reads_in_its_second_variant(u, slots, p):
    return (u if u.sum() > 0 else 2 * u), slots


REFUSED["reads_in_its_second_variant"] = Refusal(
    "reads_in_its_second_variant",
    lambda: {
        "init": None,
        "update": (lambda u, slots, p: (u, slots), reads_in_its_second_variant),
        "choose": lambda t: 1,
    },
    ("reads a value",),
)


SHARED = torch.tensor(0.5)


@refused("closes over a tensor")
def closes_over_a_global(u, slots, p):
    return u * SHARED, slots


def closing_over(name: str, tensor: Tensor) -> None:
    """Add a rule that closes over a tensor."""

    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u * tensor.sum(), slots

    given = {"init": None, "update": update}
    REFUSED[name] = Refusal(name, lambda: given, ("closes over a tensor",))


closing_over("closes_over_one_number", torch.tensor(2.0))
closing_over("closes_over_a_vector", torch.linspace(0.0, 1.0, 16))
closing_over("closes_over_a_parameter", torch.nn.Parameter(torch.ones(3)))


# --- rules that contradict their arguments


CONTRADICTED: dict[str, Refusal] = {
    "batched_with_p": Refusal(
        "batched_with_p",
        lambda: {
            "init": None,
            "update": row_trust_ratio.update,
            "runs": fo.Runs(batched=True),
        },
        ("batched", r"\bp\b"),
    ),
    "batched_norm_of_all": Refusal(
        "batched_norm_of_all",
        lambda: {
            "init": None,
            "update": unit_norm.update,
            "runs": fo.Runs(batched=True),
        },
        ("batched", "norm"),
    ),
    "batched_mean_of_all": Refusal(
        "batched_mean_of_all",
        lambda: {"init": None, "update": centred.update, "runs": fo.Runs(batched=True)},
        ("batched", "mean"),
    ),
}
"""Rules whose arguments say what their operations deny."""
