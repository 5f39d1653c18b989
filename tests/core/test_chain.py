"""Putting transformations together: chains, names, and the tree helpers, over random trees."""

from __future__ import annotations

import optree
import torch
from helpers import assert_close, assert_same, run
from hypothesis import given
from hypothesis import strategies as st

import functional_optim as fo

SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (0,), (2, 0), (2, 1, 3)])
TREES = st.recursive(
    SHAPES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)
"""Trees whose leaves are shapes."""


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def fill(shapes, seed):
    torch.manual_seed(seed)
    return optree.tree_map(
        lambda shape: torch.randn(shape, dtype=torch.float64), shapes, is_leaf=is_shape
    )


def opaque():
    """A transformation of whole trees, with a state: the number of its steps, which it adds."""

    def update(grads, state, params=None):
        return fo.tree.map(lambda g: g + state["count"], grads), {"count": state["count"] + 1}

    return fo.GradientTransformation(lambda params: {"count": torch.zeros(())}, update)


LINKS = {
    "scale": lambda: fo.scale(-0.5),
    "decay": lambda: fo.add_decayed_weights(0.1),
    "clip": lambda: fo.clip_by_global_norm(0.7),
    "bound": lambda: fo.clip_by_value(0.3),
    "trace": lambda: fo.trace(0.9, 0.2),
    "adam": lambda: fo.scale_by_adam(),
    "schedule": lambda: fo.scale_by_schedule(lambda count: 1 / (1 + count)),
    "cautious": lambda: fo.cautious(fo.trace(0.9)),
    "center": lambda: fo.centralize(),
    "watch": lambda: fo.monitor({"norm": fo.measures.global_norm}),
    "nothing": lambda: fo.identity(),
    "whole": opaque,
}
CHAINS = st.lists(st.sampled_from(sorted(LINKS)), max_size=5)
FULL_CHAINS = st.lists(st.sampled_from(sorted(LINKS.keys() - {"nothing"})), max_size=5)


def build(names):
    """Links of these names, each named by its position, so that no slots clash."""
    return [fo.named_chain((f"n{i}", LINKS[name]())) for i, name in enumerate(names)]


def by_hand(links, params, grads):
    states = [tx.init(params) for tx in links]
    for updates in grads:
        for i, tx in enumerate(links):
            updates, states[i] = tx.update(updates, states[i], params)
        params = fo.apply_updates(params, updates)
    return params


@given(TREES, CHAINS)
def test_a_chain_is_its_links_one_after_the_other(shapes, names):
    params, grads = fill(shapes, 0), [fill(shapes, i) for i in (1, 2, 3)]
    links = build(names)
    got, _ = run(fo.chain(*links), params, grads)
    assert_close(got, by_hand(links, params, grads), 1e-12)


@given(TREES, CHAINS, st.data())
def test_nested_chains_are_flat(shapes, names, data):
    params, grads = fill(shapes, 0), [fill(shapes, i) for i in (1, 2)]
    links = build(names)
    cut = data.draw(st.integers(0, len(links)))
    nested = fo.chain(fo.chain(*links[:cut]), fo.chain(fo.chain(), fo.chain(*links[cut:])))
    flat = fo.chain(*links)
    assert optree.tree_structure(nested.init(params)) == optree.tree_structure(flat.init(params))
    assert_same(run(nested, params, grads), run(flat, params, grads))


@given(TREES, FULL_CHAINS)
def test_the_state_of_a_chain_has_a_part_for_each_run_of_rules(shapes, names):
    """Neighbouring one-tensor rules share a `State`; what is no rule stands between them."""
    params = fill(shapes, 0)
    state = fo.chain(*build(names)).init(params)
    runs = "".join("w" if name == "whole" else "l" for name in names)
    while "ll" in runs:
        runs = runs.replace("ll", "l")
    if len(runs) < 2:
        assert isinstance(state, dict if runs == "w" else fo.State)
    else:
        assert [isinstance(part, dict) for part in state] == [kind == "w" for kind in runs]


