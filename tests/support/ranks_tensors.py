"""Parts of the two processes: DTensors stepped by every row of the table, and kept on disk."""

from __future__ import annotations

import copy
from typing import Any

import cases
import torch
from helpers import run
from ranks import whole
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from functional_optim import adapters

STEPS = 4

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


def parts(mesh, folder):
    found = {case.name: lambda case=case: step_sharded(case, mesh) for case in cases.CASES}
    found["compiled"] = lambda: step_sharded(COMPOSED, mesh, compile=True)
    found["fully_shard"] = lambda: train_fully_sharded(mesh)
    found["thin"] = lambda: step_thin(mesh)
    for case in KEPT:
        found[f"saved-{case.name}"] = lambda case=case: save_and_load(case, mesh, folder)
    return found
