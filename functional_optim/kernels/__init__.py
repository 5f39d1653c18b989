"""Compiling a rule once: the only package that knows Inductor from the inside.

Called through torch.compile, a kernel would spend 30–60 µs on guards and wrappers each time. So the
graph is compiled below that, through doors that are not public. Each way is left for the next when
it is missing, has changed or does not suit the rule:

1. `sweep`: a library that goes over all tensors of a model in one call (`native`), kept on disk
   (`store`) under a name that tells the rule (`keys`).
2. `build`: Inductor's own callable, for one signature and fixed shapes (`tracing`).
3. plain torch.compile, and at last the rule itself, eagerly, with a warning.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from functional_optim.kernels import native, store, watch
from functional_optim.kernels.keys import fingerprint, static_key
from functional_optim.kernels.native import Addresses, Native, Sweep, cut, vector
from functional_optim.kernels.tracing import Body, Signature, lower, split_leaves, trace

__all__ = [
    "Addresses",
    "Body",
    "Kernel",
    "Native",
    "Signature",
    "Sweep",
    "alike",
    "build",
    "bypass",
    "count",
    "cut",
    "gradients",
    "static_key",
    "sweep",
    "vector",
]

Kernel = Callable[[list[Any]], Any]
"""Called with one flat list: a size for each leaf (if sizes are dynamic), its tensors, numbers."""

_built: dict[Any, Any] = {}
_lock = threading.RLock()
_told: set[str] = set()


def build(key: Any, body: Body, signature: Signature) -> Kernel:
    """The kernel for `body(leaves, numbers)`, compiled at most once per key and signature.

    `key` stands for the body: equal keys must mean equal code and constants.
    """
    return _once((key, signature), lambda: _compile(body, signature))


def sweep(
    key: Any, functions: tuple[Any, ...], body: Body, signature: Signature, outputs: int
) -> Native | None:
    """The native library for a body of one leaf of any size; None if there can be none.

    Args:
        key: stands for the body in this process.
        functions: all that the body calls and depends on, for its name on disk.
        body: returns the sums of one leaf, as many as `outputs`, or an empty tuple.
        signature: one leaf, without shapes.
        outputs: how many numbers the body measures.
    """
    if signature.device.type != "cpu" or not set(signature.leaves[0]) <= native.CTYPES.keys():
        return None
    return _once(("native", key, signature), lambda: _native(functions, body, signature, outputs))


def gradients(groups: list[Any], state: Any, seen: tuple[Any, ...]) -> Any:
    """The gradients of an optimizer if all its objects are those in `seen`, else None.

    NotImplemented where there is no library to look (see `watch`).
    """
    look = watch.gradients
    return NotImplemented if look is None else look(groups, state, seen)


def alike(
    tensors: list[torch.Tensor], strides: tuple[Any, ...], sizes: tuple[int, ...], dtypes: Any
) -> bool:
    """Have these tensors, all dense, those strides, sizes and dtypes?"""
    if watch.alike is not None:
        return watch.alike(tensors, strides, sizes, dtypes)
    return (
        tuple(map(torch.Tensor.stride, tensors)) == strides
        and tuple(map(torch.Tensor.numel, tensors)) == sizes
        and tuple(map(_dtype_of, tensors)) == dtypes
    )


_dtype_of = operator.attrgetter("dtype")


def bypass() -> bool:
    """Would a kernel, which reads and writes memory directly, pass by something that must see it?

    A mode such as make_fx's sees what goes through the dispatcher; tensors inside a transform of
    torch.func, such as vmap, have no memory of their own.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
    )


def count() -> int:
    """How many kernels this process has built: what a test of recompilation counts."""
    return len(_built)


def _once(full: Any, make: Callable[[], Any]) -> Any:
    if full not in _built:
        with _lock:
            if full not in _built:
                _built[full] = make()
    return _built[full]


def _native(
    functions: tuple[Any, ...], body: Body, signature: Signature, outputs: int
) -> Native | None:
    described = fingerprint(functions, tuple(map(str, signature)), outputs)
    name = None if described is None else store.name_of(described)
    kept = None if name is None else native.load(name, outputs)
    if kept is not None:
        return kept
    try:
        return native.compile(name, body, signature, outputs)
    except native.Unsuitable:
        return None
    except Exception as error:  # private interfaces: anything may have moved
        _tell(f"no native kernel can be built here ({_line(error)})")
        return None


def _compile(body: Body, signature: Signature) -> Kernel:
    if signature.device.type == "cpu":
        try:
            return lower(trace(body, signature), signature.threads)
        except Exception as error:  # a private interface: anything may have moved
            _tell(f"the direct call of compiled kernels is not available here ({_line(error)})")
    return _public(body, signature)


def _public(body: Body, signature: Signature) -> Kernel:
    """The same through torch.compile; eager, with a warning, if no compiler works."""
    known = len(signature.leaves) if signature.shapes is None else 0

    def flat(tensors: list[torch.Tensor], numbers: torch.Tensor) -> Any:
        return body(split_leaves(tensors, signature), numbers)

    compiled = torch.compile(flat, fullgraph=True, dynamic=signature.shapes is None)
    works = True

    @torch.no_grad()
    def kernel(args: list[Any]) -> Any:
        nonlocal works
        tensors, numbers = [x.detach() for x in args[known:-1]], args[-1]
        if signature.shapes is None:
            tensors = [x.as_strided((x.numel(),), (1,)) for x in tensors]
        if works:
            try:
                return compiled(tensors, numbers)
            except Exception as error:
                if not _is_compile_error(error):
                    raise
                works = False
                _tell(f"torch.compile failed ({_line(error)}); the steps run eagerly")
        return flat(tensors, numbers)

    return kernel


def _is_compile_error(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, (TorchDynamoException, OSError)) or "inductor" in repr(error).lower()


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        warnings.warn(f"functional_optim: {message}.", RuntimeWarning, stacklevel=4)
