"""A rule's operations, recorded by running it on tensors of a few elements.

A dispatch mode sees each operation of ATen as it is run, so dtypes and shapes are ATen's own. A
function mode sees what else a rule asks of a tensor: a rule that reads sizes is recorded for each
shape. Nothing of torch's compiler is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph, Node, Unsuitable
from functional_optim.kernels.private import DispatchMode

Made = tuple[Sequence[Tensor | None], Sequence[Tensor]]
"""What a body makes of a leaf: new values of its tensors, None for one that stays as it is, and
what it measures."""

SIZES = (
    ((), ()),
    ((37,), (23,)),
    ((17, 11), (13, 19)),
    ((11, 7, 5), (5, 7, 11)),
    ((11, 7, 5, 3), (3, 5, 7, 11)),
    ((7, 3, 5, 11, 13), (13, 11, 5, 3, 7)),
)
"""The shapes with which rules are recorded, by their number of dimensions: tall ones and wide ones.
All sizes are primes, so that a product of neighbouring ones tells which they are."""


class RuleError(ValueError):
    """A rule that does what no step may: the text says what to do instead."""


BASE: Any = DispatchMode or object


class Recorder(BASE):
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
        self.since = 0
        """How many nodes there were when the function was called that now runs."""
        self.storages: dict[int, int] = {}
        """How many values have been seen in each memory."""
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
        node = Node(
            op, args, kwargs or {}, x.dtype, x.shape, host=host, rule=self.rule, within=self.within
        )
        self.graph.add(node)
        x._functional_optim_node = node  # pyright: ignore[reportAttributeAccessIssue]
        key = x.untyped_storage().data_ptr()
        self.storages[key] = self.storages.get(key, 0) + 1
        if self.keep:
            self.alive.append(x)
        return node

    def given(self, x: Any) -> Any:
        """An argument of an operation, with nodes in the place of tensors."""
        if isinstance(x, Tensor):
            node = getattr(x, "_functional_optim_node", None)
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
            outer, self.within = self.within, self.within or op
            try:
                with self:
                    return DECOMPOSED[op](*args, **kwargs)
            finally:
                self.within = outer
        self._check(func, op, args)
        if op == "div.Tensor" and _is_host(args[0]) and not _is_host(args[1]):
            with self:  # what Python makes of a float and a tensor
                return torch.reciprocal(args[1]) * args[0]
        args = self._cast(args, kwargs)
        out = func(*args, **kwargs)
        if not isinstance(out, (Tensor, tuple, list)):
            return out
        if func._schema.is_mutable:
            return self._mutated(func, op, args, kwargs, out)
        self._take(op, args, kwargs, out)
        return out

    def _take(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if op == "lift_fresh.default":
            self._constant(args[0])
        given = tuple([self.given(x) for x in args])
        if op == "detach.default" and given[0].index >= self.since:
            # of what torch has just made, which it returns so if somebody else holds it
            out._functional_optim_node = given[0]
            self.alive.append(out)
            return
        own = {k: self.given(v) for k, v in kwargs.items() if v is not None}
        nodes = [x for x in (*given, *own.values()) if isinstance(x, Node)]
        host = bool(nodes) and all(x.host for x in nodes)
        if not isinstance(out, (tuple, list)):
            if not isinstance(out, Tensor):
                raise Unsuitable(f"the operation {op}", self.rule)
            if op == "arange.default" or op == "arange.start_step":
                plain = out.numel() > 0 and torch.equal(out, torch.arange(len(out)).to(out.dtype))
                self.note(out, "iota" if plain else op, () if plain else given)
                return
            if op == "arange.start":
                self.note(out, "iota" if given[0] == 0 else op, () if given[0] == 0 else given)
                return
            self.note(out, op, given, own, host=host)
            return
        vector = bool(nodes) and nodes[0].op == "vector"
        for i, x in enumerate(out):
            if vector:
                self.note(x, "number", (i,), host=True)
            elif isinstance(x, Tensor):
                self.note(x, f"{op}[{i}]", given, own)

    def _check(self, func: Any, op: str, args: tuple[Any, ...]) -> None:
        """Raise RuleError for what a rule may not do."""
        reads = op in ("_local_scalar_dense.default", "equal.default", "is_nonzero.default")
        if reads and any(_depends(x) for x in args):
            if self.indexing:  # by a tensor of one bool, whose value torch itself reads
                raise Unsuitable("an index that depends on values", self.rule)
            raise self.reading()
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuleError(
                f"{self._who()} draws random numbers ({op.partition('.')[0]}) from torch's "
                "generator, so a step could be neither resumed nor compiled; draw them by "
                "functional_optim.add_noise, or from a seed and the step in the rule."
            )

    def reading(self) -> RuleError:
        """The error of a rule that reads a value."""
        return RuleError(
            f"{self._who()} reads a value of a tensor (by item(), float(), bool(), tolist() or an "
            "if), which a compiled step does not know; use torch.where, and tensors instead of "
            "Python numbers."
        )

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Numbers of the step beside tensors in the dtype of these, as Python numbers would be."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        own = [x for x in tensors if _is_host(x) and x.is_floating_point()]
        others = [x.dtype for x in tensors if x.is_floating_point() and not _is_host(x)]
        if not own or not others:
            return args
        wide = ops.opmath(max(others, key=lambda d: d.itemsize))
        return tuple(
            [self._as(x, wide) if any(x is y for y in own) and x.dtype != wide else x for x in args]
        )

    def _as(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        cast = x.to(dtype)
        self.note(cast, ops.CAST, (self.given(x),), {"dtype": dtype}, host=True)
        return cast

    def _mutated(
        self, func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """An operation in place on a tensor that the rule has made, as one that makes another."""
        target = kwargs.get("out", args[0] if args else None)
        node = getattr(target, "_functional_optim_node", None)
        whose = target.untyped_storage().data_ptr() if isinstance(target, Tensor) else 0
        if whose in self.given_storages:
            raise RuleError(
                f"{self._who()} writes in place ({op.partition('.')[0]}) into a tensor that it was "
                "given; return new tensors instead, e.g. m = m * 0.9 in the place of m.mul_(0.9)."
            )
        if node is None or self.storages[whose] > 1 or "out" in kwargs or not op.count("_."):
            raise Unsuitable(f"the operation {op} in place", self.rule)
        plain = op.replace("_.", ".", 1)
        self.storages[whose] = 0
        if plain == "copy.default" and out.dtype != args[1].dtype:
            raise Unsuitable("a copy into another dtype", self.rule)
        if plain == "copy.default":
            plain, args = "clone.default", args[1:2]
        self._take(plain, args, kwargs, target)
        return out

    def _constant(self, x: Tensor) -> None:
        """A tensor that the rule has made of a Python number."""
        if getattr(x, "_functional_optim_node", None) is None:
            if x.dim():
                self.note(x, "constant_tensor")
            else:
                self.note(x, "const", (x.item(),))


# not in the class statement: torch would wrap it, so that the first operation imports its compiler
Recorder.__torch_dispatch__ = Recorder.see


def _depends(x: Any) -> bool:
    """Whether a tensor follows from what a step is given, not from constants alone."""
    waiting = [getattr(x, "_functional_optim_node", None)]
    while waiting:
        node = waiting.pop()
        if node is not None and node.op in ("input", "number"):
            return True
        waiting += [] if node is None else node.operands()
    return False


def _is_host(x: Any) -> bool:
    """Whether a tensor follows from numbers of the step alone."""
    node = getattr(x, "_functional_optim_node", None) if isinstance(x, Tensor) else None
    return node is not None and node.host


class _Watch(TorchFunctionMode):
    """Notes that a rule reads the sizes of a tensor, or indexes one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in SIZED:
            self.recorder.graph.reads_sizes = True
        if func in READING and _depends(args[0]):
            raise self.recorder.reading()
        self.recorder.indexing = func is Tensor.__getitem__
        self.recorder.since = len(self.recorder.graph.nodes)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.recorder.indexing = False


