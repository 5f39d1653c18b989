"""A kernel as a small library of its own, which goes over any number of tensors in one call.

Inductor writes the C++ of a rule for one tensor. Here it is taken before Inductor compiles it, and
put into a library with a loop over blocks of many tensors: a step is then one call of 2 µs and one
parallel region, however many tensors there are, and the library can be kept on disk.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels import disk_cache, watch
from functional_optim.kernels.tracing import BLOCK, Body, Signature, Trace, lower, quiet, trace

SYMBOL = "functional_optim_sweep"
PROBE = 37
"""Elements of the tensors that a new library is tried on."""

CTYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "at::BFloat16",
    torch.float16: "at::Half",
}
"""The C++ type of each dtype that a native kernel takes."""


class Unsuitable(Exception):
    """A rule that Inductor does not turn into one loop over one tensor's memory."""


class Native:
    """A loaded library.

    outputs: how many sums it returns. name: under which it is kept, if it can be. found: it was
    kept before, and not built by this process.
    """

    def __init__(self, path: Path, outputs: int, name: str | None, *, found: bool) -> None:
        self.outputs = outputs
        self.name = name
        self.found = found
        self.call = getattr(ctypes.CDLL(str(path)), SYMBOL)
        self.call.restype = None
        self.call.argtypes = [ctypes.c_void_p]
        self.address = ctypes.cast(self.call, ctypes.c_void_p).value


class MultiTensorLaunch:
    """A library with the tensors that it goes over; one thread may call it at a time.

    sizes: of the tensors. rows: for each tensor the addresses of the parameter and its slots.
    threads: how many share the work. dtype: in which the library reads numbers. each: whether it
    sums over each tensor by itself.
    """

    def __init__(
        self,
        native: Native,
        sizes: Sequence[int],
        rows: array.array[int],
        threads: int,
        dtype: torch.dtype,
        *,
        each: bool = False,
    ) -> None:
        blocks = cut(sizes)
        self.native = native
        self.each = each
        self.wide = dtype is torch.float64
        self.memory = blocks, rows
        self.totals = array.array("d", bytes(8 * native.outputs * (len(sizes) if each else 1)))
        self.call = array.array("q", bytes(8 * 11))
        self.call[0], self.call[1] = blocks.buffer_info()[0], len(blocks) // 3
        self.call[2], self.call[4] = rows.buffer_info()[0], len(sizes)
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
        vector = array.array("d" if self.wide else "f", chain(*numbers))
        self._run(grads, vector.buffer_info()[0], 0)
        return tuple(self.totals)

    def with_rows(self, grads: list[Tensor], rows: Tensor) -> tuple[float, ...]:
        """Call it with numbers for each tensor. rows: a row of them each."""
        self._run(grads, rows.data_ptr(), rows.stride(0))
        return tuple(self.totals)

    def for_each(self, grads: list[Tensor], rows: Tensor) -> Tensor:
        """The sums over each tensor, a row each, in float64."""
        self._run(grads, rows.data_ptr(), rows.stride(0))
        return torch.frombuffer(self.totals, dtype=torch.float64).reshape(len(grads), -1)

    def _run(self, grads: list[Tensor], numbers: int, stride: int) -> None:
        given = array.array("q", list(map(id if READER else Tensor.data_ptr, grads)))
        self.call[3], self.call[5], self.call[9] = given.buffer_info()[0], numbers, stride
        ctypes.memset(self.totals.buffer_info()[0], 0, 8 * len(self.totals))
        self.native.call(self.address)


def _reader() -> int:
    """The address of torch's function from a tensor object to its data, which Inductor's own
    kernels use; 0 where this torch has none."""
    dynamo = getattr(torch._C, "_dynamo", None)
    guards = getattr(dynamo, "guards", None)
    return getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", 0)


READER = _reader()


def cut(sizes: Sequence[int]) -> array.array[int]:
    """Blocks that cover tensors of these sizes: of each one the index of its tensor, its first
    element and its length."""
    blocks = array.array("q")
    for i, size in enumerate(sizes):
        for at in range(0, size, BLOCK):
            blocks.extend((i, at, min(BLOCK, size - at)))
    return blocks


def load(name: str, outputs: int) -> Native | None:
    """The library that an earlier process kept under this name."""
    path = disk_cache.find(name)
    if path is None:
        return None
    try:
        native = Native(path, outputs, name, found=True)
    except (OSError, AttributeError):
        return None
    watch.load()
    return native


