"""compile=True on a GPU: one program solves all problems, one in each thread.

There is no GPU here. g++ compiles the program's text, which is CUDA C++, and runs its threads one
after another on the device for tests; NVRTC compiles it where its package is installed.
"""

import warnings
from collections import OrderedDict

import pytest
import torch
from gpu import device as fake
from gpu import threads
from gpu.drivers import OnDevice, installed

import functional_optim as fo
from functional_optim.kernels import callers, lane_library, nvrtc
from functional_optim.solvers import programs

pytestmark = pytest.mark.own_process

COUNT = 64
F64 = {"dtype": torch.float64}
TIME = torch.linspace(0.1, 2, 12, **F64)


@pytest.fixture
def driver():
    fake.load()
    programs._known.clear()
    with installed(fake.DEVICE, OnDevice()) as found:
        yield found
    programs._known.clear()


def decays(dtype=torch.float64):
    """First parameters and data of fits of two parameters."""
    draw = torch.Generator().manual_seed(3)
    true = torch.rand(COUNT, 2, generator=draw, dtype=dtype) + 0.5
    y = true[:, :1] * torch.exp(-true[:, 1:] * TIME.to(dtype))
    return torch.ones(COUNT, 2, dtype=dtype), y + 0.01 * torch.randn(
        y.shape, generator=draw, dtype=dtype
    )


def circle(x, a):
    return torch.stack([x[0] ** 2 + x[1] ** 2 - a, x[0] - x[1]])


def valley(x, a):
    return (a - x[:-1]).square().sum() + 10 * (x[1:] - x[:-1].square()).square().sum()


def fit(device, method="lm", dtype=torch.float64, **how):
    time, x0, y = [a.to(device) for a in (TIME.to(dtype), *decays(dtype))]

    def decay(x, y):
        return x[0] * torch.exp(-x[1] * time) - y

    return fo.least_squares(decay, x0, (y,), method=method, batched=True, **how)


def find_roots(device, method, **how):
    a = torch.linspace(0.5, 3, COUNT, **F64).to(device)
    x0 = torch.tensor([1.0, 0.5], **F64).repeat(COUNT, 1).to(device)
    return fo.root(circle, x0, (a,), method=method, batched=True, **how)


def descend(device, method, **how):
    a = torch.linspace(0.5, 1.5, COUNT, **F64).to(device)
    x0 = torch.zeros(COUNT, 3, **F64).to(device)
    return fo.minimize(valley, x0, (a,), method=method, batched=True, **how)


CASES = {
    **{name: (fit, {"method": name}) for name in ("lm", "dogleg")},
    "trf": (fit, {"method": "trf", "bounds": (0.6, 1.3), "loss": "huber"}),
    "float32": (fit, {"dtype": torch.float32}),
    **{f"root {name}": (find_roots, {"method": name}) for name in ("newton", "lm", "broyden")},
    **{name: (descend, {"method": name}) for name in ("bfgs", "ssbfgs", "ssbroyden")},
    "l-bfgs-b": (descend, {"method": "l-bfgs-b", "bounds": (-1.0, 0.9)}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_problem_is_solved_by_a_thread_as_the_cpu_solves_it(driver, name):
    solver, how = CASES[name]
    expected = solver("cpu", compile=True, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = solver(fake.DEVICE, compile=True, **how)
    assert found.x.device.type == fake.DEVICE
    assert ("threads", COUNT) in driver.launches
    assert torch.equal(found.success.cpu(), expected.success)
    near = 1e-4 if how.get("dtype") is torch.float32 else 1e-9
    torch.testing.assert_close(found.x.cpu(), expected.x, rtol=near, atol=near)


def test_a_search_may_end_at_its_start(driver):
    """Then the trial of its program has no step to compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(fake.DEVICE, compile=True, max_nfev=1)
    assert ("threads", COUNT) in driver.launches
    assert found.status.tolist() == [0] * COUNT
    assert found.nfev.tolist() == [1] * COUNT


def test_a_callback_sees_the_problems_after_each_step(driver):
    seen = []
    fit(fake.DEVICE, compile=True, callback=lambda r: seen.append(r.x.cpu()))
    fewer = []
    fit("cpu", compile=True, callback=lambda r: fewer.append(r.x))
    assert len(seen) == len(fewer) > 2
    torch.testing.assert_close(seen[1], fewer[1])


def test_the_function_may_move_tensors_to_the_device(driver):
    def run(device):
        x0, y = [a.to(device) for a in decays()]
        time, scale = torch.linspace(0.5, 2, 12, **F64), torch.tensor(2.0, **F64)

        def weighted(x, y):
            return (x[0] * torch.exp(-x[1] * time.to(x.device)) - y) * scale

        return fo.least_squares(weighted, x0, (y,), batched=True, compile=True)

    expected, found = run("cpu"), run(fake.DEVICE)
    assert driver.launches
    torch.testing.assert_close(found.x.cpu(), expected.x)


@pytest.mark.parametrize("routine", ["start", "advance"])
@pytest.mark.filterwarnings("default")
def test_a_program_that_computes_something_else_is_not_used(driver, routine, monkeypatch):
    """Its first start and step are compared with torch's: the compiler is another one there."""

    def spoilt(text, device):
        at = text.index(f"static APART void {routine}")
        changed = text[:at] + text[at:].replace("exp_of(", "sin_of(")
        assert changed != text
        return threads.launcher(changed)

    driver.threads = spoilt
    monkeypatch.setattr(callers, "_warned", set())
    with pytest.warns(RuntimeWarning, match="gives other values than torch, so it is not used"):
        found = fit(fake.DEVICE, compile=True, max_nfev=200)
    expected = fit("cpu")
    torch.testing.assert_close(found.x.cpu(), expected.x, rtol=1e-6, atol=1e-6)


def test_a_program_of_the_cpu_is_compared_at_its_start(monkeypatch):
    on_host = lane_library.on_host

    def spoilt(text):
        at = text.index("static APART void start")
        return on_host(text[:at] + text[at:].replace("exp_of(", "sin_of("))

    monkeypatch.setattr(lane_library, "on_host", spoilt)
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)
    monkeypatch.setattr(programs, "_known", OrderedDict())
    monkeypatch.setattr(callers, "_warned", set())
    with pytest.warns(RuntimeWarning, match="for cpu gives other values than torch"):
        found = fit("cpu", compile=True, max_nfev=200)
    torch.testing.assert_close(found.x, fit("cpu").x, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("moment", ["compiled", "launched"])
def test_a_program_that_fails_is_not_used(driver, moment, monkeypatch):
    def failing(*given):
        raise RuntimeError("NVRTC failed (NVRTC_ERROR_COMPILATION)")

    driver.threads = failing if moment == "compiled" else lambda text, device: failing
    monkeypatch.setattr(callers, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"fails \(NVRTC failed .*\), so it is not used"):
        found = fit(fake.DEVICE, compile=True, max_nfev=200)
    torch.testing.assert_close(found.x.cpu(), fit("cpu").x, rtol=1e-6, atol=1e-6)


def test_nvrtc_compiles_the_programs_for_an_h100(driver):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVIDIA's package is not installed")
    texts = []
    load = driver.threads
    driver.threads = lambda text, device: texts.append(text) or load(text, device)
    for name in ("lm", "root newton", "l-bfgs-b"):
        solver, how = CASES[name]
        solver(fake.DEVICE, compile=True, **how)
    for text in texts:
        code = nvrtc.compiled(text, "sm_90")
        if code is None:
            pytest.skip("NVRTC's library is not installed.")
        assert code.startswith(b"\x7fELF")
