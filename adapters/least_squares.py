"""Optimizer objects for residuals: Levenberg–Marquardt, dogleg and Gauss–Newton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim import numeric
from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.joint import JointOptimizer, check_moving, restored, write
from functional_optim.adapters.state.names import named
from functional_optim.algorithms.dogleg import dogleg
from functional_optim.algorithms.gauss_newton import scale_by_gauss_newton
from functional_optim.algorithms.levenberg_marquardt import levenberg_marquardt
from functional_optim.core import base
from functional_optim.core.chain import completed
from functional_optim.core.ravel import Ravel
from functional_optim.solvers.linear import Kind
from functional_optim.solvers.residuals import LIMIT, as_vector
from functional_optim.solvers.steps import Scaling

Closure = Callable[[], Any]
"""Returns residuals, or the result of `per_sample` or `stack_residuals`; does not call backward."""


class FromClosure:
    """The residuals of a closure, as a function of the trainable parameters.

    params: those. first: the residuals with their graph, at the current values.
    """

    def __init__(self, closure: Closure, params: list[Tensor], first: Any) -> None:
        self.closure, self.params = closure, params
        self.r = base.recorded(as_vector, first)
        self.before = [p.detach().clone() for p in params]
        if not self.r.requires_grad:
            raise RuntimeError(
                "the closure's residuals depend on none of the parameters; compute them with "
                "gradients enabled, without detach() or torch.no_grad()."
            )

    def __call__(self, given: list[Tensor]) -> Tensor:
        """The residuals at other values, (m,); those of the first call at the current values."""
        if all(map(torch.equal, given, self.before)):
            return self.r.detach()
        with restored(self.params, self.before):
            write(self.params, given)
            return as_vector(base.recorded(self.closure)).detach()

    def derivatives(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals (m,) and their Jacobian (m, n), by a backward pass for each residual."""
        m = self.r.shape[0]
        eye = torch.eye(m, dtype=self.r.dtype, device=self.r.device)
        flat = Ravel(self.before)
        size = max(1, LIMIT // flat.size)
        rows = []
        for part in eye.split(size):
            grads = torch.autograd.grad(
                self.r, self.params, part, retain_graph=True, allow_unused=True,
                is_grads_batched=True,
            )  # fmt: skip
            pairs = zip(grads, self.params, strict=True)
            filled = [p.new_zeros((len(part), *p.shape)) if g is None else g for g, p in pairs]
            rows.append(torch.cat([g.reshape(len(part), -1).to(flat.dtype) for g in filled], 1))
        return self.r.detach(), torch.cat(rows)


class ResidualOptimizer(JointOptimizer):
    """The base class of optimizer objects for residuals."""

    def _named(self) -> dict[str, Tensor]:
        """All parameters by their names, or by group and index."""
        found: dict[str, Tensor] = {}
        several = len(self.param_groups) > 1
        for k, group in enumerate(self.param_groups):
            for name, p in named(group):
                key = f"{k}.{name}" if several and not group.get("param_names") else name
                found[key] = p
        return found

    def _step(self, closure: Closure | None = None) -> Tensor:
        """Try one step.

        Args:
            closure: returns the residuals (not their sum of squares), or the result of `per_sample`
                or `stack_residuals`: functions of a dict of all parameters by their names. It
                neither clears gradients nor calls backward. It is called once for the step and,
                unless it returns a function, once more at the new parameters.

        Returns:
            Half the sum of squares before the step: 0-dim, float64.

        Raises:
            TypeError: without a closure, and for one that returns a loss.
            RuntimeError: if no parameter requires gradients, or residuals depend on none.
            ValueError: if residuals are not finite, or groups have different hyperparameters.

        A step that raises an error changes nothing.
        """
        if not callable(closure):
            raise TypeError(
                f"{type(self).__name__} evaluates residuals, so step needs a closure: a function "
                "that returns the residuals, or per_sample(...), and calls no backward."
            )
        return base.unrecorded(self._step_whole, closure)

    step = with_hooks(_step)

    def _step_whole(self, closure: Closure) -> Tensor:
        group = self._group()
        every = self._named()
        moving = {name: p for name, p in every.items() if p.requires_grad}
        check_moving(moving)
        values = [p.detach() for p in moving.values()]
        fn = self._residuals(closure, every, moving)
        tx = self.checked_transform(group, in_step=True)
        state = self._known(tx, values, next(iter(moving.values())))
        updates, state = tx.update(None, state, values, residual_fn=fn)
        updates = self._scaled(updates, group, state)
        self._finish(list(moving.values()), base.apply_updates(values, updates), state)
        return state.value

    def _residuals(
        self, closure: Closure, every: dict[str, Tensor], moving: dict[str, Tensor]
    ) -> Any:
        """The result of the closure, as a function of the list of trainable parameters."""
        found = base.recorded(closure)
        if callable(found):
            still = {name: p.detach() for name, p in every.items()}
            return completed(found, lambda mine: {**still, **dict(zip(moving, mine, strict=True))})
        if isinstance(found, Tensor) and not found.dim():
            raise TypeError(
                "the closure returned a single number; return the residuals r, a tensor with their "
                "dimension, not their loss."
            )
        check_closure(self._group())
        return FromClosure(closure, list(moving.values()), found)

    def _scaled(self, updates: Any, group: dict[str, Any], state: Any) -> Any:
        """The updates that are added."""
        return updates


class LevenbergMarquardt(ResidualOptimizer):
    """`functional_optim.levenberg_marquardt` as an optimizer object.

    `step(closure)` tries one step. The closure returns residuals, without backward, or a
    `per_sample`, whose Jacobian costs a few gradients instead of one for each residual::

        loss = opt.step(lambda: model(x) - y)
        loss = opt.step(lambda: fo.per_sample(residual_of_one_sample, x, y))

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
            Functions of `per_sample` get all of them as a dict by name (pass
            `model.named_parameters()`), without names by index. Parameters that do not require
            gradients have no columns.
        damping: μ of the first step, > 0.
        geodesic: add the second-order correction; for `per_sample` only.
        linear_solver: "auto", "cholesky", "qr", "kernel"; for `per_sample` also "cg", "lsmr".
        scaling: "jac" (the default) or None.

    State, with the first trainable parameter: `step`, `damping`, `growth`, `scale`, `value`.

    Raises:
        ValueError, TypeError: as `functional_optim.levenberg_marquardt`.

    You can first train the parameters with AdamW or L-BFGS, and then continue with this object.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import LevenbergMarquardt
        >>> t = torch.linspace(0, 2, 9, dtype=torch.float64)
        >>> y = 2 * torch.exp(-0.7 * t)
        >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        >>> opt = LevenbergMarquardt([w])
        >>> for _ in range(10):
        ...     loss = opt.step(lambda: w[0] * torch.exp(-w[1] * t) - y)
        >>> w, bool(loss < 1e-12)
        (Parameter containing:
        tensor([2.0000, 0.7000], dtype=torch.float64, requires_grad=True), True)
    """

    recipe, sized = levenberg_marquardt, "scale"

    def __init__(
        self, params: ParamsT, damping: numeric.Number = 1e-3, geodesic: bool = False,
        linear_solver: Kind = "auto", scaling: Scaling | None = "jac",
    ) -> None:  # fmt: skip
        self._construct(locals())


class Dogleg(ResidualOptimizer):
    """`functional_optim.dogleg` as an optimizer object.

    Args:
        params: as those of :class:`LevenbergMarquardt`.
        radius: Δ of the first step, in units of D, > 0. Default ‖D w‖, or 1 at w = 0.
        linear_solver: "auto", "cholesky", "qr", "kernel"; for `per_sample` also "cg", "lsmr".
        scaling: "jac" (the default) or None.

    State, with the first trainable parameter: `step`, `radius`, `scale`, `value`.

    Raises:
        ValueError, TypeError: as `functional_optim.dogleg`.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Dogleg
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = Dogleg([w])
        >>> for _ in range(20):
        ...     loss = opt.step(lambda: torch.stack([10 * (w[1] - w[0] ** 2), 1 - w[0]]))
        >>> w
        Parameter containing:
        tensor([1., 1.], dtype=torch.float64, requires_grad=True)
    """

    recipe, sized = dogleg, "scale"

    def __init__(
        self, params: ParamsT, radius: float | None = None, linear_solver: Kind = "auto",
        scaling: Scaling | None = "jac",
    ) -> None:  # fmt: skip
        self._construct(locals())


class GaussNewton(ResidualOptimizer):
    """`functional_optim.gauss_newton` as an optimizer object: every step is taken.

    Args:
        params: as those of :class:`LevenbergMarquardt`.
        lr: η, ≥ 0; learning rate schedulers may change it.
        damping: λ, ≥ 0.
        linear_solver: "auto", "cholesky", "qr", "kernel"; for `per_sample` also "cg", "lsmr".

    State, with the first trainable parameter: `step`, `value`.

    Raises:
        ValueError, TypeError: as `functional_optim.gauss_newton`.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import GaussNewton
        >>> A = torch.tensor([[2.0, 0.0], [0.0, 4.0], [1.0, 1.0]])
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> loss = GaussNewton([w]).step(lambda: A @ w - torch.tensor([2.0, 8.0, 3.0]))
        >>> loss.item(), w
        (38.5, Parameter containing:
        tensor([1., 2.], requires_grad=True))
    """

    recipe = scale_by_gauss_newton

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, damping: numeric.Hyper = 0.0,
        linear_solver: Kind = "auto",
    ) -> None:  # fmt: skip
        self._construct(locals())

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """The direction of a group's hyperparameters."""
        numeric.check(lambda x: x >= 0.0, group["lr"], "Invalid learning rate: {}")
        return super().transform(group)

    def _scaled(self, updates: Any, group: dict[str, Any], state: Any) -> Any:
        lr = numeric.at(group["lr"], float(state.step))
        return [-lr * u for u in updates]


def check_closure(group: dict[str, Any]) -> None:
    """Raise TypeError for hyperparameters that need residuals as a function."""
    solver = group["linear_solver"]
    if group.get("geodesic"):
        raise TypeError(
            "geodesic=True needs second derivatives of residuals as a function; let the closure "
            "return per_sample(...) instead of residuals."
        )
    if solver in ("cg", "lsmr"):
        raise TypeError(
            f"linear_solver={solver!r} needs residuals as a function; let the closure return "
            "per_sample(...) instead of residuals, or choose 'kernel'."
        )
