"""Rules that spread a dear variant over the steps: each tensor has its turn."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, run
from sampling import some
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from ways import by_function, by_object, by_update, random_tree

import functional_optim as fo
from functional_optim import adapters

SHAPES = {"a": (6, 9), "b": (9, 6), "c": (3, 3), "d": (6, 9), "e": (2, 30), "f": (1, 4)}
SHAPES |= {"g": (7, 8)}
TURNS = {"e": 0, "g": 1, "a": 2, "b": 0, "d": 1, "c": 2, "f": 0}
"""Of three, from the largest tensor to the smallest."""


class RenewedSlots(NamedTuple):
    basis: Tensor
    renewed: Tensor
    """How often the basis was."""


def renewing(turns: Any = 3, lr: Any = 0.1, batched: bool = True, products: bool = True) -> Any:
    """Multiplies by a matrix that is renewed in a tensor's turn."""

    def init(p: Tensor) -> RenewedSlots:
        return RenewedSlots(torch.eye(p.shape[0], dtype=p.dtype), p.new_zeros(()))

    def cheap(u: Tensor, x: RenewedSlots, p: Any, lr: Any) -> Any:
        return -lr * (x.basis @ u if products else u * x.renewed[..., None, None]), x

    def dear(u: Tensor, x: RenewedSlots, p: Any, lr: Any) -> Any:
        basis = u @ u.mT if products else x.basis / 2
        u, _ = cheap(u, x, p, lr)
        return u, RenewedSlots(basis, x.renewed + 1)

    return fo.leafwise(
        init,
        [cheap, dear],
        lambda t, *, lr: (lr,),
        hyper={"lr": lr},
        runs=fo.Runs(choose=lambda t, *, turn: t % turns == turn, turns=turns, batched=batched),
        name="renewing",
    )


def trees(steps: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[Any]:
    """Gradients."""
    return [random_tree(k + 1, dtype, shapes) for k in range(steps)]


OBJECTS: dict[str, Any] = {"strict": "strict", "eager": False, "traced object": True}
WAYS = ["update", "compile", "traced", "make_fx", *OBJECTS]
PAIRS = [(way, batched) for way in WAYS for batched in (True, False)]
few_ways = pytest.mark.parametrize("way", ["update", "compile", "strict", "eager"])


def parameters(shapes: Any = SHAPES) -> list[tuple[str, torch.nn.Parameter]]:
    start = random_tree(0, torch.float64, shapes)
    return [(name, torch.nn.Parameter(p)) for name, p in start.items()]


def stepped(opt: Any, named: Iterable[tuple[str, Any]], grads: Iterable[Any]) -> list[Any]:
    """How often each basis was renewed, after each step."""
    found = []
    for tree in grads:
        for name, p in named:
            p.grad = tree.get(name)
        opt.step()
        states = [(name, opt.state.get(p) or {}) for name, p in named]
        found.append({name: int(x["renewed"]) for name, x in states if "renewed" in x})
    return found


def counted(turns: dict[str, int], steps: int, among: int = 3) -> list[dict[str, int]]:
    """How often tensors with these turns have theirs in each number of steps."""
    within = [range(1, k + 2) for k in range(steps)]
    return [{n: sum(t % among == turn for t in own) for n, turn in turns.items()} for own in within]


def in_order(counts: list[dict[str, int]]) -> list[list[tuple[str, int]]]:
    return [sorted(own.items()) for own in counts]


def renewals(way: str, make: Any, grads: list[Any]) -> list[dict[str, int]]:
    """How often each basis was renewed, after each step in one of the ways. A step that is traced
    is one graph for all steps."""
    if way in OBJECTS:
        named = parameters()
        opt = adapters.Optimizer(named, make, compile=OBJECTS[way])
        if way == "traced object":
            opt.step = torch.compile(opt.step, backend="eager", fullgraph=True)
        found = stepped(opt, named, grads)
        expected, _ = run(make(), random_tree(0, torch.float64, SHAPES), grads)
        assert_close([p.detach() for _, p in named], list(expected.values()), 1e-12)
        return found
    tx, params, found = make(), random_tree(0, torch.float64, SHAPES), []
    state, counter = tx.init(params), CompileCounter()
    step = {
        "update": lambda: tx.update,
        "compile": lambda: fo.compile(tx),
        "traced": lambda: torch.compile(tx.update, backend=counter, fullgraph=True),
        "make_fx": lambda: make_fx(lambda *given: tx.update(*given))(grads[0], state, params),
    }[way]()
    for g in grads:
        updates, expected = tx.update(g, state, params)
        u, state = step(g, state, params)
        assert_close(state.slots, expected.slots, 1e-12)
        if way != "compile":
            assert_close(u, updates, 1e-12)
        slots = state.slots["renewed"].items()
        found.append({name: int(x) for name, x in slots if x is not None})
    assert counter.frame_count == (way == "traced")
    return found


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("way", "batched"), some(PAIRS, 0, {*PAIRS} - {("traced object", False)}))
def test_each_step_renews_the_tensors_of_one_turn(way, batched):
    found = renewals(way, lambda: renewing(batched=batched), trees(5))
    assert in_order(found) == in_order(counted(TURNS, 5))


