"""Decompositions and systems of equations of eight problems, and what puts vectors in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from functional_optim.kernels.lane_loops import LaneLoops, NoMemory, size_of
from functional_optim.kernels.lanes import VECTOR
from functional_optim.kernels.node import Node, Unsuitable

if TYPE_CHECKING:
    from functional_optim.kernels.lane_program import Program

FACTORS = ("linalg_cholesky_ex.default[0]", "linalg_cholesky_ex.default[1]")
SYSTEMS = ("_linalg_solve_ex.default[0]", "_linalg_solve_ex.default[3]")
SORTED = ("sort.stable[0]", "sort.stable[1]")


def matrix(program: Program, a: Node) -> tuple[str, int]:
    """Memory with a square matrix, and its size."""
    n = a.shape[-1]
    if size_of(a) != n * n or a.dtype is not torch.float64:
        raise Unsuitable(f"a decomposition of {a.dtype} of shape {a.shape}")
    if a not in program.buffers:
        raise NoMemory(a)
    return program.buffers[a], n


def cholesky(program: Program, node: Node) -> None:
    """The factor, or whether the matrix has no factor."""
    a = node.args[0]
    if node.kwargs.get("upper") or node.kwargs.get("check_errors") or len(node.args) > 1:
        raise Unsuitable("another kind of decomposition")
    source, n = matrix(program, a)
    if a not in program.factors:
        program.factors[a] = f"l{a.index}"
        program.lines.append(f"D* const l{a.index} = (D*)(scratch + {program.room(n * n)});")
        program.lines.append(f"cholesky(l{a.index}, {source}, {n});")
    if node.op == FACTORS[0]:
        program.buffers[node] = program.factors[a]
    else:
        failed = f"~positive({program.factors[a]}, {n}) & all_I(1)"
        program.lines.append(f"{program.buffer(node)}[0] = {failed};")


def triangular(program: Program, node: Node) -> None:
    """Substitution, forward or backward."""
    a, b = node.args[:2]
    n, count = b.shape[-2:]
    if size_of(a) != n * n or size_of(b) != n * count or a.dtype is not torch.float64:
        raise Unsuitable("a batch of triangular systems in one problem")
    if node.kwargs.get("unitriangular") or not node.kwargs.get("left", True):
        raise Unsuitable("another kind of triangular system")
    upper, head = node.kwargs["upper"], (0,) * (len(b.shape) - 2)
    inner, outer = LaneLoops(()), LaneLoops(())
    coefficient = program.value(a, (*head, "i", "j"), inner)
    right = program.value(b, (*head, "i", "c"), outer)
    pivot = program.value(a, (*head, "i", "i"), outer)
    order = f"int i = {n - 1}; i >= 0; --i" if upper else f"int i = 0; i < {n}; ++i"
    others = f"int j = i + 1; j < {n}; ++j" if upper else "int j = 0; j < i; ++j"
    buffer = program.buffer(node)
    program.lines += [
        f"LOOP for (int c = 0; c < {count}; ++c) LOOP for ({order}) {{",
        *outer.lines,
        f"D t = {right};",
        f"LOOP for ({others}) {{",
        *inner.lines,
        f"t -= {coefficient} * {buffer}[j * {count} + c]; }}",
        f"{buffer}[i * {count} + c] = t / {pivot}; }}",
    ]


def system(program: Program, node: Node) -> None:
    """The solution of a system, or whether it is singular: it has a pivot of 0."""
    a, b = node.args[:2]
    plain = node.kwargs.get("left", True) and not node.kwargs.get("check_errors")
    if not plain or len(node.args) > 2 or b.shape[: len(a.shape) - 1] != a.shape[:-1]:
        raise Unsuitable("another kind of system")
    source, n = matrix(program, a)
    if b not in program.buffers:
        raise NoMemory(b)
    key = (a, b)
    if key not in program.solved:
        count, size = size_of(b) // n, n * (n + size_of(b) // n)
        program.solved[key] = f"x{node.index}"
        program.lines += [
            f"D* const x{node.index} = (D*)(scratch + {program.room(size)});",
            f"const I x{node.index}_failed = solved(x{node.index}, {source}, "
            f"{program.buffers[b]}, {n}, {count});",
        ]
    name, buffer = program.solved[key], program.buffer(node)
    if node.op == SYSTEMS[0]:
        program.lines.append(
            f"LOOP for (int i = 0; i < {size_of(b)}; ++i) {buffer}[i] = {name}[i];"
        )
    else:
        program.lines.append(f"{buffer}[0] = {name}_failed & all_I(1);")


def sort(program: Program, node: Node) -> None:
    """A vector in order, or the places of its elements in it."""
    x, n = node.args[0], size_of(node)
    named = node.kwargs
    plain = len(node.args) == 1 and not named.get("descending") and x.dtype.is_floating_point
    if not plain or n != x.shape[named.get("dim", -1)]:
        raise Unsuitable("a sort of several vectors, or from the largest on")
    if x not in program.buffers:
        raise NoMemory(x)
    which, own, room = SORTED.index(node.op), program.buffer(node), program.room(n)
    other = f"({'I' if which == 0 else VECTOR[x.dtype]}*)(scratch + {room})"
    both = f"{own}, {other}" if which == 0 else f"{other}, {own}"
    program.lines.append(f"ranked({both}, {program.buffers[x]}, {n});")


DECOMPOSITIONS: dict[str, Callable[[Program, Node], None]] = {
    **dict.fromkeys(FACTORS, cholesky),
    "linalg_solve_triangular.default": triangular,
    **dict.fromkeys(SYSTEMS, system),
    **dict.fromkeys(SORTED, sort),
}
"""What writes such an operation, by its name."""
