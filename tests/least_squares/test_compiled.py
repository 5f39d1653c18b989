"""compile=True: a library that solves all problems, and a graph of evaluations where there is none.

Results are those of eager steps, and do not depend on neighbours, their order or threads.
"""

import math
from typing import ClassVar

import pytest
import torch
from fits import curves, decay
from helpers import recorded_graphs
from sampling import some

import functional_optim as fo
from functional_optim.kernels import lane_library
from functional_optim.kernels.tape import Tape
from functional_optim.solvers import compiled, programs, slots

F64 = {"dtype": torch.float64}
T = torch.linspace(0.1, 2, 12, **F64)
W = torch.linspace(-1, 1, 36, **F64).reshape(12, 3)


def solve(fun, x0, *args, **how):
    return fo.least_squares(fun, x0, args, batched=True, **how)


@pytest.fixture
def by_library(monkeypatch):
    """Fails where a library is not used; counts those that are made."""

    def refused(fn, **how):
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refused)
    programs._known.clear()
    made = []
    make = programs._made
    monkeypatch.setattr(programs, "_made", lambda *a: made.append(make(*a)) or made[-1])
    yield made
    programs._known.clear()


def in_place(x, y):
    r = x[0] * T - y
    r = r * 2
    r += x[1]
    r.mul_(0.5)
    return r - x[2]


def pieces(x, y):
    a, b, c = x.unbind()
    left, right = y.split([5, 7])[0], y[-7:]
    return torch.cat([a * T[:5] + b - left, torch.stack([c * t for t in T[5:]]).flip(0) - right])


def rotated(x, y):
    turn = torch.stack(
        [torch.stack([x[0].cos(), -x[0].sin()]), torch.stack([x[0].sin(), x[0].cos()])]
    )
    return (turn @ (T.reshape(2, 6) + x[1:, None])).reshape(-1) - y


def padded(x, y):
    wide = torch.nn.functional.pad(torch.outer(x, T[:4]), (1, 1, 1, 0))
    return wide.reshape(-1)[:12] + torch.diag_embed(x).reshape(-1).repeat(2)[:12] * 0.1 - y


def branches(x, y):
    z = torch.where(T > 1, x[0] * T, x[1] * T**2)
    return z.clamp(min=-3.0, max=3.0) + x[2].abs().sqrt() + torch.maximum(x[0], x[1]) - y


def smooth(x, y):
    z = x[0].sigmoid() + torch.tanh(x[1] * T) + torch.log1p((x[2] * T).square())
    return z + torch.exp(-T * x[0].abs()) + torch.atan2(x[1], 1 + x[2] ** 2) + T ** x[1].exp() - y


FUNCTIONS = {
    "matrix": lambda x, y: W @ x - y,
    "softmax": lambda x, y: torch.softmax(x, 0) @ W.T - y,
    "norms": lambda x, y: x.norm() * T + x.mean() - x.std() * x.amax() - y,
    "tree": lambda x, y: x[0] * T + x[1:].sum() + x[2] * torch.ones(12, **F64) - y,
    "loop": lambda x, y: sum((x[i] * T**i for i in range(3)), torch.zeros(12, **F64)) - y,
    "broadcast": lambda x, y: (x[:, None] * T[None, :]).sum(0) + (x[:, None] * W.T).mean(0) - y,
    "gradient": lambda x, y: torch.func.grad(lambda z: (z**3).sum())(x).sum() * T - y,
    "linear": lambda x, y: torch.nn.functional.linear(x, W, T) - y,
    "einsum": lambda x, y: torch.einsum("ij,j->i", W, x.exp()) - y,
    "scalar": lambda x, y: (W @ x).square().sum() - y[0],
    **{f.__name__: f for f in (in_place, pieces, rotated, padded, branches, smooth)},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_library_does_what_torch_does(name, by_library):
    fun = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1)
    x0 = torch.rand(21, 3, generator=generator, **F64) + 0.2
    y = torch.rand(21, 12, generator=generator, **F64)
    start = solve(fun, x0, y, max_nfev=1)
    eager, found = [solve(fun, x0, y, compile=c, implicit=False) for c in (False, True)]
    assert [x.compiled is not None for x in by_library] == [True]
    assert (found.success == eager.success).double().mean() > 0.8
    assert (found.cost <= 1.001 * start.cost).all()
    alike = (found.cost - eager.cost).abs() <= 1e-6 * eager.cost + 1e-12
    assert alike.double().mean() > 0.8  # others may end in another valley
    once, again = [solve(fun, x0, y, compile=c, max_nfev=3) for c in (False, True)]
    torch.testing.assert_close(again.x, once.x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again.fun, once.fun, rtol=1e-8, atol=1e-8)


