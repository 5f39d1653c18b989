"""Compiling a rule once: the only file that knows Inductor from the inside.

A kernel is a function of a few tensors seen as 1-D, of any size, and one vector of numbers. Called
through torch.compile it would spend 30–60 µs on guards and wrappers each time; the graph that
Inductor makes, called directly, takes 1–2 µs. That door is not public, so it is tried first and
left for plain torch.compile when it is missing or has changed.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.fx.experimental.proxy_tensor import get_proxy_mode

Kernel = Callable[[list[Any]], Any]
"""Called with one flat list: a size for each leaf (if sizes are dynamic), its tensors, numbers."""

BANDS = ((0, 1 << 12), ((1 << 12) + 1, (1 << 15) - 1), (1 << 15, 1 << 62))
"""Size classes of tensors, in elements, first and last.

A tensor of the third class gets a kernel with OpenMP: 2¹⁵ is torch's own grain size for CPU loops.
Below it, Inductor sums up to 2¹² elements plainly and more of them in cascades.
"""


def band_of(numel: int) -> int:
    """The index of the size class of a tensor."""
    return next(i for i, (_, last) in enumerate(BANDS) if numel <= last)


class Signature(NamedTuple):
    """What a kernel is specialized on, beside its code.

    leaves: for each leaf the dtypes of its tensors. shapes: for each leaf the (shape, strides) of
    its tensors, or None if the leaves are seen as 1-D of any size. sizes: the least and the largest
    number of elements it must do. numbers: length of the vector of numbers, and its dtype.
    threads: 1 for a serial kernel.
    """

    leaves: tuple[tuple[torch.dtype, ...], ...]
    shapes: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] | None
    sizes: tuple[int, int]
    numbers: tuple[int, torch.dtype]
    device: torch.device
    threads: int


_built: dict[Any, Kernel] = {}
_lock = threading.RLock()
_told: set[str] = set()


def build(
    key: Any, body: Callable[[list[list[Tensor]], Tensor], Any], signature: Signature
) -> Kernel:
    """The kernel for `body(leaves, numbers)`, compiled at most once per key and signature.

    `key` stands for the body: equal keys must mean equal code and constants.
    """
    full = (key, signature)
    found = _built.get(full)
    if found is None:
        with _lock:
            found = _built.get(full)
            if found is None:
                found = _built[full] = _compile(body, signature)
    return found


def bypass() -> bool:
    """Would a kernel, which reads and writes memory directly, pass by something that must see it?

    make_fx records what goes through the dispatcher; tensors inside a transform of torch.func, such
    as vmap, have no memory of their own.
    """
    return get_proxy_mode() is not None or peek_interpreter_stack() is not None


def count() -> int:
    """How many kernels this process has built: what a test of recompilation counts."""
    return len(_built)


def static_key(fn: Any) -> Any:
    """A hashable stand-in for a function: its code, and the constants that it closes over.

    Raises:
        TypeError: if it closes over a tensor, whose value a kernel would freeze.
    """
    if isinstance(fn, types.FunctionType):
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        named = tuple(sorted((fn.__kwdefaults__ or {}).items()))
        constants = [static_key(x) for x in (*cells, fn.__defaults__, named)]
        return (fn.__code__, *constants)
    if isinstance(fn, Tensor):
        raise TypeError(
            "the update of a rule closes over a tensor, which a compiled kernel would freeze; "
            "return it from scalars instead, and take it as a number."
        )
    if isinstance(fn, tuple):
        return (type(fn), *[static_key(x) for x in fn])
    try:
        hash(fn)
    except TypeError:
        return (type(fn), id(fn), _Keep(fn))
    return (type(fn), fn)


class _Keep:
    """Holds an unhashable constant, so that its id stays its own while a kernel's key names it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keep) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _compile(body: Callable[[list[list[Tensor]], Tensor], Any], signature: Signature) -> Kernel:
    if signature.device.type == "cpu":
        try:
            return _direct(body, signature)
        except Exception as error:  # a private interface: anything may have moved
            _tell(f"the direct call of compiled kernels is not available here ({_line(error)})")
    return _public(body, signature)


def _unflatten(args: Sequence[Any], signature: Signature) -> list[list[Tensor]]:
    leaves, at = [], 0
    for dtypes in signature.leaves:
        leaves.append(list(args[at : at + len(dtypes)]))
        at += len(dtypes)
    return leaves


def _direct(body: Callable[[list[list[Tensor]], Tensor], Any], signature: Signature) -> Kernel:
    """Trace with make_fx, compile with Inductor, and return Inductor's own callable."""
    with warnings.catch_warnings():  # Inductor's imports warn of torch's own deprecations
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor.compile_fx import compile_fx_inner
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    least, most = signature.sizes
    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env)
    sizes: list[Any] = []
    tensors: list[Any] = []
    with mode:
        for i, dtypes in enumerate(signature.leaves):
            if signature.shapes is None:
                hint = min(max(least * 4, 1_000), most) + i
                symbol = env.create_symbol(
                    hint, ConstantSource(f"size{i}"), dynamic_dim=DimDynamic.DYNAMIC
                )
                size = env.create_symintnode(symbol, hint=hint, source=None)
                sizes.append(size)
                layouts: Any = [((size,), (1,))] * len(dtypes)
            else:
                layouts = signature.shapes[i]
            tensors += [
                torch.empty_strided(shape, strides, dtype=dtype, device=signature.device)
                for (shape, strides), dtype in zip(layouts, dtypes, strict=True)
            ]
        length, dtype = signature.numbers
        numbers = torch.empty(length, dtype=dtype, device=signature.device)
    known = len(sizes)

    def flat(*args: Any) -> Any:
        return body(_unflatten(args[known:-1], signature), args[-1])

    inputs = [*sizes, *tensors, numbers]
    with mode, torch.no_grad():
        graph = make_fx(flat, tracing_mode="real", decomposition_table=select_decomp_table())(
            *inputs
        )
    options = {
        "size_asserts": False,
        "alignment_asserts": False,
        "emulate_precision_casts": True,
        "cpp.threads": signature.threads,
        "cpp.dynamic_threads": False,
    }
    with (
        config.patch(options),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        torch.no_grad(),
    ):
        kernel = compile_fx_inner(graph, inputs, is_inference=True, static_input_idxs=[])
    for guard in env.guards:
        for size in signature.sizes:
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size)) != True:  # noqa: E712
                raise RuntimeError(f"the kernel holds only where {guard.expr}")
    return kernel


def _public(body: Callable[[list[list[Tensor]], Tensor], Any], signature: Signature) -> Kernel:
    """The same through torch.compile; eager, with a warning, if no compiler works."""
    known = len(signature.leaves) if signature.shapes is None else 0

    def flat(tensors: list[Tensor], numbers: Tensor) -> Any:
        return body(_unflatten(tensors, signature), numbers)

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
