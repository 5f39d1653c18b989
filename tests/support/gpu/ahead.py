"""Triton kernels compiled for a GPU that is not there, and what their machine code says."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import CompiledKernel, make_backend

from functional_optim.kernels.triton_compiler import OPTIONS, compiled, function_of
from functional_optim.kernels.triton_primitives import KernelText

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

FORBIDDEN = re.compile(r"^\s*(?:@!?%\w+\s+)?(div\.full[.\w]*|\w+[.\w]*\.(?:ftz|approx)\b[.\w]*)")
"""Arithmetic that is not rounded as IEEE 754 has it, or takes small numbers for zeros."""


def target(capability: int) -> GPUTarget:
    """80 for an A100, 90 for an H100."""
    return GPUTarget("cuda", capability, 32)


def compile_ahead(text: KernelText, capability: int = 90) -> CompiledKernel:
    """A kernel for a GPU of a capability."""
    with own_cache():
        return compiled(text, target(capability))


def check_types(text: KernelText) -> None:
    """Have Triton read a kernel and write it in its own language, which checks types and shapes."""
    source = ASTSource(function_of(text), text.types, {}, {})
    backend = make_backend(target(90))
    options = backend.parse_options({"num_warps": text.warps, **OPTIONS})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(target(90), options, functions, backend.get_module_map(), context)


@contextmanager
def own_cache() -> Iterator[None]:
    """Inside, Triton keeps what it compiles in a folder that goes with the process."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = _folder().name
        yield


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ahead-")


@dataclass(frozen=True)
class Facts:
    """What a kernel needs and does, by its machine code (SASS) and its PTX."""

    registers: int
    """Of each thread."""
    spilled: int
    """Bytes of each thread's stack, and accesses to it."""
    loads128: int
    stores128: int
    """Of global memory, of 16 bytes."""
    loads64: int
    stores64: int
    doubles: int
    """Arithmetic in float64."""
    forbidden: dict[str, int]
    """Instructions of the PTX that round otherwise than IEEE 754, and how many there are."""


def facts(kernel: CompiledKernel) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", binary)
        machine = _tool("nvdisasm", "-c", binary)
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    return Facts(
        registers=int(found["REG"]),
        spilled=int(found["STACK"]) + _count(r"\b(?:LDL|STL)\b", machine),
        loads128=_count(r"\bLDG[.\w]*\.128", machine),
        stores128=_count(r"\bSTG[.\w]*\.128", machine),
        loads64=_count(r"\bLDG[.\w]*\.64", machine),
        stores64=_count(r"\bSTG[.\w]*\.64", machine),
        doubles=_count(r"\bD(?:ADD|MUL|FMA|SETP)\b", machine),
        forbidden=forbidden(kernel.asm["ptx"]),
    )


def forbidden(ptx: str) -> dict[str, int]:
    """Instructions that flush small numbers to zero or approximate, and how many there are."""
    found = (FORBIDDEN.match(line) for line in ptx.splitlines())
    return dict(sorted(Counter(one[1] for one in found if one).items()))


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _tool(name: str, option: str, path: Path) -> str:
    done = subprocess.run([TOOLS / name, option, path], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
