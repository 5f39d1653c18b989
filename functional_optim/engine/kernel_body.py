"""What rules do to one tensor, recorded as a graph for kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core import base
from functional_optim.core.execution import Leaf, measure, run_all_stored
from functional_optim.core.rule import Form, Placement, with_forms
from functional_optim.core.storage import Slots, compute_dtype, init_slots, with_holes
from functional_optim.engine.executor import Goal
from functional_optim.kernels import graph as graphs
from functional_optim.kernels import record
from functional_optim.kernels.graph import Graph, Unsuitable
from functional_optim.kernels.print_cpp import Source

class Recorded:
    """A graph, and the tensors for which it holds.

    body: what was recorded. like: the gradient, the parameter and the slots of one of the tensors.
    rules: of how many rules. members: the indices of the tensors. sizes: for each of them those of
    the graph's axes. constants: those that depend on its shape.
    """

    def __init__(self, body: KernelBody, graph: Graph, like: Any, *, rules: int) -> None:
        self.body = body
        self.graph = graph
        self.like = like
        self.rules = rules
        self.source = Source(graph)
        self.members: list[int] = []
        self.sizes: list[list[int]] = []
        self.constants: list[tuple[float, ...]] = []

    @property
    def request(self) -> kernels.Request:
        """Its library."""
        return kernels.Request(self.source, self._check)

    def _check(self, native: kernels.Native) -> None:
        """Raise Unsuitable unless a library does to tensors what the rules do."""
        g, p, slots = self.like
        for shape in _shapes(max(p.dim(), 1)):
            given = self.body.tensors(g, p, slots, shape)
            numbers = torch.linspace(0.3, 0.7, max(self.body.count, 1), dtype=torch.float64)
            numbers = numbers[: self.body.count]
            with torch.no_grad():
                new, found = self.body.made(None, [x.clone() for x in given], numbers)
            real = [x.clone() for x in given]
            sizes = [self.graph.sizes_of(shape_of(real[1]))]
            rows = [list(map(Tensor.data_ptr, real[1:]))]
            constants = [self.body.constants(self.graph, g, p, slots, shape)]
            launch = kernels.Launch(native, sizes, rows, constants, 1, chunk=16)
            totals = launch.ready([real[0]], [tuple(numbers.tolist())])()
            for x, y in zip(real, new, strict=True):
                if y is not None:
                    kernels.compare(x, y.to(x.dtype))
            for x, y in zip(totals, found, strict=True):
                kernels.compare(torch.tensor(x), y.to(torch.float32))


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, a number as one of one element."""
    return tuple(x.shape) or (1,)


def _seen_shape(p: Tensor) -> tuple[int, ...]:
    return (*(p.shape or (1,)), 2) if p.is_complex() else shape_of(p)


class Known(NamedTuple):
    """A graph with its constants by the shape of a parameter."""

    own: Recorded
    graph: Graph
    constants: dict[tuple[int, ...], tuple[float, ...]]


