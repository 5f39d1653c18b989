"""Sparse gradients: rules that act only on the rows with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.execution import Leaf, measure, rows_of, run_stored
from functional_optim.core.first_slots import init_slots
from functional_optim.core.numbers import flat_numbers, parts_of, tensor_of
from functional_optim.core.recording import key_of
from functional_optim.core.rule import Placement, Rule
from functional_optim.core.small import filled, small_shapes
from functional_optim.core.storage import Slots, present
from functional_optim.core.traits import graph_of, variants
from functional_optim.kernels import ops
from functional_optim.kernels.node import Unsuitable


def densified(placements: Sequence[Placement], g: Any) -> Any:
    """A gradient, dense if one of the rules draws noise, for elements without a gradient, too."""
    sparse = g.layout is torch.sparse_coo
    return g.to_dense() if sparse and any(x.rule.draws for x in placements) else g


def on_values(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of elements on a tensor; of a sparse COO tensor, on the rows that it has."""
    if x.layout is not torch.sparse_coo:
        return change(x)
    x = x.coalesce()
    return _sparse(x.indices().unbind(), change(x.values()), x.shape)


def selected(flag: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """torch.where of a flag, for sparse COO tensors, too."""
    if x.layout is not y.layout:
        x, y = (z.to_dense() if z.layout is torch.sparse_coo else z for z in (x, y))
    if x.layout is not torch.sparse_coo:
        return torch.where(flag, x, y)
    parts = on_values(lambda x: x.where(flag, 0), x), on_values(lambda y: y.where(~flag, 0), y)
    return (parts[0] + parts[1]).coalesce()


def run_rows(placements: Sequence[Placement], leaf: Leaf) -> tuple[Tensor, list[Slots]]:
    """`run_stored` for a sparse COO gradient: only its rows change; the update is sparse, too.

    Raises:
        RuntimeError: for rules that need all rows.
    """
    at, rows = checked_rows(placements, leaf)
    u, new = run_stored(placements, rows)
    full = [
        tuple(
            [
                None if old is None else old.index_put(at, s)
                for s, old in zip(fresh, own, strict=True)
            ]
        )
        for fresh, own in zip(new, leaf.slots, strict=True)
    ]
    return _sparse(at, u, leaf.p.shape), full


def _sparse(at: Sequence[Tensor], values: Tensor, shape: Sequence[int]) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(
            torch.stack([*at]), values, torch.Size(shape), is_coalesced=True
        )


_apart: dict[Any, str | None] = {}
"""The rule that needs all rows, of rules that have been tested; None if none does."""


def checked_rows(placements: Sequence[Placement], leaf: Leaf) -> tuple[tuple[Tensor, ...], Leaf]:
    """The rows of a sparse gradient, and the leaf of these rows.

    A rule that sums over rows, e.g. for a norm of the tensor, would be wrong for some of the rows.
    So would one that sorts rows, or uses their number: a test on a small tensor checks whether the
    rule treats rows independently.

    Raises:
        RuntimeError: for a rule that needs all rows, or whose slots have others.
    """
    name = next((x.name or "a rule" for x in placements if _needs_all(x.rule)), None)
    found = None if name else rows_of(placements, leaf)
    if found is not None:
        dims = leaf.g.sparse_dim()
        # a closed gate, or a decay of 0, hides that a norm is that of some rows
        null = tuple([bool(x == 0) for x in flat_numbers(leaf.numbers)])
        which = tuple([int(x) for own in leaf.numbers for x in parts_of(own)[0]])
        key = (tuple(map(key_of, placements)), leaf.p.dim(), leaf.p.dtype, dims, null, which)
        if key not in _apart:
            several = range(len(placements))
            k = next((k for k in several if not _by_rows(placements[: k + 1], leaf, dims)), None)
            _apart[key] = None if k is None else placements[k].name or "a rule"
        name = _apart[key]
    if found is None or name:
        raise needs_all_rows(name or "a rule")
    return found


def _needs_all(rule: Rule) -> bool:
    """Whether a rule says that it needs all rows: also by codecs, and noise for each place."""
    storage = rule.storage
    rounded = storage.weight_codec is not None and storage.seed is not None
    return bool(rule.runs.dense_only or storage.codecs or rounded)


def needs_all_rows(name: str) -> RuntimeError:
    """An error for a sparse gradient."""
    return RuntimeError(
        f"{name} does not take sparse gradients, since it must see all rows of a tensor; pass "
        "dense ones, e.g. from Embedding(..., sparse=False)."
    )


def _by_rows(placements: Sequence[Placement], leaf: Leaf, dims: int) -> bool:
    """Whether the last of some rules treats rows independently, after those before it."""
    rule = placements[-1].rule
    if any(_joins_rows(x, leaf.p, dims) for x in variants(placements[-1]) if x.rule.updates):
        return False
    p = filled(small_shapes(leaf.p.dim())[0], leaf.p.dtype).to(leaf.p.device)
    at = tuple([torch.tensor([1, 4], device=p.device)[: p.shape[i]] for i in range(dims)])
    values = filled(p.shape, leaf.g.dtype).to(p.device)[at]
    g = torch.zeros_like(p, dtype=leaf.g.dtype).index_put(at, values)
    sparse = _sparse(at, values, p.shape)
    count = len(placements)
    numbers = leaf.numbers[:count]
    try:
        slots = [_used(init_slots(x.rule, p)) for x in placements]
        mine = leaf._replace(p=p, slots=slots, numbers=numbers)
        _, rows = rows_of(placements, mine._replace(g=sparse))
        both = (mine._replace(g=g), rows)
        if rule.reduce is not None:
            before = rule.numbers_before(1.0, rule.carry or ())
            own = [*numbers[:-1], before]
            pairs = [measure(placements, x._replace(numbers=own)) for x in both]
            if not all(map(_close, *pairs)):
                return False
        (u, new), (v, fresh) = [run_stored(placements, x) for x in both]
    except Exception:  # from a rule for other tensors only, or with slots of other rows
        return False
    pairs = zip(present(new), present(fresh), strict=True)
    return _close(u[at], v) and all(_close(x[at], y) for x, y in pairs)


def _used(slots: Slots) -> Slots:
    """Slots that differ between rows, as after some steps: a sum over initial ones may be 0."""
    return tuple(
        [
            x + filled(x.shape, x.dtype).to(x.device)
            if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1
            else x
            for x in slots
        ]
    )


def _joins_rows(placement: Placement, p: Tensor, dims: int) -> bool:
    """Whether a rule reduces over rows, which the first `dims` dimensions index."""
    try:
        graph = graph_of(placement, p)
    except Unsuitable:
        return False
    rows = {k for k, own in enumerate(graph.parts) if min(own) < dims}
    sums = [x for x in graph.nodes if ops.kind(x.op) == "reduce"]
    return any(rows & {*y.axes} - {*x.axes} for x in sums for y in x.operands())


def _close(x: Any, y: Any) -> bool:
    a, b = tensor_of(x), tensor_of(y)
    return a.shape == b.shape and torch.allclose(a, b.to(a.dtype), 1e-4, 1e-6, equal_nan=True)
