"""What people type first, out of habit: one sentence says what to do, and nothing is changed."""

import math
import re
import warnings
from typing import NamedTuple

import pytest
import torch
from compilers import forget
from helpers import step_object
from torch import nn

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.other_names import hint_for
from functional_optim.kernels import callers

PARAMS = {"w": torch.ones(3, 4), "b": torch.ones(4)}
GRADS = {name: torch.ones_like(p) for name, p in PARAMS.items()}


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def refused(error, words, call):
    with pytest.raises(error, match=re.escape(words)):
        call()


def total(params):
    return params["w"].sum()


GIVEN = {
    "parameters": lambda: model().parameters(),
    "a list": lambda: list(model().parameters()),
    "named parameters": lambda: model().named_parameters(),
    "a model": model,
    "a dict": lambda: dict(model().named_parameters()),
    "a tensor": lambda: torch.ones(3, requires_grad=True),
    "groups": lambda: [{"params": model().parameters()}],
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("more", [{}, {"lr": 1e-3}])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("adamw", "AdamW"),
        ("sgd", "SGD"),
        ("lbfgs", "LBFGS"),
        ("muon_adamw", "MuonAdamW"),
        ("schedule_free_adamw", "ScheduleFreeAdamW"),
    ],
)
def test_parameters_are_no_argument_of_a_transformation(name, found, more, given):
    words = f"for an optimizer object use functional_optim.adapters.{found}(params, ...)"
    refused(TypeError, words, lambda: getattr(fo, name)(GIVEN[given](), **more))


@pytest.mark.parametrize("given", GIVEN)
def test_parameters_are_no_number_of_iterations(given):
    words = "for an optimizer object use functional_optim.adapters.SSBFGS(params, ...)"
    refused(TypeError, words, lambda: fo.ssbfgs(GIVEN[given]()))


def test_a_transform_without_an_object_of_its_own_is_for_a_recipe():
    words = "adapters.Optimizer(params, recipe), with clip_by_global_norm in the recipe"
    refused(TypeError, words, lambda: fo.clip_by_global_norm(model().parameters(), 1.0))


