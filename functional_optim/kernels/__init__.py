"""Compiling a rule once: the only package that knows Inductor from the inside.

Called through torch.compile, a kernel would spend 30–60 µs on guards and wrappers each time. So the
graph is compiled below that, through doors that are not public. Each way is left for the next when
it is missing, has changed or does not suit the rule:

1. `sweep`: a library that goes over all tensors of a model in one call (`cpu`, and for rules that
   sum over parts of tensors `dynamic_shapes`), kept on disk (`disk_cache`) under a name that tells
   the rule (`fingerprints`). `sweep_all` builds several as one file.
2. `build`: Inductor's own callable, for one signature and fixed shapes (`tracing`).
3. plain torch.compile, and at last the rule itself, eagerly, with a warning.

`strict` turns each of these warnings into an error.
"""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.importing import uncollected
from functional_optim.kernels import (
    compiler,
    cpu,
    disk_cache,
    dynamic_shapes,
    triton_builds,
    watch,
)
from functional_optim.kernels.building import CTYPES, Unsuitable
from functional_optim.kernels.builds import CompilerRun, Draft
from functional_optim.kernels.compiler import NoCompiler
from functional_optim.kernels.cpu import MultiTensorLaunch
from functional_optim.kernels.disk_cache import folder
from functional_optim.kernels.drivers import DRIVERS
from functional_optim.kernels.dynamic_shapes import ShapedLaunch, ShapeSignature
from functional_optim.kernels.failures import (
    cause,
    is_compile_error,
    is_limit,
    line,
    refusal,
    tell,
    tell_failed,
)
from functional_optim.kernels.fingerprints import fingerprint, static_key
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.launches import READER, Launch, Native, Stages, load
from functional_optim.kernels.tracing import (
    Body,
    PackedSlot,
    Signature,
    lower_with_products,
    split_leaves,
    trace,
)
from functional_optim.kernels.triton_builds import CaptureError, TritonKernel
from functional_optim.kernels.triton_launch import Gradients, TableLaunch
from functional_optim.kernels.triton_source import Source

__all__ = [
    "DRIVERS",
    "READER",
    "Body",
    "CaptureError",
    "Gradients",
    "Kernel",
    "Launch",
    "MultiTensorLaunch",
    "Native",
    "NoCompiler",
    "PackedSlot",
    "Request",
    "ShapeSignature",
    "ShapedLaunch",
    "Signature",
    "Source",
    "Stages",
    "TableLaunch",
    "TritonKernel",
    "build",
    "capturing",
    "cause",
    "count",
    "fingerprint",
    "folder",
    "is_compile_error",
    "is_kept",
    "is_limit",
    "line",
    "own_code",
    "refusal",
    "require_compiler",
    "same_entries",
    "static_key",
    "sweep",
    "sweep_all",
    "table_kernel",
    "tell",
    "tell_failed",
    "watcher",
]

Kernel = Callable[[list[Any]], Any]
"""Called with one flat list: a size for each leaf (if sizes are dynamic), its tensors, numbers."""

_built: dict[Any, Any] = {}
_lock = threading.RLock()
_begun: dict[Any, Begun] = {}
"""Libraries that are being built."""
_gave_way: set[Any] = set()
"""Keys of kernels that are not what was tried first."""


def build(key: Any, body: Body, signature: Signature, *, strict: bool = False) -> Kernel:
    """The kernel for `body(leaves, numbers)`, compiled at most once per key and signature.

    `key` stands for the body: equal keys must mean equal code and constants.

    Raises:
        RuntimeError: if `strict`, and the kernel cannot be compiled.
    """
    return _once((key, signature), lambda give_way: _compile(body, signature, give_way), strict)


