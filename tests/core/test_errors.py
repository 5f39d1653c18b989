"""Bad input: an error where it happens, naming both sides and what to do."""

from __future__ import annotations

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters, schedules

W = {"w": torch.ones(2)}


def opaque(update=lambda grads, state, params=None: (grads, state)):
    """A transformation of whole trees."""
    return fo.GradientTransformation(lambda params: fo.EmptyState(), update)


def times_factor():
    """One that multiplies by an extra argument."""

    def update(grads, state, params=None, *, factor=1.0):
        return fo.tree.map(lambda g: factor * g, grads), state

    return opaque(update)


def times_gain():
    """A one-tensor rule that multiplies by an extra argument."""

    def scalars(t, *, gain=1.0):
        return (gain,)

    return fo.leafwise(None, lambda u, slots, p, c: (c * u, slots), scalars, name="times_gain")


# ---------------------------------------------------------------- trees that do not fit


@pytest.mark.parametrize("tx", [fo.adamw(), fo.chain(fo.clip_by_global_norm(1.0), fo.sgd())])
@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"v": torch.ones(2)}, r"params and grads have different structures:\s+params: .*w \(2,\)"),
        ({"v": torch.ones(2)}, r"grads: .*v \(2,\)\s+Pass one gradient \(or None\) per parameter"),
        ([torch.ones(2)], "params and grads have different structures"),
        ({"w": torch.ones(3)}, r"differ at 'w': \(2,\) against \(3,\)"),
        ({"w": torch.ones(1, 2)}, r"differ at 'w': \(2,\) against \(1, 2\)"),
        ({"w": 1.0}, r"differ at 'w': \(2,\) against float"),
        ({**W, "v": torch.ones(2)}, "different structures"),
        (None, "grads: no leaves"),
    ],
)
def test_gradients_of_another_tree(tx, grads, words):
    with pytest.raises(ValueError, match=words):
        tx.update(grads, tx.init(W), W)


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ({"v": torch.ones(2)}, "params and updates have different structures"),
        ({"w": torch.ones(3)}, r"params and updates differ at 'w': \(2,\) against \(3,\)"),
    ],
)
def test_updates_of_another_tree(updates, words):
    with pytest.raises(ValueError, match=words):
        fo.apply_updates(W, updates)


def test_an_error_names_few_of_many_leaves():
    many = {f"k{i}": torch.ones(1) for i in range(40)}
    with pytest.raises(ValueError, match=r"40 leaves: .* 34 more") as info:
        fo.apply_updates(many, {})
    assert len(str(info.value)) < 500


@pytest.mark.parametrize("other", [{"v": torch.ones(2)}, {"w": torch.ones(3)}, torch.ones(2)])
def test_a_state_of_another_model(other):
    tx = fo.adamw()
    with pytest.raises(ValueError, match=r"state .* own init"):
        tx.update(W, tx.init(other), W)


OF_SHAPES = {
    "adafactor": lambda: fo.adafactor(0.1),
    "came": lambda: fo.came(0.1),
    "adam_mini": lambda: fo.adam_mini(0.1),
    "dion2": lambda: fo.dion2(0.1),
    "shampoo": lambda: fo.shampoo(0.1),
    "galore": lambda: fo.galore(0.1, rank=2),
}


@pytest.mark.parametrize("way", ["pure", "compiled"])
@pytest.mark.parametrize("name", OF_SHAPES)
def test_a_state_of_a_smaller_matrix_is_not_spread_over_a_larger_one(name, way):
    tx, first = OF_SHAPES[name](), torch.ones(3, 5)
    params = {"first": first.clone(), "second": torch.ones(4, 6)}
    grads = {"first": torch.eye(3, 5), "second": torch.eye(4, 6)}
    state = tx.init({"first": first, "second": torch.ones(1, 6)})
    step = tx.update if way == "pure" else fo.compile(tx)
    with pytest.raises(ValueError, match="own init returned"):
        step(grads, state, params)
    assert torch.equal(params["first"], first)