ATTRIBUTES = {
    **{
        name: f"the optimizer object is functional_optim.adapters.{name}(params, ...)"
        for name in ("AdamW", "SGD", "Lion", "Optimizer", "SOAP")
    },
    "multi_transform": "for optax's multi_transform there is functional_optim.partition",
    "clip": "for optax's clip there is functional_optim.clip_by_value",
    "MultiSteps": "for optax's MultiSteps there is functional_optim.accumulate",
    "cosine_decay_schedule": "there is functional_optim.schedules.cosine_decay",
    "scale_by_learning_rate": "there is functional_optim.scale_by_lr",
    "inject_hyperparams": "there is functional_optim.with_schedule",
    "losses": "for optax's losses there is torch.nn.functional",
    "with_extra_args_support": "nothing: functional_optim.chain passes extra arguments",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_name_of_another_library_has_a_hint(name):
    refused(AttributeError, ATTRIBUTES[name], lambda: getattr(fo, name))


def test_every_public_function_of_optax_is_here_or_has_a_hint():
    optax = pytest.importorskip("optax")
    names = [x for x in optax.__all__ if x[0].islower() and callable(getattr(optax, x))]
    missing = [x for x in names if not hasattr(fo, x) and not hint_for(x)]
    losses = [x for x in missing if hasattr(optax.losses, x) or "loss" in x]
    assert sorted({*missing} - {*losses}) == []


@pytest.mark.parametrize("name", ["step", "zero_grad", "param_groups", "state_dict"])
def test_a_transformation_is_no_object_and_a_factory_is_called_first(name):
    words = f"a transformation has no {name}, since it keeps no parameters"
    refused(AttributeError, words, lambda: getattr(fo.adamw(), name))
    assert not hasattr(fo.lbfgs(), name)
    for method in ("init", "update"):
        words = "adamw is a factory; call it first, e.g. tx = adamw()"
        refused(TypeError, words, lambda: getattr(fo.adamw, method)(PARAMS))  # noqa: B023


CHAINS = {
    "scale stands after keep_params_nonnegative, and would move the parameters from": lambda: (
        fo.chain(fo.sgd(0.1), fo.keep_params_nonnegative(), fo.scale(2.0))
    ),
    "trace stands after keep_norms_within, and would move the parameters from": lambda: fo.chain(
        fo.masked(fo.keep_norms_within(2.0), "w"), fo.trace(0.9)
    ),
    "scale stands after schedule_free, and would move the parameters from": lambda: fo.chain(
        fo.schedule_free(fo.sgd(0.1)), fo.scale(0.5)
    ),
    "scale_by_adam stands after scale_by_lr, and divides by second": lambda: fo.chain(
        fo.masked(fo.scale_by_lr(0.1), "w"), fo.scale_by_adam()
    ),
    "scale_by_lr stands after keep_params_nonnegative, which works on the step": lambda: fo.chain(
        fo.keep_params_nonnegative(),
        fo.partition({"x": fo.scale_by_lr(0.1), "y": fo.scale_by_lr(0.2)}, {"a": "x", "*": "y"}),
    ),
    "scale_by_lr stands after lookahead, which works on the step": lambda: fo.chain(
        fo.lookahead(fo.scale_by_adam(), 5), fo.scale_by_lr(0.1)
    ),
}


@pytest.mark.parametrize("words", CHAINS)
def test_parts_of_a_chain_that_spoil_each_other(words):
    refused(ValueError, words, CHAINS[words])


def test_what_may_stand_after_bounds():
    watch = fo.monitor({"rms": fo.measures.rms})
    fo.chain(fo.sgd(0.1), fo.keep_params_nonnegative(), watch, fo.params_ema(0.9))
    bounded = fo.partition({"w": fo.keep_params_nonnegative(), "b": fo.scale(2.0)}, lambda k, p: k)
    fo.chain(fo.sgd(0.1), bounded)
    fo.chain(fo.masked(fo.lookahead(fo.sgd(0.1)), "w"), fo.masked(fo.sgd(0.1, 0.9), "b"))


@pytest.mark.parametrize("compile", [True, False])
def test_a_condition_is_no_number_of_micro_batches(compile):
    words = "it must return the number of micro-batches per batch, at least 1"
    for every in (lambda k: (k + 1) % 4 == 0, lambda k: 0, lambda k: -1.0):
        tx = fo.accumulate(fo.sgd(0.1), every)
        refused(ValueError, words, lambda: tx.update(GRADS, tx.init(PARAMS), PARAMS))  # noqa: B023
        w = nn.Parameter(torch.ones(2))
        opt = adapters.Optimizer([w], lambda: tx, compile=compile)  # noqa: B023
        w.grad = torch.ones(2)
        refused(ValueError, words, opt.step)
        assert w.tolist() == [1.0, 1.0]


def test_a_dict_is_no_iterable_of_parameters():
    words = "got a dict; pass model.named_parameters(), or the dict's items()"
    named = dict(model().named_parameters())
    for make in (adapters.AdamW, lambda x: adapters.Optimizer(x, fo.sgd), adapters.SAM):
        refused(TypeError, words, lambda: make(named))  # noqa: B023
        make(list(named.items()))


def test_the_step_of_a_state_is_a_tensor():
    tx = fo.sgd(0.1)
    words = "the step of the state is 3; it must be a 0-dim tensor of int64"
    refused(TypeError, words, lambda: tx.update(GRADS, tx.init(PARAMS)._replace(step=3), PARAMS))


@pytest.mark.parametrize("way", [lambda tx: tx.update, fo.compile])
def test_a_state_of_many_models_is_for_a_mapped_update(way):
    tx, stacked = fo.adam(0.1), {"w": torch.ones(4, 3)}
    state = torch.func.vmap(tx.init)(stacked)
    words = "the state is one of 4 models, made by torch.func.vmap(tx.init); pass it to torch."
    refused(ValueError, words, lambda: way(tx)(stacked, state, stacked))


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (fo.lbfgs(), "lbfgs needs the extra arguments value and value_and_grad: call update("),
        (fo.ssbroyden(), "ssbroyden needs the extra arguments value and value_and_grad: call "),
        (fo.sam(fo.sgd(0.1)), "sam needs the extra argument grad_fn: call update("),
        (fo.commit_if(fo.sgd(0.1)), "commit_if needs the extra argument commit: call update("),
        (fo.polyak_sgd(), "scale_by_polyak needs the extra argument value: call update("),
        (fo.momo(), "momo needs the extra argument value: call update("),
        (fo.metropolis(torch.add), "metropolis needs the extra argument value: call update("),
        (fo.scale_by_backtracking_linesearch(), "needs the extra arguments value and grad: call"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_extra_argument_that_is_missing_is_named(tx, words, compiled):
    update = fo.compile(tx) if compiled else tx.update
    refused(TypeError, words, lambda: update(GRADS, tx.init(PARAMS), PARAMS))


@pytest.mark.parametrize(
    ("tx", "name", "takes"),
    [
        (fo.levenberg_marquardt(), "residuals", "residual_fn"),
        (fo.dogleg(), "residuals", "residual_fn"),
        (fo.scale_by_gauss_newton(), "residuals", "residual_fn"),
        (fo.lbfgs(), "value_fn", "value, value_and_grad"),
        (fo.ssbroyden(), "closure", "value, value_and_grad"),
    ],
)
def test_an_extra_argument_of_another_name_is_named(tx, name, takes):
    words = f"extra argument {name}, which no part of this transformation takes (it takes: {takes})"
    refused(TypeError, words, lambda: tx.update(GRADS, tx.init(PARAMS), PARAMS, **{name: total}))


@pytest.mark.parametrize("way", ["update", "compile", "train step"])
def test_swapped_arguments_are_told_the_order(way):
    tx = fo.adamw()
    state = tx.init(PARAMS)
    steps = {"update": tx.update, "compile": fo.compile(tx)}
    if way == "train step":
        step, words = fo.compile_train_step(total, tx), "this order: step(params, state, *batch)"
        refused(TypeError, words, lambda: step(state, PARAMS))
        return
    for args in ((state, GRADS, PARAMS), (GRADS, PARAMS, state)):
        words = "in this order: update(grads, state, params)"
        refused(TypeError, words, lambda: steps[way](*args))  # noqa: B023


def test_master_weights_of_nothing_are_told_once(monkeypatch):
    forget(monkeypatch)
    tx = fo.master_weights(fo.adamw())
    with pytest.warns(UserWarning, match="but these are in float32") as found:
        fo.tree.map(lambda _: tx.init(PARAMS), [0, 1])
    assert [x.filename for x in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx.init({"w": torch.ones(2, dtype=torch.bfloat16), "norm": torch.ones(2)})


def test_a_rule_is_compiled_though_its_first_step_is_in_inference_mode():
    tx = fo.leafwise(None, lambda u, slots, p: (u.to(torch.float64).to(u.dtype), slots))
    with torch.inference_mode():
        params = {name: p.clone() for name, p in PARAMS.items()}
        fo.compile(tx, strict=True)(GRADS, tx.init(params), params)


@pytest.mark.parametrize("way", ["function", "object"])
def test_one_warning_where_there_is_neither_a_compiler_nor_a_folder(monkeypatch, way):
    """It names the user's line."""
    forget(monkeypatch)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "/proc/nothing")
    params = {name: p.clone() for name, p in PARAMS.items()}
    tx, opt = fo.adamw(), adapters.AdamW([torch.nn.Parameter(torch.ones(3))])
    opt.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.warns(RuntimeWarning) as found:
        opt.step() if way == "object" else fo.compile(tx)(GRADS, tx.init(params), params)
    assert len(found) == 1
    assert "there is no C++ compiler" in str(found[0].message)
    assert found[0].filename == __file__


# ---------------------------------------------------------------- numbers
PAIRS = {
    "betas": "adam adamw adamax acprop adabelief adamaxw adopt laprop lion mars optimistic_adam_v2 "
    "simplified_ademamix yogi nadam radam sparse_adam prodigy dadapt_adam momo_adam shampoo",
    "betas_1d": "mars",
    "etas": "rprop",
    "step_sizes": "rprop",
    "eps": "adafactor",
}


TUPLES = [(make, name, "a pair of numbers") for name in PAIRS for make in PAIRS[name].split()]
TUPLES += [(make, "betas", "three numbers") for make in ("adan", "ademamix")]


@pytest.mark.parametrize("value", [0.9, (0.9,), (0.1, 0.2, 0.3, 0.4), "ab", "abc", None], ids=str)
@pytest.mark.parametrize(("factory", "name", "what"), TUPLES)
def test_what_is_no_tuple_of_numbers_is_refused(factory, name, what, value):
    with pytest.raises(TypeError, match=rf"{name} must be {what}, e\.g\. \("):
        getattr(fo, factory)(**{name: value})


@pytest.mark.parametrize("value", [-1.0, math.nan])
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
        (lambda x: fo.adamw(weight_decay=x), "Invalid weight_decay value: {}"),
        (lambda x: fo.scale_by_lr(x), "Invalid learning rate: {}"),
        (lambda x: fo.trace(x), "Invalid momentum value: {}"),
        (lambda x: fo.add_decayed_weights(x), "Invalid weight_decay value: {}"),
        (lambda x: fo.clip_by_global_norm(x), "needs a positive max_norm, but got {}"),
        (lambda x: fo.clip_by_value(x), "needs a positive max_value, but got {}"),
        (lambda x: fo.params_ema(x), r"needs a decay in \[0, 1\], but got {}"),
    ],
)
def test_a_number_out_of_range_is_refused_and_what_may_change_is_not_read(make, words, value):
    with pytest.raises(ValueError, match=words.format(value)):
        make(value)
    make(torch.tensor(value))  # reading a tensor would break a graph
    make(fo.schedules.constant(value))


