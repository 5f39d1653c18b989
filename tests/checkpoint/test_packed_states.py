"""Checkpoints of packed slots: into full precision and back, between kinds, and on disk."""

import copy
import io
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, run, through_file
from torch.distributed.checkpoint import state_dict as sd

import functional_optim as fo
from functional_optim import adapters

KINDS = ["int8", "int4", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
ERRORS = {"int8": 0.04, "int4": 0.3, "bfloat16": 0.01, "float8_e4m3fn": 0.06, "float8_e5m2": 0.12}
SIZES = {"w": (40, 50), "b": (50,)}


def recipe(*given, **more):
    """The same with AdamW's hyperparameters. How slots are stored is none of them."""

    def adamw(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        tx = fo.adamw(lr, betas, eps, weight_decay)
        return fo.stored(tx, *(given or ("int8",)), **{"block_size": 64, "min_size": 1000, **more})

    return adamw


def grads_of(seed):
    random = torch.Generator().manual_seed(seed)
    return {k: torch.randn(*shape, generator=random) for k, shape in SIZES.items()}


def made(make: Any = fo.adamw, steps=3):
    """An optimizer and its parameters, after some steps."""
    params = {k: torch.nn.Parameter(x) for k, x in grads_of(100).items()}
    if make is torch.optim.AdamW:
        opt = make(params.items(), lr=1e-2)
    else:
        opt = adapters.Optimizer(params.items(), make, compile=False)
    go_on(opt, params, range(steps))
    return opt, params


def go_on(opt, params, times):
    for i in times:
        for k, g in grads_of(i).items():
            params[k].grad = g
        opt.step()
    return {k: p.detach().clone() for k, p in params.items()}


def a_state(tx):
    return run(tx, grads_of(100), [grads_of(i) for i in range(3)])[::-1]


def far(x, y):
    return float((x.float() - y.float()).norm() / y.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_state_dict_loads_into_torchs_own_class(kind):
    opt, params = made(recipe(kind))
    exact, _ = made()
    saved = through_file(opt.state_dict(decoded=True))
    theirs, own = made(torch.optim.AdamW, 0)
    theirs.load_state_dict(saved)
    mine, whole = theirs.state[own["w"]], exact.state[next(iter(exact.state))]
    assert mine.keys() == whole.keys()
    for key in ("exp_avg", "exp_avg_sq"):
        assert mine[key].dtype is torch.float32
        assert mine[key].shape == (40, 50)
        assert 0 < far(mine[key], whole[key]) < 2 * ERRORS[kind]
    assert saved["state"][1].keys() == opt.state_dict()["state"][1].keys()
    go_on(theirs, own, range(3, 5))
    assert f"exp_avg.{kind}" in opt.state[params["w"]]


@pytest.mark.parametrize("kind", KINDS)
def test_full_precision_is_packed_at_loading_always_alike(kind):
    theirs, _ = made(torch.optim.AdamW)
    found = []
    for steps in (0, 2):
        opt, params = made(recipe(kind), steps)
        opt.load_state_dict(copy.deepcopy(theirs.state_dict()))
        found.append({k: dict(opt.state[p]) for k, p in params.items()})
        assert_close(opt.state_dict(decoded=True)["state"][0]["step"], torch.tensor(3.0), 0)
    assert_same(found[0], found[1])
    assert "exp_avg" not in found[0]["w"]
    assert "exp_avg" in found[0]["b"]
    decoded, whole = opt.state_dict(decoded=True)["state"], theirs.state_dict()["state"]
    for key in ("exp_avg", "exp_avg_sq"):
        assert 0 < far(decoded[0][key], whole[0][key]) < ERRORS[kind]
    state = recipe(kind)().init(grads_of(100))
    names = {f"state.{k}.{key}": x for i, k in enumerate(SIZES) for key, x in whole[i].items()}
    loaded = fo.load_state_dict(state, names, grads_of(100))
    for key, x in found[0]["w"].items():
        if key != "step":
            assert_same(loaded.slots[key]["w"], x)


WHOLE = {"step", "exp_avg", "exp_avg_sq"}
FORMS = {
    **{kind: (recipe(kind), {f"exp_avg.{kind}"}, ERRORS[kind]) for kind in KINDS},
    "larger blocks": (recipe(block_size=256), {"exp_avg.int8"}, ERRORS["int8"]),
    "of fewer leaves": (recipe(min_size=10**6), WHOLE, 0.0),
    "whole": (fo.adamw, WHOLE, 0.0),
}
"""A recipe, keys of its state, and how far what it loads may be from what was saved."""


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", ["int8", "int4", "bfloat16"])
def test_every_form_is_read_in_every_other(first, second):
    make, keys, error = FORMS[second]
    opt, _ = made(recipe(first))
    twin, params = made(make, 0)
    twin.load_state_dict(through_file(opt.state_dict()))
    assert keys <= twin.state[params["w"]].keys()
    a, b = (x.state_dict(decoded=True)["state"] for x in (twin, opt))
    assert far(a[0]["exp_avg"], b[0]["exp_avg"]) <= error
    assert_same(a[1], b[1])
    if second == "larger blocks":
        assert twin.state[params["w"]]["exp_avg.int8"].shape == (8, 256)
    go_on(twin, params, range(3, 4))


def renamed(own, kind):
    own[f"exp_avg.{kind}"] = own.pop("exp_avg.int8")


def cut(own):
    own.update({key: own[key][:-1] for key in ("exp_avg.int8", "exp_avg.scale")})


def transposed(own):
    own.clear()
    own.update(step=torch.tensor(1.0), exp_avg=torch.ones(50, 40), exp_avg_sq=torch.ones(40, 50))


UNREADABLE = {
    "int3": (lambda own: renamed(own, "int3"), "is stored as .*int3, but .* int8"),
    "codes": (lambda own: renamed(own, "codes"), "is stored as .*codes, but .* int8"),
    "cut": (cut, r"(is packed in int8, in 31 blocks of 64|has shape \(31, 64\)), but it needs"),
    "without scale": (lambda own: own.pop("exp_avg.scale"), "is packed in int8, but without its"),
    "without codes": (
        lambda own: own.pop("exp_avg.int8"),
        "(has its scale, but not the int.|is stored as scale)",
    ),
    "another scale": (
        lambda own: own.update({"exp_avg.scale": torch.ones(7)}),
        r"has shape \(7,\)",
    ),
    "transposed": (transposed, r"(is whole, of|has) shape \(50, 40\), but it needs"),
}
"""What becomes of a parameter's state, and what is said of its slot."""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", [recipe(), fo.adamw, recipe("int4")])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_and_nothing_is_loaded(name, make, strict):
    spoil, words = UNREADABLE[name]
    saved = copy.deepcopy(made(recipe())[0].state_dict())
    spoil(saved["state"][0])
    opt, params = made(make, 2)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=words) as error:
        opt.load_state_dict(saved)
    assert "'w'" in str(error.value)
    after = opt.state_dict()
    assert_same(after["state"], before["state"])
    assert after["param_groups"] == before["param_groups"]
    go_on(opt, params, range(2, 3))
    flat = {
        f"state.{k}.{x}": own for i, k in enumerate("wb") for x, own in saved["state"][i].items()
    }
    state = make().init(grads_of(0))
    with pytest.raises(ValueError, match=words):
        fo.load_state_dict(state, flat, grads_of(0), strict=strict)


@pytest.mark.parametrize("kind", KINDS)
def test_on_disk_a_state_takes_the_bytes_that_it_takes_in_memory(kind):
    x = torch.nn.Parameter(torch.randn(512, 512, generator=torch.Generator().manual_seed(0)))
    opt = adapters.Optimizer([("w", x)], lambda: fo.stored(fo.adamw(), kind), compile=False)
    x.grad = torch.ones_like(x)
    opt.step()
    tensors = [y for y in opt.state[x].values() if y.dim()]
    size = sum(y.numel() * y.element_size() for y in tensors)
    state = fo.stored(fo.adamw(), kind).init({"w": x.detach()})
    for saved in (opt.state_dict(), fo.state_dict(state, {"w": x.detach()})):
        file = io.BytesIO()
        torch.save(saved, file)
        assert size <= len(file.getvalue()) < 1.02 * size + 8000


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_names_and_torchs_functions_keep_packed_slots(flat):
    options = sd.StateDictOptions(flatten_optimizer_state_dict=flat)
    opt, params = made(recipe())
    twin, others = made(recipe(), 0)
    first, second = torch.nn.ParameterDict(params), torch.nn.ParameterDict(others)
    saved = copy.deepcopy(sd.get_optimizer_state_dict(first, opt, options=options))
    sd.set_optimizer_state_dict(second, twin, saved, options=options)
    assert_same([twin.state[p] for p in others.values()], [opt.state[p] for p in params.values()])
    if flat:
        state = fo.load_state_dict(recipe()().init(grads_of(0)), saved, grads_of(0))
        assert_same(state.slots["exp_avg.int8"]["w"], opt.state[params["w"]]["exp_avg.int8"])


def test_as_a_hook_it_decodes_for_whoever_asks():
    opt, params = made(recipe())
    model = torch.nn.ParameterDict(params)
    handle = opt.register_state_dict_post_hook(adapters.decode_slots)
    saved = sd.get_optimizer_state_dict(model, opt)
    assert set(saved["state"]["w"]) == {"step", "exp_avg", "exp_avg_sq"}
    before = dict(opt.state[params["w"]])
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.state[params["w"]].keys() == before.keys()
    handle.remove()
    assert "exp_avg.int8" in opt.state_dict()["state"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_functional_states_are_decoded_and_encoded(kind):
    tx, plain = recipe(kind)(), fo.adamw(1e-2)
    state, params = a_state(tx)
    whole = fo.decoded(tx, state, params)
    exact, _ = a_state(plain)
    assert fo.state_dict(whole, params).keys() == fo.state_dict(exact, params).keys()
    assert 0 < far(whole.slots["exp_avg"]["w"], exact.slots["exp_avg"]["w"]) < 2 * ERRORS[kind]
    assert_same([whole.step, whole.hyper], [state.step, state.hyper])
    plain.update(grads_of(9), whole, params)
    again = fo.encoded(tx, whole, params)
    assert again.slots.keys() == state.slots.keys()
    assert again.slots["exp_avg"]["w"] is None
    error = far(fo.decoded(tx, again, params).slots["exp_avg"]["w"], whole.slots["exp_avg"]["w"])
    assert error < ERRORS[kind]
    tx.update(grads_of(9), again, params)
    assert_same(fo.encoded(tx, state, params).slots, state.slots)


def test_decoding_says_what_it_takes():
    params = {"w": torch.ones(4)}
    flat = fo.flatten(fo.adam())
    with pytest.raises(TypeError, match="one-tensor rules"):
        fo.decoded(flat, flat.init(params), params)
    with pytest.raises(TypeError, match="a chain's state is needed, but got a dict"):
        fo.encoded(fo.adam(), {}, params)


def whole_model(make, steps=3):
    opt, params = made(make, steps)
    return torch.nn.ParameterDict(params), opt


def test_torchs_functions_cannot_mix_two_forms_unnoticed():
    """They make a state of their own first, and fill in what was saved."""
    first, theirs = whole_model(recipe(min_size=10**6))
    for how, text in (
        ("full_state_dict", "only one of these can be right"),
        ("flatten_optimizer_state_dict", "is a dict, but it needs a tensor"),
    ):
        options = sd.StateDictOptions(**{how: True})
        saved = sd.get_optimizer_state_dict(first, theirs, options=options)
        second, opt = whole_model(recipe())
        before = copy.deepcopy(opt.state_dict()["state"])
        with pytest.raises(ValueError, match=text):
            sd.set_optimizer_state_dict(second, opt, saved, options=options)
        assert_same(opt.state_dict()["state"], before)
    options = sd.StateDictOptions(full_state_dict=True)
    saved = sd.get_optimizer_state_dict(first, theirs, options=options)
    opt.register_state_dict_post_hook(adapters.decode_slots)
    sd.set_optimizer_state_dict(second, opt, saved, options=options)
    found = opt.state_dict()["state"][0]["exp_avg"]
    assert 0 < far(found, saved["state"]["w"]["exp_avg"]) < ERRORS["int8"]
    assert "exp_avg" not in opt.state[second["w"]]