MATRIX_RULES = {
    **OF_SHAPES,
    "soap": lambda: fo.soap(0.1),
    "kl_soap": lambda: fo.kl_soap(0.1),
    "kl_shampoo": lambda: fo.kl_shampoo(0.1),
    "apollo": lambda: fo.apollo(0.1, rank=2),
    "psgd_kron": lambda: fo.psgd_kron(0.1),
    "sm3": lambda: fo.sm3(0.1),
    "normuon": lambda: fo.normuon(0.1),
}


@pytest.mark.parametrize("way", ["pure", "compiled", "object", "eager object"])
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_a_state_of_another_matrix_is_named(name, way):
    make, w = MATRIX_RULES[name], torch.ones(4, 6)
    state = make().init({"w": torch.ones(3, 5)})
    p = torch.nn.Parameter(w)
    p.grad = torch.eye(4, 6)

    def step() -> None:
        if way == "pure":
            make().update({"w": p.grad}, state, {"w": w})
        elif way == "compiled":
            fo.compile(make())({"w": p.grad}, state, {"w": w})
        else:
            opt = adapters.Optimizer([("w", p)], make, compile=way == "object")
            slots = {key: x["w"] for key, x in state.slots.items() if x["w"] is not None}
            opt.state[p].update({"step": torch.tensor(1.0), **state.carry, **slots})
            opt.step()

    with pytest.raises(ValueError, match=r"the slot '.* (own init|is a plain tensor of) "):
        step()
    assert torch.equal(w, torch.ones(4, 6))


@pytest.mark.parametrize(
    ("grads", "params"),
    [
        ({"w": torch.ones(2, dtype=torch.complex64)}, W),
        (W, {"w": torch.ones(2, dtype=torch.complex64)}),
    ],
    ids=["complex-gradient", "complex-parameter"],
)
def test_a_complex_and_a_real_tensor_do_not_mix(grads, params):
    tx = fo.adamw()
    with pytest.raises((TypeError, ValueError), match="complex"):
        tx.update(grads, tx.init(params), params)


def test_the_parameters_are_needed():
    tx = fo.adamw()
    with pytest.raises(ValueError, match="needs the parameters: call update"):
        tx.update(W, tx.init(W))


# ---------------------------------------------------------------- states of other chains


@pytest.mark.parametrize(
    ("mine", "other", "kind", "words"),
    [
        (
            fo.adam(),
            fo.adam(amsgrad=True),
            ValueError,
            r"keeps the slots .* a state with .*max_exp",
        ),
        (fo.adam(), fo.sgd(momentum=0.9), ValueError, r"\['exp_avg', .* \['momentum_buffer'\]"),
        (fo.sgd(), fo.sgd(momentum=0.9), ValueError, r"slots \[\], but .*momentum_buffer"),
        (fo.adam(), opaque(), TypeError, "state of type EmptyState; pass the state .* own init"),
        (
            fo.chain(opaque(), fo.sgd()),
            fo.chain(opaque(), opaque(), fo.sgd()),
            ValueError,
            "chain of 2 parts got a state of length 3; pass the state",
        ),
    ],
)
def test_a_state_of_another_chain(mine, other, kind, words):
    with pytest.raises(kind, match=words):
        mine.update(W, other.init(W), W)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"a": {"b": torch.ones(2, dtype=torch.int64)}},
            r"'a.b' has dtype torch.int64; only",
        ),
        ({"w": torch.ones(2, dtype=torch.bool)}, "'w' has dtype torch.bool"),
        ({"w": 1.0}, r"'w' is a float, not a tensor; pass a pytree of tensors"),
        ([torch.ones(1), "text"], "'1' is a str, not a tensor"),
    ],
)
def test_what_cannot_be_a_parameter(params, words):
    for tx in (fo.adamw(), fo.sgd(), fo.chain()):
        with pytest.raises(TypeError, match=words):
            tx.init(params)


