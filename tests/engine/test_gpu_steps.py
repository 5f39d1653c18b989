"""Steps on a GPU, as far as that goes without one: interpreted kernels on a device whose transfers
are counted. How kernels are built, tried and kept there, and what falls back.

Odd layouts, two devices, checkpoints between devices and steps of trees that wait for nothing are
among the checks for whoever has a card, which run on this device, too (`tests/gpu_check`)."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from gpu import device as fake
from gpu.drivers import on_device
from sampling import some

import functional_optim as fo
from functional_optim import adapters
from functional_optim.engine.native import Served
from functional_optim.kernels import callers, disk_cache, drivers, print_triton, triton_builds
from functional_optim.kernels.triton_spaces import CONFIGS

pytestmark = pytest.mark.own_process

SHAPES = [(40, 67), (67,), (67,), (), (0,), (3, 2)]
STEPS = 3


@pytest.fixture(scope="module")
def whole():
    with on_device() as driver:
        yield driver


@pytest.fixture
def gpu(whole):
    whole.launches.clear()
    return whole


def composed(lr):
    return fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(lr), fo.params_ema(0.9))


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


def train(make, device, dtype=torch.float32, steps=STEPS):
    params = params_on(device, dtype)
    opt = make(params)
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


def same(run: Callable[[str], Any], ulps: float = 0.0) -> None:
    """What is run on the device gives what it gives on the CPU."""
    here = run("cpu")
    alike(run(fake.DEVICE), here, ulps)


def quiet(device: str, *, later: object = True) -> Any:
    """Inside, nothing may wait for the device, but in a first step."""
    return fake.raising() if later and device != "cpu" else nullcontext()


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
PAIRS = [(name, dtype) for name in MAKE for dtype in DTYPES]
KEPT = [
    (name, x) for name, x in PAIRS if name in ("AdamW", "composed", "adafactor") or x is DTYPES[0]
]


@pytest.mark.parametrize(("name", "dtype"), some(PAIRS, 0, KEPT))
def test_steps_are_those_of_the_cpu(gpu, name, dtype):
    # sums are added up in another order, and torch's own root on the CPU may be an ulp off
    same(lambda device: train(MAKE[name], device, dtype), ulps=16)


@pytest.mark.parametrize("make", [adapters.AdamW, MAKE["composed"], MAKE["lamb"]])
def test_complex_tensors_have_kernels(gpu, make):
    def steps(device):
        torch.manual_seed(0)
        params = [torch.randn(x, dtype=torch.complex64).to(device) for x in [(5,), (3, 4), ()]]
        opt = make([p.requires_grad_() for p in params])
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, dtype=p.dtype).to(device)
            opt.step()
        return state_of(opt, params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = steps(fake.DEVICE)
    assert gpu.launches
    pairs = [
        [torch.view_as_real(x) if x.is_complex() else x for x in y] for y in (found, steps("cpu"))
    ]
    alike(*pairs, 64)


@pytest.mark.parametrize("name", MAKE)
def test_a_steady_step_waits_for_nothing_and_launches_once(gpu, name):
    params, compiled = params_on(fake.DEVICE), 0
    opt = MAKE[name](params)
    for i, grads in enumerate(tensors(STEPS + 1)[1:]):
        give(params, grads)
        opt.param_groups[0]["lr"] = 0.01 / (1 + i)
        gpu.launches.clear()
        with quiet(fake.DEVICE, later=i):
            opt.step()
        if i:
            assert [name for name, _ in gpu.launches] == LAUNCHES.get(name, ["step_kernel"])
        else:
            compiled = len(gpu.texts)
    p = torch.randn(5, 7).to(fake.DEVICE).requires_grad_()
    p.grad = torch.ones_like(p)
    MAKE[name]([p]).step()
    assert len(gpu.texts) == compiled  # neither for a new learning rate, nor for another model


FALLING = fo.schedules.linear(0.1, 0.0, 10)


def watched():
    """Measurements before, behind and around a clip, a schedule, an average."""
    before = {"norm": fo.measures.global_norm, "size": fo.measures.rms}
    return fo.chain(
        fo.monitor(before),
        fo.monitor({"share": fo.measures.clip_share}, around=fo.clip_by_global_norm(0.5)),
        fo.snapshot("clipped", fo.measures.global_norm),
        fo.monitor(fo.measures.diagnostics, around=fo.adamw(FALLING), per_tensor=True),
        fo.params_ema(0.9),
    )


PURE = {x.__name__: x for x in (fo.adafactor, fo.asgd, fo.nadam)}
PURE |= {"watched": watched, "gathered": lambda: fo.accumulate(composed(0.1), every=2)}


@pytest.mark.parametrize("name", PURE)
def test_a_pure_update_waits_for_nothing(gpu, name):
    def run(device):
        tx = PURE[name]()
        params = {str(i): p.detach() for i, p in enumerate(params_on(device))}
        state = tx.init(params)
        for grads in tensors(STEPS + 1)[1:]:
            given = {str(k): g.to(device) for k, g in enumerate(grads)}
            with quiet(device):
                updates, state = tx.update(given, state, params)
                params = fo.apply_updates(params, updates)
                read = [fo.get(state, x) for x in ("norm", "lr") if name == "watched"]
        found = fo.tree.leaves((params, state, read))
        return [x.cpu() for x in found if isinstance(x, torch.Tensor)]

    same(run, ulps=4)


# ---------------------------------------------------------------- captured steps
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
        if t == at and device != "cpu":
            with fake.capture() as graph:
                opt.step()
        graph.replay() if graph else opt.step()
        counts.append(float(opt.state[params[0]].get("step", 0)))
    return state_of(opt, params), counts


CAPTURED = {
    **MAKE,
    "SGD": by_recipe(lambda lr: fo.sgd(lr, momentum=0.9)),  # torch's own keeps no count
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


def test_a_capture_that_could_not_be_replayed_is_refused(gpu):
    params = params_on(fake.DEVICE)
    opt, early = adapters.AdamW(params), adapters.AdamW(params, capturable=True)
    give(params, tensors(1)[0])
    opt.step()
    before = state_of(opt, params)
    with pytest.raises(RuntimeError, match="pass capturable=True"), fake.capture():
        opt.step()
    with pytest.raises(RuntimeError, match="take a few such steps before"), fake.capture():
        early.step()
    assert not any(early.state.values())
    tx = fo.adam(0.1)
    tree = {"w": torch.ones(3).to(fake.DEVICE)}
    state, step = tx.init(tree), fo.compile(tx)
    step(tree, state, tree)
    with pytest.raises(RuntimeError, match="pass capturable=True to compile"), fake.capture():
        step(tree, state, tree)
    alike(state_of(opt, params), before)


def test_a_captured_step_has_gradients_of_its_own(gpu):
    """Made in the capture, as of a whole captured iteration; steps of before go on beside it."""
    params, reference = params_on(fake.DEVICE), params_on("cpu")
    opt, other = adapters.AdamW(params, capturable=True), adapters.AdamW(reference)
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


# ---------------------------------------------------------------- tensors of all kinds
def test_a_matrix_optimizer_is_kernels_around_products(gpu):
    def run(device):
        torch.manual_seed(0)
        params = [torch.randn(8, 6).to(device).requires_grad_() for _ in range(3)]
        opt = adapters.Optimizer(params, fo.muon, lr=0.1)
        for i in range(3):
            give(params, [p.cpu() + 1 for p in params])
            gpu.launches.clear()
            with quiet(device, later=i):
                opt.step()
        return state_of(opt, params)

    same(run, ulps=64)
    assert [name for name, _ in gpu.launches] == ["step_kernel", "step_kernel"]


def stored_in_many_ways(lr):
    ways = {
        "int8": fo.stored(fo.adamw(lr), "int8", where="*", seed=5),
        "int4": fo.stored(fo.lion(lr), "int4", where="*", seed=None),
        "split16": fo.master_weights(fo.adamw(lr), "split16"),
    }
    return fo.partition(ways, {f"{name}.*": name for name in ways})


def test_packed_slots_are_stepped_in_one_launch_a_kind(gpu):
    """As on the CPU, to the last code and bit."""

    def run(device):
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
            with quiet(device, later=i):
                opt.step()
        return state_of(opt, params)

    here, there = run("cpu"), run(fake.DEVICE)
    assert all(map(torch.equal, here, there))
    assert [name for name, _ in gpu.launches] == ["step_kernel"] * 3


def test_the_device_may_be_the_default_one(gpu):
    with torch.device(fake.DEVICE):
        assert all(x.isfinite().all() for x in train(MAKE["composed"], fake.DEVICE))


# ---------------------------------------------------------------- a GradScaler
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
        with quiet(device, later=i):
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


# ---------------------------------------------------------------- kernels: built, tried, kept
def fails_to_compile(gpu, monkeypatch):
    def load(*args):
        raise RuntimeError("ptxas died")

    monkeypatch.setattr(gpu, "load", load)


def does_something_else(gpu, monkeypatch):
    real = print_triton.KernelSource.text

    def text(*args):
        found = real(*args)
        return found._replace(text=found.text.replace("tl.store(p1 + (k", "tl.store(p1 + (0 * k"))

    monkeypatch.setattr(print_triton.KernelSource, "text", text)


def has_no_triton(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "missing", lambda: "Triton is not installed", raising=False)
    monkeypatch.setitem(drivers.DRIVERS, fake.DEVICE, gpu)


FAULTS = [(fails_to_compile, "ptxas died"), (has_no_triton, "Triton is not installed")]
FAULTS += [(does_something_else, "does something else than the rule")]


@pytest.mark.parametrize(("fault", "says"), FAULTS)
def test_a_kernel_that_cannot_be_had_falls_back_at_once(gpu, monkeypatch, fault, says):
    """With one warning; a strict step raises."""
    fault(gpu, monkeypatch)
    monkeypatch.setattr(triton_builds, "_kernels", {})  # as in a first process
    monkeypatch.setattr(disk_cache, "read", lambda name: None)
    monkeypatch.setattr(callers, "_warned", set())
    print_triton.source_of.cache_clear()
    params = params_on(fake.DEVICE)
    strict = adapters.AdamW(params, compile="strict")
    give(params, tensors(1)[0])
    before = state_of(strict, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="a strict step must be compiled"):
            strict.step()
    callers._warned.clear()
    alike(state_of(strict, params), before)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        there = train(adapters.AdamW, fake.DEVICE)
    assert sum(says in str(x.message) for x in found) == 1
    alike(there, train(adapters.AdamW, "cpu"), ulps=16)


def test_the_fastest_configuration_is_measured_once_and_kept(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    monkeypatch.setattr(triton_builds, "TIMED", 5000)
    monkeypatch.setattr(gpu, "timed", True)
    times = [3.0, 1.0, 2.0]
    asked = []

    def seconds(run, device):
        run()
        asked.append(device)
        return times[len(asked) - 1]

    monkeypatch.setattr(gpu, "seconds", seconds)
    for _ in range(2):
        monkeypatch.setattr(triton_builds, "_kernels", {})  # as in a new process
        train(adapters.AdamW, fake.DEVICE, steps=1)
        assert len(asked) == len(CONFIGS)
        assert f"tl.arange(0, {CONFIGS[1].block})" in gpu.texts[-1].text
        assert gpu.texts[-1].warps == CONFIGS[1].warps


def test_what_is_kept_is_not_tried_again(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    tried = []
    real = Served.compare
    monkeypatch.setattr(Served, "compare", lambda *own, **more: tried.append(real(*own, **more)))
    for model, count in (("interpreted", 1), ("interpreted", 1), ("another model", 2)):
        monkeypatch.setattr(gpu, "name", lambda device, model=model: model)
        monkeypatch.setattr(triton_builds, "_kernels", {})  # as in a new process
        train(adapters.AdamW, fake.DEVICE, steps=1)
        assert len(tried) == count
