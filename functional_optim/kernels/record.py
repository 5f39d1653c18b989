"""A rule's operations, recorded by running it on tensors of a few elements.

A dispatch mode sees each operation of ATen as it is run, so dtypes and shapes are ATen's own. A
function mode sees what else a rule asks of a tensor: a rule that reads sizes is recorded for each
shape. Nothing of torch's compiler is imported.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from functional_optim.kernels import ops
from functional_optim.kernels.asked import READS, Given, memory_of
from functional_optim.kernels.decomposed import DECOMPOSED
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node, RuleError, Unsuitable, reached
from functional_optim.kernels.private import DispatchMode, ModeBase

Results = tuple[Sequence[Tensor | None], Sequence[Tensor]]
"""The results of a body on a leaf: new values of its tensors, None for one that does not change,
and its measurements."""

SIZES = (
    ((), ()),
    ((37,), (23,)),
    ((17, 11), (13, 19)),
    ((11, 7, 5), (5, 13, 17)),
    ((11, 7, 5, 3), (3, 5, 13, 7)),
    ((7, 3, 5, 11, 13), (3, 11, 7, 17, 5)),
    ((7, 3, 5, 11, 13, 17), (3, 5, 11, 13, 19, 7)),
)
"""The shapes with which rules are recorded, by their number of dimensions: tall ones and wide ones.
All sizes are primes, so that a product of neighbouring ones tells which they are; and those of the
same dimensions differ between both, so that no constant is taken for a size."""


class Recorder(ModeBase):
    """Records the operations that run under it.

    name: of the rule at an index, for texts. keep: hold on to all values, so that no memory is used
    twice.
    """

    def __init__(self, name: Callable[[int | None], str], *, keep: bool) -> None:
        super().__init__()
        self.graph = Graph()
        self.name = name
        self.keep = keep
        self.given_storages: set[int] = set()
        self.rule: int | None = None
        self.within = ""
        """The operation that is being recorded as several."""
        self.indexing = False
        """Whether a tensor is being indexed."""
        self.named: tuple[str, Node] | None = None
        """A number of the step that stands for a Python number in the operation to come, and under
        which name."""
        self.since = 0
        """How many nodes there were when the function was called that now runs."""
        self.refused: list[RuleError | Unsuitable] = []
        """What was refused to a rule."""
        self.values = WeakValueDictionary[int, Tensor]()
        """The values that are still there, by the indices of their nodes."""
        self.alive: list[Tensor] = []

    def note(
        self,
        x: Tensor,
        op: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        host: bool = False,
    ) -> Node:
        """A new node, whose value is x."""
        shape, own = tuple(x.shape), kwargs or {}
        node = Node(op, args, own, x.dtype, shape, host, self.rule, self.within)
        self.graph.add(node)
        x._functional_optim_node = node  # pyright: ignore[reportAttributeAccessIssue]
        self.values[node.index] = x
        if self.keep:
            self.alive.append(x)
        return node

    def node_of(self, x: Any) -> Node | None:
        """The node of a value; None for a tensor that this recording has not made."""
        node = getattr(x, "_functional_optim_node", None) if isinstance(x, Tensor) else None
        mine = node is not None and self.graph.nodes[node.index : node.index + 1] == [node]
        return node if mine else None

    def whole(self, x: Tensor, kind: type) -> Tensor:
        """A number of the step that is an int or a bool."""
        dtype = torch.bool if kind is bool else torch.int64
        found = torch.ones((), dtype=dtype, device="cpu")
        self.note(found, ops.CAST, (self.given(x),), {"dtype": found.dtype}, host=True)
        return found

    def given(self, x: Any) -> Any:
        """An argument of an operation, with nodes instead of tensors."""
        if isinstance(x, Tensor):
            node = self.node_of(x)
            if node is None:
                raise RuleError(
                    f"{self._who()} closes over a tensor of shape {tuple(x.shape)}, whose value a "
                    "compiled step would not see change; pass it as a hyperparameter (a 0-dim "
                    "tensor in hyper=), keep it in a slot, or make it inside of the rule."
                )
            return node
        if isinstance(x, (list, tuple)):
            return tuple([self.given(y) for y in x])
        return x

    def _who(self) -> str:
        return f"the rule {self.name(self.rule)}"

    def see(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        op = str(func).removeprefix("aten.")
        if op in DECOMPOSED:
            outer, self.within = self.within, self.within or op.removeprefix("functional_optim.")
            try:
                with self:
                    return DECOMPOSED[op](*args, **kwargs)
            finally:
                self.within = outer
        self._check(func, op, args)
        if op == "div.Tensor" and self._is_host(args[0]) and not self._is_host(args[1]):
            with self:  # what Python makes of a float and a tensor
                return torch.reciprocal(args[1]) * args[0]
        if op in ops.REDUCE and kwargs.get("dtype") not in (None, args[0].dtype):
            with self:  # which ATen casts first
                args = (args[0].to(kwargs["dtype"]), *args[1:])
        args = self._cast(op, args)
        if func._schema.is_mutable:
            return self._mutated(func, op, args, kwargs)
        out = func(*args, **kwargs)
        if self._narrows(op, args, out):
            args = tuple([self._as(x, torch.float64) if self._is_whole(x) else x for x in args])
            out = func(*args, **kwargs)
        if isinstance(out, (Tensor, tuple, list)):
            self._take(op, args, kwargs, out)
        return out

    def _take(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if op == "lift_fresh.default":
            self._constant(args[0])
        given = tuple([self.given(x) for x in args])
        if op == ops.BITS and out.shape != args[0].shape:
            op = "view as bits of another size"
        if op in ("any.dims", "all.dims") and args[1:2] in (((),), ([],)):
            op = f"{op.partition('.')[0]} over no dimension"
        if op == "detach.default" and given[0].index >= self.since:
            # of what torch has just made, which it returns so if somebody else holds it
            out._functional_optim_node = given[0]
            self.alive.append(out)
            return
        own = {k: self.given(v) for k, v in kwargs.items() if v is not None}
        if self.named is not None:
            given, own = self._with_number(op, given, own)
        nodes = [x for x in (*given, *own.values()) if isinstance(x, Node)]
        host = bool(nodes) and all(x.host for x in nodes)
        if not isinstance(out, (tuple, list)):
            if op == ops.CAST and not isinstance(given[0], Node):  # of a number, inside of vmap
                self._constant(out)
                return
            if op.startswith("arange.") and self._counts(out, op, given):
                return
            self.note(out, op, given, own, host=host)
            return
        vector = bool(nodes) and nodes[0].op == "vector"
        for i, x in enumerate(out):
            if vector:
                self.note(x, "number", (i,), host=True)
            elif isinstance(x, Tensor):
                self.note(x, f"{op}[{i}]", given, own)

    def _counts(self, out: Tensor, op: str, given: tuple[Any, ...]) -> bool:
        """Note what counts from 0, if a tensor does."""
        if op == "arange.start":
            plain = given[0] == 0
        else:
            counted = torch.arange(len(out), device=out.device).to(out.dtype)
            plain = len(counted) > 0 and torch.equal(out, counted)
        wide = ops.opmath(out.dtype)
        if plain and wide != out.dtype:
            exact = self.note(out.to(wide), "iota")
            self.note(out, ops.CAST, (exact,), {"dtype": out.dtype})
        elif plain:
            self.note(out, "iota")
        return plain

    def _with_number(
        self, op: str, given: tuple[Any, ...], own: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operation that a rule has given a number of the step where torch
        takes a Python number."""
        assert self.named is not None
        name, node = self.named
        if name in own:
            own, self.named = {**own, name: node}, None
        elif ops.kind(op) == "fill" and name == ops.FILLING:
            at = ops.filled_at(op)
            given, self.named = (*given[:at], node, *given[at + 1 :]), None
        return given, own

    def _check(self, func: Any, op: str, args: tuple[Any, ...]) -> None:
        """Raise RuleError for what a rule may not do."""
        if op in READS and any(self.depends(x) for x in args):
            if self.indexing:  # by a tensor of one bool, whose value torch itself reads
                raise Unsuitable("an index that depends on values", self.rule)
            raise self.reading()
        if op == "add.Tensor" and all(self._is_flag(x) for x in args[:2]):
            raise RuleError(
                f"{self._who()} adds two comparisons of numbers, which torch takes for bools and "
                "Python for 0 and 1; add torch.where(condition, 1.0, 0.0), or work the number out "
                "in scalars."
            )
        if torch.Tag.dynamic_output_shape in func.tags and self._sized_by_values(op, args):
            name = op.partition(".")[0]
            raise Unsuitable(f"the operation {name}, whose sizes depend on values", self.rule)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuleError(
                f"{self._who()} draws random numbers ({op.partition('.')[0]}) from torch's "
                "generator, so a step could be neither resumed nor compiled; draw them by "
                "functional_optim.add_noise, or from a seed and the step in the rule."
            )

    def _sized_by_values(self, op: str, args: tuple[Any, ...]) -> bool:
        """Whether the values that a step is given determine the sizes of a result."""
        if op == "index.Tensor":  # integers select as many elements as they are
            masks = (torch.bool, torch.uint8)
            args = tuple([x for x in args[1] if x is not None and x.dtype in masks])
        return any(map(self.depends, args))

    def reading(self) -> RuleError:
        """The error of a rule that reads a value."""
        return RuleError(
            f"{self._who()} reads a value of a tensor (by item(), float(), bool(), tolist(), an "
            "if, or a function that takes Python numbers only), which a compiled step does not "
            "know; use torch.where, and functions of torch on tensors, e.g. torch.sqrt in the "
            "place of math.sqrt."
        )

    def depends(self, x: Any) -> bool:
        """Whether a tensor follows from what a step is given, not from constants alone."""
        node = self.node_of(x)
        return node is not None and any(y.op in ("input", "number") for y in reached([node]))

    def _is_host(self, x: Any) -> bool:
        """Whether a tensor depends on scalars of the step only."""
        node = self.node_of(x)
        return node is not None and node.host

    def _narrows(self, op: str, args: tuple[Any, ...], out: Any) -> bool:
        """Whether torch converts integers, which are scalars of the step, to its default dtype,
        where Python makes a double."""
        given = [x for x in args if isinstance(x, Tensor)]
        if op == ops.CAST or op in ops.CHOICES or not all(map(self._is_host, given)):
            return False
        return (
            isinstance(out, Tensor) and out.is_floating_point() and any(map(self._is_whole, given))
        )

    def _is_whole(self, x: Any) -> bool:
        """Whether a tensor depends on scalars of the step only, and is an integer or a bool."""
        return self._is_host(x) and not x.is_floating_point()

    def _is_double(self, x: Any) -> bool:
        """Whether a tensor stands for a Python float: torch itself makes one for `where`."""
        node = self.node_of(x)
        made = node is not None and node.op == "scalar_tensor.default" and x.dtype is torch.float64
        return made or (self._is_host(x) and x.is_floating_point())

    def _is_flag(self, x: Any) -> bool:
        return self._is_host(x) and x.dtype is torch.bool

    def _cast(self, op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Scalars of the step in the dtype of the tensors they are combined with, like Python
        numbers."""
        tensors = [x for x in args if isinstance(x, Tensor)] if op != ops.NOISE else []
        own = [x for x in tensors if self._is_double(x)]
        others = [x for x in tensors if not (self._is_host(x) or self._is_double(x))]
        if not own or not others:
            return args
        wide = ops.number_beside(op, others)
        return tuple(
            [self._as(x, wide) if any(x is y for y in own) and x.dtype != wide else x for x in args]
        )

    def _as(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        cast = x.to(dtype)
        self.note(cast, ops.CAST, (self.given(x),), {"dtype": dtype}, host=True)
        return cast

    def _mutated(self, func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation in place on a tensor that the rule has made, as one that makes another."""
        targets = written(func, args, kwargs)
        self.refuse_write(op.partition(".")[0], targets)
        target = targets[0] if len(targets) == 1 else None
        node = self.node_of(target)
        if target is None or node is None or target is not args[0]:
            raise Unsuitable(f"the operation {op} in place", self.rule)
        whose = memory_of(target)
        shared = {i for i, x in self.values.items() if memory_of(x) == whose} - {node.index}
        if shared or not op.count("_."):
            raise Unsuitable(f"the operation {op} in place", self.rule)
        wide = {ops.opmath(torch.result_type(target, x)) for x in args if isinstance(x, Tensor)}
        if wide != {ops.opmath(target.dtype)} and op != "copy_.default":
            raise Unsuitable(f"the operation {op} of a wider dtype in place", self.rule)
        plain, own = not_in_place(op, args, self.rule)
        func(*args, **kwargs)
        self.values.pop(node.index, None)
        self._take(plain, own, kwargs, target)
        return target

    def refuse_write(self, what: str, targets: Sequence[Any]) -> None:
        """Raise RuleError if a tensor is to be written into that a rule was given."""
        if any(isinstance(x, Tensor) and memory_of(x) in self.given_storages for x in targets):
            raise RuleError.of_write(self.name(self.rule), what)

    def _constant(self, x: Tensor) -> None:
        """A tensor that the rule has made of a Python number."""
        if self.node_of(x) is None:
            if x.dim():
                self.note(x, "constant_tensor")
            else:
                self.note(x, "const", (x.item(),))


# not in the class statement: torch would wrap it, so that the first operation imports its compiler
Recorder.__torch_dispatch__ = Recorder.see


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation writes into."""
    found: list[Any] = []
    for i, x in enumerate(func._schema.arguments):
        if x.alias_info is not None and x.alias_info.is_write:
            given = kwargs.get(x.name) if x.kwarg_only or i >= len(args) else args[i]
            found += given if isinstance(given, (list, tuple)) else [given]
    return [x for x in found if x is not None]


def not_in_place(
    op: str, args: tuple[Any, ...], rule: int | None = None
) -> tuple[str, tuple[Any, ...]]:
    """An operation in place, and its arguments, as one that makes another tensor."""
    plain = op.replace("_.", ".", 1)
    if plain != "copy.default":
        return plain, args
    if args[0].dtype != args[1].dtype or args[0].shape != args[1].shape:
        raise Unsuitable("a copy into another dtype or shape", rule)
    return "clone.default", args[1:2]


def record(
    body: Callable[[Recorder, list[Tensor], Tensor], Results],
    tensors: Sequence[Tensor],
    count: int,
    name: Callable[[int | None], str],
    *,
    keep: bool,
) -> Graph:
    """What a body does to tensors, and to scalars of the step.

    Args:
        body: gets the recorder, the tensors and a vector of float64 numbers.
        tensors: the gradient, the parameter and the slots; they are not changed.
        count: of the numbers.
        name, keep: as in `Recorder`.

    Raises:
        RuleError: if a rule does what no step may.
        Exception: whatever a rule raises.
    """
    if DispatchMode is None:
        raise Unsuitable("operations that this torch does not show")
    recorder = Recorder(name, keep=keep)
    graph = recorder.graph
    with torch.inference_mode(False):  # in which torch would show other operations
        mine: list[Tensor] = [x.detach().clone().as_subclass(Given) for x in tensors]
        for i, x in enumerate(mine):
            x._functional_optim_recorder = recorder  # pyright: ignore[reportAttributeAccessIssue]
            graph.inputs.append(recorder.note(x, "input", (i,)))
        recorder.given_storages = set(map(memory_of, mine))
        vector = torch.linspace(0.3, 0.7, max(count, 1), dtype=torch.float64, device="cpu")[:count]
        recorder.note(vector, "vector")
        with torch.no_grad(), recorder:
            new, found = body(recorder, mine, vector)
        for i, x in enumerate(new):
            if x is not None and recorder.given(x) is not graph.inputs[i]:
                graph.stores.append((i, recorder.given(x)))
        graph.results = [recorder.given(x) for x in found]
    return graph.pruned()


def drawn() -> Any:
    """The state of the generators of Python and NumPy that all share, to see whether it changes."""
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if get_state is None:  # not imported, or another thread is importing it
        return random.getstate()
    _, words, at, *_ = get_state()
    return random.getstate(), words.tobytes(), at


def others_draw() -> bool:
    """Whether other threads are drawing from these generators."""
    before = drawn()
    time.sleep(0.05)
    return drawn() != before
