"""Rules whose slots are not like their parameter, and rules that choose among several updates."""

from __future__ import annotations

import copy
import io
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, through_file
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.storage import SlotSpec


class ShapeSlots(NamedTuple):
    exp_avg: Tensor
    """Like p."""
    rows: Tensor
    """A number for each row."""
    columns: Tensor
    """A number for each column."""
    largest: Tensor
    """One number."""
    gram: Tensor
    """A square matrix of the rows, in float64."""


class ShapeScalars(NamedTuple):
    lr: Any
    share: Any


@fo.factory
def shapes(lr: Any = 0.1, beta: Any = 0.9) -> Any:
    """A rule for matrices whose slots have five shapes and two dtypes."""

    def init(p: Tensor) -> ShapeSlots:
        m, n = p.shape
        gram = torch.zeros(m, m, dtype=torch.float64, device=p.device)
        return ShapeSlots(
            torch.zeros_like(p), p.new_zeros(m), p.new_zeros(n), p.new_zeros(()), gram
        )

    def scalars(t: Any, *, lr: Any, beta: Any) -> ShapeScalars:
        return ShapeScalars(lr, 1 - beta)

    def update(u: Tensor, slots: ShapeSlots, p: Tensor, s: ShapeScalars) -> Any:
        m = slots.exp_avg.lerp(u, s.share)
        rows = slots.rows.lerp((u * u).mean(1), s.share)
        columns = slots.columns.lerp((u * u).mean(0), s.share)
        largest = torch.maximum(slots.largest, u.abs().amax())
        gram = slots.gram.lerp(u @ u.mT, s.share)
        scale = rows[:, None].sqrt() + columns.sqrt() + largest + gram.diagonal()[:, None].sqrt()
        return -s.lr * m / (scale + 1e-3), ShapeSlots(m, rows, columns, largest, gram)

    hyper = {"lr": lr, "beta": beta}
    return fo.leafwise(init, update, scalars, hyper=hyper, name="shapes")


class Bytes:
    """A codec for the tests: 8-bit codes of a whole tensor, and one scale."""

    fields = ("codes", "scale")

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        scale = x.abs().amax().clamp(min=1e-12) / 127
        return ((x / scale).round() + 128).to(torch.uint8), scale

    def decode(self, stored: tuple[Tensor, ...], spec: SlotSpec) -> Tensor:
        codes, scale = stored
        assert codes.shape == spec.shape
        return (codes.to(spec.dtype) - 128) * scale.to(spec.dtype)

    def __eq__(self, other: object) -> bool:
        return type(other) is Bytes

    def __hash__(self) -> int:
        return hash(Bytes)


class PackedSlots(NamedTuple):
    exp_avg: Tensor
    count: Tensor


@fo.factory
def packed(lr: Any = 0.1, beta: Any = 0.9) -> Any:
    """Momentum that is stored in 8 bits, and a count in an integer."""

    def init(p: Tensor) -> PackedSlots:
        return PackedSlots(torch.zeros_like(p), p.new_zeros((), dtype=torch.int32))

    def scalars(t: Any, *, lr: Any, beta: Any) -> tuple[Any, Any]:
        return lr, 1 - beta

    def update(u: Tensor, slots: PackedSlots, p: Tensor, lr: Any, a: Any) -> Any:
        m = slots.exp_avg.lerp(u, a)
        return -lr * m, PackedSlots(m, slots.count + 1)

    return fo.leafwise(
        init,
        update,
        scalars,
        hyper={"lr": lr, "beta": beta},
        storage=fo.Storage(codecs={"exp_avg": Bytes()}),
        name="packed",
    )


