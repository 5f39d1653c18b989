"""What a rule asks of a tensor besides operations, while it is recorded.

A recording holds for tensors of all sizes only if nothing that a rule has asked is another for
others: what is not known to be the same is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.kernels.node import RuleError, Unsuitable
from functional_optim.kernels.ops import FILLING

if TYPE_CHECKING:
    from functional_optim.kernels.record import Recorder


def memory_of(x: Tensor) -> int:
    """Where the memory of a tensor begins; for one without any, the tensor itself."""
    return x.untyped_storage().data_ptr() or id(x)


class Given(Tensor):
    """A tensor that a rule is given, which may have attributes that the recorded one lacks."""

    __torch_function__: Any = torch.nn.Parameter.__torch_function__  # which leaves all as it is

    def __getattr__(self, name: str) -> Any:
        recorder = self.__dict__.get("_functional_optim_recorder")
        if recorder is not None and recorder.rule is not None and name[:17] != "_functional_optim":
            recorder.refused.append(
                Unsuitable(f"the attribute {name!r} of a tensor", recorder.rule)
            )
            raise recorder.refused[-1]
        raise AttributeError(name)


class _Watch(TorchFunctionMode):
    """Notes what a rule asks of a tensor besides operations."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return self._answered(func, args, kwargs or {})
        except (RuleError, Unsuitable) as error:
            self.recorder.refused.append(error)
            raise

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        name = getattr(func, "__name__", "")
        if func in READING and recorder.depends(args[0]):
            raise recorder.reading()
        if func in WRITING or name == "__set__":
            recorder.refuse_write(_attribute(func) if name == "__set__" else name, args[:1])
        recorder.indexing = func is Tensor.__getitem__
        recorder.since = len(recorder.graph.nodes)
        if func in CLAMPING:
            func, args, kwargs = _clamping(func, *args, **kwargs)
        args, kwargs = self._without_number(func, args, kwargs)
        try:
            found = func(*args, **kwargs)
        except (RuleError, Unsuitable):
            raise
        except Exception:  # of sizes that do not fit, which a rule may catch
            recorder.graph.reads_sizes = True
            raise
        finally:
            recorder.indexing = False
            left, recorder.named = recorder.named, None
        if left is not None:
            raise recorder.reading()
        if func in SIZED or (isinstance(found, (tuple, list)) and func not in STRIDED):
            recorder.graph.reads_sizes = True
        elif not (isinstance(found, KNOWN) or func in FIXED) and (
            found is not None or name == "__get__"
        ):
            raise Unsuitable(f"{_attribute(func)} of a tensor", recorder.rule)
        return found

    def _without_number(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a Python number instead of a scalar of the step, if torch takes no
        tensor: the recorder notes that."""
        place = FILLS.get(func)
        if place is not None and len(args) > place:
            kwargs = {**kwargs, FILLING: args[place]}
            args = args[:place] + args[place + 1 :]
        for name in ("alpha", "value", FILLING):
            node = self.recorder.node_of(kwargs.get(name))
            if node is not None and node.host and (name != "value" or func in VALUED):
                self.recorder.named = name, node
                return args, {**kwargs, name: 0.5}
        return args, kwargs


def _of(home: Any, names: str) -> set[Any]:
    """The functions of these names that torch, or its class of tensors, has."""
    return {getattr(home, name) for name in names.split()}


FILLS: dict[Any, int] = {torch.full_like: 1, Tensor.new_full: 2, torch.full: 1}
"""Functions that fill a tensor with a number, and which argument that is."""

VALUED = _of(torch, "addcmul addcdiv") | _of(Tensor, "addcmul addcdiv addcmul_ addcdiv_")
"""Functions that multiply by a `value`, where others take a tensor for it."""

CLAMPING = {torch.clamp, torch.clip, Tensor.clamp, Tensor.clip}


def _clamping(func: Any, x: Any, min: Any = None, max: Any = None, **kwargs: Any) -> Any:
    """A call that clamps, which takes a tensor for both bounds or for none."""
    mixed = isinstance(min, Tensor) != isinstance(max, Tensor)
    if kwargs or not mixed or min is None or max is None:
        return func, (x,), {"min": min, "max": max, **kwargs}
    return _clamped, (x, min, max), {}


def _clamped(x: Tensor, low: Any, high: Any) -> Tensor:
    return x.clamp_min(low).clamp_max(high)


def _attribute(func: Any) -> str:
    """The name of a function, or of the attribute that it gets or sets."""
    of = getattr(func, "__self__", None)
    return getattr(of, "__name__", "") or getattr(func, "__name__", "an attribute")


TENSOR: Any = Tensor
"""The class, with the getters of its attributes."""

SIZED = {
    TENSOR.nbytes.__get__,
    *_of(torch, "numel is_same_size"),
    *_of(Tensor, "size numel nelement __len__ is_same_size"),
}
"""Functions from a tensor to its sizes, besides those that return a tuple."""

STRIDED = {Tensor.stride, Tensor.dim_order}
"""Functions that return a tuple which does not follow from the sizes."""

KNOWN = (Tensor, torch.dtype, torch.device, torch.layout)
"""The types of what a recorded tensor has in common with those of the step."""

FIXED = {
    *(TENSOR.ndim.__get__, TENSOR.itemsize.__get__),
    *_of(torch, "is_floating_point is_complex is_signed is_tensor is_nonzero equal allclose"),
    *_of(Tensor, "dim ndimension element_size is_floating_point is_complex is_signed"),
    *_of(Tensor, "item tolist equal allclose is_nonzero __bool__ __float__ __int__ __index__"),
    *_of(Tensor, "__contains__ __format__ __repr__"),
}
"""Functions whose results hold for tensors of all sizes, or are values, see `Recorder`."""

READS = ("_local_scalar_dense.default", "equal.default", "allclose.default", "is_nonzero.default")
"""Operations of ATen that return values."""

READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
"""Functions that read values and call no operation."""

WRITING = {Tensor.apply_, Tensor.map_, Tensor.map2_, Tensor.set_, Tensor.resize_}
"""Functions that write without an operation, or that change what a tensor is."""


def inside(recorder: Recorder, index: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a rule, whose operations are those of this rule.

    index: of the rule in its chain.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.rule = index
        flat = [y for x in args for y in (x if isinstance(x, tuple) else (x,))]
        given = [x for x in flat if isinstance(x, Tensor)]
        recorder.given_storages.update(map(memory_of, given))
        recorder.alive += given
        try:
            with _Watch(recorder):
                found = function(*args, **kwargs)
            if recorder.refused:  # and the function has caught it
                raise recorder.refused[0]
            return found
        finally:
            recorder.rule = None

    return run
