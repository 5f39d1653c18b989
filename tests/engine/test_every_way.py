"""Whatever steps a tensor does what the pure update does, for all cases, dtypes and layouts.

That are kernels, ATen between them, joined tensors, one tensor after the other, and shards.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cases import CASES
from helpers import assert_close, clone
from odd_rules import packed, refreshing, shapes, unit_rms
from torch import Tensor
from ways import by_eager_object, by_function, by_object, by_update

import functional_optim as fo
from functional_optim import kernels
from functional_optim.adapters import Optimizer
from functional_optim.core.sharding import from_part

Sides = namedtuple("Sides", "rows columns largest")
Late = namedtuple("Late", "average rows")
STEPS = 3
SHAPES = {
    **{"b.empty": (0, 3), "b.one": (1, 1), "b.scalar": (), "b.vector": (70,)},
    **{"w.column": (9, 1), "w.cube": (3, 5, 7), "w.kernel": (4, 3, 2, 2), "w.matrix": (6, 9)},
    **{"w.row": (1, 9), "w.strided": (5, 4), "w.transposed": (4, 6), "w.twin": (6, 9)},
    **{"w.square": (5, 5), "w.square_too": (5, 5), "w.small": (3, 3)},
}
LARGE = {"w.tall": (501, 33), "w.wide": (3, 16395)}
"""Several chunks; threads share them."""


class Row(NamedTuple):
    """A recipe, from a learning rate.

    takes: which shapes. real: whether it refuses complex parameters. rounding: in float64. large:
    whether it has no products, so that large tensors cost little.
    """

    make: Callable[[Any], Any]
    lr: float = 1e-2
    takes: Callable[[tuple[int, ...]], bool] = lambda shape: True
    real: bool = False
    rounding: float = 1e-12
    large: bool = True


def of_case(case: Any) -> Row:
    """A row of the case table."""

    def takes(shape: tuple[int, ...]) -> bool:
        return case.dim is None or len(shape) == case.dim

    real = not case.cannot.isdisjoint(["complex"])
    large = case.dim is None and not case.both_sides and case.name not in PRODUCTS
    return Row(lambda lr: case.tx(lr=lr), case.hyper["lr"], takes, real, case.rounding, large)


PRODUCTS = ("shampoo", "shampoo-blocks", "galore", "apollo", "apollo-mini", "muon_adamw", "scion")


def sides(lr: Any) -> Any:
    """A rule with slots like the rows, the columns and the whole of a tensor, each a sum of it."""

    def init(p: Tensor) -> Sides:
        whole = p.shape if p.dim() else (1,)
        rows, columns = (*whole[:-1], 1), (1, *whole[1:])
        return Sides(*[p.new_zeros(shape[: p.dim()]) for shape in (rows, columns, ())])

    def update(u: Tensor, slots: Sides, p: Tensor, weight: Any, lr: Any) -> tuple[Tensor, Sides]:
        if u.dim() == 0 or u.numel() == 0:
            return u, slots
        rows = slots.rows.lerp(u.mean(-1, keepdim=True), weight)
        columns = slots.columns.lerp((u - rows).square().sum(0, keepdim=True), weight)
        largest = torch.maximum(slots.largest, (columns * p).abs().amax())
        u = (u - rows) / (1 + columns) * (largest / (1 + rows.square().sum())) / u.shape[0]
        return -lr * u, Sides(rows, columns, largest)

    return fo.leafwise(init, update, lambda t, *, lr: (1 / t, lr), hyper={"lr": lr}, name="sides")


def late(lr: Any) -> Any:
    """A rule that reads a slot in its second sums of rows, when the new slot is already known."""

    def init(p: Tensor) -> Late:
        return Late(torch.zeros_like(p), p.new_zeros((*p.shape[:-1], 1)[: p.dim()]))

    def update(u: Tensor, slots: Late, p: Tensor, lr: Any) -> tuple[Tensor, Late]:
        if u.dim() == 0 or u.numel() == 0:
            return u, slots
        size = 1 + u.square().mean(-1, keepdim=True)
        rows = (slots.average / size).square().mean(-1, keepdim=True)
        return -lr * u, Late(slots.average + u, rows)

    return fo.leafwise(init, update, lambda t, *, lr: (lr,), hyper={"lr": lr}, name="late")


def around(make: Callable[[], Any]) -> Callable[[Any], Any]:
    """Rules of each kind around one."""
    return lambda lr: fo.chain(
        fo.clip_by_global_norm(1.0),
        fo.trace(0.9),
        make(),
        fo.add_decayed_weights(0.1),
        fo.clip_by_block_rms(0.5),
        fo.scale_by_lr(lr),
        fo.params_ema(0.9),
    )


turned = partial(fo.scale_by_soap, precondition_frequency=2)


def soap(lr: Any, **more: Any) -> Any:
    return fo.chain(turned(**more), fo.scale_by_lr(lr))


def spread(lr: Any) -> Any:
    """Some bases are renewed in each step."""
    return soap(lr, precondition_frequency=3, refresh="spread")


def on_some(lr: Any) -> Any:
    parts = {"muon": fo.muon(lr), "soap": soap(lr), "lamb": fo.lamb(lr), "plain": fo.adamw(lr)}
    labels = {"w.twin": "muon", "w.square": "soap", "w.cube": "lamb", "*": "plain"}
    return fo.partition(parts, labels)


def broad(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and min(shape) > 1


def square(shape: tuple[int, ...]) -> bool:
    """Matrices of full rank: of others some eigenvectors depend on the last bits."""
    return broad(shape) and shape[0] == shape[1]


MATRICES: dict[str, Any] = {"takes": broad, "real": True, "large": False}
SOAP = {**MATRICES, "takes": square, "rounding": 1e-9}
LOOKING = fo.cautious(fo.scale_by_adam())
CENTRED = (fo.clip_by_global_norm(0.5), fo.centralize(), fo.clip_by_global_norm(0.3))
SUMMED = (fo.trace(0.9), fo.clip_by_block_rms(0.3))
RECIPES = {
    "sides": Row(sides, real=True),
    "late": Row(late, real=True),
    "shapes": Row(shapes, **MATRICES),
    "refreshing": Row(refreshing, **MATRICES),
    "measured": Row(lambda lr: fo.chain(fo.trace(0.9), unit_rms(lr), fo.scale_by_lr(1.0))),
    "adaptive clip": Row(lambda lr: fo.chain(fo.adaptive_grad_clip(0.1), fo.adamw(lr)), real=True),
    "centralize": Row(lambda lr: fo.chain(*CENTRED, fo.sgd(lr)), real=True),
    "a look back": Row(lambda lr: fo.chain(fo.trace(0.9), LOOKING, fo.scale_by_lr(lr))),
    "sums behind a gate": Row(lambda lr: fo.accumulate(fo.chain(*SUMMED, fo.scale_by_lr(lr)), 2)),
    "soap": Row(
        lambda lr: fo.chain(soap(lr), fo.add_decayed_weights(0.1, independent=True)), **SOAP
    ),
    "soap in turns": Row(spread, **SOAP),
    "soap among others": Row(around(turned), **SOAP),
    "turns behind a gate": Row(lambda lr: fo.accumulate(spread(lr), 2), **SOAP),
    "two products": Row(
        around(lambda: fo.chain(turned(), fo.scale(2.0), fo.orthogonalize(ns_dtype=torch.float64))),
        **SOAP,
    ),
    "a norm behind a product": Row(
        lambda lr: fo.chain(fo.muon(lr, ns_dtype=torch.float64), fo.clip_by_global_norm(0.1)),
        **MATRICES,
    ),
    "packed": Row(packed, real=True),
    "int8": Row(lambda lr: fo.stored(fo.adamw(lr), "int8", block_size=16, min_size=0), real=True),
    **{
        f"gated {name}": Row(lambda lr, make=make: make(lr), **{**MATRICES, "rounding": 1e-6})
        for name, make in {
            "came": lambda lr: fo.accumulate(fo.stored(fo.came(lr), "int8", min_size=0), 2),
            "muon": lambda lr: fo.stored(fo.accumulate(fo.muon(lr), 2), "int8", min_size=0),
            "adam_mini": lambda lr: fo.stored(
                fo.accumulate(fo.adam_mini(lr), 2), "int8", min_size=0
            ),
        }.items()
    },
    "on some": Row(on_some, real=True, rounding=2e-2, large=False),
}
ROWS = {**{case.name: of_case(case) for case in CASES}, **RECIPES}

TOLERANCES = {torch.float64: 0.0, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.complex64: 2e-5}
"""How far results may be apart, where the rounding of the row is not larger."""


def tree(row: Row, dtype: torch.dtype, seed: int, shapes: Any, more: int = 0) -> Any:
    """A tensor of every shape that a row takes, by name. more: longer by so much."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        if row.takes(shape):
            own = (*[n + more if n > 1 else n for n in shape], 2)
            x = torch.randn(own, generator=generator, dtype=torch.float64)
            x = torch.view_as_complex(x) if dtype.is_complex else x[..., 0].contiguous()
            found[name] = x.to(dtype)
    return found


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "w.strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "w.transposed": lambda x: x.mT.contiguous().mT,
    "w.kernel": lambda x: x.to(memory_format=torch.channels_last),
}


