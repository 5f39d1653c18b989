"""Derivatives of solutions, by the implicit function theorem.

A solution x is a constant for autograd. If the gradient F(x, a) of the cost is 0, and H is its
derivative with respect to x, the Newton step x − H⁻¹ F(x, a) has the derivative of the solution
with respect to a. A second step, with the same H, also has the second derivative. So all modes of
differentiation that F supports work. Third derivatives are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import debug_unwrap, grad, jacfwd

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.core.ravel import Ravel
from functional_optim.solvers.losses import Loss
from functional_optim.solvers.residuals import as_vector, for_each

ORDERS = 2
"""Order of correct derivatives of the solution: steps of Newton's method."""


def constants(trees: Any) -> Any:
    """The same tensors without derivatives."""
    return tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, trees)


def is_recorded(trees: Any) -> bool:
    """Whether derivatives with respect to a tensor are computed."""
    tensors = [x for x in tree.leaves(trees) if isinstance(x, Tensor)]
    return bool(tensors) if modes.transformed() else any(map(is_derived, tensors))


def is_derived(x: Tensor) -> bool:
    """Whether derivatives with respect to a tensor are computed: inside of torch.func's transforms,
    by one of them."""
    plain = torch.is_grad_enabled() and x.requires_grad
    return (_in_gradient(x) if modes.transformed() else plain) or has_tangent(x)


def _in_gradient(x: Tensor) -> bool:
    """Whether torch.func.grad, or another transform by reverse mode, derives a tensor."""
    while (inside := debug_unwrap(x, recurse=False)) is not x:
        if x.requires_grad:
            return True
        x = inside
    return False


def has_tangent(x: Tensor) -> bool:
    """Whether forward mode derives a tensor."""
    return forward_ad.unpack_dual(x).tangent is not None


class ProblemFunction:
    """A function of one problem's vector of parameters, (n,), and its args."""

    def __init__(self, fun: Callable[..., Any], one: Ravel, *, batched: bool) -> None:
        self.fun, self.one, self.batched = fun, one, batched

    def __call__(self, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        return self.fun(self.one.tree(x), *args)

    def of_all(self, f: Callable[..., Tensor], x: Tensor, args: tuple[Any, ...]) -> Tensor:
        """f(x, args) of each problem; x: (B, n)."""
        return for_each(f, x, args) if self.batched else f(x[0], args).unsqueeze(0)


class Cost(ProblemFunction):
    """The cost of one problem's residuals."""

    def __init__(self, fun: Callable[..., Any], one: Ravel, loss: Loss, *, batched: bool) -> None:
        super().__init__(fun, one, batched=batched)
        self.loss = loss

    def __call__(self, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        return self.loss.cost(as_vector(super().__call__(x, args)))


def corrected(
    cost: ProblemFunction, x: Tensor, args: tuple[Any, ...], fixed: Tensor, usable: Tensor
) -> Tensor:
    """The solutions x, (B, n), with their values, and with derivatives with respect to args.

    fixed: constant parameters, (B, n). usable: the converged problems, (B,).
    """
    return _followed(cost, grad(cost), symmetric, x, args, ~fixed, usable)


def corrected_root(
    function: ProblemFunction, x: Tensor, args: tuple[Any, ...], usable: Tensor
) -> Tensor:
    """Roots x, (B, n), of a function (n,) → (n,), in the same way."""
    free = torch.ones_like(x, dtype=torch.bool)
    return _followed(function, function, general, x, args, free, usable)


def _followed(
    function: ProblemFunction,
    slope: Callable[..., Tensor],
    inverse: Callable[[Tensor], Tensor],
    x: Tensor,
    args: tuple[Any, ...],
    free: Tensor,
    usable: Tensor,
) -> Tensor:
    """Newton steps that do not change values: x − H⁻¹ F(x, a), with F = 0 at x.

    slope: F of one problem. inverse: of the derivatives H of F. A problem that is not usable is
    constant; another problem is evaluated instead, since 0 times its derivative may be NaN.
    """
    if not is_recorded(args) or not bool(usable.any()):
        return x
    start = x
    x, args, free = _usable_ones(usable, (x, args, free))
    H = function.of_all(jacfwd(slope), x, constants(args)).to(torch.float64)
    both = free.unsqueeze(-1) & free.unsqueeze(-2)
    H = torch.where(both, H, torch.diag_embed(torch.ones_like(H[..., 0])))
    inverted = inverse(H)
    for _ in range(ORDERS):
        F = function.of_all(slope, x, args).to(torch.float64)
        F = torch.where(free, F, 0.0)
        step = (inverted @ F.unsqueeze(-1)).squeeze(-1).to(x.dtype)
        x = x - torch.where(free, step - step.detach(), 0.0)
    return torch.where(usable.unsqueeze(-1), x + _bounded(x, args), start)


def _usable_ones(usable: Tensor, trees: Any) -> Any:
    """The same of each usable problem, and of a usable one for the others."""
    if bool(usable.all()):
        return trees
    numbers = torch.arange(len(usable), device=usable.device)
    source = torch.where(usable, numbers, usable.nonzero()[0])
    return tree.map(lambda a: a[source], trees)


def followed(
    function: ProblemFunction, values: Tensor, x: Tensor, args: tuple[Any, ...], usable: Tensor
) -> Tensor:
    """The values, (B, ...), of a function at solutions x, with derivatives with respect to args."""
    if not is_recorded(args) or not bool(usable.any()):
        return values
    found = function.of_all(function, *_usable_ones(usable, (x, args)))
    change = (found - found.detach()).to(values.dtype).reshape(values.shape)
    return values + torch.where(usable.reshape(-1, *[1] * (values.dim() - 1)), change, 0.0)


def _bounded(x: Tensor, args: tuple[Any, ...]) -> Tensor:
    """0, with derivatives of 0 up to the last correct order. The next one is not finite."""
    total = x.new_zeros((), dtype=torch.float64)
    for a in tree.leaves(args):
        if isinstance(a, Tensor) and a.is_floating_point():
            total = total + torch.where(a.isfinite(), a, 0.0).sum(dtype=torch.float64).to(x.device)
    return (total - total.detach()).pow(ORDERS + 0.5).to(x.dtype)


def symmetric(H: Tensor) -> Tensor:
    """H⁻¹, (B, n, n); the pseudoinverse of singular H."""
    diagonal = H.diagonal(dim1=-2, dim2=-1).abs()
    s = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    scaled = H * s.unsqueeze(-1) * s.unsqueeze(-2)
    found = torch.linalg.pinv(0.5 * (scaled + scaled.mT), hermitian=True)
    return found * s.unsqueeze(-1) * s.unsqueeze(-2)


def general(J: Tensor) -> Tensor:
    """The same of a matrix that is not symmetric."""
    return torch.linalg.pinv(J)
