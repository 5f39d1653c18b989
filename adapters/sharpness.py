"""Optimizer objects of sharpness-aware minimization, which call their closure twice a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

import functional_optim as fo
from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.joint import agreed, check_undivided, cleared, restored
from functional_optim.adapters.optimizer import Optimizer
from functional_optim.adapters.state.hyperparameters import PARAMS, changed_values, constants
from functional_optim.adapters.state.names import named
from functional_optim.adapters.state.recipes import Recipe
from functional_optim.adapters.state.storage import Stored
from functional_optim.combinators.sharpness import SharpnessAware
from functional_optim.core import base
from functional_optim.core.chain import freezing_rules
from functional_optim.core.paths import chosen
from functional_optim.engine.group import Compile


class Inner:
    """A recipe that also accepts the hyperparameters of the ascent step, and ignores them.

    recipe: that of the inner transformation. numbers: the names of those hyperparameters.
    """

    def __init__(self, recipe: Recipe, numbers: tuple[str, ...]) -> None:
        self.recipe = recipe
        self.numbers = numbers
        given = inspect.signature(recipe).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, kind) for name in numbers]
        others = [x.replace(kind=kind) for x in given if x.kind is not x.VAR_KEYWORD]
        self.__signature__ = inspect.Signature([*own, *others])

    def __call__(self, **hyper: Any) -> base.GradientTransformation:
        return self.recipe(**{k: x for k, x in hyper.items() if k not in self.numbers})


class SAM(Optimizer):
    """`functional_optim.sam` around any recipe, as an optimizer object.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
        recipe: a function from hyperparameters to the transformation of the gradients after the
            ascent step. Default: `functional_optim.sgd`.
        rho: the length of the ascent step, ≥ 0, equal in all groups. Default: the paper's.
        compile, stored: as in :class:`Optimizer`.
        hyperparameters: values for the recipe's parameters.

    `step(closure)` calls the closure twice, at the parameters and after the ascent step; the
    closure clears the gradients, computes the loss, calls `backward()` and returns the loss.
    Statistics of batch norm are updated at both points. The norm of the gradient is taken over all
    groups. Frozen parameters do not climb and are not measured.

    State: that of the recipe's optimizer object; the ascent step has no state.

    Raises:
        RuntimeError: from step, without a closure that can be called, or with one that does not
            clear the gradients, as in a trainer that accumulates them over micro-batches.
        ValueError: from step, if groups have different hyperparameters of the ascent step.
        TypeError, ValueError: as :class:`Optimizer`.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import SAM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = SAM([w], fo.sgd, rho=0.1, lr=0.25, compile=False)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure), w
        (tensor(25., grad_fn=<SumBackward0>), Parameter containing:
        tensor([1.4700, 1.9600], requires_grad=True))
    """

    tries_points = True
    around: ClassVar[Callable[..., SharpnessAware]] = staticmethod(fo.sam)
    uphill: ClassVar[tuple[str, ...]] = ("rho",)

    def __init__(
        self, params: ParamsT, recipe: Recipe = fo.sgd, rho: float | Tensor = 0.05, *,
        compile: Compile = True, stored: Stored | None = None, **hyperparameters: Any,
    ) -> None:  # fmt: skip
        hyper = {**hyperparameters, "rho": rho}
        self._construct(params, recipe, hyper, compile=compile, stored=stored)

    def _construct(
        self, params: ParamsT, recipe: Recipe, hyper: dict[str, Any], **how: Any
    ) -> None:
        for name in self.uphill:
            if callable(hyper[name]):
                raise TypeError(
                    f"{type(self).__name__} takes a number as {name}, but got a schedule; write "
                    f"opt.param_groups[i][{name!r}] before a step, or use fo.sam in a functional "
                    "loop."
                )
        type(self).around(fo.identity(), **{name: hyper[name] for name in self.uphill})
        own = Inner(recipe, self.uphill) if callable(recipe) else recipe
        super().__init__(params, own, **how, **hyper)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not callable(closure):
            raise RuntimeError(
                f"{type(self).__name__} needs the gradients at two points; call step(closure) with "
                "a function that clears the gradients, computes the loss, calls backward() and "
                "returns the loss."
            )
        tx = self._uphill()
        loss = base.recorded(closure)
        base.unrecorded(self._at_the_worse_point, tx, closure)
        return super()._step(lambda: loss)

    step = with_hooks(_step)

    def check_parameters(self, group: dict[str, Any]) -> None:
        super().check_parameters(group)
        check_undivided(type(self).__name__, group["params"])

    def _uphill(self) -> SharpnessAware:
        """The ascent step of all groups, the same object while its numbers do not change."""
        who = f"{type(self).__name__} takes one ascent step for all groups"
        first = agreed(who, self.param_groups, self.uphill)
        hyper = {name: first[name] for name in self.uphill}
        known, tx = vars(self).get("_ascent", ({}, None))
        if tx is None or changed_values(known, hyper):
            tx = type(self).around(fo.identity(), **hyper)
            vars(self)["_ascent"] = hyper, tx
        return tx

    def _moving(self) -> list[Tensor]:
        """The parameters that the recipes do not freeze."""
        return [p for k in range(len(self.param_groups)) for p in self._moving_in(k)]

    def _moving_in(self, k: int) -> list[Tensor]:
        group = self.param_groups[k]
        places = self._frozen_in(k)
        if not places:
            return group["params"]
        return [p for name, p in named(group) if not any(chosen(x, name, p) for x in places)]

    def _frozen_in(self, k: int) -> list[Any]:
        """Which parameters of a group its recipe freezes. It is called again if a hyperparameter
        has changed, or may have changed in place."""
        group, every = self.param_groups[k], vars(self).setdefault("_frozen", {})
        hyper = constants({key: x for key, x in group.items() if key not in PARAMS})
        recipe, known, places = every.get(k, (None, None, []))
        if hyper is None or recipe is not self.recipe or changed_values(known, hyper):
            tx = self.checked_transform(group, in_step=True)
            places = [x.where for x in freezing_rules(tx)]
            every[k] = self.recipe, hyper, places
        return places

    def _at_the_worse_point(self, tx: SharpnessAware, closure: Callable[[], Any]) -> None:
        """Compute the gradients after the ascent step; the parameters are restored afterwards."""
        params = [p for p in self._moving() if p.grad is not None]
        held = [p.detach() for p in params]
        before = [p.clone() for p in held]
        state = self._before_ascent(tx, held)
        uphill, _ = tx.ascent.update([p.grad for p in params], state, held)
        advice = "put fo.accumulate into the recipe"
        with restored(held, before), cleared(type(self).__name__, params, advice):
            for p, u in zip(held, uphill, strict=True):
                p.add_(u)
            base.recorded(closure)

    def _before_ascent(self, tx: SharpnessAware, held: list[Tensor]) -> Any:
        """The state of an ascent step, which has no slots; it is kept for parameters of the same
        dtypes and devices, on which `init` depends."""
        kinds = [(x.dtype, x.device) for x in held]
        own, known, state = vars(self).get("_start", (None, None, None))
        if own is not tx or known != kinds:
            state = tx.ascent.init(held)
            vars(self)["_start"] = tx, kinds, state
        return state


class ASAM(SAM):
    """`functional_optim.asam` around any recipe: :class:`SAM` in proportion to the weights' sizes.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
        recipe: a function from hyperparameters to the transformation of the gradients after the
            ascent step. Default: `functional_optim.sgd`.
        rho: the length of the ascent step, ≥ 0, equal in all groups. Default: the authors'.
        eta: added to a weight's size, ≥ 0, equal in all groups. Default: the authors'.
        compile, stored: as in :class:`Optimizer`.
        hyperparameters: values for the recipe's parameters.

    State, errors: as those of :class:`SAM`.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import ASAM
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = ASAM([w], fo.adamw, lr=0.1, compile=False)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item()
        2.0
    """

    around = staticmethod(fo.asam)
    uphill = ("rho", "eta")

    def __init__(
        self, params: ParamsT, recipe: Recipe = fo.sgd, rho: float | Tensor = 0.5,
        eta: float | Tensor = 0.01, *, compile: Compile = True, stored: Stored | None = None,
        **hyperparameters: Any,
    ) -> None:  # fmt: skip
        hyper = {**hyperparameters, "rho": rho, "eta": eta}
        self._construct(params, recipe, hyper, compile=compile, stored=stored)
