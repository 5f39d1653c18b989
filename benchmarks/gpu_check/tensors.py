"""Tensors of odd layouts and sizes, and checkpoints between devices."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim import adapters
from gpu_check.platform import NotHere, Platform
from gpu_check.results import Check, Figures, expect
from gpu_check.training import check_close, executors_of, parameters, strict

CPU = torch.device("cpu")
SHAPES = [(97, 130), (67,), ()]

HUGE = 2**31 + 9000
"""Elements: more than 32 bits count."""

HELD = 8 * HUGE
"""Bytes of a bfloat16 tensor with its gradient and two slots."""


def checks(quick: bool) -> list[Check]:
    def strided(given: Tensor) -> Tensor:
        return torch.empty(2 * given.numel(), device=given.device)[::2].view_as(given).copy_(given)

    kinds: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
        "transposed": ((97, 130), lambda x: x.t().contiguous().t()),
        "strided": ((997,), strided),
        "empty": ((0, 3), torch.clone),
        "scalar": ((), torch.clone),
        "unaligned": ((9000,), _behind_one),
    }
    odd = [
        Check(f"tensors/{name}", partial(like_torch, shape, layout))
        for name, (shape, layout) in kinds.items()
    ]
    return [
        *odd,
        Check("tensors/complex", pairs_of_numbers),
        Check("tensors/default-device", at_the_default),
        Check("tensors/huge", huge),
        *[Check(f"checkpoint/{name}", partial(carried, name)) for name in ("to-cpu", "from-cpu")],
    ]


def _behind_one(given: Tensor) -> Tensor:
    """A copy that begins behind one element, where nothing can be read several at once."""
    return torch.empty(given.numel() + 1, device=given.device)[1:].view_as(given).copy_(given)


def like_torch(
    shape: tuple[int, ...], layout: Callable[[Tensor], Tensor], platform: Platform, figures: Figures
) -> None:
    """Steps of tensors and gradients of a layout, next to a contiguous one, equal torch's on the
    CPU."""
    here = parameters([shape, shape, (50,)], CPU)
    there: list[Tensor] = []
    for i, p in enumerate(here):
        assert p.grad is not None
        data, grad = p.detach().to(platform.device), p.grad.to(platform.device)
        there.append(torch.nn.Parameter(layout(data) if i == 0 else data.clone()))
        there[-1].grad = grad.clone() if i == 2 else layout(grad)
    ours = adapters.AdamW(there, lr=0.01)
    theirs = torch.optim.AdamW(here, lr=0.01, foreach=False)
    for _ in range(3):
        ours.step()
        theirs.step()
    figures["executors"] = executors_of(ours.__dict__.get("_plan"))
    for i, (x, y) in enumerate(zip(there, here, strict=True)):
        check_close(x, y, f"parameter {i}")


def stepped(cls: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters on a device, the same for all devices, after three steps by kernels."""
    params: list[Tensor] = []
    for p in parameters(SHAPES, CPU, dtype):
        assert p.grad is not None
        params.append(torch.nn.Parameter(p.detach().to(device)))
        params[-1].grad = p.grad.to(device)
    opt = cls(params, lr=0.01)
    with strict():
        for _ in range(3):
            opt.step()
    return [torch.view_as_real(p) if p.is_complex() else p for p in params]


def pairs_of_numbers(platform: Platform, figures: Figures) -> None:
    """Complex tensors are stepped by kernels, as on the CPU."""
    for cls in (adapters.AdamW, adapters.LAMB):
        pairs = [stepped(cls, x, torch.complex64) for x in (platform.device, CPU)]
        for i, (x, y) in enumerate(zip(*pairs, strict=True)):
            check_close(x, y, f"parameter {i}")


def at_the_default(platform: Platform, figures: Figures) -> None:
    """With the device as torch's default, parameters on both devices are stepped as without."""
    for cls in (adapters.Adafactor, adapters.AdaBelief):
        with torch.device(platform.device):  # first, as what it compiles is kept
            every = [stepped(cls, x) for x in (platform.device, CPU)]
        expected = stepped(cls, CPU)
        for found in every:
            for i, (x, y) in enumerate(zip(found, expected, strict=True)):
                check_close(x, y, f"parameter {i}")


def carried(way: str, platform: Platform, figures: Figures) -> None:
    """A state saved on one device goes on on another as if it had stayed."""
    devices = [platform.device, CPU]
    first, second = devices if way == "to-cpu" else devices[::-1]
    stays, leaves = parameters(SHAPES, first), parameters(SHAPES, CPU)
    opt = adapters.NAdam(stays, lr=0.01)
    for _ in range(2):
        opt.step()
    saved = io.BytesIO()
    torch.save([opt.state_dict(), [p.detach() for p in stays]], saved)
    saved.seek(0)
    state, weights = torch.load(saved, map_location=second, weights_only=True)
    leaves = [torch.nn.Parameter(x) for x in weights]
    for p, q in zip(leaves, stays, strict=True):
        assert q.grad is not None
        p.grad = q.grad.to(second)
    other = adapters.NAdam(leaves, lr=0.01)
    other.load_state_dict(state)
    for _ in range(2):
        opt.step()
        other.step()
    for i, (x, y) in enumerate(zip(leaves, stays, strict=True)):
        check_close(x, y, f"parameter {i}")
    figures["executors"] = executors_of(other.__dict__.get("_plan"))


def huge(platform: Platform, figures: Figures) -> None:
    """Every element of a bfloat16 tensor of more than 2³¹ is stepped, and the last ones as such."""
    free = platform.free_memory()
    figures["free GiB"] = free / 2**30
    if free < 1.2 * HELD:
        raise NotHere(f"{1.2 * HELD / 2**30:.0f} GiB are needed, {free / 2**30:.0f} are free")
    piece = 4096
    places = [0, 2**31 - piece // 2, HUGE - piece]
    device, dtype = platform.device, torch.bfloat16
    p = torch.ones(HUGE, device=device, dtype=dtype)
    grad = torch.full((HUGE,), 0.5, device=device, dtype=dtype)
    special = torch.randn(len(places), piece, dtype=torch.float32).to(device, dtype)
    for at, own in zip(places, special, strict=True):
        grad[at : at + piece] = own
    p.grad = grad
    small = torch.ones(len(places) * piece + 1, device=device, dtype=dtype)
    small.grad = torch.cat([special.flatten(), torch.full((1,), 0.5, device=device, dtype=dtype)])
    for one in (p, small):
        opt = adapters.AdamW([one], lr=0.1)
        for _ in range(2):
            opt.step()
        figures["executors"] = executors_of(opt.__dict__.get("_plan"))
        opt.state.clear()
    for at, own in zip(places, small[:-1].view(len(places), piece), strict=True):
        expect(torch.equal(p[at : at + piece], own), f"elements from {at:,} on are wrong.")
        p[at : at + piece] = small[-1]
    wrong = sum([int((own != small[-1]).sum()) for own in p.split(2**28)])
    expect(wrong == 0, f"{wrong:,} elements are not stepped as the others.")