SIZES = [(3, torch.float32), (1, torch.float64), (11, torch.float64)]
HOW = [{}, {"bounds": (0.1, 0.9)}, {"linear_solver": "kernel"}, {"method": "dogleg"}]
ELEMENTWISE = [{"loss": "huber"}, {"loss": "arctan", "f_scale": 0.5}, {"x_scale": 2.0}]
"""What they change is the same for matrices of every size."""
KINDS = [(how, *size) for how in HOW for size in SIZES]
KINDS += [(how, *size) for size in SIZES for how in ELEMENTWISE]


@pytest.mark.parametrize(("how", "n", "dtype"), some(KINDS, len(KINDS) - 6), ids=str)
def test_each_kind_of_step_is_that_of_torch(how, n, dtype, by_library):
    generator = torch.Generator().manual_seed(n)
    weights = torch.rand(2 * n + 3, n, generator=generator).to(dtype)
    x0 = torch.full((19, n), 0.5, dtype=dtype)
    y = 2 * torch.rand(19, 2 * n + 3, generator=generator).to(dtype)

    def fun(x, y):
        return weights @ x + 0.3 * torch.sin(weights @ x) - y

    eager, found = [solve(fun, x0, y, compile=c, implicit=False, **how) for c in (False, True)]
    assert [x.compiled is not None for x in by_library] == [True]
    assert torch.equal(found.success, eager.success)
    close = {"rtol": 1e-6, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found.cost, eager.cost, **close)
    assert torch.equal(found.active_mask, eager.active_mask)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_of_a_problem_are_its_own(threads, by_library):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x0, y = curves(150)
        y[7] = math.nan
        found = solve(decay, x0, y, compile=True)
        order = torch.randperm(150)
        mixed = solve(decay, x0[order], y[order], compile=True)
        assert torch.equal(mixed.x, found.x[order])
        assert torch.equal(mixed.nfev, found.nfev[order])
        for i in (0, 8, 149):
            alone = solve(decay, x0[i : i + 1], y[i : i + 1], compile=True)
            assert torch.equal(alone.x[0], found.x[i])
        assert int(found.status[7]) == -1
    finally:
        torch.set_num_threads(before)


def test_a_function_that_has_changed_is_recorded_again(by_library):
    x0, y = torch.ones(9, 1, **F64), torch.ones(9, 4, **F64)
    scale, here = torch.full((4,), 2.0, **F64), {"power": 1.0, "w": torch.ones(4, **F64)}

    def fun(x, y):
        return (x * here["w"]) ** here["power"] * scale - y

    def end():
        return float(solve(fun, x0, y, compile=True).x[0, 0])

    assert end() == pytest.approx(0.5)
    scale.fill_(4.0)
    assert end() == pytest.approx(0.25)
    here["w"] = torch.full((4,), 2.0, **F64)
    assert end() == pytest.approx(0.125)
    assert len(by_library) == 1
    here["power"] = 3.0
    assert end() == pytest.approx(0.25 ** (1 / 3) / 2)
    assert len(by_library) == 2
    here["w"] = torch.full((4,), 2.0)
    assert end() == pytest.approx(0.25 ** (1 / 3) / 2)


