"""The torch.optim.Optimizer that uses only values of the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim import numeric, tree
from functional_optim.adapters.base import OptimizerBase, with_hooks
from functional_optim.adapters.gradient_free.methods import Driver, EstimatingState, Recipe
from functional_optim.adapters.joint import agreed, undone, write
from functional_optim.adapters.state.names import names_of
from functional_optim.adapters.state.recipes import check_arguments, check_keys
from functional_optim.adapters.stepping.loss import check_loss
from functional_optim.checkpoint.errors import misfit, refuse
from functional_optim.checkpoint.lookup import numbers
from functional_optim.core import base, randomness
from functional_optim.core.numbers import tensor_of
from functional_optim.kernels.interrupts import held
from functional_optim.search.shaping import worst_if_not_finite


class GradientFree(OptimizerBase):
    """A torch.optim.Optimizer for gradient-free methods: no backward pass, no gradients.

    Its step evaluates the closure as often as the method needs, each time with the parameters set
    to another candidate, and then sets them to the new point of the method.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
            `requires_grad` may be False, dtypes and devices may differ. All groups are searched as
            one tree and must have the same hyperparameters.
        method: a function of `fo.search` or `fo.estimators`, such as `fo.search.cma_es`, whose
            hyperparameters are passed as keywords, or the result of such a function. All except
            `forward_gradient`, which needs derivatives.
        tx: for estimators, and for `openai_es` and `pgpe`, the transformation of the gradients: a
            function from hyperparameters to one, such as `fo.adam`, or a transformation.
        seed: of all random numbers, an integer. Default 0.
        hyperparameters: values for the parameters of `method` and `tx`; those with a default are
            optional. They become entries of the parameter groups, so LR schedulers find
            `group["lr"]`. Changes of values that a method reads only at its start, such as the
            `sigma` of cma_es, have no effect.

    A population method has its position in its state: writing to the parameters between steps has
    no effect; before the first step, they are the starting point. Estimators step the current
    parameters, from the unperturbed values, so that half types do not drift.

    Memory: a copy of the parameters, and a population method's candidates, n times the parameters.
    Estimators with one direction (mezo, spsa) draw their two candidates leaf by leaf instead, from
    the same numbers at each use.

    State, with the first parameter: the method's (and transformation's) by path, such as `step`,
    `seed`, `best_fitness`. `method_state()` returns it for the functions of `fo.search`.

    Raises:
        TypeError: if an argument is not a method or transformation, for a hyperparameter that
            neither takes, that is missing or that both take, for integer parameters; from `step`,
            without a closure, and for a closure that does not return a single number.
        ValueError: for hyperparameters out of range, and for different groups.
        RuntimeError: from `step`, for a closure that calls backward.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import GradientFree
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]), requires_grad=False)
        >>> opt = GradientFree([w], fo.search.cma_es, population=8, sigma=0.5)
        >>> for _ in range(60):
        ...     loss = opt.step(lambda: (w - 1).square().sum())
        >>> bool(loss < 1e-6), torch.allclose(w, torch.ones(2), atol=1e-3)
        (True, True)
    """

    compile = False
    counts_steps = False
    steps_all = True
    tries_points = True

    def __init__(
        self, params: ParamsT, method: Any, *, tx: Any = None, seed: int = 0, **hyperparameters: Any
    ) -> None:
        seed = randomness.whole_seed("GradientFree", seed)
        self.recipe = Recipe(method, tx, hyperparameters)
        defaults = {**self.recipe.defaults, "seed": seed}
        check_arguments("GradientFree", params)
        driver = self.recipe(defaults)
        self.kind = driver.name
        super().__init__(params, {**defaults, "method": self.kind})
        like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in self._params()]
        driver.init(self._tree(like), 0)

    keeps_trees = False

    __str__ = OptimizerBase.__repr__  # there are no gradients, and no slots

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """Raises an error for hyperparameters that the method does not take. There are no
        gradients: the update raises an error."""
        if group["method"] != self.kind:
            raise ValueError(
                f"the parameter group is one of {group['method']}, and this optimizer's method is "
                f"{self.kind}; load a checkpoint of the same method."
            )
        driver = self.recipe(group)
        return base.GradientTransformation(lambda params: driver.init(params, group["seed"]), _none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the searched tree, before the first step.

        Args:
            param_group: `params`. Hyperparameters must equal those of the other groups.

        Raises:
            TypeError, ValueError: for parameters that cannot be used, hyperparameters that differ,
                and a method that has begun. The optimizer is then as it was.
        """
        groups = self.param_groups
        if any(map(self.state.get, self._params())):
            raise ValueError(
                "the method has begun and its state has no place for more parameters; construct a "
                "new GradientFree with all of them."
            )
        if groups and isinstance(param_group, dict):
            shared = {name: groups[0][name] for name in self.defaults if name in groups[0]}
            param_group = {**shared, **param_group}
        super().add_param_group(param_group)

    def check_parameters(self, group: dict[str, Any]) -> None:
        """Raise TypeError for an integer parameter, ValueError for a group that differs."""
        super().check_parameters(group)
        self._group()

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Raise TypeError for a hyperparameter that neither the method nor `tx` takes, and for
        another `tx`."""
        if "tx" in group:
            raise TypeError(
                "a parameter group has its own tx, but GradientFree passes the gradients of all "
                "groups to one transformation; pass tx to GradientFree, e.g. "
                "tx=fo.partition({'a': fo.adam(1e-3), 'b': fo.sgd(1e-2)}, {'head.*': 'a', '*': "
                "'b'})."
            )
        if not self.recipe.takes_any:
            check_keys(group, (*self.recipe.defaults, "seed", "method"))

    def _group(self) -> dict[str, Any]:
        """The hyperparameters, which all groups have in common."""
        who = "GradientFree searches all groups as one tree"
        return agreed(who, self.param_groups, (*self.recipe.defaults, "seed"))

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _tree(self, values: list[Any]) -> Any:
        """A list, or a dict by the parameters' names if there are any."""
        names = [n for group in self.param_groups for n in names_of(group) or ()]
        named = len(set(names)) == len(values)
        return dict(zip(names, values, strict=True)) if named else values

    def _state(self, driver: Driver, params: Any) -> Any:
        """The method's state: the stored one, or a new one from the parameters."""
        kept = self.state.get(self._params()[0])
        if not kept:
            return driver.init(params, self.param_groups[0]["seed"])
        like = self.__dict__.get("_like")
        if like is None or like[0] != driver.size:
            like = driver.size, tree.map(Described, driver.init(params, 0))
            check_kept(kept, like[1])
            self.__dict__["_like"] = like
        found = [kept[path].to(x.device, x.like.dtype) for path, x in tree.items(like[1])]
        return tree.with_leaves(like[1], found)

    def method_state(self) -> Any:
        """The method's state: for `fo.search.best`, `fo.search.center`, or a log to replay.

        Returns:
            A population method's state, or the `EstimatorState`. Before the first step, the one
            that it would start with.

        Example::

            >>> import torch, functional_optim as fo
            >>> from functional_optim.adapters import GradientFree
            >>> w = torch.tensor([3.0])
            >>> opt = GradientFree([w], fo.search.snes, population=4, sigma=0.5)
            >>> loss = opt.step(lambda: w.square().sum())
            >>> state = opt.method_state()
            >>> state.step.item(), torch.equal(state.best_fitness.float(), loss)
            (1, True)
        """
        state = self._current()
        return state.own() if isinstance(state, EstimatingState) else state

    def numbers(self, *names: str) -> dict[str, float]:
        """All scalars of the method's state and the transformation's, read at once.

        Args:
            names: those to read, as in `functional_optim.numbers`. Default: all.

        Raises:
            KeyError: for a name without a scalar.

        Example::

            >>> import torch, functional_optim as fo
            >>> from functional_optim.adapters import GradientFree
            >>> w = torch.tensor([3.0])
            >>> opt = GradientFree([w], fo.search.cma_es, population=4, sigma=0.5)
            >>> loss = opt.step(lambda: w.square().sum())
            >>> opt.numbers("step", "best_fitness") == {"step": 1.0, "best_fitness": float(loss)}
            True
        """
        return numbers(self._current(), *names)

    def _current(self) -> Any:
        """The state of the method and the transformation; before the first step, the one that it
        would start with."""
        driver = numeric.trusting(True, self.recipe, self._group())
        return self._state(driver, self._tree([p.detach() for p in self._params()]))

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure for every candidate, and update the parameters.

        Args:
            closure: returns the loss at the current parameters, a tensor of one element or a
                number; values that are not finite rank last. Called once for each candidate,
                without recording gradients. If it raises an error, parameters and state are as
                before the step.

        Returns:
            The smallest loss of this step, a 0-dim tensor; infinite if none was finite.
        """
        if not callable(closure):
            raise TypeError(
                "GradientFree compares losses at several points, so step needs a closure: a "
                "function that returns the loss at the current parameters."
            )
        driver = numeric.trusting(True, self.recipe, self._group())
        return base.unrecorded(undone, self._params(), partial(self._try_out, closure, driver))

    step = with_hooks(_step)

    def _try_out(
        self, closure: Callable[[], Any], driver: Driver, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The step. before: the initial parameters, emptied once the step is done."""
        params = self._params()
        at = self._tree([x for _, x in before])
        places = tree.leaves(self._tree(params))  # a dict's leaves are sorted by name
        state = self._state(driver, at)
        n, leaf, asked = driver.ask(state, at)
        losses = []
        for i in range(n):
            for j, p in enumerate(places):
                p.copy_(leaf(j)[i])
            losses.append(number(evaluate(closure)))
        fitness = torch.stack([x.to(state.seed.device, torch.float64) for x in losses])
        new, state = driver.tell(fitness, asked, at)
        kept = {**self.state.get(params[0], {}), **dict(tree.items(state))}

        def finish() -> None:
            write(places, tree.leaves(new))
            self.state[params[0]] = kept
            before.clear()

        held(finish)
        kind = losses[0].dtype if losses[0].is_floating_point() else torch.float64
        return worst_if_not_finite(fitness).min().to(kind)

    def check_loaded(self, given: dict[str, Any], before: list[set[str]]) -> None:
        """Raise ValueError if what was loaded does not fit.

        The hyperparameters of a method object are not compared.
        """
        super().check_loaded(given, before)
        self.__dict__.pop("_like", None)
        base.unrecorded(numeric.trusting, True, self._check_state)

    def _check_state(self) -> None:
        driver = self.recipe(self._group())
        params = self._params()
        if any(self.state.get(p) for p in params[1:]):
            raise ValueError(
                "the loaded state dict has a state for each parameter, but GradientFree keeps one "
                "with the first; load a checkpoint of a GradientFree."
            )
        self._state(driver, self._tree([p.detach() for p in params]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "recipe": self.recipe, "kind": self.kind}


def _none(grads: Any, state: Any, params: Any = None) -> Any:
    raise TypeError("GradientFree uses losses, not gradients; call step(closure).")


def evaluate(closure: Callable[[], Any]) -> Any:
    """Call a closure; if it fails without gradients, explain the cause."""
    try:
        return closure()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise RuntimeError(
            "the closure of a GradientFree runs without recording gradients, so it cannot call "
            "backward; only return the loss. (Under Lightning's automatic optimization, override "
            "the module's backward with a function that does nothing.)"
        ) from error


def number(loss: Any) -> Tensor:
    """A closure's loss, 0-dim: a copy, as a CUDA graph returns the same memory each time."""
    check_loss(loss)
    return tensor_of(loss).detach().reshape(()).clone()


class Described:
    """The template of a tensor of a state: `like` has its shape and dtype, but no memory."""

    def __init__(self, x: Tensor) -> None:
        self.like, self.device = torch.empty_like(x, device="meta"), x.device


def check_kept(kept: dict[str, Any], like: Any) -> None:
    """Raise ValueError unless it is a state of this method and these parameters.

    Other entries are allowed, but none of another transformation.
    """
    why = {path: misfit(kept.get(path), x.like) for path, x in tree.items(like)}
    refuse(
        "the method's state",
        [f"{path} {fault}" for path, fault in why.items() if fault],
        "load a checkpoint of the same method, model and population",
    )
    strange = sorted(set(kept) - {path for path, _ in tree.items(like)})
    theirs = [path for path in strange if path.startswith("tx.")]
    if theirs:
        raise ValueError(
            f"the transformation has no place for {', '.join(theirs[:3])}, which the state has; "
            "load a checkpoint with the same tx."
        )
