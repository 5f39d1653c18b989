"""Tables of the rules of each parameter, their matrix views, and the storage of their slots."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import base
from functional_optim.core.chain import MixedChain
from functional_optim.core.first_slots import slots_like
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import State
from functional_optim.core.paths import Answers, unfit
from functional_optim.core.rule import Rule
from functional_optim.core.storage import stored_slots
from functional_optim.core.traits import is_elementwise
from functional_optim.kernels.callers import warn
from functional_optim.tuning.tables import Table, drawn, plain

T = TypeVar("T")


class SummaryRow(NamedTuple):
    """One parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.freeze("embed"), fo.adam())
        >>> table = fo.summary(tx, {"embed": torch.zeros(9, 4), "head": torch.zeros(4)})
        >>> [(row.path, row.bytes) for row in table.rows if not row.rules]  # frozen
        [('embed', 0)]
    """

    path: str
    shape: tuple[int, ...]
    rules: tuple[str, ...]
    """The names of the rules that act on it, in order; none if it is frozen."""
    matrices: tuple[tuple[int, ...], ...]
    """The shapes (k, out, in) of its matrix views, and (k, …) of a kernel whose dimensions are
    treated separately; none if it has no view."""
    elements: int
    """Number of elements in its state."""
    bytes: int
    """Bytes of its state."""
    slots: tuple[tuple[str, str], ...] = ()
    """The name of each slot, and its storage: a dtype, or for example `int8 in blocks of 256`."""
    left_out: str = ""
    """Why `stored` does not pack it; empty if it does, or without `stored`."""
    weight_bytes: int = 0
    """Bytes of the parameter."""
    step_bytes: int = 0
    """Bytes of the parameter, its gradient and its slots that a step reads and writes."""
    group: str = ""
    """Its parameter group in an optimizer object."""

    @property
    def entries(self) -> int:
        """Deprecated: `elements`."""
        warn("SummaryRow.entries is deprecated; read elements.", DeprecationWarning)
        return self.elements

    @property
    def view(self) -> str:
        """The matrices in words, such as `3 × (768, 768)`."""
        each = [
            (f"{k} × " if k > 1 else "") + f"{tuple(own)}" + (" by dimension" if own[2:] else "")
            for k, *own in self.matrices
        ]
        return " + ".join(each)

    @property
    def storage(self) -> str:
        """The slots in words, "exp_avg: int8 in blocks of 256", and why a leaf is not packed."""
        kinds = _grouped(self.slots, lambda slot: slot[1])
        named = {kind: ", ".join([name for name, _ in some]) for kind, some in kinds.items()}
        text = "; ".join([f"{names}: {kind}" for kind, names in named.items()])
        return f"{text} (not packed: {self.left_out})" if self.left_out else text


class Folded(NamedTuple):
    """Rows whose paths differ in numbers only, with `*` for these."""

    path: str
    rows: list[SummaryRow]

    @property
    def label(self) -> str:
        """The path, and the number of rows."""
        path = self.path or "(the tensor)"
        return f"{path} ×{len(self.rows)}" if len(self.rows) > 1 else path


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """Tables of parameters: `print` them, or read the `rows`.

    rows: one `SummaryRow` for each parameter. shared: bytes of state that belong to all parameters
    together.
    numbers: the bytes of `shared` in step counts, carried scalars and hyperparameters. exact:
    whether `step_bytes` is all that a step moves, because every rule is element-wise and measures
    nothing. unfit: patterns that match no parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"w": torch.zeros(1000, 1000)}
        >>> [fo.summary(tx, params).state_bytes for tx in (fo.adam(), fo.adafactor(), fo.sgd(0.1))]
        [8000000, 8000, 0]
    """

    rows: tuple[SummaryRow, ...]
    shared: int = 0
    numbers: int = 0
    exact: bool = True
    unfit: tuple[str, ...] = ()

    @property
    def state_bytes(self) -> int:
        """The bytes of all slots: of the state without its `numbers`."""
        return sum([row.bytes for row in self.rows]) + self._flat

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters."""
        return sum([row.weight_bytes for row in self.rows])

    @property
    def grad_bytes(self) -> int:
        """The bytes of the gradients, in the dtypes of their parameters; frozen ones have none."""
        return sum([row.weight_bytes for row in self.rows if row.rules])

    @property
    def step_bytes(self) -> int:
        """The bytes that a step reads and writes in which all rules act.

        A gradient is read; a parameter and each slot, as it is stored, are read and written.
        Tensors that rules read again or store temporarily, for norms and matrix products, are not
        included (`exact` is then False). Transformations that do not consist of one-tensor rules
        read at least their state.
        """
        return sum([row.step_bytes for row in self.rows]) + self._flat

    @property
    def _flat(self) -> int:
        """The bytes of vectors for all parameters together."""
        return self.shared - self.numbers

    def __str__(self) -> str:
        return drawn(*self._parts()) if self.rows else "no parameters"

    def __repr__(self) -> str:
        return plain(*self._parts()) if self.rows else "no parameters"

    def _parts(self) -> tuple[list[list[Table]], list[str]]:
        """The tables and the notes below them."""
        seen = any(row.matrices for row in self.rows)
        head = ("parameter", "shape", *(("seen as",) if seen else ()), "elements", "state")
        right = (len(head) - 2, len(head) - 1)
        tables = []
        sections = _grouped(self.rows, lambda row: (row.group, row.rules, row.storage))
        for (group, rules, storage), some in sections.items():
            lines = [group, " → ".join(rules) or "frozen", storage]
            cells = [_cells(one, seen=seen) for one in folded(some)]
            tables.append(Table(head, tuple(cells), tuple([x for x in lines if x]), right))
        notes = []
        if self.unfit:
            notes = [f"patterns that match no parameter: {', '.join(map(repr, self.unfit))}"]
        return [tables, [self._totals()]], notes

    def _totals(self) -> Table:
        count, elements = len(self.rows), sum([math.prod(row.shape) for row in self.rows])
        least = "" if self.exact else ", at least"
        totals = {
            "weights": self.weight_bytes,
            "gradients": self.grad_bytes,
            "state": self.state_bytes,
            **({"of it for all parameters together": self._flat} if self._flat else {}),
            f"read and written in a step{least}": self.step_bytes,
        }
        per = max(elements, 1)
        rows = [(name, _size(x), _number(x / per) + " B") for name, x in totals.items()]
        name = (
            f"{count} parameter{'s' if count > 1 else ''}, "
            f"{elements:,} element{'s' if elements != 1 else ''}"
        )
        return Table((name, "bytes", "per element"), tuple(rows), right=(1, 2))