def compile(name: str | None, body: Body, signature: Signature, outputs: int) -> Native:
    """Build the library of a rule, try it against the rule itself, and keep it under a name.

    Raises:
        Unsuitable: if the rule is no single loop, or the library does something else than the rule.
        Exception: whatever goes wrong in Inductor or the C++ compiler.
    """
    with quiet():
        from torch._inductor.cpp_builder import get_cpp_compiler
    beside = watch.Build()
    beside.start(get_cpp_compiler())
    try:
        source = write(trace(body, signature), signature, outputs)
        with tempfile.TemporaryDirectory(prefix="functional_optim-") as scratch:
            library = _build(source, Path(scratch))
            native = Native(library, outputs, name, found=False)
            _try(native, body, signature)
            if name is not None and _is_usual():
                disk_cache.keep(name, library)
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C waits for nothing
            beside.stop()
        raise
    finally:
        beside.finish()
    return native


def _is_usual() -> bool:
    """Does Inductor compile for CPUs as it does in a process that has changed no setting?

    Which settings a kept library was compiled with is not in its name.
    """
    from torch._inductor import config

    entries = vars(config)["_config"].items()
    return all(
        getattr(config, name) == entry.default for name, entry in entries if name.startswith("cpp.")
    )


class CapturedCall(NamedTuple):
    """A kernel as Inductor wrote it, and what its wrapper handed to it."""

    types: list[str]
    source: str
    given: list[tuple[Any, ...]]


def write(traced: Trace, signature: Signature, outputs: int) -> str:
    """The C++ source of a library: Inductor's kernel, and the loop over blocks around it."""
    with _captured() as calls:
        kernel = lower(traced, 1, fx_graph_cache=False, force_disable_caches=True)
        (dtypes,) = signature.leaves
        tensors = [torch.empty(PROBE, dtype=dtype) for dtype in dtypes]
        numbers = torch.empty(signature.numbers[0], dtype=signature.numbers[1])
        results = kernel([PROBE, *tensors, numbers])
    if len(calls) != 1 or len(calls[0].given) != 1:
        raise Unsuitable(f"{len(calls)} kernels instead of one")
    types, source, (given,) = calls[0]
    known = {
        id(numbers): f"(({_type(numbers)}*)numbers + stride * tensor)",
        id(tensors[0]): _at(tensors[0], "grad"),
    }
    known |= {id(x): _at(x, f"row[{i}]") for i, x in enumerate(tensors[1:])}
    known |= {id(x): f"&sum{i}" for i, x in enumerate(results)}
    arguments = []
    for kind, x in zip(types, given, strict=True):
        if isinstance(x, Tensor) and id(x) in known:
            arguments.append(f"({kind}){known[id(x)]}")
        elif type(x) is int and x == PROBE:
            arguments.append("length")
        else:
            raise Unsuitable("a kernel with memory of its own")
    sums = "".join(f"        {_type(x)} sum{i} = 0;\n" for i, x in enumerate(results))
    stores = "".join(
        f"        parts[{outputs} * b + {i}] = (double)sum{i};\n" for i in range(outputs)
    )
    return source + LOOP.format(
        symbol=SYMBOL,
        width=len(tensors) - 1,
        outputs=outputs,
        sums=sums,
        stores=stores,
        arguments=", ".join(arguments),
    )


LOOP = """
#include <cstdint>
#include <vector>

typedef void* (*Reader)(void*);

extern "C" void {symbol}(const int64_t* call)
{{
    const int64_t* blocks = (const int64_t*)call[0];
    const int64_t count = call[1];
    const int64_t* rows = (const int64_t*)call[2];
    const int64_t* given = (const int64_t*)call[3];
    void* numbers = (void*)call[5];
    const int64_t stride = call[9], apart = call[10];
    const int64_t threads = call[6];
    double* totals = (double*)call[7];
    Reader read = (Reader)call[8];
    std::vector<int64_t> grads(given, given + call[4]);
    if (read)
        for (auto& grad : grads) grad = (int64_t)read((void*)grad);
    std::vector<double> parts({outputs} * count);
    auto block = [&](int64_t b) {{
        const int64_t tensor = blocks[3 * b];
        const int64_t* row = rows + {width} * tensor;
        const int64_t grad = grads[tensor];
        const int64_t start = blocks[3 * b + 1];
        const int64_t length = blocks[3 * b + 2];
{sums}        kernel({arguments});
{stores}    }};
    if (threads > 1) {{
        #pragma omp parallel for num_threads(threads) schedule(guided, 8)
        for (int64_t b = 0; b < count; ++b) block(b);
    }} else {{
        for (int64_t b = 0; b < count; ++b) block(b);
    }}
    for (int64_t b = 0; b < count; ++b)
        for (int64_t i = 0; i < {outputs}; ++i)
            totals[apart * blocks[3 * b] + i] += parts[{outputs} * b + i];
}}
"""


def _type(x: Tensor) -> str:
    try:
        return CTYPES[x.dtype]
    except KeyError:
        raise Unsuitable(f"tensors of {x.dtype}") from None


def _at(x: Tensor, address: str) -> str:
    return f"(({_type(x)}*){address} + start)"


