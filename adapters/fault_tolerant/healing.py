"""What a peer needs to heal an optimizer, and how it is put in place."""

from __future__ import annotations

from typing import Any

import torch

from functional_optim.adapters.fault_tolerant.rounds import Member
from functional_optim.adapters.state.transaction import transaction
from functional_optim.checkpoint.precision import restore_precision
from functional_optim.kernels.interrupts import held


def save(member: Member, heal: str) -> dict[str, Any]:
    """Parameters and state, unless heal is "schedules"; the groups' values; the schedulers."""
    schedule = member.schedules.save()
    if heal == "schedules":
        return {"schedule": schedule}
    return {
        "params": [p.detach() for p in member.parameters()],
        "state": member.optim.state_dict()["state"],
        "schedule": schedule,
    }


def load(member: Member, heal: str, saved: dict[str, Any]) -> None:
    """Put in place what a peer has saved, or raise ValueError before anything is changed."""
    schedule = saved["schedule"]
    member.schedules.check(schedule)
    if (heal == "everything") != ("params" in saved):
        raise ValueError(
            f"this replica's optimizer was made with heal=\"{heal}\", but its peer's with "
            "another; pass the same everywhere."
        )
    if heal == "schedules":
        member.schedules.load(schedule, groups=True)
        return
    params = member.parameters()
    mine = [(tuple(p.shape), p.dtype) for p in params]
    theirs = [(tuple(p.shape), p.dtype) for p in saved["params"]]
    if mine != theirs:
        raise ValueError(
            f"a peer's parameters do not fit this replica's: {_difference(mine, theirs)}; build "
            "the same model everywhere."
        )

    def put() -> None:
        _load_state(member.optim, saved["state"], schedule["groups"])
        with torch.no_grad():
            for p, value in zip(params, saved["params"], strict=True):
                p.copy_(value)
        member.schedules.load(schedule, groups=False)

    held(transaction, member.optim, put)


def _difference(mine: list[Any], theirs: list[Any]) -> str:
    if len(mine) != len(theirs):
        return f"it has {len(theirs)} of them, and this one has {len(mine)}"
    i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    (a, b), (c, d) = mine[i], theirs[i]
    return f"its parameter {i} is a {d} of shape {c}, and this one's is a {b} of shape {a}"


def _load_state(optim: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    packed = optim.state_dict()["param_groups"]
    optim.load_state_dict(
        {
            "state": state,
            "param_groups": [
                {**values, "params": mine["params"]}
                for mine, values in zip(packed, groups, strict=True)
            ],
        }
    )
    if optim._optimizer_load_state_dict_pre_hooks:  # they say what the state is to be
        return
    ids = [i for mine in packed for i in mine["params"]]
    params = [p for group in optim.param_groups for p in group["params"]]
    for i, p in zip(ids, params, strict=True):
        if i in state:
            optim.state[p].update(restore_precision(optim.state[p], state[i]))
