"""Recipes put together by combinators, as functions of a learning rate that pickle can find."""

import torch
from torch import Tensor

import functional_optim as fo

SHAPES = {"body.b": (4,), "body.w": (3, 4), "head": ()}
"""A small model's parameters, by name."""


def signs(grads, state, params=None):
    return fo.tree.map(torch.sign, grads), state + 1


whole = fo.GradientTransformation(lambda params: torch.zeros(()), signs)
"""A transformation that is not made of one-tensor rules; its state counts its steps."""


def named_params(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}


def partitioned(lr):
    parts = {"fast": fo.adamw(lr, weight_decay=0.1), "slow": fo.sgd(lr, 0.9), "still": fo.freeze()}
    return fo.partition(parts, {"*.w": "fast", "*.b": "slow", "*": "still"})


def with_norms(lr):
    """A norm over all that is not frozen, and one in a part."""
    one = fo.chain(fo.clip_by_global_norm(0.3), fo.adam(lr))
    parts = fo.partition({"one": one, "two": fo.sgd(lr)}, {"*.w": "one", "*": "two"})
    return fo.chain(fo.clip_by_global_norm(1.0), fo.freeze("head"), parts)


def masked(lr):
    return fo.chain(fo.masked(fo.trace(0.9), "body"), fo.scale_by_lr(lr))


def frozen(lr):
    return fo.chain(fo.freeze("body.w"), fo.adam(lr), fo.params_ema(0.9))


def selective(lr):
    return fo.selective_transform(fo.nadam(lr), freeze_mask=lambda path, p: p.dim() == 1)


def transformed(lr):
    return fo.chain(fo.conditionally_transform(fo.trace(0.9), every_other), fo.scale_by_lr(lr))


def conditional(lr):
    return fo.conditionally_mask(fo.chain(fo.adam(lr), fo.params_ema(0.9)), every_other)


def every_other(step):
    return step % 2 == 1


def finite(lr):
    return fo.apply_if_finite(fo.nadam(lr), 2)


def small(lr):
    return fo.skip_large_updates(fo.adam(lr), 3.5)


def accumulated(lr):
    return fo.accumulate(fo.chain(fo.clip_by_global_norm(0.5), fo.nadam(lr)), 3)


def growing(lr):
    return fo.accumulate(fo.adam(lr), lambda done: 1 + done // 2, mean=False, skip_nonfinite=True)


def deep(lr):
    """A partition in an accumulation in a chain with a norm before."""
    parts = {"muon": fo.muon(lr), "adamw": fo.adamw(lr), "still": fo.freeze()}
    labels = {"head": "still", "*.w": "muon", "*": "adamw"}
    return fo.chain(fo.clip_by_global_norm(1.0), fo.accumulate(fo.partition(parts, labels), 2))


def guarded(lr):
    """Gates behind gates."""
    inner = fo.conditionally_mask(fo.adam(lr), every_other)
    return fo.apply_if_finite(fo.accumulate(inner, 2), 1)


def whole_part(lr):
    """A part of a partition that is not leafwise, and frozen leaves."""
    parts = {"whole": fo.chain(whole, fo.scale_by_lr(lr)), "leafwise": fo.adam(lr)}
    labels = {"*.w": "whole", "*": "leafwise"}
    return fo.chain(fo.freeze("head"), fo.partition(parts, labels))


def whole_behind(lr):
    return fo.accumulate(fo.chain(fo.freeze("head"), whole, fo.adam(lr)), 2)


def looking_ahead(lr):
    return fo.lookahead(fo.adam(lr), sync_period=3, slow_step_size=0.4)


def flattened(lr):
    return fo.flatten(fo.chain(fo.clip_by_global_norm(1.0), fo.adam(lr)))


def scheduled(lr):
    """A recipe that computes with its argument."""
    return fo.with_schedule(decayed, lr=lr, weight_decay=fo.schedules.linear(0.3, 0.0, 8))


def decayed(lr, weight_decay):
    return fo.chain(fo.add_decayed_weights(weight_decay * lr), fo.scale_by_lr(lr))


LEAFWISE = (
    partitioned, with_norms, masked, frozen, selective, transformed, conditional, finite, small,
    accumulated, growing, deep, guarded,
)  # fmt: skip
WHOLE = (whole_part, whole_behind)
WRAPPED = (looking_ahead, flattened, scheduled)
