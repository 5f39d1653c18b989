"""Rules on the CPU: one call of a library that is compiled for them goes over all tensors.

Results are written into the old tensors inside the kernel: new ones would cost page faults and
memory at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.memory import has_address, laid_out_like
from functional_optim.core.modes import with_cpu_as_default
from functional_optim.core.numbers import form_of, tensor_of
from functional_optim.core.recording import Body, OddLayout
from functional_optim.core.rule import Placement, takes_turns
from functional_optim.core.scalars import BoundScalars
from functional_optim.core.small import check_packed, sizes_of
from functional_optim.core.storage import Slots, present
from functional_optim.engine.executor import Executor, How, Runner
from functional_optim.kernels import record
from functional_optim.kernels.graph import Graph

GRAIN = 1 << 15
"""Elements from which threads share the work: torch's own grain size for CPU loops."""

SCRATCH = 1 << 20
"""The most bytes of scratch memory that do not matter where several plans are kept."""


class Served:
    """The tensors of an executor for which one graph holds.

    body: what was recorded. like: a gradient, the parameter and the slots of one of them.
    members: their indices. graphs: of each of them. sizes: those of the graph's axes. constants:
    those of the graph that depend on its shape. small: some with few elements, by their shapes.
    """

    def __init__(self, body: Body, graph: Graph, like: Any) -> None:
        self.body = body
        self.graph = graph
        self.like: Any = _freed(*like)
        self.members: list[int] = []
        self.graphs: list[Graph] = []
        self.sizes: list[list[int]] = []
        self.constants: list[tuple[float, ...]] = []
        self.small: dict[Any, tuple[Any, list[int], tuple[float, ...]]] = {}

    def add(self, i: int, leaf: Any, graph: Graph, constants: tuple[float, ...]) -> None:
        """Serve one more tensor. leaf: its gradient, parameter and slots."""
        _, p, _ = leaf
        sizes = graph.sizes_of(sizes_of(p))
        self.members.append(i)
        self.graphs.append(graph)
        self.sizes.append(sizes)
        self.constants.append(constants)
        known = len(self.small) == TRIED or p.numel() > SMALL or p.shape in self.small
        if not (known or self.graph.block):
            self.small[p.shape] = _freed(*leaf), sizes, constants

    def loaded(self, *, strict: bool) -> kernels.Native | None:
        """The library of the graph; None, with a warning, if it cannot be used.

        Raises:
            RuntimeError: if `strict`, and it cannot be used.
        """
        native = kernels.library(kernels.source_of(self.graph), strict=strict)
        if native is not None and not self.does(native):
            names = ", ".join([repr(x.rule.name) for x in self.body.placements])
            what = f"a kernel for {names} does something else than the rules do to small tensors"
            kernels.fallback(what, "they run", strict=strict)
            return None
        if native is not None:
            LOADED[native] = None
        return native

    def does(self, native: kernels.Native) -> bool:
        """Whether a library does to small tensors what the rules do."""
        g, p, slots = self.like
        key = (native.name, *self.body.looks(g, p, slots), *self.small)
        if key not in _tried:
            try:
                self.check(native)
                _tried[key] = True
            except kernels.Unsuitable:
                _tried[key] = False
        return _tried[key]

    def check(self, native: kernels.Native) -> None:
        """Raise Unsuitable unless it does."""
        _, p, _ = self.like
        if self.graph.block:
            shapes: Any = [(3 * self.graph.block,), (2 * self.graph.block + 41,), (5,)]
        else:
            shapes = record.SIZES[p.dim() if p.is_complex() else max(p.dim(), 1)]

        def run(leaves: Any, sizes: Any, constants: Any, numbers: tuple[float, ...]) -> Any:
            rows = [list(map(Tensor.data_ptr, leaf[1:])) for leaf in leaves]
            launch = kernels.Launch(native, sizes, rows, constants, 1, chunk=16)
            return launch.bound([leaf[0] for leaf in leaves], [numbers])()

        self.compare(run, shapes, torch.device("cpu"))

    @with_cpu_as_default
    def compare(
        self, run: Callable[..., Sequence[Any]], shapes: Sequence[Any], device: torch.device
    ) -> None:
        """Raise Unsuitable unless a call does to tensors what the rules do.

        run: gets for each tensor the gradient, the parameter and the slots, the sizes of the axes,
        and the constants; and the scalars of the step. It returns the measurements. shapes: to test
        it with, besides those of the smallest tensors.
        """
        g, p, slots = self.like
        body, graph = self.body, self.graph
        given = [body.tensors(g, p, slots, shape) for shape in shapes]
        constants = [body.constants(graph, g, p, slots, x) for x in shapes]
        sizes = [graph.sizes_of(tuple(own[1].shape) or (1,)) for own in given]
        for leaf, its, own in self.small.values():
            given.append(body.real_tensors(*leaf))
            sizes.append(its)
            constants.append(own)
        numbers = torch.linspace(0.3, 0.7, max(body.count, 1), dtype=torch.float64, device="cpu")
        numbers = numbers[: body.count]
        for k, i in enumerate(body.whole):
            numbers[i] = k + 2  # an int, of which a rule may take the reciprocal
        with torch.no_grad():
            made = [body.made(None, [x.clone() for x in own], numbers) for own in given]
        real = [[x.to(device, copy=True) for x in own] for own in given]
        totals = run(real, sizes, constants, tuple(numbers.tolist()))
        for own, old, (new, _) in zip(real, given, made, strict=True):
            for i, (x, y) in enumerate(zip(own, new, strict=True)):
                if y is not None:
                    steps = i == 1 and body.goal == "step"
                    bits = i > 1 and any(x.rule.storage.weight_codec for x in body.placements)
                    kernels.compare(x.cpu(), y.to(x.dtype), old[i] if steps else None, bits=bits)
        for k, x in enumerate(totals):
            y = torch.stack([found[k].double() for _, found in made]).sum()
            kernels.compare(tensor_of(x).cpu().float(), y.float())