def laid_out(params: Any) -> Any:
    """The same, where some do not lie in memory as their shapes say."""
    return {name: LAYOUTS.get(name, Tensor.clone)(x) for name, x in params.items()}


def gradients(row: Row, dtype: torch.dtype, shapes: Any, more: int = 0) -> list[Any]:
    """Those of some steps; one does not lie in memory as its parameter does."""
    found = [tree(row, dtype, k + 1, shapes, more) for k in range(STEPS)]
    for own in found:
        if "w.twin" in own:
            own["w.twin"] = LAYOUTS["w.transposed"](own["w.twin"])
    return found


def with_gaps(grads: list[Any]) -> list[Any]:
    """Some tensors have no gradient in the second step."""
    some = {name: None if i % 3 == 1 else g for i, (name, g) in enumerate(grads[1].items())}
    return [grads[0], some, *grads[2:]]


WAYS: dict[str, Callable[..., Any]] = {
    "donated": by_function,
    "kept": lambda *given: by_function(*given, donate=False),
    "strict": lambda *given: by_function(*given, strict=True),
    "object": by_object,
    "eager object": by_eager_object,
}


def check(ways: str, row: Row, tolerance: float, params: Any, grads: Any) -> None:
    """All of these ways end where the pure update does."""
    moved, state = by_update(row.make(row.lr), clone(params), clone(grads))
    wanted = moved, present(state, state)
    for way in ways.split(", "):
        found, slots = WAYS[way](row.make(row.lr), clone(params), clone(grads))
        assert_close((found, present(slots, state)), wanted, tolerance)