class KernelBody:
    """What a kernel does to a leaf: the rules, run on it or measured on it.

    holes: for each rule, which of its slots are missing. forms: how its numbers are put together.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        holes: list[tuple[bool, ...]],
        forms: tuple[Form, ...],
        goal: Goal,
    ) -> None:
        self.placements = placements
        self.holes = holes
        self.forms = forms
        self.goal: Goal = goal

    @property
    def count(self) -> int:
        """How many numbers it reads."""
        return sum([form.total for form in self.forms])

    def graphs(self, rows: Sequence[tuple[Tensor, Tensor, list[Slots]]]) -> list[Recorded]:
        """The graphs for some tensors, each with those for which it holds.

        rows: of each tensor the gradient, the parameter and the slots.

        Raises:
            Unsuitable: if there can be no kernel for one.
            RuleError: if a rule does what no step may.
        """
        found: dict[str, Recorded] = {}
        known: dict[Any, Known] = {}
        for i, (g, p, slots) in enumerate(rows):
            pattern = _pattern(p, slots)
            if pattern not in known:
                graph = self.graph(g, p, slots)
                own = Recorded(self, graph, (g, p, slots), rules=len(slots))
                own = found.setdefault(own.source.text, own)
                known[pattern] = Known(own, graph, {})
            own, graph, constants = known[pattern]
            if graph.reads_sizes and p.shape not in constants:
                constants[p.shape] = self._constants(graph, g, p, slots)
            own.members.append(i)
            own.sizes.append(graph.sizes_of(_seen_shape(p)))
            own.constants.append(constants.get(p.shape, ()))
        return list(found.values())

    def graph(self, g: Tensor, p: Tensor, slots: Sequence[Slots]) -> Graph:
        """The graph for tensors like these: it holds for all sizes of so many dimensions, but for
        its constants that depend on them.

        Raises:
            Unsuitable: if there can be no kernel for it.
            RuleError: if a rule does what no step may.
        """
        shapes = _shapes(p.dim())
        first, second = [self._recorded(g, p, slots, shape) for shape in shapes]
        if not graphs.same(first, second):
            raise Unsuitable("another graph for another shape")
        if p.dim() == 0:  # a vector of one element, if that is all the same
            vector = self._recorded(g, p, slots, *_shapes(1)[:1])
            if not graphs.same(first, vector, dims=False) or graphs.differing(first, vector):
                raise Unsuitable("another graph for a single number")
            first = vector
        places = graphs.differing(first, second) if p.dim() else []
        if first.reads_sizes:
            real = self._recorded_real(g, p, slots)
            if not graphs.same(first, real):
                raise Unsuitable("another graph for another shape")
            places = sorted({*places, *graphs.differing(first, real)}, key=str)
        elif places:
            raise Unsuitable("a constant that depends on the shape")
        first = graphs.with_rows(graphs.merged(first), places)
        if not p.is_contiguous() and len(first.sizes) > 1:
            raise Unsuitable("rows of a tensor that is not contiguous")
        return first

    def _constants(
        self, graph: Graph, g: Tensor, p: Tensor, slots: Sequence[Slots]
    ) -> tuple[float, ...]:
        """The constants that depend on the shape of a tensor.

        Raises:
            Unsuitable: if more depends on it than these.
        """
        real = self._recorded_real(g, p, slots)
        first = self._recorded(g, p, slots, _shapes(p.dim())[0])
        if not graphs.same(first, real) or not {*graphs.differing(first, real)} <= {*graph.places}:
            raise Unsuitable("another graph for another shape")
        return graphs.values_at(real, graph.places)

    def constants(
        self, graph: Graph, g: Tensor, p: Tensor, slots: Sequence[Slots], shape: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Those of a small tensor of a shape."""
        if not graph.places:
            return ()
        return graphs.values_at(self._recorded(g, p, slots, shape), graph.places)

    def _recorded_real(self, g: Tensor, p: Tensor, slots: Sequence[Slots]) -> Graph:
        """A recording on tensors of the real shape, for rules that read sizes."""
        every = [g, p, *[x for own in slots for x in own if x is not None]]
        mine = [_filled(x.shape, x.dtype) for x in every]
        seen = [torch.view_as_real(x) if x.is_complex() else x for x in mine]
        return self._run(seen, keep=False)

    def _run(self, tensors: list[Tensor], *, keep: bool) -> Graph:
        try:
            found = record.record(self.made, tensors, self.count, self._name, keep=keep)
        except (record.RuleError, Unsuitable):
            raise
        except Exception as error:  # of a rule that does not take tensors of this shape
            raise Unsuitable(f"{type(error).__name__}: {error}") from error
        node = found.opaque()
        if node is not None:
            raise Unsuitable(f"the operation {node.op}", node.rule)
        return found

    def _recorded(
        self, g: Tensor, p: Tensor, slots: Sequence[Slots], shape: tuple[int, ...]
    ) -> Graph:
        """A recording on tensors of a shape, with the axes of each value."""
        sizes = (*shape, 2) if p.is_complex() else shape
        seen = self.tensors(g, p, slots, shape)
        found = self._run(seen, keep=True)
        return graphs.laid_out(found, [_axes(x.shape, sizes) for x in seen], sizes)

    def tensors(
        self, g: Tensor, p: Tensor, slots: Sequence[Slots], shape: tuple[int, ...]
    ) -> list[Tensor]:
        """Small tensors like these: the gradient, the parameter and the slots, as rules see them.

        shape: of the parameter.
        """
        tiny = _filled(shape, p.dtype)
        pairs = zip(self.placements, slots, strict=True)
        mine = [x for placement, own in pairs for x in _like(placement, tiny, p, own)]
        every = [_filled(shape, g.dtype), tiny, *mine]
        return [torch.view_as_real(x) if x.is_complex() else x for x in every]

    def made(
        self, recorder: record.Recorder | None, tensors: list[Tensor], vector: Tensor
    ) -> record.Made:
        """What the rules make of a leaf; recorded, if there is a recorder."""
        g, p, *rest = tensors
        placements = self.placements
        if recorder is not None:
            placements = [_watched(x, recorder, k) for k, x in enumerate(placements)]
        numbers = with_forms(iter(vector.unbind()), self.forms)
        leaf = Leaf(g, p, with_holes(rest, self.holes), numbers)
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
        return repr(self.placements[rule].name)


