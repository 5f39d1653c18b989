"""Checks of arguments that solvers have in common, and names of their arguments elsewhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from functional_optim.core import calls
from functional_optim.kernels import private

P = ParamSpec("P")
T = TypeVar("T")

DERIVATIVES = "leave it out, since derivatives come from autograd"
JACOBIAN = 'pass linear_solver="lsmr" or "cg" to least_squares'
CLOSURE = "put the values into args, or into the function's closure"

NUMPY = (
    "differentiates its function, which calls numpy on a tensor; use torch's operations, and pass "
    "arrays in args as torch.from_numpy(array)."
)
"""In place of torch's advice to detach, which loses the derivative."""

VALUES = (
    "calls the function for all problems of a batch at once, so it cannot read a value of a tensor "
    "by an if, item(), float() or a function of math; use torch.where and torch's functions."
)
"""In place of vmap's message, which suggests to report an error of torch."""

OTHER_NAMES = {
    **dict.fromkeys(("jac", "hess", "hessp", "diff_step"), DERIVATIVES),
    **dict.fromkeys(("tr_solver", "tr_options", "jac_sparsity"), JACOBIAN),
    **dict.fromkeys(("sigma", "absolute_sigma"), "divide the residuals by sigma"),
    **dict.fromkeys(("maxfun", "maxfev", "max_steps"), "pass max_nfev="),
    **dict.fromkeys(("kwargs", "has_aux"), CLOSURE),
    **dict.fromkeys(("ftol", "gtol"), "pass xtol="),
    "bounds": "call least_squares, which takes bounds",
    "constraints": "only bounds are supported; use scipy.optimize for other constraints",
    "disp": "print the fields of the result",
    "maxcor": "leave it out, since 8 pairs are stored",
    "maxiter": "pass max_nfev=",
    "options": "pass its values as arguments, e.g. max_nfev=100",
    "params": "pass x0 second",
    "verbose": "print the fields of the result, or pass callback=",
}
"""What to do instead, for arguments of scipy.optimize, jaxopt and optimistix, if a solver does not
have them."""


def checked(solve: Callable[P, T]) -> Callable[P, T]:
    """A solver that raises TypeError for an unknown argument, with ours for it, and for a flag that
    is neither True nor False. After an exception, such as Ctrl-C, torch's global state is as
    before."""
    known = list(inspect.signature(solve).parameters)
    annotations = solve.__annotations__
    flags, run = calls.check_flags, cast(Any, solve)  # `call` has the globals of another module
    torch_state, restore, numpy, values = private.torch_state, private.restore, NUMPY, VALUES
    tolerances = " or ".join([f"{name}=" for name in known if name.endswith("tol")])
    others = {**OTHER_NAMES, "tol": f"pass {tolerances}"}

    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                advice = others.get(name) or f"it takes {', '.join(known)}"
                raise TypeError(f"{run.__name__} has no argument {name}; {advice}.")
        flags(annotations, kwargs)
        before = torch_state()
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            restore(before)
            says = str(error) if isinstance(error, RuntimeError) else ""
            if "Can't call numpy()" in says:
                raise RuntimeError(f"{run.__name__} {numpy}") from error
            if "vmap: It looks like you" in says and kwargs.get("batched"):
                raise RuntimeError(f"{run.__name__} {values}") from error
            raise

    # with the globals of its module, where doctest looks for it
    made = FunctionType(call.__code__, run.__globals__, closure=cast(Any, call).__closure__)
    return cast(Any, functools.update_wrapper(made, solve))


def check_tolerances(**tolerances: Any) -> None:
    """Raise TypeError for what is not a number, and ValueError for NaN and negative numbers."""
    for name, x in tolerances.items():
        if not is_number(x):
            how = "; pass 0 for the smallest that the dtype allows" if x is None else ""
            raise TypeError(f"{name} must be a number of 0 or more, but got {x!r}{how}.")
        if not float(x) >= 0:
            raise ValueError(f"{name} must be 0 or more, but got {x}.")


def is_number(x: Any) -> bool:
    """Is it a real number, or a tensor of one element?"""
    if isinstance(x, Tensor):
        return x.numel() == 1 and not x.is_complex()
    return isinstance(x, Real) and not isinstance(x, bool)
