"""Times and memory of steps, ours and torch's alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from traffic import ADAMW, words

import functional_optim as fo
from functional_optim import adapters, warmup
from gpu_check.platform import Platform, Step
from gpu_check.recipes import WITHOUT
from gpu_check.results import Check, Figures, at_least, at_most
from gpu_check.training import GPT, parameters, tensors_of

SIDE = 4096
BILLION = 10**9
MOVED = 28
"""Bytes that a step of AdamW reads and writes of an element in float32."""

HELD = 24
"""Bytes of an element with its gradient and the slots of two optimizers."""

TINY: list[tuple[int, ...]] = [(64, 32), (64,), (33,)]
"""For devices whose times are not those that the bars are about."""

OF_MATRICES = {
    *("adamuon", "apollo", "dion2", "galore", "kl_shampoo", "kl_soap", "muon", "muon_adamw"),
    *("normuon", "psgd_kron", "scion", "shampoo", "soap"),
}
"""Algorithms whose time goes into matrix products."""

Build = Callable[[list[Tensor]], Step]


def checks(quick: bool) -> list[Check]:
    rounds = 5 if quick else 25
    foreach: dict[str, dict[str, Any]] = {
        "NAdam": {"lr": 1e-3},
        "RAdam": {"lr": 1e-3},
        "Adadelta": {"lr": 1e-3},
        "ASGD": {"lr": 1e-3},
    }
    found = [
        Check("memory/step", memory),
        Check("times/host", partial(host, rounds)),
        Check("times/bandwidth", partial(bandwidth, rounds)),
        Check("times/adamw-gpt", partial(against, gpt, ours("AdamW"), fused, 1.0, rounds)),
        Check("times/adamw-large", partial(against, large, ours("AdamW"), fused, 1.0, rounds)),
        Check("times/clip-gpt", partial(against, gpt, recipe, parts, 0.7, rounds)),
    ]
    for name, options in list(foreach.items())[: 1 if quick else None]:
        theirs = _foreach(name, options)
        run = partial(against, gpt, ours(name, **options), theirs, 0.4, rounds)
        found.append(Check(f"times/{name.lower()}-gpt", run))
    found += [
        Check("times/int8-large", partial(against, large, packed, fused, 0.75, rounds)),
        Check("times/muon-gpt", partial(against, hidden, ours("Muon"), muon, 1.0, rounds)),
    ]
    names = warmup.known().keys() - WITHOUT - OF_MATRICES
    found += [Check(f"traffic/{name}", partial(traffic, name, 5)) for name in sorted(names)]
    return found


def gpt(platform: Platform) -> list[Tensor]:
    """GPT-2's parameters."""
    return parameters(GPT if platform.timed else TINY, platform.device)


def hidden(platform: Platform) -> list[Tensor]:
    """GPT-2's matrices, but for its embeddings."""
    return [p for p in gpt(platform) if p.dim() == 2 and max(p.shape) < 4096]


def large(platform: Platform) -> list[Tensor]:
    """A billion parameters, or as many as the free memory holds with two optimizers."""
    if not platform.timed:
        return parameters(TINY, platform.device)
    count = min(BILLION, int(0.8 * platform.free_memory() / HELD))
    return parameters([(SIDE, SIDE)] * max(1, count // SIDE**2), platform.device)


def ours(name: str, **options: Any) -> Build:
    return lambda params: getattr(adapters, name)(params, **options).step


def fused(params: list[Tensor]) -> Step:
    return torch.optim.AdamW(params, fused=True).step


def packed(params: list[Tensor]) -> Step:
    """AdamW whose slots have 8 bits."""
    return adapters.Optimizer(params, lambda lr: fo.stored(fo.adamw(lr), "int8"), lr=1e-3).step


def muon(params: list[Tensor]) -> Step:
    return torch.optim.Muon(params).step


def _foreach(name: str, options: dict[str, Any]) -> Build:
    return lambda params: getattr(torch.optim, name)(params, foreach=True, **options).step


def recipe(params: list[Tensor]) -> Step:
    def made(lr: float) -> fo.GradientTransformation:
        return fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr), fo.params_ema(0.999))

    return adapters.Optimizer(params, made, lr=1e-3).step


