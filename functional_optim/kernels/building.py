"""C++ that Inductor has written, taken before it is compiled, and compiled as a library."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels import levels
from functional_optim.kernels.tracing import quiet
from functional_optim.kernels.watch import Scratch

CTYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "at::BFloat16",
    torch.float16: "at::Half",
}
"""The C++ type of each dtype that a native kernel takes."""


class Unsuitable(Exception):
    """A rule that Inductor does not turn into one loop over one tensor's memory."""


class CapturedCall(NamedTuple):
    """A kernel as Inductor wrote it, and what its wrapper handed to it."""

    types: list[str]
    source: str
    given: list[tuple[Any, ...]]

    def function(self, name: str, numbers: Tensor) -> str:
        """The source of the kernel as a function of this name, which says that nothing is written
        where these numbers are.

        Without that the compiler works out again for each vector of entries what depends on them
        alone, roots and quotients included.

        Raises:
            Unsuitable: if Inductor no longer writes kernels as it did.
        """
        found = re.split(r'extern "C"\s+void\s+kernel\(([^)]*)\)', self.source)
        if len(found) != 3:
            raise Unsuitable("a kernel whose head is not known")
        before, head, body = found
        names = head.split(",")
        for own in self.given:
            for i, x in enumerate(own):
                if isinstance(x, Tensor) and x.data_ptr() == numbers.data_ptr():
                    names[i] = names[i].replace("* in_ptr", "* __restrict__ in_ptr")
        return f"{before}static __attribute__((noinline)) void {name}({','.join(names)}){body}"

    def plain_function(self, name: str) -> str:
        """The same for loops that Inductor has left to the compiler to vectorize, which must know
        for it that no two pointers meet: codes are bytes, and a byte may be a part of anything."""
        source = self.function(name, torch.empty(0))
        head = f"static __attribute__((noinline)) void {name}("
        before, rest = source.split(head)
        names, body = rest.split(")", 1)
        names = names.replace("*", "* __restrict__")
        optimized = '__attribute__((noinline, optimize("O3,tree-loop-vectorize")))'
        return f"{before}static {optimized} void {name}({names}){body}"


def type_of(x: Tensor) -> str:
    try:
        return CTYPES[x.dtype]
    except KeyError:
        raise Unsuitable(f"tensors of {x.dtype}") from None


@contextmanager
def captured() -> Iterator[list[CapturedCall]]:
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
        level = levels.chosen()
        flags = cpu_vec_isa.x86_isa_checker() if level is None else [level.vectors]
        fitting = [
            isa
            for isa in cpu_vec_isa.supported_vec_isa_list
            if all(flag in flags for flag in str(isa).split())
        ]
        return [_changed(type(isa)) for isa in fitting] or real()

    cpu_vec_isa.valid_vec_isa_list = told
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = real


def _changed(kind: Any, **methods: Any) -> Any:
    """A vector unit that is trusted to be there, with other methods."""
    same = {"__bool__": lambda self: True, "__hash__": kind.__hash__, **methods}
    return type(kind.__name__, (kind,), same)()


def start(source: str, scratch: Scratch) -> tuple[subprocess.Popen[str], Path]:
    """The C++ compiler at work, and the library that there will be. scratch: a folder for both."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    path = scratch.path / "kernel.cpp"
    path.write_text(source)
    options = CppTorchDeviceOptions(**_options(), extra_flags=["-Wl,-Bsymbolic"])
    if next(_builds) >= FEW or _has_header():
        options.precompiled_header = _header()
    builder = CppBuilder("kernel", str(path), options, output_dir=str(scratch.path))
    command = shlex.split(builder.get_command_line())
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = scratch.run(command, text=True, errors="replace", **told)
    return process, Path(builder.get_target_file_path())


FLAGS = "-w -fno-trapping-math -fno-math-errno"
"""torch's headers are worth 600 warnings, half a second of the compiler's time. Roots and quotients
of numbers are worked out once, before a loop, only if they need not tell anybody of errors."""

FEW = 3
"""Libraries that a process builds before it precompiles their header: 7 s once per machine, which
make each build afterwards 2.5 s shorter. To find the header takes 0.8 s once per process."""

NOTE = ".functional_optim"
"""The ending of a file beside a header that is compiled with `FLAGS`; Inductor has others there."""


_builds = itertools.count()


def _options() -> dict[str, Any]:
    """What kernels and their header are both compiled with: a header of other flags is ignored.

    `FLAGS` go with those of the vector units, as Inductor compiles no header with extra ones.
    """
    from torch._inductor import cpu_vec_isa

    with _vectors_known(threading.get_ident()):
        found: Any = cpu_vec_isa.pick_vec_isa()
    level = levels.chosen()
    units = found.build_arch_flags() if level is None else f"-march={level.name}"
    flags = f"{units} {FLAGS}"
    macros = list(filter(None, found.build_macro()))  # that of no vector unit is empty
    isa = _changed(
        type(found), build_arch_flags=lambda self: flags, build_macro=lambda self: macros
    )
    return {"vec_isa": isa, "include_pytorch": False, "shared": True, "device_type": "cpu"}


def _has_header() -> bool:
    """Whether a process on this machine has precompiled the header of kernels."""
    from torch._inductor import codecache

    folder = getattr(codecache, "_HEADER_DIR", None)
    return folder is not None and any(Path(folder).glob(f"*{NOTE}"))


@functools.cache
def _header() -> str | None:
    """The precompiled header; None if it cannot be had."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    common = _options()
    try:
        line = CppBuilder("o", "i", CppTorchDeviceOptions(**common)).get_command_line()
        header = codecache._get_cpp_prefix_header("cpu")
        path = codecache._precompile_header(header, line, **common)
        Path(path).with_suffix(NOTE).touch()
        return path
    except Exception:  # a private interface: without it, a build takes longer
        return None


def is_usual() -> bool:
    """Does Inductor compile for CPUs as it does in a process that has changed no setting?

    Which settings a kept library was compiled with is not in its name.
    """
    from torch._inductor import config

    entries = vars(config)["_config"].items()
    return all(
        getattr(config, name) == entry.default for name, entry in entries if name.startswith("cpp.")
    )