TENSOR: Any = Tensor
"""The class, with the getters of its attributes."""

SIZED = {
    TENSOR.shape.__get__,
    TENSOR.nbytes.__get__,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.stride,
    Tensor.element_size,
    torch.numel,
}
"""Functions from a tensor to its sizes."""

READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
"""Functions that read values and call no operation."""


class Inside:
    """A function of a rule, whose operations are those of this rule.

    index: of the rule in its chain.
    """

    def __init__(self, recorder: Recorder, index: int, function: Callable[..., Any]) -> None:
        self.recorder = recorder
        self.index = index
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.rule = self.index
        flat = [y for x in args for y in (x if isinstance(x, tuple) else (x,))]
        given = [x for x in flat if isinstance(x, Tensor)]
        self.recorder.given_storages.update([x.untyped_storage().data_ptr() for x in given])
        self.recorder.alive += given
        try:
            with _Watch(self.recorder):
                return self.function(*args, **kwargs)
        finally:
            self.recorder.rule = None


def record(
    body: Callable[[Recorder, list[Tensor], Tensor], Made],
    tensors: Sequence[Tensor],
    count: int,
    name: Callable[[int | None], str],
    *,
    keep: bool = True,
) -> Graph:
    """What a body does to tensors, and to numbers of the step.

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
    mine = [x.detach().clone() for x in tensors]
    for i, x in enumerate(mine):
        recorder.graph.inputs.append(recorder.note(x, "input", (i,)))
    recorder.given_storages = {x.untyped_storage().data_ptr() for x in mine}
    vector = torch.linspace(0.3, 0.7, max(count, 1), dtype=torch.float64)[:count]
    recorder.note(vector, "vector")
    with torch.no_grad(), recorder:
        new, found = body(recorder, mine, vector)
    graph = recorder.graph
    for i, x in enumerate(new):
        if x is not None and recorder.given(x) is not graph.inputs[i]:
            graph.stores.append((i, recorder.given(x)))
    graph.results = [recorder.given(x) for x in found]
    return graph.pruned()


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.dim())) if dim is None else dim
    if ord == 2:
        return (x * x).sum(dims, keepdim=keepdim).sqrt()
    if ord == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if ord == float("inf"):
        return x.abs().amax(dims, keepdim=keepdim)
    if ord == float("-inf"):
        return x.abs().amin(dims, keepdim=keepdim)
    if ord == 0:
        return (x != 0).to(x.dtype).sum(dims, keepdim=keepdim)
    return x.abs().pow(ord).sum(dims, keepdim=keepdim).pow(1.0 / ord)


def _variance(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    dims = list(range(x.dim())) if dim is None else dim
    off = x - x.mean(dims, keepdim=True)
    count = torch.ones_like(x).sum(dims, keepdim=keepdim)
    return (off * off).sum(dims, keepdim=keepdim) / (
        count - (1 if correction is None else correction)
    )


def _deviation(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return _variance(x, dim, **options).sqrt()


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_softmax.default": _softmax,
    "_log_softmax.default": _log_softmax,
    "linalg_vector_norm.default": _vector_norm,
    "norm.Scalar": lambda x, p=2: _vector_norm(x, p),
    "norm.ScalarOpt_dim": lambda x, p, dim, keepdim=False: _vector_norm(
        x, 2 if p is None else p, dim, keepdim
    ),
    "var.correction": _variance,
    "std.correction": _deviation,
}
"""Operations that are recorded as several simpler ones."""