class Request(NamedTuple):
    """A native library for a body of one leaf on the CPU.

    key: stands for the body in this process. functions: all that the body calls and depends on, for
    its name on disk. body: returns the sums of one leaf, as many as `outputs`, or an empty tuple.
    signature: one leaf, without shapes, or with dimensions of any size.
    """

    key: Any
    functions: tuple[Any, ...]
    body: Body
    signature: Signature | ShapeSignature
    outputs: int

    def fits(self) -> bool:
        """Whether native kernels take tensors of these dtypes."""
        own = self.signature
        dtypes = own.dtypes if isinstance(own, ShapeSignature) else own.leaves[0]
        return set(dtypes) <= CTYPES.keys()

    def names(self) -> list[str]:
        """Under which it is kept, and under which else it may be found; none if they cannot be
        told."""
        described = self._described()
        return [] if described is None else disk_cache.names_of(described)

    def triton_name(self) -> str | None:
        """Under which the rule's Triton kernel is kept; None if that cannot be told."""
        described = self._described()
        return None if described is None else disk_cache.name_of(described, suffix=".triton")

    def kept(self, names: Sequence[str]) -> Native | None:
        """What an earlier process kept, or came with the package."""
        found = (load(name, self.outputs) for name in names)
        return next((native for native in found if native is not None), None)

    def _described(self) -> str | None:
        return fingerprint(self.functions, tuple(map(str, self.signature)), self.outputs)

    def draft(self, name: str | None) -> Draft:
        """It, before it is built.

        Raises:
            Unsuitable: if there can be none.
            Exception: whatever goes wrong in Inductor.
        """
        if isinstance(self.signature, ShapeSignature):
            return dynamic_shapes.draft(name, self.body, self.signature, self.outputs)
        return cpu.draft(name, self.body, self.signature, self.outputs)


def sweep(wanted: Request, *, strict: bool = False) -> Native | None:
    """A native library; None if there can be none.

    strict: raise where it could be built if the compiler worked.

    Raises:
        RuntimeError: if `strict`, and building it fails.
    """
    if not wanted.fits():
        return None
    return _once(
        ("native", wanted.key, wanted.signature), lambda give_way: _native(wanted, give_way), strict
    )


def table_kernel(wanted: Request, device: torch.device, *, strict: bool = False) -> Any:
    """The Triton kernels of a rule for a device (a `TritonKernel`); None if there can be none.

    wanted: the rule as the CPU sees it, where it is traced, on one leaf without a shape.

    Raises:
        RuntimeError: if `strict`, and the rule cannot be traced.
    """

    signature = wanted.signature
    assert isinstance(signature, Signature)

    def made(give_way: GiveWay) -> TritonKernel | None:
        try:
            name = wanted.triton_name()
            return triton_builds.build(wanted.body, signature, wanted.outputs, device, name)
        except Unsuitable as error:
            tell(f"no Triton kernel is known for {error}; its steps go through torch.compile")
            return None
        except Exception as error:  # of private interfaces
            give_way("no Triton kernel can be written here", error)
            return None

    if not wanted.fits():
        return None
    return _once(("triton", wanted.key, signature, device), made, strict)


def capturing() -> bool:
    """Whether operations on some device are being recorded for replay."""
    for driver in DRIVERS.values():  # noqa: SIM110  (in each step; a generator takes longer)
        if driver.capturing():
            return True
    return False


def sweep_all(every: Sequence[Request], *, wait: bool = True) -> None:
    """Build what is missing of some libraries at once, for `sweep`.

    Nothing is told of what cannot be built: that is up to `sweep`, which tries it by itself.

    wait: until they are there. False: until `sweep` asks for one of them.
    """
    full = {_full(("native", x.key, x.signature)): x for x in every if x.fits()}
    missing = {key: x for key, x in full.items() if key not in _built and key not in _begun}
    if len(missing) >= (2 if wait else 1):
        with _lock:
            begun = let_through(_uncollected, partial(_begin, missing))
            if wait and begun is not None:
                let_through(begun.finish)


