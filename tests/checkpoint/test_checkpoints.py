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
    assert_same,
    copy_of,
    make_grads,
    make_params,
    step_object,
    through_file,
)
from objects import DROP_INS, GENERAL, check_edit, edits, every_drop_in, general, parameters
from reference.make_checkpoints import functional, functional_run, go, optimizers
from sampling import some
from torch.distributed.checkpoint import state_dict as sd

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


def test_a_slot_that_a_checkpoint_lacks_starts_anew():
    """torch's checkpoint into the same recipe with an average of the parameters."""
    params = make_params()
    grads = make_grads(params, 2)
    other = as_parameters(params)
    step_object(stock := torch.optim.AdamW(other, lr=0.1), grads[:1])
    mine = as_parameters(dict(zip(params, other, strict=True)))
    before = copy_of(mine)

    def averaged(lr):
        return fo.chain(fo.adamw(lr), fo.params_ema(0.5))

    opt = adapters.Optimizer(mine, averaged, compile=False, lr=0.1)
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
JOINED = [general(fo.adamw), adapters.Adafactor, adapters.Muon, adapters.AdamW]


@pytest.mark.parametrize("make", JOINED)
def test_a_group_that_joins_after_a_load_is_like_the_others(make):
    """torch's own loading adds an entry to `defaults`, and with it to every later group."""
    opt, other = (make([torch.ones(2, 2)], lr=0.1) for _ in range(2))
    keys = set(opt.param_groups[0])
    opt.load_state_dict(other.state_dict())
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
    packed = adapters.Optimizer(as_parameters(make_params()), fo.sgd, stored=lambda tx: tx, lr=0.1)
    copy.deepcopy(packed)
    with pytest.raises(pickle.PicklingError, match=r"stored .*<lambda> cannot be pickled"):
        pickle.dumps(packed)


def test_a_pickle_has_each_matrix_once():
    """Slots of equal matrices are views of one tensor, which pickle would store for each."""
    params = [torch.nn.Parameter(torch.ones(16, 16)) for _ in range(12)]
    opt = adapters.SOAP(params, compile=False)
    step_object(opt, [[torch.eye(16)] * 12] * 2)
    size = sum(x.nbytes for mine in opt.state.values() for x in mine.values())
    dumped = pickle.dumps(opt)
    assert len(dumped) < 3 * size
    again = pickle.loads(dumped)
    assert_same(list(again.state.values()), list(opt.state.values()))


# ---------------------------------------------------------------- torch.distributed.checkpoint
def two_rates(params):
    rates = {"lr": 0.1, "adamw_lr": 0.1, "weight_decay": 0.1, "adamw_weight_decay": 0.1}
    return adapters.Optimizer(params, fo.muon_adamw, compile=False, **rates)


def renamed_rate(rate):
    return fo.flatten(fo.adamw(rate, weight_decay=0.1))


def in_int8(tx):
    return fo.stored(tx, "int8", block_size=16, min_size=0)


def in_evaluation(params):
    opt = adapters.ScheduleFreeAdamW(params, compile=False, lr=0.1)
    opt.eval()
    return opt


WITH_STATE = {
    "two rates": two_rates,
    "packed": lambda params: adapters.AdamW(params, compile=False, stored=in_int8),
    "a tree": lambda params: adapters.Optimizer(params, renamed_rate, compile=False, rate=0.1),
    "evaluation": in_evaluation,
    "SAM": lambda params: adapters.SAM(params, fo.adamw, compile=False, lr=0.1),
    "Momo": lambda params: adapters.Momo(params, compile=False, lr=0.1),
    "SSBFGS": lambda params: adapters.SSBFGS(params, max_iter=2),
    "residuals": adapters.LevenbergMarquardt,
}
WITHOUT_STATE = {
    "LBFGS": lambda params: adapters.LBFGS(params, lr=0.1, max_iter=2),
    "GradientFree": lambda params: adapters.GradientFree(params, fo.mezo, tx=fo.sgd, lr=0.1),
}
FLAT = sd.StateDictOptions(flatten_optimizer_state_dict=True)


