"""What must hold of any tree and any chain, on random ones."""

import itertools
import math

import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, run
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_optim as fo
from functional_optim import kernels
from functional_optim.core import traits
from functional_optim.core.leafwise import Leafwise

FEW = settings(max_examples=25)

LINKS = {
    "scale": lambda: fo.scale(-0.7),
    "scale_by_lr": lambda: fo.scale_by_lr(0.1),
    "scale_by_schedule": lambda: fo.scale_by_schedule(lambda count: 1 / (1 + count)),
    "trace": lambda: fo.trace(0.8, nesterov=True),
    "add_decayed_weights": lambda: fo.add_decayed_weights(0.1),
    "clip_by_value": lambda: fo.clip_by_value(0.8),
    "clip_by_global_norm": lambda: fo.clip_by_global_norm(1.5),
    "scale_by_adam": lambda: fo.scale_by_adam((0.8, 0.9), 1e-3),
    "scale_by_amsgrad": lambda: fo.scale_by_adam((0.8, 0.9), 1e-3, amsgrad=True),
    "scale_by_adamax": lambda: fo.scale_by_adamax((0.8, 0.9), 1e-3),
    "scale_by_nadam": lambda: fo.scale_by_nadam((0.8, 0.9), 1e-3),
    "scale_by_radam": lambda: fo.scale_by_radam((0.8, 0.9), 1e-3),
    "scale_by_rms": lambda: fo.scale_by_rms(0.9, 1e-3),
    "scale_by_adagrad": lambda: fo.scale_by_adagrad(0.1),
    "scale_by_adadelta": lambda: fo.scale_by_adadelta(0.9, 1e-3),
    "sign": lambda: fo.sign(),
    "ema": lambda: fo.ema(0.7),
    "centralize": lambda: fo.centralize(),
    "normalize": lambda: fo.normalize(),
    "clip_by_block_rms": lambda: fo.clip_by_block_rms(0.5),
    "adaptive_grad_clip": lambda: fo.adaptive_grad_clip(0.1),
    "zero_nans": lambda: fo.zero_nans(),
    "scale_by_trust_ratio": lambda: fo.scale_by_trust_ratio(eps=1e-3),
    "masked": lambda: fo.masked(fo.scale(2.0), lambda path, p: p.dim() > 0),
    "conditional": lambda: fo.conditionally_transform(fo.scale(3.0), lambda step: step % 2 == 1),
}
"""Every link that is leafwise and can stand anywhere; a new one is a line here."""

SHAPES = [(), (0,), (1,), (3,), (2, 3), (3, 0), (2, 1, 2), (5, 5)]
KEYS = st.sampled_from(["a", "b", "w.0", "0", "long name", "*"])
leaves = st.sampled_from(SHAPES).map(lambda shape: torch.randn(shape, dtype=torch.float64))
trees = st.recursive(
    leaves,
    lambda x: st.one_of(
        st.lists(x, max_size=3),
        st.lists(x, max_size=3).map(tuple),
        st.dictionaries(KEYS, x, max_size=3),
    ),
    max_leaves=6,
)
names = st.sampled_from(sorted(LINKS))
threes = st.lists(names, min_size=3, max_size=3, unique=True)


def opaque():
    """A transformation of whole trees, with a state: the number of its steps, which it adds."""

    def update(grads, state, params=None):
        return fo.tree.map(lambda g: g + state["count"], grads), {"count": state["count"] + 1}

    return fo.GradientTransformation(lambda params: {"count": torch.zeros(())}, update)


def chained(three):
    """Named by their places: two links may have a slot of one name."""
    return fo.named_chain(*[(f"n{i}", LINKS[name]()) for i, name in enumerate(three)])


def gradients(params, steps=3):
    torch.manual_seed(len(optree.tree_leaves(params)))
    return [optree.tree_map(torch.randn_like, params) for _ in range(steps)]


def final(tx, params, steps=3):
    return run(tx, params, gradients(params, steps))


