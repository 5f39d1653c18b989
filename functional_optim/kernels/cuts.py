"""A graph, cut where a value needs others of the tensor: what a kernel computes, in which order.

The first axis of a tensor is gone through in chunks, which several threads may share. What an
operation reads decides when it can run. A sum that keeps the first axis is complete within a row. A
sum over the first one is complete after all chunks, so a new phase begins there: a phase is a
prelude, once a tensor, and a pass over the chunks. What several passes need is computed again, or
kept in memory where that takes less time. New values are written as soon as nobody reads the old
ones, so that a pass reads as little as can be.
"""

from __future__ import annotations

from typing import NamedTuple

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node

WORD = 16
"""What it costs to read an element from memory, in sums of two. Writing one costs twice as much."""

CACHED = 1
"""What it costs where it is in the cache: within a row."""


class Time(NamedTuple):
    """When a value is computed. chunked: in the pass over the chunks, after the prelude. step: of
    several in the same pass, row by row."""

    phase: int
    chunked: bool
    step: int


class Nest:
    """Loops over some axes, at one time.

    kept: the values that they leave in memory. reduced: the reductions that they add to. stores:
    the inputs that they write.
    """

    def __init__(self, time: Time, axes: tuple[int, ...]) -> None:
        self.time = time
        self.axes = axes
        self.kept: list[Node] = []
        self.reduced: list[Node] = []
        self.stores: list[tuple[int, Node]] = []

    def goals(self) -> list[Node]:
        """What is computed for each element."""
        values = [value for _, value in self.stores]
        return [*self.kept, *[next(x.operands()) for x in self.reduced], *values]