def summary(tx: base.GradientTransformation, params: Any) -> Summary:
    """Tables of the rules that act on each parameter, their matrix views, and memory.

    No tensor of the size of a parameter is allocated, and no step is taken. DTensors count as whole
    tensors, not as the shards of one process.

    Args:
        tx: a transformation.
        params: a tree of parameters, such as `dict(model.named_parameters())`; the tables have its
            order. May be on the meta device.

    Returns:
        A `Summary`. It prints one table for each set of rules and storage format, with totals
        below, in frames if rich is installed. Rows whose paths differ in numbers only, such as
        those of the layers of a network, are printed as one. It has one element of `rows` for each
        parameter: `path`, `shape`, `rules`, `view` and `matrices`, `slots` with their storage,
        `left_out`, `elements` and `bytes` of its state. `state_bytes`, `weight_bytes`, `grad_bytes`
        and `step_bytes` are the totals. A transformation that does not consist of one-tensor rules
        is one rule, with its inner rules in parentheses.

    Raises:
        ValueError, TypeError: as the transformation's own `init`.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"up": torch.zeros(64, 64), "norm": torch.zeros(64)}
        >>> table = fo.summary(fo.stored(fo.adam(), "int8"), params)
        >>> table
        scale_by_adam → scale_by_lr
        exp_avg, exp_avg_sq: int8 in blocks of 256
          parameter  shape     elements    state
          up         (64, 64)     4,096  8.32 kB
        <BLANKLINE>
        scale_by_adam → scale_by_lr
        exp_avg, exp_avg_sq: float32 (not packed: under 4,096 elements)
          parameter  shape     elements    state
          norm       (64,)           64    512 B
        <BLANKLINE>
        2 parameters, 4,160 elements    bytes  per element
        weights                       16.6 kB          4 B
        gradients                     16.6 kB          4 B
        state                         8.83 kB       2.12 B
        read and written in a step    67.6 kB       16.2 B
        >>> table.state_bytes
        8832
    """
    base.check_transformation("summary", tx, "summary(adamw(), params)")
    return summary_of([("", tx, params)])