def test_other_operations_or_another_result_need_another_library(by_library):
    x0, y = torch.full((9, 1), 0.5, **F64), torch.full((9, 2), 0.2, **F64)
    here = {"f": torch.sin, "first": True}

    def fun(x, y):
        a, b = here["f"](x) - y, here["f"](x) - 2 * y
        return a if here["first"] else b

    def end():
        return float(solve(fun, x0, y, compile=True).x[0, 0])

    assert end() == pytest.approx(math.asin(0.2))
    here["f"] = torch.sinh
    assert end() == pytest.approx(math.asinh(0.2))
    here["first"] = False
    assert end() == pytest.approx(math.asinh(0.4))
    assert len(by_library) == 3


def test_fields_exchange_their_values():
    """Each new value is that of the old ones, whatever the order in which they are written."""

    def start(x, own):
        return [x, x + own, own[:, :1] * 0 + 1, torch.full((1,), slots.RUNNING)]

    def step(x, y, count, status, own):
        two = torch.cat([x[:, 1:], y[:, :1]], -1)
        return [y, two, count + 1, torch.where(count[:, 0] < 3, status, 1)]

    x, own = torch.rand(11, 2, **F64), torch.rand(11, 2, **F64)
    library = lane_library.compiled(
        start, step, x[:1].clone(), [own[:1].clone()], (Tape(), Tape()), lambda: 3, slots.RUNNING
    )
    states = library.states(11)
    states[0].copy_(x)
    library.run(states, [own], [], begins=True)
    library.run(states, [own], [], begins=False)
    a, b = x, x + own
    for _ in range(3):
        a, b = b, torch.cat([a[:, 1:], b[:, :1]], -1)
    assert torch.equal(states[0], a)
    assert torch.equal(states[1], b)


def test_callbacks_and_histories_are_those_of_eager_steps(by_library):
    x0, y = curves(20)
    seen = []

    def callback(intermediate_result):
        seen.append(intermediate_result.nit.clone())
        return intermediate_result.nit >= 3

    eager = solve(decay, x0, y, return_history=True)
    found = solve(decay, x0, y, return_history=True, compile=True)
    torch.testing.assert_close(found.history.x, eager.history.x, rtol=1e-6, atol=1e-7)
    stopped = solve(decay, x0, y, compile=True, callback=callback)
    assert int(stopped.nit.max()) == 3
    assert len(seen) == 3
    assert (stopped.status == -3).any()


def test_derivatives_of_solutions_are_those_of_eager_steps(by_library):
    x0, y = curves(10)
    grads = []
    for c in (False, True):
        own = y.clone().requires_grad_()
        solve(decay, x0, own, compile=c).x.square().sum().backward()
        grads.append(own.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-8)


@torch.compiler.disable
def hidden(x):
    return torch.cumsum(x, 0)


def test_where_torch_cannot_compile_a_step_it_runs_eagerly(fresh_dynamo):
    x0, y = torch.rand(20, 3, **F64), torch.rand(20, 12, **F64)
    compiled._steps.clear()

    def fun(x, y):
        return hidden(x) - y[:3]

    with pytest.warns(RuntimeWarning, match=r"torch.compile failed .*; the solver runs eagerly"):
        found = solve(fun, x0, y, compile=True)
    assert [graph.broken for graph in compiled._steps.values()] == [True]
    torch.testing.assert_close(found.x, solve(fun, x0, y).x, rtol=0, atol=0)
    torch.testing.assert_close(solve(fun, x0, y, compile=True).x, found.x, rtol=0, atol=0)


def test_an_empty_constant_of_a_derivative_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fun, **how: fun)
    x0 = torch.rand(5, 3, **F64)

    def fun(x):  # the derivative of trace makes an empty tensor
        return x * torch.trace(torch.outer(x, x)) - 1

    found, expected = [
        fo.least_squares(fun, x0, batched=True, compile=how) for how in (True, False)
    ]
    torch.testing.assert_close(found.x, expected.x)


