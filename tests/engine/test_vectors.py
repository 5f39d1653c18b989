"""Loops of kernels are vectors: g++ itself says which ones it has left scalar."""

import math
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import CASES
from undeclared import ROWS

import functional_optim as fo
from functional_optim import kernels
from functional_optim.kernels import isa_levels, toolchain

pytestmark = pytest.mark.skipif(
    not any("g++" in word and "clang" not in word for word in toolchain.command()[:1])
    or "avx2" not in isa_levels.features(),
    reason="the report is that of g++, about processors with AVX2",
)

KINDS = ("int8", "int4", "bfloat16", "float8_e4m3fn")

LOOP = re.compile(r":(\d+):\d+: optimized: (?:loop vectorized|Loop \d+ distributed: split to 0 )")
"""Of a loop that only copies g++ makes calls of memcpy."""


def left_scalar(text: str, folder: Any) -> list[str]:
    """The loops with a pragma of which g++ makes no vectors."""
    source = folder / "kernel.cpp"
    source.write_text(text)
    words = [*toolchain.command(), *toolchain.kernel(text).flags, "-S", "-o", "/dev/null"]
    command = [*words, "-fopt-info-loop-vec-optimized", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    vectors = {int(line) for line in LOOP.findall(done.stderr)}
    lines = text.splitlines()
    starts = [k for k, line in enumerate(lines, 1) if "#pragma omp simd" in line]
    # what g++ reports of the pragma's own line is how it puts a reduction together
    found = [lines[k].strip() for k in starts if vectors.isdisjoint((k + 1, k + 2, k + 3))]
    pairs = re.findall(r"enum \{ n(\d+) = 2 \}", text)  # of the halves of a block
    return [line for line in found if not any(f"int i{axis} =" in line for axis in pairs)]


@pytest.fixture
def texts(monkeypatch) -> list[str]:
    """The kernels that a test has asked for."""
    found: list[str] = []
    library = kernels.library

    def seen(source: Any, **options: Any) -> Any:
        found.append(source.text)
        return library(source, **options)

    monkeypatch.setattr(kernels, "library", seen)
    return found


def scalar(tx: Any, params: Any, texts: list[str], folder: Any) -> list[str]:
    """The scalar loops of the kernels of a step."""
    extra = {name: torch.tensor(0.5) for name in tx.required}
    grads = fo.tree.map(lambda p: torch.ones_like(p) / 3, params)
    fo.compile(tx)(grads, tx.init(params), params, **extra)
    return [line for text in texts for line in left_scalar(text, folder)]


def each_case() -> Iterator[Any]:
    """Each case in one dtype, the next in the other; the rest in `make test-full`."""
    for i, case in enumerate(CASES):
        for k, dtype in enumerate((torch.float32, torch.bfloat16)):
            marks = [] if i % 2 == k else [pytest.mark.full]
            yield pytest.param(case, dtype, marks=marks, id=f"{case.name}-{str(dtype)[6:]}")


@pytest.mark.parametrize(("case", "dtype"), [*each_case()])
def test_no_loop_of_a_ready_made_rule_is_scalar(case, dtype, texts, tmp_path):
    assert scalar(case.tx(), case.params(dtype), texts, tmp_path) == []


COMPOSED = {
    "cautious": lambda: fo.chain(fo.cautious(fo.scale_by_adam()), fo.scale_by_lr(1e-3)),
    "masked": lambda: fo.leafwise(None, lambda u, slots, p: (u * (u > 0).float(), slots)),
    "clipped by rows": lambda: fo.chain(fo.adaptive_grad_clip(0.1), fo.adamw(1e-3)),
    "clipped by block": lambda: fo.chain(fo.scale_by_adam(), fo.clip_by_block_rms(1.0)),
    "centralised": lambda: fo.chain(fo.centralize(), fo.adamw(1e-3), fo.params_ema(0.99)),
    "finite": lambda: fo.apply_if_finite(fo.adamw(1e-3), 3),
    "noisy": lambda: fo.chain(fo.add_noise(0.1, 0.55, 0), fo.sgd(1e-3)),
    **{kind: lambda k=kind: fo.stored(fo.adamw(1e-3), k, min_size=0) for kind in KINDS},
}


CALLS = {"the_root_by_a_number", "functions_of_columns", "powers_of_integers"}
CALLS |= {"half_beside_numbers"}
"""Rules that call the math library for each element, run eagerly, or mix all half types, whose loop
g++ gives up."""


LONGS = {"integers", "places_in_half", "slots_that_count", "slots_of_integers_and_bools"}
"""Rules that turn integers of 64 bits into floats, for which only AVX-512 has a vector instruction.
"""


USERS = {
    name: row.build
    for name, row in ROWS.items()
    if name not in CALLS and ("avx512dq" in isa_levels.features() or name not in LONGS)
}


@pytest.mark.parametrize(("name", "shape"), [
    *[(name, (64, 64)) for name in COMPOSED], *[(name, (6, 8)) for name in USERS]
])  # fmt: skip
def test_no_loop_of_a_rule_composed_or_written_by_a_user_is_scalar(name, shape, texts, tmp_path):
    params = {"m": torch.linspace(-1, 1, math.prod(shape)).reshape(shape)}
    assert scalar({**COMPOSED, **USERS}[name](), params, texts, tmp_path) == []