def test_one_learning_rate_a_leaf_is_fine():
    parts = {"slow": fo.sgd(0.1), "fast": fo.adam(0.1)}
    fo.chain(fo.partition(parts, {"*.b": "slow", "*": "fast"}))
    fo.chain(fo.masked(fo.sgd(0.1), "a"), fo.masked(fo.sgd(0.1), "b"))
    fo.chain(fo.sgd(0.1), fo.scale_by_schedule(lambda count: 0.5), fo.scale(0.5))
    fo.chain(fo.lookahead(fo.sgd(0.1)))


# ---------------------------------------------------------------- patterns that fit no leaf
@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(callers, "_warned", set())


def whole(tx):
    """The same, not made of one-tensor rules."""
    return fo.GradientTransformation(tx.init, tx.update)


RECIPES = {
    "whole trees": lambda: fo.masked(whole(fo.sgd(0.1)), "head.*"),
    "masked": lambda: fo.chain(fo.masked(fo.trace(0.9), "head.*"), fo.scale_by_lr(0.1)),
    "freeze": lambda: fo.chain(fo.freeze("head.*"), fo.sgd(0.1)),
    "selective": lambda: fo.selective_transform(fo.sgd(0.1), freeze_mask=["body.b", "head.*"]),
    "partition": lambda: fo.partition(
        {"one": fo.sgd(0.1), "two": fo.adam(0.1)}, {"head.*": "one", "*": "two"}
    ),
}


