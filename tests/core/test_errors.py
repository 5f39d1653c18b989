"""What a step refuses: an error that names both sides and what to do, and nothing is changed."""

from collections import namedtuple
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from helpers import assert_same, clone
from matrix_recipes import made
from torch import Tensor
from ways import WAYS, step_in

import functional_optim as fo

Velocity = namedtuple("Velocity", "velocity")
Slots = namedtuple("Slots", "m")
W = {"w": torch.ones(2)}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    """It takes seconds for each graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


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
STEPS = {"update": lambda tx: tx.update, "donated": fo.compile}
STEPS |= {"kept": partial(fo.compile, donate=False)}
STEPS |= {"one graph": partial(fo.compile, backend="torch")}
"""Functions of gradients, state and parameters."""
every_step = pytest.mark.parametrize("way", STEPS)


def refused(way, tx, words, grads=W, state=None, params=None, kind=ValueError, later=False):
    """A step of what does not fit raises an error with these words, and nothing is written."""
    right, step = clone(W), STEPS[way](tx)
    mine = tx.init(right) if state is None else state
    if later:
        _, mine = step(W, mine, right)
    params = right if params is None else params
    before = clone((params, mine))
    with pytest.raises(kind, match=words):
        step(grads, mine, params)
    assert_same((params, mine), before)


@every_step
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"v": torch.ones(2)}, r"params and grads have different structures:\s+params: .*w \(2,\)"),
        ({"v": torch.ones(2)}, r"grads: .*v \(2,\)\s+Pass one gradient \(or None\) per parameter"),
        ([torch.ones(2)], "params and grads have different structures"),
        (torch.ones(2), "params and grads have different structures"),
        ({"w": torch.ones(3)}, r"differ at 'w': \(2,\) against \(3,\)"),
        ({"w": torch.ones(1)}, r"differ at 'w': \(2,\) against \(1,\)"),
        ({"w": torch.ones(1, 2)}, r"differ at 'w': \(2,\) against \(1, 2\)"),
        ({"w": 1.0}, r"differ at 'w': \(2,\) against float"),
        ({**W, "v": torch.ones(2)}, "different structures"),
        (None, "grads: no leaves"),
    ],
)
def test_gradients_of_another_tree(grads, words, later, way):
    """A kernel that trusted the first step's sizes would read beyond a shorter gradient."""
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw())
    refused(way, tx, words, grads, later=later)


