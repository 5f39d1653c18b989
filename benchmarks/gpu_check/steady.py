"""Steps after the first ones: what the host waits for, captures, and unscaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters, schedules, tree
from gpu_check.platform import WARM_UPS, NotHere, Platform
from gpu_check.recipes import clipped
from gpu_check.results import Check, Figures, expect
from gpu_check.training import check_close, launches, parameters, tensors_of

SHAPES = [(97, 130), (40, 7), (67,), ()]
STEPS = 4
CLIPPED: dict[str, Any] = {"lr": 0.01, "max_norm": 0.1, "decay": 0.9}

Opt = torch.optim.Optimizer


def checks(quick: bool) -> list[Check]:
    waits: dict[str, Callable[[Platform], Callable[[int], Any]]] = {
        "adamw": lambda platform: stepping(adamw(platform)),
        "clip": lambda platform: stepping(clip(platform)),
        "function": functional,
        "lr": lambda platform: new_rates(adamw(platform)),
        "addresses": lambda platform: new_gradients(adamw(platform)),
    }
    captures: dict[str, Callable[[Platform, Tensor], Any]] = {
        "adamw": lambda platform, lr: Captured(adamw(platform, lr=lr, capturable=True)),
        "clip": lambda platform, lr: Captured(clip(platform, lr=lr, capturable=True)),
        "function": CapturedFunction,
    }
    return [
        *[Check(f"waits/{name}", partial(never_waits, make)) for name, make in waits.items()],
        Check("waits/busy", host_goes_on),
        *[Check(f"capture/{name}", partial(replays, make)) for name, make in captures.items()],
        Check("capture/refused", refused),
        Check("scaler/inf", partial(unscaled, {})),
        Check("scaler/inf-fused", partial(unscaled, {"fused": True})),
        Check("devices/norm", over_two_devices),
    ]


def adamw(platform: Platform, **options: Any) -> Opt:
    params = parameters(SHAPES, platform.device)
    return adapters.AdamW(params, **{"lr": 0.01, **options})


def clip(platform: Platform, **options: Any) -> Opt:
    params = parameters(SHAPES, platform.device)
    return adapters.Optimizer(params, clipped, **{**CLIPPED, **options})


def stepping(opt: Opt) -> Callable[[int], Any]:
    return lambda k: opt.step()


def new_rates(opt: Opt) -> Callable[[int], Any]:
    """A different learning rate for every step."""

    def step(k: int) -> None:
        opt.param_groups[0]["lr"] = 0.01 / (1 + k)
        opt.step()

    return step


def new_gradients(opt: Opt) -> Callable[[int], Any]:
    """Gradients that lie somewhere else in every step."""
    kept: list[Tensor] = []

    def step(k: int) -> None:
        for p in opt.param_groups[0]["params"]:
            kept.append(p.grad)
            p.grad = p.grad.clone()
        opt.step()

    return step


def functional(platform: Platform) -> Callable[[int], Any]:
    """`fo.compile`'s step, with a schedule."""
    params = parameters(SHAPES, platform.device)
    grads, tensors = [p.grad for p in params], [p.detach() for p in params]
    tx = fo.adamw(schedules.linear(0.01, 0.001, 100))
    step, state = fo.compile(tx), tx.init(tensors)

    def run(k: int) -> None:
        nonlocal state
        _, state = step(grads, state, tensors)

    return run


def never_waits(
    make: Callable[[Platform], Callable[[int], Any]], platform: Platform, figures: Figures
) -> None:
    """Steps behind the first ones make the host wait for nothing."""
    step = make(platform)
    for k in range(WARM_UPS):
        step(k)
    with platform.no_waits():
        for k in range(STEPS):
            step(WARM_UPS + k)
    names = launches(platform, partial(step, WARM_UPS + STEPS))
    if names is not None:
        figures["launches"] = len(names)
        figures["kernels"] = names[:20]


def host_goes_on(platform: Platform, figures: Figures) -> None:
    """A step returns while the device is still at work on what was asked before it."""
    step = new_gradients(clip(platform))
    for k in range(WARM_UPS):
        step(k)
    platform.synchronize()
    done = platform.busy()
    expect(not done(), "the device is too fast for this check: its work was done at once.")
    step(WARM_UPS)
    expect(not done(), "the step returned only when the device had done all work before it.")


class Captured:
    """An optimizer object, to be captured. tensors: all that a step writes."""

    def __init__(self, opt: Opt) -> None:
        self.opt = opt
        self.params: list[Tensor] = opt.param_groups[0]["params"]
        self.grads = [p.grad for p in self.params]

    def step(self) -> None:
        self.opt.step()

    def tensors(self) -> list[Tensor]:
        return [*self.params, *tensors_of(self.opt).values()]


