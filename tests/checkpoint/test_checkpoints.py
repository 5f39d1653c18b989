"""State: torch's own format, both ways, and that of earlier versions; copies, pickles, edits from
outside, and values that torch's loading has cast."""

import copy
import pickle
from pathlib import Path

import cases
import optree
import pytest
import torch
from helpers import (
    as_parameters,
    assert_close,
    copy_of,
    make_grads,
    make_params,
    step_object,
    through_file,
)
from objects import DROP_INS, GENERAL, check_edit, edits, every_drop_in, parameters
from reference.make_checkpoints import functional, functional_run, go, optimizers
from sampling import some

import functional_optim as fo
from functional_optim import adapters
from functional_optim.checkpoint.conversion import restore_precision

EXACT = 1e-12


def form(opt, params):
    """Per parameter: each state key with its shape and dtype; None for a parameter without."""
    return [
        {k: kind(v) for k, v in opt.state[p].items()} if p in opt.state else None for p in params
    ]


def kind(x):
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x)


# ---------------------------------------------------------------- torch's format
def both(case, params):
    """The drop-in and torch's class over equal parameters."""
    mine, other = as_parameters(params), as_parameters(params)
    ours = case.drop_in(mine, compile=False, **case.hyper)
    return ours, mine, case.stock(other, **case.hyper), other


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", cases.with_torch())
def test_the_state_has_torchs_keys_shapes_and_dtypes_after_every_step(case, default):
    params = case.filled(torch.float32)
    torch.set_default_dtype(default)
    try:
        ours, mine, theirs, other = both(case, params)
        assert form(ours, mine) == form(theirs, other)
        for i, g in enumerate(make_grads(params, 4)):
            late = [x if k < 1 or i > 1 else None for k, x in enumerate(g.values())]
            step_object(ours, [late])
            step_object(theirs, [late])
            assert form(ours, mine) == form(theirs, other)
            a, b = ours.state_dict(), theirs.state_dict()
            assert a.keys() == b.keys()
            assert a["state"].keys() == b["state"].keys()
            assert a["param_groups"] == b["param_groups"]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-to-torch", "torch-to-ours"])
@pytest.mark.parametrize("case", cases.with_torch())
def test_a_checkpoint_moves_between_torch_and_us_mid_run(case, ours_first):
    params = case.filled()
    grads = make_grads(params, 8)
    grads[0] = {**grads[0], "matrix": None}  # one parameter is a step behind
    ours, mine, theirs, other = both(case, params)
    _, _, through, wanted = both(case, params)
    step_object(through, grads)
    first, known = (ours, mine) if ours_first else (theirs, other)
    second, moved = (theirs, other) if ours_first else (ours, mine)
    step_object(first, grads[:4])
    for p, x in zip(moved, known, strict=True):
        p.data.copy_(x.detach())
    second.param_groups[0]["lr"] = 0.9  # the checkpoint's rate counts
    second.load_state_dict(through_file(first.state_dict()))
    step_object(second, grads[4:])
    assert_close(copy_of(moved), copy_of(wanted), 1e-10)