def asked(name):
    """A model, its optimizer object, and a function that makes two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
    opt = (WITH_STATE | WITHOUT_STATE)[name](model.named_parameters())

    def closure():
        found = model(torch.eye(3, dtype=torch.float64)).flatten() - 1
        if name == "residuals":
            return found
        loss = found.square().sum()
        if name != "GradientFree":
            opt.zero_grad()
            loss.backward()
        return loss

    def go():
        if name == "evaluation":
            opt.train()
        for _ in range(2):
            opt.step(closure)

    return model, opt, go


@pytest.mark.parametrize("name", WITH_STATE)
def test_torch_gets_the_state_of_a_new_optimizer_without_a_step(name):
    """It calls `step` with gradients of 0, and with `lr` at 0, which need not be the only rate."""
    model, opt, go = asked(name)
    go()
    saved = through_file(sd.get_optimizer_state_dict(model, opt, options=FLAT))
    weights = copy.deepcopy(model.state_dict())
    for get_first in (False, True):
        again, new, go_again = asked(name)
        again.load_state_dict(weights)
        hook = new.register_step_post_hook(lambda *_: pytest.fail("a step"))
        if get_first:
            with torch.inference_mode():
                got = sd.get_optimizer_state_dict(again, new, options=FLAT)
            assert got.keys() == saved.keys()
            assert not any(x.is_inference() for x in got.values() if isinstance(x, torch.Tensor))
        sd.set_optimizer_state_dict(again, new, saved, options=FLAT)
        hook.remove()
        assert_same(again.state_dict(), weights)
        assert all(p.grad is None for p in again.parameters())
        go_again()
        if not get_first:
            go()
        assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_a_state_that_torch_cannot_get_is_refused_and_leaves_no_zeros(name):
    model, opt, _ = asked(name)
    said = rf"state of {name}, which has none .*opt\.state_dict"
    with pytest.raises(RuntimeError, match=said):
        sd.get_optimizer_state_dict(model, opt)
    with pytest.raises(RuntimeError, match=said):
        sd.set_optimizer_state_dict(model, opt, opt.state_dict())
    assert opt.param_groups[0]["lr"] == opt.defaults["lr"]
    assert all(p.grad is None for p in model.parameters())
    assert not opt.state


# ---------------------------------------------------------------- one dict, loaded twice
@pytest.mark.parametrize("name", WITH_STATE | WITHOUT_STATE)
def test_a_loaded_dict_stays_as_it_is(name):
    """torch's classes write to its tensors."""
    _, opt, go = asked(name)
    go()
    saved = through_file(opt.state_dict())
    before = copy.deepcopy(saved["state"])
    _, new, go_again = asked(name)
    new.load_state_dict(saved)
    theirs = {x.data_ptr() for x in optree.tree_leaves(saved["state"]) if is_tensor(x)}
    mine = {x.data_ptr() for x in optree.tree_leaves([*new.state.values()]) if is_tensor(x)}
    assert theirs.isdisjoint(mine)
    go_again()
    assert_same(saved["state"], before)


def is_tensor(x):
    return isinstance(x, torch.Tensor) and x.numel() > 0


def test_counts_that_are_made_equal_stay_in_the_loaded_dict():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    opt = adapters.Optimizer(params, lambda: fo.accumulate(fo.sgd(0.1), every=3), compile=False)
    step_object(opt, [[torch.ones(3)] * 2] * 2)
    saved = through_file(opt.state_dict())
    saved["state"][1]["mini_step"].zero_()
    before = copy.deepcopy(saved["state"])
    opt.load_state_dict(saved)
    assert not opt.state[params[1]]["acc_grads"].any()
    assert_same(saved["state"], before)


@every_drop_in
def test_entries_of_others_beside_the_parameters_are_kept_as_in_torch(pair):
    for opt in pair.make()[::2]:
        step_object(opt, make_grads(make_params(), 1))
        opt.state.update({"epoch": 3, "scheduler": {"step": 1000}})
        opt.load_state_dict(opt.state_dict())
        for new in (opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
            assert (new.state["epoch"], new.state["scheduler"]) == (3, {"step": 1000})
            step_object(new, make_grads(make_params(), 1))


# ---------------------------------------------------------------- edits from outside
@pytest.mark.parametrize(("pair", "edit"), edits(DROP_INS + GENERAL))
def test_an_edit_counts_from_the_next_step(pair, edit):
    check_edit(pair, edit, EXACT)


@pytest.mark.parametrize("compile", [True, False])
def test_a_python_number_can_be_put_in_as_a_step_count(compile):
    ends = []
    for count in (100, torch.tensor(100.0)):
        p = torch.nn.Parameter(torch.ones(3))
        opt = adapters.AdamW([p], lr=0.1, compile=compile)
        step_object(opt, [[torch.ones(3)]])
        opt.state[p]["step"] = count
        step_object(opt, [[torch.ones(3)]])
        assert opt.state[p]["step"].item() == 101
        ends.append(p.detach())
    assert_same(*ends)


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


NARROW = [(x, torch.nan) for x in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64)]


@pytest.mark.parametrize(("kind", "odd"), [*NARROW, (torch.float16, 1e6)])
def test_a_nan_or_overflow_of_a_cast_is_restored_and_what_a_hook_has_put_there_is_not(kind, odd):
    saved = torch.tensor([1.0, odd], dtype=torch.float64)
    found = restore_precision(saved.to(kind), saved)
    assert found.dtype is torch.float64
    assert_close(found.nan_to_num(), saved.nan_to_num(), 0.0)
    mended = torch.tensor([1.0, 0.0]).to(kind)
    assert restore_precision(mended, saved) is mended


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
