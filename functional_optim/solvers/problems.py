"""Evaluation of residuals and Jacobians for one problem or a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import residuals
from functional_optim.solvers.losses import Loss
from functional_optim.solvers.residuals import as_vector, for_each


class Problem:
    """Residuals of points (B, n), each with its own arguments.

    fun: residuals of one problem. one: the vector view of its parameters. m: the number of
    residuals. batched: whether there are many problems, evaluated by torch.vmap; otherwise B is 1,
    there are no arguments, fun is called directly, and J is evaluated only at accepted points.
    matrix_free: use products with J instead of J. graph: `together` compiled, or None.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        one: Ravel,
        m: int,
        *,
        batched: bool,
        matrix_free: bool = False,
    ) -> None:
        self.fun, self.one, self.m, self.batched = fun, one, m, batched
        self.matrix_free = matrix_free and not batched
        self.graph: Callable[[Tensor, Any], tuple[Tensor, Tensor]] | None = None

    def single(self, x: Tensor, *own: Any) -> Tensor:
        """The residuals of one problem at x, (n,)."""
        return as_vector(self.fun(self.one.tree(x), *own))

    def of_one(self, evaluate: Callable[..., Tensor]) -> OneProblem:
        """The problem for a recording, with this evaluation."""
        return OneProblem(self, evaluate)

    def residuals(self, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        """(B, n) → (B, m)."""
        if self.batched:
            return self._side_by_side(args)(x)
        with torch.enable_grad():  # fun may need gradients of other tensors than x
            r = as_vector(self.fun(self.one.tree(x[0])))
        return r.detach().clone().unsqueeze(0)

    def linearize(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """Residuals and Jᵀ: (B, m) and (B, n, m), the latter None if `matrix_free`."""
        if self.batched:
            return self.together(x, args) if self.graph is None else self.graph(x, args)
        if self.matrix_free:
            return self.residuals(x, args), None
        r, J = residuals.jacobian(self.fun, self.one, x[0])
        return r.clone().unsqueeze(0), J.mT.unsqueeze(0)

    def together(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """The same of many problems."""
        return residuals.linearized(self._side_by_side(args), x, self.m)

    def products(
        self, x: Tensor, loss: Loss
    ) -> tuple[Tensor, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
        """Weighted residuals, (1, m), and products with the weighted J and Jᵀ, in float64."""
        r, push, pull = residuals.products(self.fun, self.one, x[0])
        r64 = r.to(torch.float64)
        factor, weight = (1.0, 1.0) if loss.name == "linear" else loss.weights(r64)

        def forward(v: Tensor) -> Tensor:
            return (weight * push(v[0].to(x.dtype)).to(torch.float64)).unsqueeze(0)

        def backward(u: Tensor) -> Tensor:
            return pull((weight * u[0]).to(r.dtype)).to(torch.float64).unsqueeze(0)

        return (r64 * factor).unsqueeze(0), (forward, backward)

    def _side_by_side(self, args: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
        return lambda x: for_each(self.single, x, *args)


class OneProblem(Problem):
    """A problem of a batch, for a recording. evaluate: its residuals, (m,), from x (n,) and its
    arguments."""

    def __init__(self, problem: Problem, evaluate: Callable[..., Tensor]) -> None:
        super().__init__(problem.fun, problem.one, problem.m, batched=True)
        self.evaluate = evaluate

    def residuals(self, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        return self.evaluate(x[0], *tree.map(lambda a: a[0], args)).unsqueeze(0)

    def linearize(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        own = tree.map(lambda a: a[0], args)
        r, columns = residuals.twice_backward(lambda x: self.evaluate(x, *own), x[0], x.shape[1])
        return r.unsqueeze(0), columns.unsqueeze(0)
