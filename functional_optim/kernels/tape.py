"""The operations of a function on tensors of known shapes, recorded while it runs.

Unlike `record.py`, whose graphs are for tensors of all sizes, a tape is for one size. Tensors that
the function has not been given, such as those of a closure, are separate inputs: `captured`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.kernels import ops
from functional_optim.kernels.asked import READING, READS
from functional_optim.kernels.decomposed import DECOMPOSED, OF_DERIVATIVES
from functional_optim.kernels.node import Node, Unsuitable, indexed, nodes_in, reached
from functional_optim.kernels.private import DispatchMode, ModeBase
from functional_optim.kernels.record import not_in_place, written

SEVERAL = {**DECOMPOSED, **OF_DERIVATIVES}
CONSTANT = ("full.default", "fixed")
"""Values that are the same at each call."""


class Tape(ModeBase):
    """Records the operations that run under it.

    nodes: all values. captured: tensors met while `capturing`, in their order. fixed: other
    tensors that no input determines. calls: what was recorded while `capturing`, to compare.
    names: the operations among it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.captured: list[Tensor] = []
        self.fixed: list[Tensor] = []
        self.calls: list[Any] = []
        self.names: list[str] = []
        self.inside = False
        self.device = torch.device("cpu")
        self.known: dict[Any, Node] = {}
        self.places: dict[int, set[Any]] = {}
        """For each memory the keys of the values in it."""
        self.alive: list[Tensor] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside runs the user's function."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def given(self, x: Tensor, i: int) -> None:
        """Tensor i of the inputs."""
        self.device = x.device
        self._note(x, "input", (i,), {})

    def node_of(self, x: Tensor) -> Node:
        """The node of a tensor."""
        found = self.known.get(_key(x))
        return self._foreign(x) if found is None else found

    def _note(self, x: Tensor, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        fits = x.device == self.device or x.device.type == "cpu"
        if not x.numel() or not fits or x.layout is not torch.strided:
            raise Unsuitable(f"a tensor of shape {tuple(x.shape)} on {x.device}")
        node = Node(op, args, kwargs, x.dtype, tuple(x.shape))
        node.index = len(self.nodes)
        node.axes = tuple(range(x.dim()))
        self.nodes.append(node)
        key = _key(x)
        self.known[key] = node
        self.places.setdefault(x.untyped_storage().data_ptr(), set()).add(key)
        self.alive.append(x)
        return node

    def _foreign(self, x: Tensor) -> Node:
        """A tensor that no operation here has made."""
        if x.requires_grad and x.grad_fn is not None:
            raise Unsuitable("a tensor with a history of operations")
        if not self.inside:
            return self._constant(x)
        self.captured.append(x)
        node = self._note(x, "captured", (len(self.captured) - 1,), {})
        self.calls.append(("captured", x.dtype, tuple(x.shape)))
        return node

    def _said(self, name: str, what: Any, x: Tensor) -> None:
        """Keep what was recorded of the user's function, as a text: −0.0 is not 0.0 there."""
        self.calls.append((repr(what), x.dtype, tuple(x.shape), torch.is_grad_enabled()))
        self.names.append(name)

    def _constant(self, x: Tensor) -> Node:
        """A value that is the same at each call."""
        if not x.numel():
            raise Unsuitable("a tensor without elements")
        first = x.reshape(-1)[:1]
        if bool((x == first).all()):
            value = first.item()
            if self.inside:
                self._said("constant", value, x)
            return self._note(x, "full.default", (tuple(x.shape), value), {})
        if self.inside:
            self._said("constant", x.reshape(-1).tolist(), x)
        self.fixed.append(x.detach().clone())
        return self._note(x, "fixed", (len(self.fixed) - 1,), {})

    def see(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        op = str(func).removeprefix("aten.")
        if op in SEVERAL:
            with self:
                return SEVERAL[op](*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unsuitable(f"random numbers ({op})")
        if op in READS and any(self.varies(x) for x in args if isinstance(x, Tensor)):
            raise Unsuitable("a function that reads values")
        if op in ops.REDUCE and kwargs.get("dtype") not in (None, args[0].dtype):
            with self:
                args, kwargs = (args[0].to(kwargs["dtype"]), *args[1:]), {**kwargs, "dtype": None}
        given = self._nodes(args)
        named = {key: self._nodes(x) for key, x in kwargs.items() if x is not None}
        if func._schema.is_mutable:
            return self._mutated(func, args, kwargs, given, named)
        out = func(*args, **kwargs)
        results = out if isinstance(out, (tuple, list)) else (out,)
        if not any(isinstance(x, Tensor) for x in results) and op not in READS:
            raise Unsuitable(f"the operation {op}")
        for i, x in enumerate(results):
            if isinstance(x, Tensor):
                name = f"{op}[{i}]" if isinstance(out, (tuple, list)) else op
                self._result(x, name, args, given, named)
        return out

    def _result(self, x: Tensor, op: str, args: Any, given: Any, named: dict[str, Any]) -> None:
        if self.inside:
            self._said(op, (op, indexed(given), indexed(named)), x)
        if any(isinstance(y, Tensor) and _key(y) == _key(x) for y in args):
            return  # the same elements in the same order
        operands = [*nodes_in((*given, *named.values()))]
        if ops.kind(op) == "fill" and not isinstance(ops.filled(op, given), Node):
            operands = []
        if all(y.op in CONSTANT for y in operands):
            self._constant(x)
            return
        node = self._note(x, op, given, named)
        same = None if self.inside else _simpler(node)
        if same is not None:
            self.known[_key(x)] = same

    def _mutated(self, func: Any, args: Any, kwargs: Any, given: Any, named: Any) -> Any:
        """An operation in place, as one that makes another tensor."""
        target, op = args[0], str(func).removeprefix("aten.")
        views = self.places.get(target.untyped_storage().data_ptr(), set())
        whose = given[0].op if isinstance(given[0], Node) else ""
        only = [x is target for x in written(func, args, kwargs)] == [True]
        if not only or len(views) > 1 or "_." not in op or whose in ("input", "captured", ""):
            raise Unsuitable(f"the operation {op} in place")
        plain, own = not_in_place(op, args)
        if plain != "zero.default" and ops.kind(plain) not in ("point", "view"):
            raise Unsuitable(f"the operation {op} in place")
        given, out = self._nodes(own), func(*args, **kwargs)
        if self.inside:
            self._said(op, (op, indexed(given), indexed(named)), target)
        if plain == "zero.default":
            self._note(target, "full.default", (tuple(target.shape), 0), {})
        else:
            self._note(target, plain, given, named)
        return out

    def _nodes(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.node_of(x)
        return tuple(map(self._nodes, x)) if isinstance(x, (list, tuple)) else x

    def repeats(self, other: Tape) -> bool:
        """Whether the user's function was the same here, called once or several times."""
        times = len(self.names) // len(other.names) if other.names else 1
        alike = [(x.dtype, x.shape) for x in self.captured]
        return self.names == other.names * times and alike == [
            (x.dtype, x.shape) for x in other.captured
        ]

    def varies(self, x: Tensor) -> bool:
        """Whether a value differs between problems."""
        return any(node.op == "input" for node in reached([self.node_of(x)]))


# not in the class statement: torch would wrap it, so that the first operation imports its compiler
Tape.__torch_dispatch__ = Tape.see


class _Reads(TorchFunctionMode):
    """Notices what reads values and calls no operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in READING and self.tape.varies(args[0]):
            raise Unsuitable("a function that reads values")
        return func(*args, **kwargs or {})


def recorded(
    body: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tape: Tape
) -> list[Node]:
    """The nodes of what a body makes of its inputs.

    Raises:
        Unsuitable: for what no program does.
    """
    if DispatchMode is None:
        raise Unsuitable("operations that this torch does not show")
    with torch.inference_mode(False):
        for i, x in enumerate(inputs):
            tape.given(x, i)
        with tape, _Reads(tape):
            found = body(*inputs)
        return [tape.node_of(x) for x in found]


def _key(x: Tensor) -> Any:
    strides = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    bits = x.is_neg(), x.is_conj()
    return x.data_ptr(), x.dtype, tuple(x.shape), tuple(strides), bits


def _simpler(node: Node) -> Node | None:
    """An operand, if an operation of a derivative is a product with 1, or with 0."""
    if node.op != "mul.Tensor" or len(node.args) != 2:
        return None
    for a, b in (node.args, node.args[::-1]):
        number = ops.filled(a.op, a.args) if isinstance(a, Node) and a.op == "full.default" else a
        if isinstance(number, Node) or not isinstance(b, Node):
            continue
        alike = b.shape == node.shape and b.dtype is node.dtype
        if number == 1 and alike:
            return b
        if number == 0 and isinstance(a, Node) and a.shape == node.shape and a.dtype is node.dtype:
            return a
    return None
