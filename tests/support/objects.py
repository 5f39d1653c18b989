"""The optimizer objects that the contract tests go through, each beside torch's own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import as_parameters, assert_close, copy_of, make_grads, make_params

import functional_optim as fo
from functional_optim import adapters


class Pair(NamedTuple):
    """ours(params, **hyper) and theirs(params, **hyper) mean the same.

    keeps: what both have for each parameter, "slot" and "step" or less.
    """

    name: str
    ours: Callable[..., Any]
    theirs: Any
    hyper: dict[str, Any]
    keeps: frozenset[str]

    def make(self, params: Any = None, **changed: Any) -> tuple[Any, list[Any], Any, list[Any]]:
        """Both optimizers over equal parameters: ours, its parameters, torch's, its parameters."""
        params = make_params() if params is None else params
        mine, other = as_parameters(params), as_parameters(params)
        hyper = {**self.hyper, **changed}
        # a tensor lr is changed in place by schedulers, so each gets its own
        own, also = ({k: _copied(v) for k, v in hyper.items()} for _ in range(2))
        return self.ours(mine, **own), mine, self.theirs(other, **also), other


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def eager(cls: Any) -> Callable[..., Any]:
    return lambda params, **hyper: cls(params, compile=False, **hyper)


def general(recipe: Any) -> Callable[..., Any]:
    return lambda params, **hyper: adapters.Optimizer(params, recipe, compile=False, **hyper)


SLOT, BOTH = frozenset({"slot"}), frozenset({"slot", "step"})
DAMPED = {"lr": 0.05, "momentum": 0.9, "dampening": 0.4}
ADAM = {"lr": 0.05, "weight_decay": 0.1}

DROP_INS = [
    Pair("SGD", eager(adapters.SGD), torch.optim.SGD, {"lr": 0.05}, frozenset()),
    Pair("SGD-momentum", eager(adapters.SGD), torch.optim.SGD, DAMPED, SLOT),
    Pair("Adam", eager(adapters.Adam), torch.optim.Adam, {**ADAM, "amsgrad": True}, BOTH),
    Pair("AdamW", eager(adapters.AdamW), torch.optim.AdamW, ADAM, BOTH),
]
GENERAL = [
    Pair("general-sgd", general(fo.sgd), torch.optim.SGD, DAMPED, SLOT),
    Pair("general-adamw", general(fo.adamw), torch.optim.AdamW, ADAM, BOTH),
]


def parameters(pairs: list[Pair]) -> list[Any]:
    return [pytest.param(pair, id=pair.name) for pair in pairs]


every_pair = pytest.mark.parametrize("pair", parameters(DROP_INS + GENERAL))
every_drop_in = pytest.mark.parametrize("pair", parameters(DROP_INS))


# ---------------------------------------------------------------- edits from outside
EDITS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "slot zeroed": lambda opt, p: _slot(opt, p[1]).zero_(),
    "slot replaced": lambda opt, p: opt.state[p[1]].update({_key(opt, p[1]): p[1].detach() * 0.1}),
    "slot.data replaced": lambda opt, p: _set_data(_slot(opt, p[1]), p[1].detach() * 0.1),
    "slot.data transposed": lambda opt, p: _set_data(_slot(opt, p[0]), _slot(opt, p[0]).t()),
    "slot removed": lambda opt, p: opt.state.pop(p[1]),
    "slot emptied": lambda opt, p: opt.state[p[1]].clear(),
    "step filled": lambda opt, p: opt.state[p[1]]["step"].fill_(50.0),
    "step replaced": lambda opt, p: opt.state[p[1]].update(step=torch.tensor(50.0)),
    "state cleared": lambda opt, p: opt.state.clear(),
    "parameter filled": lambda opt, p: p[1].data.fill_(0.5),
    "parameter.data replaced": lambda opt, p: _set_data(p[1], torch.ones_like(p[1])),
    "parameter.data transposed": lambda opt, p: _set_data(p[0], p[0].data.t()),
    "parameters reversed": lambda opt, p: opt.param_groups[0]["params"].reverse(),
    "parameters fewer": lambda opt, p: opt.param_groups[0]["params"].pop(),
}
"""What others do to an optimizer between two steps; p[0] is square. The first word of a name says
what the optimizer must keep."""


def edits(pairs: list[Pair]) -> list[Any]:
    """The pairs with the edits that they can have."""
    return [
        pytest.param(pair, edit, id=f"{pair.name}-{name}")
        for pair in pairs
        for name, edit in EDITS.items()
        if pair.keeps >= BOTH & {name.split()[0].removesuffix(".data")}
    ]


def _key(opt: Any, p: Any) -> str:
    return next(key for key in opt.state[p] if key != "step")


def _slot(opt: Any, p: Any) -> torch.Tensor:
    return opt.state[p][_key(opt, p)]


def _set_data(x: torch.Tensor, data: torch.Tensor) -> None:
    x.data = data


def check_edit(pair: Pair, edit: Callable[[Any, list[Any]], None], tolerance: float) -> None:
    """An edit has the effect that it has on torch's optimizer."""
    torch.manual_seed(0)
    shapes = {"a": (3, 3), "b": (4,), "c": (2, 3)}
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    ours, mine, theirs, other = pair.make(params)
    grads = make_grads(params, 6)
    for opt, known in ((ours, mine), (theirs, other)):
        for i, g in enumerate(grads):
            if i == 3:
                edit(opt, known)
            for p, x in zip(known, g.values(), strict=True):
                p.grad = x.clone()
            opt.step()
    assert_close(copy_of(mine), copy_of(other), tolerance)
