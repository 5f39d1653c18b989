"""Matrices that several processes share, stepped by each of them or by their owners."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import processes
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.transforms import orthogonal

SHAPES = {"a": (6, 4), "b": (6, 4), "c": (5, 3), "d": (3, 7), "bias": (5,), "e": (6, 4)}
"""No number of processes divides all of these."""
PLACED = ("plain", "rows", "columns", "replicated")
OWNERS = ("each", "spread")
WAYS = ("update", "compile", "object", "eager")
STEPS = 3


class SquareSlots(NamedTuple):
    left: Tensor
    total: Tensor


def accumulating() -> Any:
    """A rule of matrices with a slot of its own shape, and one like the parameter."""

    def init(p: Tensor) -> SquareSlots:
        like = {"dtype": p.dtype, "device": p.device}
        return SquareSlots(torch.zeros(p.shape[0], p.shape[0], **like), torch.zeros_like(p))

    def update(u: Tensor, x: SquareSlots, p: Any) -> tuple[Tensor, SquareSlots]:
        left, total = x.left + u @ u.mT, x.total + u
        return left @ total, SquareSlots(left, total)

    return fo.leafwise(init, update, runs=fo.Runs(batched=True), name="accumulating")


def recipe(owners: str | None = None, lr: float = 0.1) -> Any:
    """Muon, a rule with slots, the same on parts of a matrix, and a rule of other tensors."""
    muon = fo.scale_by_muon(ns_dtype=torch.float64)
    parts = {
        "muon": fo.chain(muon, fo.add_decayed_weights(0.1), fo.scale_by_lr(lr)),
        "own": fo.chain(accumulating(), fo.scale_by_lr(lr)),
        "seen": fo.chain(fo.as_matrix(accumulating(), split=(4, 2)), fo.scale_by_lr(lr)),
        "rest": fo.adam(lr),
    }
    labels = {"bias": "rest", "c": "own", "d": "own", "e": "seen", "*": "muon"}
    tx = fo.partition(parts, labels)
    return tx if owners is None else fo.matrix_owners(tx, owners)


def numbers() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters, and the gradients of each step."""
    torch.manual_seed(0)

    def some() -> dict[str, Tensor]:
        return {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    return some(), [some() for _ in range(STEPS)]


def alone() -> dict[str, Tensor]:
    """What a single process comes to."""
    params, grads = numbers()
    tx = recipe()
    state = tx.init(params)
    for g in grads:
        u, state = tx.update(g, state, params)
        params = fo.apply_updates(params, u)
    return params


def put(placed: str, mesh: Any, x: Tensor) -> Any:
    """A tensor as it is, or divided over the processes."""
    if placed == "plain":
        return x.clone()
    how: dict[str, Any] = {"rows": Shard(0), "columns": Shard(x.dim() - 1)}
    return distribute_tensor(x.clone(), mesh, [how.get(placed, Replicate())])


def run(mesh: Any, placed: str, owners: str, way: str) -> dict[str, Tensor]:
    """The parameters after some steps, whole."""
    start, grads = numbers()
    params = {name: put(placed, mesh, x) for name, x in start.items()}
    if way in ("update", "compile"):
        tx = recipe(owners)
        state = tx.init(params)
        step = fo.compile(tx, strict=True)
        for one in grads:
            g = {name: put(placed, mesh, x) for name, x in one.items()}
            if way == "compile":
                params, state = step(g, state, params)
            else:
                u, state = tx.update(g, state, params)
                params = fo.apply_updates(params, u)
    else:
        params = {name: torch.nn.Parameter(x) for name, x in params.items()}
        how = "strict" if way == "object" else False
        opt = Optimizer(params.items(), partial(recipe, owners), compile=how)
        for one in grads:
            for name, p in params.items():
                p.grad = put(placed, mesh, one[name])
            opt.step()
    return {name: getattr(x, "full_tensor", lambda x=x: x)().detach() for name, x in params.items()}


class Counted(NamedTuple):
    """What a process has done in a step: entries sent by each kind of message, matrices turned."""

    exchanged: int
    gathered: int
    products: int


def counted(mesh: Any, placed: str, owners: str) -> tuple[int, ...]:
    """What a step of 8 matrices of 4 × 8 takes."""
    tx = fo.matrix_owners(fo.orthogonalize(ns_dtype=torch.float64), owners)
    params = [put(placed, mesh, torch.zeros(4, 8, dtype=torch.float64)) for _ in range(8)]
    torch.manual_seed(0)
    grads = [put(placed, mesh, torch.randn(4, 8, dtype=torch.float64)) for _ in range(8)]
    sent = {"exchanged": 0, "gathered": 0}
    turned = []
    gather = "all_gather_single"
    gather = gather if hasattr(dist, gather) else "all_gather_into_tensor"
    real = orthogonal.newton_schulz, dist.all_to_all_single, getattr(dist, gather)

    def newton_schulz(G: Tensor, *rest: Any) -> Tensor:
        turned.append(1 if G.dim() == 2 else len(G))
        return real[0](G, *rest)

    def all_to_all(out: Tensor, given: Tensor, a: Any, b: list[int], group: Any) -> Any:
        sent["exchanged"] += given.numel() - b[dist.get_rank(group)]
        return real[1](out, given, a, b, group=group)

    def all_gather(out: Tensor, given: Tensor, group: Any) -> Any:
        sent["gathered"] += given.numel()
        return real[2](out, given, group=group)

    with (
        mock.patch.object(orthogonal, "newton_schulz", newton_schulz),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, gather, all_gather),
    ):
        fo.compile(tx, strict=True)(grads, tx.init(params), params)
    return tuple(Counted(**sent, products=sum(turned)))


def parts(mesh: Any, folder: str) -> dict[str, Any]:
    """All parts of tests."""
    found: dict[str, Any] = {}
    for placed in PLACED:
        for owners in OWNERS:
            for way in WAYS:
                found[f"owners-{placed}-{owners}-{way}"] = partial(run, mesh, placed, owners, way)
            found[f"counted-{placed}-{owners}"] = partial(counted, mesh, placed, owners)
    return found


def work(rank: int) -> dict[str, Any]:
    """What one process of several does."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return processes.attempt_all(parts(mesh, ""))