class Begun:
    """Libraries that are being built. turns: in which nobody else builds them."""

    def __init__(self, keys: list[Any], build: CompilerRun, turns: ExitStack) -> None:
        self.keys = keys
        self.build = build
        self.turns = turns
        _begun.update(dict.fromkeys(self.keys, self))

    def finish(self) -> None:
        """Wait for them; those that cannot be had are left out."""
        try:
            with suppress(Exception):
                _built.update(zip(self.keys, self.build.finish(), strict=True))
        finally:
            for key in self.keys:
                _begun.pop(key, None)
            self.turns.close()


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


def _full(key: Any) -> Any:
    """A key with the dtype of the tensors that a rule makes from numbers."""
    return (key, torch.get_default_dtype())


def _once(full: Any, make: Callable[[GiveWay], Any], strict: bool) -> Any:
    """What `make` returns, made once; again if it gave way then and must not now."""
    full = _full(full)

    def give_way(what: str, error: Exception) -> None:
        if strict:
            raise refusal(cause(what, error)) from error
        _gave_way.add(full)
        tell_failed(what, error)

    def missing() -> bool:
        return full not in _built or (strict and full in _gave_way)

    if missing():
        with _lock:
            if full in _begun:
                let_through(_begun[full].finish)
            if missing():
                _built[full] = let_through(_uncollected, partial(make, give_way))
                if strict:
                    _gave_way.discard(full)
    return _built[full]


def _uncollected(make: Callable[[], Any]) -> Any:
    """What `make` returns, which may import the 1,500 modules of the compiler."""
    with uncollected():
        return make()


def _native(wanted: Request, give_way: GiveWay) -> Native | None:
    names = wanted.names()
    name = names[0] if names else None
    kept = wanted.kept(names)
    if kept is not None:
        return kept
    for begun in {x for x in _begun.values() if name in x.build.names()}:
        begun.finish()  # it has the turn that is waited for next
    with disk_cache.turn(name):
        kept = wanted.kept(names)
        if kept is not None:  # by a process that came first
            return kept
        try:
            compiler.require()
            (native,) = CompilerRun([wanted.draft(name)]).finish()
        except Unsuitable:
            return None
        except Exception as error:  # private interfaces: anything may have moved
            give_way("no native kernel can be built here", compiler.explained(error))
            return None
        return native


def _begin(missing: dict[Any, Request]) -> Begun | None:
    """Begin to build libraries, but those that are kept, or that another process is building."""
    with ExitStack() as turns, suppress(Exception):
        drafts: dict[Any, Draft] = {}
        for key, wanted in missing.items():
            names = wanted.names()
            name = names[0] if names else None
            kept = wanted.kept(names)
            if kept is None and turns.enter_context(disk_cache.turn(name, wait=False)):
                kept = wanted.kept(names)  # by a process that came first
                if kept is None:
                    _draft(key, name, wanted, drafts)
            if kept is not None:
                _built[key] = kept
        if drafts:
            build = CompilerRun(list(drafts.values()))
            return Begun(list(drafts), build, turns.pop_all())
    return None


def _draft(key: Any, name: str | None, wanted: Request, drafts: dict[Any, Draft]) -> None:
    """Add a library to those that are built, if there can be one."""
    try:
        compiler.require()
        drafts[key] = wanted.draft(name)
    except Unsuitable:
        _built[key] = None
    except Exception:  # as `sweep` will see
        return


def _compile(body: Body, signature: Signature, give_way: GiveWay) -> Kernel:
    if signature.device.type == "cpu":
        try:
            compiler.require()
            with warnings.catch_warnings():  # of the compiler, about its own code
                warnings.simplefilter("ignore")
                return lower_with_products(trace(body, signature), signature.threads)
        except Exception as error:  # a private interface: anything may have moved
            what = "the direct call of compiled kernels is not available here"
            give_way(what, compiler.explained(error))
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
        try:
            require_compiler(signature.device)
            self._renew()
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
        leaves, shapes, (length, wide), device, *_ = self.signature
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


def require_compiler(device: torch.device) -> None:
    """Go on only if what a device needs for compiled steps is there.

    Raises:
        NoCompiler: if there is no C++ compiler, which the CPU needs.
    """
    if device.type == "cpu":
        compiler.require()