def make_tree(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = {"a": (3, 4), "b": (5, 2)}
    return {k: torch.randn(*s, generator=generator).to(dtype) for k, s in shape.items()}


STORED = {
    "shapes": (shapes, {"exp_avg", "rows", "columns", "largest", "gram"}),
    "packed": (packed, {"exp_avg.codes", "exp_avg.scale", "count"}),
    "packed, clipped, averaged": (
        lambda lr=0.1, beta=0.9: fo.chain(
            fo.clip_by_global_norm(1.0), packed(lr, beta), fo.params_ema(0.9)
        ),
        {"exp_avg.codes", "exp_avg.scale", "count", "params_ema"},
    ),
}
each_stored = pytest.mark.parametrize("name", STORED)


def purely(tx: Any, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    params = make_tree(dtype)
    state = tx.init(params)
    for k in range(steps):
        updates, state = tx.update(make_tree(dtype, k + 1), state, params)
        params = fo.apply_updates(params, updates)
    return params, state


@each_stored
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_keeps_the_form_of_its_slots(name, dtype):
    recipe, keys = STORED[name]
    tx = recipe()
    first = tx.init(make_tree(dtype))
    assert set(first.slots) == keys
    params, state = purely(tx, 5, dtype)
    for old, new in zip(optree.tree_leaves(first), optree.tree_leaves(state), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert all(bool(p.isfinite().all()) for p in params.values())


def test_a_codec_costs_the_rounding_of_its_codes_only():
    exact, _ = purely(fo.chain(fo.ema(0.9, debias=False), fo.scale_by_lr(0.1)), 8)
    rounded, state = purely(packed(), 8)
    assert state.slots["exp_avg.codes"]["a"].dtype is torch.uint8
    difference = max(float((exact[k] - rounded[k]).abs().max()) for k in exact)
    assert 0 < difference < 8 * 0.1 * 2 / 127


def make_object(name: str, compile: Any = "strict", **numbers: Any) -> Any:
    params = {k: torch.nn.Parameter(p) for k, p in make_tree().items()}
    return adapters.Optimizer(params.items(), STORED[name][0], compile=compile, **numbers)


def step_object(opt: Any, k: int) -> None:
    for group in opt.param_groups:
        grads = make_tree(seed=k + 1)
        for p, g in zip(group["params"], grads.values(), strict=True):
            p.grad = g
    opt.step()


def params_of(opt: Any) -> list[Tensor]:
    return [p.detach() for p in opt.param_groups[0]["params"]]


@each_stored
def test_objects_keep_the_slots_of_the_rule(name):
    opt = make_object(name)
    step_object(opt, 0)
    for p in opt.param_groups[0]["params"]:
        assert {*opt.state[p]} == STORED[name][1] | {"step"}


@each_stored
def test_checkpoints_of_objects_continue_bitwise(name):
    opt = make_object(name)
    for k in range(3):
        step_object(opt, k)
    saved = through_file(opt.state_dict())
    other = make_object(name)
    for p, q in zip(params_of(other), params_of(opt), strict=True):
        p.copy_(q)
    other.load_state_dict(saved)
    again = copy.deepcopy(opt)
    assert_same(other.state_dict()["state"], opt.state_dict()["state"])
    for k in range(3, 6):
        for each in (opt, other, again):
            step_object(each, k)
    assert_same(params_of(other), params_of(opt))
    assert_same(params_of(again), params_of(opt))


@each_stored
def test_a_slot_of_another_shape_is_refused(name):
    opt = make_object(name)
    step_object(opt, 0)
    saved = opt.state_dict()
    key = "rows" if name == "shapes" else "exp_avg.codes"
    saved["state"][0] = {**saved["state"][0], key: torch.zeros(7)}
    with pytest.raises(ValueError, match=key):
        opt.load_state_dict(saved)


@each_stored
def test_checkpoints_of_functions_continue_bitwise(name):
    tx = STORED[name][0]()
    params, state = purely(tx, 3)
    kept = through_file(fo.state_dict(state, params))
    again = fo.load_state_dict(tx.init(params), kept, params)
    assert_same(again, state)
    assert_same(*[tx.update(make_tree(seed=9), x, params) for x in (again, state)])


@each_stored
def test_ensembles_are_mapped(name):
    recipe = STORED[name][0]
    lrs = torch.tensor([0.05, 0.2])
    params, grads = make_tree(), make_tree(seed=1)

    def two_steps(lr: Any) -> Any:
        tx = recipe(lr)
        state = tx.init(params)
        now = params
        for _ in range(2):
            updates, state = tx.update(grads, state, now)
            now = fo.apply_updates(now, updates)
        return now, state.slots

    together = torch.vmap(two_steps)(lrs)
    each = [two_steps(lr) for lr in lrs]
    assert_close(together, optree.tree_map(lambda *x: torch.stack(x), *each), 1e-6)


def test_recipes_with_codecs_are_copied_and_pickled():
    tx = packed(0.2)
    file = io.BytesIO()
    torch.save(tx, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_same(purely(copy.deepcopy(tx), 2), purely(tx, 2))
    assert_same(purely(again, 2), purely(tx, 2))


def test_a_codec_for_no_slot_and_a_packed_slot_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="codec for exp_av, but its slots are exp_avg"):
        fo.leafwise(
            lambda p: PackedSlots(p, p),
            lambda u, slots, p: (u, slots),
            storage=fo.Storage(codecs={"exp_av": Bytes()}),
        )
    with pytest.raises(TypeError, match="which a codec stores"):
        fo.slot_dtypes(packed(), **{"exp_avg.scale": torch.float64})
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="packed does not take sparse gradients"):
        packed().update(sparse, packed().init(torch.eye(3)), torch.eye(3))


# ---------------------------------------------------------------- variants


class RefreshSlots(NamedTuple):
    basis: Tensor
    seen: Tensor


@fo.factory
def refreshing(every: int = 3, lr: Any = 0.1) -> Any:
    """Steps along a basis that is renewed in some steps, by an expensive operation."""

    def init(p: Tensor) -> RefreshSlots:
        return RefreshSlots(torch.eye(p.shape[0], dtype=p.dtype), p.new_zeros(()))

    def cheap(u: Tensor, slots: RefreshSlots, p: Tensor, lr: Any) -> Any:
        return -lr * slots.basis @ u, slots

    def dear(u: Tensor, slots: RefreshSlots, p: Tensor, lr: Any) -> Any:
        basis, _ = torch.linalg.qr(u @ u.mT + torch.eye(len(u), dtype=u.dtype))
        return -lr * basis @ u, RefreshSlots(basis, slots.seen + 1)

    return fo.leafwise(
        init,
        (cheap, dear),
        lambda t, *, lr: (lr,),
        hyper={"lr": lr},
        runs=fo.Runs(choose=lambda t: t % every == 1),
        name="refreshing",
    )


def by_hand(every: int, steps: int) -> tuple[dict[str, Tensor], int]:
    params = make_tree()
    basis = {k: torch.eye(p.shape[0]) for k, p in params.items()}
    seen = 0
    for k in range(steps):
        grads = make_tree(seed=k + 1)
        if (k + 1) % every == 1:
            seen += 1
            for name, g in grads.items():
                basis[name], _ = torch.linalg.qr(g @ g.mT + torch.eye(len(g)))
        params = {n: p - 0.1 * basis[n] @ grads[n] for n, p in params.items()}
    return params, seen


def test_the_update_runs_the_chosen_variant():
    params, state = purely(refreshing(), 7)
    expected, seen = by_hand(3, 7)
    assert_close(params, expected, 1e-6)
    assert state.slots["seen"]["a"] == seen == 3


def test_only_the_chosen_variant_is_run_where_the_step_is_known(monkeypatch):
    calls = []
    real = torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: calls.append(len(x)) or real(x))
    purely(refreshing(), 7)
    assert (
        calls.count(3) == calls.count(5) == 3
    )  # others are small ones, on which rules are recorded
    calls.clear()
    opt = adapters.Optimizer(
        [torch.nn.Parameter(p) for p in make_tree().values()], refreshing, compile=False
    )
    for k in range(7):
        step_object(opt, k)
    assert calls.count(3) == calls.count(5) == 3


def test_a_traced_step_stands_behind_a_condition():
    tx = refreshing()
    params = make_tree()

    @torch.compile(backend="eager", fullgraph=True)
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    state = tx.init(params)
    for k in range(7):
        params, state = step(make_tree(seed=k + 1), state, params)
    expected, seen = by_hand(3, 7)
    assert_close(params, expected, 1e-6)
    assert state.slots["seen"]["b"] == seen


def test_ensembles_at_different_steps_choose_each_for_itself():
    tx, params = refreshing(), make_tree()
    early, late = tx.init(params), tx.init(params)
    late = late._replace(step=late.step + 1)
    both = optree.tree_map(lambda *x: torch.stack(x), early, late)
    grads = make_tree(seed=1)
    _, together = torch.vmap(lambda state: tx.update(grads, state, params))(both)
    assert together.slots["seen"]["a"].tolist() == [1, 0]


def test_variants_behind_a_gate_count_open_steps_only():
    tx = fo.accumulate(refreshing(), 2)
    params = make_tree()
    state = tx.init(params)
    for k in range(8):
        updates, state = tx.update(make_tree(seed=k + 1), state, params)
        params = fo.apply_updates(params, updates)
    assert state.slots["seen"]["a"] == 2  # the first and the fourth of four full batches
    opt = adapters.Optimizer(
        [torch.nn.Parameter(p) for p in make_tree().values()],
        lambda: fo.accumulate(refreshing(), 2),
        compile="strict",
    )
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
    results = []
    for scalars, update in (
        (named, with_names),
        (lambda t, *, lr, betas: tuple(named(t, lr=lr, betas=betas)), one_by_one),
    ):
        tx = fo.leafwise(None, update, scalars, hyper=hyper)
        state = tx.init(w)
        assert fo.get(state, "betas.1") == 0.25
        results.append(tx.update(w, state, w))
        step = fo.compile(tx, strict=True)
        params, own = clone(w), tx.init(w)
        params, own = step(w, own, params)
        assert_close(params, w + results[-1][0], 1e-6)
    assert_same(*results)
    assert_close(results[0][0], torch.full((3,), -0.05), 1e-6)


def test_a_rule_that_returns_no_tuple_and_renamed_arguments_are_refused():
    w = torch.ones(3)
    tx = fo.leafwise(None, lambda u, slots, p, a: (a * u, slots), lambda t: 0.1, name="half")
    with pytest.raises(TypeError, match="scalars of the rule 'half' must return a tuple"):
        tx.update(w, tx.init(w), w)
    with pytest.raises(TypeError, match="argument flat for the rule ''; leave it out"):
        fo.leafwise(None, lambda u, slots, p: (u, slots), flat=False)
    with pytest.raises(TypeError, match=r"argument elementwis .*check the spelling"):
        fo.leafwise(None, lambda u, slots, p: (u, slots), elementwis=False)