def test_updates_of_another_tree():
    for updates, words in (
        ({"v": torch.ones(2)}, "params and updates have different structures"),
        ({"w": torch.ones(3)}, r"params and updates differ at 'w': \(2,\) against \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            fo.apply_updates(W, updates)
    many = {f"k{i}": torch.ones(1) for i in range(40)}
    with pytest.raises(ValueError, match=r"40 leaves: .* 34 more") as info:
        fo.apply_updates(many, {})
    assert len(str(info.value)) < 500


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_updates_are_not_broadcast_in_a_trace(shape):
    add = torch.compile(fo.apply_updates, backend="eager")
    with pytest.raises(ValueError, match="is not that of a parameter of shape"):
        add({"w": torch.ones(3)}, {"w": torch.ones(shape)})


TWO, THREE = (fo.chain(*[opaque()] * n, fo.sgd()) for n in (1, 2))
FROZEN = fo.chain(fo.freeze("w"), fo.adam())


@pytest.mark.parametrize(
    ("mine", "other", "kind", "words"),
    [
        (fo.adamw(), fo.adamw().init({"v": W["w"]}), ValueError, r"state .* own init"),
        (fo.adamw(), fo.adamw().init({"w": torch.ones(3)}), ValueError, r"state .* own init"),
        (fo.adamw(), fo.adamw().init(W["w"]), ValueError, r"state .* own init"),
        (fo.adam(), fo.adam(amsgrad=True).init(W), ValueError, r"the slots .* with .*max_exp"),
        (fo.adam(), fo.sgd(0.1, 0.9).init(W), ValueError, r"\['exp_avg', .* \['momentum_buffer'\]"),
        (fo.sgd(), fo.sgd(0.1, 0.9).init(W), ValueError, r"slots \[\], but .*momentum_buffer"),
        (fo.dynamic_loss_scale(fo.sgd()), fo.sgd().init(W), ValueError, "this chain's own init"),
        (fo.adam(), fo.EmptyState(), TypeError, "state of type EmptyState; pass the .* own init"),
        (fo.adam(), FROZEN.init(W), TypeError, "'exp_avg' of parameter 'w' is a NoneType"),
        (TWO, THREE.init(W), ValueError, "2 parts got a state of length 3; pass the state"),
    ],
)
@every_step
def test_a_state_of_another_model_or_chain(mine, other, kind, words, way):
    refused(way, mine, words, state=other, kind=kind)


@pytest.mark.parametrize("way", ["donated", "kept"])
def test_integers_are_no_parameters_of_a_compiled_step(way):
    tx, params = fo.sgd(), {"w": torch.zeros(2, dtype=torch.int64)}
    refused(way, tx, "'w' has dtype torch.int64", state=tx.init(W), params=params, kind=TypeError)


NAMES = ("Adafactor", "AdamMini", "APOLLO", "CAME", "Dion2", "GaLore", "KLShampoo", "KLSOAP")
NAMES += ("NorMuon", "PSGDKron", "Shampoo", "SOAP")
MATRIX_RULES = {"SM3": lambda: fo.sm3(0.1), **{name: made(name) for name in NAMES}}


@every_way
@pytest.mark.parametrize("shape", [(3, 5), (1, 6)], ids=["another", "one row"])
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_a_state_of_another_matrix_is_named(name, shape, way):
    """It is not spread over the rows either; a matrix before it stays as it is, too."""
    make, params = MATRIX_RULES[name], {"a": torch.ones(3, 5), "w": torch.ones(4, 6)}
    grads = {key: torch.eye(*p.shape) for key, p in params.items()}
    state = make().init({**params, "w": torch.ones(shape)})
    with pytest.raises(ValueError, match=r"the slot '.* (own init|is a plain tensor of) "):
        step_in(way, make, params, grads, state)
    assert all(p.eq(1).all() for p in params.values())


# ---------------------------------------------------------------- what is no gradient, no parameter
def test_a_complex_and_a_real_tensor_do_not_mix_and_parameters_are_needed():
    tx, z = fo.adamw(), {"w": torch.ones(2, dtype=torch.complex64)}
    for grads, params in ((z, W), (W, z)):
        with pytest.raises((TypeError, ValueError), match="complex"):
            tx.update(grads, tx.init(params), params)
    with pytest.raises(ValueError, match=r"the parameters: call update\(grads, state, params\)"):
        tx.update(W, tx.init(W))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"a": {"b": torch.ones(2, dtype=torch.int64)}}, r"'a.b' has dtype torch.int64; only"),
        ({"w": torch.ones(2, dtype=torch.bool)}, "'w' has dtype torch.bool"),
        ({"w": 1.0}, r"'w' is a float, not a tensor; pass a pytree of tensors"),
        ([torch.ones(1), "text"], "'1' is a str, not a tensor"),
    ],
)
def test_what_cannot_be_a_parameter(params, words):
    of_trees = fo.masked(fo.flatten(fo.trace(0.9)), lambda path, p: p.dim() > 0)
    for tx in (fo.adamw(), fo.sgd(), fo.chain(), of_trees):
        with pytest.raises(TypeError, match=words):
            tx.init(params)


@pytest.mark.parametrize("donate", [True, False])
def test_a_numpy_array_is_no_gradient_and_no_parameter(donate):
    tx = fo.sgd(0.1)
    p, array = {"w": torch.ones(2)}, {"w": numpy.ones(2)}
    state = tx.init(p)
    for step in (tx.update, fo.compile(tx, donate=donate)):
        for _ in range(2):
            with pytest.raises(TypeError, match="the gradient of 'w' is a ndarray, not a tensor"):
                step(array, state, p)
            step({"w": torch.ones(2)}, state, p)
        with pytest.raises(TypeError, match="parameter 'w' is a ndarray, not a tensor"):
            step(p, state, array)