def summary_of(parts: Iterable[tuple[str, base.GradientTransformation, Any]]) -> Summary:
    """One summary of several trees, each with a name and a separate transformation."""
    rows: list[SummaryRow] = []
    asked: list[tuple[Answers, list[str]]] = []
    shared = numbers = 0
    exact = True
    last = None
    for group, tx, params in parts:
        empty = tree.map(_without_data, OrderedDict(params) if type(params) is dict else params)
        known = dict(tree.items(empty))
        asked += [(x.answers, list(known)) for own in tx.placements for x in own.choices()]
        exact = exact and _moves_no_more(tx)
        own = _grouped(_kept_by(tx, tx.init(empty), known), lambda x: x.path)
        rows += [_row(group, tx, path, p, own.get(path, [])) for path, p in known.items()]
        if tx is not last:  # several parts of one tree share it
            every = own.get(None, [])
            shared += _bytes([x.tensor for x in every])
            numbers += _bytes([x.tensor for x in every if x.number])
        last = tx
    missed = dict.fromkeys([pattern for _, pattern in unfit(asked)])
    return Summary(tuple(rows), shared, numbers, exact, tuple(missed))


class StateTensor(NamedTuple):
    """A tensor of a state.

    part: its transformation. path: of its parameter; None if it belongs to all.
    number: whether it is a step count, a carried scalar or a hyperparameter.
    """

    part: base.GradientTransformation
    path: str | None
    name: str
    tensor: Tensor
    number: bool = False


def _row(group: str, tx: Any, path: str, p: Tensor, own: Sequence[StateTensor]) -> SummaryRow:
    names, matrices = _acting(tx, path, p)
    tensors = [x.tensor for x in own]
    slots: list[tuple[str, str]] = []
    left_out = ""
    for part in _parts_of(tx):
        if isinstance(part, Leafwise):
            found, why = _slots(part, path, p)
            slots += found
            left_out = left_out or why
        else:
            slots += [(x.name, _dtype(x.tensor)) for x in own if x.part is part]
    weight = _bytes([p])
    both = _bytes([x.tensor for x in own if isinstance(x.part, Leafwise)])
    moved = 3 * weight + both + _bytes(tensors) if names else 0
    elements = sum([x.numel() for x in tensors])
    return SummaryRow(
        *(path, tuple(p.shape), names, matrices, elements, _bytes(tensors)),
        *(tuple(slots), left_out, weight, moved, group),
    )


def _slots(tx: Leafwise, path: str, p: Tensor) -> tuple[list[tuple[str, str]], str]:
    """The slots of a leaf with their storage, and why they are not packed."""
    found: list[tuple[str, str]] = []
    left_out = ""
    mine = tx.on(path, p)
    rows = () if mine is None else zip(mine.placements, mine.layout.slots, strict=True)
    for (rule, *_), names in rows:
        tensors = slots_like(rule, p, path)
        if not rule.storage.codecs:
            pairs = zip(names, tensors, strict=True)
            found += [(name, _dtype(x)) for name, x in pairs if x is not None]
            continue
        packs, fields = rule.storage.packs, rule.storage.fields
        for field, own in zip(fields, stored_slots(rule, tensors), strict=True):
            name = _name(rule, names, field)
            if own.codec is not None:
                found.append((name, getattr(own.codec, "text", type(own.codec).__name__)))
            elif own.whole is not None:
                found.append((name, _dtype(own.whole)))
                if field in rule.storage.codecs and packs is not None:
                    left_out = packs.left_out(path, p)
    return found, left_out


def _name(rule: Rule, names: Sequence[str], field: str) -> str:
    """The name of a slot, from those of the tensors in which it is stored."""
    for key, name in zip(rule.keys, names, strict=True):
        if key == field or key.startswith(f"{field}."):
            return name.removesuffix(key) + field
    return field


