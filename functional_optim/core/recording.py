"""Graphs of the operations of rules on one tensor.

A rule is recorded on tensors of a few elements, of two sizes. The common part of both recordings
holds for every size: see `kernels/graph.py`. The key of a graph is the code of its rules, so a
recipe that is rebuilt with other hyperparameters is not recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functional_optim.core import base
from functional_optim.core.codecs import InBlocks
from functional_optim.core.execution import Leaf, measure, run_all_stored
from functional_optim.core.modes import with_cpu_as_default
from functional_optim.core.numbers import Form, flag_of, kinds_of, tensor_of, with_forms
from functional_optim.core.rule import Goal, Placement
from functional_optim.core.small import check_shapes, filled, sizes_of, slots_like, small_shapes
from functional_optim.core.storage import Slots, missing_slots, stored_slots
from functional_optim.kernels import asked, record
from functional_optim.kernels import graph as graphs
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.keys import static_key
from functional_optim.kernels.node import RuleError, Unsuitable

LARGE = 1 << 23
"""Elements above which rules are recorded without memory. torch imports what that takes in a
second."""


class Recorded(NamedTuple):
    """A graph, and the constants in it that depend on the shape of a tensor."""

    graph: Graph
    constants: tuple[float, ...]


class OddLayout(Unsuitable):
    """A tensor that must be contiguous for a kernel."""


class _Known:
    """The recording for one kind of tensors. constants: by shape."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.constants: dict[tuple[int, ...], tuple[float, ...]] = {}


Kept = dict[Any, _Known | tuple[str, int | None]]
"""Recordings, by the code of the rules and the properties of their tensors; if there is no graph,
the reason and its rule."""

_known: Kept = {}
_of_steps: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()


def kept_for(step: Any) -> Kept:
    """The recordings of a step, or an optimizer, for rules that are not of this package."""
    return _of_steps.setdefault(step, {})


