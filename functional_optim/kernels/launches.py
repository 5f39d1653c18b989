"""A loaded library that steps many tensors, and a call of it."""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.storage import SlotSpec
from functional_optim.kernels import disk_cache, watch
from functional_optim.kernels.building import Unsuitable


def symbol_of(name: str | None) -> str:
    """The symbol of a library's function: its own, since several libraries may be one file."""
    own = f"{next(_unnamed)}" if name is None else name.removesuffix(".so")
    return f"functional_optim_{own}"


_unnamed = itertools.count()


class Native:
    """A loaded library.

    symbol: of its function. outputs: how many sums it returns. name: under which it is kept, if it
    can be. found: it was kept before, and not built by this process. layout: integers that the
    library says of itself.
    """

    def __init__(
        self, path: Path, symbol: str, outputs: int, name: str | None, *, found: bool
    ) -> None:
        self.outputs = outputs
        self.name = name
        self.found = found
        library = ctypes.CDLL(str(path))
        self.layout = _layout(library, f"{symbol}_layout")
        self.call = getattr(library, symbol)
        self.call.restype = None
        self.call.argtypes = [ctypes.c_void_p]
        self.address: Any = ctypes.cast(self.call, ctypes.c_void_p).value
        self.stages: Any = getattr(library, f"{symbol}_stages", None)
        if self.stages is not None:
            self.stages.restype = None
            self.stages.argtypes = [ctypes.c_void_p, ctypes.c_int64]


def _layout(library: ctypes.CDLL, symbol: str) -> tuple[int, ...]:
    """The integers of an array in a library that begins with its length; none where there is no
    such array."""
    try:
        length = ctypes.c_int64.in_dll(library, symbol).value
    except ValueError:
        return ()
    return tuple((ctypes.c_int64 * (1 + length)).in_dll(library, symbol))[1:]


class Launch:
    """A library with the tensors that it goes over; one thread may call it at a time.

    rows: for each tensor the addresses of the parameter and its slots. threads: how many share the
    work. dtype: in which the library reads numbers. each: whether it sums over each tensor by
    itself.
    """

    def __init__(
        self,
        native: Native,
        count: int,
        rows: array.array[int],
        threads: int,
        dtype: torch.dtype,
        *,
        each: bool,
    ) -> None:
        self.native = native
        self.each = each
        self.wide = dtype is torch.float64
        self.rows = rows
        self.totals = array.array("d", bytes(8 * native.outputs * (count if each else 1)))
        self.call = array.array("q", bytes(8 * 14))
        self.call[2], self.call[4] = rows.buffer_info()[0], count
        self.call[6], self.call[7] = threads, self.totals.buffer_info()[0]
        self.call[8], self.call[10] = READER, native.outputs if each else 0
        self.address = self.call.buffer_info()[0]

    def ready(
        self, grads: list[Tensor], numbers: list[tuple[Any, ...]]
    ) -> Callable[[], tuple[float, ...]]:
        """The call, which this object must outlive: it returns the sums over all blocks.

        Args:
            grads: each tensor's gradient, plain tensors.
            numbers: of each rule.
        """
        if READER and watch.module is not None:
            launch, function = watch.module.launch, self.native.address
            return partial(
                launch, function, self.address, grads, numbers, self.wide, self.native.outputs
            )
        return partial(self._through_ctypes, grads, numbers)

    def _through_ctypes(
        self, grads: list[Tensor], numbers: list[tuple[Any, ...]]
    ) -> tuple[float, ...]:
        vector = array.array("d" if self.wide else "f", itertools.chain(*numbers))
        self._run(grads, vector.buffer_info()[0], 0)
        return tuple(self.totals)

    def with_rows(self, grads: list[Tensor], rows: Tensor) -> tuple[float, ...]:
        """Call it with numbers for each tensor. rows: a row of them each."""
        self._run(grads, rows.data_ptr(), rows.stride(0))
        return tuple(self.totals)

    def stage(self, given: int, rows: Tensor, found: Tensor | None) -> list[int]:
        """This call as one of several, for `Stages`.

        given: where the gradients will be listed. rows: the numbers, a row for each tensor. found:
        where the sums go, a row for each tensor; None: nowhere else.
        """
        self.call[3], self.call[5], self.call[9] = given, rows.data_ptr(), rows.stride(0)
        target = (0, 0) if found is None else (found.data_ptr(), found.stride(0))
        count = len(self.totals) // max(self.native.outputs, 1)
        totals = self.totals.buffer_info()[0]
        own = (self.native.address, self.address, totals, count, self.native.outputs)
        return [*own, *target, int(self.wide)]

    def _run(self, grads: list[Tensor], numbers: int, stride: int) -> None:
        given = array.array("q", list(map(id if READER else Tensor.data_ptr, grads)))
        self.call[3], self.call[5], self.call[9] = given.buffer_info()[0], numbers, stride
        ctypes.memset(self.totals.buffer_info()[0], 0, 8 * len(self.totals))
        self.native.call(self.address)