WITHOUT: dict[str, tuple[Any, dict[str, int], set[str]]] = {
    "a gradient": (renewing, TURNS, {"e", "b"}),
    "the rule": (lambda: fo.masked(renewing(), [*"acd"]), {"a": 0, "d": 1, "c": 2}, {"a", "g"}),
    "training": (
        lambda: fo.chain(fo.freeze("e"), renewing()),
        {"g": 0, "a": 1, "b": 2, "d": 0, "c": 1, "f": 2},
        {"d"},
    ),
}
"""A recipe, the turns that it gives, and the tensors without a gradient."""


@pytest.mark.parametrize("name", WITHOUT)
@few_ways
def test_all_tensors_on_which_a_rule_acts_have_turns(way, name):
    """Also those without a gradient; and no others."""
    make, turns, gone = WITHOUT[name]
    grads = [{k: None if k in gone else g for k, g in tree.items()} for tree in trees(4)]
    found = renewals(way, make, grads)[-1]
    expected = counted(turns, 4)[-1]
    assert {k: n for k, n in found.items() if k not in gone} == {
        k: n for k, n in expected.items() if k not in gone
    }


@few_ways
def test_turns_behind_a_gate_count_open_steps(way):
    found = renewals(way, lambda: fo.accumulate(renewing(), 2), trees(8))
    assert in_order(found[1::2]) == in_order(counted(TURNS, 4))
    assert found[2] == found[1]


@few_ways
def test_each_rule_of_a_partition_has_its_own_turns(way):
    def make() -> Any:
        labels = {"a": "x", "b": "x", "c": "x", "*": "y"}
        return fo.partition({"x": renewing(), "y": renewing(2)}, labels)

    expected = counted({"a": 0, "b": 1, "c": 2}, 5)[-1]
    expected |= counted({"e": 0, "g": 1, "d": 0, "f": 1}, 5, among=2)[-1]
    assert renewals(way, make, trees(5))[-1] == expected


def test_an_object_gives_turns_over_all_groups_and_to_those_that_join():
    named = dict(parameters())
    first, second = ([named[k] for k in own] for own in ("abcd", "ef"))
    opt = adapters.Optimizer([{"params": first}, {"params": second, "lr": 0.2}], renewing)
    grads = trees(6)
    without = [{k: g for k, g in x.items() if k != "g"} for x in grads[:3]]
    found = stepped(opt, named.items(), without)
    without_g = {"e": 0, "a": 1, "b": 2, "d": 0, "c": 1, "f": 2}
    assert in_order(found) == in_order(counted(without_g, 3))
    opt.add_param_group({"params": [named["g"]], "lr": 0.3})
    later = stepped(opt, named.items(), grads[3:])[-1]
    for name, turn in TURNS.items():
        before = found[-1].get(name, 0)
        own = [t for t in range(1, 4) if (t if name == "g" else t + 3) % 3 == turn]
        assert later[name] == before + len(own)