# ---------------------------------------------------------------- extra arguments


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (fo.adamw(), r"extra argument value, which no part .* \(it takes: none\)"),
        (times_gain(), r"argument value, .*takes: gain\)\. Check the spelling"),
        (fo.chain(times_gain(), opaque()), r"argument value, .*takes: gain\)"),
        (fo.chain(fo.sgd(), times_factor(), times_gain()), r"takes: factor, gain\)"),
        (fo.chain(opaque(), opaque()), r"takes: none\)"),
    ],
)
def test_an_unknown_extra_argument(tx, words):
    with pytest.raises(TypeError, match=words):
        tx.update(W, tx.init(W), W, value=1.0)


def test_extra_arguments_reach_the_parts_that_take_them():
    tx = fo.chain(times_gain(), times_factor(), fo.scale(2.0), times_factor())
    for extra, wanted in (({}, 2), ({"factor": 3.0}, 18), ({"gain": 5.0, "factor": 3.0}, 90)):
        updates, _ = tx.update(W, tx.init(W), W, **extra)
        assert torch.equal(updates["w"], torch.full((2,), float(wanted)))


# ---------------------------------------------------------------- chains that cannot be


# ---------------------------------------------------------------- hyperparameters

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: fo.sgd(lr=x), "Invalid learning rate: {}"),
        (lambda x: fo.sgd(momentum=x), "Invalid momentum value: {}"),
        (lambda x: fo.sgd(weight_decay=x), "Invalid weight_decay value: {}"),
        (lambda x: fo.adam(lr=x), "Invalid learning rate: {}"),
        (lambda x: fo.adam(betas=(x, 0.9)), "Invalid beta parameter at index 0: {}"),
        (lambda x: fo.adam(betas=(0.9, x)), "Invalid beta parameter at index 1: {}"),
        (lambda x: fo.adam(eps=x), "Invalid epsilon value: {}"),
        (lambda x: fo.adam(weight_decay=x), "Invalid weight_decay value: {}"),
        (lambda x: fo.adamw(lr=x), "Invalid learning rate: {}"),
        (lambda x: fo.adamw(weight_decay=x), "Invalid weight_decay value: {}"),
        (lambda x: fo.scale_by_adam(betas=(x, 0.9)), "Invalid beta parameter at index 0: {}"),
        (lambda x: fo.scale_by_lr(x), "Invalid learning rate: {}"),
        (lambda x: fo.trace(x), "Invalid momentum value: {}"),
        (lambda x: fo.add_decayed_weights(x), "Invalid weight_decay value: {}"),
        (lambda x: fo.clip_by_global_norm(x), "needs a positive max_norm, but got {}"),
        (lambda x: fo.clip_by_value(x), "needs a positive max_value, but got {}"),
        (lambda x: fo.params_ema(x), r"needs a decay in \[0, 1\], but got {}"),
    ],
)
@pytest.mark.parametrize("value", [-1.0, NAN])
def test_numbers_out_of_range(make, words, value):
    with pytest.raises(ValueError, match=words.format(value)):
        make(value)


@pytest.mark.parametrize("make", [torch.tensor, schedules.constant])
def test_tensors_and_schedules_are_not_validated(make):
    """Their values may change, and reading a tensor would break a graph."""
    fo.adamw(make(-1.0), (make(2.0), make(3.0)), make(-1.0), make(-1.0))
    fo.sgd(make(-1.0), make(-1.0), weight_decay=make(-1.0))
    fo.chain(fo.clip_by_global_norm(make(-1.0)), fo.clip_by_value(make(-1.0)))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_updates_are_not_broadcast_in_a_trace(shape):
    add = torch.compile(fo.apply_updates, backend="eager")
    with pytest.raises(ValueError, match="is not that of a parameter of shape"):
        add({"w": torch.ones(3)}, {"w": torch.ones(shape)})
