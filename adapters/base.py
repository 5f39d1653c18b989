"""The base of all optimizer objects: torch.optim.Optimizer over a transformation of each group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.optim.optimizer as every_optimizer
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.adapters.state.capturing import KEY as CAPTURABLE
from functional_optim.adapters.state.capturing import check_capture
from functional_optim.adapters.state.loading import check_loaded, decode_slots, load_checked
from functional_optim.adapters.state.names import check_distinct, lacking, named
from functional_optim.adapters.state.numbers import numbers_of
from functional_optim.adapters.state.pickling import without_views
from functional_optim.adapters.state.places import KEPT
from functional_optim.adapters.state.recipes import as_data, with_kernels
from functional_optim.adapters.state.storage import KEY, Stored, storage_of, with_storage
from functional_optim.adapters.state.surroundings import (
    outlives_inference,
    outside_inference,
    without_compiler,
)
from functional_optim.adapters.state.transaction import transaction
from functional_optim.adapters.stepping.columns import own_scalars
from functional_optim.adapters.stepping.leaves import Changes, discard
from functional_optim.adapters.stepping.loss import forget_scale, left_to_step, loss_of, unscale
from functional_optim.adapters.stepping.plan import OptimizerPlan, valid_plan
from functional_optim.adapters.stepping.shared_counts import SharedCounts
from functional_optim.adapters.stepping.traced import step_in_graph, step_traced
from functional_optim.core import base, modes
from functional_optim.core.calls import explaining
from functional_optim.core.chain import choices_of
from functional_optim.core.factory import forgetting_calls
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import check_matrices, check_parts
from functional_optim.core.paths import check_choices
from functional_optim.engine.group import Compile
from functional_optim.kernels import private
from functional_optim.kernels.interrupts import held


def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with torch's hooks and its record in profiles, only if there are hooks or a
    profiler."""
    announced = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def quick(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and None in (*args, *kwargs.values()) and self._only_creates_state():
            return None
        if torch.compiler.is_compiling():
            return announced(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or every_optimizer._global_optimizer_pre_hooks
            or every_optimizer._global_optimizer_post_hooks
            or private.profiling()
        ) and not _is_announced(type(self).step):
            return announced(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    quick.__name__ = "step"
    quick.__qualname__ = "OptimizerBase.step"
    vars(quick)["hooked"] = True  # torch would wrap it again
    return quick


def _is_announced(step: Any) -> bool:
    """Whether torch has wrapped a `step`, that of a user's subclass, and so calls the hooks."""
    while step is not None and getattr(step, "__code__", None) is not ANNOUNCED:
        step = getattr(step, "__wrapped__", None)
    return step is not None


ANNOUNCED = torch.optim.Optimizer.profile_hook_step(_is_announced).__code__
"""The code of each step that torch has wrapped."""


class OptimizerBase(torch.optim.Optimizer):
    """The base class of optimizer objects: `step` and loading, over `transform(group)`.

    A drop-in inherits from this class and, after it, from torch's class, for torch's signature,
    errors, defaults and `isinstance`.

    compile: run compiled kernels; False runs the rules eagerly, and "strict" raises a RuntimeError
        at a step that cannot be compiled, where True falls back with a warning.
    stored: storage format of slots, unless a group sets it; see `Optimizer`.
    capturable: keep step counts and carried scalars on the device; see `Optimizer`.
    counts_steps: keep `step` in each parameter's state, as all of torch's optimizers except SGD and
    Muon.
    integer_steps: keep it as a Python int, as torch's SparseAdam does.
    keeps_trees: keep the state of a custom transformation of trees by its paths.
    tries_points: call the closure of a step at several points.
    steps_all: step parameters without a gradient, too.
    """

    compile: Compile  # of each object alone: wrappers ask their own class before it
    stored: Stored | None
    capturable: bool
    counts_steps: bool = True
    integer_steps: bool = False
    keeps_trees: bool = True
    tries_points: bool = False
    steps_all: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("functional_optim.") and "__init__" in vars(cls):
            cls.__init__ = explaining(cls.__init__)

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """The transformation of a parameter group."""
        raise NotImplementedError

    def checked_transform(
        self, group: dict[str, Any], *, in_step: bool = False
    ) -> base.GradientTransformation:
        """`transform`, with the storage of `stored`; raises TypeError if it is not a
        transformation.

        in_step: accept hyperparameters that are out of range, as torch does after construction: its
            LinearLR reaches a learning rate of -2e-19.
        """
        try:
            tx = forgetting_calls(in_step, numeric.trusting, in_step, self.transform, group)
        except TypeError:
            if in_step:  # factories that record their calls name the argument
                numeric.trusting(in_step, self.transform, group)
            raise
        what = "a transformation, such as fo.adamw(lr) or fo.chain(...)"
        base.check_returned("the recipe", tx, what)
        return forgetting_calls(in_step, with_storage, tx, storage_of(self, group))

    def _check_selections(self) -> None:
        """Warn of patterns of the recipe or of `stored` that match no parameter."""
        if not torch.compiler.is_compiling():
            groups = self.param_groups
            check_choices(
                *[(choices_of(self.checked_transform(x)), dict(named(x))) for x in groups]
            )

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss. Called once, with gradients
                enabled, before the gradients are read. Rules that take `value` receive the loss.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            RuntimeError: for a gradient that the algorithm does not support; without a closure, if
                the recipe needs the loss. TypeError, ValueError: for a gradient or slot that does
                not fit its parameter, and for parameters with gradients, or their slots, that share
                memory.

        A step that raises an error changes neither parameters nor state (except with rules on
        DTensors, which run while results are written). A step that Ctrl-C interrupts changes either
        nothing or everything.
        """
        loss = None if closure is None else loss_of(closure)
        if torch.compiler.is_compiling():
            base.unrecorded(partial(step_in_graph, self, loss, self._step_in_place))
        elif self.defaults.get("differentiable"):
            base.recorded(partial(step_traced, self, loss, replace=True))
        else:
            recording = torch.is_grad_enabled()
            try:  # as `base.unrecorded` does
                private.set_grad_enabled(False)
                self._step_in_place(loss)
            finally:
                private.set_grad_enabled(recording)
        return loss

    step = with_hooks(_step)

    def _only_creates_state(self) -> bool:
        """Create the state, if torch.distributed.checkpoint calls this step only for that.

        torch sets `lr` and the gradients to 0, and calls `step(closure=None)`. A recipe with
        another rate would move the parameters, and one that needs a closure would raise an error.
        """
        creation = None if self.state else private.state_creation()
        if creation is None:
            return False
        try:
            with outside_inference():
                base.unrecorded(self._create_state)
        except BaseException:  # torch would leave zeros
            rated = [group for group in self.param_groups if "lr" in group]
            for group, lr in zip(rated, creation.f_locals.get("lrs", ()), strict=False):
                group["lr"] = lr
            self.zero_grad()
            raise
        return True

    def _create_state(self) -> None:
        """Create the state of all parameters with gradients, as the first step would find it.

        Raises RuntimeError if the state has no entries before that step.
        """
        if not self.keeps_trees:
            raise RuntimeError(
                "torch's get_optimizer_state_dict and set_optimizer_state_dict need the state of "
                f"{type(self).__name__}, which has none before its first step; use "
                "opt.state_dict() and opt.load_state_dict()."
            )
        made: Changes = []
        try:
            for group in OptimizerPlan(self, made).trees:
                if group.params:
                    new = {key: x.detach().clone() for key, x in tree.items(group.fresh)}
                    self.state[group.params[0]].update(new)
            self._counts().begin(made)
        except BaseException:
            try:
                held(discard, self, made)
            finally:
                held(discard, self, made)  # again, as in `transaction`
            raise

    def _counts(self) -> SharedCounts:
        """The shared rules of all groups, and the count of steps."""
        every = [self.checked_transform(group, in_step=True) for group in self.param_groups]
        return SharedCounts(self, [(k, x) for k, x in enumerate(every) if isinstance(x, Leafwise)])

    @private.constant_while_traced
    def _places_of_shared(self) -> tuple[int, ...]:
        """`SharedCounts.places`, for a trace."""
        return tuple(self._counts().places)

    def _step_in_place(self, loss: Any) -> None:
        mine = self.__dict__
        made: Changes = []
        try:
            # a step that raises leaves no plan behind
            plan, grads = valid_plan(mine.pop("_plan", None), self)
            if grads is None and modes.intercepted():
                mine["_plan"] = plan
                step_traced(self, loss, replace=False)
                return
            if plan is None or grads is None or plan.driven or torch.cuda.is_initialized():
                check_capture(self, None if grads is None else plan)
            if plan is None or grads is None:
                if outlives_inference(self.param_groups):
                    mine["_plan"] = plan
                    with outside_inference():
                        return self._step_in_place(loss)
                plan = OptimizerPlan(self, made, plan)
                grads = plan.fresh(self)
            skip = None
            if "grad_scale" in mine or "found_inf" in mine:
                scale, skip = left_to_step(self)
                if skip is not None and not (skip.device.type != "cpu" and plan.can_skip()):
                    if skip.item():
                        mine["_plan"] = None if made else plan
                        held(discard, self, made)
                        return
                    skip = None
                if scale is not None:
                    held(unscale, grads, scale, made)
            plan.run(self, grads, loss, made, skip)
        except BaseException:
            try:
                held(discard, self, made)
            finally:
                held(discard, self, made)  # again, as in `transaction`
                forget_scale(self)
            raise

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Raise RuntimeError for a gradient that the rules do not support."""

    def dense_gradient(self, g: Tensor, group: dict[str, Any]) -> Tensor:
        """A sparse gradient in the form that the rules of this group support."""
        return g

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does; its hyperparameters are checked first.

        Args:
            param_group: `params`, and values that differ from the defaults.

        Raises:
            TypeError, ValueError: for parameters or hyperparameters that cannot be used. The
                optimizer is then unchanged.
        """
        given = with_kernels(param_group)
        transaction(self, self._add_checked, super().add_param_group, given)

    def _add_checked(self, add: Callable[[Any], None], param_group: Any) -> None:
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise KeyError(
                    "a parameter group needs its parameters under the key params; it has "
                    f"{', '.join(map(str, param_group)) or 'no key'}."
                )
            self._check_keys(param_group)
            self.checked_transform({**self.defaults, **param_group})
        try:
            without_compiler(add, param_group)
        except ValueError as error:
            if "without names to the optimizer" not in str(error):
                raise
            raise ValueError(
                f"{error}; pass pairs of names and parameters, such as module.named_parameters()."
            ) from None
        group = self.param_groups[-1]
        self.check_parameters(group)
        tx = self.checked_transform(group)
        if isinstance(tx, Leafwise):
            check_parts(tx.placements, named(group))
            acting = [(tx.on(name, p), p, name) for name, p in named(group) if p.requires_grad]
            check_matrices([(x.placements, p, name) for x, p, name in acting if x is not None])
        elif self.keeps_trees:
            check_distinct(group)
            base.check_params(dict(named(group)))

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Raise TypeError for an unused hyperparameter of a new group.

        Drop-ins accept it, as torch does.
        """

    def check_parameters(self, group: dict[str, Any]) -> None:
        """Raise TypeError for an integer parameter, but for one of a quantized module."""
        names = group.get("param_names") or [str(i) for i in range(len(group["params"]))]
        pairs = zip(names, group["params"], strict=True)
        every = self.steps_all
        base.check_params({x: p for x, p in pairs if every or type(p) is Tensor or p.requires_grad})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does.

        Args:
            set_to_none: set each to None (the default), or fill it with zeros.
        """
        without_compiler(super().zero_grad, set_to_none)

    def state_dict(self, *, decoded: bool = False) -> dict[str, Any]:
        """State and parameter groups in torch's format; see torch.optim.Optimizer.state_dict.

        A schedule, or another function, among a group's hyperparameters is code: it is saved as
        None, and `load_state_dict` keeps the optimizer's function. The same holds for `stored` and
        `views`. A dtype is saved as its name.

        Args:
            decoded: decode slots that `fo.stored` has packed, to float32 under torch's keys, so
                that torch.optim's class can load them. See `adapters.decode_slots`.
        """
        saved = without_compiler(super().state_dict)
        for group in saved.get("param_groups", ()):  # hooks of the user may return other objects
            group.pop(KEY, None)
            group.update({name: as_data(value) for name, value in group.items()})
        # of states without values, and groups that give no transformation, nobody knows the count
        with suppress(Exception), outside_inference():
            self._counts().save(saved)
        return decode_slots(self, saved) if decoded else saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the torch.optim class that it replaces.

        The state shares no memory with the dict.

        Args:
            state_dict: from `state_dict()`. Missing slots are initialized at the next step. Packed
                slots are decoded, or packed with rounding to nearest, to the storage format of this
                optimizer. Schedules among the hyperparameters of this optimizer are kept. Counts of
                the optimizer that differ between parameters are made equal: those of the parameter
                with the most steps are used, and the slots of the rule are reset for the others.

        Raises:
            ValueError, TypeError: if it does not fit: one error for all parameters. If both have
                parameter names, names and order must be equal, except for prefixes of torch's
                wrappers. The optimizer is then unchanged.
        """
        load = super().load_state_dict
        with outside_inference():
            load_checked(self, lambda given: without_compiler(load, given), state_dict)

    def numbers(self, *names: str) -> dict[str, float]:
        """All scalars of the states, read at once; see `functional_optim.numbers`.

        These are `step`, the largest count of steps; hyperparameters, with the values of schedules
        at the last step; counts of the optimizer; and scalars of each parameter's state, such as
        those of `monitor(per_tensor=True)`. The latter have the keys name/parameter, with the
        parameter's name or its index in the group: `"cosine/layer.weight"`, `"cosine/0"`. With
        several groups, hyperparameters have the keys name/group, with the group's index, or its
        name if all names differ: `"lr/0"`. Indices are counted in the group: `"cosine/0.1"`.

        Args:
            names: those to read, as in `functional_optim.numbers`. Default: all.

        Raises:
            KeyError: for a name without a scalar.

        Example::

            >>> import torch, functional_optim as fo
            >>> from functional_optim.adapters import Optimizer
            >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
            >>> watch = fo.monitor({"grad_norm": fo.measures.global_norm})
            >>> opt = Optimizer([w], lambda lr: fo.chain(watch, fo.sgd(lr)), lr=0.1)
            >>> (w * w / 2).sum().backward()
            >>> opt.step()
            >>> opt.numbers("lr", "grad_norm")
            {'lr': 0.1, 'grad_norm': 5.0}
        """
        return numbers_of(self, names)

    def check_loaded(self, given: dict[str, Any], before: list[set[str]]) -> None:
        """Raise ValueError if the loaded state does not fit.

        given: the loaded dict, after all hooks. before: names in the groups before the load.
        """
        check_loaded(self, given, before)

    def __str__(self) -> str:
        from functional_optim.adapters.summary import text_of_groups  # not needed by steps

        return f"{self!r}\n{text_of_groups(self)}"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("compile", KEY, CAPTURABLE, KEPT)
        own = {key: vars(self)[key] for key in kept if key in vars(self)}
        own["state"] = without_views(self.state)
        return {**super().__getstate__(), **own}

    def __copy__(self) -> Any:
        """A shallow copy, which shares state and groups, as in torch."""
        new = object.__new__(type(self))
        new.__setstate__({**self.__getstate__(), "state": {}})
        new.state = self.state
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "defaults" in state  # else loaded
        known = "differentiable" in (state["defaults"] if copied else self.defaults)
        try:
            super().__setstate__(state)
        except KeyError as missing:  # in torch's code, for the state of another algorithm
            raise ValueError(
                f"{lacking(state, missing.args[0])}, which {type(self).__name__} needs; load a "
                "checkpoint of the same kind of optimizer."
            ) from None
        if not known:  # torch adds it, and a group added later would differ from the others
            self.defaults.pop("differentiable", None)
        own_scalars(self.state.values())
