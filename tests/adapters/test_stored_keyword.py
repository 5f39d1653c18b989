"""The keyword `stored` of optimizer objects: what it packs, and that nothing else changes."""

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.cells import CELLS
from functional_optim.core.storage import opened

CLASSES = [
    *(adapters.Adadelta, adapters.Adafactor, adapters.Adagrad, adapters.Adam, adapters.AdamW),
    *(adapters.Adamax, adapters.ASGD, adapters.Muon, adapters.NAdam, adapters.RAdam),
    *(adapters.RMSprop, adapters.Rprop, adapters.SGD, adapters.ADOPT, adapters.SOAP),
    *(adapters.Prodigy, adapters.DAdaptAdam, adapters.MuonAdamW, adapters.ScheduleFreeAdamW),
    *(adapters.ScheduleFreeSGD, adapters.Lion, adapters.SophiaG, adapters.SAM, adapters.ASAM),
]
WITHOUT = {
    *("SparseAdam", "LBFGS", "GradientFree", "OptimizerStub", "FaultTolerantOptimizer"),
    *("Dogleg", "GaussNewton", "LevenbergMarquardt", "SSBFGS", "SSBroyden"),
}
KEPT = {adapters.Adafactor, adapters.ASGD, adapters.ScheduleFreeSGD}
KEPT |= {adapters.SAM, adapters.ASAM, adapters.SGD}
"""Those without a slot that is packed, as they are made here."""


