"""Steps on a GPU, as far as that goes without one: interpreted kernels on a device whose transfers
are counted."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from gpu import device as fake
from gpu.drivers import on_device
from gpu.stepped import (
    LAUNCHES,
    MAKE,
    SHAPES,
    STEPS,
    alike,
    by_recipe,
    composed,
    give,
    params_on,
    sgd,
    state_of,
    tensors,
    train,
)

import functional_optim as fo
from functional_optim import adapters

pytestmark = pytest.mark.own_process


@pytest.fixture(scope="module")
def whole():
    with on_device() as driver:
        yield driver


@pytest.fixture
def gpu(whole):
    whole.launches.clear()
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MAKE)
def test_steps_are_those_of_the_cpu(gpu, name, dtype):
    # sums are added up in another order, and torch's own root on the CPU may be an ulp off
    alike(train(MAKE[name], fake.DEVICE, dtype), train(MAKE[name], "cpu", dtype), ulps=16)


@pytest.mark.parametrize("name", MAKE)
def test_a_steady_step_waits_for_nothing_and_launches_once(gpu, name):
    params = params_on(fake.DEVICE)
    opt = MAKE[name](params)
    for i, grads in enumerate(tensors(STEPS + 1)[1:]):
        give(params, grads)
        opt.param_groups[0]["lr"] = 0.01 / (1 + i)
        gpu.launches.clear()
        if not i:
            opt.step()
            compiled = len(gpu.texts)
            continue
        with fake.raising():
            opt.step()
        assert [name for name, _ in gpu.launches] == LAUNCHES.get(name, ["step_kernel"])
    assert len(gpu.texts) == compiled  # a new learning rate is no new kernel


def test_another_model_needs_no_new_kernel(gpu):
    train(adapters.RAdam, fake.DEVICE)
    compiled = len(gpu.texts)
    params = [torch.randn(5, 7, device="cpu").to(fake.DEVICE).requires_grad_()]
    opt = adapters.RAdam(params)
    params[0].grad = torch.ones_like(params[0])
    opt.step()
    assert len(gpu.texts) == compiled


@pytest.mark.parametrize("capturable", [False, True])
def test_a_compiled_step_of_trees_waits_for_nothing(gpu, capturable):
    results = []
    for device in ("cpu", fake.DEVICE):
        tx = composed(fo.schedules.linear(0.1, 0.01, 3))
        params = {str(i): p.detach() for i, p in enumerate(params_on(device))}
        state, step = tx.init(params), fo.compile(tx, capturable=capturable)
        for i, grads in enumerate(tensors(STEPS + 1)[1:]):
            given = {str(k): g.to(device) for k, g in enumerate(grads)}
            if device == "cpu" or not i:
                params, state = step(given, state, params)
                continue
            with fake.raising():
                params, state = step(given, state, params)
        leaves = [x for x in fo.tree.leaves((params, state)) if isinstance(x, torch.Tensor)]
        results.append([x.cpu() for x in leaves])
    alike(*results, ulps=16)


def test_a_count_that_somebody_else_has_written_is_read_again(gpu):
    tx = fo.adam(0.1)
    params = {"w": torch.ones(3).to(fake.DEVICE)}
    state, step = tx.init(params), fo.compile(tx)
    for _ in range(2):
        params, state = step({"w": torch.ones(3).to(fake.DEVICE)}, state, params)
    state.step.fill_(7)
    params, state = step({"w": torch.ones(3).to(fake.DEVICE)}, state, params)
    assert state.step.item() == 8


def captured(make, device, lr, steps=6, at=3):
    """Steps whose learning rate changes, those after the first few as replays of one."""
    params = params_on(device)
    rate = torch.tensor(0.1).to(device) if lr else None
    opt = make(params, **({"lr": rate} if lr else {}))
    give(params, [torch.zeros(shape) for shape in SHAPES])
    graph, counts = None, []
    for t, grads in enumerate(tensors(steps + 1)[1:]):
        for p, g in zip(params, grads, strict=True):
            p.grad.copy_(g)
        if rate is not None:
            rate.fill_(0.1 / (1 + t))
        if graph is None and t == at and device != "cpu":
            with fake.capture() as graph:
                opt.step()
        if graph is None:
            opt.step()
        else:
            graph.replay()
        counts.append(float(opt.state[params[0]].get("step", 0)))
    return state_of(opt, params), counts


CAPTURED = {
    **MAKE,
    "SGD": by_recipe(sgd),  # torch's own keeps no count
    "Lion": adapters.Lion,
    "packed": by_recipe(lambda lr: fo.stored(fo.adamw(lr), "int8", min_size=0)),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_goes_on_when_it_is_replayed(gpu, name):
    make = CAPTURED[name]
    lr = name != "prodigy"
    mine, counts = captured(partial(make, capturable=True), fake.DEVICE, lr)
    theirs, _ = captured(make, "cpu", lr)
    assert counts == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    alike(mine, theirs, ulps=64)


def test_a_captured_step_of_trees_goes_on_when_it_is_replayed(gpu):
    results = []
    for device in ("cpu", fake.DEVICE):
        tx = fo.chain(fo.clip_by_global_norm(0.1), fo.nadam(fo.schedules.linear(0.1, 0.01, 5)))
        params = {str(i): p.detach() for i, p in enumerate(params_on(device))}
        given = {key: torch.zeros_like(p) for key, p in params.items()}
        state, step, graph = tx.init(params), fo.compile(tx, capturable=True), None
        for t, grads in enumerate(tensors(7)[1:]):
            for g, x in zip(given.values(), grads, strict=True):
                g.copy_(x)
            if t == 2 and device != "cpu":
                with fake.capture() as graph:
                    step(given, state, params)
            if graph is None:
                step(given, state, params)
            else:
                graph.replay()
        leaves = [x for x in fo.tree.leaves((params, state)) if isinstance(x, torch.Tensor)]
        results.append([x.cpu() for x in leaves])
    alike(*results, ulps=64)


def test_a_capture_that_could_not_be_replayed_is_refused(gpu):
    params = params_on(fake.DEVICE)
    opt = adapters.AdamW(params)
    give(params, tensors(1)[0])
    opt.step()
    before = state_of(opt, params)
    with pytest.raises(RuntimeError, match="pass capturable=True"), fake.capture():
        opt.step()
    tx = fo.adam(0.1)
    tree = {"w": torch.ones(3).to(fake.DEVICE)}
    state, step = tx.init(tree), fo.compile(tx)
    step(tree, state, tree)
    with pytest.raises(RuntimeError, match="pass capturable=True to compile"), fake.capture():
        step(tree, state, tree)
    alike(state_of(opt, params), before)


def test_a_capture_before_the_first_step_is_refused(gpu):
    params = params_on(fake.DEVICE)
    opt = adapters.AdamW(params, capturable=True)
    give(params, tensors(1)[0])
    with pytest.raises(RuntimeError, match="make a few such steps before"), fake.capture():
        opt.step()
    assert not any(opt.state.values())


def test_a_global_norm_over_two_devices(gpu):
    results = []
    for first, second in (("cpu", "cpu"), ("fake:0", "fake:1")):
        torch.manual_seed(0)
        given = [torch.randn(30, 3), torch.randn(7)]
        pairs = zip(given, (first, second), strict=True)
        params = [p.to(device).requires_grad_() for p, device in pairs]
        opt = adapters.Optimizer(params, composed, lr=0.1)
        for i in range(3):
            give(params, [p.cpu() * (i + 1) for p in params])
            if first == "cpu" or not i:
                opt.step()
                continue
            with fake.raising():
                opt.step()
        results.append(state_of(opt, params))
    assert {name for name, _ in gpu.launches} == {"measure_kernel", "sum_kernel", "step_kernel"}
    alike(*results, ulps=16)


def test_tensors_that_begin_anywhere_are_stepped_alike(gpu):
    results = []
    for device in ("cpu", fake.DEVICE):
        torch.manual_seed(0)
        memory = torch.randn(3 * 2000 + 3).to(device)
        views = [memory[1:2001], memory[2004:4004].view(40, 50).T, memory[4005:6003]]
        params = [view.detach().requires_grad_() for view in views]
        opt = adapters.AdamW(params)
        for p in params:
            p.grad = torch.ones_like(p)
        params[2].grad = torch.ones(1999).to(device)[1:]
        opt.step()
        results.append(state_of(opt, params))
    alike(*results)


def test_checkpoints_go_from_one_device_to_the_other(gpu):
    straight = train(adapters.AdamW, "cpu", steps=4)
    for first, second in (("cpu", fake.DEVICE), (fake.DEVICE, "cpu")):
        every = tensors(5)[1:]
        params = params_on(first)
        opt = adapters.AdamW(params)
        for grads in every[:2]:
            give(params, grads)
            opt.step()
        saved = copy.deepcopy(opt.state_dict())
        moved = [p.detach().to(second).requires_grad_() for p in params]
        other = adapters.AdamW(moved)
        other.load_state_dict(saved)
        for grads in every[2:]:
            give(moved, grads)
            other.step()
        alike(state_of(other, moved), straight, ulps=16)


def test_a_matrix_optimizer_is_kernels_around_products(gpu):
    results = []
    for device in ("cpu", fake.DEVICE):
        torch.manual_seed(0)
        params = [torch.randn(8, 6).to(device).requires_grad_() for _ in range(3)]
        opt = adapters.Optimizer(params, fo.muon, lr=0.1)
        for i in range(3):
            give(params, [p.cpu() + 1 for p in params])
            gpu.launches.clear()
            if device == "cpu" or not i:
                opt.step()
                continue
            with fake.raising():
                opt.step()
        results.append(state_of(opt, params))
    assert [name for name, _ in gpu.launches] == ["step_kernel", "step_kernel"]
    alike(*results, ulps=64)


def stored_in_many_ways(lr):
    ways = {
        "int8": fo.stored(fo.adamw(lr), "int8", where="*", seed=5),
        "int4": fo.stored(fo.lion(lr), "int4", where="*", seed=None),
        "split16": fo.master_weights(fo.adamw(lr), "split16"),
    }
    return fo.partition(ways, {f"{name}.*": name for name in ways})


def test_packed_slots_are_stepped_in_one_launch_a_kind(gpu):
    """As on the CPU, to the last code and bit."""
    results = []
    for device in ("cpu", fake.DEVICE):
        torch.manual_seed(0)
        dtypes = {"int8": torch.float32, "int4": torch.float32, "split16": torch.bfloat16}
        named = {
            f"{name}.{i}": torch.randn(shape).to(device, dtype).requires_grad_()
            for name, dtype in dtypes.items()
            for i, shape in enumerate([(71, 61), (64, 65)])
        }
        params = list(named.values())
        opt = adapters.Optimizer(list(named.items()), stored_in_many_ways, lr=0.01)
        for i in range(3):
            give(params, [torch.randn(p.shape) * torch.rand(p.shape) ** 3 for p in params])
            gpu.launches.clear()
            with fake.raising() if i and device != "cpu" else nullcontext():
                opt.step()
        results.append(state_of(opt, params))
    assert [name for name, _ in gpu.launches] == ["step_kernel"] * 3
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_complex_tensors_are_pairs(gpu):
    results = []
    for device in ("cpu", fake.DEVICE):
        torch.manual_seed(0)
        params = [torch.randn(9, dtype=torch.complex64).to(device).requires_grad_()]
        opt = adapters.AdamW(params)
        params[0].grad = torch.randn(9, dtype=torch.complex64).to(device)
        opt.step()
        results.append(state_of(opt, params)[:1])
    assert (results[0][0] - results[1][0]).abs().max() < 1e-6


def scaled(cls, device, **hyper):
    """Steps under a GradScaler, one of them with an infinite gradient, without waiting for it."""
    params = params_on(device)
    opt = cls(params, fused=True, **hyper)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    for i, grads in enumerate(tensors(7)[1:]):
        scaler.scale(torch.zeros(()).to(device))  # which makes the scale
        give(params, [g * scaler.get_scale() for g in grads])
        if i == 2:
            params[1].grad[3] = torch.inf
        with fake.raising() if i and device == fake.DEVICE else nullcontext():
            scaler.step(opt)
        scaler.update()
    return state_of(opt, params), scaler.get_scale()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_a_step_that_a_scaler_refuses_is_left_out_on_the_device(gpu, name):
    more = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    for device in (fake.DEVICE, "cpu"):
        mine, scale = scaled(getattr(adapters, name), device, **more)
        theirs, expected = scaled(getattr(torch.optim, name), "cpu", **more)
        assert scale == expected
        alike(mine, theirs, ulps=16)


def test_found_inf_that_is_set_by_hand_leaves_a_step_out(gpu):
    params = params_on(fake.DEVICE)
    opt = adapters.AdamW(params, fused=True)
    give(params, tensors(1)[0])
    opt.step()
    before = state_of(opt, params)
    opt.found_inf = torch.ones(()).to(fake.DEVICE)
    with fake.raising():
        opt.step()
    alike(state_of(opt, params), before)
    opt.found_inf = torch.zeros(()).to(fake.DEVICE)
    opt.step()
    assert opt.state[params[0]]["step"].item() == 2


def test_the_device_may_be_the_default_one(gpu):
    with torch.device(fake.DEVICE):
        assert all(x.isfinite().all() for x in train(MAKE["composed"], fake.DEVICE))


def test_a_captured_step_has_gradients_of_its_own(gpu):
    """Made in the capture, as of a whole captured iteration; steps of before go on beside it."""
    params = params_on(fake.DEVICE)
    opt = adapters.AdamW(params, capturable=True)
    reference = params_on("cpu")
    other = adapters.AdamW(reference)
    grads = tensors(2)[1]

    def eager(opt, params):
        give(params, grads)
        opt.step()

    eager(opt, params)
    eager(other, reference)
    kept = [p.grad for p in params]
    with fake.capture() as graph:
        for p in params:
            p.grad = p.detach() * 0.5
        opt.step()
    for p, g in zip(params, kept, strict=True):
        p.grad = g
    opt.step()  # before any replay
    eager(other, reference)
    for _ in range(2):
        graph.replay()
        give(reference, [p.detach() * 0.5 for p in reference])
        other.step()
    opt.step()
    eager(other, reference)
    alike(state_of(opt, params), state_of(other, reference), ulps=64)
