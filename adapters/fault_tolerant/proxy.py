"""An optimizer object that wraps another one."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from functional_optim.adapters.state.loading import check_dict

_HOOKED = ("step", "state_dict", "load_state_dict")


def announced(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with the hooks of its object and its record in profiles.

    torch's `profile_hook_step` would also call the global hooks, which the step of the inner
    optimizer calls.
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


def _inner(name: str) -> Any:
    """An attribute of the inner optimizer."""

    def read(self: OptimizerProxy) -> Any:
        return getattr(self.optim, name)

    def write(self: OptimizerProxy, value: Any) -> None:
        setattr(self.optim, name, value)

    return property(read, write, doc=f"The `{name}` of the inner optimizer.")


class OptimizerProxy(torch.optim.Optimizer):
    """An optimizer with the groups, state and defaults of another one, `optim`.

    Its hooks are separate. `_make_hooks` replaces torch's `__init__`, which would create groups.
    """

    def _make_hooks(self) -> None:
        for name in _HOOKED:
            for when in ("pre", "post"):
                setattr(self, f"_optimizer_{name}_{when}_hooks", OrderedDict())

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer inside."""
        raise NotImplementedError

    param_groups = _inner("param_groups")
    state = _inner("state")
    defaults = _inner("defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the inner optimizer. Hooks of both are called."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.optim.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the inner optimizer. Hooks of both are called.

        Args:
            state_dict: from `state_dict()` of this object or of the inner optimizer.

        Raises:
            TypeError: if it is not a dict.
            ValueError: if it does not fit. Also the errors of the inner optimizer.
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