def model() -> dict[str, torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    sizes = {"embed.weight": (80, 64), "hidden.weight": (64, 72), "head.weight": (80, 64)}
    return {
        name: torch.nn.Parameter(torch.randn(*size, generator=random) / 8)
        for name, size in sizes.items()
    }


def step(opt: Any, params: Any, k: int = 0) -> None:
    random = torch.Generator().manual_seed(1 + k)
    for p in params:
        p.grad = torch.randn(p.shape, generator=random)
    if isinstance(opt, adapters.SAM):
        given = [p.grad.clone() for p in params]

        def closure() -> torch.Tensor:
            for p, g in zip(params, given, strict=True):
                p.grad = g.clone()
            return torch.zeros(())

        opt.step(closure)
    else:
        opt.step()


def packed(opt: Any, params: dict[str, Any]) -> dict[str, list[str]]:
    """The packed slots of each parameter."""
    found = {
        name: sorted(
            [key[: key.rindex(".")] for key in opt.state[p] if key.split(".")[-1] in CELLS]
        )
        for name, p in params.items()
    }
    return {name: slots for name, slots in found.items() if slots}


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_packs_its_slots(cls):
    params, exact = model(), model()
    opt = cls(params.items(), compile=False, stored="int8")
    full = cls(exact.items(), compile=False)
    for k in range(3):
        step(opt, params.values(), k)
        step(full, exact.values(), k)
    slots = packed(opt, params)
    assert list(slots) == ([] if cls in KEPT else ["hidden.weight"])
    for name in slots.get("hidden.weight", ()):
        assert name not in opt.state[params["hidden.weight"]]
    assert_same(params["head.weight"].detach(), exact["head.weight"].detach())
    moved = exact["hidden.weight"] - model()["hidden.weight"]
    off = (params["hidden.weight"] - exact["hidden.weight"]).norm() / moved.norm()
    assert (off > 0) == bool(slots)
    assert off < (0.6 if cls is adapters.Rprop else 0.1)
    assert opt.state_dict()["param_groups"] == full.state_dict()["param_groups"]


def test_every_class_that_could_has_the_keyword():
    for name in dir(adapters):
        cls = getattr(adapters, name)
        is_class = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        if is_class and name not in WITHOUT:
            assert inspect.signature(cls).parameters["stored"].default is None, name


def test_a_group_may_have_its_own():
    params = model()
    embed, *others = params.values()
    for make in (adapters.AdamW, functools.partial(adapters.Optimizer, recipe=fo.adamw)):
        groups = [{"params": others}, {"params": [embed], "stored": None}]
        opt = make(groups, compile=False, stored="int8")
        opt.add_param_group(
            {"params": [p := torch.nn.Parameter(torch.zeros(64, 64))], "stored": "int4"}
        )
        step(opt, [*params.values(), p])
        assert list(packed(opt, params)) == ["hidden.weight", "head.weight"]
        assert opt.state[p]["exp_avg.int4"].shape == (16, 128)
        saved = opt.state_dict()
        assert all("stored" not in group for group in saved["param_groups"])
        opt.load_state_dict(copy.deepcopy(saved))
        assert [group.get("stored", 0) for group in opt.param_groups] == [0, None, "int4"]
        saved["param_groups"][0]["stored"] = saved["param_groups"][2]["stored"] = "bfloat16"
        opt.load_state_dict(copy.deepcopy(saved))
        assert [group.get("stored", 0) for group in opt.param_groups] == [0, None, "int4"]
        step(opt, [*params.values(), p])


def test_a_function_says_more():
    policy = functools.partial(
        fo.stored, storage={"exp_avg": torch.bfloat16}, where="head", min_size=0, seed=None
    )
    params = model()
    opt = adapters.AdamW(params.items(), compile=False, stored=policy)
    step(opt, params.values())
    assert opt.state[params["head.weight"]]["exp_avg.bfloat16"].dtype is torch.bfloat16
    assert opt.state[params["head.weight"]]["exp_avg_sq"].dtype is torch.float32
    assert opt.state[params["hidden.weight"]]["exp_avg"].dtype is torch.float32


def test_sophias_hessian_is_packed_and_averaged():
    params, exact = model(), model()
    optimizers = [
        adapters.SophiaG(x.items(), compile=False, stored=how)
        for x, how in ((params, "int8"), (exact, None))
    ]
    for opt, own in zip(optimizers, (params, exact), strict=True):
        for k in range(3):
            step(opt, own.values(), k)
            opt.update_hessian(batch_size=100)
            before = {key: x.clone() for key, x in opt.state[own["hidden.weight"]].items()}
        opt.update_hessian([None] * 3)
        assert_same(opt.state[own["hidden.weight"]], before)
    p, q = params["hidden.weight"], exact["hidden.weight"]
    state = optimizers[0].state[p]
    rule = next(
        x.rule for x in fo.stored(fo.sophia(), "int8").placements if x.name == "scale_by_sophia"
    )
    found = opened(rule, tuple([state.get(key) for key in rule.keys]), p)
    want = optimizers[1].state[q]["hessian"]
    assert 0 < (found.hessian - want).norm() / want.norm() < 0.05
    state = fo.stored(fo.sophia(), "int8").init({"w": p.detach()})
    with pytest.raises(ValueError, match="a Hessian that is packed"):
        fo.estimators.observe_hessian(state, {"w": p.detach()})


def test_averages_of_schedule_free_stay_in_full():
    params, exact = model(), model()
    for x, stored in ((params, "int8"), (exact, None)):
        opt = adapters.ScheduleFreeAdamW(x.items(), lr=0.01, compile=False, stored=stored)
        for k in range(3):
            step(opt, x.values(), k)
        opt.eval()
    assert_close({k: p.detach() for k, p in params.items()}, exact, 5e-3)


def test_a_pattern_of_parameters_that_fits_none_is_said():
    policy = functools.partial(fo.stored, storage="int8", where="hiden")
    with pytest.warns(UserWarning, match="pattern 'hiden' of the mask matches no leaf"):
        adapters.Optimizer(model().items(), fo.adam, stored=policy)
    with pytest.warns(UserWarning, match="pattern 'heeden' of the mask matches no leaf"):
        fo.stored(fo.adam(), "int8", where="heeden").init(dict(model()))


@pytest.mark.parametrize("first", ["int8", None])
def test_another_form_after_the_first_step_is_refused(first):
    params = model()
    opt = adapters.AdamW(params.items(), compile=False, stored=first)
    step(opt, params.values())
    before = copy.deepcopy(opt.state_dict()["state"])
    for form in {"int8", "int4", None, "bfloat16"} - {first}:
        opt.param_groups[0]["stored"] = form
        with pytest.raises(RuntimeError, match=r"has exp_avg.*keep the value of the first step"):
            step(opt, params.values())
    del opt.param_groups[0]["stored"]
    opt.stored = "int4"
    with pytest.raises(RuntimeError, match="keep the value of the first step"):
        step(opt, params.values())
    assert_close(opt.state_dict()["state"], before, 0.0)
    opt.stored = first
    step(opt, params.values())