# ---------------------------------------------------------------- extra arguments and numbers
@every_step
@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (fo.adamw(), r"extra argument value, which no part .* \(it takes: none\)"),
        (times_gain(), r"argument value, .*takes: gain\)\. Check the spelling"),
        (fo.masked(fo.accumulate(times_gain(), 1), "w"), r"argument value, .*takes: gain\)"),
        (fo.commit_if(times_gain()), "argument value, which no part of this"),
        (fo.chain(times_gain(), opaque()), r"argument value, .*takes: gain\)"),
        (fo.chain(fo.sgd(), times_factor(), times_gain()), r"takes: factor, gain\)"),
        (fo.chain(opaque(), opaque()), r"takes: none\)"),
    ],
)
def test_an_unknown_extra_argument(tx, words, way):
    with pytest.raises(TypeError, match=words):
        STEPS[way](tx)(W, tx.init(W), clone(W), value=1.0, **dict.fromkeys(tx.required, True))


@every_step
def test_extra_arguments_reach_the_parts_that_take_them(way):
    tx = fo.chain(times_gain(), times_factor(), fo.scale(2.0), times_factor())
    for extra, wanted in (({}, 2), ({"factor": 3.0}, 18), ({"gain": 5.0, "factor": 3.0}, 90)):
        updates, _ = STEPS[way](tx)(W, tx.init(W), fo.tree.map(torch.zeros_like, W), **extra)
        assert torch.equal(updates["w"], torch.full((2,), float(wanted)))


KINDS = {
    "sparse": (Tensor.to_sparse, "of the layout torch.sparse_coo; return one of"),
    "complex": (lambda u: u + 1j, "of torch.complex64; return one of torch.float32"),
    "meta": (lambda u: u.to("meta"), "on meta; return one on cpu"),
}


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_that_returns_another_kind_of_tensor_is_named(kind, way):
    change, words = KINDS[kind]
    rules = {"a tensor": lambda u, s, p: (change(u), s)}
    rules |= {"a slot": lambda u, s, p: (u, Velocity(change(u)))}
    for what, update in rules.items():
        params, init = clone(W), lambda p: Velocity(torch.zeros_like(p))

        def recipe(init=init, update=update):
            return fo.leafwise(init, update, name="mine")

        with pytest.raises(TypeError, match=f"the rule 'mine' returned {what} {words}"):
            step_in(way, recipe, params, W, recipe().init(W))
        assert torch.equal(params["w"], W["w"])


BAD = {"vector": (torch.ones(3), r"a Tensor of shape \(3,\) in torch.float32")}
BAD |= {"None": (None, "None"), "string": ("0.1", "a str")}


SCHEDULED = [
    ("betas.1", lambda schedule: fo.adamw(betas=(0.9, lambda n: schedule(n) if n else 0.1))),
    ("every", lambda schedule: fo.accumulate(fo.sgd(0.1), schedule)),
    ("should_transform", lambda schedule: fo.conditionally_transform(fo.sgd(0.1), schedule)),
    ("should_transform", lambda schedule: fo.conditionally_mask(fo.sgd(0.1), schedule)),
]


@every_way
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "make"), SCHEDULED)
def test_a_schedule_that_returns_no_number_is_named(name, make, bad, way):
    value, words = BAD[bad]
    text = f"the schedule of lr returned {words}; it must return a number or a 0-dim tensor"
    with pytest.raises(TypeError, match=text):
        fo.adamw(lambda count: value).init(W)

    def recipe():
        return make(lambda count: value)

    params, state = clone(W), recipe().init(W)
    if name == "betas.1":
        _, state = recipe().update(W, state, W)
    with pytest.raises(TypeError, match=f"the schedule of {name} returned {words}; it must"):
        step_in(way, recipe, params, W, state)
    assert torch.equal(params["w"], W["w"])


