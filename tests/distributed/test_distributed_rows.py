"""Rules that reduce, on rows that two processes divide: compiled, they do what one process does."""

from typing import NamedTuple
from unittest import mock

import cases
import pytest
import torch
from helpers import assert_close
from ranks import needs_gloo, results, whole
from torch.distributed.tensor import Shard, distribute_tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.engine import divided, per_tensor
from functional_optim.engine.divided import DividedExecutor

pytestmark = needs_gloo

SHAPES = {
    "cube": (3, 4, 2),
    "matrix": (7, 4),
    "row": (1, 6),  # the second process has nothing of it, nor of the next
    "single": (1,),
    "vector": (5,),
}
EMPTY_FIRST = {"empty": (0, 3), **SHAPES}
COLUMNS = {"matrix": (3, 4), "pair": (2, 3)}  # one row is contiguous, two are not
STEPS = 4

REDUCING = (
    *("adafactor", "adafactor-first", "adam_mini", "came", "fromage", "lamb", "mars", "novograd"),
    *("sm3", "stable_adamw"),
)
CASES = [case for case in cases.CASES if case.name in REDUCING]


def drawn(seed, shapes=SHAPES, dtype=torch.float64):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def train(tx, divide, *given, spoiled=None, compile=True):
    """The parameters and slots after some steps; what stepped them. given: shapes and dtype, if
    they are not the usual ones. spoiled: a tensor whose last row has a NaN in one step."""
    params = {name: torch.nn.Parameter(divide(x)) for name, x in drawn(0, *given).items()}
    opt = adapters.Optimizer([*params.items()], tx, compile=compile)
    for k in range(STEPS):
        grads = drawn(k + 1, *given)
        if spoiled is not None and k == 1:
            grads[spoiled][-1] = torch.nan
        for name, p in params.items():
            p.grad = divide(grads[name])
        opt.step()
    states = {n: {k: whole(x) for k, x in opt.state[p].items()} for n, p in params.items()}
    plan = opt.__dict__.get("_plan")
    made = [] if plan is None else [x for e in plan.entries for x in e.tensors.executors]
    by_rows = sum(len(x.members) for x in made if type(x) is DividedExecutor)
    return {n: whole(p) for n, p in params.items()}, states, by_rows


def norms(lr):
    """A rule of one's own: by the largest entry of each column, and the share of positive ones."""

    def update(u, slots, p, lr):
        top = u.abs().amax(0, keepdim=True) if u.dim() > 1 else u.abs().amax()
        return -lr * u / (top + 1.0) * (u > 0).to(u.dtype).mean(), slots

    return fo.leafwise(None, update, lambda t, *, lr: (lr,), hyper={"lr": lr}, name="norms")


class Kept(NamedTuple):
    total: torch.Tensor


def along(way):
    """A rule of one's own with a slot, which adds up what a function makes of an update."""

    def init(p):
        return Kept(torch.zeros_like(p))

    def update(u, slots, p):
        total = slots.total + way(u)
        return -0.1 * total, Kept(total)

    return fo.leafwise(init, update, name="along")


def summed(u, slots, p):
    """torch leaves this sum to be finished."""
    return u.sum().expand_as(u), slots


class Sums(NamedTuple):
    total: torch.Tensor
    columns: torch.Tensor


def from_sums(way):
    """A rule of one's own with a slot that begins as sums of the parameter."""

    def init(p):
        return Sums(torch.zeros_like(p), p.sum(0))

    def update(u, slots, p):
        columns = slots.columns + way(u).sum(0)
        return -0.1 * u * columns, Sums(slots.total + u, columns)

    return fo.leafwise(init, update, name="from_sums")


def measuring(way):
    """A rule of one's own by numbers of all tensors, which are added up."""

    def update(u, slots, p, total):
        return -0.1 * u / total, slots

    return fo.leafwise(None, update, reduce=lambda u, slots, p: (way(u),), name="measuring")


def numbered(u):
    return u * torch.arange(len(u), dtype=u.dtype).reshape(-1, *[1] * (u.dim() - 1))


UNDIVIDED = {
    "a cumulative sum": lambda: along(lambda u: u.cumsum(-1)),
    "a logarithm of a sum": lambda: along(lambda u: u - u.logsumexp(0, keepdim=True)),
    "a maximum of an empty part": lambda: along(lambda u: u / u.abs().amax()),
    "numbers of rows": lambda: along(numbered),
    "one long vector": lambda: along(lambda u: (u.flatten() - u.flatten()[0]).reshape(u.shape)),
    "a sum of a row of norms": lambda: along(lambda u: u / u.norm(dim=0).sum()),
    "a sum of maxima": lambda: measuring(lambda u: u.abs().amax()),
    "a sum of norms": lambda: measuring(lambda u: u.norm()),
    "a number of tensors": lambda: measuring(lambda u: 0 * u.sum() + 1),
    "behind a sum": lambda: fo.chain(
        fo.leafwise(None, summed, name="summed"), along(lambda u: u.cumsum(0))
    ),
    "a slot of sums": lambda: from_sums(lambda u: u.cumsum(0)),
}
"""Rules that torch's DTensors refuse or compute wrongly, and measurements that are no sums."""
ALONG = {"rows": 0, "columns": 1}


def undivided(tx, divide):
    """By an object with kernels, by one without, and by a pure update."""
    found = [train(tx, divide, compile=compile)[:2] for compile in (True, False)]
    made, params = tx(), {name: divide(x) for name, x in drawn(0).items()}
    state = made.init(params)
    for k in range(STEPS):
        grads = {name: divide(x) for name, x in drawn(k + 1).items()}
        updates, state = made.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    for own in state.slots.values():
        for x, p in zip(own.values(), params.values(), strict=True):
            if x.shape == p.shape:
                assert getattr(x, "placements", None) == getattr(p, "placements", None)
    return found, {name: whole(x) for name, x in params.items()}


