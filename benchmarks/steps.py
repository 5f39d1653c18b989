"""What a step costs: ours against the best form of torch.optim on the same tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from pairs import Step, race
from recipes import MATRIX, MEASURING, WHOLE, Recipe, averaged
from rows import Effort, Measured, Row
from torch import Tensor
from workloads import BIG, GPT, GPT48, MANY, MLP, SMALL, SQUARES, Workload

import functional_optim as fo
from functional_optim import adapters

Build = Callable[[list[Tensor]], Step]
"""From parameters with gradients to a step over them."""


def ours(name: str, **options: Any) -> Build:
    """The step of one of our optimizer objects."""
    return lambda params: getattr(adapters, name)(params, **options).step


def forms(name: str, **options: Any) -> dict[str, Build]:
    """The steps of torch's optimizer of this name, in each form in which it comes."""
    cls = getattr(torch.optim, name)
    known = inspect.signature(cls).parameters
    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    found = {kind: flags for kind, flags in kinds.items() if flags.keys() <= known.keys()}
    return {
        f"torch, {kind}": partial(lambda flags, params: cls(params, **options, **flags).step, flags)
        for kind, flags in (found or {"as it comes": {}}).items()
    }


def of(made: Recipe) -> Build:
    """The step of a recipe's optimizer object."""
    return lambda params: adapters.Optimizer(params, made).step


def composed(params: list[Tensor]) -> Step:
    """One step of the recipe by the optimizer object."""
    return adapters.Optimizer(params, averaged, lr=1e-3).step


def parts(params: list[Tensor]) -> Step:
    """The same from torch's parts: clip_grad_norm_, fused AdamW, a foreach lerp."""
    opt = torch.optim.AdamW(params, fused=True)
    average = [p.detach().clone() for p in params]
    lerp = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        lerp(average, params, None)

    return step


def functional(params: list[Tensor]) -> Step:
    """`fo.compile`'s donated step over the same tensors."""
    tx = fo.adamw()
    step = fo.compile(tx)
    grads = [p.grad for p in params]
    tensors = [p.detach() for p in params]
    state = tx.init(tensors)
    return lambda: step(grads, state, tensors)