@pytest.mark.parametrize(
    ("recipe", "theirs", "hyper"),
    [
        (fo.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (fo.adamw, torch.optim.AdamW, {"lr": 0.1}),
    ],
)
def test_a_slot_that_a_checkpoint_lacks_starts_anew(recipe, theirs, hyper):
    """torch's checkpoint into the same recipe with an average of the parameters."""

    def averaged(lr, momentum=0.0):
        tx = recipe(lr, momentum) if momentum else recipe(lr)
        return fo.chain(tx, fo.params_ema(0.5))

    params = make_params()
    grads = make_grads(params, 2)
    other = as_parameters(params)
    step_object(stock := theirs(other, **hyper), grads[:1])
    mine = as_parameters(dict(zip(params, other, strict=True)))
    before = copy_of(mine)
    opt = adapters.Optimizer(mine, averaged, compile=False, **hyper)
    opt.load_state_dict(copy.deepcopy(stock.state_dict()))
    step_object(opt, grads[1:])
    step_object(stock, grads[1:])
    assert_close(copy_of(mine), copy_of(other), EXACT)
    for p, old in zip(mine, before, strict=True):
        assert_close(opt.state[p]["params_ema"], (old + p.detach()) / 2, EXACT)


@every_drop_in
def test_loading_casts_slots_to_the_parameters_dtype_as_torch_does(pair):
    params = make_params(torch.float32)
    _, _, source, _ = pair.make(params)
    step_object(source, make_grads(params, 2))
    ours, mine, theirs, other = pair.make(make_params(torch.bfloat16))
    for opt in (ours, theirs):
        opt.load_state_dict(state_dict=copy.deepcopy(source.state_dict()))
    assert form(ours, mine) == form(theirs, other)


# ---------------------------------------------------------------- copies and pickles
COMPOSED = {"lr": 0.1, "max_norm": 1.0, "decay": 0.9}


@pytest.mark.parametrize(("recipe", "hyper"), [(cases.composed, COMPOSED), (fo.identity, {})])
def test_an_unused_optimizer_can_be_copied(recipe, hyper):
    opt = adapters.Optimizer(as_parameters(make_params()), recipe, **hyper)
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert twin.defaults.items() >= hyper.items()
        assert twin.param_groups[0].keys() == opt.param_groups[0].keys()
        assert twin.compile
        twin.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("name", ["recipe", "Adafactor", "Muon", "AdamW"])
def test_a_group_that_joins_after_a_load_is_like_the_others(name):
    """torch's own loading adds an entry to `defaults`, and with it to every later group."""

    def make():
        if name == "recipe":
            return adapters.Optimizer([torch.ones(2, 2)], fo.adamw, lr=0.1)
        return getattr(adapters, name)([torch.ones(2, 2)], lr=0.1)

    opt = make()
    keys = set(opt.param_groups[0])
    opt.load_state_dict(make().state_dict())
    for joined in (opt, copy.deepcopy(opt)):
        assert joined.defaults.keys() == keys - {"params"}
        joined.add_param_group({"params": [torch.ones(1, 2)]})
        assert [set(group) for group in joined.param_groups] == [keys, keys]


def test_compile_is_each_objects_own():
    """A wrapper that takes the optimizer's class, as Lightning's does, finds the optimizer's."""

    class Wrapper:
        def __init__(self, opt):
            self.opt = opt
            self.__class__ = type("Wrapped", (Wrapper, type(opt)), {})

        def __getattr__(self, name):
            return getattr(self.opt, name)

    for compile in (True, False, "strict"):
        opt = adapters.SGD([torch.ones(2)], lr=0.1, compile=compile)
        assert Wrapper(opt).compile == compile
        assert copy.deepcopy(opt).compile == compile


def test_a_lambda_can_be_copied_but_not_pickled():
    opt = adapters.Optimizer(as_parameters(make_params()), lambda lr: fo.sgd(lr), lr=0.1)
    copy.deepcopy(opt)
    with pytest.raises(
        pickle.PicklingError, match=r"recipe .*<lambda> cannot .* define it with def"
    ):
        pickle.dumps(opt)


# ---------------------------------------------------------------- edits from outside
@pytest.mark.parametrize(("pair", "edit"), edits(DROP_INS + GENERAL))
def test_an_edit_counts_from_the_next_step(pair, edit):
    check_edit(pair, edit, EXACT)


def test_edited_state_of_half_precision_is_read():
    """A state pre-hook of torch's own tests turns the slots of float32 parameters to bfloat16."""
    params = make_params(torch.float32)
    mine = as_parameters(params)
    opt = adapters.AdamW(mine, compile=False)
    step_object(opt, make_grads(params, 2))
    for p in mine:
        opt.state[p]["exp_avg"] = opt.state[p]["exp_avg"].bfloat16()
    step_object(opt, make_grads(params, 2))
    assert all(opt.state[p]["exp_avg"].dtype == torch.bfloat16 for p in mine)
    assert all(opt.state[p]["exp_avg_sq"].dtype == torch.float32 for p in mine)


@pytest.mark.skipif(
    not hasattr(torch.optim, "swap_in_optimizer_params_and_state"), reason="new in torch 2.13"
)
@pytest.mark.parametrize("pair", parameters([*DROP_INS[1:], GENERAL[1]]))
def test_swapped_in_parameters_and_state_are_stepped(pair):
    swap = torch.optim.swap_in_optimizer_params_and_state
    params = make_params()
    ours, mine, theirs, other = pair.make(params)
    grads = make_grads(params, 5)
    swapped = []
    for opt, known in ((ours, mine), (theirs, other)):
        step_object(opt, grads[:2])
        held = copy.deepcopy(opt.state_dict())
        inside = {name: p.detach() + 1 for name, p in zip(params, known, strict=True)}
        with swap(opt, inside, held):
            for name, p in inside.items():
                p.grad = grads[2][name].clone()
            opt.step()
        swapped.append((inside, held["state"]))
        step_object(opt, grads[3:])
    assert_close(copy_of(mine), copy_of(other), EXACT)
    assert_close(swapped[0][0], swapped[1][0], EXACT)
    assert_close(swapped[0][1], swapped[1][1], EXACT)


# ---------------------------------------------------------------- recipes of whole trees
def test_a_slot_that_was_put_in_with_another_shape_is_named():
    p = torch.nn.Parameter(torch.ones(2))
    opt = adapters.AdamW([p], compile=False)
    p.grad = torch.ones(2)
    opt.step()
    opt.state[p]["exp_avg"] = torch.zeros(3)
    before = p.detach().clone()
    with pytest.raises(
        ValueError, match=r"the slot 'exp_avg' of parameter '0' .* make it as large"
    ):
        opt.step()
    assert torch.equal(p, before)


# ---------------------------------------------------------------- what torch's cast has rounded
def test_what_was_only_cast_is_as_it_was_saved():
    wide = torch.tensor([1 / 3, torch.nan, torch.inf], dtype=torch.float64)
    saved = {"a": wide, "b": [wide, (wide, 3)], "c": wide}
    loaded = optree.tree_map(lambda x: x.bfloat16() if isinstance(x, torch.Tensor) else x, saved)
    loaded["c"] = loaded["c"] * 2  # a hook's
    found = restore_precision(loaded, saved)
    for x in (found["a"], found["b"][0], found["b"][1][0]):
        assert x.dtype is torch.float64
        assert torch.equal(x.nan_to_num(), wide.nan_to_num())
        assert x.data_ptr() != wide.data_ptr()
    assert found["c"] is loaded["c"]
    assert restore_precision(loaded["a"], None) is loaded["a"]
    assert restore_precision([1], (1, 2)) == [1]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_a_nan_that_was_cast_is_restored_and_one_that_a_hook_has_replaced_is_not(kind):
    saved = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    found = restore_precision(saved.to(kind), saved)
    assert found.dtype is torch.float64
    assert torch.equal(found.isnan(), saved.isnan())
    mended = torch.tensor([1.0, 0.0]).to(kind)
    assert restore_precision(mended, saved) is mended


def test_what_overflows_is_restored_and_what_a_hook_has_clipped_is_not():
    saved = torch.tensor([1.0, 1e6], dtype=torch.float32)
    assert torch.equal(restore_precision(saved.half(), saved), saved)
    clipped = saved.half().nan_to_num()
    assert restore_precision(clipped, saved) is clipped


# ---------------------------------------------------------------- what earlier versions wrote
FOLDER = Path(__file__).parents[1] / "support" / "reference" / "checkpoints"
EAGER = [(name, False) for name in optimizers()]
COMPILED = [(name, True) for name in optimizers()]
KEPT = [(name, True) for name in ("Adafactor", "Adam", "Muon", "SGD", "recipe")]
"""Each way of keeping state: factors, slots like the parameter, a batch, one slot, a chain."""


@pytest.mark.parametrize(
    ("name", "compiled"),
    some(EAGER + COMPILED, len(EAGER), KEPT),
    ids=lambda x: {True: "compiled", False: "eager"}.get(x, x),
)
def test_an_optimizer_object_goes_on_where_it_went_then(name, compiled):
    old = torch.load(FOLDER / f"{name}.pt")
    named = [(path, torch.nn.Parameter(p.clone())) for path, p in old["params"].items()]
    opt = optimizers()[name](named)
    if not isinstance(opt, torch.optim.LBFGS):
        opt.compile = compiled
    opt.load_state_dict(old["state_dict"])
    go(opt, named, old["grads"])
    tolerance = 2e-2 if name == "Muon" else 1e-6  # its iteration is in bfloat16
    assert_close({path: p.detach() for path, p in named}, old["after"], tolerance)


def test_a_functional_state_goes_on_where_it_went_then():
    old = torch.load(FOLDER / "functional.pt")
    tx, params = functional(), old["params"]
    state = fo.load_state_dict(tx.init(params), old["state_dict"], params, step=3)
    params, _ = functional_run(tx, params, state, old["grads"])
    assert_close(params, old["after"], 1e-6)
