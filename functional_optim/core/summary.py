"""Which rules act on each parameter, how they see it, and what they keep of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import base
from functional_optim.core.chain import Sequence as Chained
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import State


class SummaryRow(NamedTuple):
    """One parameter."""

    path: str
    shape: tuple[int, ...]
    rules: tuple[str, ...]
    """The names of the rules that act on it, in their order; none if it is frozen."""
    matrices: tuple[tuple[int, ...], ...]
    """The shapes (k, out, in) of the matrices that it is seen as; none if it is seen as it is."""
    entries: int
    """How many numbers the state keeps of it."""
    bytes: int
    """How many bytes these take."""

    @property
    def view(self) -> str:
        """The matrices in words, such as `3 × (768, 768)`."""
        each = [(f"{k} × " if k > 1 else "") + f"({m}, {n})" for k, m, n in self.matrices]
        return " + ".join(each)


class Folded(NamedTuple):
    """Rows that differ in the numbers of their paths only, with `*` for these."""

    path: str
    rows: list[SummaryRow]

    @property
    def label(self) -> str:
        """The path, and how many rows."""
        path = self.path or "(the tensor)"
        return f"{path} ×{len(self.rows)}" if len(self.rows) > 1 else path


class Summary:
    """A table of parameters: `print` it, or read its `rows`.

    rows: one `SummaryRow` for each parameter. shared: bytes that the state keeps for all together.
    """

    def __init__(self, rows: Iterable[SummaryRow], shared: int = 0) -> None:
        self.rows = tuple(rows)
        self.shared = shared

    def __str__(self) -> str:
        if not self.rows:
            return "no parameters"
        head = ("parameter", "shape", "seen as", "rules", "state")
        lines = [head] + [
            (
                x.label,
                str(x.rows[0].shape),
                x.rows[0].view or "as it is",
                " → ".join(x.rows[0].rules) or "frozen",
                _size(sum([row.bytes for row in x.rows])),
            )
            for x in folded(self.rows)
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [
            "  ".join([cell.ljust(n) for cell, n in zip(line, widths, strict=True)]).rstrip()
            for line in lines
        ]
        entries = sum([row.entries for row in self.rows])
        size = _size(sum([row.bytes for row in self.rows]) + self.shared)
        count = f"{len(self.rows)} parameter{'s' if len(self.rows) > 1 else ''}"
        total = f"{count}, {entries:,} entries of state, {size}"
        return "\n".join([*texts, total])

    __repr__ = __str__


def summary(tx: base.GradientTransformation, params: Any) -> Summary:
    """A table of the rules that act on each parameter, how they see it, and the size of its state.

    Nothing of the size of a parameter is allocated.

    Args:
        tx: a transformation.
        params: a tree of parameters, such as `dict(model.named_parameters())`, whose order the
            table has; tensors without data will do.

    Returns:
        What prints as a table, in which rows that differ in numbers only, as those of the layers of
        a network, are one. Its `rows` are one for each parameter: `path`, `shape`, `rules`, `view`
        and `matrices`, `entries` and `bytes` of its state. A transformation that is not made of
        one-tensor rules is one rule, with what it wraps in parentheses.

    Raises:
        ValueError, TypeError: as the transformation's own `init`.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"up": torch.zeros(4, 2), "norm": torch.zeros(2)}
        >>> parts = {"muon": fo.scale_by_muon(), "adam": fo.scale_by_adam()}
        >>> table = fo.summary(fo.partition(parts, {"norm": "adam", "*": "muon"}), params)
        >>> table
        parameter  shape   seen as   rules                          state
        up         (4, 2)  as it is  scale_by_muon → orthogonalize  32 B
        norm       (2,)    as it is  scale_by_adam                  16 B
        2 parameters, 12 entries of state, 88 B
        >>> table.rows[0].entries
        8
    """
    base.check_transformation("summary", tx, "summary(adamw(), params)")
    kept_in_order = OrderedDict(params) if type(params) is dict else params
    empty = tree.map(_without_data, kept_in_order)
    known = dict(tree.items(empty))
    found: dict[str, list[Tensor]] = {path: [] for path in known}
    shared: list[Tensor] = []
    for path, x in _kept(tx.init(empty), "", known):
        (shared if path is None else found[path]).append(x)
    rows = []
    for path, p in known.items():
        names, matrices = _acting(tx, path, p)
        own = found[path]
        entries = sum([x.numel() for x in own])
        rows.append(SummaryRow(path, tuple(p.shape), names, matrices, entries, _bytes(own)))
    return Summary(rows, _bytes(shared))


def folded(rows: Sequence[SummaryRow]) -> list[Folded]:
    """Rows that differ in the numbers of their paths only as one, in the order of the first."""

    def kind(row: SummaryRow) -> Any:
        return _starred(row.path), row.shape, row.rules, row.matrices

    place: dict[Any, int] = {}
    for row in rows:
        place.setdefault(kind(row), len(place))
    ordered = sorted(rows, key=lambda row: place[kind(row)])
    groups = [[*some] for _, some in groupby(ordered, key=kind)]
    return [Folded(_starred(x[0].path) if len(x) > 1 else x[0].path, x) for x in groups]


def _starred(path: str) -> str:
    return ".".join(["*" if name.isdecimal() else name for name in path.split(".")])


def _without_data(p: Any) -> Any:
    return torch.empty(p.shape, dtype=p.dtype, device="meta") if isinstance(p, Tensor) else p


def _acting(tx: Any, path: str, p: Tensor) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The names of the rules that act on a parameter, and the matrices that it is seen as."""
    if isinstance(tx, Leafwise):
        mine = tx.on(path, p)
        placements = () if mine is None else mine.placements
        views = [x.rule.view for x in placements if x.rule.view is not None]
        seen = [
            tuple(x.shape)
            for view in views[:1]
            if not view.keeps(p.shape)
            for x in view.parts(p, p.shape)
        ]
        return tuple([x.name or "a rule" for x in placements]), tuple(seen)
    parts = [_acting(part, path, p) for part in tx.children]
    names = tuple([name for own, _ in parts for name in own])
    seen = [own for _, own in parts if own]
    if not isinstance(tx, Chained):
        call = getattr(tx, "made", None)
        own = getattr(call and call.factory, "__name__", type(tx).__name__)
        names = (f"{own}({', '.join(names)})",)
    return names, seen[0] if seen else ()


def _kept(state: Any, above: str, known: dict[str, Tensor]) -> Iterator[tuple[str | None, Tensor]]:
    """The tensors of a state, each with the path of its parameter; None for those of all."""
    if isinstance(state, State):
        for slot in state.slots.values():
            yield from [(path if path in known else None, x) for path, x in tree.items(slot)]
        rest = (state.step, *state.carry.values(), *state.hyper.values())
        yield from [(None, x) for x in rest]
    elif isinstance(state, Tensor):
        ends = [path for path in known if f".{above}".endswith(f".{path}") and path]
        lone = "" in known and known[""].shape == state.shape
        yield max(ends, key=len, default="" if lone else None), state
    elif isinstance(state, dict):
        for key, x in state.items():
            yield from _kept(x, f"{above}.{key}", known)
    elif isinstance(state, (tuple, list)):
        names = getattr(state, "_fields", range(len(state)))
        for key, x in zip(names, state, strict=True):
            yield from _kept(x, f"{above}.{key}", known)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum([x.numel() * x.element_size() for x in tensors])


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1000
    return f"{count:.3g} GB"
