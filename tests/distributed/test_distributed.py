"""Sharded parameters (DTensor): two processes go where one goes.

Shards are stepped eagerly, so kernels are compiled for one row only, beside them.
"""

import functools

import cases
import pytest
import torch
from helpers import assert_close
from ranks import needs_gloo, results, whole
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from functional_optim import adapters

pytestmark = needs_gloo

STEPS = 3

SHARDED = {
    "columns": ((3, 5), Shard(1)),
    "plain": ((2, 3), None),
    "replicated": ((2, 2), Replicate()),
    "rows": ((7, 4), Shard(0)),
    "scalar": ((), Replicate()),
    "single": ((1,), Shard(0)),  # the second process has nothing of it
    "vector": ((5,), Shard(0)),
}
"""Shapes, and how the processes divide them: unevenly, or not at all (None: no DTensor)."""


def named(*names):
    return [case for case in cases.CASES if case.name in names]


def with_other_slots():
    """The rows with slots that no earlier row of their family has, and one that sums over rows."""
    found = {}
    for case in cases.CASES:
        state = case.tx().init(case.params())
        shapes = {
            key: [None if x is None else x.shape for x in own.values()]
            for key, own in state.slots.items()
        }
        found.setdefault((case.family, str(shapes), *state.carry), case)
    return [*found.values(), *named("scion-col")]


CASES = with_other_slots()
(COMPOSED,) = named("composed")


def tensors(case, seed):
    torch.manual_seed(seed)
    every = {name: torch.randn(shape, dtype=torch.float64) for name, (shape, _) in SHARDED.items()}
    return {name: x for name, x in every.items() if case.dim in (None, x.dim())}


def make(case, params, compile=False):
    """A row's optimizer over two groups, with what is divided by rows in the second."""
    if case.stock is None:
        return adapters.Optimizer(groups(params), case.recipe, compile=compile, **case.hyper)
    return case.drop_in(groups(params), compile=compile, **case.hyper)


def groups(params):
    mine = [[p for n, p in params.items() if (n == "rows") is there] for there in (False, True)]
    return [{"params": group} for group in mine]


def train(case, divide, compile=False):
    """Step a row's optimizer; returns it and its parameters."""
    params = {n: torch.nn.Parameter(divide(n, x)) for n, x in tensors(case, 0).items()}
    opt = make(case, params, compile)
    step(case, opt, params, divide, range(STEPS))
    return opt, params


def step(case, opt, params, divide, times):
    for i in times:
        for name, x in tensors(case, i + 1).items():
            params[name].grad = divide(name, x)
        opt.step()


def found(opt, params):
    """Parameters and states, whole."""
    states = {n: {k: whole(x) for k, x in opt.state.get(p, {}).items()} for n, p in params.items()}
    return {n: whole(p) for n, p in params.items()}, states


@functools.cache
def alone(name):
    """Where one process goes with a row."""
    (case,) = named(name)
    return found(*train(case, lambda name, x: x))


# ---------------------------------------------------------------- in the two processes
def divider(mesh):
    def divide(name, x):
        placement = SHARDED[name][1]
        return x if placement is None else distribute_tensor(x, mesh, [placement])

    return divide


def step_sharded(case, mesh, compile=False):
    opt, params = train(case, divider(mesh), compile)
    slots = {
        n: {k: str(getattr(x, "placements", "plain")) for k, x in opt.state.get(p, {}).items()}
        for n, p in params.items()
    }
    again = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    loaded = make(case, again, compile)
    loaded.load_state_dict(opt.state_dict())
    return {"found": found(opt, params), "placements": slots, "loaded": found(loaded, again)}


def parts(mesh, folder):
    found = {case.name: lambda case=case: step_sharded(case, mesh) for case in CASES}
    found["compiled"] = lambda: step_sharded(COMPOSED, mesh, compile=True)
    return found


# ---------------------------------------------------------------- and in this one
EXACT = 1e-12
every_case = pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])


@every_case
def test_two_processes_step_as_one_and_a_state_loads_where_it_was_saved(case, both):
    """A factor of a square matrix has its shape, but is not divided."""
    for mine in results(both, case.name):
        assert_close(mine["found"], alone(case.name), EXACT)
        assert_close(mine["loaded"], mine["found"], 0.0)


def test_a_kernel_beside_shards_measures_with_them(both):
    for mine in results(both, "compiled"):
        assert_close(mine["found"], alone(COMPOSED.name), EXACT)


@every_case
def test_slots_are_divided_as_their_parameters(case, both):
    _, states = alone(case.name)
    numbers = {"step", *case.tx().init(case.params()).carry}
    of_matrices = any(x.rule.runs.batched for x in case.tx().placements)
    for mine in results(both, case.name):
        for name, kinds in mine["placements"].items():
            shape, placement = SHARDED[name]
            for key, kind in kinds.items():
                own = states[name][key].shape
                momentum = own == shape and len(own) == 2 and key.startswith(("exp_avg", "momen"))
                if placement is None or key in numbers:
                    assert kind == "plain"
                elif of_matrices and not momentum:
                    assert "Partial" not in kind  # a factor, of which a process may have all
                elif own == ():  # a number of the tensor is the same everywhere
                    assert kind in ("plain", str((Replicate(),)))
                elif own == shape:
                    assert kind == str((placement,))
                else:  # a factor is divided where it can be, and no sum is left undone
                    gone = (
                        isinstance(placement, Shard) and own[placement.dim] < shape[placement.dim]
                    )
                    assert kind == str((Replicate() if gone else placement,))