def _number(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((), float(x), dtype=torch.float64)


def _watched(placement: Placement, recorder: record.Recorder, k: int) -> Placement:
    """The same rule, whose functions tell the recorder that they run."""
    rule = placement.rule

    def inside(function: Any) -> Any:
        return None if function is None else record.Inside(recorder, k, function)

    rule = rule._replace(
        updates=tuple(map(inside, rule.updates)),
        reduce=inside(rule.reduce),
        measure=inside(rule.measure),
    )
    return placement._replace(rule=rule)


def _pattern(p: Tensor, slots: Sequence[Slots]) -> Any:
    """What tensors have in common that share a graph."""
    looks = tuple(
        [
            None if x is None else tuple([n == m for n, m in zip(x.shape, p.shape, strict=True)])
            if x.dim() == p.dim()
            else tuple(x.shape)
            for own in slots
            for x in own
        ]
    )
    return p.dim(), looks


def _shapes(dims: int) -> Sequence[tuple[int, ...]]:
    if dims >= len(record.SIZES):
        raise Unsuitable(f"a tensor of {dims} dimensions")
    return record.SIZES[dims]


def _filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of small positive numbers, all different."""
    count = math.prod(shape)
    values = torch.arange(1, 1 + count, dtype=torch.float64).mul_(0.7548776662).frac_().add_(0.1)
    return values.reshape(shape).to(dtype)


def _like(placement: Placement, tiny: Tensor, p: Tensor, slots: Slots) -> list[Tensor]:
    """Slots of a small tensor, as those of a parameter.

    Raises:
        Unsuitable: if it is not known which sizes of the parameter theirs are.
    """
    present = [x for x in slots if x is not None]
    made = _first(placement, tiny, p)
    found = [None if x is None else _real_shape(x, tiny, p) for x in made]
    real = [None if x is None else tuple(x.shape) for x in slots]
    if p.dim() == 0 and tiny.dim():  # a number as a vector of one element
        found = [None if x is None else () for x in found]
    if found == real:
        return [_filled(x.shape, y.dtype) for x, y in zip(made, slots, strict=True) if y is not None]
    return [_filled(_aligned(x, tiny, p), x.dtype) for x in present]


def _first(placement: Placement, tiny: Tensor, p: Tensor) -> Slots:
    """The first slots of a small tensor; none if its rule does not make any for it."""
    rule = placement.rule
    if rule.init is None:
        return ()
    try:
        return init_slots(rule._replace(home=None), tiny)
    except Exception:  # a rule that takes only some shapes
        return ()


def _real_shape(x: Tensor, tiny: Tensor, p: Tensor) -> tuple[int, ...] | None:
    """The shape of a small tensor's slot for a large one."""
    try:
        axes = _axes(x.shape, tiny.shape)
    except Unsuitable:
        return None
    shape = p.shape or (1,)
    return tuple([math.prod([shape[i] for i in own]) for own in axes])


def _aligned(x: Tensor, tiny: Tensor, p: Tensor) -> tuple[int, ...]:
    if x.shape == p.shape:
        return tuple(tiny.shape)  # of a number, too, where that is seen as a vector
    if x.dim() and x.dim() != p.dim():
        raise Unsuitable(f"a slot of shape {tuple(x.shape)} beside {tuple(p.shape)}")
    found: list[int] = []
    for mine, whole, small in zip(x.shape, p.shape, tiny.shape, strict=False):
        if mine not in (1, whole):
            raise Unsuitable(f"a slot of shape {tuple(x.shape)} beside {tuple(p.shape)}")
        found.append(small if mine == whole else 1)
    return tuple(found)


def _axes(shape: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """For each dimension of a recorded tensor the axes that it consists of."""
    found: list[tuple[int, ...]] = []
    for size in shape:
        own = [
            tuple(range(a, b))
            for a in range(len(sizes))
            for b in range(a + 1, len(sizes) + 1)
            if math.prod(sizes[a:b]) == size
        ]
        if size != 1 and not own:
            raise Unsuitable(f"a tensor of shape {tuple(shape)}")
        found.append(() if size == 1 else own[0])
    return found