def changing_lr(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Build:
    """A step before which something writes a new learning rate, as schedulers do."""

    def build(params: list[Tensor]) -> Step:
        opt = make(params)
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            opt.param_groups[0]["lr"] = 1e-3 / (1 + count)
            opt.step()

        return step

    return build


def in_groups(make: Callable[[Any], torch.optim.Optimizer]) -> Build:
    """The step of an optimizer over eight groups with different learning rates."""

    def build(params: list[Tensor]) -> Step:
        cuts = [params[i::8] for i in range(8)]
        groups = [{"params": own, "lr": 1e-3 / (i + 1)} for i, own in enumerate(cuts) if own]
        return make(groups).step

    return build


def accumulating(params: list[Tensor]) -> Step:
    """A micro-batch of AdamW that steps once in four."""
    return adapters.Optimizer(params, lambda: fo.accumulate(fo.adamw(), 4)).step


def measure(
    workload: Workload, ours: Build, rivals: dict[str, Build], matrices: bool, effort: Effort
) -> Measured:
    """Build all contenders, each with its own parameters, and let them race."""

    def built(build: Build) -> Step:
        return build(workload.parameters(quick=effort.quick, matrices=matrices))

    return race(built(ours), {name: built(build) for name, build in rivals.items()}, effort)


def row(
    key: str,
    what: str,
    workload: Workload,
    ours: Build,
    rivals: dict[str, Build],
    bars: tuple[float, ...] = (),
    matrices: bool = False,
) -> Row:
    words = f"{workload.words}, its matrices" if matrices else workload.words
    run = partial(measure, workload, ours, rivals, matrices)
    return Row(f"{key}-{workload.key}", what, words, run, bars)


def packed(kind: str, made: Recipe = fo.adamw) -> Build:
    """A recipe, AdamW if nothing is said, whose slots are stored so."""
    return of(lambda lr=1e-3: fo.stored(made(lr), kind))


def halved(params: list[Tensor]) -> Step:
    """AdamW over the same tensors, and their gradients, in bfloat16, with 16 bits more."""
    half = [torch.nn.Parameter(p.detach().bfloat16()) for p in params]
    for p, q in zip(half, params, strict=True):
        p.grad = q.grad.bfloat16() if q.grad is not None else None
    return adapters.Optimizer(half, lambda: fo.master_weights(fo.adamw(1e-3), "split16")).step


def monitored(measures: Mapping[str, fo.measures.Measure], *, per_tensor: bool) -> Build:
    """AdamW with measurements around it."""
    return of(lambda lr=1e-3: fo.monitor(measures, around=fo.adamw(lr), per_tensor=per_tensor))


DIAGNOSTICS = fo.measures.diagnostics
WITHOUT_PARAMS = {name: x for name, x in DIAGNOSTICS.items() if "params" not in x.of}
MONITORED = {
    "monitor": ("diagnostics of each parameter", monitored(DIAGNOSTICS, per_tensor=True)),
    "monitor_gradients": (
        "the same without norms of weights",
        monitored(WITHOUT_PARAMS, per_tensor=True),
    ),
    "monitor_model": ("diagnostics of the model", monitored(DIAGNOSTICS, per_tensor=False)),
}

OTHERS = {
    "NAdam": (0.5,),
    "RAdam": (0.5,),
    "RMSprop": (0.5,),
    "Adadelta": (0.5,),
    "Adamax": (0.5,),
    "Rprop": (0.5,),
    "ASGD": (0.7,),
    "Adagrad": (1.0,),
}
"""The bars of the optimizers that are compared with torch's best on three workloads."""


def rows() -> list[Row]:
    """All pairs of steps, with their bars."""
    found: list[Row] = []
    adamw: list[tuple[Workload, tuple[float, ...]]] = [
        (MLP, (0.6,)),
        (GPT, (1.0, 0.95)),
        (GPT48, ()),
        (BIG, (1.0, 0.95)),
        (SMALL, (0.5,)),
        (MANY, (0.5,)),
    ]
    for workload, bars in adamw:
        found.append(row("adamw", "AdamW", workload, ours("AdamW"), forms("AdamW"), bars))
    momentum = {"lr": 1e-3, "momentum": 0.9}
    for workload, bars in ((MLP, (0.6,)), (GPT, (1.0,)), (BIG, (1.0,))):
        sgd = ours("SGD", **momentum), forms("SGD", **momentum)
        found.append(row("sgd", "SGD with momentum", workload, *sgd, bars))
    fused = changing_lr(lambda params: torch.optim.AdamW(params, fused=True))
    for workload in (MLP, GPT):
        found.append(
            row(
                "lr",
                "AdamW, a new lr at every step",
                workload,
                changing_lr(adapters.AdamW),
                {"torch, fused, same": fused},
            )
        )
    for workload in (MLP, GPT, BIG, SMALL):
        rivals = {"the adapter": ours("AdamW")}
        what = "Functional donated step of AdamW"
        found.append(row("functional", what, workload, functional, rivals, (1.0,)))
    for workload, bars in ((MLP, (0.5,)), (GPT, (0.65,)), (BIG, (0.75,))):
        rivals = {"torch: clip_grad_norm_, fused, foreach lerp": parts}
        what = "Clip by global norm, AdamW, average: one recipe"
        found.append(row("composed", what, workload, composed, rivals, bars))
    for name, bars in OTHERS.items():
        for workload in (MLP, GPT, BIG):
            found.append(row(name.lower(), name, workload, ours(name), forms(name), bars))
    rivals = {"torch, fused, same": in_groups(lambda x: torch.optim.AdamW(x, fused=True))}
    for workload in (MLP, GPT):
        groups = in_groups(adapters.AdamW)
        found.append(row("groups", "AdamW in eight groups", workload, groups, rivals))
    rivals = {"our AdamW": ours("AdamW")}
    what = "Micro-batches of AdamW, four a step"
    found.append(row("accumulate", what, GPT, accumulating, rivals))
    for key, (what, build) in MONITORED.items():
        found.append(row(key, f"AdamW, {what}", GPT, build, rivals))
    for key, (what, made) in MEASURING.items():
        found.append(row(key, what, GPT, of(made), {"our AdamW": ours("AdamW")}, (1.5,)))
    for workload, bars in ((GPT, (0.75,)), (SQUARES, (0.12,))):
        found.append(row("muon", "Muon", workload, ours("Muon"), forms("Muon"), bars, True))
    soap = of(MATRIX["soap"][1])
    found.append(row("soap", "SOAP", SQUARES, soap, {"our Muon": ours("Muon")}, (), True))
    found.append(row("adafactor", "Adafactor", GPT, ours("Adafactor"), forms("Adafactor"), (0.18,)))
    rivals = {"our AdamW": ours("AdamW")}
    for kind, bars in (("int8", (1.0,)), ("bfloat16", ()), ("int4", ()), ("float8_e4m3fn", ())):
        what = f"AdamW, slots stored in {kind}"
        found.append(row(f"stored_{kind}", what, BIG, packed(kind), rivals, bars))
    for key, workload in (("lamb", BIG), ("muon", GPT)):
        what, made = WHOLE[key]
        packs, matrices = packed("int8", made), key in MATRIX
        own = {f"our {what}": of(made)}
        what = f"{what}, slots stored in int8"
        found.append(row(f"stored_{key}", what, workload, packs, own, (), matrices))
    what = "AdamW, weights in bfloat16 and split16"
    found.append(row("split16", what, BIG, halved, rivals))
    eager = ours("AdamW", compile=False)
    for workload, bars in ((MLP, ()), (GPT, (1.4,)), (SMALL, ())):
        rivals = {"torch, for-loop": forms("AdamW")["torch, for-loop"]}
        found.append(row("eager", "AdamW with compile=False", workload, eager, rivals, bars))
    return found
