"""A graph, cut where a value needs others of the tensor: what a kernel computes, in which order.

The first axis of a tensor is gone through in chunks, which several threads may share. What an
operation reads decides when it can run. A sum that keeps the first axis is complete within a row. A
sum over the first one is complete after all chunks, so a new phase begins there: a phase is a
prelude, once a tensor, and a pass over the chunks. Values of all axes are computed again wherever
they are read; smaller ones, such as sums, are kept.
"""

from __future__ import annotations

from typing import NamedTuple

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph, Node


class When(NamedTuple):
    """When a value is computed; values are ordered by it. chunked: in the pass over the chunks.
    step: of several in the same pass, row by row."""

    phase: int
    chunked: bool
    step: int


class Nest(NamedTuple):
    """Loops over some axes.

    axes: over which they go; without the first one, where they run row by row. kept: the values
    that they leave. reduced: the reductions that they add to. stores: the inputs that they write.
    """

    axes: tuple[int, ...]
    kept: list[Node]
    reduced: list[Node]
    stores: list[tuple[int, Node]]


class Phase(NamedTuple):
    """A part of a step of one tensor, in its order. prelude: once. rows: for each row."""

    prelude: list[Nest]
    rows: list[Nest]


class Plan:
    """The phases of a graph.

    known: when each value can be read. kept: the values that are kept in memory.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.every = tuple(range(len(graph.sizes)))
        self.users: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for x in node.operands():
                self.users.setdefault(x, []).append(node)
        self.when: dict[Node, When] = {}
        self.known: dict[Node, When] = {}
        self.kept = [x for x in graph.nodes if self.reduces(x) or self._is_shared(x)]
        self._kept = set(self.kept)
        for node in graph.nodes:
            self._schedule(node)
        self.phases = self._phases()

    def reduces(self, node: Node) -> bool:
        """Whether a value is made of several others of the tensor."""
        return ops.kind(node.op) == "reduce" and next(node.operands()).axes != node.axes

    def ends(self, node: Node) -> bool:
        """Whether a reduction is complete after all chunks only."""
        return 0 in next(node.operands()).axes and 0 not in node.axes

    def _is_shared(self, node: Node) -> bool:
        """Whether a value of fewer axes is worth keeping: it is read by operations on more."""
        if node.op == "input" or not node.axes or node.axes == self.every:
            return False
        if ops.kind(node.op) in ("fill", "const", "number", "row"):
            return False
        return any(len(x.axes) > len(node.axes) for x in self.users.get(node, []))

    def _schedule(self, node: Node) -> None:
        given = [x for x in node.operands() if not x.host]
        domain = next(node.operands()).axes if self.reduces(node) else node.axes
        chunked = 0 in domain
        phase = max([self.known[x].phase for x in given], default=0)
        if not chunked and any(self.known[x].phase == phase and self.known[x].chunked for x in given):
            phase += 1
        step = 0
        for x in given:
            if self.known[x][:2] == (phase, chunked):
                apart = x in self._kept and not self.reduces(x) and x.axes != domain
                step = max(step, self.known[x].step + apart)
        self.when[node] = self.known[node] = When(phase, chunked, step)
        if self.reduces(node):
            self.known[node] = (
                When(phase + 1, False, 0) if self.ends(node) else When(phase, chunked, step + 1)
            )

    def _phases(self) -> list[Phase]:
        graph = self.graph
        goals = [*self.kept, *graph.results, *[value for _, value in graph.stores]]
        last = max([self.known[x].phase for x in goals], default=0)
        inside = [(i, x) for i, x in graph.stores if 0 in graph.inputs[i].axes]
        behind = [(i, x) for i, x in graph.stores if 0 not in graph.inputs[i].axes]
        times = {self.when[x] for x in self.kept}
        passes = [t for t in times if t.chunked] + [self.known[x] for _, x in inside]
        most = max([t.phase for t in passes], default=0)
        found = [Phase([], []) for _ in range(max(last, most) + 1)]
        for when in sorted(times):
            phase = found[when.phase]
            nests = phase.rows if when.chunked else phase.prelude
            nests += self._nests([x for x in self.kept if self.when[x] == when], when.chunked)
        if inside:  # after all that reads what is written; those of fewer axes at last
            own = found[most].rows
            for axes in sorted({graph.inputs[i].axes for i, _ in inside}, key=len, reverse=True):
                mine = [(i, x) for i, x in inside if graph.inputs[i].axes == axes]
                own.append(Nest(axes, [], [], mine))
            _joined(own)
        if behind:
            first = max(most + 1 if found[most].rows else 0, last)
            while len(found) <= first:
                found.append(Phase([], []))
            for axes in {graph.inputs[i].axes: None for i, _ in behind}:
                mine = [(i, x) for i, x in behind if graph.inputs[i].axes == axes]
                found[first].prelude.append(Nest(axes, [], [], mine))
        if graph.results and (found[-1].rows or not found):
            found.append(Phase([], []))
        return found

    def _nests(self, values: list[Node], chunked: bool) -> list[Nest]:
        """Loops that compute values of one time, those over fewer axes first."""
        found: dict[tuple[int, ...], Nest] = {}
        for node in values:
            reduced = self.reduces(node)
            axes = next(node.operands()).axes if reduced else node.axes
            nest = found.setdefault(axes, Nest(axes, [], [], []))
            (nest.reduced if reduced else nest.kept).append(node)
        return sorted(found.values(), key=lambda nest: len(nest.axes))


def _joined(nests: list[Nest]) -> None:
    """Write in the last loops that go over the same axes, where nothing is read behind them."""
    for k in range(len(nests) - 1, 0, -1):
        a, b = nests[k - 1], nests[k]
        if a.axes == b.axes and not a.stores and not a.kept and b.stores and k == len(nests) - 1:
            needs = {x for _, value in b.stores for x in _behind(value)}
            if needs.isdisjoint(a.reduced):
                nests[k - 1 : k + 1] = [a._replace(stores=b.stores)]


def _behind(node: Node) -> set[Node]:
    found, waiting = set(), [node]
    while waiting:
        x = waiting.pop()
        if x not in found:
            found.add(x)
            waiting += x.operands()
    return found