@pytest.mark.parametrize("draws", [True, False])
def test_what_a_recording_cannot_know_is_not_taken_for_known(draws):
    """Random numbers and branches on values fail as they do in eager steps of many problems."""

    def fun(x, y):
        if draws:
            return x - y[:3] + torch.randn(3, **F64)
        return x - y[:3] if x.sum() > 0 else x + y[:3]

    x0, y = torch.rand(20, 3, **F64), torch.rand(20, 12, **F64)
    with pytest.raises(RuntimeError, match=r"random|cannot read a value"):
        solve(fun, x0, y, compile=True)


def test_an_exponential_is_right_to_the_last_bits(by_library):
    """Also where it is subnormal, 0 or infinite."""
    points = torch.cat([torch.linspace(-750, 715, 4000, **F64), torch.randn(4000, **F64)])
    points = points.reshape(1, -1)
    found = solve(lambda x, p: p.exp() - x * 0, torch.zeros(1, 1, **F64), points, compile=True)
    expected = points.exp()
    good = expected.isfinite()
    assert torch.equal(found.fun.isfinite(), good)
    off = (found.fun - expected)[good].abs()
    assert (off <= 2 * torch.finfo(torch.float64).eps * expected[good] + 5e-324).all()


class Scaled(torch.autograd.Function):
    """A function whose backward reads numbers and tensors of its own."""

    by: ClassVar = {"number": 2.0, "tensor": torch.ones(3, **F64)}

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * Scaled.by["number"] * Scaled.by["tensor"]


class Cached:
    """It stores a tensor when it is first called, and has no hash."""

    def __init__(self):
        self.w = None

    def __eq__(self, other):
        return False

    def __call__(self, x):
        if self.w is None:
            self.w = torch.arange(1.0, 4.0, **F64)
        return (x - self.w).square().sum()


def test_a_function_that_stores_tensors_is_recorded_with_them():
    x = torch.zeros(9, 3, **F64)
    for _ in range(2):
        found = fo.minimize(Cached(), x, batched=True, compile=True)
        torch.testing.assert_close(found.x[0], torch.arange(1.0, 4.0, **F64))
    fun = Cached()
    for _ in range(2):
        found = fo.minimize(fun, x, batched=True, compile=True)
        torch.testing.assert_close(found.x[0], torch.arange(1.0, 4.0, **F64))


def test_what_only_derivatives_see_is_seen():
    x, here = torch.full((9, 3), 0.7, **F64), {"detach": False, "grad": True}

    def product(x):
        with torch.set_grad_enabled(here["grad"]):
            y = x + 0.0
        return (x * (y.detach() if here["detach"] else y) - 1).square().sum()

    def custom(x):
        return (Scaled.apply(x) - 1).square().sum()

    def slopes(fun):
        return fo.minimize(fun, x, batched=True, compile=True, max_nfev=1).grad[0]

    whole = slopes(product)
    here["detach"] = True
    torch.testing.assert_close(slopes(product), whole / 2)
    here.update(detach=False, grad=False)
    torch.testing.assert_close(slopes(product), whole / 2)
    whole = slopes(custom)
    Scaled.by["number"] = 4.0
    torch.testing.assert_close(slopes(custom), whole * 2)
    Scaled.by["tensor"].fill_(2.0)
    torch.testing.assert_close(slopes(custom), whole * 4)
    Scaled.by.update(number=2.0, tensor=torch.ones(3, **F64))


def test_zeros_of_both_signs_are_two_numbers():
    here = {"zero": 0.0}
    x = torch.full((9, 1), 0.5, **F64)

    def fun(x):
        return x - torch.copysign(torch.ones(1, **F64), torch.full((1,), here["zero"], **F64) * 1)

    for zero, end in ((0.0, 1.0), (-0.0, -1.0)):
        here["zero"] = zero
        found = fo.least_squares(fun, x, batched=True, compile=True)
        assert float(found.x[0]) == pytest.approx(end)