# ---------------------------------------------------------------- chains
@FEW
@given(trees, threes)
def test_a_chain_is_its_links_one_after_the_other(params, three):
    tx, alone = chained(three), [LINKS[name]() for name in three]
    state, states = tx.init(params), [part.init(params) for part in alone]
    for grads in gradients(params):
        updates, state = tx.update(grads, state, params)
        by_hand = grads
        for i, part in enumerate(alone):
            by_hand, states[i] = part.update(by_hand, states[i], params)
        assert_close(updates, by_hand, 1e-12)
        params = fo.apply_updates(params, updates)


@FEW
@given(trees, threes, st.data())
def test_chains_in_chains_are_one_chain(params, three, data):
    links = [fo.named_chain((f"n{i}", LINKS[name]())) for i, name in enumerate(three)]
    cut = data.draw(st.integers(0, len(links)))
    nested = fo.chain(fo.chain(*links[:cut]), fo.chain(fo.chain(), fo.chain(*links[cut:])))
    flat = fo.chain(*links)
    assert optree.tree_structure(nested.init(params)) == optree.tree_structure(flat.init(params))
    assert_same(final(nested, params), final(flat, params))


@FEW
@given(trees, st.lists(st.booleans(), max_size=5))
def test_the_state_of_a_chain_has_a_part_for_each_run_of_rules(params, whole):
    """Neighbouring one-tensor rules share a `State`; what is no rule stands between them."""
    links = [
        opaque() if own else fo.named_chain((f"n{i}", fo.trace(0.9))) for i, own in enumerate(whole)
    ]
    state = fo.chain(*links).init(params)
    runs = [own for own, some in itertools.groupby(whole) for _ in (some if own else [0])]
    if len(runs) < 2:
        assert isinstance(state, dict if runs == [True] else fo.State)
    else:
        assert [isinstance(part, dict) for part in state] == runs


@FEW
@given(trees)
def test_every_slot_is_a_tree_like_the_parameters(params):
    state = fo.chain(fo.adam(amsgrad=True), fo.params_ema(0.9)).init(params)
    assert set(state.slots) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "params_ema"}
    for slot in state.slots.values():
        assert optree.tree_structure(slot) == optree.tree_structure(params)
        assert [x.shape for x in fo.tree.leaves(slot)] == [x.shape for x in fo.tree.leaves(params)]
    assert (state.step.dtype, state.step.shape) == (torch.int64, ())


def test_named_chain_names_only_slots_that_clash():
    def keys(*named):
        return sorted(fo.named_chain(*named).init(torch.ones(2)).slots)

    fast, slow = ("fast", fo.trace(0.5)), ("slow", fo.trace(0.9))
    clash = ["fast.momentum_buffer", "slow.momentum_buffer"]
    assert keys(fast, slow, ("last", fo.adam())) == ["exp_avg", "exp_avg_sq", *clash]
    assert keys(fast, ("down", fo.scale(-1))) == ["momentum_buffer"]
    inner = [f"{x}.scale_by_adam.{key}" for x in "ab" for key in ("exp_avg", "exp_avg_sq")]
    assert keys(("a", fo.adamw()), ("b", fo.adam())) == inner


def test_an_identity_is_no_link_and_a_chain_says_what_it_is():
    for tx in (fo.chain(), fo.identity(), fo.scale(1), fo.add_decayed_weights(0.0)):
        assert tx.placements == ()
    assert fo.scale(torch.tensor(1.0)).placements != ()  # its value may change
    updates, state = fo.chain().update(torch.ones(2), fo.chain().init(torch.ones(2)), torch.ones(2))
    assert torch.equal(updates, torch.ones(2))
    assert state.step == 1
    assert repr(fo.adamw()) == "chain(scale_by_adam, add_decayed_weights, scale_by_lr)"