@contextmanager
def _captured() -> Iterator[list[CapturedCall]]:
    """Inside, this thread's kernels are recorded instead of compiled.

    Other threads compile as ever; everything is afterwards as it was.
    """
    with quiet():
        from torch._inductor.async_compile import AsyncCompile

    here = threading.get_ident()
    real = AsyncCompile.cpp_pybinding
    calls: list[CapturedCall] = []

    def record(self: Any, argtypes: list[str], source_code: str) -> Any:
        if threading.get_ident() != here:
            return real(self, argtypes, source_code)
        call = CapturedCall(argtypes, source_code, [])
        calls.append(call)
        return lambda *args: call.given.append(args)

    AsyncCompile.cpp_pybinding = record
    try:
        with _vectors_known(here):
            yield calls
    finally:
        AsyncCompile.cpp_pybinding = real


@contextmanager
def _vectors_known(thread: int) -> Iterator[None]:
    """Take the processor's word for its vector units; Inductor builds six probes, 5 s in all."""
    from torch._inductor import cpu_vec_isa

    real = cpu_vec_isa.valid_vec_isa_list

    def told() -> list[Any]:
        if threading.get_ident() != thread:
            return real()
        flags = cpu_vec_isa.x86_isa_checker()
        fitting = [
            isa
            for isa in cpu_vec_isa.supported_vec_isa_list
            if all(flag in flags for flag in str(isa).split())
        ]
        return [_trusted(type(isa)) for isa in fitting] or real()

    cpu_vec_isa.valid_vec_isa_list = told
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = real


def _trusted(kind: Any) -> Any:
    same = {"__bool__": lambda self: True, "__hash__": kind.__hash__}
    return type(kind.__name__, (kind,), same)()


def _build(source: str, scratch: Path) -> Path:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    path = scratch / "kernel.cpp"
    path.write_text(source)
    options = CppTorchDeviceOptions(**_options(), extra_flags=["-Wl,-Bsymbolic"])
    if next(_builds) >= FEW or _has_header():
        options.precompiled_header = _header()
    builder = CppBuilder("kernel", str(path), options, output_dir=str(scratch))
    # torch's headers are worth 600 warnings, which take the compiler half a second
    command = [*shlex.split(builder.get_command_line()), "-w"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the C++ compiler failed: {done.stderr.strip()[:500]}")
    return Path(builder.get_target_file_path())


FEW = 3
"""Libraries that a process builds before it precompiles their header: 5 s once per machine, which
make each build afterwards 1.5 s shorter. To find the header takes 0.8 s once per process."""


_builds = itertools.count()


def _options() -> dict[str, Any]:
    from torch._inductor import cpu_vec_isa

    with _vectors_known(threading.get_ident()):
        isa = cpu_vec_isa.pick_vec_isa()
    return {"vec_isa": isa, "include_pytorch": False, "shared": True, "device_type": "cpu"}


def _has_header() -> bool:
    """Whether a process on this machine has precompiled a header."""
    from torch._inductor import codecache

    folder = getattr(codecache, "_HEADER_DIR", None)
    return folder is not None and any(Path(folder).glob("*.gch"))


@functools.cache
def _header() -> str | None:
    """Inductor's precompiled header; None if it cannot be had."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    common = _options()
    try:
        line = CppBuilder("o", "i", CppTorchDeviceOptions(**common)).get_command_line()
        header = codecache._get_cpp_prefix_header("cpu")
        return codecache._precompile_header(header, line, **common)
    except Exception:  # a private interface: without it, a build takes longer
        return None


def _try(native: Native, body: Body, signature: Signature) -> None:
    """Raise Unsuitable unless the library does to a tensor what the rule does.

    It sees the tensor in two blocks, so that a rule is refused whose measurements are no sums over
    the entries.
    """
    (dtypes,) = signature.leaves
    random = torch.Generator().manual_seed(0)
    real = [torch.rand(PROBE, generator=random).add_(0.1).to(dtype) for dtype in dtypes]
    expected = [x.clone() for x in real]
    length, dtype = signature.numbers
    numbers = torch.rand(length, generator=random).add_(0.1).to(dtype)
    with torch.no_grad():
        sums = body([expected], numbers)
    blocks = list(zip(*[x.tensor_split([PROBE // 3]) for x in real], strict=True))
    rows = array.array("q", [x.data_ptr() for _, *mine in blocks for x in mine])
    launch = MultiTensorLaunch(native, [len(g) for g, *_ in blocks], rows, 1, dtype)
    totals = launch.ready([g for g, *_ in blocks], [tuple(numbers.tolist())])()
    results = [*real, torch.tensor(totals, dtype=torch.float64)]
    wanted = [*expected, torch.tensor([float(x) for x in sums], dtype=torch.float64)]
    for x, y in zip(results, wanted, strict=True):
        loose = 1e-2 if x.element_size() == 2 else 1e-4
        if not torch.allclose(x, y, rtol=loose, atol=loose, equal_nan=True):
            raise Unsuitable("a library that does something else than the rule")
