"""Triton's kernels compiled for a card that is not there, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from functional_optim.kernels.tracing import quiet

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

FORBIDDEN = re.compile(r"^\s*(?:@!?%\w+\s+)?(div\.full[.\w]*|\w+[.\w]*\.(?:ftz|approx)\b[.\w]*)")
"""Arithmetic that is not rounded as IEEE 754 has it, or takes small numbers for zeros."""


def compile_ahead(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int = 90,
    aligned: Collection[str] = (),
    **options: Any,
) -> CompiledKernel:
    """Compiles a `triton.jit` function for a capability: 80 for an A100, 90 for an H100.

    `types` has Triton's name for the type of each argument ("*fp32", "i64"), `constants` the values
    of the `tl.constexpr` ones. The arguments in `aligned` are multiples of 16. `options` are
    Triton's: `num_warps`, `enable_fp_fusion`, `enable_reflect_ftz`.
    """
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    missing = signature.keys() - types.keys() - constants.keys()
    if missing:
        raise TypeError(f"Neither type nor value given of: {', '.join(sorted(missing))}.")
    order = list(function.arg_names)
    attributes = {(order.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, dict(constants), attributes)
    target = GPUTarget("cuda", capability, 32)
    with own_cache(), quiet():
        return triton.compile(source, target=target, options=options)


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
    stack: int
    """Bytes of each thread; more than 0 where registers were spilled."""
    local: int
    shared: int
    """Bytes of each block that are fixed; what is asked for at the launch is not among them."""
    loads: int
    stores: int
    """Of global memory, of any width."""
    loads128: int
    stores128: int
    """Those of 16 bytes."""
    loads64: int
    stores64: int
    local_loads: int
    local_stores: int
    """Of the stack: registers that were spilled, or arrays of libdevice."""
    instructions: int
    forbidden: dict[str, int]
    """Instructions of the PTX that round otherwise than IEEE 754, and how many there are."""


def facts(compiled: CompiledKernel) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", binary)
        machine = _tool("nvdisasm", "-c", binary)
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    return Facts(
        registers=int(found["REG"]),
        stack=int(found["STACK"]),
        local=int(found["LOCAL"]),
        shared=int(found["SHARED"]),
        loads=_count(r"\bLDG\b", machine),
        stores=_count(r"\bSTG\b", machine),
        loads128=_count(r"\bLDG[.\w]*\.128", machine),
        stores128=_count(r"\bSTG[.\w]*\.128", machine),
        loads64=_count(r"\bLDG[.\w]*\.64", machine),
        stores64=_count(r"\bSTG[.\w]*\.64", machine),
        local_loads=_count(r"\bLDL\b", machine),
        local_stores=_count(r"\bSTL\b", machine),
        instructions=_count(r"/\*[0-9a-f]{4,}\*/", machine),
        forbidden=forbidden(compiled.asm["ptx"]),
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