@given(TREES)
def test_every_slot_is_a_tree_like_the_parameters(shapes):
    params = fill(shapes, 0)
    state = fo.chain(fo.adam(amsgrad=True), fo.params_ema(0.9)).init(params)
    assert set(state.slots) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "params_ema"}
    for slot in state.slots.values():
        assert optree.tree_structure(slot) == optree.tree_structure(params)
        assert [x.shape for x in fo.tree.leaves(slot)] == [x.shape for x in fo.tree.leaves(params)]
    assert (state.step.dtype, state.step.shape) == (torch.int64, ())


# ---------------------------------------------------------------- names


def keys(tx):
    return sorted(tx.init(torch.ones(2)).slots)


def test_named_chain_names_only_slots_that_clash():
    tx = fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.trace(0.9)), ("last", fo.adam()))
    assert keys(tx) == ["exp_avg", "exp_avg_sq", "fast.momentum_buffer", "slow.momentum_buffer"]
    assert keys(fo.named_chain(("fast", fo.trace(0.5)), ("down", fo.scale(-1)))) == [
        "momentum_buffer"
    ]


def test_named_chain_names_the_links_inside_a_chain():
    tx = fo.named_chain(("a", fo.adamw()), ("b", fo.adam()))
    assert keys(tx) == [
        f"{name}.scale_by_adam.{slot}" for name in "ab" for slot in ("exp_avg", "exp_avg_sq")
    ]


def test_names_do_not_change_the_steps():
    p, grads = torch.randn(3), [torch.randn(3), torch.randn(3)]
    named = fo.named_chain(("m", fo.trace(0.9)), ("down", fo.sgd(0.1)), ("ema", fo.params_ema(0.5)))
    plain = fo.chain(fo.trace(0.9), fo.sgd(0.1), fo.params_ema(0.5))
    assert_same(run(named, p, grads), run(plain, p, grads))


def test_an_identity_is_no_link():
    for tx in (fo.chain(), fo.identity(), fo.scale(1), fo.add_decayed_weights(0.0)):
        assert tx.placements == ()
    assert fo.scale(torch.tensor(1.0)).placements != ()  # its value may change
    updates, state = fo.chain().update(torch.ones(2), fo.chain().init(torch.ones(2)), torch.ones(2))
    assert torch.equal(updates, torch.ones(2))
    assert state.step == 1


def test_a_chain_of_rules_says_what_it_is():
    assert repr(fo.adamw()) == "chain(scale_by_adam, add_decayed_weights, scale_by_lr)"


# ---------------------------------------------------------------- tree helpers


@given(TREES)
def test_map_and_leaves_and_rows_agree(shapes):
    a, b = fill(shapes, 0), fill(shapes, 1)
    summed = fo.tree.map(torch.add, a, b)
    assert optree.tree_structure(summed) == optree.tree_structure(a)
    by_rows = [x + y for x, y in fo.tree.rows(a, b)]
    assert_same(fo.tree.leaves(summed), by_rows)


@given(TREES)
def test_map_unzip_is_map_n_times(shapes):
    a = fill(shapes, 0)
    first, second = fo.tree.map_unzip(2, lambda x: (x + 1, None if x.dim() else x), a)
    assert_same(first, fo.tree.map(lambda x: x + 1, a))
    assert [x is None for x in fo.tree.rows(a, second)] == [False] * len(fo.tree.leaves(a))
    assert fo.tree.map_unzip(0, lambda x: (), a) == []


@given(TREES)
def test_items_are_the_leaves_with_different_paths(shapes):
    a = fill(shapes, 0)
    items = list(fo.tree.items(a))
    assert [leaf for _, leaf in items] == fo.tree.leaves(a)
    assert len({path for path, _ in items}) == len(items)


@given(TREES)
def test_the_global_norm_is_that_of_all_entries(shapes):
    a = fill(shapes, 0)
    flat = torch.cat([x.reshape(-1) for x in fo.tree.leaves(a)])
    assert_close(fo.tree.global_norm(a), flat.norm(), 1e-12)


def test_the_global_norm_of_complex_numbers_and_of_nothing():
    assert fo.tree.global_norm([torch.tensor([3 + 4j]), torch.tensor([12.0])]) == 13
    assert fo.tree.global_norm({}) == 0


def test_none_is_an_empty_subtree():
    assert fo.tree.leaves({"a": None, "b": [1, None]}) == [1]
    assert dict(fo.tree.items({"a": None, "b": [1, (2,)]})) == {"b.0": 1, "b.1.0": 2}
