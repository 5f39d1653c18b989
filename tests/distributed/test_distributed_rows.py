"""Rules that reduce, on rows that two processes divide: compiled, they do what one process does."""

from unittest import mock

import cases
import pytest
import torch
from helpers import assert_close
from ranks import needs_gloo, results, whole
from torch.distributed.tensor import Shard, distribute_tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.engine import divided
from functional_optim.engine.divided import DividedExecutor

pytestmark = needs_gloo

SHAPES = {
    "cube": (3, 4, 2),
    "matrix": (7, 4),
    "row": (1, 6),  # the second process has nothing of it, nor of the next
    "single": (1,),
    "vector": (5,),
}
STEPS = 4

REDUCING = (
    *("adafactor", "adafactor-first", "adam_mini", "came", "fromage", "lamb", "mars", "novograd"),
    *("sm3", "stable_adamw"),
)
CASES = [case for case in cases.CASES if case.name in REDUCING]


def drawn(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}


def train(tx, divide, *, spoiled=None, compile=True):
    """The parameters and slots after some steps; what stepped them. spoiled: a tensor whose last
    row has a NaN in one step."""
    params = {name: torch.nn.Parameter(divide(x)) for name, x in drawn(0).items()}
    opt = adapters.Optimizer([*params.items()], tx, compile=compile)
    for k in range(STEPS):
        grads = drawn(k + 1)
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


def parts(mesh, folder):
    def divide(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    found = {
        f"rows-{case.name}": lambda case=case: train(lambda: case.tx(), divide) for case in CASES
    }
    found["rows-in-buckets"] = lambda: in_buckets(lambda: fo.adafactor(), divide)
    found["rows-own"] = lambda: train(lambda: norms(0.1), divide)
    found["rows-nan"] = lambda: train(lambda: norms(0.1), divide, spoiled="matrix")
    found["rows-compile"] = lambda: step_functionally(divide)
    return found


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
    params, states, _ = train(lambda: case.tx(), alone, compile=False)
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


def test_buckets_that_share_scratch_memory(both):
    params, states, _ = train(lambda: fo.adafactor(), alone, compile=False)
    for mine in results(both, "rows-in-buckets"):
        assert_close(mine[:2], (params, states), 1e-12)


def test_functional_steps(both):
    expected = step_functionally(alone)
    for mine in results(both, "rows-compile"):
        assert_close(mine, expected, 1e-12)