def for_matrices(u, slots, p):
    """A rule that fails for others, in the middle of a step."""
    if u.dim() != 2:
        raise NotImplementedError("only matrices")
    return u / u.norm(), slots


def failed(divide, large):
    """The error of a step, and which parameters it has changed."""
    params = [torch.nn.Parameter(divide(torch.ones(shape))) for shape in ((4, 2), (3,))]
    tx = fo.chain(fo.leafwise(None, for_matrices, name="for_matrices"), fo.scale_by_lr(0.1))
    opt = adapters.Optimizer(params, lambda: tx, compile=False)
    for p in params:
        p.grad = divide(torch.ones(p.shape))
    only = pytest.raises(NotImplementedError, match="only matrices")
    with mock.patch.object(per_tensor, "LARGE", large), only as error:
        opt.step()
    notes = getattr(error.value, "__notes__", [])
    return [not bool((whole(p) == 1).all()) for p in params], " ".join(notes)


def parts(mesh, folder):
    def divide(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    found = {
        f"rows-{case.name}": lambda case=case: train(lambda: case.tx(), divide, EMPTY_FIRST)
        for case in CASES
    }
    found["rows-eager"] = lambda: train(fo.adam_mini, divide, EMPTY_FIRST, compile=False)
    found["rows-complex"] = lambda: train(lambda: fo.lamb(0.1), divide, SHAPES, torch.complex128)
    found["rows-failed"] = lambda: failed(divide, per_tensor.LARGE)
    found["rows-failed-late"] = lambda: failed(divide, 0)
    found["rows-in-buckets"] = lambda: in_buckets(lambda: fo.adafactor(), divide)
    found["rows-columns"] = lambda: train(lambda: fo.lamb(0.1), by_columns(mesh), COLUMNS)
    found["rows-own"] = lambda: train(lambda: norms(0.1), divide)
    found["rows-nan"] = lambda: train(lambda: norms(0.1), divide, spoiled="matrix")
    for name, tx in UNDIVIDED.items():
        for kind, dim in ALONG.items():
            found[f"{name}-{kind}"] = lambda tx=tx, dim=dim: undivided(
                tx, lambda x: distribute_tensor(x, mesh, [Shard(min(dim, x.dim() - 1))])
            )
    found["rows-compile"] = lambda: step_functionally(divide)
    return found


def by_columns(mesh):
    """Divides along rows, but stores column by column."""
    return lambda x: distribute_tensor(x.t().contiguous(), mesh, [Shard(1)]).t()


def step_functionally(divide):
    """By `fo.compile`."""
    tx = fo.lamb(0.1)
    params = {name: divide(x) for name, x in drawn(0).items()}
    step, state = fo.compile(tx), tx.init(params)
    for k in range(STEPS):
        grads = {name: divide(x) for name, x in drawn(k + 1).items()}
        params, state = step(grads, state, params)
    return {name: whole(x) for name, x in params.items()}


def in_buckets(tx, divide):
    """Each tensor's passes run by themselves, in scratch memory that all of them use in turn."""
    with mock.patch.object(divided, "BUCKET", 1):
        return train(tx, divide)


def alone(x):
    return x


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_two_processes_step_as_one(case, both):
    params, states, _ = train(lambda: case.tx(), alone, EMPTY_FIRST, compile=False)
    for mine in results(both, f"rows-{case.name}"):
        assert_close(mine[:2], (params, states), 1e-12)
        assert mine[2] > 0


@pytest.mark.parametrize(("name", "spoiled"), [("own", None), ("nan", "matrix")])
def test_a_rule_of_ones_own(name, spoiled, both):
    """Maxima of columns, a mean of all; a NaN in one process reaches all columns that it is in."""
    params, _, _ = train(lambda: norms(0.1), alone, spoiled=spoiled, compile=False)
    assert params["matrix"].isnan().any() == (spoiled is not None)
    for mine in results(both, f"rows-{name}"):
        torch.testing.assert_close(mine[0], params, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert mine[2] == len(SHAPES)


@pytest.mark.parametrize("kind", ALONG)
@pytest.mark.parametrize("name", UNDIVIDED)
def test_a_rule_that_needs_whole_tensors_gets_them(name, kind, both):
    expected = undivided(UNDIVIDED[name], alone)
    for mine in results(both, f"{name}-{kind}"):
        assert_close(mine, expected, 1e-12)


ODD = {
    "buckets that share scratch memory": ("in-buckets", fo.adafactor, ()),
    "an empty tensor without kernels": ("eager", fo.adam_mini, (EMPTY_FIRST,)),
    "a single row of columns": ("columns", lambda: fo.lamb(0.1), (COLUMNS,)),
    # DTensor gathers the dimension of size 1 of `single` in the sum with its update
    "complex tensors": ("complex", lambda: fo.lamb(0.1), (SHAPES, torch.complex128)),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_tensors_stay_divided(what, both):
    name, tx, given = ODD[what]
    params, states, _ = train(tx, alone, *given, compile=False)
    for mine in results(both, f"rows-{name}"):
        assert_close(mine[:2], (params, states), 1e-12)


def test_a_step_that_fails_changes_nothing_or_says_that_it_is_half_done(both):
    """A large one, whose results are not held together."""
    for changed, _ in results(both, "rows-failed"):
        assert changed == [False, False]
    for changed, note in results(both, "rows-failed-late"):
        assert changed == [True, False]
        assert "parameter of shape (3,) failed while the step was written" in note


def test_functional_steps(both):
    expected = step_functionally(alone)
    for mine in results(both, "rows-compile"):
        assert_close(mine, expected, 1e-12)
