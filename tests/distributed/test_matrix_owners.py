"""Matrices that several processes share: who computes them, and what is sent."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import processes
import pytest
import torch
from helpers import assert_close
from processes import collect
from ranks import needs_gloo, results, whole
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from ways import by_eager_object, by_function, by_object, by_update

import functional_optim as fo
from functional_optim import kernels
from functional_optim.core import sharding
from functional_optim.core.ownership import owners_of
from functional_optim.transforms import orthogonal

pytestmark = needs_gloo

SHAPES = {"a": (6, 4), "b": (6, 4), "c": (5, 3), "d": (3, 7), "bias": (5,), "e": (6, 4)}
SHAPES |= {"experts": (5, 4, 3), "kernel": (5, 3, 2, 3), "image": (5, 3, 2, 2)}
"""No number of processes divides all of these."""
PLACED = ("plain", "rows", "columns", "replicated")
OWNERS = ("each", "spread")
ODD = ("without kernels", "transposed", "negated")
WAYS: dict[str, Callable[..., Any]] = {
    "update": by_update,
    "compile": partial(by_function, strict=True),
    "object": partial(by_object, compile="strict"),
    "eager": by_eager_object,
}
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
    """Muon, a rule with slots, the same on parts of a matrix, SOAP of a stack and of a kernel, and
    a rule of other tensors."""
    muon = fo.scale_by_muon(ns_dtype=torch.float64)
    parts = {
        "muon": fo.chain(muon, fo.add_decayed_weights(0.1), fo.scale_by_lr(lr)),
        "own": fo.chain(accumulating(), fo.scale_by_lr(lr)),
        "seen": fo.chain(fo.as_matrix(accumulating(), split=(4, 2)), fo.scale_by_lr(lr)),
        "stack": fo.as_matrix(fo.soap(lr, precondition_frequency=2), stack=True),
        "image": fo.soap(lr, precondition_frequency=2),
        "rest": fo.adam(lr),
    }
    labels = {"bias": "rest", "c": "own", "d": "own", "e": "seen", "experts": "stack"}
    labels |= {"image": "image", "*": "muon"}
    tx = fo.partition(parts, labels)
    return tx if owners is None else fo.matrix_owners(tx, owners)


def numbers() -> list[dict[str, Tensor]]:
    """Parameters, and the gradients of each step."""
    torch.manual_seed(0)
    return [
        {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for _ in range(1 + STEPS)
    ]


def alone() -> dict[str, Tensor]:
    """What a single process comes to."""
    params, *grads = numbers()
    return by_update(recipe(), params, grads)[0]


def put(placed: str, mesh: Any, x: Tensor) -> Any:
    """A tensor as it is, or divided over the processes."""
    if placed == "plain":
        return x.clone()
    how: dict[str, Any] = {"rows": Shard(0), "columns": Shard(min(x.dim() - 1, 1))}
    return distribute_tensor(x.clone(), mesh, [how.get(placed, Replicate())])


def run(mesh: Any, placed: str, owners: str, way: str) -> dict[str, Tensor]:
    """The parameters after some steps, whole."""
    params: Any
    params, *grads = ({n: put(placed, mesh, x) for n, x in tree.items()} for tree in numbers())
    params, _ = WAYS[way](recipe(owners), params, grads)
    return {name: whole(x) for name, x in params.items()}


def run_odd(mesh: Any, what: str, owners: str) -> dict[str, Tensor]:
    """The same, with rows that the kernels between products do not take."""
    params: Any
    params, *grads = ({n: put("rows", mesh, x) for n, x in tree.items()} for tree in numbers())
    if what == "transposed":
        params = {n: transposed(x) if x.dim() == 2 else x for n, x in params.items()}
    if what == "negated":
        grads[1:] = [{n: negated(x) for n, x in tree.items()} for tree in grads[1:]]
    hidden = mock.patch.object(kernels, "library", return_value=None)
    with hidden if what == "without kernels" else nullcontext():
        params, _ = by_object(recipe(owners), params, grads)
    return {name: whole(x) for name, x in params.items()}


def transposed(x: Any) -> Any:
    """These values in columns, one after another."""
    return distribute_tensor(whole(x).mT.contiguous(), x.device_mesh, [Shard(1)]).mT


def negated(x: Any) -> Any:
    """These values, as the negative of what is in memory."""
    return sharding.from_part(torch._neg_view(-x.to_local()), x)


class Counted(NamedTuple):
    """What a process has done in a step: entries sent by each kind of message, matrices turned."""

    exchanged: int
    gathered: int
    products: int


def counted(mesh: Any, placed: str, owners: str, stack: bool = False) -> tuple[int, ...]:
    """What a step of 8 matrices of 4 × 8 takes, which may be one parameter."""
    tx: Any = fo.matrix_owners(fo.orthogonalize(ns_dtype=torch.float64), owners)
    tx, shape, count = (fo.as_matrix(tx, stack=True), (8, 4, 8), 1) if stack else (tx, (4, 8), 8)
    params = [put(placed, mesh, torch.zeros(shape, dtype=torch.float64)) for _ in range(count)]
    torch.manual_seed(0)
    grads = [put(placed, mesh, torch.randn(shape, dtype=torch.float64)) for _ in range(count)]
    sent = {"exchanged": 0, "gathered": 0}
    turned = []
    gather = "all_gather_single"
    gather = gather if hasattr(dist, gather) else "all_gather_into_tensor"
    real = orthogonal.orthogonalized, dist.all_to_all_single, getattr(dist, gather)

    def orthogonalized(G: Tensor, *rest: Any) -> Tensor:
        turned.append(1 if G.dim() == 2 else len(G))
        return real[0](G, *rest)

    def all_to_all(out: Tensor, given: Tensor, a: Any, b: list[int], group: Any) -> Any:
        sent["exchanged"] += given.numel() - b[dist.get_rank(group)]
        return real[1](out, given, a, b, group=group)

    def all_gather(out: Tensor, given: Tensor, group: Any) -> Any:
        sent["gathered"] += given.numel()
        return real[2](out, given, group=group)

    with (
        mock.patch.object(orthogonal, "orthogonalized", orthogonalized),
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
    for owners in OWNERS:
        for what in ODD:
            found[f"{what}-{owners}"] = partial(run_odd, mesh, what, owners)
        found[f"stack-{owners}"] = partial(counted, mesh, "rows", owners, stack=True)
    return found


def work(rank: int) -> dict[str, Any]:
    """What one process of several does."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return processes.attempt_all(parts(mesh, ""))