def test_a_new_number_of_turns_counts_at_the_next_step():
    named = parameters()
    opt = adapters.Optimizer(named, renewing, turns=3)
    found = stepped(opt, named, trees(3))
    opt.param_groups[0]["turns"] = 2
    later = stepped(opt, named, trees(2))
    assert in_order(found) == in_order(counted(TURNS, 3))
    halves = {"e": 0, "g": 1, "a": 0, "b": 1, "d": 0, "c": 1, "f": 0}
    gained = {k: sum(t % 2 == halves[k] for t in (4, 5)) for k in TURNS}
    assert later[-1] == {k: n + found[-1][k] for k, n in gained.items()}


@pytest.mark.parametrize("more", [{"turns": 1}, {"products": False, "batched": False}])
def test_one_turn_and_a_rule_without_products(more):
    tx = renewing(**more)
    params, *grads = (random_tree(k, torch.float64, SHAPES) for k in range(5))
    expected = by_update(tx, params, grads)
    assert_close(by_function(tx, clone(params), grads, strict=True), expected, 1e-12)
    if more.get("turns") == 1:
        assert set(map(int, expected[1]["renewed"].values())) == {4}


def test_members_of_an_ensemble_that_are_at_different_steps_have_their_own_turns():
    tx, params = renewing(), random_tree(0, torch.float64, SHAPES)
    early = tx.init(params)
    late = early._replace(step=early.step + 1)
    (grads,) = trees(1)
    both = optree.tree_map(lambda *x: torch.stack(x), early, late)
    updates, together = torch.vmap(lambda state: tx.update(grads, state, params))(both)
    for i, state in enumerate((early, late)):
        one, own = tx.update(grads, state, params)
        assert_close({k: u[i] for k, u in updates.items()}, one, 1e-12)
        for key, slots in own.slots.items():
            assert_close({k: x[i] for k, x in together.slots[key].items()}, slots, 1e-12)


class Counts(NamedTuple):
    renewed: Tensor


def test_divided_tensors_have_the_turns_of_whole_ones(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    def plain(u: Tensor, x: Counts, p: Tensor) -> Any:
        return -0.1 * u, x

    def dear(u: Tensor, x: Counts, p: Tensor) -> Any:
        return -0.1 * u, Counts(x.renewed + 1)

    runs = fo.Runs(choose=lambda t, *, turn: t % 3 == turn, turns=3)
    tx = fo.leafwise(lambda p: Counts(torch.zeros_like(p)), [plain, dear], runs=runs)
    start, *grads = (
        {k: distribute_tensor(x, mesh, [Shard(0)]) for k, x in tree.items()}
        for tree in (random_tree(0, torch.float64, SHAPES), *trees(5))
    )
    _, slots = by_object(tx, start, grads)
    found = {k: int(x.full_tensor().max()) for k, x in slots["renewed"].items()}
    assert found == counted(TURNS, 5)[-1]


def test_copies_and_checkpoints_go_on_with_the_same_turns():
    named = parameters()
    opt = adapters.Optimizer(named, renewing)
    stepped(opt, named, trees(4))
    others, copied = copy.deepcopy((named, opt))
    loaded_named = [(k, torch.nn.Parameter(p.detach().clone())) for k, p in named]
    loaded = adapters.Optimizer(loaded_named, renewing)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    ends = [
        (stepped(x, pairs, trees(4)), [p.detach() for _, p in pairs])
        for x, pairs in ((opt, named), (copied, others), (loaded, loaded_named))
    ]
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])
