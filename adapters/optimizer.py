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
    of_model,
    recipe_defaults,
)
from functional_optim.adapters.state.storage import KEY, Stored
from functional_optim.core import base
from functional_optim.engine.group import Compile, how_to


class Optimizer(OptimizerBase):
    """A torch.optim.Optimizer that runs a recipe over parameter groups.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them. For
            recipes with `views`, also the model itself, whose kernels are then known.
        recipe: a function from hyperparameters to a transformation.
        compile: run compiled kernels (the default); False runs the rules eagerly. Where they cannot
            be compiled, True falls back with a warning, and "strict" raises a RuntimeError at the
            step, before any tensor is changed. A recipe with parts that are not made of one-tensor
            rules has none: it always runs eagerly, each group as one tree. What its rules measure
            is still summed over all groups, for which the update of a group is run again after
            each sum; a transformation of your own that measures its tree sees its group.
        stored: how slots are stored, as the second argument of :func:`functional_optim.stored`:
            `"int8"`, or a dict from patterns of slots. To say more, a function that gets the
            transformation, such as `functools.partial(fo.stored, storage="int8", where="blocks")`.
            None (the default): as the recipe says. A group may have its own. Which parameters are
            matrices of hidden layers is told by their names; without names, with
            `model.parameters()`, by their shapes alone, so embeddings and heads are packed, too:
            pass named parameters, or `"stored": None` in a group of their own.
        capturable: keep step counts and carried scalars on the device of their parameters, so that
            a step that is captured as a CUDA graph goes on counting when it is replayed. Learning
            rates that change between replays must be tensors on that device. False (the default):
            on the CPU, where they cost no launches, and a capture is refused.
        hyperparameters: values for the recipe's parameters; those with a default may be left out.
            They become the entries of the parameter groups, so torch's LR schedulers find
            `group["lr"]`, and a group may have its own. What a recipe with `**kwargs` finds in a
            group when that is added, it gets.

    State of each parameter: `step` and the recipe's slots, under their names. What is not made of
    one-tensor rules keeps its state, by path, with the first parameter of the group.

    `step` counts the steps in which the parameter had a gradient, as in torch.optim. Gates, every-k
    counts and plateaus are counts of the optimizer: they go on in each step in which a parameter
    that they act on has a gradient, are equal in the state of all these parameters, and a parameter
    that joins late takes them over. The optimizer's number of steps is the largest `step`; where a
    step had only parameters that had missed one before, their state has it as `optimizer_step`.

    Raises:
        TypeError: for a recipe that is not callable, does not return a transformation, or does not
            take a given hyperparameter, also where a group has it, and for integer parameters.
            What schedulers and frameworks write there, such as `initial_lr`, is let pass.
        ValueError: from the recipe, for numbers out of range; for another value of compile.
        RuntimeError: from `step`, if compile is "strict" and it cannot be compiled; where it is
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

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """The recipe, called with a group's hyperparameters."""
        tx = self.recipe(group)
        missing = tx.required if isinstance(tx, base.GradientTransformation) else ()
        if set(missing) - {"value"}:  # the loss comes from the closure
            raise TypeError(
                f"the recipe's update needs {' and '.join(missing)}, which an optimizer object "
                "does not have; use adapters.LBFGS for L-BFGS, adapters.SAM for sam, or call the "
                "transformation's update yourself."
            )
        return tx

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Raise TypeError for a hyperparameter that the recipe does not take."""
        self.recipe = self.recipe.checked(group)

    def __getstate__(self) -> dict[str, Any]:
        recipe = self.recipe.beside(self.defaults, *self.param_groups)  # the first to be pickled
        return {"recipe": recipe, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "defaults" in state  # else loaded
        recipe = state["recipe"] if copied else self.recipe
        defaults = state["defaults"] if copied else self.defaults
        for group in state["param_groups"]:
            for name in recipe.names:
                group.setdefault(name, defaults[name])
        super().__setstate__(state)
