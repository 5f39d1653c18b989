"""Rules whose slots are not like their parameter, that choose among several updates, or measure."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, run, through_file
from odd_rules import Bytes, Packed, packed, refreshing, shapes, unit_rms
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters


def make_tree(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = {"a": (3, 4), "b": (5, 2)}
    return {k: torch.randn(*s, generator=generator).to(dtype) for k, s in shape.items()}


def purely(tx: Any, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    return run(tx, make_tree(0, dtype), [make_tree(k + 1, dtype) for k in range(steps)])


def make_object(recipe: Any, compile: Any = "strict") -> Any:
    params = {k: torch.nn.Parameter(p) for k, p in make_tree().items()}
    return adapters.Optimizer(params.items(), recipe, compile=compile)


def step_object(opt: Any, k: int) -> None:
    (group,) = opt.param_groups
    for p, g in zip(group["params"], make_tree(k + 1).values(), strict=True):
        p.grad = g
    opt.step()


def params_of(opt: Any) -> list[Tensor]:
    return [p.detach() for p in opt.param_groups[0]["params"]]


# ---------------------------------------------------------------- slots


def around_packed(lr: Any = 0.1, beta: Any = 0.9) -> Any:
    return fo.chain(fo.clip_by_global_norm(1.0), packed(lr, beta), fo.params_ema(0.9))


STORED = {
    "shapes": (shapes, {"exp_avg", "rows", "columns", "largest", "gram"}),
    "packed": (packed, {"exp_avg.codes", "exp_avg.scale", "count"}),
    "around": (around_packed, {"exp_avg.codes", "exp_avg.scale", "count", "params_ema"}),
}
each_stored = pytest.mark.parametrize("name", STORED)


@each_stored
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_keeps_the_form_of_its_slots(name, dtype):
    recipe, keys = STORED[name]
    first = recipe().init(make_tree(0, dtype))
    assert set(first.slots) == keys
    params, state = purely(recipe(), 5, dtype)
    for old, new in zip(optree.tree_leaves(first), optree.tree_leaves(state), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert all(bool(p.isfinite().all()) for p in params.values())


def test_a_codec_costs_the_rounding_of_its_codes_only():
    exact, _ = purely(fo.chain(fo.ema(0.9, debias=False), fo.scale_by_lr(0.1)), 8)
    rounded, state = purely(packed(), 8)
    assert state.slots["exp_avg.codes"]["a"].dtype is torch.uint8
    difference = max(float((exact[k] - rounded[k]).abs().max()) for k in exact)
    assert 0 < difference < 8 * 0.1 * 12 / 127


@each_stored
def test_checkpoints_continue_bitwise(name):
    """Of objects, which keep the slots of the rule; of functions; and copies."""
    recipe, keys = STORED[name]
    opt, other = make_object(recipe), make_object(recipe)
    for k in range(3):
        step_object(opt, k)
    assert all({*opt.state[p]} == keys | {"step"} for p in opt.param_groups[0]["params"])
    for p, q in zip(params_of(other), params_of(opt), strict=True):
        p.copy_(q)
    other.load_state_dict(through_file(opt.state_dict()))
    again = copy.deepcopy(opt)
    for k in range(3, 6):
        for each in (opt, other, again):
            step_object(each, k)
    assert_same(params_of(other), params_of(opt))
    assert_same(params_of(again), params_of(opt))
    assert_same(other.state_dict()["state"], opt.state_dict()["state"])
    tx = pickle.loads(pickle.dumps(recipe())) if name != "around" else recipe()
    params, state = purely(tx, 3)
    kept = through_file(fo.state_dict(state, params))
    assert_same(fo.load_state_dict(tx.init(params), kept, params), state)


@each_stored
def test_a_slot_of_another_shape_is_refused(name):
    opt = make_object(STORED[name][0])
    step_object(opt, 0)
    saved = opt.state_dict()
    key = "rows" if name == "shapes" else "exp_avg.codes"
    saved["state"][0] = {**saved["state"][0], key: torch.zeros(7)}
    with pytest.raises(ValueError, match=key):
        opt.load_state_dict(saved)


@each_stored
def test_ensembles_are_mapped(name):
    start, grads = make_tree(), [make_tree(1), make_tree(2)]

    def two_steps(lr: Any) -> Any:
        params, state = run(STORED[name][0](lr), start, grads)
        return params, state.slots

    lrs = torch.tensor([0.05, 0.2])
    each = optree.tree_map(lambda *x: torch.stack(x), *map(two_steps, lrs))
    assert_close(torch.vmap(two_steps)(lrs), each, 1e-6)


def test_what_slots_cannot_be_is_refused():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u, slots

    with pytest.raises(ValueError, match="codec for exp_av, but its slots are exp_avg"):
        fo.leafwise(lambda p: Packed(p, p), update, storage=fo.Storage(codecs={"exp_av": Bytes()}))
    with pytest.raises(TypeError, match="which a codec stores"):
        fo.slot_dtypes(packed(), **{"exp_avg.scale": torch.float64})


class Columns(NamedTuple):
    columns: Tensor


def summed(u: Tensor, slots: Columns, p: Tensor) -> Any:
    return u, Columns(slots.columns + u.sum(0))


DENSE = {
    "packed does not take sparse gradients": packed(),
    r"not take sparse gradients, .* shape \(3,\)": fo.leafwise(
        lambda p: Columns(p.new_zeros(p.shape[1:])), summed
    ),
    "must see all rows of a tensor": fo.leafwise(
        None, lambda u, slots, p: (u / u.norm(), slots), name="unit"
    ),
}


@pytest.mark.parametrize("words", DENSE)
def test_sparse_gradients_are_refused_before_anything_is_written(words):
    p = torch.nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.eye(2, 3).to_sparse(1)
    tx = DENSE[words]
    opt = adapters.Optimizer([p], lambda: tx, compile=False)
    for step in (opt.step, lambda: tx.update(p.grad, tx.init(p), p)):
        with pytest.raises(RuntimeError, match=words):
            step()
    assert not p.any()


class Halves:
    """A codec that loses something each time that a slot is packed again."""

    fields = ("half",)

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        return (0.5 * x,)

    def decode(self, stored: tuple[Tensor, ...], spec: Any) -> Tensor:
        return stored[0]


def halved() -> Any:
    def init(p: Tensor) -> Packed:
        return Packed(torch.ones_like(p), torch.full_like(p, 2**30 + 1, dtype=torch.int64))

    def update(u: Tensor, slots: Packed, p: Tensor) -> Any:
        return u, Packed(slots.exp_avg + u, slots.count)

    return fo.leafwise(init, update, storage=fo.Storage(codecs={"exp_avg": Halves()}))


@pytest.mark.parametrize("compile", ["strict", False])
def test_slots_behind_a_shut_gate_stay_as_they_are_stored(compile):
    tx = fo.accumulate(halved(), every=3)
    p, w = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    opt = adapters.Optimizer([p], lambda: tx, compile=compile)
    step, state = fo.compile(tx), tx.init(w)
    for _ in range(2):
        p.grad = torch.ones(2)
        opt.step()
        w, state = step(torch.ones(2), state, w)
    for found in (opt.state[p], state.slots):
        assert_same(found["exp_avg.half"], torch.full((2,), 0.5))
        assert_same(found["count"], torch.full((2,), 2**30 + 1))


def test_a_rule_with_a_codec_is_built_and_run_in_one_graph(fresh_dynamo):
    p = torch.ones(2)

    def one_step(g: Tensor) -> Any:
        tx = halved()
        return tx.update(g, tx.init(p), p)[1].slots["exp_avg.half"]

    traced = torch.compile(one_step, fullgraph=True, backend="eager")
    assert_same(traced(p), torch.full((2,), 0.75))


# ---------------------------------------------------------------- variants


def by_hand(steps: int) -> dict[str, Tensor]:
    params = make_tree()
    basis = {k: torch.eye(p.shape[0]) for k, p in params.items()}
    for k in range(steps):
        grads = make_tree(k + 1)
        if (k + 1) % 3 == 1:
            for name, g in grads.items():
                basis[name], _ = torch.linalg.qr(g @ g.mT + torch.eye(len(g)))
        params = {n: p - 0.1 * basis[n] @ grads[n] for n, p in params.items()}
    return params


@pytest.mark.parametrize("way", ["update", "object", "traced"])
def test_the_chosen_variant_is_run_and_no_other(way, monkeypatch):
    """Where the step is known; a traced step stands behind a condition."""
    calls, real = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: calls.append(len(x)) or real(x))
    tx = refreshing()
    params = make_tree()
    if way == "object":
        opt = make_object(refreshing, compile=False)
        for k in range(7):
            step_object(opt, k)
        params = dict(zip(params, params_of(opt), strict=True))
        seen = opt.state[opt.param_groups[0]["params"][0]]["seen"]
    elif way == "update":
        params, state = purely(tx, 7)
        seen = state.slots["seen"]["a"]
    else:
        step = torch.compile(tx.update, backend="eager", fullgraph=True)
        state = tx.init(params)
        for k in range(7):
            updates, state = step(make_tree(k + 1), state, params)
            params = fo.apply_updates(params, updates)
        seen = state.slots["seen"]["a"]
    if way != "traced":  # other calls are of small tensors, on which rules are recorded
        assert calls.count(3) == calls.count(5) == 3
    assert_close(params, by_hand(7), 1e-6)
    assert seen == 3


def test_ensembles_at_different_steps_choose_each_for_itself():
    tx, params = refreshing(), make_tree()
    early, late = tx.init(params), tx.init(params)
    late = late._replace(step=late.step + 1)
    both = optree.tree_map(lambda *x: torch.stack(x), early, late)
    grads = make_tree(1)
    _, together = torch.vmap(lambda state: tx.update(grads, state, params))(both)
    assert together.slots["seen"]["a"].tolist() == [1, 0]


def test_variants_behind_a_gate_count_open_steps_only():
    params, state = purely(fo.accumulate(refreshing(), 2), 8)
    assert state.slots["seen"]["a"] == 2  # the first and the fourth of four full batches
    opt = make_object(lambda: fo.accumulate(refreshing(), 2))
    for k in range(8):
        step_object(opt, k)
    assert_close(params_of(opt), list(params.values()), 1e-5)


def test_wrong_variants_are_refused():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u, slots

    with pytest.raises(ValueError, match="2 variants of update and no choose"):
        fo.leafwise(None, (update, update))
    with pytest.raises(ValueError, match="1 variants of update and choose"):
        fo.leafwise(None, update, runs=fo.Runs(choose=lambda t: 0))
    w = torch.ones(2)
    for wrong in (2, -1, -2, 0.5, float("nan"), None, torch.tensor(-1)):
        tx = fo.leafwise(None, (update, update), runs=fo.Runs(choose=lambda t, wrong=wrong: wrong))
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match="; return a whole number from 0 to 1"):
                step(w, tx.init(w), w)


# ---------------------------------------------------------------- numbers with names


def test_numbers_come_as_a_named_tuple_or_one_by_one():
    class Named(NamedTuple):
        lr: Any
        twice: Any

    def named(t: Any, *, lr: Any, betas: Any) -> Named:
        return Named(lr, 2 * betas[1])

    def with_names(u: Tensor, slots: Any, p: Tensor, s: Named) -> Any:
        return -s.lr * s.twice * u, slots

    def one_by_one(u: Tensor, slots: Any, p: Tensor, lr: Any, twice: Any) -> Any:
        return -lr * twice * u, slots

    hyper = {"lr": lambda count: 0.1 + count, "betas": (0.5, 0.25)}
    w = torch.ones(3)
    for scalars, update in (
        (named, with_names),
        (lambda t, *, lr, betas: tuple(named(t, lr=lr, betas=betas)), one_by_one),
    ):
        tx = fo.leafwise(None, update, scalars, hyper=hyper)
        state = tx.init(w)
        assert fo.get(state, "betas.1") == 0.25
        assert_close(tx.update(w, state, w)[0], torch.full((3,), -0.05), 1e-6)
        params, _ = fo.compile(tx, strict=True)(w, state, clone(w))
        assert_close(params, w - 0.05, 1e-6)


def test_a_rule_that_returns_no_tuple_and_renamed_arguments_are_refused():
    w = torch.ones(3)
    tx = fo.leafwise(None, lambda u, slots, p, a: (a * u, slots), lambda t: 0.1, name="half")
    with pytest.raises(TypeError, match="scalars of the rule 'half' must return a tuple"):
        tx.update(w, tx.init(w), w)
    with pytest.raises(TypeError, match="argument flat for the rule ''; leave it out"):
        fo.leafwise(None, lambda u, slots, p: (u, slots), flat=False)
    with pytest.raises(TypeError, match=r"argument elementwis .*check the spelling"):
        fo.leafwise(None, lambda u, slots, p: (u, slots), elementwis=False)


# ---------------------------------------------------------------- measurements


@pytest.mark.parametrize("way", ["update", "compiled"])
def test_a_tensor_is_measured_as_a_whole_and_alone(way):
    """Large tensors by several threads, small ones in one call, complex ones as pairs."""
    tx = unit_rms()
    grads = {
        "large": torch.full((300, 301), 7.0),
        "small": torch.tensor([3.0, 0.0, 0.0]),
        "complex": torch.full((5,), 3 + 4j, dtype=torch.complex64),
    }
    params = fo.tree.map(torch.zeros_like, grads)
    if way == "compiled":
        params, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
    else:
        params, _ = tx.update(grads, tx.init(params), params)
    assert_close(params["large"], torch.full((300, 301), 1.0), 1e-5)
    assert_close(params["small"], torch.tensor([3.0**0.5, 0.0, 0.0]), 1e-5)
    assert_close(params["complex"], grads["complex"] / 12.5**0.5, 1e-5)


def test_ensembles_and_traces_measure_each_member():
    params, grads = torch.zeros(3, 4), torch.arange(12.0).reshape(3, 4)

    def one(scale: Any) -> Any:
        tx = fo.accumulate(fo.chain(fo.trace(0.9), unit_rms(scale)), 1)
        return tx.update(grads, tx.init(params), params)[0]

    scales = torch.tensor([0.1, 0.2])
    assert_close(torch.vmap(one)(scales), torch.stack([*map(one, scales)]), 1e-6)
    traced = torch.compile(one, backend="eager", fullgraph=True)
    assert_same(traced(scales[1]), one(scales[1]))


def test_gradients_go_through_a_measurement():
    def loss(scale: Tensor, g: Tensor) -> Tensor:
        tx = unit_rms(scale)
        return tx.update(g, tx.init(g), g)[0].square().sum()

    scale, g = torch.tensor(0.5, dtype=torch.float64), torch.linspace(0.1, 2, 105).double()
    slope, through = torch.func.grad(loss, argnums=(0, 1))(scale, g)
    assert_close(slope, torch.tensor(105.0, dtype=torch.float64), 1e-8)
    assert_close(through, torch.zeros_like(g), 1e-8)


def rescaled(u: Tensor, slots: Any, p: Tensor, x: Any) -> Any:
    return -u / x, slots


def test_a_measurement_that_is_no_single_number_is_refused():
    """A kernel would write all of its elements to where there is memory for one."""
    p = torch.ones(3)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = p
    for wrong in (lambda u, slots, p: (u * u,), lambda u, slots, p: (u * u).sum()):
        tx = fo.leafwise(None, rescaled, reduce=wrong)
        opt = adapters.Optimizer([parameter], lambda tx=tx: tx)
        trees = (p, tx.init(p), p)
        for step, *given in ((tx.update, *trees), (fo.compile(tx), *trees), (opt.step,)):
            with pytest.raises(TypeError, match=r"reduce of a rule returned .* of 0-dim tensors"):
                step(*given)
    assert_same(parameter.detach(), p)


def test_what_is_no_sum_over_elements_is_measured_on_whole_tensors():
    tx = fo.leafwise(None, rescaled, reduce=lambda u, slots, p: (u.abs().max(),))
    params, grads = torch.zeros(9000), torch.full((9000,), 4.0)
    params, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
    assert_close(params, torch.full((9000,), -1.0), 1e-6)
