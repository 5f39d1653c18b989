"""The torch.optim.Optimizer that runs any recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.state.recipes import (
    ByReference,
    Recipe,
    check_arguments,
    check_iterable,
    of_model,
    recipe_defaults,
    warn_of_unread_lr,
)
from functional_optim.adapters.state.storage import KEY, Stored
from functional_optim.combinators.local_steps import holds_synced
from functional_optim.core import base
from functional_optim.engine.group import Compile, how_to


class Optimizer(OptimizerBase):
    """A torch.optim.Optimizer that runs a recipe over parameter groups.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them. For
            recipes with `views`, also the model itself, which describes its kernels.
        recipe: a function from hyperparameters to a transformation.
        compile: run compiled kernels (the default); False runs the rules eagerly. If a rule cannot
            be compiled, True falls back with a warning, and "strict" raises a RuntimeError at the
            step, before any tensor is changed. A recipe with parts that do not consist of
            one-tensor rules always runs eagerly, each group as one tree. Measurements of its rules
            are still summed over all groups: the update of a group runs again after each sum. A
            custom transformation that measures its tree sees only its group.
        stored: storage format of slots, as the second argument of :func:`functional_optim.stored`:
            `"int8"`, or a dict from patterns of slots. For other arguments, pass a function of the
            transformation, such as `functools.partial(fo.stored, storage="int8", where="blocks")`.
            None (the default): that of the recipe. A group may override it. Matrices of hidden
            layers are recognized by name; without names, with `model.parameters()`, only by shape,
            so embeddings and heads are packed, too: pass named parameters, or `"stored": None` in a
            separate group.
        capturable: keep step counts and carried scalars on the device of their parameters, so that
            replays of a step that is captured as a CUDA graph advance the counts. Learning rates
            that change between replays must be tensors on that device. False (the default): keep
            them on the CPU, where they need no launches; a capture raises an error.
        hyperparameters: values for the recipe's parameters; those with a default are optional. They
            become the entries of the parameter groups, so torch's LR schedulers find `group["lr"]`,
            and a group may override them. These schedulers change no other hyperparameter: a second
            rate, such as `adamw_lr` of `muon_adamw` or `lr_1d` of `mars`, stays constant unless it
            is a schedule. A recipe with `**kwargs` receives all keys that a group has when it is
            added.

    State of each parameter: `step` and the recipe's slots, under their names. Parts that do not
    consist of one-tensor rules keep their state, by path, with the first parameter of the group:
    parameters may leave such a group, or change places, only together with their names.

    `step` counts the steps in which the parameter had a gradient, as in torch.optim. Gates,
    micro-batch counts and plateaus are counts of the optimizer: they advance in each step in which
    a parameter on which they act has a gradient, and are equal in the state of all these
    parameters; a parameter whose first gradient comes later receives them. The optimizer's number
    of steps is the largest `step`; if a step had only parameters that had missed an earlier step,
    their state stores it as `optimizer_step`, as does a saved state of a recipe with such counts.

    Raises:
        TypeError: for a recipe that is not callable, does not return a transformation, or does not
            accept a passed hyperparameter, also one of a group, and for integer parameters. Keys
            that schedulers and frameworks write, such as `initial_lr`, are allowed.
        ValueError: from the recipe, for hyperparameters out of range; for an unknown value of
            compile.
        RuntimeError: from `step`, if compile is "strict" and it cannot be compiled; if it is
            captured without `capturable`, or before a step that compiled its kernels.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import Optimizer
        >>> def recipe(lr, decay=0.99):
        ...     return fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr), fo.params_ema(decay))
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = Optimizer(model.parameters(), recipe, lr=1e-2)
        >>> model(torch.ones(2)).sum().backward()
        >>> opt.step()
        >>> sorted(opt.state[model.bias])
        ['exp_avg', 'exp_avg_sq', 'params_ema', 'step']
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        recipe: Recipe,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
        **hyperparameters: Any,
    ) -> None:
        if not callable(recipe):
            raise TypeError(
                f"recipe must be a function from hyperparameters to a transformation, but got a "
                f"{type(recipe).__name__}; pass e.g. fo.adamw, or lambda lr: fo.chain(...)."
            )
        who = type(self).__name__
        given, hyperparameters = of_model(who, params, recipe, hyperparameters)
        check_arguments(who, given)
        check_iterable(who, given)
        defaults = recipe_defaults(recipe, hyperparameters)
        if KEY in defaults:
            raise TypeError(
                f"the recipe has a parameter called {KEY}, which is an argument of "
                f"{type(self).__name__} itself; give it another name, or leave it to that argument."
            )
        self.recipe = ByReference(recipe, tuple(defaults))
        how_to(compile)
        self.compile = compile
        self.stored = stored
        self.capturable = capturable
        super().__init__(given, defaults)
        self._check_selections()
        warn_of_unread_lr(recipe)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise TypeError for a recipe that is not one of such an optimizer."""
        if name == "recipe":
            groups = vars(self).get("param_groups", ())
            if not isinstance(value, ByReference):
                given = f"got a {type(value).__name__}"
            else:
                lacking = [x for x in value.names if any(x not in group for group in groups)]
                given = f"a parameter group has no {lacking[0]}" if lacking else ""
            if given:
                raise TypeError(
                    "an optimizer takes the recipe of another one with the same hyperparameters, "
                    f"but {given}; assign opt.recipe = Optimizer(params, recipe, ...).recipe, or "
                    "use that optimizer."
                )
        super().__setattr__(name, value)

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """The recipe, called with a group's hyperparameters."""
        tx = self.recipe(group)
        missing = tx.required if isinstance(tx, base.GradientTransformation) else ()
        if set(missing) - {"value"}:  # the loss comes from the closure
            raise TypeError(
                f"the recipe's update needs {' and '.join(missing)}, which an optimizer object "
                "does not have; use adapters.LBFGS for L-BFGS, adapters.SAM for sam, "
                "adapters.GaussNewton, LevenbergMarquardt or Dogleg for residuals, or call the "
                "transformation's update yourself."
            )
        if isinstance(tx, base.GradientTransformation) and holds_synced(tx):
            raise TypeError(
                "the recipe has local_sgd(…) or diloco(…), whose synchronizations an optimizer "
                "object does not make; use functional_optim.replicas.Replica."
            )
        return tx

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Raise TypeError for a hyperparameter that the recipe does not take."""
        self.recipe = self.recipe.checked(group)

    def __getstate__(self) -> dict[str, Any]:
        groups = self.defaults, *self.param_groups, {KEY: self.stored}
        recipe = self.recipe.beside(*groups)  # the first to be pickled
        return {"recipe": recipe, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "defaults" in state  # else loaded
        recipe = state["recipe"] if copied else self.recipe
        defaults = state["defaults"] if copied else self.defaults
        for group in state["param_groups"]:
            for name in recipe.names:
                group.setdefault(name, defaults[name])
        super().__setstate__(state)
