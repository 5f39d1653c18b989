"""DDP, FSDP2, tensor parallelism, ZeRO and FSDP1: two processes train as one."""

import cases
import pytest
from helpers import assert_close
from ranks import WORLD, needs_gloo, results
from ranks_models import (
    DENSE,
    WAYS,
    Row,
    alone,
    batches,
    full,
    grouped,
    new_model,
    part_of,
    put_nan,
    train,
    wrapped,
)
from torch import distributed as dist

import functional_optim as fo
from functional_optim import adapters

pytestmark = needs_gloo

PARTS = ("zero", "fsdp1", "fsdp1-flat")
"""In these, a process's optimizer has plain tensors that are a part of the model."""
DIVIDED = ("fsdp2", "tp")


def clipped(case):
    """A row of the table behind a clipping that acts in every step."""

    def recipe(lr):
        hyper = {**case.hyper, "lr": lr} if "lr" in case.hyper else case.hyper
        return fo.chain(CLIP, case.recipe(**hyper))

    return recipe


NORMS = {"norm": fo.measures.global_norm, "nans": fo.measures.nan_count}
COMPARED = {**fo.measures.diagnostics, "norm": fo.measures.cosine}
"""Of these the number called "norm" is compared."""
CLIP = fo.clip_by_global_norm(0.1)


PLATEAU = fo.reduce_on_plateau(0.5, patience=1, rtol=0.5)


def lamb(lr):
    rule = fo.chain(fo.scale_by_adam(), fo.add_decayed_weights(0.1), fo.scale_by_trust_ratio())
    return fo.chain(rule, fo.scale_by_lr(lr))


def careful(lr):
    return fo.chain(fo.cautious(fo.scale_by_adam()), fo.scale_by_lr(lr), fo.params_ema(0.9))


def divided(lr):
    """Muon for matrices, AdamW for the others, each with a norm of its own."""
    parts = {
        "muon": fo.chain(CLIP, fo.muon(lr)),
        "adamw": fo.chain(fo.normalize(0.5), fo.adamw(lr)),
    }
    return fo.partition(parts, lambda path, p: "muon" if p.dim() == 2 else "adamw")


def by_path(lr):
    return fo.chain(fo.freeze("*2.bias"), fo.masked(fo.trace(0.9), "*weight"), fo.scale_by_lr(lr))


WHOLE_SHAPES = ("ddp", "fsdp2", "tp", "zero")
PLAIN = ("ddp", "fsdp2", "tp")
EVERYWHERE = {"adamw": WAYS, "sgd-momentum": WAYS, "adafactor": WHOLE_SHAPES}
"""The rows of the table that go each way; the others differ in what they do with an element."""
ROWS = [
    *[Row(c.name, clipped(c), EVERYWHERE.get(c.name, ("fsdp2",)), rounding=1e-9) for c in DENSE],
    Row("compiled", lambda lr: cases.composed(lr, 0.1, 0.9), compile=True),
    Row("composed", lambda lr: cases.composed(lr, 0.1, 0.9)),
    Row("lookahead", lambda lr: fo.lookahead(fo.adam(lr), 2)),
    Row("monitor", lambda lr: fo.chain(fo.monitor(NORMS), fo.sgd(lr, 0.9))),
    Row(
        "monitor-each",
        lambda lr: fo.monitor(COMPARED, around=fo.chain(CLIP, fo.adamw(lr)), per_tensor=True),
        PLAIN,
        rounding=1e-9,
    ),
    Row("monitor-around", lambda lr: fo.monitor(COMPARED, around=fo.adamw(lr))),
    Row(
        "apply_if_finite", lambda lr: fo.apply_if_finite(fo.chain(CLIP, fo.nadam(lr)), 2), nan=True
    ),
    Row("skip_large_updates", lambda lr: fo.skip_large_updates(fo.adam(lr), 0.4)),
    Row("dynamic_loss_scale", lambda lr: fo.dynamic_loss_scale(fo.adam(lr), 4.0)),
    Row(
        "accumulate",
        lambda lr: fo.accumulate(fo.chain(CLIP, fo.adam(lr)), 2, skip_nonfinite=True),
        nan=True,
    ),
    Row("lamb", lamb, WHOLE_SHAPES),
    Row("cautious", careful, WHOLE_SHAPES),
    Row("reduce_on_plateau", lambda lr: fo.chain(fo.sgd(lr), PLATEAU), DIVIDED, value=True),
    Row("polyak", lambda lr: fo.chain(fo.scale_by_polyak(lr), fo.scale(-1)), DIVIDED, value=True),
    Row("partition", divided, WHOLE_SHAPES, rounding=2e-2),
    Row("by_path", by_path, (*PLAIN, "fsdp1")),
    Row("add_noise", lambda lr: fo.chain(fo.add_noise(0.1, 0.5, seed=3), CLIP, fo.sgd(lr)), PLAIN),
    Row("normalize", lambda lr: fo.chain(fo.normalize(), fo.scale_by_lr(lr))),
]
PAIRS = [(row, way) for row in ROWS for way in row.ways]


# ---------------------------------------------------------------- in the two processes
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


# ---------------------------------------------------------------- and in this one
@pytest.mark.parametrize(
    ("row", "way"), [pytest.param(row, way, id=f"{way}-{row.name}") for row, way in PAIRS]
)
def test_two_processes_train_as_one(row, way, both):
    """To 1e-10, with groups, a scheduler and a clipping that acts."""
    end, norms = alone(row, one_group=way == "fsdp1-flat")
    for mine in results(both, f"{way}-{row.name}"):
        assert_close(mine["end"], end, row.rounding)
        if mine["norms"]:
            assert_close(mine["norms"], norms, 1e-6)
