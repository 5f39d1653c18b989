"""Compiling a rule once: the only package that knows Inductor from the inside.

Called through torch.compile, a kernel would spend 30–60 µs on guards and wrappers each time. So the
graph is compiled below that, through doors that are not public. Each way is left for the next when
it is missing, has changed or does not suit the rule:

1. `sweep`: a library that goes over all tensors of a model in one call (`cpu`, and for rules that
   sum over parts of tensors `dynamic_shapes`), kept on disk (`disk_cache`) under a name that tells
   the rule (`fingerprints`).
2. `build`: Inductor's own callable, for one signature and fixed shapes (`tracing`).
3. plain torch.compile, and at last the rule itself, eagerly, with a warning.

`strict` turns each of these warnings into an error.
"""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.importing import uncollected
from functional_optim.kernels import cpu, disk_cache, dynamic_shapes, watch
from functional_optim.kernels.building import CTYPES, Unsuitable
from functional_optim.kernels.cpu import MultiTensorLaunch
from functional_optim.kernels.disk_cache import folder
from functional_optim.kernels.dynamic_shapes import ShapedLaunch, ShapeSignature
from functional_optim.kernels.fingerprints import fingerprint, static_key
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.launches import READER, Launch, Native, Stages, load
from functional_optim.kernels.tracing import Body, Signature, lower, split_leaves, trace

__all__ = [
    "READER",
    "Body",
    "Kernel",
    "Launch",
    "MultiTensorLaunch",
    "Native",
    "ShapeSignature",
    "ShapedLaunch",
    "Signature",
    "Stages",
    "build",
    "count",
    "fingerprint",
    "folder",
    "is_compile_error",
    "is_kept",
    "is_limit",
    "line",
    "own_code",
    "refusal",
    "same_entries",
    "static_key",
    "sweep",
    "tell",
    "watcher",
]

Kernel = Callable[[list[Any]], Any]
"""Called with one flat list: a size for each leaf (if sizes are dynamic), its tensors, numbers."""

_built: dict[Any, Any] = {}
_lock = threading.RLock()
_gave_way: set[Any] = set()
"""Keys of kernels that are not what was tried first."""
_told: set[str] = set()


def build(key: Any, body: Body, signature: Signature, *, strict: bool = False) -> Kernel:
    """The kernel for `body(leaves, numbers)`, compiled at most once per key and signature.

    `key` stands for the body: equal keys must mean equal code and constants.

    Raises:
        RuntimeError: if `strict`, and the kernel cannot be compiled.
    """
    return _once((key, signature), lambda give_way: _compile(body, signature, give_way), strict)


def sweep(
    key: Any,
    functions: tuple[Any, ...],
    body: Body,
    signature: Signature | ShapeSignature,
    outputs: int,
    *,
    strict: bool = False,
) -> Native | None:
    """The native library for a body of one leaf on the CPU; None if there can be none.

    Args:
        key: stands for the body in this process.
        functions: all that the body calls and depends on, for its name on disk.
        body: returns the sums of one leaf, as many as `outputs`, or an empty tuple.
        signature: one leaf, without shapes, or with dimensions of any size.
        outputs: how many numbers the body measures.
        strict: raise where a library could be built if the compiler worked.

    Raises:
        RuntimeError: if `strict`, and building it fails.
    """
    shaped = isinstance(signature, ShapeSignature)
    if not set(signature.dtypes if shaped else signature.leaves[0]) <= CTYPES.keys():
        return None
    return _once(
        ("native", key, signature),
        lambda give_way: _native(functions, body, signature, outputs, give_way),
        strict,
    )


def watcher() -> Any:
    """The library that looks over objects, or None (see `watch`)."""
    return watch.module if READER else None