class Plan:
    """The loops of a graph.

    nests: in their order. kept: the values that are kept in memory. mirrors: those of them that are
    kept in an input. local: those that are read in the row that makes them only.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.every = tuple(range(len(graph.sizes)))
        self.users: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for x in node.operands():
                self.users.setdefault(x, []).append(node)
        self.when: dict[Node, Time] = {}
        self.known: dict[Node, Time] = {}
        self.kept = {x: None for x in graph.nodes if self.reduces(x) or self._is_shared(x)}
        for node in graph.nodes:
            self._schedule(node)
        self.written = {x: i for i, x in graph.stores if x.dtype is graph.inputs[i].dtype}
        """The values that are new values of inputs as they are, and of which."""
        self.nests: list[Nest] = []
        for node in self.kept:
            axes = next(node.operands()).axes if self.reduces(node) else node.axes
            nest = self._nest(self.when[node], axes)
            (nest.reduced if self.reduces(node) else nest.kept).append(node)
        self._store_last()
        self._keep()
        self._store_sooner()
        self.mirrors = self._mirrored()
        self.local = self._locals()
        self.phases = 1 + max([x.time.phase for x in self.nests], default=0)
        if graph.results:
            self.phases = max(self.phases, 1 + max(self.known[x].phase for x in graph.results))

    def reduces(self, node: Node) -> bool:
        """Whether a value is made of several others of the tensor."""
        return ops.kind(node.op) == "reduce" and next(node.operands()).axes != node.axes

    def ends(self, node: Node) -> bool:
        """Whether a reduction is complete after all chunks only."""
        return 0 in next(node.operands()).axes and 0 not in node.axes

    def at(self, phase: int, *, chunked: bool) -> list[Nest]:
        """The loops of a prelude, or of a pass over the chunks."""
        return [x for x in self.nests if x.time[:2] == (phase, chunked)]

    def needed(self, nest: Nest) -> dict[Node, None]:
        """What loops read or compute, but not what is behind values that others have kept."""
        found: dict[Node, None] = {}
        waiting = nest.goals()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found[node] = None
                if node not in self.kept or (node in nest.kept and not self.reduces(node)):
                    waiting += node.operands()
        return found

    def _is_shared(self, node: Node) -> bool:
        """Whether a value of fewer axes is worth keeping: it is read by operations on more."""
        if node.op == "input" or not node.axes or node.axes == self.every:
            return False
        if ops.kind(node.op) in ("fill", "const", "number", "row", "iota"):
            return False
        return any(len(x.axes) > len(node.axes) for x in self.users.get(node, []))

    def _schedule(self, node: Node) -> None:
        given = [x for x in node.operands() if not x.host]
        domain = next(node.operands()).axes if self.reduces(node) else node.axes
        chunked = 0 in domain
        phase = max([self.known[x].phase for x in given], default=0)
        if not chunked and any(
            self.known[x].phase == phase and self.known[x].chunked for x in given
        ):
            phase += 1
        step = 0
        for x in given:
            if self.known[x][:2] == (phase, chunked):
                apart = x in self.kept and not self.reduces(x) and x.axes != domain
                step = max(step, self.known[x].step + apart)
        self.when[node] = self.known[node] = Time(phase, chunked, step)
        if self.reduces(node):
            self.known[node] = (
                Time(phase + 1, False, 0) if self.ends(node) else Time(phase, chunked, step + 1)
            )

    def _nest(self, time: Time, axes: tuple[int, ...]) -> Nest:
        """The loops over some axes at a time; those over fewer axes come first."""
        for nest in self.nests:
            if nest.time == time and nest.axes == axes:
                return nest
        nest = Nest(time, axes)
        self.nests.append(nest)
        self.nests.sort(key=lambda x: (x.time, len(x.axes)))
        return nest

    def _keep(self) -> None:
        """Keep values of all axes that a second nest would compute again at a higher cost."""
        seen: dict[Node, Nest] = {}
        for nest in self.nests:
            if nest.axes != self.every:
                continue
            chosen: dict[Node, Nest] = {}
            cost, met = self._cost(nest, seen, chosen)
            while True:
                more = [x for x in met if x in seen and x.op != "input" and x not in chosen]
                fresh = [x for x in more if x not in self.kept]
                tried = [(self._cost(nest, seen, {**chosen, x: seen[x]})[0], x) for x in fresh]
                best = min(tried, key=lambda own: own[0], default=None)
                if best is None or best[0] >= cost:
                    break
                chosen[best[1]] = seen[best[1]]
                cost, met = self._cost(nest, seen, chosen)
            for node, first in chosen.items():
                self.kept[node] = None
                first.kept.append(node)
                self.when[node] = self.known[node] = first.time
            for node in self.needed(nest):
                if node.axes == self.every:
                    seen.setdefault(node, nest)

    def _cost(
        self, nest: Nest, seen: dict[Node, Nest], chosen: dict[Node, Nest]
    ) -> tuple[int, list[Node]]:
        """What a nest costs for each element if some values are kept for it, and the values of all
        axes that it reads or computes. seen: the first nests that do so.

        What it writes of these may be written there, unless it reads the old value itself.
        """
        late = {value for _, value in nest.stores if value in seen}
        goals = [x for x in nest.goals() if x not in late]
        while True:
            cost, met = self._cost_of(nest, goals, seen, chosen)
            read = {x.args[0] for x in met if x.op == "input"}
            stay = [x for i, x in nest.stores if i in read and x in late]
            if not stay:
                return cost, met
            late.difference_update(stay)
            goals += stay

    def _cost_of(
        self, nest: Nest, goals: list[Node], seen: dict[Node, Nest], chosen: dict[Node, Nest]
    ) -> tuple[int, list[Node]]:
        def word(node: Node) -> int:
            near = node in seen and seen[node].time[:2] == nest.time[:2] and len(self.every) > 1
            return CACHED if near else WORD

        cost, met, looked, waiting = 0, list[Node](), set[Node](), [*goals]
        while waiting:
            node = waiting.pop()
            if node in looked or node.axes != self.every:
                continue
            looked.add(node)
            met.append(node)
            if node in chosen:
                cost += (1 if node in self.written else 3) * word(node)
            elif node.op == "input" or (node in self.kept and node not in nest.kept):
                cost += word(node)
            else:
                cost += ops.cost(node)
                waiting += node.operands()
        return cost, met

    def _store_last(self) -> None:
        """Write all inputs in the last pass, after the values that they need: those of all axes,
        then those of fewer, then those without the first axis."""
        inputs, stores = self.graph.inputs, self.graph.stores
        inside = [(i, x) for i, x in stores if 0 in inputs[i].axes]
        known = [self.known[x] for _, x in inside] + [x.time for x in self.nests if x.time.chunked]
        phase = max([time.phase for time in known], default=0)
        step = max([x.step for x in known if x.chunked and x.phase == phase], default=0)
        whole = self._step_of_whole(phase)
        for i, value in inside:
            axes = inputs[i].axes
            at = whole if axes == self.every else step + 1 + self._fewer(axes)
            nest = self._nest(Time(phase, True, at), axes)
            nest.stores.append((i, value))
        known = [self.known[x] for _, x in stores] + [x.time for x in self.nests]
        phase = max([x.phase + x.chunked for x in known], default=0)
        step = max([x.step for x in known if x.phase == phase], default=0)
        for i, value in stores:
            if 0 not in inputs[i].axes:
                axes = inputs[i].axes
                nest = self._nest(Time(phase, False, step + 1 + self._fewer(axes)), axes)
                nest.stores.append((i, value))

    def _fewer(self, axes: tuple[int, ...]) -> int:
        """How many axes a value lacks. A loop may read old values with as many axes or fewer, so
        these are written later."""
        return len(self.every) - len(axes)

    def _step_of_whole(self, phase: int) -> int:
        """The step of a pass in which all inputs of all axes can be written: their new values are
        known, and loops of later steps read no old ones."""
        inputs = self.graph.inputs
        stores = [(i, x) for i, x in self.graph.stores if inputs[i].axes == self.every]
        targets = {inputs[i] for i, _ in stores}
        readers = [x.time for x in self.nests if targets & {*self.needed(x)}]
        times = [*[self.known[x] for _, x in stores], *readers]
        return max([x.step for x in times if x[:2] == (phase, True)], default=0)

    def _store_sooner(self) -> None:
        """Write inputs where their new value is computed anyway, if no later operation reads the
        old one."""
        needed = [self.needed(x) for x in self.nests]
        for k, nest in enumerate(self.nests):
            for i, value in [*nest.stores]:
                nest.stores.remove((i, value))
                needed[k] = self.needed(nest)
                target = self.graph.inputs[i]
                last = max([j for j, own in enumerate(needed) if target in own], default=0)
                fit = (
                    j
                    for j in range(last, k)
                    if self.nests[j].axes == target.axes and value in needed[j]
                )
                at = next(fit, k)
                self.nests[at].stores.append((i, value))
                needed[k] = self.needed(nest)
        self.nests = [x for x in self.nests if x.kept or x.reduced or x.stores]

    def _mirrored(self) -> dict[Node, int]:
        """The values that are kept in an input whose new value they are."""
        found: dict[Node, int] = {}
        for nest in self.nests:
            for node in nest.kept:
                i = self.written.get(node, -1)
                if node.axes == self.every and (i, node) in nest.stores:
                    found[node] = i
        return found

    def _locals(self) -> set[Node]:
        """The kept values that are read only in the row that makes them."""
        if len(self.every) == 1:
            return set()
        found = {x for x in self.kept if 0 in x.axes and self.when[x].chunked and not self.ends(x)}
        if not self.graph.block:  # one number of each row goes from one loop over rows to another
            found = {x for x in found if x.axes != (0,)}
        for nest in self.nests:
            for node in self.needed(nest):
                if node in found and nest.time[:2] != self.when[node][:2]:
                    found.discard(node)
        return found
