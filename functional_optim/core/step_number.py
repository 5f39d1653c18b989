"""Numbers of a step that are tensors, in rules that run eagerly: they count as Python floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import ops


class StepNumber(Tensor):
    """A 0-dim float64 tensor that leaves the dtype of what it meets as it is.

    Alone, it is computed with in float64. Beside other tensors it has the dtype to which torch
    rounds a Python float there. A plain tensor of float64 would make a float64 tensor of a 0-dim
    one, or of one of bools.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = [y for x in (*args, *kwargs.values()) for y in (x if _is_list(x) else (x,))]
        others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, cls)]
        if not others:
            return super().__torch_function__(func, types, args, kwargs)
        dtype = ops.number_beside(getattr(func, "__name__", ""), others)

        def read(x: Any) -> Any:
            if _is_list(x):
                return type(x)([read(y) for y in x])
            return _plain(Tensor.to, (x, dtype)) if isinstance(x, cls) and _is_wide(x) else x

        return _plain(func, tuple(map(read, args)), {key: read(x) for key, x in kwargs.items()})


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What a function of torch makes of tensors of this class as of any other."""
    return _OF_PARAMETERS(func, (), args, kwargs or {})


_OF_PARAMETERS: Any = torch.nn.Parameter.__torch_function__


def _is_wide(x: Tensor) -> bool:
    return _plain(_DTYPE, (x,)) is torch.float64


_DTYPE: Any = Tensor.dtype.__get__  # pyright: ignore[reportAttributeAccessIssue]


def _is_list(x: Any) -> bool:
    return type(x) in (list, tuple)


def plain(x: Any) -> Any:
    """What a rule has returned, which may follow from numbers of the step alone."""
    return _plain(Tensor.as_subclass, (x, Tensor)) if type(x) is StepNumber else x