# ---------------------------------------------------------------- tree helpers
@given(trees)
def test_the_helpers_of_trees_agree(a):
    b = optree.tree_map(torch.randn_like, a)
    leaves, items = fo.tree.leaves(a), list(fo.tree.items(a))
    summed = fo.tree.map(torch.add, a, b)
    assert optree.tree_structure(summed) == optree.tree_structure(a)
    assert_same(fo.tree.leaves(summed), [x + y for x, y in fo.tree.rows(a, b)])
    first, second = fo.tree.map_unzip(2, lambda x: (x + 1, None if x.dim() else x), a)
    assert_same(first, fo.tree.map(lambda x: x + 1, a))
    assert [x is None for _, x in fo.tree.rows(a, second)] == [x.dim() > 0 for x in leaves]
    assert fo.tree.map_unzip(0, lambda x: (), a) == []
    assert [leaf for _, leaf in items] == leaves
    if leaves:
        flat = torch.cat([x.reshape(-1) for x in leaves])
        assert_close(fo.tree.global_norm(a), flat.norm(), 1e-12)


def test_the_global_norm_of_complex_numbers_and_none_as_an_empty_subtree():
    assert fo.tree.global_norm([torch.tensor([3 + 4j]), torch.tensor([12.0])]) == 13
    assert fo.tree.global_norm({}) == 0
    assert fo.tree.leaves({"a": None, "b": [1, None]}) == [1]
    assert dict(fo.tree.items({"a": None, "b": [1, (2,)]})) == {"b.0": 1, "b.1.0": 2}


# ---------------------------------------------------------------- parts of a tree
@FEW
@given(trees, names, names, st.integers(1, 3))
def test_parts_of_equal_settings_are_one(params, first, second, k):
    """Measurements excepted, which span a part."""
    three = [name for name in (first, second) if name != "clip_by_global_norm"]
    parts = {str(i): chained(three) for i in range(k)}
    tx = fo.partition(parts, lambda path, p: str(len(path) % k))
    assert_same(final(tx, params)[0], final(chained(three), params)[0])


@FEW
@given(trees, threes)
def test_a_mask_of_all_is_none_and_one_of_nothing_is_the_identity(params, three):
    tx = chained(three)
    assert_same(final(fo.masked(tx, "*"), params)[0], final(tx, params)[0])
    assert_same(final(fo.masked(tx, True), params)[0], final(tx, params)[0])
    for mask in (False, [], lambda path, p: False):
        nothing = fo.masked(tx, mask)
        (g,) = gradients(params, 1)
        updates, after = nothing.update(g, nothing.init(params), params)
        assert_same(updates, g)
        assert not optree.tree_leaves(after.slots)


def even(path, p):
    return p.numel() % 2 == 0


@FEW
@given(trees, threes)
def test_frozen_leaves_stay_and_have_no_state(params, three):
    for tx in (
        fo.chain(fo.freeze(even), chained(three)),
        fo.partition({"go": chained(three), "no": fo.freeze()}, lambda *x: ["go", "no"][even(*x)]),
    ):
        moved, state = final(tx, params)
        for path, p in fo.tree.items(params):
            if even(path, p):
                assert_same(dict(fo.tree.items(moved))[path], p)
        ours = [p for path, p in fo.tree.items(params) if not even(path, p)]
        for slots in state.slots.values():
            assert len(optree.tree_leaves(slots)) == len(ours)


# ---------------------------------------------------------------- gates
@FEW
@given(trees, threes)
def test_an_open_gate_is_none(params, three):
    want, _ = final(chained(three), params)
    for tx in (
        fo.conditionally_transform(chained(three), lambda step: True),
        fo.conditionally_mask(chained(three), lambda step: step >= 0),
        fo.apply_if_finite(chained(three), 0),
        fo.skip_large_updates(chained(three), 1e9),
        fo.accumulate(chained(three), 1),
    ):
        assert_same(final(fo.named_chain(("gate", tx)), params)[0], want)