# ---------------------------------------------------------------- and in this one
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def ranks(request, tmp_path_factory):
    return collect(request.param, work, folder=tmp_path_factory.mktemp("owners"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("placed", PLACED)
def test_several_processes_step_as_one(placed, owners, way, ranks):
    for mine in results(ranks, f"owners-{placed}-{owners}-{way}"):
        assert_close(mine, alone(), 1e-10)


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("what", ODD)
def test_no_rows_are_taken_for_matrices(what, owners, ranks):
    """Matrices are gathered where the kernels between products do not run, too."""
    for mine in results(ranks, f"{what}-{owners}"):
        assert_close(mine, alone(), 1e-10)


@pytest.mark.parametrize("placed", PLACED)
def test_spread_over_n_processes_each_computes_an_nth(placed, ranks):
    """And what is sent: a part of each matrix to its owner, and as much back; or all of a result.

    With 8 matrices of 32 entries and n processes.
    """
    n = len(ranks)
    for exchanged, gathered, products in results(ranks, f"counted-{placed}-spread"):
        assert products == 8 // n
        divided = placed in ("rows", "columns")
        # to each of the others its matrices' parts, and back their parts of one's own matrices
        each_way = (n - 1) * (8 // n) * (32 // n)
        assert exchanged == (2 * each_way if divided else 0)
        assert gathered == (0 if divided else 8 // n * 32)
    for exchanged, gathered, products in results(ranks, f"counted-{placed}-each"):
        assert products == 8
        assert exchanged == 0
        assert gathered == (8 * 32 // n if placed in ("rows", "columns") else 0)


@pytest.mark.parametrize("owners", OWNERS)
def test_of_a_stack_each_process_turns_the_matrices_that_it_has(owners, ranks):
    for found in results(ranks, f"stack-{owners}"):
        assert found == (0, 0, 8 // len(ranks))


def test_the_dearest_matrices_go_first_each_to_who_has_least():
    shapes = [torch.Size(x) for x in [(2, 2), (8, 8), (4, 4), (4, 4), (4, 4), (2, 2)]]
    assert owners_of(shapes, 2) == [1, 0, 1, 1, 1, 1]
    assert owners_of(shapes[:1], 3) == [0]
    assert owners_of([], 3) == []


def test_wrong_arguments():
    with pytest.raises(ValueError, match="takes 'each' or 'spread' as owners, but got 'all'"):
        fo.matrix_owners(fo.muon(), "all")
    with pytest.raises(ValueError, match="without a rule that takes batches"):
        fo.matrix_owners(fo.adam())
    tx, w = fo.matrix_owners(fo.muon()), torch.eye(2)
    with pytest.raises(RuntimeError, match="is not initialized here"):
        tx.update(w, tx.init(w), w)
    with pytest.raises(RuntimeError, match="is not initialized here"):
        fo.compile(tx)(w.clone(), tx.init(w), w)
    assert torch.equal(w, torch.eye(2))
