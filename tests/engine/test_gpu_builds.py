"""How Triton kernels are built, tried and kept, on the device for tests; and what falls back."""

from __future__ import annotations

import warnings

import pytest
from gpu import device as fake
from gpu.drivers import on_device
from gpu.stepped import alike, give, params_on, state_of, tensors, train

from functional_optim import adapters
from functional_optim.engine.native import Served
from functional_optim.kernels import callers, disk_cache, drivers, print_triton, triton_builds
from functional_optim.kernels.triton_spaces import CONFIGS

pytestmark = pytest.mark.own_process


@pytest.fixture(scope="module")
def whole():
    with on_device() as driver:
        yield driver


@pytest.fixture
def gpu(whole):
    whole.launches.clear()
    return whole


def nothing_loaded(monkeypatch):
    """Inside, kernels are written, compiled and tried as in a first process."""
    monkeypatch.setattr(triton_builds, "_kernels", {})
    monkeypatch.setattr(disk_cache, "read", lambda name: None)
    print_triton.source_of.cache_clear()


class Without:
    """A device for whose kernels something is missing."""

    def missing(self):
        return "Triton is not installed"


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr("functional_optim.kernels.callers._told", set())


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


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (fails_to_compile, "ptxas died"),
        (does_something_else, "does something else than the rule"),
    ],
)
def test_a_kernel_that_cannot_be_had_falls_back_before_anything_is_written(
    gpu, told, monkeypatch, fault, says
):
    fault(gpu, monkeypatch)
    nothing_loaded(monkeypatch)
    params = params_on(fake.DEVICE)
    strict = adapters.AdamW(params, compile="strict")
    give(params, tensors(1)[0])
    before = state_of(strict, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="a strict step must be compiled"):
            strict.step()
    callers._told.clear()
    alike(state_of(strict, params), before)
    opt = adapters.AdamW(params)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt.step()
    mine = [str(x.message) for x in found if "functional_optim" in str(x.message)]
    assert sum(says in text for text in mine) == 1
    other = params_on("cpu")
    theirs = adapters.AdamW(other)
    give(other, tensors(1)[0])
    theirs.step()
    alike(state_of(opt, params), state_of(theirs, other), ulps=16)


def test_without_triton_there_is_one_warning(gpu, told, monkeypatch):
    monkeypatch.setitem(drivers.DRIVERS, fake.DEVICE, Without())
    monkeypatch.setattr(Without, "capturing", lambda self: False, raising=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = train(adapters.Rprop, fake.DEVICE)
    assert sum("Triton is not installed" in str(x.message) for x in found) == 1
    alike(results, train(adapters.Rprop, "cpu"), ulps=16)


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
    wider = [f"tl.arange(0, {CONFIGS[1].block})", CONFIGS[1].warps]
    for _ in range(2):
        monkeypatch.setattr(triton_builds, "_kernels", {})  # as in a new process
        train(adapters.AdamW, fake.DEVICE, steps=1)
        assert len(asked) == len(CONFIGS)
        assert wider[0] in gpu.texts[-1].text
        assert gpu.texts[-1].warps == wider[1]


def test_what_is_kept_is_not_tried_again(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    tried = []
    real = Served.compare
    monkeypatch.setattr(Served, "compare", lambda *own, **more: tried.append(real(*own, **more)))
    for _ in range(2):
        monkeypatch.setattr(triton_builds, "_kernels", {})  # as in a new process
        train(adapters.AdamW, fake.DEVICE, steps=1)
        assert len(tried) == 1
    monkeypatch.setattr(gpu, "name", lambda device: "another model")
    monkeypatch.setattr(triton_builds, "_kernels", {})
    train(adapters.AdamW, fake.DEVICE, steps=1)
    assert len(tried) == 2