def tree():
    return {"body.b": torch.ones(2), "body.w": torch.ones(3)}


def stepped(tx, p, times=2):
    state = tx.init(p)
    for _ in range(times):
        _, state = tx.update(p, state, p)


@pytest.mark.parametrize("name", RECIPES)
def test_init_warns_once(name):
    with pytest.warns(UserWarning, match=r"'head\.\*' of the (mask|labels) matches") as seen:
        stepped(RECIPES[name](), tree())
    assert len(seen) == 1
    stepped(RECIPES[name](), tree())  # a warning is an error here


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", [x for x in RECIPES if x != "whole trees"])
def test_an_object_warns_once_when_it_is_built(name, compile):
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 1)})
    with pytest.warns(UserWarning, match=r"matches no leaf; there are 'body\.weight'") as seen:
        opt = adapters.Optimizer(model.named_parameters(), RECIPES[name], compile=compile)
    assert len([x for x in seen if "head" in str(x.message)]) == 1
    step_object(opt, [[torch.ones_like(p) for p in model.parameters()]] * 2)


def groups(model):
    named = list(model.named_parameters())
    return [{"params": [x for x in named if x[0].endswith(kind)]} for kind in ("weight", "bias")]


@pytest.mark.parametrize("make", [lambda tx: tx, lambda tx: fo.chain(tx, whole(fo.identity()))])
def test_a_pattern_that_fits_in_one_group_is_fine(make):
    model = torch.nn.Linear(2, 1)
    parts = {"one": fo.sgd(0.1), "two": fo.sgd(0.2)}
    chosen = {"bias": "one", "weight": "two"}
    recipe = lambda: make(fo.partition(parts, chosen))  # noqa: E731
    opt = adapters.Optimizer(groups(model), recipe, compile=False)
    step_object(opt, [[torch.ones_like(p) for p in model.parameters()]])
    opt.load_state_dict(opt.state_dict())