def present(slots: Any, keys: Any) -> Any:
    """The slots under these keys that are not missing, with the names of their parameters."""
    own = {key: {n: x for n, x in slots.get(key, {}).items() if x is not None} for key in keys}
    return {key: known for key, known in own.items() if known}


def pairs() -> Iterator[Any]:
    """Each row with each dtype; all but one of these in `make test-full`."""
    for i, (name, row) in enumerate(ROWS.items()):
        dtypes = [x for x in TOLERANCES if not (x.is_complex and row.real)]
        for dtype in dtypes:
            marks = [] if dtype is dtypes[i % len(dtypes)] else [pytest.mark.full]
            yield pytest.param(name, dtype, marks=marks, id=f"{name}-{str(dtype)[6:]}")


@pytest.mark.parametrize(("name", "dtype"), [*pairs()])
@pytest.mark.filterwarnings("ignore:functional_optim.* runs eagerly")
def test_every_way_ends_where_the_pure_update_does(name, dtype):
    torch.set_num_threads(2)
    row, tolerance = ROWS[name], max(TOLERANCES[dtype], ROWS[name].rounding)
    params, grads = tree(row, dtype, 0, SHAPES), gradients(row, dtype, SHAPES)
    check("donated, kept", row, tolerance, laid_out(params), with_gaps(grads))
    check("object, eager object", row, tolerance, laid_out(params), grads)
    check("strict", row, tolerance, params, grads)
    if row.large:
        check("donated", row, tolerance, tree(row, dtype, 0, LARGE), gradients(row, dtype, LARGE))
    known, other = kernels.count(), row._replace(lr=0.5 * row.lr)
    params, grads = tree(row, dtype, 0, SHAPES, 2), gradients(row, dtype, SHAPES, 2)
    check("strict", other, tolerance, params, grads)
    assert kernels.count() == known  # of another size, and at another rate


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


EXACT = ("adamw", "composed", "muon", "nadam")
NEAR = ("adafactor", "lamb", "soap", "stable_adamw")
"""Recipes of shards; the sums of these are taken in another order."""


def shards(tensors: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return fo.tree.map(lambda x: distribute_tensor(x, mesh, [Shard(0)]), tensors)


@pytest.mark.parametrize("way", ["donated", "object", "eager object"])
@pytest.mark.parametrize("name", EXACT + NEAR)
def test_a_shard_steps_as_the_plain_tensor_that_it_is(name, way, mesh):
    row = ROWS[name]
    params, *grads = [
        {k: x for k, x in own.items() if x.dim() and x.numel()}
        for own in (tree(row, torch.float32, k, SHAPES) for k in range(STEPS + 1))
    ]
    ours = WAYS[way](row.make(row.lr), *shards((params, grads), mesh))
    theirs = WAYS[way](row.make(row.lr), clone(params), grads)
    assert_close(fo.tree.map(whole, ours), theirs, 0.0 if name in EXACT else 1e-6)


@pytest.mark.parametrize("recipe", [lambda: fo.sgd(0.5), lambda: fo.fromage(0.5)])
def test_a_shard_that_moves_is_noticed(recipe, mesh):
    stays, moves = (torch.nn.Parameter(shards(torch.ones(4, 2), mesh)) for _ in range(2))
    opts = [Optimizer([x], recipe) for x in (stays, moves)]
    for _ in range(3):
        for x, opt in zip((stays, moves), opts, strict=True):
            x.grad = shards(torch.ones(4, 2), mesh)
            opt.step()
        moves._local_tensor = moves._local_tensor.clone()
    assert torch.equal(moves.full_tensor(), stays.full_tensor())
    assert not (stays.full_tensor() == 1).any()


def test_a_gradient_of_a_shard_in_another_layout_is_noticed(mesh):
    q = torch.nn.Parameter(shards(torch.zeros(4, 2), mesh))
    opt = Optimizer([q], lambda: fo.sgd(0.5))
    g = torch.arange(8.0).view(4, 2)
    for mine in (g, g.mT.contiguous().mT, g):
        q.grad = from_part(mine, q)
        opt.step()
    assert torch.equal(q.full_tensor(), -1.5 * g)
