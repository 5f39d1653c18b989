"""Evaluation of functions to be minimized, with gradients, for one problem or a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.core.ravel import Ravel
from functional_optim.solvers.given import check_recorded
from functional_optim.solvers.residuals import for_each, searched


def number(value: Any) -> Tensor:
    """The result of a function as a 0-dim tensor. Raises TypeError or ValueError for others."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"the function must return a real floating-point tensor, but it returned {what}; "
            "return its value alone, as torch computed it, without item(), numpy or a gradient."
        )
    if value.numel() != 1:
        raise ValueError(
            f"the function must return one number, but it returned shape {tuple(value.shape)}; "
            "for many problems, one in each row of x0, pass batched=True and a function of one row."
        )
    return value.reshape(())


class Objective:
    """A function of points (B, n), each with its own arguments, and its gradient.

    fun: of one problem's tree of parameters. one: the vector view of these. batched: whether there
    are many problems, evaluated by torch.vmap; otherwise B is 1, there are no arguments, and fun is
    called directly. graph: `together` compiled, or None. known: whether a value was checked.
    """

    def __init__(self, fun: Callable[..., Any], one: Ravel, *, batched: bool) -> None:
        self.fun, self.one, self.batched, self.known = fun, one, batched, False
        self.graph: Callable[[Tensor, Any], tuple[Tensor, Tensor]] | None = None

    def single(self, x: Tensor, *own: Any) -> Tensor:
        """The value of one problem at x, (n,)."""
        return number(self.fun(self.one.tree(x), *own))

    def of_one(self, evaluate: Callable[..., Tensor]) -> OneObjective:
        """The function for a recording, with this evaluation."""
        return OneObjective(self, evaluate)

    def __call__(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Values, (B,), and gradients, (B, n), in float64."""
        f, g = self._derived(x, args)
        f = f.detach().to(torch.float64, copy=not self.batched)  # fun may return it each time
        return f, g.detach().to(torch.float64)

    def together(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """The same of many problems, as transforms of torch.func, in the dtype of x."""
        g, f = for_each(grad_and_value(self.single), x, *args)
        return f, g

    def _derived(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if self.graph is not None:
            return self.graph(x, args)
        if modes.transformed():
            if self.batched:
                return self.together(x, args)
            g, f = grad_and_value(self.single)(x[0])
            return f.unsqueeze(0), g.unsqueeze(0)
        x = searched(x)
        with torch.enable_grad():
            f = for_each(self.single, x, *args) if self.batched else self.single(x[0]).unsqueeze(0)
            if not self.known:
                check_recorded("minimize", f, x)
                self.known = True
            if not f.requires_grad:  # a constant, such as infinity outside of a domain
                return f, torch.zeros_like(x)
            (g,) = torch.autograd.grad(f.sum(), x, materialize_grads=True)
        return f, g

    def curvature(self, x: Tensor, args: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
        """v ↦ H v with the Hessians H at x: (B, n) → (B, n), in float64."""
        if modes.transformed():

            def pushed(v: Tensor) -> Tensor:
                def one(x: Tensor, v: Tensor, *own: Any) -> Tensor:
                    return jvp(lambda x: grad(self.single)(x, *own), (x,), (v,))[1]

                v = v.to(x.dtype)
                found = for_each(one, x, v, *args) if self.batched else one(x[0], v[0]).unsqueeze(0)
                return found.detach().to(torch.float64)

            return pushed
        point = searched(x)
        with torch.enable_grad():
            f = for_each(self.single, point, *args) if self.batched else self.single(point[0])
            g = None
            if f.requires_grad:
                (g,) = torch.autograd.grad(f.sum(), point, create_graph=True)

        def times(v: Tensor) -> Tensor:
            if g is None or not g.requires_grad:
                return torch.zeros_like(v)
            (found,) = torch.autograd.grad(
                g, point, v.to(x.dtype), retain_graph=True, allow_unused=True
            )
            return torch.zeros_like(v) if found is None else found.to(torch.float64)

        return times


class OneObjective(Objective):
    """The function of a problem of a batch, for a recording. evaluate: its value, 0-dim, from x
    (n,) and its arguments."""

    def __init__(self, objective: Objective, evaluate: Callable[..., Tensor]) -> None:
        super().__init__(objective.fun, objective.one, batched=True)
        self.evaluate = evaluate

    def __call__(self, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        own = tree.map(lambda a: a[0], args)
        point = searched(x[0])
        with torch.enable_grad():
            f = self.evaluate(point, *own)
            check_recorded("minimize", f, point)
            (g,) = torch.autograd.grad(f, point)
        wide = torch.float64
        return f.detach().to(wide).reshape(1), g.to(wide).unsqueeze(0)