class CapturedFunction:
    """The same, as `fo.compile`'s step of a recipe that clips."""

    def __init__(self, platform: Platform, lr: Tensor) -> None:
        params = parameters(SHAPES, platform.device)
        self.grads = [p.grad for p in params]
        self.params = [p.detach() for p in params]
        tx = fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(lr))
        options: dict[str, Any] = {"capturable": True}
        self.run = fo.compile(tx, **options)
        self.state = tx.init(self.params)

    def step(self) -> None:
        _, self.state = self.run(self.grads, self.state, self.params)

    def tensors(self) -> list[Tensor]:
        return [*self.params, *[x for x in tree.leaves(self.state) if isinstance(x, Tensor)]]


def replays(make: Callable[[Platform, Tensor], Any], platform: Platform, figures: Figures) -> None:
    """Replays of a captured step are eager steps bitwise, under a schedule."""
    if not platform.captures:
        raise platform.not_here()
    lr, own_lr = (torch.tensor(0.01, device=platform.device) for _ in range(2))
    ours, eager = make(platform, lr), make(platform, own_lr)
    replay = platform.captured(ours.step)
    for _ in range(WARM_UPS):
        eager.step()
    for k in range(STEPS):
        for rate, one in ((lr, ours), (own_lr, eager)):
            rate.fill_(0.01 / (1 + k))
            for g in one.grads:
                g.mul_(-0.5)
        replay()
        eager.step()
        for i, (x, y) in enumerate(zip(ours.tensors(), eager.tensors(), strict=True)):
            expect(torch.equal(x, y), f"tensor {i} differs after replay {k + 1}.")
    figures["replays"] = STEPS


def refused(platform: Platform, figures: Figures) -> None:
    """A capture without `capturable` is an error, and the optimizer works afterwards."""
    if not platform.captures:
        raise platform.not_here()
    opt = adamw(platform)
    try:
        platform.captured(opt.step)
    except Exception as error:
        figures["error"] = f"{type(error).__name__}: {error}"[:200]
    else:
        raise AssertionError("a step without capturable=True was captured without an error.")
    platform.synchronize()
    before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
    opt.step()
    after = opt.param_groups[0]["params"]
    moved = [not torch.equal(x, y) for x, y in zip(before, after, strict=True)]
    expect(all(moved), "the step after the refused capture has changed nothing.")


def unscaled(options: dict[str, Any], platform: Platform, figures: Figures) -> None:
    """Under a GradScaler a step with an infinite gradient is left out, as of torch's AdamW."""
    runs: list[tuple[list[Tensor], dict[str, Tensor], float]] = []
    kinds: list[tuple[Any, dict[str, Any]]]
    kinds = [(adapters.AdamW, options), (torch.optim.AdamW, {"fused": True})]
    for cls, own in kinds:
        params = parameters(SHAPES, platform.device)
        opt = cls(params, lr=0.01, **own)
        scaler = torch.amp.GradScaler(platform.device.type, init_scale=1024.0)
        for k in range(5):
            loss = sum(
                [(p * p).sum() for p in params], start=torch.zeros((), device=platform.device)
            )
            opt.zero_grad()
            scaler.scale(loss * (float("inf") if k == 2 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
        runs.append(([p.detach() for p in params], tensors_of(opt), scaler.get_scale()))
    (ours, slots, scale), (theirs, their_slots, their_scale) = runs
    figures["scale"] = scale
    expect(scale == their_scale, f"the scale is {scale}, and torch's is {their_scale}.")
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        check_close(x, y, f"parameter {i}")
    for key, y in their_slots.items():
        x = slots[key].to(y)
        check_close(x, y, f"the slot {key}")


def over_two_devices(platform: Platform, figures: Figures) -> None:
    """A global norm over a model on two devices, as on the CPU."""
    devices = platform.devices()[:2]
    if len(devices) < 2:
        raise NotHere(f"there is one device, {platform.device}")
    here = parameters(SHAPES, torch.device("cpu"))
    there: list[Tensor] = []
    for i, p in enumerate(here):
        there.append(torch.nn.Parameter(p.detach().to(devices[i % 2], copy=True)))
        assert p.grad is not None
        there[-1].grad = p.grad.to(devices[i % 2])
    for params in (here, there):
        opt = adapters.Optimizer(params, clipped, **CLIPPED)
        for _ in range(STEPS):
            opt.step()
    for i, (x, y) in enumerate(zip(there, here, strict=True)):
        check_close(x, y, f"parameter {i}")
    figures["devices"] = [str(x) for x in devices]