@FEW
@given(trees, threes)
def test_behind_a_shut_gate_nothing_moves(params, three):
    nan = [optree.tree_map(lambda p: torch.full_like(p, math.nan), params)] * 3
    some = any(p.numel() for p in optree.tree_leaves(params))
    gates = {
        "mask": (fo.conditionally_mask, lambda step: False, gradients(params)),
        "skip": (fo.skip_large_updates, 1e-9, gradients(params)),
        "finite": (fo.apply_if_finite, 5, nan),
        "wait": (fo.accumulate, 99, gradients(params)),
    }
    for name, (gate, argument, grads) in gates.items():
        tx = fo.named_chain(("gate", gate(chained(three), argument)))
        first = tx.init(params)
        moved, state = run(tx, params, grads)
        if not some and name in ("skip", "finite"):
            continue  # nothing to measure: the norm is 0, and all is finite
        assert_same(moved, params)
        _, kept = run(gate(opaque(), argument), params, grads)
        assert kept.inner["count"] == 0
        own = [key for key in state.slots if key.endswith("acc_grads")]
        for key in state.slots.keys() - set(own):
            assert_same(state.slots[key], first.slots[key])


@FEW
@given(trees, threes, st.sampled_from([1, 2, 4]), st.booleans())
def test_equal_micro_batches_are_one_batch(params, three, k, mean):
    whole = gradients(params)
    parts = [optree.tree_map(lambda g: g if mean else g / k, g) for g in whole for _ in range(k)]
    tx = fo.accumulate(chained(three), k, mean=mean)
    assert_same(run(tx, params, parts)[0], run(chained(three), params, whole)[0])


@FEW
@given(trees, threes, st.integers(1, 5))
def test_micro_batches_are_the_mean_of_their_batch(params, three, k):
    parts, structure = gradients(params, 3 * k), optree.tree_structure(params)
    if k > 2 and structure.num_leaves > 1:  # a leaf without a gradient counts as one of zeros
        for i in range(1, 3 * k, k):
            first, *others = optree.tree_leaves(parts[i])
            parts[i] = structure.unflatten([torch.zeros_like(first), *others])
    whole = [
        optree.tree_map(lambda *g: torch.stack(g).mean(0), *parts[i : i + k])
        for i in range(0, 3 * k, k)
    ]
    if k > 2 and structure.num_leaves > 1:
        for i in range(1, 3 * k, k):
            parts[i] = structure.unflatten([None, *optree.tree_leaves(parts[i])[1:]])
    tx = fo.accumulate(chained(three), k)
    assert_close(run(tx, params, parts)[0], run(chained(three), params, whole)[0], 1e-9)


# ---------------------------------------------------------------- compiled
def is_elementwise(tx):
    p = torch.ones(3, 4)
    return all(x.rule.reduce is None and traits.is_elementwise(x, p) for x in tx.placements)


@pytest.mark.parametrize("seed", range(2))
def test_a_leafwise_chain_is_one_kernel(seed):
    """However many leaves and parts of equal code; one more for a measurement."""
    torch.manual_seed(10 + seed)
    order = [sorted(LINKS)[i] for i in torch.randperm(len(LINKS)).tolist()]
    alone = [x for x in order if x not in ("masked", "conditional") and is_elementwise(LINKS[x]())]
    tx = chained(alone[:3])
    assert isinstance(tx, Leafwise)
    params = {name: torch.randn(shape) for name, shape in zip("abcdef", SHAPES[2:], strict=False)}
    grads, before = gradients(params, 3), kernels.count()
    step, mine, state = fo.compile(tx, strict=True), clone(params), tx.init(params)
    for g in grads:
        mine, state = step(g, state, mine)
    assert kernels.count() <= before + 1
    assert_close((mine, state), run(tx, params, grads), 1e-5)
    parts = fo.partition({"x": tx, "y": tx, "no": fo.freeze()}, {"a": "x", "b": "no", "*": "y"})
    routed, other, state = fo.compile(parts, strict=True), clone(params), parts.init(params)
    for g in grads:
        other, state = routed(g, state, other)
    assert kernels.count() <= before + 1
    assert_same(other["b"], params["b"])
    assert_same({**other, "b": mine["b"]}, mine)