def _freed(g: Tensor, *rest: Any) -> tuple[Any, ...]:
    """A leaf with a view of one number as its gradient: a plan outlives the gradients of the first
    step."""
    return g.new_empty(()).expand(g.shape), *rest


LOADED: dict[kernels.Native, None] = {}
"""The libraries that steps call, for `warmup`."""

_tried: dict[Any, bool] = {}
"""Whether libraries do what rules do, by their names and what the rules are known by."""

SMALL, TRIED = 1 << 11, 4
"""Up to how many elements tensors have that are tried as they are, and how many of these."""


class KernelExecutor(Executor):
    """Tensors with the same dtypes, slots and device, which share the kernels of each task."""

    through_memory = True

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        first = self.params[0]
        self.device = first.device
        self.missing = [tuple([slot is None for slot in own]) for own in self.slots[0]]
        # the memory of a conjugate or negative view is not what it says; one of a single element
        # can have the parameter's strides
        self.lazy = first.is_complex() or any(p.numel() == 1 for p in self.params)
        self.apart = any(grads[i].stride() != group.params[i].stride() for i in members)
        self.served: dict[Any, list[Served]] = {}

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Dense tensors of one layout, whose memory a kernel can see."""
        if how not in ("compiled", "strict") or not in_memory(g, [p, *present(slots)]):
            return None
        if not p.is_contiguous() and any(x.rule.storage.seed is not None for x in placements):
            return None  # random numbers go by the place in the tensor, not in memory
        return (*kind_of(g, p, slots), p.is_contiguous())

    def graphs(self, grads: list[Tensor], scalars: BoundScalars) -> list[Served]:
        """The graphs of a task, each with the tensors for which it holds.

        Raises:
            Unsuitable: if there is none for one of them.
            RuleError: if a rule does what no step may.
        """
        if scalars.task not in self.served:
            used = len(scalars.placements)
            forms = tuple(map(form_of, scalars.numbers))
            body = Body(
                scalars.placements, self.missing[:used], forms, scalars.goal, self.group.kept
            )
            found: dict[Any, Served] = {}
            rows = zip(self.mine(grads), self.params, self.slots, strict=True)
            for i, (g, p, slots) in enumerate(rows):
                leaf = self.whole(g, p, slots[:used], scalars)
                graph, constants = body.find(*leaf)
                key = self.text_of(graph)
                if key not in found:
                    found[key] = Served(body, graph, leaf)
                found[key].add(i, leaf, graph, constants)
            self.served[scalars.task] = list(found.values())
        return self.served[scalars.task]

    def whole(
        self, g: Tensor, p: Tensor, slots: list[Slots], scalars: BoundScalars
    ) -> tuple[Tensor, Tensor, list[Slots]]:
        """The tensors for which a graph is found, of a gradient, a parameter and its slots."""
        check_packed(scalars.placements, p, slots, whole=not self.group.parts)
        return g, p, slots

    def text_of(self, graph: Graph) -> Hashable:
        """The text of the kernel that graphs share."""
        return kernels.source_of(graph).text

    def rows(self, own: Served) -> list[list[int]]:
        """For each of some tensors the addresses of the parameter and its slots."""
        used = len(own.body.placements)
        return [
            list(map(Tensor.data_ptr, (self.params[i], *present(self.slots[i][:used]))))
            for i in own.members
        ]

    def launches(self, found: list[tuple[list[int], Any]]) -> tuple[Any, ...]:
        """The arguments of `Launches`."""
        apart = self.lazy or self.apart
        return found, None if self.every else self.members, self._readable if apart else None

    def _readable(self, mine: list[Tensor]) -> list[Tensor]:
        """Gradients whose memory is what they say, laid out as their parameters are."""
        if self.lazy:
            mine = [g.resolve_conj().resolve_neg() for g in mine]
        if self.apart:
            mine = list(map(laid_out_like, mine, self.params))
        return mine


class NativeExecutor(KernelExecutor):
    """Rules of any kind but matrix products, on CPU tensors, whatever their sizes."""

    scratch = 0
    """Bytes of memory for values that several phases of its kernels need."""

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Tensors of the CPU."""
        on_cpu = p.device.type == "cpu" and not any(x.rule.runs.batched for x in placements)
        return super().accepts(placements, g, p, slots, how) if on_cpu else None

    def wanted(self, grads: list[Tensor], scalars: BoundScalars) -> list[kernels.Source]:
        """The libraries of a task; none for tensors that take different variants."""
        if takes_turns(scalars.placements):
            return []
        try:
            return [kernels.source_of(own.graph) for own in self.graphs(grads, scalars)]
        except kernels.Unsuitable as error:
            self.why = reason(scalars.placements, error)
            return []

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """Launches of the libraries of a task; None if one of them cannot be had."""
        self.wanted(grads, scalars)
        found: list[tuple[list[int], Any]] = []
        for own in self.served.get(scalars.task, ()):
            native = own.loaded(strict=self.group.strict)
            if native is None:
                return None
            found.append((own.members, self._launch(native, own)))
        return kernels.Launches(*self.launches(found)) if found else None

    def _launch(self, native: kernels.Native, own: Served) -> kernels.Launch:
        large = sum([kernel_size(self.params[i]) for i in own.members]) >= GRAIN
        threads = torch.get_num_threads() if large else 1
        launch = kernels.Launch(native, own.sizes, self.rows(own), own.constants, threads)
        self.scratch += launch.scratch.nbytes
        return launch

    def keeps_memory(self) -> bool:
        """Whether its scratch memory is large, as for rules that store elements of a tensor."""
        return self.scratch > SCRATCH