def same_entries(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Do two dicts hold the very same objects, in the same order?"""
    if watch.module is not None:
        return watch.module.same_entries(a, b)
    same_keys = len(a) == len(b) and all(map(operator.is_, a, b))
    return same_keys and all(map(operator.is_, a.values(), b.values()))


def is_kept(kernel: Native) -> bool:
    """Will the next process find this kernel?"""
    return kernel.name is not None and disk_cache.find(kernel.name) is not None


def count() -> int:
    """How many kernels this process has built: what a test of recompilation counts."""
    return len(_built)


GiveWay = Callable[[str, Exception], None]
"""Called with what failed and why, before the next way is tried."""


def _once(full: Any, make: Callable[[GiveWay], Any], strict: bool) -> Any:
    """What `make` returns, made once; again if it gave way then and must not now."""
    full = (full, torch.get_default_dtype())  # of the tensors that a rule makes from numbers

    def give_way(what: str, error: Exception) -> None:
        if strict:
            raise refusal(f"{what} ({line(error)})") from error
        _gave_way.add(full)
        tell(f"{what} ({line(error)})")

    def missing() -> bool:
        return full not in _built or (strict and full in _gave_way)

    if missing():
        with _lock:
            if missing():
                _built[full] = let_through(_uncollected, make, give_way)
                if strict:
                    _gave_way.discard(full)
    return _built[full]


def _uncollected(make: Callable[[GiveWay], Any], give_way: GiveWay) -> Any:
    """What `make` returns, which may import the 1,500 modules of the compiler."""
    with uncollected():
        return make(give_way)


def refusal(what: str) -> RuntimeError:
    """The error of a strict step."""
    return RuntimeError(
        f"functional_optim: a strict step must be compiled, but {what}. Nothing was stepped; put "
        "this right, or compile without strict, which falls back with a warning."
    )


def _native(
    functions: tuple[Any, ...],
    body: Body,
    signature: Signature | ShapeSignature,
    outputs: int,
    give_way: GiveWay,
) -> Native | None:
    described = fingerprint(functions, tuple(map(str, signature)), outputs)
    name = None if described is None else disk_cache.name_of(described)
    kept = None if name is None else load(name, outputs)
    if kept is not None:
        return kept
    with disk_cache.turn(name):
        kept = None if name is None else load(name, outputs)
        if kept is not None:  # by a process that came first
            return kept
        try:
            if isinstance(signature, ShapeSignature):
                return dynamic_shapes.compile(name, body, signature, outputs)
            return cpu.compile(name, body, signature, outputs)
        except Unsuitable:
            return None
        except Exception as error:  # private interfaces: anything may have moved
            give_way("no native kernel can be built here", error)
            return None


def _compile(body: Body, signature: Signature, give_way: GiveWay) -> Kernel:
    if signature.device.type == "cpu":
        try:
            with warnings.catch_warnings():  # of the compiler, about its own code
                warnings.simplefilter("ignore")
                return lower(trace(body, signature), signature.threads)
        except Exception as error:  # a private interface: anything may have moved
            give_way("the direct call of compiled kernels is not available here", error)
    return Public(body, signature, give_way)


class Public:
    """The same through torch.compile; eager, with a warning, if no compiler works.

    It is compiled when it is made, on tensors of the signature's kind, so that a step in which the
    compiler fails has written nothing.
    """

    def __init__(self, body: Body, signature: Signature, give_way: GiveWay) -> None:
        self.signature = signature
        self.known = len(signature.leaves) if signature.shapes is None else 0
        self.works = True
        self.tried = False

        def flat(tensors: list[Tensor], numbers: Tensor) -> Any:
            return body(split_leaves(tensors, signature), numbers)

        self.flat = flat
        self._renew()
        try:
            self._try()
        except Exception as error:  # of any compiler
            give_way("torch.compile failed, without which the steps run eagerly", error)
            self.works = False

    def _renew(self) -> None:
        """Forget all graphs, and be compiled again."""
        dynamic = self.signature.shapes is None
        self.compiled = torch.compile(own_code(self.flat), fullgraph=True, dynamic=dynamic)

    @torch.no_grad()
    def __call__(self, args: list[Any]) -> Any:
        tensors, numbers = [x.detach() for x in args[self.known : -1]], args[-1]
        if self.signature.shapes is None:
            tensors = [x.as_strided((x.numel(),), (1,)) for x in tensors]
        if self.works:
            try:
                return self.compiled(tensors, numbers)
            except Exception as error:
                if not is_compile_error(error):
                    raise
                if is_limit(error):  # one of each way in which leaves are empty or of one element
                    self._renew()
                    return self.compiled(tensors, numbers)
                self.works = False
                tell(f"torch.compile failed ({line(error)}); the steps run eagerly")
        return self.flat(tensors, numbers)

    @torch.no_grad()
    def _try(self) -> None:
        """Compile, on tensors of the signature's kind."""
        leaves, shapes, (length, wide), device, _ = self.signature
        if shapes is None:  # of all different sizes: no guard shall say that two are equal
            shapes = [[((16 + i,), (1,))] * len(own) for i, own in enumerate(leaves)]
        tensors = [
            torch.empty_strided(*layout, dtype=dtype, device=device).zero_()
            for own, looks in zip(leaves, shapes, strict=True)
            for dtype, layout in zip(own, looks, strict=True)
        ]
        self.compiled(tensors, torch.ones(length, dtype=wide, device=device))


def own_code(function: FunctionType) -> FunctionType:
    """A function with a code object that no other one has.

    torch.compile counts the graphs of a code object, and gives up after eight: functions that come
    out of one `def` would share them.
    """
    code = function.__code__.replace()
    own = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made = FunctionType(code, *own)
    functools.update_wrapper(made, function)
    return made


def is_limit(error: Exception) -> bool:
    """Has torch.compile made as many graphs of a code object as it will?"""
    return "RecompileLimit" in type(error).__name__ or "CacheLimit" in type(error).__name__


def is_compile_error(error: Exception) -> bool:
    """Does an error come from compiling, not from what was compiled?"""
    from torch._dynamo.exc import TorchDynamoException

    return (
        isinstance(error, (TorchDynamoException, OSError))
        or is_limit(error)
        or "inductor" in repr(error).lower()
    )


def line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def tell(message: str) -> None:
    """Warn, once a process."""
    if message not in _told:
        _told.add(message)
        warnings.warn(f"functional_optim: {message}.", RuntimeWarning, stacklevel=4)