def _grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Groups of items with equal keys, in the order of the first."""
    found: dict[Any, list[T]] = {}
    for x in items:
        found.setdefault(key(x), []).append(x)
    return found


def _cells(one: Folded, *, seen: bool) -> tuple[str, ...]:
    first = one.rows[0]
    view = (first.view or "as it is",) if seen else ()
    elements = len(one.rows) * math.prod(first.shape)
    size = _size(sum([row.bytes for row in one.rows]))
    return (one.label, str(first.shape), *view, f"{elements:,}", size)


def folded(rows: Sequence[SummaryRow]) -> list[Folded]:
    """Rows whose paths differ in numbers only, merged, in the order of the first."""

    def kind(row: SummaryRow) -> Any:
        return _starred(row.path), row.shape, row.rules, row.matrices, row.storage

    groups = _grouped(rows, kind).values()
    return [Folded(_starred(x[0].path) if len(x) > 1 else x[0].path, x) for x in groups]


def _starred(path: str) -> str:
    return ".".join(["*" if name.isdecimal() else name for name in path.split(".")])


def _without_data(p: Any) -> Any:
    return torch.empty(p.shape, dtype=p.dtype, device="meta") if isinstance(p, Tensor) else p


def _acting(tx: Any, path: str, p: Tensor) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The names of the rules that act on a parameter, and its matrix views."""
    if isinstance(tx, Leafwise):
        mine = tx.on(path, p)
        placements = () if mine is None else mine.placements
        views = [x.rule.storage.view for x in placements if x.rule.storage.view is not None]
        seen = [
            tuple(x.shape)
            for view in views[:1]
            if view.reshapes(p.shape)
            for x in view.parts(p, p.shape)
        ]
        return tuple([x.name or "a rule" for x in placements]), tuple(seen)
    parts = [_acting(part, path, p) for part in tx.children]
    names = tuple([name for own, _ in parts for name in own])
    seen = [own for _, own in parts if own]
    if not isinstance(tx, MixedChain):
        call = getattr(tx, "made", None)
        own = getattr(call and call.factory, "__name__", type(tx).__name__)
        names = (f"{own}({', '.join(names)})",)
    return names, seen[0] if seen else ()


def _parts_of(tx: Any) -> tuple[base.GradientTransformation, ...]:
    return tx.parts if isinstance(tx, MixedChain) else (tx,)


def _moves_no_more(tx: base.GradientTransformation) -> bool:
    """Whether a step reads each tensor once."""
    like = torch.empty((2, 2), device="cpu")
    return all(isinstance(part, Leafwise) for part in _parts_of(tx)) and all(
        x.rule.reduce is None and is_elementwise(x, like) for x in tx.placements
    )


def _kept_by(tx: Any, state: Any, known: dict[str, Tensor]) -> Iterator[StateTensor]:
    """The tensors of a state. known: the parameters by path."""
    states = state if isinstance(tx, MixedChain) else (state,)
    for part, own in zip(_parts_of(tx), states, strict=True):
        yield from _kept(part, own, "", known)


def _kept(part: Any, state: Any, above: str, known: dict[str, Tensor]) -> Iterator[StateTensor]:
    if isinstance(state, State):
        for name, slot in state.slots.items():
            for path, x in tree.items(slot):
                yield StateTensor(part, path if path in known else None, name, x)
        rest = (state.step, *state.carry.values(), *state.hyper.values())
        yield from [StateTensor(part, None, "", x, number=True) for x in rest]
    elif isinstance(state, Tensor):
        alike = [path for path, p in known.items() if p.shape == state.shape]
        ends = [path for path in alike if f".{above}".endswith(f".{path}") and path]
        lone = "" in alike
        path = max(ends, key=len, default="" if lone else None)
        name = above.removesuffix(f".{path}").strip(".")
        yield StateTensor(part, path, name, state, number=path is None and state.dim() == 0)
    elif isinstance(state, (dict, tuple, list)):
        names = state if isinstance(state, dict) else getattr(state, "_fields", range(len(state)))
        values = state.values() if isinstance(state, dict) else state
        for key, x in zip(names, values, strict=True):
            yield from _kept(part, x, f"{above}.{key}", known)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum([x.numel() * x.element_size() for x in tensors])


def _number(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1000
    return f"{count:.3g} GB"
