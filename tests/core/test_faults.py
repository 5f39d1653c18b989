"""The faults that optax's users report, which this library must not have; numbers: its issues."""

import math
from collections import namedtuple
from typing import Any

import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, run
from torch import Tensor

import functional_optim as fo
from functional_optim.adapters import Optimizer

WideSlots = namedtuple("WideSlots", "total")
Pair = namedtuple("Pair", "w b")


def tree(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.tensor([x], dtype=dtype) for name, x in zip("ab", values, strict=True)}


def stepping(tx, compiled):
    """A function of gradients, state and parameters: new parameters and state."""
    if compiled:
        return fo.compile(tx)
    return lambda grads, state, params: run(tx, params, [grads], state)


either = pytest.mark.parametrize("compiled", [False, True])


# ---------------------------------------------------------------- hyperparameters (206, 964, 577)
@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25), lambda count: 0.5 / (1 + count)])
@either
def test_the_learning_rate_can_be_read_from_the_state(lr, compiled):
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr))
    step, params, state = stepping(tx, compiled), tree(1.0, 2.0), tx.init(tree(1.0, 2.0))
    assert fo.get(state, "lr") == (0.5 if callable(lr) else 0.25)
    for _ in range(2):
        params, state = step(tree(0.1, 0.2), state, params)
    assert fo.get(state, "lr") == 0.25
    assert fo.get(state, "max_norm") == 1.0
    assert [x.dtype for x in fo.get(state, "betas")] == [torch.float64] * 2


@either
def test_another_learning_rate_is_read_after_the_step_that_took_it(compiled):
    state = fo.adam(0.1).init(tree(1.0, 2.0))
    for lr in (0.2, torch.tensor(0.3, dtype=torch.float64)):
        step = stepping(fo.adam(lr), compiled)
        _, state = step(tree(1.0, 2.0), state, tree(1.0, 2.0))
        assert fo.get(state, "lr") == float(lr)


def test_each_part_of_a_partition_has_its_own():
    parts = {"fast": fo.adam(0.5, (0.8, 0.9)), "slow": fo.sgd(lambda count: 0.1 * (count + 1))}
    tx = fo.partition(parts, {"a": "fast", "b": "slow"})
    params = tree(1.0, 2.0)
    _, state = run(tx, params, [params] * 3)
    assert fo.get(state, "fast.lr") == 0.5
    assert_close(fo.get(state, "slow.lr"), torch.tensor(0.3, dtype=torch.float64), 1e-12)
    assert [float(x) for x in fo.get(state, "fast.betas")] == [0.8, 0.9]
    assert fo.get(state, "a", "exp_avg").shape == (1,)
    with pytest.raises(KeyError, match=r"several values called 'lr': fast\..*lr, slow\..*lr"):
        fo.get(state, "lr")
    with pytest.raises(KeyError, match=r"no slot for 'b' and 'exp_avg'; .* has leaves at 'a'"):
        fo.get(state, "b", "exp_avg")


