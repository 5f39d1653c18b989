"""An optimizer object that stands for another one."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from functional_optim.adapters.state.loading import check_dict

_HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


def announced(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with its object's own hooks and its entry in profiles.

    torch's `profile_hook_step` would call the global hooks too, and those are called by the step of
    the optimizer inside.
    """

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        self = args[0]
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
            for before in list(self._optimizer_step_pre_hooks.values()):
                changed = before(self, args, kwargs)
                if changed is not None:
                    if not (isinstance(changed, tuple) and len(changed) == 2):
                        raise RuntimeError(
                            "a step pre-hook must return None or a tuple of (args, kwargs), but "
                            f"returned {changed!r}."
                        )
                    args, kwargs = changed
            out = step(*args, **kwargs)
            for after in list(self._optimizer_step_post_hooks.values()):
                after(self, args, kwargs)
            return out

    return wrapper


class OptimizerProxy(torch.optim.Optimizer):
    """An optimizer whose groups, state and defaults are those of another one, `optim`.

    Hooks are its own. `_make_hooks` takes the place of torch's `__init__`, which would make groups.
    """

    def _make_hooks(self) -> None:
        for name in _HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer inside."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: list[dict[str, Any]]
    ) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:
        """That of the optimizer inside."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optim.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the optimizer inside."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optim.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer inside."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer inside. Hooks of both are called."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.optim.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the optimizer inside. Hooks of both are called.

        Args:
            state_dict: from `state_dict()` of this object or of the optimizer inside.

        Raises:
            TypeError: if it is no dict.
            ValueError: if it does not fit, and what else the optimizer inside raises.
        """
        check_dict(state_dict)
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.optim.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.optim!r}"
