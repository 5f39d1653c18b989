"""What a rule is by its graph: axes, reductions, constants of shapes, places; and what has none."""

import gc
import random
import sys
import threading
import types
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.core import recording, traits
from functional_optim.core.recording import key_of
from functional_optim.core.small import filled
from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Unsuitable

Slots = namedtuple("Slots", "rows whole bits")
Mask = namedtuple("Mask", "seen")
SHAPES = ((), (5,), (5, 4), (5, 4, 3), (5, 4, 3, 2))


def said(graph: Graph) -> str:
    """How many axes a graph has, each reduction with the axes over which it goes, how many
    constants that depend on the shape, and whether it reads places."""
    words = [str(len(graph.sizes))]
    for node in graph.nodes:
        if ops.kind(node.op) == "reduce":
            gone = [str(i) for i in next(node.operands()).axes if i not in node.axes]
            words.append(f"{ops.REDUCE[node.op]}[{''.join(gone)}]")
    words += [f"shape:{len(graph.places)}"] * bool(graph.places)
    return " ".join([*words, *["place"] * graph.reads_places])


def look(update: Callable[[Tensor, Tensor], Tensor], p: Tensor) -> str:
    """The same of a rule from its gradient and its parameter, or why it has no graph."""
    tx = fo.leafwise(None, lambda u, slots, p: (update(u, p), slots), name="rule")
    try:
        return said(traits.graph_of(tx.placements[0], p))
    except Unsuitable as error:
        return str(error)