class Body:
    """The operations of rules on a leaf.

    missing: for each rule, whether each of its slots is missing. forms: the structure of its
    scalars. kept: the store for recordings of rules that may read changing values, such as
    attributes of an object: a new step records these again. Rules of this package are recorded
    once for all steps.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        missing: Sequence[tuple[bool, ...]],
        forms: tuple[Form, ...],
        goal: Goal,
        kept: Kept | None = None,
    ) -> None:
        self.placements = placements
        self.own = all(x.rule.own for x in placements)
        """Whether the values that rules read by name, or draw, are constant."""
        self.kept = _known if kept is None or self.own else kept
        self.missing = missing
        self.forms = forms
        self.goal: Goal = goal
        kinds = kinds_of(forms)
        self.count = len(kinds)
        """Number of scalars that it reads."""
        self.whole = {i: kind for i, kind in enumerate(kinds) if kind is not float}
        """Which of them are ints, and which are bools."""
        self.key = (goal, forms, tuple(missing), tuple([key_of(x) for x in placements]))

    @with_cpu_as_default
    def find(self, g: Tensor, p: Tensor, slots: Sequence[Slots]) -> Recorded:
        """The graph for tensors like these: it holds for all sizes of this number of dimensions.

        Raises:
            Unsuitable: if a kernel cannot run it.
            RuleError: if a rule does something that steps do not support.
        """
        if object in self.whole.values():
            raise Unsuitable("a large int among the scalars of a rule")
        key = self.looks(g, p, slots)
        _, block, *_ = key
        known = self.kept.get(key)
        if known is None:
            try:
                known = _Known(self._graph(g, p, slots, block))
            except Unsuitable as error:
                known = (str(error), error.rule)
            self.kept[key] = known
        if isinstance(known, tuple):
            raise Unsuitable(*known)
        if not block:
            check_shapes(known.graph, p, slots)
        if not p.is_contiguous() and (len(known.graph.sizes) > 1 or known.graph.reads_places):
            raise OddLayout("rows of a tensor that is not contiguous")
        if not known.graph.reads_sizes:
            return Recorded(known.graph, ())
        shape = tuple(p.shape)
        if shape not in known.constants:
            real = self._real(g, p, slots)
            first = self._first(g, p, slots)
            if not graphs.fits(first, real, sizes_of(p)):
                raise Unsuitable("another graph for another shape")
            places = graphs.differing(first, real)
            if places and not self.own and graphs.differing(real, self._real(g, p, slots)):
                raise self._changing()
            if not {*places} <= {*known.graph.places}:
                places = sorted({*places, *known.graph.places}, key=str)
                graph = graphs.with_rows(graphs.merged(first), places)
                known = self.kept[key] = _Known(graph)
            known.constants[shape] = graphs.values_at(real, known.graph.places)
        return Recorded(known.graph, known.constants[shape])

    def looks(self, g: Tensor, p: Tensor, slots: Sequence[Slots]) -> tuple[Any, ...]:
        """The key of these rules, and tensors like these; the second item is the elements of a
        block."""
        block = self._block(p, slots)
        made_as = torch.get_default_dtype()  # of tensors that a rule creates from Python numbers
        return self.key, block, made_as, _pattern(g, p, slots, shapes=not block)

    def is_flat(self, g: Tensor, p: Tensor, slots: Sequence[Slots], *, whole: bool = False) -> bool:
        """Whether rules treat a tensor like the vector of its elements.

        whole: also if they use reductions of the whole tensor, or the index of an element.

        Raises:
            RuleError: if a rule does something that steps do not support.
        """

        def flat(x: Any) -> Any:
            if x is None or x.shape != p.shape:
                return x
            return x.new_empty(x.numel(), device="meta")

        try:
            mine = self.find(g, p, slots).graph
            rows = [tuple(map(flat, own)) for own in slots]
            others = self.find(flat(g), flat(p), rows).graph
        except Unsuitable:
            return False
        same = graphs.same_flat(mine, others) and not graphs.differing(mine, others)
        along = whole and len(mine.sizes) == 1 and not mine.places
        return same and (along or mine.by_element())

    def _graph(self, g: Tensor, p: Tensor, slots: Sequence[Slots], block: int) -> Graph:
        if block:
            return self._in_blocks(g, p, slots, block)
        dims = p.dim()
        first = self._first(g, p, slots)
        tiny = small_shapes(dims)[1]
        if dims or p.is_complex():
            second = self._recorded(g, p, slots, tiny)
        else:
            second = self._run(self.tensors(g, p, slots, tiny), keep=True)
        # a number becomes a vector of one element, if that is equivalent
        if not (graphs.same(first, second) if dims else graphs.fits(first, second, sizes_of(p))):
            raise Unsuitable("another graph for another shape")
        places = graphs.differing(first, second)
        if places and not self.own and graphs.differing(first, self._first(g, p, slots)):
            raise self._changing()
        if places and not first.reads_sizes:
            raise Unsuitable("a constant that depends on the shape")
        return graphs.with_rows(graphs.merged(first), places)

    def _first(self, g: Tensor, p: Tensor, slots: Sequence[Slots]) -> Graph:
        dims = p.dim() if p.is_complex() else max(p.dim(), 1)
        return self._recorded(g, p, slots, small_shapes(dims)[0])

    def _changing(self) -> RuleError:
        return RuleError(
            f"the rule {self._name(None)} computes with other numbers when it is called again with "
            "the same arguments, which a compiled step does not do; pass what changes from step to "
            "step as a hyperparameter, keep it in a slot, or draw random numbers by "
            "functional_optim.add_noise."
        )

    def _real(self, g: Tensor, p: Tensor, slots: Sequence[Slots]) -> Graph:
        """A recording on tensors of the real shape, for rules that read sizes; on large ones
        without memory, if the rules run on such."""
        if p.numel() > LARGE:
            with suppress(Unsuitable):
                return self._run(self.real_tensors(g, p, slots, without_memory), keep=False)
        return self._run(self.real_tensors(g, p, slots), keep=False)

    def real_tensors(
        self,
        g: Tensor,
        p: Tensor,
        slots: Sequence[Slots],
        make: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
    ) -> list[Tensor]:
        """Other tensors like these, of the same shapes. make: a tensor of a shape and a dtype;
        default: `filled`."""
        every = [g, p, *[x for own in slots for x in own if x is not None]]
        return [as_pairs((make or filled)(x.shape, x.dtype)) for x in every]

    def _block(self, p: Tensor, slots: Sequence[Slots]) -> int:
        """The elements of a block of packed slots; 0 without packed slots.

        Raises:
            Unsuitable: if blocks have several sizes.
        """
        codecs = {
            own.codec
            for placement, mine in zip(self.placements, slots, strict=True)
            if mine and placement.rule.storage.codecs
            for own in stored_slots(placement.rule, mine)
            if own.codec is not None
        }
        blocks = {x.block for x in codecs if isinstance(x, InBlocks) and not x.entrywise}
        if len(blocks) > 1 or (blocks and p.is_complex()):
            raise Unsuitable("slots in blocks of several sizes")
        return next(iter(blocks), 0)

    def _in_blocks(self, g: Tensor, p: Tensor, slots: Sequence[Slots], block: int) -> Graph:
        """The graph for a tensor as 1-D, and in blocks."""
        plain = Body(
            [x._replace(rule=x.rule.without_codecs()) for x in self.placements],
            [missing_slots(x.rule, own) for x, own in zip(self.placements, slots, strict=True)],
            self.forms,
            self.goal,
            self.kept,
        )
        whole = torch.empty_like(p, dtype=torch.float32, device="meta")
        rows = [
            tuple([None if lacks else whole for lacks in own]) if x.rule.storage.codecs else mine
            for x, own, mine in zip(self.placements, plain.missing, slots, strict=True)
        ]
        if not plain.is_flat(g, p, rows, whole=True):
            raise Unsuitable("packed slots of a rule that is not element-wise")
        found: list[Graph] = []
        codecs = [x for own in self.placements for x in own.rule.storage.codecs.values()]
        # in 4 bits a byte holds two elements, from both halves of a block
        half = any(isinstance(x, InBlocks) and getattr(x.cells, "bits", 8) == 4 for x in codecs)
        inner = (-2, -block // 2) if half else (-block,)
        for count in (7, 11):
            seen = self.tensors(g, p, slots, (count * block,))
            found.append(self._laid_out(seen, (count, *inner), block))
        if not graphs.same(*found) or graphs.differing(*found):
            raise Unsuitable("another graph for another shape")
        made = graphs.merged(found[0])
        made.block = block
        return made

    def _recorded(
        self, g: Tensor, p: Tensor, slots: Sequence[Slots], shape: tuple[int, ...]
    ) -> Graph:
        """A recording on tensors of a shape, with the axes of each value."""
        sizes = (*shape, 2) if p.is_complex() else shape
        return self._laid_out(self.tensors(g, p, slots, shape), sizes, 0)

    def _laid_out(self, seen: list[Tensor], sizes: Sequence[int], block: int) -> Graph:
        return graphs.laid_out(self._run(seen, keep=True, block=block), sizes)

    def constants(
        self, graph: Graph, g: Tensor, p: Tensor, slots: Sequence[Slots], shape: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Those of a small tensor of a shape."""
        if not graph.places:
            return ()
        return graphs.values_at(self._recorded(g, p, slots, shape), graph.places)

    def _run(self, tensors: list[Tensor], *, keep: bool, block: int = 0) -> Graph:
        made = partial(self.made, block=block)
        for _ in range(3):  # another thread may draw, too
            before = None if self.own else record.drawn()
            found = self._recording(made, tensors, keep)
            if self.own or before == record.drawn():
                break
        else:
            found = self._beside_draws(made, tensors, keep)
        node = found.opaque()
        if node is not None:
            raise Unsuitable(node.what, node.rule)
        return found

    def _beside_draws(self, made: Any, tensors: list[Tensor], keep: bool) -> Graph:
        """A recording while another thread draws all the time; RuleError for a rule that draws."""
        if record.others_draw():
            found, again = (self._recording(made, tensors, keep) for _ in range(2))
            if graphs.same(found, again) and not graphs.differing(found, again):
                return found
        raise self._changing()

    def _recording(self, made: Any, tensors: list[Tensor], keep: bool) -> Graph:
        try:
            return record.record(made, tensors, self.count, self._name, keep=keep)
        except (RuleError, Unsuitable):
            raise
        except Exception as error:  # from a rule that does not support this shape
            raise Unsuitable(f"{type(error).__name__}: {error}") from error

    def tensors(
        self, g: Tensor, p: Tensor, slots: Sequence[Slots], shape: tuple[int, ...]
    ) -> list[Tensor]:
        """Small tensors like these: the gradient, the parameter and the slots, as rules see them.

        shape: of the parameter.
        """
        tiny = filled(shape, p.dtype)
        pairs = zip(self.placements, slots, strict=True)
        mine = [x for placement, own in pairs for x in slots_like(placement, tiny, p, own)]
        return list(map(as_pairs, (filled(shape, g.dtype), tiny, *mine)))

    def made(
        self,
        recorder: record.Recorder | None,
        tensors: list[Tensor],
        vector: Tensor,
        *,
        block: int = 0,
    ) -> record.Results:
        """The results of the rules for a leaf; recorded, if there is a recorder. block: the size of
        blocks, if any."""
        g, p, *rest = tensors
        placements = self.placements
        if recorder is not None:
            inside = None
            if block:
                inside = torch.ones(p.shape, dtype=torch.bool, device="cpu")
                recorder.note(inside, "inside")
            placements = [_watched(x, recorder, k, inside) for k, x in enumerate(placements)]
        flat: list[Any] = vector.tolist() if recorder is None else [*vector.unbind()]
        for i, kind in self.whole.items():
            if recorder is not None:
                flat[i] = recorder.whole(flat[i], kind)
            else:
                flat[i] = flag_of(flat[i] != 0, "cpu") if kind is bool else kind(flat[i])
        numbers = with_forms(iter(flat), self.forms)
        leaf = Leaf(g, p, with_missing(rest, self.missing), numbers)
        kept: list[Tensor | None] = [None] * len(tensors)
        if self.goal == "reduce":
            return kept, [_number(x) for x in measure(placements, leaf)]
        ((u, new),) = run_all_stored(placements, [leaf])
        fresh = [
            x
            for own, old in zip(new, leaf.slots, strict=True)
            for x, y in zip(own, old, strict=True)
            if y is not None
        ]
        if self.goal == "stage":
            last = len([x for x in leaf.slots[-1] if x is not None])
            return [*kept[: len(kept) - last], *fresh[len(fresh) - last :]], ()
        return [None, base.add(p, u), *fresh], ()

    def _name(self, rule: int | None) -> str:
        if rule is None:
            return " or ".join(dict.fromkeys([repr(x.name) for x in self.placements]))
        return repr(self.placements[rule].shown)


