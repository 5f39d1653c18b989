"""The device of tests (tests/support/gpu): the CPU's results, counters, refusals, graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import device
from gpu.device import DEVICE, Counters
from torch import Tensor

pytestmark = pytest.mark.own_process

OTHER = f"{DEVICE}:1"


@pytest.fixture(autouse=True)
def loaded() -> None:
    device.load()
    device.reset()


def counted(**counts: int) -> Counters:
    return Counters(**{name: counts.get(name, 0) for name in Counters._fields})


def pinned(*values: float) -> Tensor:
    return torch.tensor(values).pin_memory()


# ---------------------------------------------------------------- what is counted, and refused
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "cpu": lambda x: x.cpu(),
    "copy": lambda x: torch.empty(2).copy_(x, non_blocking=True),
    "mask": lambda x: x[x > 0],
    "assigned mask": lambda x: x.index_put_((x > 0,), x * 2),
    "equal": lambda x: torch.equal(x, x),
    "repeated": lambda x: x.repeat_interleave(x.long()),
    "eigenvectors": lambda x: torch.linalg.eigh(x.diag()),
    "list": lambda x: torch._foreach_copy_([torch.empty(2), torch.empty_like(x)], [x, x]),
    "device": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.accelerator.current_stream().synchronize(),
}
UPLOADS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=DEVICE),
    "index": lambda x: torch.ones_like(x)[[0]],
    "list up": lambda x: torch._foreach_copy_([torch.ones_like(x)], [torch.ones(2)]),
    "to": lambda x: torch.ones(2).to(DEVICE, non_blocking=True),
    "pinned, but waits": lambda x: pinned(1, 2).to(DEVICE),
    "pinned, another dtype": lambda x: pinned(1, 2).to(DEVICE, torch.float64, non_blocking=True),
    "pinned, strided": lambda x: pinned(1, 2, 3, 4)[::2].to(DEVICE, non_blocking=True),
}


@pytest.mark.parametrize("how", [*READS, *UPLOADS])
def test_waits_are_counted_and_refused(how):
    x = torch.ones(2, device=DEVICE)
    device.reset()
    ask = {**READS, **UPLOADS}[how]
    ask(x)
    assert device.counters()[:3] == ((1, 0, 0) if how in READS else (0, 1, 0))
    words = "makes the host wait for the device|copies from the host's memory"
    with device.raising(), pytest.raises(RuntimeError, match=words):
        ask(x)
    with pytest.raises(RuntimeError, match="no graph can be captured with"), device.capture():
        ask(x)


def test_launches_and_copies_of_pinned_memory_wait_for_nobody():
    with device.raising(), device.logged() as names:
        x = torch.zeros(3, 2, device=DEVICE).fill_(2.0)
        x = torch.full_like(x, 3.0)[1:].t().reshape(2, 2)
        x = x * torch.tensor(2.0) + 1
        device.record("own", lambda: None)
    assert names == ["zero_", "fill_", "fill_", "mul", "add", "own"]
    assert device.counters() == counted(operations=len(names))
    device.reset()
    p = pinned(1, 2)
    with device.raising():
        y = p.to(DEVICE, non_blocking=True).to("cpu", non_blocking=True)
    assert y.is_pinned()
    assert device.counters() == counted(pinned=1, downloads=1)
    assert y.tolist() == [1, 2]


REFUSALS: dict[str, Callable[[Tensor], Any]] = {
    "a CPU tensor": lambda x: x + torch.ones(2),
    "a CPU tensor first": lambda x: torch.ones(2) * x,
    "a CPU tensor in a list": lambda x: torch.cat([x, torch.ones(2)]),
    "a number to write to": lambda x: torch.tensor(1.0).add_(x.sum()),
    "another index": lambda x: x + torch.ones(2, device=OTHER),
    "another index in a list": lambda x: torch.stack([x, torch.ones(2, device=OTHER)]),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_tensors_of_two_places_are_refused(what):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        REFUSALS[what](torch.ones(2, device=DEVICE))


# ---------------------------------------------------------------- memory and graphs
def test_freed_memory_is_garbage_and_handed_out_again():
    x = torch.ones(300, device=DEVICE)
    place = x.data_ptr()
    del x
    assert device.owner(place) is None
    y = torch.empty(290, device=DEVICE)
    assert (place % 512, y.data_ptr()) == (0, place)
    assert torch.isnan(y).all()


def test_pinned_memory_must_last_until_its_copy_is_done():
    p = pinned(1, 2)
    x = p.to(DEVICE, non_blocking=True)
    p.add_(1)
    with pytest.raises(RuntimeError, match="Pinned memory was written while"):
        x.tolist()
    p = pinned(1, 2)
    place, x = p.data_ptr(), p.to(DEVICE, non_blocking=True)
    del p
    second = pinned(3, 4)
    assert second.data_ptr() != place
    assert x.tolist() == [1, 2]
    assert pinned(5, 6).data_ptr() == place


def test_a_capture_changes_nothing_and_a_replay_runs():
    p, g, rate = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE), pinned(0.5)
    number, two = torch.zeros(1, device=DEVICE), torch.tensor(2.0)
    launched: list[list[float]] = []
    with device.capture() as graph:
        number.copy_(rate, non_blocking=True)
        step = g * number
        p.sub_(step)
        p.mul_(two)
        ordered, _ = p.sort()
        device.record("own", lambda: launched.append(p.tolist()))
    assert graph.names == ["copy_", "mul", "sub", "mul", "sort", "own"]
    assert (p.tolist(), number.tolist(), launched) == ([1, 1], [0], [])
    two.fill_(5.0)  # the graph has the number that it was captured with
    graph.replay()
    assert (p.tolist(), step.tolist(), ordered.tolist()) == ([1, 1], [0.5, 0.5], [1, 1])
    rate.fill_(2.0)
    g.copy_(torch.tensor([1.0, 3.0]))
    graph.replay()
    assert (p.tolist(), step.tolist(), ordered.tolist()) == ([-2, -10], [2, 6], [-10, -2])
    assert launched == [[1, 1], [-2, -10]]
