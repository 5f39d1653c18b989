"""The device of tests (tests/support/gpu): the CPU's results, counters, refusals, graphs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import device
from gpu.device import DEVICE, Counters
from torch import Tensor, nn

pytestmark = pytest.mark.own_process

OTHER = f"{DEVICE}:1"
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture(autouse=True)
def loaded() -> None:
    device.load()
    device.reset()


def zeros_but(**counts: int) -> Counters:
    return Counters(**{name: counts.get(name, 0) for name in Counters._fields})


def pinned(*values: float) -> Tensor:
    return torch.tensor(values).pin_memory()


# ---------------------------------------------------------------- the CPU's results


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


def trained(on: str, **options: Any) -> tuple[list[Tensor], Counters]:
    """Parameters after four steps, and what the last step asked the device."""
    net = model()
    data = [torch.randn(5, 3) for _ in range(4)]
    net.to(on)
    opt = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    for x in data:
        opt.zero_grad()
        net(x.to(on)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        device.reset()
        opt.step()
    return [p.detach().cpu() for p in net.parameters()], device.counters()


@pytest.mark.parametrize("how", ["foreach", "fused", "neither"])
def test_a_model_trains_as_on_the_cpu(how):
    options = {"foreach": how == "foreach"} if how != "fused" else {"fused": True}
    expected, _ = trained("cpu", **options)
    found, _ = trained(DEVICE, **options)
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(expected[0], model()[0].weight)


def test_lists_of_tensors_are_one_operation():
    for foreach, operations in ((True, 8), (False, 8 * 6)):
        _, counts = trained(DEVICE, foreach=foreach, fused=False)
        assert (counts.operations, counts.uploads) == (operations, 0)


DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.bool)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + x,
    "transposed": lambda x: x.t().contiguous(),
    "slice": lambda x: x[1:, ::2].clone(),
    "sort": lambda x: x.real.sort() if x.is_complex() else x.sort(),
    "sum": lambda x: x.sum(0),
    "promotion": lambda x: x + 1.5,
    "cat": lambda x: torch.cat([x, x]),
    "assigned": lambda x: torch.zeros_like(x).index_put_((torch.tensor([0]).to(x.device),), x[1]),
    "split": lambda x: [part.clone() for part in x.split(1)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_operations_give_what_the_cpu_gives(name, dtype):
    x = (torch.arange(12).reshape(3, 4) - 5).to(dtype)
    expected, found = CALLS[name](x), CALLS[name](x.to(DEVICE))
    if isinstance(expected, Tensor):
        expected, found = [expected], [found]
    for a, b in zip(expected, found, strict=True):
        assert b.device.type == DEVICE
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert torch.equal(a, b.cpu())


def test_complex_tensors_are_seen_through_views():
    x = torch.randn(3, dtype=torch.complex64)
    y = x.to(DEVICE)
    assert torch.equal((y.conj() * 2j).cpu(), x.conj() * 2j)
    assert torch.equal(y.conj().imag.clone().cpu(), x.conj().imag)
    torch.view_as_real(y).mul_(2)
    assert torch.equal(y.cpu(), x * 2)


def test_a_result_is_the_argument_it_was_written_to():
    x = torch.ones(3, device=DEVICE)
    assert x.add_(x) is x
    with torch.inference_mode():
        y = torch.ones(3, device=DEVICE)
        assert torch.ops.aten.fill_.Scalar(y, 2.0) is y
    assert x.tolist() == [2, 2, 2]
    out = torch.empty(0, device=DEVICE)
    assert torch.sort(x, out=(out, torch.empty(0, device=DEVICE, dtype=torch.long)))[0] is out
    assert out.tolist() == [2, 2, 2]
    assert device.owner(out.data_ptr()) == "fake:0"


def test_the_seed_draws_the_same_numbers():
    torch.manual_seed(3)
    expected = torch.randn(5), torch.randperm(5)
    torch.manual_seed(3)
    found = torch.randn(5, device=DEVICE), torch.randperm(5, device=DEVICE)
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x, y.cpu())
    own = torch.Generator(DEVICE).manual_seed(1)
    drawn = torch.rand(2, generator=own, device=DEVICE)
    assert torch.equal(drawn.cpu(), torch.rand(2, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(RuntimeError, match="Expected a 'fake' device type for generator"):
        torch.rand(2, generator=torch.Generator(), device=DEVICE)


def test_states_are_saved_and_loaded():
    net = model().to(DEVICE)
    opt = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3, device=DEVICE)).sum().backward()
    opt.step()
    saved = io.BytesIO()
    torch.save([net.state_dict(), opt.state_dict()], saved)
    for place, expected in ((None, "fake:0"), ("cpu", "cpu"), (OTHER, OTHER)):
        saved.seek(0)
        weights, slots = torch.load(saved, map_location=place)
        assert weights["0.weight"].device == slots["state"][0]["exp_avg"].device
        assert weights["0.weight"].device == torch.device(expected)
        assert torch.equal(weights["0.weight"].cpu(), net[0].weight.detach().cpu())
    assert copy.deepcopy(net)[0].weight.device == torch.device("fake:0")


def test_scaled_gradients_are_unscaled():
    weight = torch.ones(2, device=DEVICE, requires_grad=True)
    opt = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    for factor, expected, scale in ((0.5, 0.5, 4.0), (float("inf"), 0.5, 2.0)):
        opt.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert (weight.tolist(), scaler.get_scale()) == ([expected, expected], scale)


# ---------------------------------------------------------------- counters


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "float": lambda x: float(x[0]),
    "cpu": lambda x: x.cpu(),
    "copy": lambda x: torch.empty(2).copy_(x, non_blocking=True),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "assigned mask": lambda x: x.index_put_((x > 0,), x * 2),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeated": lambda x: x.repeat_interleave(x.long()),
    "eigenvectors": lambda x: torch.linalg.eigh(x.diag()),
    "solution": lambda x: torch.linalg.solve(x.diag(), x),
    "list": lambda x: torch._foreach_copy_([torch.empty(2), torch.empty_like(x)], [x, x]),
    "device": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.accelerator.current_stream().synchronize(),
    "event": lambda x: torch.accelerator.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("how", READS)
def test_reads_are_counted_and_refused(how):
    x = torch.ones(2, device=DEVICE)
    device.reset()
    READS[how](x)
    assert (device.counters().reads, device.counters().uploads) == (1, 0)
    with device.raising(), pytest.raises(RuntimeError, match="makes the host wait for the device"):
        READS[how](x)
    READS[how](x)
    assert device.counters().reads == 2


UPLOADS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
    "number": lambda: torch.tensor(1.0, device=DEVICE),
    "index": lambda: torch.ones(2, device=DEVICE)[[0]],
    "list": lambda: torch._foreach_copy_([torch.ones(2, device=DEVICE)], [torch.ones(2)]),
    "to": lambda: torch.ones(2).to(DEVICE, non_blocking=True),
    "pinned, but waits": lambda: pinned(1, 2).to(DEVICE),
    "pinned, another dtype": lambda: pinned(1, 2).to(DEVICE, torch.float64, non_blocking=True),
    "pinned, strided": lambda: pinned(1, 2, 3, 4)[::2].to(DEVICE, non_blocking=True),
}


@pytest.mark.parametrize("how", UPLOADS)
def test_uploads_are_counted_and_refused(how):
    UPLOADS[how]()
    assert (device.counters().uploads, device.counters().pinned) == (1, 0)
    with device.raising(), pytest.raises(RuntimeError, match="copies from the host's memory"):
        UPLOADS[how]()


def test_copies_of_pinned_memory_wait_for_nobody():
    p = pinned(1, 2)
    with device.raising():
        x = p.to(DEVICE, non_blocking=True)
        y = x.to("cpu", non_blocking=True)
    assert y.is_pinned()
    assert not torch.ones(2).is_pinned()
    assert device.counters() == zeros_but(pinned=1, downloads=1)
    assert y.tolist() == [1, 2]


def test_launches_are_counted_and_logged():
    with device.raising(), device.logged() as names:
        x = torch.zeros(3, 2, device=DEVICE).fill_(2.0)
        x = torch.full_like(x, 3.0)[1:].t().reshape(2, 2)
        x = x * torch.tensor(2.0) + 1
        x.to(torch.float64)
        x[0, x[0] > 0] = 7.0
        x[0].repeat_interleave((x[0] > 0).long(), output_size=2)
    assert names[:6] == ["zero_", "fill_", "fill_", "mul", "add", "copy_"]
    assert device.counters() == zeros_but(operations=len(names))
    assert x.tolist() == [[7, 7], [7, 7]]


# ---------------------------------------------------------------- refusals, memory, two devices


REFUSALS: dict[str, Callable[[Tensor], Any]] = {
    "a CPU tensor": lambda x: x + torch.ones(2),
    "a CPU tensor first": lambda x: torch.ones(2) * x,
    "a CPU tensor in a product": lambda x: torch.ones(2, 2) @ x,
    "a CPU tensor in a list": lambda x: torch.cat([x, torch.ones(2)]),
    "a CPU tensor in a second list": lambda x: torch._foreach_add([x], [torch.ones(2)]),
    "a number to write to": lambda x: torch.tensor(1.0).add_(x.sum()),
    "another index": lambda x: x + torch.ones(2, device=OTHER),
    "another index in a list": lambda x: torch.stack([x, torch.ones(2, device=OTHER)]),
    "another index in a product": lambda x: torch.ones(2, 2, device=OTHER) @ x,
}


@pytest.mark.parametrize("what", REFUSALS)
def test_tensors_of_two_places_are_refused(what):
    with pytest.raises(RuntimeError, match=MIXED):
        REFUSALS[what](torch.ones(2, device=DEVICE))


def test_two_devices():
    x, y = torch.ones(2, device=DEVICE), torch.full((2,), 2.0, device=OTHER)
    assert (x.device, y.device) == (torch.device("fake:0"), torch.device("fake:1"))
    assert (y * 2).device == y.device
    assert device.owner(y.data_ptr()) == OTHER
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device=DEVICE).device == y.device
    assert torch.accelerator.current_device_index() == 0
    assert (x + y.to(x.device)).tolist() == [3, 3]
    device.reset()
    norms = torch._foreach_norm([x, y])  # of several devices: one operation each, as on CUDA
    assert device.counters() == zeros_but(operations=2)
    assert [n.device for n in norms] == [x.device, y.device]
    total = nn.utils.clip_grad_norm_(with_gradients(x, y), 1.0)
    assert total.item() == pytest.approx(10**0.5)
    with pytest.raises(RuntimeError, match="There is no device 2"):
        torch.empty(1, device="fake:2")


def with_gradients(*grads: Tensor) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return params


def test_backward_runs_on_each_device():
    weights = [torch.ones(2, device=d, requires_grad=True) for d in (DEVICE, OTHER)]
    x = (weights[0] * 3).to(OTHER)
    (x * weights[1] * 2).sum().backward()
    assert [w.grad.tolist() for w in weights] == [[6, 6], [6, 6]]
    assert [w.grad.device for w in weights] == [w.device for w in weights]


def test_freed_memory_is_garbage_and_handed_out_again():
    x = torch.ones(300, device=DEVICE)
    place, used = x.data_ptr(), torch.fake.memory_allocated()
    assert place % 512 == 0
    del x
    assert device.owner(place) is None
    assert torch.fake.memory_allocated() == used - 1536
    y = torch.empty(290, device=DEVICE)
    assert y.data_ptr() == place
    assert torch.isnan(y).all()


def test_pinned_memory_must_last_until_its_copy_is_done():
    p = pinned(1, 2)
    x = p.to(DEVICE, non_blocking=True)
    p.add_(1)
    with pytest.raises(RuntimeError, match="Pinned memory was written while"):
        x.tolist()
    x.copy_(p, non_blocking=True)
    done = torch.Event(DEVICE)
    done.record()
    assert done.query()
    p.add_(1)
    assert x.tolist() == [2, 3]


def test_pinned_memory_is_not_handed_out_while_it_is_copied():
    p = pinned(1, 2)
    place, x = p.data_ptr(), p.to(DEVICE, non_blocking=True)
    del p
    second = pinned(3, 4)
    assert second.data_ptr() != place
    assert x.tolist() == [1, 2]
    assert pinned(5, 6).data_ptr() == place


# ---------------------------------------------------------------- graphs


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
    device.reset()
    graph.replay()
    assert device.counters().replays == 1
    assert device.counters().operations == 0
    assert (p.tolist(), step.tolist(), ordered.tolist()) == ([1, 1], [0.5, 0.5], [1, 1])
    rate.fill_(2.0)
    g.copy_(torch.tensor([1.0, 3.0]))
    graph.replay()
    assert (p.tolist(), step.tolist(), ordered.tolist()) == ([-2, -10], [2, 6], [-10, -2])
    assert launched == [[1, 1], [-2, -10]]


@pytest.mark.parametrize("how", [READS["item"], READS["mask"], lambda x: UPLOADS["to"]()])
def test_nobody_waits_in_a_capture(how):
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="no graph can be captured with"), device.capture():
        how(x)
    assert x.tolist() == [1, 1]
    with device.capture() as graph:
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2, 2]


def test_a_graph_keeps_what_it_allocated_and_nothing_else():
    p, g = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
    with device.capture() as graph:
        p.add_(g * 2)
    graph.replay()
    assert p.tolist() == [3, 3]
    del g
    graph.replay()
    assert torch.isnan(p).all()
    used = torch.fake.memory_allocated()
    del graph
    assert torch.fake.memory_allocated() < used


def test_a_training_step_is_captured():
    x = torch.ones(5, 3, device=DEVICE)
    nets = [model().to(DEVICE), model().to(DEVICE)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]

    def step(net: nn.Module, opt: torch.optim.Optimizer) -> None:
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()

    with device.capture() as graph:
        step(nets[0], optimizers[0])
    for scale in (1, 2, 3):
        x.fill_(scale)
        graph.replay()
        step(nets[1], optimizers[1])
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())
    assert not torch.equal(nets[0][0].weight.cpu(), model()[0].weight)


def test_a_kernel_of_ones_own_runs_at_once():
    launched = []
    with device.logged() as names:
        device.record("own", lambda: launched.append(1))
    assert (launched, names, device.counters().operations) == ([1], ["own"], 1)
