"""Parts of the two processes: one model trained in each of torch's ways to use several processes.

Each process has its own half of a batch, and gradients are means, so one process that has whole
batches goes the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import torch
from ranks import WORLD, whole
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import functional_optim as fo
from functional_optim import adapters

STEPS = 4
NAN_AT = 1
WAYS = ("ddp", "fsdp2", "tp", "zero", "fsdp1", "fsdp1-flat")
"""fsdp1: FullyShardedDataParallel with use_orig_params; flat: without."""
PARTS = ("zero", "fsdp1", "fsdp1-flat")
"""In these, a process's optimizer has plain tensors that are a part of the model."""
DIVIDED = ("fsdp2", "tp")


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


def clipped(case):
    """A row of the table behind a clipping that acts in every step."""

    def recipe(lr):
        hyper = {**case.hyper, "lr": lr} if "lr" in case.hyper else case.hyper
        return fo.chain(fo.clip_by_global_norm(0.1), case.recipe(**hyper))

    return recipe


def watched(lr):
    every = {"norm": fo.measures.global_norm, "nans": fo.measures.nan_count}
    return fo.chain(fo.monitor(every), fo.sgd(lr, 0.9))


COMPARED = {**fo.measures.diagnostics, "norm": fo.measures.cosine}
"""Of these the number called "norm" is compared."""


def watched_each(lr):
    tx = fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(lr))
    return fo.monitor(COMPARED, around=tx, per_tensor=True)


def watched_around(lr):
    return fo.monitor(COMPARED, around=fo.adamw(lr))


def finite(lr):
    return fo.apply_if_finite(fo.chain(fo.clip_by_global_norm(0.1), fo.nadam(lr)), 2)


def waiting(lr):
    inner = fo.chain(fo.clip_by_global_norm(0.1), fo.adam(lr))
    return fo.accumulate(inner, 2, skip_nonfinite=True)


def lamb(lr):
    rule = fo.chain(fo.scale_by_adam(), fo.add_decayed_weights(0.1), fo.scale_by_trust_ratio())
    return fo.chain(rule, fo.scale_by_lr(lr))


def careful(lr):
    return fo.chain(fo.cautious(fo.scale_by_adam()), fo.scale_by_lr(lr), fo.params_ema(0.9))


def plateau(lr):
    return fo.chain(fo.sgd(lr), fo.reduce_on_plateau(0.5, patience=1, rtol=0.5))


def polyak(lr):
    return fo.chain(fo.scale_by_polyak(lr), fo.scale(-1))


def divided(lr):
    """Muon for matrices, AdamW for the others, each with a norm of its own."""
    parts = {
        "muon": fo.chain(fo.clip_by_global_norm(0.1), fo.muon(lr)),
        "adamw": fo.chain(fo.normalize(0.5), fo.adamw(lr)),
    }
    return fo.partition(parts, lambda path, p: "muon" if p.dim() == 2 else "adamw")


def by_path(lr):
    return fo.chain(fo.freeze("*2.bias"), fo.masked(fo.trace(0.9), "*weight"), fo.scale_by_lr(lr))


def noisy(lr):
    return fo.chain(fo.add_noise(0.1, 0.5, seed=3), fo.clip_by_global_norm(0.1), fo.sgd(lr))


WHOLE_SHAPES = ("ddp", "fsdp2", "tp", "zero")
MATRICES = ("muon", "adafactor")
DENSE = [case for case in cases.families() if case.stock is not None and case.name != "muon"] + [
    case for case in cases.CASES if case.name in ("sgd-momentum", "adamw")
]
ROWS = [
    *[
        Row(c.name, clipped(c), WHOLE_SHAPES if c.name in MATRICES else WAYS, rounding=1e-9)
        for c in DENSE
    ],
    Row("compiled", lambda lr: cases.composed(lr, 0.1, 0.9), compile=True),
    Row("composed", lambda lr: cases.composed(lr, 0.1, 0.9)),
    Row("lookahead", lambda lr: fo.lookahead(fo.adam(lr), 2)),
    Row("monitor", watched),
    Row("monitor-each", watched_each, ("ddp", "fsdp2", "tp"), rounding=1e-9),
    Row("monitor-around", watched_around),
    Row("apply_if_finite", finite, nan=True),
    Row("skip_large_updates", lambda lr: fo.skip_large_updates(fo.adam(lr), 0.4)),
    Row("dynamic_loss_scale", lambda lr: fo.dynamic_loss_scale(fo.adam(lr), 4.0)),
    Row("accumulate", waiting, nan=True),
    Row("lamb", lamb, WHOLE_SHAPES),
    Row("cautious", careful, WHOLE_SHAPES),
    Row("reduce_on_plateau", plateau, DIVIDED, value=True),
    Row("polyak", polyak, DIVIDED, value=True),
    Row("partition", divided, WHOLE_SHAPES, rounding=2e-2),
    Row("by_path", by_path, ("ddp", "fsdp2", "tp", "fsdp1")),
    Row("add_noise", noisy, ("ddp", "fsdp2", "tp")),
    Row("normalize", lambda lr: fo.chain(fo.normalize(), fo.scale_by_lr(lr))),
]
PAIRS = [(row, way) for row in ROWS for way in row.ways]


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


def optimizer(way, groups, recipe, **settings):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if way in PARTS:
        local = recipe

        def recipe(lr):
            return fo.sharded_over(local(lr))

    if way != "zero":
        return adapters.Optimizer(groups, recipe, **settings)
    for group in groups:
        group["params"] = [p for _, p in group["params"]]
    return ZeroRedundancyOptimizer(groups, adapters.Optimizer, recipe=recipe, **settings)


def full(way, model):
    """All parameters, whole, under the names of the model alone."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if way in ("fsdp1", "fsdp1-flat"):
        with FullyShardedDataParallel.summon_full_params(model):
            found = {n: whole(p) for n, p in model.named_parameters()}
    else:
        found = {n: whole(p) for n, p in model.named_parameters()}
    return {plain_name(name): x for name, x in found.items()}


def spoil_one(model):
    """A NaN in one process only."""
    if dist.get_rank() == WORLD - 1:
        put_nan(model)


def train_together(row, way, mesh):
    model = wrapped(way, mesh, new_model())
    # ZeRO's and DDP's gradients are whole in every process: there all of them have the NaN
    opt = optimizer(way, grouped(model), row.recipe, lr=0.05, compile=row.compile)
    spoil = put_nan if way in ("ddp", "zero") else spoil_one
    norms = train(row, model, opt, part_of(way, batches()), spoil)
    return {"end": full(way, model), "norms": norms}


def parts(mesh, folder):
    return {
        f"{way}-{row.name}": lambda row=row, way=way: train_together(row, way, mesh)
        for row, way in PAIRS
    }
