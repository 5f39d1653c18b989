"""local_sgd and diloco go where plain loops go, and nowhere when a synchronization is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, clone
from lockstep import Group
from reference import synced as naive

import functional_optim as fo
from functional_optim.replicas import Local, Replica, Scripted

EXACT = 1e-12
SHAPES = {"a": (3, 2), "b": (4,), "c": (1,), "d": (5,)}
REPLICAS = 3
STEPS = 24


def random(seed):
    """A tree; threads would share the global generator."""
    source = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, dtype=torch.float64, generator=source) for n, s in SHAPES.items()}


def params():
    return random(0)


def targets(steps=STEPS, replicas=REPLICAS):
    """By step and replica: where each is pulled to."""
    return [
        [fo.tree.map(lambda x, r=r: x + r, random(1 + t * replicas + r)) for r in range(replicas)]
        for t in range(steps)
    ]


def arrays(values):
    return {n: np.asarray(x) for n, x in values.items()}


def inner():
    return fo.adamw(0.1, weight_decay=0.05)


def naive_inner():
    return naive.AdamW(0.1, weight_decay=0.05)


def train(tx, coordinator, pulled, start=None, **how):
    """The parameters after every step, the last tree, and the decisions."""
    replica = Replica(coordinator, tx, **how)
    now = replica.init(clone(params() if start is None else start))
    seen, said = [], []
    for target in pulled:
        now = replica.start(now)
        grads = fo.tree.map(torch.sub, now.params, target)
        now, decision = replica.step(grads, now)
        seen.append(clone(now.params))
        said.append(decision)
    return seen, now, said


def train_group(tx, group, **how):
    every = targets(replicas=len(group.members))
    return group.run(lambda r, member: train(tx, member, [mine[r] for mine in every], **how))


def assert_follows(results, wanted, tolerance=EXACT):
    """Each replica's parameters after every step."""
    for r, (seen, _, _) in enumerate(results):
        for mine, step in zip(seen, wanted, strict=True):
            its = {n: torch.tensor(x) for n, x in step[r].items()}
            assert_close(mine, its, tolerance)


@pytest.mark.parametrize("refused", [(), (0,), (1, 2)])
@pytest.mark.parametrize("every", [1, 4])
def test_local_sgd_goes_where_a_plain_loop_goes(every, refused):
    group = Group(REPLICAS, refused)
    wanted = naive.local_sgd(
        arrays(params()),
        [[arrays(x) for x in mine] for mine in targets()],
        naive_inner,
        every,
        refused,
    )
    assert_follows(train_group(fo.local_sgd(inner(), every), group), wanted)


CASES = {
    "plain": (4, 1, 0, 0.0),
    "delayed": (4, 1, 3, 0.0),
    "mixed": (4, 1, 0, 0.5),
    "in turns": (6, 3, 0, 0.0),
    "all of it": (8, 2, 2, 0.25),
    "never global": (4, 2, 1, 1.0),
}
NAMES = {1: [["a", "b", "c", "d"]], 2: [["a"], ["b", "c", "d"]], 3: [["a"], ["b", "c"], ["d"]]}


@pytest.mark.parametrize("refused", [(), (1,), (0, 2, 3)])
@pytest.mark.parametrize("case", CASES)
def test_diloco_goes_where_a_plain_loop_goes(case, refused):
    every, fragments, delay, alpha = CASES[case]
    outer = fo.sgd(0.7, momentum=0.9, nesterov=True)
    masks = NAMES[fragments] if fragments > 1 else 1
    tx = fo.diloco(inner(), outer, every, fragments=masks, delay=delay, alpha=alpha)
    wanted = naive.diloco(
        arrays(params()),
        [[arrays(x) for x in mine] for mine in targets()],
        naive_inner,
        lambda: naive.Nesterov(0.7, 0.9, nesterov=True),
        every,
        NAMES[fragments],
        delay,
        alpha,
        refused,
    )
    assert_follows(train_group(tx, Group(REPLICAS, refused)), wanted)