def test_values_are_not_read_past_torch(by_library):
    a = torch.tensor([[1.0], [2.0], [3.0]], **F64)
    for read in (lambda a: a.tolist(), lambda a: a.numpy(), lambda a: a.__array__()):
        with pytest.raises((AssertionError, RuntimeError), match=r"called|data|numpy"):
            fo.root(
                lambda x, a, r=read: x - torch.as_tensor(r(a)), 0 * a, (a,), batched=True,
                compile=True,
            )  # fmt: skip


VECTOR3 = torch.tensor([3.0, -1.0, 3.0], **F64)
EXACT = {
    "slices": lambda x, a: x[-9:-1].sum() + x[-2:9] - a[:2],
    "bools": lambda x, a: x - torch.where((a > 0.3) < (a > 0.6), 1.0, 0.0),
    "larger": lambda x, a: x - torch.maximum(a > 0.3, a > 0.6).double(),
    "any": lambda x, a: x - (a > 0.5).max() * 1.0 - (a > 0.5).amin() * 2.0,
    "both": lambda x, a: x - ((a > 0.3) + (a > 0.6) == (a > 0.3)).double(),
    "order": lambda x, a: x - (a > 0.5).double().sort(stable=True).indices,
    "left": lambda x, a: x - torch.linalg.solve(M3 + a, M3[:2], left=False)[0],
    "info": lambda x, a: x - torch.linalg.cholesky_ex(M3 - 3 * a[0]).info.sign(),
    "upper": lambda x, a: x - torch.linalg.cholesky(M3 @ M3.T, upper=True)[0],
    "negative": lambda x, a: x + torch._neg_view(VECTOR3) - a,
    "transposed": lambda x, a: (x.repeat(2).reshape(2, 3) * 2).transpose_(0, 1).reshape(-1) - 1,
    "differences": lambda x, a: torch.cat(
        [torch.stack([x, x.sin()]).reshape(-1), torch.stack([x.cos(), x]).reshape(-1)]
    ).diff(),
    "half": lambda x, a: x - a.bfloat16().double(),
    "truncated": lambda x, a: x - (1 / (-0.9 * a).long().double()).clamp(-1, 1),
    "over": lambda x, a: x - 1e-9 * ((1e9 * a).int() * 7 - (3e9 * a).long().int()),
    "sums": lambda x, a: x - 1e-9 * ((1e9 * a).int() * 3).sum(0, keepdim=True, dtype=torch.int32),
}
M3 = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 5.0]], **F64)


UNKNOWN = {
    "operation": lambda x, a: torch.linalg.inv(torch.diag(x + 2)) @ x - a,
    "cumulative": lambda x, a: torch.cumsum(x, 0) - a,
}


@pytest.mark.parametrize("name", EXACT | UNKNOWN)
def test_corners_of_operations_are_those_of_torch(name, fresh_dynamo, monkeypatch):
    """By a library, or by one graph in its place."""
    graphs, fun = recorded_graphs(monkeypatch), (EXACT | UNKNOWN)[name]
    compiled._steps.clear()
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(9, 3, generator=generator, **F64) + 0.2
    a = torch.rand(9, 3, generator=generator, **F64)
    how = {} if name in UNKNOWN else {"implicit": False, "max_nfev": 3}
    eager, found = [solve(fun, x, a, compile=c, **how) for c in (False, True)]
    assert len(graphs) == 1 or name not in UNKNOWN
    torch.testing.assert_close(found.x, eager.x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.fun, eager.fun, rtol=1e-9, atol=1e-9)


def test_bounds_far_away_change_no_step():
    """A step that rounds is no step that was cut."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(8, 8, generator=generator, **F64)
    x = torch.rand(9, 8, generator=generator, **F64)
    fun = lambda x: torch.tanh(weights @ x / 8**0.5) + 0.1 * weights @ (x * x)  # noqa: E731
    free, bounded = [
        fo.least_squares(fun, x, batched=True, max_nfev=2, bounds=b) for b in (None, (-1e9, 1e9))
    ]
    torch.testing.assert_close(bounded.x, free.x, rtol=1e-9, atol=1e-9)
