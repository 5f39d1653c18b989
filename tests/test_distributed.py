"""Sharded parameters (DTensor): two processes go where one goes.

Both processes are started once, step every row of the table, and leave what they found in a file.
Shards are stepped eagerly, so kernels are compiled for one row only, beside them.
"""

from __future__ import annotations

import copy
import datetime
import time
import traceback
from typing import Any

import cases
import pytest
import torch
import torch.multiprocessing as mp
from helpers import assert_close, assert_same, run
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from functional_optim import adapters

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)

EXACT = 1e-12
WORLD = 2
STEPS = 4
START_LIMIT = 60  # seconds for one meeting of the processes
LIMIT = 120  # seconds for all that they do

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

THIN = {
    "a row": ((1, 3), Shard(0)),
    "a column": ((3, 1), Shard(1)),
    "a row by columns": ((1, 3), Shard(1)),
    "no rows": ((0, 3), Shard(0)),
    "no columns": ((3, 0), Shard(0)),
    "rows, one each": ((2, 1, 3), Shard(1)),
    "a batch of rows": ((3, 1, 2), Shard(0)),
}
"""Those that have little to divide: the head of a model with one output."""


def named(*names):
    return [case for case in cases.CASES if case.name in names]


(COMPOSED,) = named("composed")
(ADAFACTOR,) = named("adafactor")
KEPT = named("sgd", "sgd-momentum", "adamw", "adafactor", "asgd", "nadam")
"""All kinds of state: none, no count, like the parameter, factors, carried numbers."""
ZERO = named("sgd-momentum", "adamw", "adafactor", "nadam")


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


def alone(case):
    """Where one process goes."""
    return found(*train(case, lambda name, x: x))


def thin_tensors(shape):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for _ in range(1 + STEPS)]


def step_adafactor(start, *grads):
    """The parameter of an Adafactor after its steps, and its state."""
    p = torch.nn.Parameter(start.clone())
    opt = ADAFACTOR.drop_in([p], compile=False, **ADAFACTOR.hyper)
    for g in grads:
        p.grad = g
        opt.step()
    return p, opt.state[p]


def whole(x: Any) -> Any:
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


# ---------------------------------------------------------------- in the two processes


def divider(mesh):
    def divide(name, x):
        placement = SHARDED[name][1]
        return x if placement is None else distribute_tensor(x, mesh, [placement])

    return divide


def step_sharded(case, mesh, compile=False):
    opt, params = train(case, divider(mesh), compile)
    slots = {n: {k: placed(x) for k, x in opt.state.get(p, {}).items()} for n, p in params.items()}
    return {"found": found(opt, params), "placements": slots}


def placed(x: Any) -> str:
    return str(x.placements) if isinstance(x, DTensor) else "plain"


def save_and_load(case, mesh, folder):
    """The end of a run, and of the same run through a checkpoint on disk in its middle."""
    divide = divider(mesh)
    path = f"{folder}/{case.name}"

    def new():
        params = {n: torch.nn.Parameter(divide(n, x)) for n, x in tensors(case, 0).items()}
        return torch.nn.ParameterDict(params), make(case, params)

    def held(model, opt):
        return {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt)}

    model, opt = new()
    step(case, opt, model, divide, range(STEPS))
    dcp.save(held(model, opt), checkpoint_id=path)
    step(case, opt, model, divide, range(STEPS, 2 * STEPS))
    other, twin = new()
    loaded = held(other, twin)
    dcp.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, twin, loaded["opt"])
    step(case, twin, other, divide, range(STEPS, 2 * STEPS))
    return {"through": found(opt, dict(model)), "resumed": found(twin, dict(other))}


def step_thin(mesh):
    """Adafactor on matrices that have little to divide, and the functional loop on the same."""
    ended = {}
    for name, (shape, placement) in THIN.items():
        mine = [distribute_tensor(x, mesh, [placement]) for x in thin_tensors(shape)]
        p, state = step_adafactor(*mine)
        q, _ = run(ADAFACTOR.tx(), mine[0], mine[1:])
        assert q.placements == (placement,)
        ended[name] = whole(p), {k: whole(x) for k, x in state.items()}, whole(q)
    return ended


def model_and_data():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
    data = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2 * STEPS)]
    return torch.nn.Sequential(*layers).to(torch.float64), data


def model_optimizer(model):
    hyper = {"lr": 0.05, "max_norm": 0.1, "decay": 0.9}
    return adapters.Optimizer(model.parameters(), cases.composed, compile=False, **hyper)


def step_model(model, opt, data):
    for x in data:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def train_fully_sharded(mesh):
    """FSDP2: a checkpoint in the middle, whole, and the parameters at the end."""
    from torch.distributed.fsdp import fully_shard

    model, data = model_and_data()
    fully_shard(model, mesh=mesh)
    opt = model_optimizer(model)
    step_model(model, opt, data[:STEPS])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # of whole tensors it has the live ones
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    middle = {name: whole(p) for name, p in model.named_parameters()}
    step_model(model, opt, data[STEPS:])
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return {
        "middle": middle,
        "saved": saved,
        "end": {name: whole(p) for name, p in model.named_parameters()},
    }