@pytest.mark.parametrize("found", [None, "a"])
@every_way
def test_the_numbers_of_a_rule_are_numbers(found, way):
    def recipe():
        return fo.leafwise(None, lambda u, x, p, n: (u, x), lambda t: (found,), name="odd")

    words = f"scalars of the rule 'odd' returned {found!r} among its numbers"
    with pytest.raises(TypeError, match=words):
        step_in(way, recipe, clone(W), W)


# ---------------------------------------------------------------- what an update may not return
def init(p: Tensor) -> Slots:
    return Slots(torch.zeros_like(p))


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a tensor": (None, lambda u, s, p: -u, "returned a tensor; return a pair"),
    "a list": (None, lambda u, s, p: [-u, s], "returned a list; return a pair"),
    "a triple": (None, lambda u, s, p: (u, s, 1), "a tuple of 3: Tensor, tuple, int; return a"),
    "a number": (None, lambda u, s, p: (0.5, s), "a tuple of 2: float, tuple; return a pair"),
    "another shape": (None, lambda u, s, p: (-u.mean(), s), r"of shape \(\) for an update"),
    "None for none": (None, lambda u, s, p: (-u, None), "slots None; return the slots as they"),
    "None": (init, lambda u, s, p: (-u, None), "slots None; return tensors for m"),
    "too few": (init, lambda u, s, p: (-u, ()), "slots a tuple of 0; return tensors for m"),
    "a slot": (init, lambda u, s, p: (-u, s.m), "slots a Tensor; return tensors for m"),
    "a lost slot": (init, lambda u, s, p: (-u, Slots(None)), "a tuple of 1: NoneType; return"),
    "a float": (init, lambda u, s, p: (-u, Slots(1.0)), "a tuple of 1: float; return tensors"),
    "a slot's shape": (init, lambda u, s, p: (-u, Slots(u.sum())), r"makes one of shape \(\)"),
}


@every_way
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_update_is_told_before_anything_is_changed(name, way):
    first, update, words = WRONG[name]
    w, recipe = torch.ones(3, 2), lambda: fo.leafwise(first, update, name="mine")
    with pytest.raises((TypeError, ValueError), match=words) as told:
        step_in(way, recipe, {"w": w}, {"w": torch.ones(3, 2)})
    assert "'mine'" in str(told.value) or "'m'" in str(told.value)
    assert w.eq(1).all()


WHOLE = {"a number": lambda p, u: -u.mean(), "rows": lambda p, u: -u.mean(-1, keepdim=True)}
WHOLE |= {"more": lambda p, u: -torch.stack([u, u])}


