"""Newton–Schulz iterations of many matrices, by one call of a library of C++.

ATen makes a call for each product. Here a core's cache holds a matrix through all iterations, and
symmetric products take half of the operations.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import isa_levels
from functional_optim.kernels.cpp import HEAD
from functional_optim.kernels.launches import TEAM
from functional_optim.kernels.libraries import Text, library

GRAIN = 1 << 15
"""Elements from which threads share the work."""


@functools.cache
def source(*, halves: bool) -> Any:
    """The source of a library. halves: whether it multiplies bfloat16."""
    text = Path(__file__).with_suffix(".cpp").read_text()
    return Text(f"#define HALVES {halves:d}\n{HEAD}{text}")


def serves() -> bool:
    """Whether the library was measured on a processor like this one. ATen uses matrix units."""
    return "avx2" in isa_levels.features() and "amx_tile" not in isa_levels.features()


def run(
    G: Tensor,
    triples: Sequence[tuple[float, float, float]],
    eps: float,
    margin: float,
    together: int,
    *,
    rounds: bool,
) -> Tensor | None:
    """A step for each triple, on contiguous float32 matrices (count, m, n); None, and nothing done,
    if there is no library, or no memory for it.

    eps, margin: lower bound and factor of the norm that the matrices are divided by. together:
    steps for which X Xᵀ is updated instead of computed again, in float32. rounds: round the result
    to bfloat16; with one step together all operands, too, if the processor multiplies them.
    """
    halves = rounds and together == 1 and "avx512_bf16" in isa_levels.features()
    native = library(source(halves=halves))
    if native is None:
        return None
    out = torch.empty_like(G)
    numbers = array.array("d", [eps, margin, *[x for triple in triples for x in triple]])
    threads = torch.get_num_threads() if G.numel() >= GRAIN else 1
    call = array.array("q", [G.data_ptr(), out.data_ptr(), *G.shape, len(triples), together])
    call.extend([int(rounds), threads, TEAM, numbers.buffer_info()[0], 0])
    native.call(call.buffer_info()[0])
    return out if call[11] else None
