"""Bad input: an error or a status that says it, and nothing that has moved."""

import pytest
import torch
from fits import decay, rosenbrock
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functional_optim as fo
from functional_optim.kernels import private

AT = torch.tensor([-1.2, 1.0], dtype=torch.float64)
MANY = AT.repeat(3, 1)
NAN, INF = float("nan"), float("inf")
WIDE = {"bounds": (-9.0, 9.0)}

RAISED = {
    "fun": (TypeError, "takes a function that returns residuals", (3.0, AT), {}),
    "method": (ValueError, "unknown method 'newton'", (rosenbrock, AT), {"method": "newton"}),
    "loss": (ValueError, "unknown loss 'l1'", (rosenbrock, AT), {"loss": "l1"}),
    "solver": (ValueError, "unknown linear_solver", (rosenbrock, AT), {"linear_solver": "lu"}),
    "loss function": (ValueError, "unknown loss", (rosenbrock, AT), {"loss": [1]}),
    "f_scale none": (TypeError, "f_scale must be a number", (rosenbrock, AT), {"f_scale": None}),
    "f_scale": (ValueError, "f_scale must be above 0", (rosenbrock, AT), {"f_scale": 0.0}),
    "f_scale inf": (ValueError, "f_scale must be above 0 and", (rosenbrock, AT), {"f_scale": INF}),
    "max_nfev": (ValueError, "1 or more for max_nfev", (rosenbrock, AT), {"max_nfev": 0}),
    "max_nfev float": (ValueError, "1 or more for max_nfev", (rosenbrock, AT), {"max_nfev": 2.5}),
    "max_nfev nan": (ValueError, "1 or more for max_nfev", (rosenbrock, AT), {"max_nfev": NAN}),
    "maxiter": (TypeError, "pass max_nfev=", (rosenbrock, AT), {"maxiter": 3}),
    "verbose": (TypeError, "or pass callback=", (rosenbrock, AT), {"verbose": 2}),
    "arity": (TypeError, "with 2 args, which", (rosenbrock, AT, (1, 2)), {}),
    "jac's place": (TypeError, "takes args third, .* leave jac out", (rosenbrock, AT, "cs"), {}),
    "samples": (
        TypeError, "with 1 args, which", (fo.per_sample(torch.mul, torch.ones(3)), AT, (1,)), {}
    ),
    "sigma": (TypeError, "divide the residuals by sigma", (rosenbrock, AT), {"sigma": 1.0}),
    "tr_solver": (TypeError, 'linear_solver="lsmr"', (rosenbrock, AT), {"tr_solver": "lsmr"}),
    "arrays": (RuntimeError, "from_numpy", (lambda x, y: x - y, AT, (AT.numpy(),)), {}),
    "meta": (ValueError, "on the meta device", (decay, {"a": AT, "b": AT.to("meta")}), {}),
    "meta args": (ValueError, "the meta device", (lambda x, y: x - y, AT, (AT.to("meta"),)), {}),
    "meta bounds": (ValueError, "meta", (rosenbrock, AT), {"bounds": (AT.to("meta"), None)}),
    "flag": (TypeError, "compile must be True or False", (rosenbrock, AT), {"compile": "x"}),
    "ftol none": (TypeError, "ftol must be a number", (rosenbrock, AT), {"ftol": None}),
    "ftol": (ValueError, "ftol must be 0", (rosenbrock, AT), {"ftol": -1e-8}),
    "gtol": (ValueError, "gtol must be 0", (rosenbrock, AT), {"gtol": NAN}),
    "integer": (TypeError, "dtype torch.int64", (rosenbrock, torch.tensor([1, 2])), {}),
    "complex": (TypeError, "must be real", (rosenbrock, AT.to(torch.complex128)), {}),
    "no tensor": (TypeError, "not a tensor", (rosenbrock, [1.0, 2.0]), {}),
    "empty": (ValueError, "no elements", (rosenbrock, torch.empty(0)), {}),
    "complex residuals": (TypeError, "view_as_real", (lambda x: x + 1j, AT), {}),
    "no residuals": (ValueError, "without elements", (lambda x: x[:0], AT), {}),
    "nothing": (TypeError, "returned None; return its", (lambda x: None, AT), {}),
    "a number": (TypeError, "returned a float", (lambda x: 1.0, AT), {}),
    "nan at x0": (ValueError, "not finite at x0", (lambda x: x * NAN, AT), {}),
    "inf at x0": (ValueError, "not finite at x0", (lambda x: x / 0, AT), {}),
    "jacobian": (ValueError, "not finite at x0", (lambda x: (x - AT).abs().sqrt(), AT), {}),
    "squares": (ValueError, "divide large residuals", (lambda x: x * 1e160, AT), {}),
    "half": (TypeError, "x0 at 'b' has a half type", (decay, {"a": AT, "b": AT.bfloat16()}), {}),
    "outside": (ValueError, "outside the bounds", (rosenbrock, AT), {"bounds": (0.0, None)}),
    "crossed": (ValueError, "above its upper", (rosenbrock, AT), {"bounds": (2.0, 1.0)}),
    "nan bound": (ValueError, "or NaN", (rosenbrock, AT), {"bounds": (NAN, None)}),
    "one bound": (ValueError, "a pair", (rosenbrock, AT), {"bounds": (0.0,)}),
    "shape": (ValueError, "do not match", (rosenbrock, AT), {"bounds": (torch.zeros(3), None)}),
    "dogleg": (ValueError, "not support bounds", (rosenbrock, AT), {"method": "dogleg", **WIDE}),
    "qr": (ValueError, "by 'cholesky'", (rosenbrock, AT), {"linear_solver": "qr", **WIDE}),
    "x_scale": (ValueError, "x_scale must be above 0", (rosenbrock, AT), {"x_scale": 0.0}),
    "infinite x_scale": (ValueError, "x_scale .* finite", (rosenbrock, AT), {"x_scale": torch.inf}),
    "x_scale name": (ValueError, "unknown x_scale", (rosenbrock, AT), {"x_scale": "auto"}),
    "compile": (ValueError, "pass batched=True", (rosenbrock, AT), {"compile": True}),
    "one number": (ValueError, "leading dimension", (rosenbrock, AT[0]), {"batched": True}),
    "args": (ValueError, "x0 has 3 problems", (rosenbrock, MANY, (AT,)), {"batched": True}),
    "float args": (TypeError, "function's closure", (rosenbrock, MANY, (2.0,)), {"batched": True}),
    "if": (RuntimeError, "torch.where", (lambda x: x if x[0] > 0 else -x, MANY), {"batched": True}),
    "item": (RuntimeError, "by an if, item", (lambda x: x * x[0].item(), MANY), {"batched": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISED)
def test_what_is_known_beforehand_raises(case):
    error, text, given, how = RAISED[case]
    before = [x.clone() for x in given if isinstance(x, torch.Tensor)]
    with pytest.raises(error, match=text):
        fo.least_squares(*given, **how)
    after = [x for x in given if isinstance(x, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_exceptions_of_the_function_pass():
    def fun(x):
        raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError, match="of mine"):
        fo.least_squares(fun, AT)


def test_statuses_say_what_happened():
    assert fo.least_squares(rosenbrock, AT, max_nfev=3).status == 0
    assert fo.least_squares(rosenbrock, AT, max_nfev=3).message.startswith("The maximum number")
    assert fo.least_squares(rosenbrock, torch.ones_like(AT)).status == 1

    lost = fo.least_squares(lambda x: 1 + x.detach() - 2 * (x - x.detach()), AT)
    assert lost.status == -2
    assert not lost.success
    assert torch.equal(lost.x, AT)

    nothing = fo.least_squares(lambda x: x * 0.0, AT)
    assert (nothing.status, nothing.nfev) == (1, 1)
    assert torch.equal(nothing.x, AT)


def test_nan_on_the_way_is_a_refused_step():
    def fun(x):
        return torch.cat([x.log() + 3, x - 1])

    found = fo.least_squares(fun, torch.tensor([5.0], dtype=torch.float64))
    assert found.success
    assert found.x.isfinite().all()


def test_parameters_without_influence_and_more_of_them_than_residuals():
    def fun(x):
        return torch.stack([x[0] * x[1] - 2, x[1] - 1])

    start = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
    for solver in ("kernel", "cholesky", "qr", "cg", "lsmr"):
        found = fo.least_squares(fun, start, linear_solver=solver)
        assert found.success, solver
        assert torch.allclose(found.x, torch.tensor([2.0, 1.0, 7.0], dtype=torch.float64))


def test_float32_stops_at_its_own_precision():
    found = fo.least_squares(rosenbrock, AT.float(), ftol=0.0, xtol=0.0, gtol=0.0)
    assert found.success
    assert found.x.dtype == torch.float32
    assert torch.allclose(found.x, torch.ones(2), atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("solve", [fo.minimize, fo.least_squares, fo.root])
def test_a_function_without_derivatives_is_refused(solve, batched):
    """least_squares took x0 for a solution."""

    def fun(x):
        r = x.detach() - 3
        return r.square().sum() if solve is fo.minimize else r

    x0 = torch.ones((2, 2) if batched else 2, dtype=torch.float64)
    with pytest.raises(
        ValueError, match="does not depend on x by operations that autograd records"
    ):
        solve(fun, x0, batched=batched)


@pytest.mark.parametrize("method", ["newton", "lm", "broyden"])
def test_a_function_may_return_the_same_tensor_again(method):
    """root took values that the next call had overwritten for zero."""
    kept = [torch.zeros(2, dtype=torch.float64)]

    def fun(x):
        kept[0] = kept[0].detach()
        return kept[0].copy_(x * x - 9)

    found = fo.root(fun, torch.ones(2, dtype=torch.float64), method=method)
    torch.testing.assert_close(found.x, torch.full((2,), 3.0, dtype=torch.float64))
    assert found.success


def test_an_interrupt_leaves_no_transform_or_mode_active():
    """Ctrl-C may come while torch leaves them."""

    def interrupted(x):
        torch.set_grad_enabled(False)
        torch._C._functorch._vmap_increment_nesting(3, "error")
        BaseTorchFunctionMode().__enter__()
        TorchDispatchMode().__enter__()
        raise KeyboardInterrupt

    for solve in (fo.least_squares, fo.minimize, fo.root):
        before = private.torch_state()
        with pytest.raises(KeyboardInterrupt):
            solve(interrupted, AT)
        after = private.torch_state()
        private.restore((True, 0, 0, 0))  # whatever happened, for other tests
        assert before == after