def parts(params: list[Tensor]) -> Step:
    """The same of torch's parts: a clip, AdamW and an average over lists of tensors."""
    opt = torch.optim.AdamW(params, foreach=True)
    average = [p.detach().clone() for p in params]
    lerp = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        opt.step()
        lerp(average, params, None)

    return step


def race(platform: Platform, steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of some calls, alternately: A B A B. Each is made a few times before."""
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(platform.seconds(step))
    return times


def noted(figures: Figures, times: dict[str, list[float]]) -> None:
    """Note minima and medians in milliseconds."""
    for name, own in times.items():
        figures[f"{name}, ms"] = 1000 * min(own)
        figures[f"{name}, median ms"] = 1000 * statistics.median(own)


def against(
    tensors: Callable[[Platform], list[Tensor]],
    build: Build,
    rival: Build,
    bar: float,
    rounds: int,
    platform: Platform,
    figures: Figures,
) -> None:
    """Our step alternately with torch's, over the same tensors."""
    params = tensors(platform)
    figures["parameters"] = sum([p.numel() for p in params])
    times = race(platform, {"ours": build(params), "torch": rival(params)}, rounds)
    noted(figures, times)
    ratio = min(times["ours"]) / min(times["torch"])
    at_most(figures, "ratio", ratio, bar, holds=platform.timed)


def traffic(name: str, rounds: int, platform: Platform, figures: Figures) -> None:
    """The step of an algorithm alternately with torch's fused AdamW, and the words that it
    moves."""
    params = gpt(platform)
    mine = adapters.Optimizer(params, getattr(fo, name)).step
    times = race(platform, {"ours": mine, "torch": fused(params)}, rounds)
    noted(figures, times)
    figures["words"] = moved = words(name)
    figures["ratio"] = ratio = min(times["ours"]) / min(times["torch"])
    figures["over the limit"] = ratio * ADAMW / moved


def bandwidth(rounds: int, platform: Platform, figures: Figures) -> None:
    """A large step's bytes in a second, as a part of those of a copy."""
    params = large(platform)
    total = sum([p.numel() for p in params])
    source = torch.ones(min(total, BILLION // 2), device=platform.device)
    target = torch.empty_like(source)
    steps = {"ours": ours("AdamW")(params), "copy": lambda: target.copy_(source)}
    times = race(platform, steps, rounds)
    noted(figures, times)
    step, copy = MOVED * total / min(times["ours"]), 8 * source.numel() / min(times["copy"])
    figures |= {"parameters": total, "step GB/s": step / 1e9, "copy GB/s": copy / 1e9}
    at_least(figures, "share", step / copy, 0.9, holds=platform.timed)


def host(rounds: int, platform: Platform, figures: Figures) -> None:
    """Microseconds until the call of a step over GPT-2's tensors returns."""
    params = gpt(platform)
    figures["tensors"] = len(params)
    for name, step in {"ours": ours("AdamW")(params), "torch": fused(params)}.items():
        taken: list[float] = []
        for k in range(3 + rounds):
            platform.synchronize()
            begin = time.perf_counter()
            step()
            if k >= 3:
                taken.append(1e6 * (time.perf_counter() - begin))
        figures[f"{name}, µs"] = min(taken)
        figures[f"{name}, median µs"] = statistics.median(taken)


def memory(platform: Platform, figures: Figures) -> None:
    """What a step needs beyond parameters, gradients and state, and what the state takes."""
    params = gpt(platform)
    size = sum([p.numel() * p.element_size() for p in params])
    opt = adapters.AdamW(params, lr=1e-3)
    for _ in range(2):
        opt.step()
    slots = [x for x in tensors_of(opt).values() if x.device == params[0].device and x.dim()]
    figures["state / parameters"] = sum([x.numel() * x.element_size() for x in slots]) / size
    extra = platform.extra_memory(opt.step)
    figures["extra bytes"] = extra
    at_most(figures, "extra / parameters", extra / size, 0.05, holds=platform.timed)