def without_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that has no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def as_pairs(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in the last dimension."""
    return torch.view_as_real(x) if x.is_complex() else x


def key_of(placement: Placement) -> Any:
    """The key of a rule: its code, without its scalars."""
    rule, storage = placement.rule, placement.rule.storage
    functions = (*rule.updates, rule.reduce, rule.init, storage.codecs, storage.slots)
    own = (storage.view, storage.weight_codec, storage.home is None)
    kind = (*own, rule.runs.after == "step")
    return (static_key(functions), kind, placement.lookback, placement.name)


def _number(x: Any) -> Tensor:
    return tensor_of(x if isinstance(x, Tensor) else float(x))


def _watched(
    placement: Placement, recorder: record.Recorder, k: int, inside: Tensor | None
) -> Placement:
    """The same rule, whose functions tell the recorder that they run."""
    rule = placement.rule

    def watched(function: Any) -> Any:
        return None if function is None else asked.inside(recorder, k, function)

    if inside is not None:
        codecs = rule.storage.codecs.items()
        rule = rule.stored_by(codecs={name: _masked(x, inside) for name, x in codecs})
    updates = tuple(map(watched, rule.updates))
    return placement._replace(rule=rule._replace(updates=updates, reduce=watched(rule.reduce)))


def _masked(codec: Any, inside: Tensor) -> Any:
    """A codec whose last block may be larger than the rest of its tensor, and is padded with
    zeros."""
    if not isinstance(codec, InBlocks) or codec.entrywise:
        return codec

    def encode(x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        return codec.encode(torch.where(inside, x, 0.0), key)

    return SimpleNamespace(fields=codec.fields, decode=codec.decode, encode=encode)


def _pattern(g: Tensor, p: Tensor, slots: Sequence[Slots], *, shapes: bool) -> Any:
    """The common properties of tensors that share a graph. shapes: whether to include those of
    slots."""

    def look(x: Tensor) -> Any:
        if not shapes:
            return x.dtype
        if x.dim() == p.dim():
            return x.dtype, tuple([n == m or n for n, m in zip(x.shape, p.shape, strict=True)])
        return x.dtype, tuple(x.shape)

    looks = tuple([None if x is None else look(x) for own in slots for x in own])
    return p.dim(), g.dtype, p.dtype, p.is_contiguous(), looks


def with_missing(given: Sequence[Tensor], missing: Sequence[Sequence[bool]]) -> list[Slots]:
    """The inverse of `present`. missing: for each rule, whether each of its slots is missing."""
    supply = iter(given)
    return [tuple([None if lacks else next(supply) for lacks in own]) for own in missing]
