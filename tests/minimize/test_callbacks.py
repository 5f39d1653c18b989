"""Callbacks of all solvers, how they stop a search, and histories of iterates."""

from typing import Any

import pytest
import torch
from torch import Tensor
from valleys import rosenbrock

import functional_optim as fo
from functional_optim import tree
from functional_optim.solvers import slots

optimize = pytest.importorskip("scipy.optimize")


def residuals(x: Tensor) -> Tensor:
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def solved(solver: str, method: str, x0: Any, **how: Any) -> Any:
    fun = {"minimize": rosenbrock}.get(solver, residuals)
    return getattr(fo, solver)(fun, x0, method=method, **how)


SOLVERS = [
    *[("minimize", m) for m in ("l-bfgs-b", "bfgs", "ssbfgs", "ssbroyden", "newton-cg")],
    *[("root", m) for m in ("newton", "lm", "broyden")],
    *[("least_squares", m) for m in ("lm", "dogleg", "trf")],
]


@pytest.mark.parametrize(("solver", "method"), SOLVERS)
def test_a_callback_sees_every_iterate_and_the_history_keeps_it(solver, method):
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    seen = []
    found = solved(solver, method, x0, callback=seen.append, return_history=True)
    plain = solved(solver, method, x0)
    assert torch.equal(found.x, plain.x)
    assert (found.nfev, found.nit) == (plain.nfev, plain.nit)
    assert plain.history is None
    assert [r.nit for r in seen] == list(range(1, found.nit + 1))
    assert seen[-1].nfev <= found.nfev
    assert all(r.running for r in seen[:-1])
    x, f = found.history
    assert x.shape == (found.nit + 1, 2)
    assert torch.equal(x[0], x0)
    assert torch.equal(x[-1], found.x)
    assert torch.equal(x[1:], torch.stack([r.x for r in seen]))
    assert torch.equal(f[1:], torch.stack([r.fun for r in seen]))
    value = rosenbrock if solver == "minimize" else lambda x: 0.5 * residuals(x).square().sum()
    assert torch.allclose(f, torch.stack([value(p) for p in x]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("way", ["raise", "return"])
@pytest.mark.parametrize(("solver", "method"), SOLVERS)
def test_a_callback_stops_a_search(solver, method, way):
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)

    def callback(intermediate_result: Any) -> bool:
        if intermediate_result.nit == 2 and way == "raise":
            raise StopIteration
        return intermediate_result.nit == 2

    found = solved(solver, method, x0, callback=callback, return_history=True)
    assert (found.nit, found.status, found.success) == (2, -3, False)
    assert found.message == "The callback stopped the search."
    whole = solved(solver, method, x0, return_history=True)
    assert torch.equal(found.history.x, whole.history.x[:3])


def test_iterates_are_those_of_scipy():
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    ours = fo.minimize(rosenbrock, x0, return_history=True).history.x
    theirs = []
    optimize.minimize(
        optimize.rosen, x0.numpy(), jac=optimize.rosen_der, method="L-BFGS-B",
        callback=lambda intermediate_result: theirs.append(intermediate_result.x.copy()),
    )  # fmt: skip
    for i in range(4):
        assert torch.allclose(ours[i + 1], torch.as_tensor(theirs[i]), atol=1e-6)


@pytest.mark.parametrize(("solver", "method"), SOLVERS)
def test_single_problems_of_a_batch_are_stopped(solver, method):
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(37, 2, dtype=torch.float64, generator=generator)
    x0[3] = torch.nan
    stopped = torch.arange(37) % 2 == 0

    def callback(r: Any) -> Tensor:
        return stopped & (r.nit >= 2)

    found = solved(solver, method, x0, batched=True, callback=callback, return_history=True)
    whole = solved(solver, method, x0, batched=True, return_history=True)
    good = whole.success.clone()
    for i in good.nonzero()[:, 0].tolist():
        if stopped[i] and whole.nit[i] > 2:
            assert (int(found.status[i]), int(found.nit[i])) == (-3, 2)
            assert torch.equal(found.history.x[i, :3], whole.history.x[i, :3])
            assert torch.equal(found.history.x[i, 2:], found.x[i].expand_as(found.history.x[i, 2:]))
        else:
            assert torch.equal(found.x[i], whole.x[i])
            assert int(found.status[i]) == int(whole.status[i])
    assert int((found.status == -3).sum()) > 10
    assert int(found.status[3]) == -1
    assert found.history.x.shape == (37, int(found.nit.max()) + 1, 2)
    alone = solved(solver, method, x0[1:2], batched=True, return_history=True)
    length = alone.history.fun.shape[1]
    assert torch.equal(alone.history.x[0], whole.history.x[1, :length])


def test_problems_that_wait_are_seen_too_and_stop_with_the_others(monkeypatch):
    monkeypatch.setattr(slots, "LIMIT", 1)  # 16 at once
    x0 = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = []
    found = fo.minimize(rosenbrock, x0, batched=True, callback=seen.append, return_history=True)
    assert bool(found.success.all())
    assert torch.equal(seen[0].x[20:], x0[20:])
    assert bool(seen[0].fun[20:].isnan().all())
    assert bool(seen[0].running[20:].all())
    assert not bool(seen[-1].fun.isnan().any())
    assert torch.equal(found.history.x[:, 0], x0)
    assert torch.equal(found.history.x[:, -1], found.x)
    all_at_once = fo.minimize(rosenbrock, x0, batched=True, callback=lambda r: True)
    assert bool((all_at_once.status == -3).all())
    assert torch.equal(all_at_once.x[20:], x0[20:])


def test_trees_and_what_a_callback_writes_into():
    start = {"a": torch.ones(4, 2, dtype=torch.float64), "b": torch.ones(4, 1).double()}

    def fun(x: Any) -> Tensor:
        return ((x["a"] - 2) ** 4).sum() + ((x["b"] - x["a"]) ** 2).sum()

    def callback(r: Any) -> None:
        for p in tree.leaves(r.x):
            p.zero_()
        r.fun.zero_()

    found = fo.minimize(fun, start, batched=True, callback=callback, return_history=True)
    plain = fo.minimize(fun, start, batched=True)
    assert torch.equal(found.x["a"], plain.x["a"])
    assert found.history.x["a"].shape == (4, int(found.nit.max()) + 1, 2)
    assert found.history.x["b"].shape == (4, int(found.nit.max()) + 1, 1)
    assert torch.equal(found.history.fun[:, -1], found.fun)


@pytest.mark.parametrize("solver", ["minimize", "root", "least_squares"])
def test_a_history_has_the_points_that_were_evaluated(solver):
    """In half types it had the points before they were rounded, in float32."""

    def fun(x: Any) -> Tensor:
        r = torch.stack([10 * (x["z"] - x["a"] ** 2), 1 - x["a"]])
        return r.square().sum() if solver == "minimize" else r

    for types in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        start = {name: torch.tensor(-1.2).to(t) for name, t in zip("za", types, strict=True)}
        found = getattr(fo, solver)(fun, start, return_history=True)
        for name, x in found.history.x.items():
            assert x.dtype == start[name].dtype
            assert torch.equal(x[-1], found.x[name])


def test_bad_callbacks():
    x0 = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="callback must be a function"):
        fo.minimize(rosenbrock, x0, callback=3)
    for callback in (lambda: None, lambda x, fun: None):
        with pytest.raises(TypeError, match="callback is called with one argument"):
            fo.minimize(rosenbrock, x0, callback=callback)
    with pytest.raises(TypeError, match="return None, or True"):
        fo.minimize(rosenbrock, x0, callback=lambda r: r.fun)
    with pytest.raises(TypeError, match="return None, or True"):
        fo.minimize(rosenbrock, x0, callback=lambda r: torch.ones(2) > 0)
    with pytest.raises(TypeError, match="return None, or True"):
        fo.root(residuals, x0, callback=lambda r: "stop")
    with pytest.raises(ZeroDivisionError):
        fo.least_squares(residuals, x0, callback=lambda r: 1 / 0)