def cloned(change: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A rule that changes a copy of its gradient."""

    def update(u: Tensor, p: Tensor) -> Tensor:
        v = u.clone()
        change(v)
        return v

    return update


RULES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    # element-wise, whatever the number of dimensions
    "plain": (lambda u, p: 2 * u - p, "1"),
    "nothing": (lambda u, p: u, "1"),
    "zeros": (lambda u, p: torch.zeros_like(u), "1"),
    "a choice": (lambda u, p: torch.where(u > 0, u, p), "1"),
    "a cast": (lambda u, p: u.double().sqrt().to(u.dtype), "1"),
    "a constant": (lambda u, p: u * torch.tensor(0.5), "1"),
    "views": (lambda u, p: u.flatten().view_as(u) + u.unsqueeze(0).squeeze(0), "1"),
    "dimensions": (lambda u, p: u * u.dim(), "1"),
    "unused": (lambda u, p: (u @ u.mT, u)[1], "1"),
    # in place, on tensors of its own
    "own tensor": (lambda u, p: u.clone().mul_(2).add_(p), "1"),
    "copy_": (lambda u, p: torch.zeros_like(u).copy_(2 * u), "1"),
    "copy_ of float64": (
        lambda u, p: (0 * u.double()).copy_(u),
        "a copy into another dtype or shape",
    ),
    "behind a view": (cloned(lambda v: v.view(-1).mul_(2)), "the operation mul_.Tensor in place"),
    "an element": (cloned(lambda v: v.__setitem__(0, 0.0)), "the operation fill_.Tensor in place"),
    "narrower": (
        lambda u, p: u.clone().sub_(p.double()),
        "the operation sub_.Tensor of a wider dtype in place",
    ),
    "out=": (lambda u, p: torch.mul(u, 2, out=0 * u), "the operation mul.out in place"),
    # reductions, some of them in several operations
    "norm": (lambda u, p: u / u.norm(), "1 sum[0]"),
    "mean of a view": (lambda u, p: u - u.reshape(-1).mean(), "1 mean[0]"),
    "maximum": (lambda u, p: u / u.abs().max(), "1 max[0]"),
    "any": (lambda u, p: torch.where(u.isnan().any(), 0.0, u), "1 any[0]"),
    "std": (lambda u, p: u / u.std(), "1 mean[0] sum[0] sum[0]"),
    "rows": (lambda u, p: u - u.mean(-1, keepdim=True), "2 mean[1]"),
    "columns": (lambda u, p: u - u.amin(0), "2 min[0]"),
    "both": (lambda u, p: u - u.mean(0) - u.sum(-1, keepdim=True), "2 mean[0] sum[1]"),
    "softmax": (lambda u, p: u.softmax(-1), "2 max[1] sum[1]"),
    "transposed": (lambda u, p: u * u.mT.mean(0).unsqueeze(-1), "2 mean[1]"),
    "expanded": (lambda u, p: u.sum(0, keepdim=True).expand_as(u), "2 sum[0]"),
    # shapes and places
    "size": (lambda u, p: u / u.numel(), "1 shape:1"),
    "aspect ratio": (lambda u, p: u * max(1, u.shape[0] / u.shape[-1]) ** 0.5, "1 shape:1"),
    "a filled tensor": (lambda u, p: u + torch.full_like(u, 1 / len(u)), "1 shape:1"),
    "places": (lambda u, p: u * torch.arange(u.numel()).view_as(u), "1 place"),
    "columns' places": (lambda u, p: u * torch.arange(u.shape[-1]), "2 place"),
    "a branch": (lambda u, p: u if u.shape[0] > 15 else -u, "another graph for another shape"),
    # no kernel
    "product": (lambda u, p: u @ u.mT @ u, "the operation mm"),
    "sort": (lambda u, p: u.sort(-1).values, "the operation sort"),
    "index": (lambda u, p: u - u[0], "the operation select"),
    "bools": (lambda u, p: u - u[u > 0].sum(), "the operation index, whose sizes depend on values"),
    "triangle": (lambda u, p: u.tril(), "the operation tril"),
    "constants": (lambda u, p: u * torch.tensor([0.5, 1.0])[0], "the operation constant_tensor"),
    "a square": (
        lambda u, p: u * (torch.ones(len(u), len(u)).sum() > 1000),
        "one dimension twice in a value",
    ),
    "repeated rows": (
        lambda u, p: u + u.mean(1).expand(len(u), len(u)).sum(1, keepdim=True),
        "one dimension twice in a value",
    ),
    "the order of dimensions": (lambda u, p: u * p.dim_order()[0], "dim_order of a tensor"),
    "an error": (
        lambda u, p: u.view(7, -1),
        "RuntimeError: shape '[7, -1]' is invalid for input of size 187",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_graph_says_what_a_rule_does_to_a_matrix(name):
    update, expected = RULES[name]
    assert look(update, torch.zeros(5, 4)) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbouring_dimensions_are_one_axis_where_no_operation_tells_them_apart(shape):
    p = torch.zeros(shape)
    for name in ("plain", "own tensor", "views", "dimensions"):
        assert look(RULES[name][0], p) == "1"
    for name in ("norm", "softmax", "rows", "any"):
        axes = min(len(shape), 2) if name in ("softmax", "rows") else 1
        expected = RULES[name][1] if axes == 2 else RULES[name][1].replace("[1]", "[0]")
        assert look(RULES[name][0], p) == f"{max(axes, 1)}{expected[1:]}"
    if len(shape) == 4:
        assert look(lambda u, p: u - u.mean((0, 2, 3), keepdim=True), p) == "3 mean[02]"
        assert look(lambda u, p: u - u.mean((2, 3), keepdim=True), p) == "2 mean[1]"
        assert look(lambda u, p: u - u.mean((1, 3), keepdim=True), p) == "4 mean[13]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_every_dtype_has_a_graph_and_complex_numbers_are_pairs(dtype):
    p = torch.zeros(5, 4, dtype=dtype)
    assert look(RULES["plain"][0], p) == "1"
    assert look(RULES["norm"][0], p) == "1 sum[0]"
    assert look(lambda u, p: u - u.mean(0, keepdim=True), p) == "2 mean[0]"


def test_tensors_without_elements_and_of_one_have_the_graph_of_others():
    for shape in ((0,), (0, 4), (1, 1), (1, 9)):
        for name in ("plain", "norm", "size"):
            assert look(RULES[name][0], torch.zeros(shape)) == RULES[name][1]


def test_slots_of_other_shapes_have_the_axes_of_their_parameter():
    def init(p: Tensor) -> Slots:
        bits = torch.zeros_like(p, dtype=torch.int8)
        return Slots(p.new_zeros(p.shape[0]), p.new_zeros(()), bits)

    def update(u: Tensor, slots: Slots, p: Tensor) -> Any:
        rows = slots.rows + u.square().mean(1)
        return u / rows[:, None], Slots(rows, slots.whole + u.sum(), slots.bits + 1)

    (placement,) = fo.leafwise(init, update, name="rule").placements
    graph = traits.graph_of(placement, torch.zeros(5, 4))
    assert said(graph) == "2 mean[1] sum[01]"
    assert [x.axes for x in graph.inputs] == [(0, 1), (0, 1), (0,), (), (0, 1)]
    assert [i for i, _ in graph.stores] == [1, 2, 3, 4]


def masked(shape_of: Callable[[Tensor], Any], mask_of: Callable[[Tensor], Tensor]) -> Any:
    """A rule with a mask of some shape, which leaves a parameter what its mask selects."""

    def init(p: Tensor) -> Mask:
        seen = torch.arange(p.new_empty(shape_of(p)).numel()) % 3 > 0
        return Mask(seen.reshape(shape_of(p)))

    def update(u: Tensor, slots: Mask, p: Tensor) -> Any:
        return torch.where(mask_of(slots.seen), u, 0.1 * u), slots

    return fo.leafwise(init, update, name="masked")


def square(p):
    return (len(p), len(p))


@pytest.mark.parametrize(
    "tx",
    [
        masked(lambda p: p.shape[::-1], lambda x: x.T),
        masked(square, lambda x: x.all(1, keepdim=True)),
    ],
    ids=["transposed", "square"],
)
def test_slots_whose_dimensions_are_in_another_order_have_no_kernel(tx):
    """In which they would be read in the order of the parameter."""
    grads, p = torch.ones(4, 5), torch.zeros(4, 5)
    with pytest.raises(Unsuitable, match="dimension"):
        traits.graph_of(tx.placements[0], p)
    updates, _ = tx.update(grads, tx.init(p), p)
    found, _ = fo.compile(tx)(grads, tx.init(p), p)
    assert found.tolist() == updates.tolist()


def test_small_tensors_have_bools_of_both_kinds_and_many_integers():
    assert filled((9,), torch.bool).unique().tolist() == [False, True]
    assert filled((9,), torch.int8).unique().numel() > 5


CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "a zero of the other sign": (lambda u: 1 / (0 * u + (-0.0 if len(u) > 40 else 0.0)), (41,)),
    "a large int": (lambda u: ((0 * u).long() + (len(u) ** 5 + 1)) & 1023, (5000,)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_a_shape_are_those_of_the_rule(name):
    of, shape = CONSTANTS[name]
    tx = fo.leafwise(None, lambda u, slots, p: (of(u).to(u.dtype), slots), name="rule")
    p = -torch.zeros(shape)
    updates, _ = tx.update(p, tx.init(p), p)
    found, _ = fo.compile(tx)(p, tx.init(p), p.clone())
    assert found[:2].tolist() == updates[:2].tolist()


def test_memory_that_is_used_again_is_not_taken_for_a_view():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        x = u * len(u)
        for _ in range(50):
            x = x + 1
        return x.mul_(2), slots

    tx, p = fo.leafwise(None, update, name="rule"), torch.zeros(50, 30, dtype=torch.complex64)
    found, _ = fo.compile(tx, strict=True)(p, tx.init(p), p)
    assert torch.view_as_real(found).unique().tolist() == [100]


def test_a_rule_of_more_operations_than_python_can_follow_runs_without_a_kernel():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        for _ in range(700):
            u = u + p
        return u, slots

    tx, p = fo.leafwise(None, update, name="long"), torch.ones(3)
    found, _ = fo.compile(tx)(p, tx.init(p), p.clone())
    assert found.tolist() == [702.0] * 3


@pytest.mark.parametrize("option", ["batched", "dense_only"])
def test_advice_that_the_graph_does_not_contradict_changes_nothing(option):
    runs = fo.Runs(**{option: True})
    tx = fo.leafwise(None, lambda u, slots, p: (2 * u, slots), runs=runs, name="rule")
    params = {"w": torch.ones(4, 3)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].unique().tolist() == [2.0]
    moved, _ = fo.compile(tx, strict=True)(params, tx.init(params), {"w": torch.ones(4, 3)})
    assert moved["w"].unique().tolist() == [3.0]


def with_its_own_slots() -> Any:
    class Slots(NamedTuple):
        m: Tensor

    def init(p: Tensor) -> Slots:
        return Slots(torch.zeros_like(p))

    def update(u: Tensor, slots: Slots, p: Tensor) -> tuple[Tensor, Slots]:
        m = 0.9 * slots.m + u
        return m, Slots(m)

    return fo.leafwise(init, update, name="mine")


def test_a_class_of_slots_that_is_defined_again_is_the_same():
    """Or a recipe with one inside would be recorded at each change of a learning rate."""
    first, second = (key_of(with_its_own_slots().placements[0]) for _ in range(2))
    assert first == second
    assert key_of(fo.trace(0.9).placements[0]) != first


def test_a_rule_is_recorded_on_large_tensors_without_memory(monkeypatch):
    monkeypatch.setattr(recording, "LARGE", 100)
    tx, g = fo.scale_by_adafactor(), torch.randn(400, 300)
    shapes, real = [], recording.filled
    monkeypatch.setattr(recording, "filled", lambda s, d: shapes.append(tuple(s)) or real(s, d))
    params, _ = fo.compile(tx, strict=True)(g, tx.init(g), torch.zeros(400, 300))
    updates, _ = tx.update(g, tx.init(g), torch.zeros(400, 300))
    assert shapes
    assert (400, 300) not in shapes
    torch.testing.assert_close(params, updates)


def test_gradients_of_the_first_step_are_freed():
    params = {"w": torch.ones(300), "v": torch.ones(20, 20)}
    tx = fo.adam(0.1)
    step, state = fo.compile(tx), tx.init(params)
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    mine = [torch.nn.Parameter(p.clone()) for p in params.values()]
    opt = Optimizer(mine, fo.adam, lr=0.1)
    for p, g in zip(mine, grads.values(), strict=True):
        p.grad = g.clone()
    kept = [weakref.ref(g) for g in (*grads.values(), *[p.grad for p in mine])]
    params, state = step(grads, state, params)
    opt.step()
    opt.zero_grad()
    del grads, g
    gc.collect()
    assert [g() for g in kept] == [None] * 4


def of_twenty_operations(constant: Callable[[], float]) -> Any:
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        for _ in range(20):
            u = (1.01 * u).tanh() / (1 + u.norm())
        return constant() * u, slots

    return fo.leafwise(None, update, name="mine")


def test_a_rule_may_be_recorded_while_another_thread_draws():
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            random.random()

    thread = threading.Thread(target=draw)
    p = torch.ones(3)
    thread.start()
    try:
        tx = of_twenty_operations(lambda: 2.0)
        assert tx.update(p, tx.init(p), p)[0].isfinite().all()
        tx = of_twenty_operations(random.random)
        with pytest.raises(ValueError, match="computes with other numbers"):
            tx.update(p, tx.init(p), p)
    finally:
        done.set()
        thread.join()


def test_a_module_that_another_thread_is_importing_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.random", types.ModuleType("numpy.random"))
    p, tx = torch.ones(3), of_twenty_operations(lambda: 3.0)
    assert tx.update(p, tx.init(p), p)[0].isfinite().all()