def test_the_star_a_predicate_and_a_label_without_leaves_are_fine():
    parts = {"one": fo.sgd(0.1), "two": fo.sgd(0.2)}
    stepped(fo.partition(parts, {"body": "one", "*": "two"}), tree())
    stepped(fo.masked(fo.trace(0.9), lambda path, p: False), tree())
    stepped(fo.masked(fo.masked(whole(fo.sgd(0.1)), "body.b"), "body.w"), tree())


def test_a_traced_init_says_nothing(fresh_dynamo):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.compile(RECIPES["masked"]().init, backend="eager", fullgraph=True)(tree())
    assert not [x for x in seen if "matches no leaf" in str(x.message)]


def test_a_decay_may_follow_the_learning_rate_of_other_leaves():
    decayed = fo.chain(fo.add_decayed_weights(0.1), fo.sgd(0.1))
    tx = fo.chain(fo.masked(fo.sgd(1.0), "body.w"), fo.masked(decayed, "body.b"))
    p = tree()
    found = tx.update(p, tx.init(p), p)[0]
    torch.testing.assert_close(found, {"body.b": -0.11 * p["body.b"], "body.w": -p["body.w"]})


HIDDEN = {
    "mask": lambda: fo.masked(fo.trace(0.9), {"*": True, "body.w": False}),
    "labels": lambda: fo.partition(
        {"one": fo.sgd(0.1), "two": fo.sgd(0.2)}, {"body*": "one", "body.w": "two"}
    ),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_a_pattern_that_never_decides_is_told_of(what):
    message = rf"the pattern 'body\.w' of the {what} decides for no leaf.* put 'body\.w' first"
    with pytest.warns(UserWarning, match=message) as seen:
        HIDDEN[what]().init(tree())
    assert len(seen) == 1


def test_patterns_with_one_answer_and_a_star_for_the_rest_may_hide_each_other():
    parts = {"one": fo.sgd(0.1), "two": fo.sgd(0.2)}
    stepped(fo.masked(fo.trace(0.9), ["body*", "body.w"]), tree())
    stepped(fo.partition(parts, {"body.w": "one", "body.b": "two", "*": "one"}), tree())


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("make", ["AdamW", "Adan"])
def test_so_does_a_storage_that_packs_no_parameter(make, compile):
    """Of a class of torch's, and of one of ours."""

    def stored(tx):
        return fo.stored(tx, "int8", where="head.*")

    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 1)})
    with pytest.warns(UserWarning, match=r"'head\.\*' of the mask matches no leaf") as seen:
        getattr(adapters, make)(model.named_parameters(), stored=stored, compile=compile)
    assert len(seen) == 1


def test_a_mask_with_its_arguments_the_other_way_round():
    tx = fo.masked(fo.sgd(0.1), lambda p, path: p.ndim > 1)
    with pytest.raises(AttributeError) as error:
        tx.init({"w": torch.ones(2)})
    assert "mask was called with the path 'w' and the parameter" in error.value.__notes__[0]


class Steps(NamedTuple):
    optimizer_step: torch.Tensor


def test_a_slot_with_the_name_of_a_count_is_saved_and_loaded():
    """Behind a gate, which counts in the state of each parameter."""
    rule = fo.leafwise(
        lambda p: Steps(torch.zeros_like(p)),
        lambda u, slots, p: (-slots.optimizer_step, Steps(slots.optimizer_step + u)),
        name="mine",
    )
    made = []
    for _ in range(2):
        p = torch.nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        made.append((p, adapters.Optimizer([p], lambda: fo.accumulate(rule, 2))))
    (p, first), (q, second) = made
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    q.data.copy_(p.data)
    for one in (first, second):
        for _ in range(3):
            one.step()
    assert torch.equal(p, q)
    assert not torch.equal(p, torch.ones(2))


def test_a_rule_without_a_name_is_called_as_its_function():
    def downhill(u, slots, p):
        return u

    tx = fo.leafwise(None, downhill)
    with pytest.raises(TypeError, match="update of the rule 'downhill' returned a tensor"):
        tx.update(torch.ones(2), tx.init(torch.ones(2)), torch.ones(2))
    assert repr(tx) == "chain(?)"
