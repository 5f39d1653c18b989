"""Optimizers that are stepped on the device for tests and on the CPU, and what they end with."""

from __future__ import annotations

import torch

import functional_optim as fo
from functional_optim import adapters

SHAPES = [(40, 67), (67,), (67,), (), (0,), (3, 2)]
STEPS = 4


def composed(lr):
    return fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(lr), fo.params_ema(0.9))


def sgd(lr):
    return fo.sgd(lr, momentum=0.9)


def by_recipe(recipe, **hyper):
    return lambda params, **more: adapters.Optimizer(params, recipe, **{**hyper, **more})


MAKE = {
    "AdamW": adapters.AdamW,
    "AdamW-amsgrad": lambda params, **more: adapters.AdamW(params, amsgrad=True, **more),
    "NAdam": adapters.NAdam,
    "SGD": lambda params, lr=0.01, **more: adapters.SGD(params, lr, momentum=0.9, **more),
    "Adadelta": adapters.Adadelta,
    "composed": by_recipe(composed, lr=0.01),
    "lamb": by_recipe(fo.lamb, lr=0.01),
    "prodigy": by_recipe(fo.prodigy, lr=1.0),
    "adafactor": by_recipe(fo.adafactor, lr=0.01),
    "sm3": by_recipe(fo.sm3, lr=0.01),
}
LAUNCHES = {
    "composed": ["measure_kernel", "sum_kernel", "step_kernel"],
    "lamb": ["measure_kernel", "sum_kernel", "measure_kernel", "step_kernel"],
    "prodigy": ["measure_kernel", "measure_kernel", "sum_kernel", "step_kernel"],
    "adafactor": [
        *(*["measure_kernel"] * 5, *["step_kernel"] * 3),  # matrices
        *("measure_kernel", "step_kernel"),  # vectors, and a number
    ],
    "sm3": [*["measure_kernel"] * 2, *["step_kernel"] * 4],
}


def tensors(count, dtype=torch.float32):
    torch.manual_seed(0)
    return [[torch.randn(shape, dtype=dtype) for shape in SHAPES] for _ in range(count)]


def params_on(device, dtype=torch.float32):
    return [p.to(device).requires_grad_() for p in tensors(1, dtype)[0]]


def give(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = g.to(p.device, p.dtype)


def state_of(opt, params):
    own = [x for p in params for x in opt.state.get(p, {}).values() if isinstance(x, torch.Tensor)]
    return [x.detach().cpu() for x in (*params, *own)]


def train(make, device, dtype=torch.float32, steps=STEPS, **hyper):
    params = params_on(device, dtype)
    opt = make(params, **hyper)
    for grads in tensors(steps + 1, dtype)[1:]:
        give(params, grads)
        opt.step()
    return state_of(opt, params)


def alike(a, b, ulps=0.0):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        close = ulps * (torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0)
        assert torch.allclose(x.double(), y.double(), rtol=close, atol=close, equal_nan=True)
