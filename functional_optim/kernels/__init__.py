"""Compiling a rule once: the only package that knows Inductor from the inside.

Called through torch.compile, a kernel would spend 30–60 µs on guards and wrappers each time. So the
graph is compiled below that, through doors that are not public. Each way is left for the next when
it is missing, has changed or does not suit the rule:

1. `sweep`: a library that goes over all tensors of a model in one call (`native`), kept on disk
   (`store`) under a name that tells the rule (`keys`).
2. `build`: Inductor's own callable, for one signature and fixed shapes (`tracing`).
3. plain torch.compile, and at last the rule itself, eagerly, with a warning.

`strict` turns each of these warnings into an error.
"""

from __future__ import annotations

import gc
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import native, store, watch
from functional_optim.kernels.keys import fingerprint, static_key
from functional_optim.kernels.native import Addresses, Native, Sweep, cut
from functional_optim.kernels.store import folder
from functional_optim.kernels.tracing import Body, Signature, lower, split_leaves, trace

__all__ = [
    "Addresses",
    "Body",
    "Kernel",
    "Native",
    "Signature",
    "Sweep",
    "build",
    "bypass",
    "count",
    "cut",
    "fingerprint",
    "folder",
    "is_kept",
    "same_entries",
    "static_key",
    "sweep",
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
    kernel = _once((key, signature), lambda give_way: _compile(body, signature, give_way), strict)
    if strict and isinstance(kernel, Public):
        kernel.insist()
    return kernel


def sweep(
    key: Any,
    functions: tuple[Any, ...],
    body: Body,
    signature: Signature,
    outputs: int,
    *,
    strict: bool = False,
) -> Native | None:
    """The native library for a body of one leaf of any size; None if there can be none.

    Args:
        key: stands for the body in this process.
        functions: all that the body calls and depends on, for its name on disk.
        body: returns the sums of one leaf, as many as `outputs`, or an empty tuple.
        signature: one leaf, without shapes.
        outputs: how many numbers the body measures.
        strict: raise where a library could be built if the compiler worked.

    Raises:
        RuntimeError: if `strict`, and building it fails.
    """
    if signature.device.type != "cpu" or not set(signature.leaves[0]) <= native.CTYPES.keys():
        return None
    return _once(
        ("native", key, signature),
        lambda give_way: _native(functions, body, signature, outputs, give_way),
        strict,
    )


def watcher() -> Any:
    """The library that looks over objects, or None (see `watch`)."""
    return watch.module if native.READER else None


def same_entries(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Do two dicts hold the very same objects, in the same order?"""
    if watch.module is not None:
        return watch.module.same_entries(a, b)
    same_keys = len(a) == len(b) and all(map(operator.is_, a, b))
    return same_keys and all(map(operator.is_, a.values(), b.values()))


def bypass() -> bool:
    """Would a kernel, which reads and writes memory directly, pass by something that must see it?

    A mode such as make_fx's sees what goes through the dispatcher; tensors inside a transform of
    torch.func, such as vmap, have no memory of their own.
    """
    return _modes() > 0 or transformed() or _early_modes() > 0


def transformed() -> bool:
    """Are we inside a transform of torch.func, such as vmap?"""
    return _functorch() is not None


_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch


def is_kept(kernel: Native) -> bool:
    """Will the next process find this kernel?"""
    return kernel.name is not None and store.find(kernel.name) is not None


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
            raise _refusal(f"{what} ({_line(error)})") from error
        _gave_way.add(full)
        _tell(f"{what} ({_line(error)})")

    def missing() -> bool:
        return full not in _built or (strict and full in _gave_way)

    if missing():
        with _lock:
            if missing():
                with _uncollected():
                    _built[full] = make(give_way)
                if strict:
                    _gave_way.discard(full)
    return _built[full]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: while 1,500 modules of the compiler are imported there is
    none, and looking for it takes 0.9 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _refusal(what: str) -> RuntimeError:
    return RuntimeError(
        f"functional_optim: a strict step must be compiled, but {what}. Nothing was stepped; put "
        "this right, or compile without strict, which falls back with a warning."
    )


def _native(
    functions: tuple[Any, ...],
    body: Body,
    signature: Signature,
    outputs: int,
    give_way: GiveWay,
) -> Native | None:
    described = fingerprint(functions, tuple(map(str, signature)), outputs)
    name = None if described is None else store.name_of(described)
    kept = None if name is None else native.load(name, outputs)
    if kept is not None:
        return kept
    with store.turn(name):
        kept = None if name is None else native.load(name, outputs)
        if kept is not None:  # by a process that came first
            return kept
        try:
            return native.compile(name, body, signature, outputs)
        except native.Unsuitable:
            return None
        except Exception as error:  # private interfaces: anything may have moved
            give_way("no native kernel can be built here", error)
            return None


def _compile(body: Body, signature: Signature, give_way: GiveWay) -> Kernel:
    if signature.device.type == "cpu":
        try:
            return lower(trace(body, signature), signature.threads)
        except Exception as error:  # a private interface: anything may have moved
            give_way("the direct call of compiled kernels is not available here", error)
    return Public(body, signature)


class Public:
    """The same through torch.compile; eager, with a warning, if no compiler works."""

    def __init__(self, body: Body, signature: Signature) -> None:
        self.signature = signature
        self.known = len(signature.leaves) if signature.shapes is None else 0
        self.works = True

        def flat(tensors: list[Tensor], numbers: Tensor) -> Any:
            return body(split_leaves(tensors, signature), numbers)

        self.flat = flat
        self.compiled = torch.compile(flat, fullgraph=True, dynamic=signature.shapes is None)

    @torch.no_grad()
    def __call__(self, args: list[Any]) -> Any:
        tensors, numbers = [x.detach() for x in args[self.known : -1]], args[-1]
        if self.signature.shapes is None:
            tensors = [x.as_strided((x.numel(),), (1,)) for x in tensors]
        if self.works:
            try:
                return self.compiled(tensors, numbers)
            except Exception as error:
                if not _is_compile_error(error):
                    raise
                self.works = False
                _tell(f"torch.compile failed ({_line(error)}); the steps run eagerly")
        return self.flat(tensors, numbers)

    @torch.no_grad()
    def insist(self) -> None:
        """Compile now, on tensors of the signature's kind; raise RuntimeError if that fails."""
        leaves, shapes, (length, wide), device, _ = self.signature
        layouts = [[((16,), (1,))] * len(own) for own in leaves] if shapes is None else shapes
        tensors = [
            torch.empty_strided(*layout, dtype=dtype, device=device).zero_()
            for own, looks in zip(leaves, layouts, strict=True)
            for dtype, layout in zip(own, looks, strict=True)
        ]
        try:
            self.compiled(tensors, torch.ones(length, dtype=wide, device=device))
        except Exception as error:
            raise _refusal(f"torch.compile failed ({_line(error)})") from error
        self.works = True


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