def test_a_schedule_behind_a_gate_is_read_at_the_steps_that_were_taken():
    tx = fo.accumulate(fo.sgd(lambda count: 1.0 + count), 3)
    params = tree(1.0, 2.0)
    state, step, mine, other = tx.init(params), fo.compile(tx), tx.init(params), clone(params)
    for k in range(7):
        before = params
        params, state = run(tx, params, [tree(1.0, 1.0)], state)
        other, mine = step(tree(1.0, 1.0), mine, other)
        assert fo.get(state, "lr") == fo.get(mine, "lr") == max(1, (k + 1) // 3)
        if k % 3 == 2:
            assert_close(before["a"] - params["a"], fo.get(state, "lr").float().reshape(1), 1e-6)


# ---------------------------------------------------------------- precision (1414, 1098)
def wide():
    """A rule that wants its slot in float32 whatever the parameters are."""

    def init(p):
        return WideSlots(torch.zeros_like(p, dtype=torch.float32))

    def update(u, slots, p):
        return u, WideSlots(slots.total + u)

    return fo.leafwise(init, update, name="wide")


def kinds(state):
    return [x.dtype for x in optree.tree_leaves(state)]


@either
def test_a_state_keeps_its_dtypes(compiled):
    """Gradients are float32; parameters and slots bfloat16, but for slots that say otherwise."""
    tx = fo.chain(fo.accumulate(fo.chain(fo.adam(0.1), wide()), 2), fo.params_ema(0.9))
    params = tree(1.0, 2.0, dtype=torch.bfloat16)
    step, state = stepping(tx, compiled), tx.init(params)
    first = kinds(state)
    assert fo.get(state, "exp_avg")["a"].dtype == torch.bfloat16
    assert fo.get(state, "total")["a"].dtype == torch.float32
    assert fo.get(state, "acc_grads")["a"].dtype == torch.float32
    for _ in range(4):
        params, state = step(tree(0.1, 0.2), state, params)
        assert kinds(state) == first
        assert params["a"].dtype == torch.bfloat16


# ---------------------------------------------------------------- subsets (159, 290, 271, 160)
def test_labels_go_by_path_and_need_no_mirrored_tree():
    params = {"enc": {"w": torch.ones(1), "b": torch.ones(1)}, "dec": [torch.ones(1)]}
    want = {"enc": {"w": -torch.ones(1), "b": torch.ones(1)}, "dec": [2 * torch.ones(1)]}
    parts = {"down": fo.scale(-1.0), "same": fo.identity(), "twice": fo.scale(2.0)}
    for labels in (
        {"enc.w": "down", "enc": "same", "*": "twice"},
        {"*.w": "down", "*.b": "same", "dec.*": "twice"},
        {"enc": {"w": "down", "b": "same"}, "dec": "twice"},
        {"enc": {"w": "down", "b": "same"}, "dec": ["twice"]},
        lambda path, p: {"enc.w": "down", "enc.b": "same"}.get(path, "twice"),
    ):
        tx = fo.partition(parts, labels)
        assert_same(tx.update(params, tx.init(params), params)[0], want)


MASKS: list[Any] = [
    ({"z": 1.0, "a.b": 2.0, "a": {"c": 3.0}}, "a.b", [False, True, False]),
    (Pair(1.0, 2.0), "b", [False, True]),
    ([1.0, (2.0, 3.0)], [False, True], [False, True, True]),
    ({"x": 1.0, "y": None}, "*", [True]),
    ({1: 1.0, 11: 2.0}, "1", [True, False]),
    (1.0, True, [True]),
    ([1.0, (2.0, 3.0)], "1", [False, True, True]),
    ([1.0, (2.0, 3.0)], "1.0", [False, True, False]),
    ({"x": 1.0, "xy": 2.0}, "x", [True, False]),
    ({"x": 1.0, "xy": 2.0}, ["x*y"], [False, True]),
    ({"x": 1.0, "xyx": 2.0}, ["x*x"], [False, True]),
    ({"x": 1.0}, [], [False]),
    ({"x": 1.0, "y": 2.0}, True, [True, True]),
    ({"x": 1.0, "y": 2.0}, "nothing", [False, False]),
    (1.0, "*", [True]),
    ({}, "*", []),
]
"""Parameters, a mask, and which of them it selects."""


def ten_times(updates, params):
    """Of each leaf whether it is multiplied."""
    pairs = zip(optree.tree_leaves(updates), optree.tree_leaves(params), strict=True)
    return [u == 10 * p for u, p in pairs]


@pytest.mark.filterwarnings("ignore:functional_optim. the pattern 'nothing':UserWarning")
@pytest.mark.parametrize(("params", "mask", "chosen"), MASKS)
def test_masks_fit_odd_trees(params, mask, chosen):
    tx, params = fo.masked(fo.scale(10.0), mask), optree.tree_map(torch.tensor, params)
    assert ten_times(tx.update(params, tx.init(params), params)[0], params) == chosen


@pytest.mark.filterwarnings("ignore:functional_optim. the pattern 'nothing':UserWarning")
def test_masks_fit_odd_trees_in_a_traced_step_too(fresh_dynamo):
    rows = [(optree.tree_map(torch.tensor, params), mask) for params, mask, _ in MASKS[:5]]
    links = [fo.masked(fo.scale(10.0), mask) for _, mask in rows]

    @torch.compile(backend="eager", fullgraph=True)
    def go(every):
        pairs = zip(links, every, strict=True)
        return [tx.update(params, tx.init(params), params)[0] for tx, params in pairs]

    found = go([params for params, _ in rows])
    for (params, _), updates, (*_, chosen) in zip(rows, found, MASKS, strict=False):
        assert [bool(x) for x in ten_times(updates, params)] == chosen


# ---------------------------------------------------------------- accumulation (828)
def test_the_rule_behind_a_shut_gate_is_not_called_at_all():
    calls: list[torch.Size] = []

    def update(u, slots, p):
        calls.append(u.shape)  # also of small tensors, on which the rule is recorded
        return u, slots

    tx = fo.accumulate(fo.leafwise(None, update, name="counting"), 4)
    p = torch.nn.Parameter(torch.ones(3))
    opt = Optimizer([p], lambda: tx, compile=False)
    for k in range(8):
        p.grad = torch.ones(3)
        calls.clear()
        opt.step()
        assert (p.shape in calls) == (k % 4 == 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@either
def test_a_bad_micro_batch_does_not_poison_the_next_batches(bad, compiled):
    tx = fo.accumulate(fo.sgd(1.0), 2, skip_nonfinite=True)
    params = tree(0.0, 0.0)
    batches = [tree(2.0, 1.0), tree(bad, 1.0), tree(3.0, 1.0), tree(5.0, 1.0), tree(1.0, 1.0)]
    state, step = tx.init(params), stepping(tx, compiled)
    for g in batches:
        params, state = step(g, state, params)
    assert_same(params, tree(-5.5, -2.0))
    # without skipping, the batch that has it is lost, and no other one
    lost = fo.accumulate(fo.apply_if_finite(fo.sgd(1.0), 5), 2)
    params, _ = run(lost, tree(0.0, 0.0), [tree(bad, 1.0), *batches[:1], *batches[3:]])
    assert_same(params, tree(-3.0, -1.0))