@pytest.mark.parametrize("way", [*WAYS[1:], "torch", "new", "train step"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_update_of_a_whole_tree_is_not_spread_over_a_parameter(name, way):
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return fo.tree.map(WHOLE[name], updates, updates), state

    tx = fo.GradientTransformation(lambda params: (), update)
    w = {"w": torch.ones(3, 2)}
    g = {"w": torch.arange(6.0).reshape(3, 2)}
    steps = {
        "torch": lambda: fo.compile(tx, backend="torch")(g, (), w),
        "new": lambda: fo.compile(tx, donate=False)(g, (), w),
        "train step": lambda: fo.compile_train_step(lambda p: (p["w"] * g["w"]).sum(), tx)(w, ()),
    }
    with pytest.raises(ValueError, match=r"of shape \(.*\) for a parameter of shape \(3, 2\)"):
        steps[way]() if way in steps else step_in(way, lambda: tx, w, g)
    assert w["w"].eq(1).all()


@pytest.mark.parametrize("wrong", [lambda u: -u.mT, lambda u: -u.mean(), lambda u: -u.flatten()])
def test_matrices_of_another_shape_are_not_joined(wrong):
    rule = fo.leafwise(None, lambda u, s, p: (wrong(u), s), runs=fo.Runs(batched=True), name="mine")
    w = torch.ones(3, 4, 2, 2)
    for tx in (fo.as_matrix(rule), fo.as_matrix(rule, kernel="batch")):
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match=r"returned a tensor of shape .* shape \("):
                step(torch.ones_like(w), tx.init(w), w)
    if wrong(w).dim() == 0:
        with pytest.raises(ValueError, match=r"'mine' returned a tensor of shape \(\)"):
            rule.update(w[0, 0], rule.init(w[0, 0]), w[0, 0])


def test_vectors_that_a_rule_of_batches_takes_for_a_matrix_are_refused():
    """Two biases of one length come as one tensor of two dimensions."""
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    grads = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    for update, says in (
        (lambda u, s, p: (u / u.norm(), s), "treats the tensors of a batch as one"),
        (lambda u, s, p: (u @ u.mT @ u, s), "takes several tensors of 1 dimensions and no single"),
    ):
        tx = fo.leafwise(None, update, runs=fo.Runs(batched=True), name="mine")
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match=f"'mine' was passed batched=True, but {says}"):
                step(grads, tx.init(params), params)
        seen = fo.as_matrix(tx)
        for step in (seen.update, fo.compile(seen)):
            with pytest.raises(ValueError, match=r"'mine' takes matrices, .*partition"):
                step(grads, seen.init(params), params)
    tx = fo.leafwise(None, lambda u, s, p: (-u, s), runs=fo.Runs(batched=True), name="mine")
    for each in (tx, fo.as_matrix(tx)):
        assert each.update(grads, each.init(params), params)[0]["b"].eq(-2.0).all()


def test_numbers_that_a_rule_of_batches_takes_for_a_vector_are_refused():
    """Two scales come as one tensor of one dimension."""
    params = {"a": torch.tensor(1.0), "b": torch.tensor(3.0)}

    def update(u, slots, p):
        return u / u.abs().amax(-1), slots

    tx = fo.leafwise(None, update, runs=fo.Runs(batched=True), name="mine")
    with pytest.raises(ValueError, match="treats the tensors of a batch as one"):
        tx.update(params, tx.init(params), params)


def test_a_rule_that_was_run_alone_is_looked_at_again_in_batches():
    def update(u, slots, p):
        return u / u.norm(), slots

    w, runs = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, fo.Runs(batched=True)
    alone = fo.leafwise(None, update, name="mine")
    assert alone.update(w, alone.init(w), w)[0]["b"].eq(0.5).all()
    batched = fo.leafwise(None, update, runs=runs, name="mine")
    with pytest.raises(ValueError, match="treats the tensors of a batch as one"):
        batched.update(w, batched.init(w), w)


# ---------------------------------------------------------------- where there is no gradient
def test_a_train_step_has_no_gradients_in_inference_mode():
    tx = fo.adamw()
    step, state = fo.compile_train_step(lambda p, x: (x * p["w"]).sum(), tx), tx.init(W)
    with torch.inference_mode():
        x = torch.ones(2)
        with pytest.raises(RuntimeError, match=r"torch.inference_mode\(\)"):
            step(W, state, x)


def test_an_init_for_other_shapes_is_named_and_one_for_kernels_is_tried():
    def of_dim(dim: int) -> Any:
        return lambda p: Velocity(torch.zeros(p.shape[dim]))

    with pytest.raises(TypeError, match=r"init of the rule 'mine' failed for .* \(1, 1\).*IndexE"):
        fo.leafwise(of_dim(4), lambda u, s, p: (u, s), name="mine")
    with pytest.raises(TypeError, match="init of the rule 'mine' returned a float for the slot"):
        fo.leafwise(lambda p: Velocity(0.0), lambda u, s, p: (u, s), name="mine")
    tx = fo.leafwise(of_dim(3), lambda u, s, p: (u, s), name="mine")
    assert tx.init(torch.zeros(2, 3, 5, 7)).slots["velocity"].shape == (7,)