def train_with_divided_state(case):
    """ZeRO: each process steps its share of the parameters, and sends them to the other."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, data = model_and_data()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=case.drop_in, compile=False, **case.hyper
    )
    step_model(model, opt, data)
    return {name: whole(p) for name, p in model.named_parameters()}, len(opt.optim.state)


def work(rank: int, folder: str) -> None:
    """What one process does: each part's result, or how it failed, goes into its file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=START_LIMIT),
    )
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    parts = {case.name: lambda case=case: step_sharded(case, mesh) for case in cases.CASES}
    parts["compiled"] = lambda: step_sharded(COMPOSED, mesh, compile=True)
    parts["fully_shard"] = lambda: train_fully_sharded(mesh)
    parts["thin"] = lambda: step_thin(mesh)
    for case in KEPT:
        parts[f"saved-{case.name}"] = lambda case=case: save_and_load(case, mesh, folder)
    for case in ZERO:
        parts[f"zero-{case.name}"] = lambda case=case: train_with_divided_state(case)
    results: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            results[name] = part()
        except BaseException:  # such is CheckpointException
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# ---------------------------------------------------------------- and in this one


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The results of the two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.get_context("spawn")
    ranks = [context.Process(target=work, args=(r, str(folder)), daemon=True) for r in range(WORLD)]
    for process in ranks:
        process.start()
    end = time.monotonic() + LIMIT
    try:
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * WORLD, f"the processes ended with {codes}; None: not within {LIMIT} s"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def results(both, name):
    for mine in both:
        assert not isinstance(mine[name], str), mine[name]
    return [mine[name] for mine in both]


def each(some):
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in some])


@each(cases.CASES)
def test_two_processes_step_as_one(case, both):
    for mine in results(both, case.name):
        assert_close(mine["found"], alone(case), EXACT)


def test_a_kernel_beside_shards_measures_with_them(both):
    for mine in results(both, "compiled"):
        assert_close(mine["found"], alone(COMPOSED), EXACT)


@each(cases.CASES)
def test_slots_are_divided_as_their_parameters(case, both):
    _, states = alone(case)
    for mine in results(both, case.name):
        for name, kinds in mine["placements"].items():
            shape, placement = SHARDED[name]
            for key, kind in kinds.items():
                if placement is None or key in ("step", "mu_product", "eta", "mu"):
                    assert kind == "plain"
                elif states[name][key].shape == shape:
                    assert kind == str((placement,))
                else:  # a factor is divided where it can be, and no sum is left undone
                    along = {"row_var": len(shape) - 1, "col_var": len(shape) - 2}[key]
                    gone = placement == Shard(along)
                    assert kind == str((Replicate() if gone else placement,))


@each(KEPT)
def test_a_checkpoint_on_disk_changes_nothing(case, both):
    for mine in results(both, f"saved-{case.name}"):
        assert_same(mine["resumed"], mine["through"])


@pytest.mark.parametrize("name", THIN)
def test_adafactor_steps_what_can_hardly_be_divided(name, both):
    p, state = step_adafactor(*thin_tensors(THIN[name][0]))
    for mine in results(both, "thin"):
        assert_close(mine[name], (p.detach(), state, p.detach()), EXACT)


def test_the_norm_of_the_clipping_recipe_is_more_than_a_shards():
    """Or the row "clip_by_global_norm" would say nothing about whose norm it is."""
    (case,) = named("clip_by_global_norm")
    for i in range(STEPS):
        grads = tensors(case, i + 1)
        assert sum(g.square().sum() for g in grads.values()).sqrt() > 2 * case.hyper["max_norm"]
        shard = grads["rows"].chunk(WORLD)[1]
        assert shard.square().sum() < 0.9 * grads["rows"].square().sum()


def test_a_fully_sharded_model_trains_as_a_whole_one(both):
    model, data = model_and_data()
    step_model(model, model_optimizer(model), data)
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for mine in results(both, "fully_shard"):
        assert_close(mine["end"], wanted, EXACT)


@each(ZERO)
def test_divided_optimizer_state_changes_nothing(case, both):
    model, data = model_and_data()
    opt = case.drop_in(model.parameters(), compile=False, **case.hyper)
    step_model(model, opt, data)
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    mine = results(both, f"zero-{case.name}")
    for end, _ in mine:
        assert_close(end, wanted, EXACT)
    assert sum(kept for _, kept in mine) == len(opt.state)
    assert all(kept < 4 for _, kept in mine)


def test_a_fully_sharded_checkpoint_goes_on_in_one_process(both):
    saved, *_ = results(both, "fully_shard")
    model, data = model_and_data()
    model.load_state_dict(saved["middle"])
    opt = model_optimizer(model)
    set_optimizer_state_dict(model, opt, saved["saved"])
    step_model(model, opt, data[STEPS:])
    assert_close({n: p.detach() for n, p in model.named_parameters()}, saved["end"], EXACT)
