"""One model, trained in each of torch's ways to use several processes.

Each process has its own half of a batch, and gradients are means, so one process that has whole
batches goes the same way.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import torch
from ranks import WORLD, whole
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from functional_optim import adapters

STEPS = 4
NAN_AT = 1
WAYS = ("ddp", "fsdp2", "tp", "zero", "fsdp1", "fsdp1-flat")
"""fsdp1: FullyShardedDataParallel with use_orig_params; flat: without."""


class Row(NamedTuple):
    """A recipe of a learning rate, trained in some ways.

    compile: with kernels. nan: in step NAN_AT one process finds a NaN in one of its parts. value:
    does the recipe read the loss?
    """

    name: str
    recipe: Callable[..., Any]
    ways: tuple[str, ...] = WAYS
    compile: bool = False
    nan: bool = False
    value: bool = False
    rounding: float = 1e-10


DENSE = [case for case in cases.families() if case.stock is not None and case.name != "muon"] + [
    case for case in cases.CASES if case.name in ("sgd-momentum", "adamw")
]


def new_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)]
    return torch.nn.Sequential(*layers).to(torch.float64)


def batches(steps=STEPS):
    torch.manual_seed(1)
    return [torch.randn(2 * WORLD, 5, dtype=torch.float64) for _ in range(steps)]


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def plain_name(name):
    """A parameter's name in the model alone: what patterns and noise go by."""
    return name.removeprefix("module.").removeprefix("_fsdp_wrapped_module.")


def grouped(model):
    """Weights and biases as groups with learning rates of their own."""
    found = [(plain_name(name), p) for name, p in model.named_parameters()]
    if len(found) == 1:
        return [{"params": found}]
    weights, biases = ([x for x in found if x[0].endswith(kind)] for kind in ("weight", "bias"))
    return [{"params": weights}, {"params": biases, "lr": 0.03}]


def train(row, model, opt, inputs, spoil=None):
    """The usual loop, with a scheduler."""
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
    norms = []
    for i, x in enumerate(inputs):

        def closure(x=x, i=i):
            opt.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            if row.nan and i == NAN_AT and spoil is not None:
                spoil(model)
            return loss

        opt.step(closure) if row.value else (closure(), opt.step())
        inner = getattr(opt, "optim", opt)
        states = [s for s in inner.state.values() if "norm" in s]
        norms += [s["norm"].clone() for s in states[:1]]
        scheduler.step()
    return norms


def alone(row, one_group=False):
    """Where one process goes."""
    model = new_model()
    groups = [{"params": list(model.named_parameters())}] if one_group else grouped(model)
    opt = adapters.Optimizer(groups, row.recipe, lr=0.05, compile=row.compile)
    norms = train(row, model, opt, batches(), spoil=put_nan)
    return {name: whole(p) for name, p in model.named_parameters()}, norms


def put_nan(model):
    """A NaN into one gradient that this process has."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    next(g for g in local if g.numel()).view(-1)[0] = torch.nan


# ---------------------------------------------------------------- in the two processes
def wrapped(way, mesh, model):
    """The model as it is used that way; its part of a batch is that of `mine`."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    if way in ("ddp", "zero"):
        return DistributedDataParallel(model)
    if way == "fsdp2":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    if way == "tp":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this machine has no accelerator
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=way == "fsdp1"
        )


def part_of(way, inputs):
    """This process's half of each batch; all of it in tensor parallelism."""
    return inputs if way == "tp" else [x.chunk(WORLD)[dist.get_rank()] for x in inputs]


def full(way, model):
    """All parameters, whole, under the names of the model alone."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if way in ("fsdp1", "fsdp1-flat"):
        with FullyShardedDataParallel.summon_full_params(model):
            found = {n: whole(p) for n, p in model.named_parameters()}
    else:
        found = {n: whole(p) for n, p in model.named_parameters()}
    return {plain_name(name): x for name, x in found.items()}