class Stages:
    """Several launches, made by one call. count: of the tensors that they go over.

    Only for libraries that `cpu` has built. All tensors that they read must outlive it.
    """

    def __init__(self, count: int) -> None:
        self.given = array.array("q", bytes(8 * count))
        self.launches: list[Launch] = []
        self.calls = array.array("q")

    def add(self, launch: Launch, first: int, rows: Tensor, found: Tensor | None) -> None:
        """One more launch, over the tensors from `first` on. The rest as in `Launch.stage`."""
        self.launches.append(launch)
        at = self.given.buffer_info()[0] + 8 * first
        self.calls.extend(launch.stage(at, rows, found))

    def run(self, grads: list[Tensor]) -> tuple[float, ...]:
        """Make all launches, and return the sums of the last one. grads: of all tensors."""
        self.given[:] = array.array("q", list(map(id if READER else Tensor.data_ptr, grads)))
        last = self.launches[-1]
        last.native.stages(self.calls.buffer_info()[0], len(self.launches))
        return tuple(last.totals)


def _reader() -> int:
    """The address of torch's function from a tensor object to its data, which Inductor's own
    kernels use; 0 where this torch has none."""
    dynamo = getattr(torch._C, "_dynamo", None)
    guards = getattr(dynamo, "guards", None)
    return getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", 0)


READER = _reader()


def load(name: str, outputs: int) -> Native | None:
    """The library that an earlier process kept under this name."""
    path = disk_cache.find(name)
    if path is None:
        return None
    try:
        native = Native(path, symbol_of(name), outputs, name, found=True)
    except (OSError, AttributeError):
        return None
    watch.load()
    return native


def compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise Unsuitable unless a library has done what the rule does."""
    for x, y in zip(results, expected, strict=True):
        loose = 1e-2 if x.element_size() == 2 else 1e-4
        if not torch.allclose(x, y, rtol=loose, atol=loose, equal_nan=True):
            raise Unsuitable("a library that does something else than the rule")


WHOLE_NUMBER = 1234567.0
"""A key, for a library that is tried."""


def opened(codec: Any, stored: Sequence[Tensor], like: Tensor) -> Tensor:
    """What a rule sees of a packed tensor. like: a tensor of its shape."""
    return codec.decode(tuple(stored), SlotSpec(like.shape, torch.float32))


def compare_packed(
    codec: Any, stored: Sequence[Sequence[Tensor]], expected: Sequence[Tensor], key: float | None
) -> None:
    """Raise Unsuitable unless tensors were packed as the codec packs what is expected, but for a
    code now and then."""
    wanted = [opened(codec, codec.encode(x, key), x) for x in expected]
    found = [opened(codec, own, x) for own, x in zip(stored, expected, strict=True)]
    pairs = zip(found, wanted, strict=True)
    differ = torch.cat([(x - y).abs() > 1e-4 * y.abs() for x, y in pairs])
    if float(differ.float().mean()) > 0.02:
        raise Unsuitable("a library that packs slots in another way than the codec")