def reason(placements: Sequence[Placement], error: kernels.Unsuitable) -> str:
    """Why rules have no kernel; nothing where only the layout of their tensors is odd."""
    if isinstance(error, OddLayout):
        return ""
    name = "" if error.rule is None else f"the rule {placements[error.rule].shown!r} has "
    return f"{name}{error}, for which there is no kernel"


def kind_of(g: Tensor, p: Tensor, slots: list[Slots]) -> tuple[Any, ...]:
    """What tensors that are stepped together have in common: dtypes, missing slots and device."""
    dtypes = tuple([x.dtype for x in (g, p, *present(slots))])
    return (dtypes, tuple([tuple([slot is None for slot in own]) for own in slots]), p.device)


def in_memory(g: Tensor, tensors: list[Tensor]) -> bool:
    """Whether a kernel can see these tensors through their memory alone.

    g: a gradient, which may have other strides. tensors: of one leaf, the parameter first.
    """
    first = tensors[0]
    if not has_address(first):
        return False
    plain = first.is_contiguous()
    dense = plain or torch.empty_like(first).stride() == first.stride()
    readable = has_address(g) and g.device == first.device and g.shape == first.shape
    return (
        dense
        and readable
        and not g.is_neg()
        and all(
            has_address(x)
            and x.device == first.device
            and not x.is_conj()
            and not x.is_neg()
            and (
                (plain and x.is_contiguous())
                or (x.shape == first.shape and x.stride() == first.stride())
            )
            for x in tensors
        )
    )


def kernel_size(p: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return p.numel() * 2 if p.is_complex() else p.numel()
