"""Many problems side by side: each as it would be alone, whatever its neighbours do."""

import fits
import pytest
import torch
from fits import curves, decay, rosenbrock

import functional_optim as fo
from functional_optim import tree
from functional_optim.solvers import loop, slots

FIELDS = ("x", "cost", "fun", "grad", "optimality", "nfev", "njev", "nit", "status", "active_mask")


def rows(result, index):
    return [tree.map(lambda x: x[index], getattr(result, name)) for name in FIELDS]


def same(a, b):
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


WAYS = [
    {},
    {"method": "dogleg"},
    {"linear_solver": "qr"},
    {"linear_solver": "kernel"},
    {"loss": "soft_l1", "f_scale": 0.01},
    {"bounds": (0.5, None)},
    {"x_scale": 1.0},
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_bits_do_not_depend_on_neighbours_order_or_nan(how):
    x0, y = curves(37)
    y[5] = float("nan")
    y[9] = 1e200
    whole = fo.least_squares(decay, x0, (y,), batched=True, **how)
    order = torch.randperm(37)
    mixed = fo.least_squares(decay, x0[order], (y[order],), batched=True, **how)
    good = (order != 5) & (order != 9)
    assert same(rows(mixed, good), rows(whole, order[good]))
    for i in (0, 8, 36):
        alone = fo.least_squares(decay, x0[i : i + 1], (y[i : i + 1],), batched=True, **how)
        assert same(rows(alone, 0), rows(whole, i))
        single = fo.least_squares(decay, x0[i], (y[i],), **how)
        assert torch.equal(single.x, whole.x[i])
        assert int(single.status) == int(whole.status[i])
    assert int(whole.status[5]) == -1
    assert torch.equal(whole.x[5], x0[5])
    assert whole.message[5].startswith("Residuals or their Jacobian are not finite")


def test_a_power_has_the_bits_of_a_batch_of_any_size():
    """torch computes the end of a tensor with other instructions; batches have none."""

    def fun(x, y):
        return x[0].abs() ** 1.7 * fits.TIMES ** (x[1] * x[1] + 0.3) - y

    x0 = torch.rand(23, 2, dtype=torch.float64) + 0.5
    y = torch.rand(23, 30, dtype=torch.float64)
    whole = fo.least_squares(fun, x0, (y,), batched=True)
    for i in range(23):
        alone = fo.least_squares(fun, x0[i : i + 1], (y[i : i + 1],), batched=True)
        assert torch.equal(alone.x[0], whole.x[i])


def test_finished_problems_are_neither_moved_nor_evaluated_for_long(monkeypatch):
    count = 400
    x0 = torch.ones(count, 2, dtype=torch.float64)
    x0[:3] = torch.tensor([-1.2, 1.0])
    sizes = []

    before = loop.advance
    monkeypatch.setattr(loop, "advance", lambda *a: (sizes.append(a[2].x.shape[0]), before(*a))[1])
    found = fo.least_squares(rosenbrock, x0, batched=True)
    assert bool(found.success.all())
    assert found.nfev[3:].eq(1).all()  # they begin at the solution
    assert torch.equal(found.x[3:], x0[3:])
    assert set(sizes) == {slots.ROWS}


def test_memory_is_bounded_by_slots_that_are_filled_again(monkeypatch):
    x0, y = curves(200)
    whole = fo.least_squares(decay, x0, (y,), batched=True)
    monkeypatch.setattr(slots, "LIMIT", 4 * 30 * 48)
    sizes = set()
    before = loop.advance
    monkeypatch.setattr(loop, "advance", lambda *a: (sizes.add(a[2].x.shape[0]), before(*a))[1])
    parts = fo.least_squares(decay, x0, (y,), batched=True)
    assert max(sizes) == 48
    assert same(rows(parts, slice(None)), rows(whole, slice(None)))


def test_trees_and_float32():
    x0, y = curves(5)
    names = ("a", "rate", "c")
    start = {name: x0[:, i].to(torch.float32) for i, name in enumerate(names)}

    def fun(x, own):
        return decay(torch.stack([x[name] for name in names]), own["y"].to(torch.float64))

    found = fo.least_squares(fun, start, ({"y": y.to(torch.float32)},), batched=True)
    exact = fo.least_squares(decay, x0, (y,), batched=True)
    assert found.x["a"].dtype == torch.float32
    assert found.cost.dtype == torch.float64
    for i, name in enumerate(names):
        assert torch.allclose(found.x[name].double(), exact.x[:, i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["lm", "dogleg", "trf"])
def test_fits_do_not_depend_on_the_unit_of_residuals(method):
    """xtol² was a length in their unit: small ones ended after two steps, as successes."""
    x0, y = curves(6)
    unit = torch.tensor([2.0**-60, 1.0, 2.0**-60], dtype=torch.float64)
    whole = fo.least_squares(decay, x0, (y,), batched=True, method=method)
    small = fo.least_squares(decay, x0 * unit, (y * unit[0],), batched=True, method=method)
    assert bool(whole.success.all())
    torch.testing.assert_close(small.x / unit, whole.x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("x_scale", ["jac", 1.0])
@pytest.mark.parametrize("method", ["lm", "dogleg", "trf"])
def test_a_start_near_zero_is_no_end(method, x_scale):
    """The first radius of dogleg was the length of x0, and a step of it too short for ftol."""
    A, b = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, -1.0]]).double(), torch.ones(3).double()
    best = torch.linalg.lstsq(A, b).solution
    for unit in (1.0, 1e12):
        for start in (0.0, 1e-10):
            x0 = torch.full((2,), start, dtype=torch.float64)
            how = {"method": method, "x_scale": x_scale}
            found = fo.least_squares(lambda x, u=unit: u * (A @ x - b), x0, **how)
            assert found.success
            torch.testing.assert_close(found.x, best, rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", [{}, {"linear_solver": "qr"}, {"bounds": (-1e9, 1e9)}])
@pytest.mark.parametrize("batched", [False, True])
def test_a_large_parameter_without_a_scale_is_found(how, batched):
    """With scipy's x_scale=1, the first damping left a step too short for ftol."""
    best = torch.tensor([3e6, -1e6], dtype=torch.float64)
    x0 = torch.zeros((3, 2) if batched else 2, dtype=torch.float64)
    found = fo.least_squares(
        lambda x: (x - best) / 1e6, x0, x_scale=1.0, gtol=0.0, batched=batched, **how
    )
    torch.testing.assert_close(found.x, best.expand_as(x0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["cg", "lsmr"])
def test_a_large_parameter_is_found_without_a_jacobian(kind):
    """Without columns, whose norms are the scales, the first damping was too large."""
    best = torch.tensor([3e6, -1e6], dtype=torch.float64)
    found = fo.least_squares(lambda x: (x - best) / 1e6, 0 * best, linear_solver=kind)
    torch.testing.assert_close(found.x, best, rtol=1e-6, atol=0)