@pytest.mark.parametrize(
    "outer", [fo.adamw(0.1), fo.chain(fo.clip_by_global_norm(0.5), fo.sgd(1.0))]
)
def test_an_outer_transformation_may_be_any(outer):
    results = train_group(fo.diloco(inner(), outer, 4, fragments=2), Group(2))
    (_, one, _), (_, other, _) = results
    assert_same((one.state.anchor, one.state.outer), (other.state.anchor, other.state.outer))


def test_diloco_alone_with_an_outer_step_of_one_is_the_inner_transformation():
    pulled = [mine[0] for mine in targets()]
    tx = fo.diloco(inner(), fo.sgd(1.0), 4)
    seen, now, _ = train(tx, Local(), pulled)
    plain, alone, _ = train(inner(), Local(), pulled)
    for mine, its in zip(seen, plain, strict=True):
        assert_close(mine, its, EXACT)
    assert_close(now.state.inner, alone.state, EXACT)


def test_local_sgd_alone_is_the_inner_transformation():
    pulled = [mine[0] for mine in targets()]
    seen, now, _ = train(fo.local_sgd(inner(), 4), Local(), pulled)
    plain, alone, _ = train(inner(), Local(), pulled)
    assert_same((seen, now.state.inner), (plain, alone.state))


def recipes():
    outer = fo.sgd(0.7, momentum=0.9, nesterov=True)
    return {
        "local_sgd": fo.local_sgd(inner(), 2),
        "diloco": fo.diloco(inner(), outer, 2),
        "delayed": fo.diloco(inner(), outer, 2, delay=1, alpha=0.5),
    }


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("compile", [False, True])
def test_a_refused_synchronization_leaves_no_bit_changed(name, compile):
    """T41, T42: parameters and the inner state, though the local steps went wrong altogether."""
    tx = recipes()[name]
    replica = Replica(Scripted([True, False, True]), tx, compile=compile)
    now = replica.init(params())
    trees = []
    for t in range(6):
        now = replica.start(now)
        size = float("nan") if t in (2, 3) else 1.0
        now, _ = replica.step(fo.tree.map(lambda p, x=size: x * p, now.params), now)
        trees.append(clone(now))
    before, after = trees[1], trees[3]
    assert_same(after.params, before.state.anchor)
    assert_same(after.state, before.state)
    assert_finite(trees[5])
    assert not torch.equal(trees[5].params["a"], after.params["a"])


def test_a_refused_fragment_goes_back_alone():
    outer = fo.sgd(0.7, momentum=0.9)
    tx = fo.diloco(inner(), outer, 4, fragments=[["a", "b"], "*"])
    replica = Replica(Scripted([True, True, False, True]), tx)
    now = replica.init(params())
    trees = []
    for mine in targets(8):
        now = replica.start(now)
        now, _ = replica.step(fo.tree.map(torch.sub, now.params, mine[0]), now)
        trees.append(now)
    first, before, after, last = (trees[i] for i in (1, 4, 5, 7))
    for name in SHAPES:
        mine = name in ("a", "b")
        slots = [x.state.inner.slots["exp_avg"][name] for x in (first, before, after)]
        assert torch.equal(after.params[name], first.params[name]) is mine
        assert torch.equal(slots[2], slots[0]) is mine
    assert int(after.state.inner.step) == 6
    assert_same(after.state.outer, trees[3].state.outer)
    assert (int(after.state.turn), int(last.state.turn)) == (0, 1)


def test_names_of_a_state_are_those_of_the_present():
    now = fo.local_sgd(fo.adamw(0.25), 2).init({"w": torch.ones(2)})
    assert fo.get(now, "lr").item() == 0.25
    assert_same(fo.get(now, "exp_avg"), {"w": torch.zeros(2)})
