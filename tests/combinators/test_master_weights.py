"""`master_weights`: bfloat16 parameters with the bits that they lack in a slot."""

import math
from typing import Any

import pytest
import torch
from helpers import assert_close, run, step_object, through_file
from torch import Tensor
from ways import random_tree

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.cells import CELLS, Compensated, Split
from functional_optim.core.codecs import PIECE

KINDS = ["split16", "split8", "kahan", "stochastic"]
SIZES = {"w": (40, 48), "b": (40,), "long": (9001,)}
RECIPES = {
    "adamw": lambda: fo.adamw(1e-3),
    "lamb": lambda: fo.lamb(1e-2),
    "prodigy": lambda: fo.prodigy(),
    "clip and average": lambda: fo.chain(
        fo.clip_by_global_norm(1.0), fo.adamw(1e-3), fo.params_ema(0.9)
    ),
    "muon and adamw": lambda: fo.muon_adamw(),
    "schedule free": lambda: fo.schedule_free_adamw(),
    "lookahead": lambda: fo.lookahead(fo.sgd(0.1, momentum=0.9), 2, 0.5),
}


def params_and_grads(steps: int = 5) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    grads = [random_tree(k + 1, torch.float32, SIZES) for k in range(steps)]
    return random_tree(0, torch.bfloat16, SIZES), grads


def compiled(tx: Any, params: Any, grads: Any) -> tuple[Any, Any]:
    params = {k: p.clone() for k, p in params.items()}
    step, state = fo.compile(tx), tx.init(params)
    for g in grads:
        params, state = step(g, state, params)
    return params, state


def bits(tree: Any) -> list[Tensor]:
    return [x.reshape(-1).contiguous().view(torch.uint8) for x in fo.tree.leaves(tree)]


def assert_bitwise(a: Any, b: Any) -> None:
    for x, y in zip(bits(a), bits(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("way", [run, compiled])
@pytest.mark.parametrize("name", RECIPES)
def test_with_all_bits_weights_are_those_of_float32(name, way):
    params, grads = params_and_grads()
    tx = RECIPES[name]()
    wide, state = way(tx, {k: p.float() for k, p in params.items()}, grads)
    narrow, own = way(fo.master_weights(tx), params, grads)
    if (name, way) == ("lamb", compiled):  # whose sums are taken in another order
        assert_close(fo.full_weights(narrow, own), wide, 1e-6)
        return
    assert_bitwise(fo.full_weights(narrow, own), wide)
    for k, p in wide.items():  # of two that are as near it may be either
        tie = p.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(narrow[k][~tie], p.bfloat16()[~tie])
    for key, slot in state.slots.items():
        assert_bitwise(own.slots[key], slot)


def optimizer(tx: Any, params: dict[str, Tensor], **more: Any) -> tuple[dict[str, Any], Any]:
    mine = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    return mine, adapters.Optimizer(mine.items(), lambda: tx, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_of_running_agree_and_a_resumed_run_is_bitwise_the_same(kind):
    params, grads = params_and_grads()
    grads = [{k: x.bfloat16() for k, x in g.items()} for g in grads]
    tx = fo.master_weights(fo.adamw(1e-3, weight_decay=0.1), kind, seed=3)
    known, state = run(tx, params, grads)
    for compile in (True, False):
        mine, opt = optimizer(tx, params, compile=compile)
        step_object(opt, grads[:3])
        other, loaded = optimizer(tx, {k: p.detach() for k, p in mine.items()}, compile=compile)
        loaded.load_state_dict(through_file(opt.state_dict()))
        for each in (opt, loaded):
            step_object(each, grads[3:])
        assert_near(mine, known)
        assert_bitwise(other, mine)
        for p, q in zip(mine.values(), other.values(), strict=True):
            assert_bitwise(opt.state[p], loaded.state[q])
    found, own = compiled(tx, params, grads)
    assert_near(found, known)
    for key, slot in state.slots.items():
        assert own.slots[key]["w"].dtype == slot["w"].dtype


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Kernels may differ by a bit of a float32, and so now and then by one of a bfloat16."""
    for k in b:
        assert (a[k] != b[k]).float().mean() < 0.01
        torch.testing.assert_close(a[k].float().detach(), b[k].float(), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_count(kind):
    params = {"w": torch.ones(1000, dtype=torch.bfloat16)}
    tx = fo.master_weights(fo.sgd(1.0), kind, seed=1)
    step, state, g = fo.compile(tx), tx.init(params), {"w": torch.full((1000,), -1e-5)}
    for _ in range(5000):
        params, state = step(g, state, params)
    mean = fo.full_weights(params, state)["w"].float().mean().item()
    # a compensation of 8 bits is rounded to the nearest: each update is wrong by a part of it
    assert mean == pytest.approx(1.05, abs=0.01 if kind == "kahan" else 0.002)
    alone = {"w": torch.ones(1000, dtype=torch.bfloat16)}
    u, _ = fo.sgd(1.0).update(g, fo.sgd(1.0).init(alone), alone)
    assert torch.equal(fo.apply_updates(alone, u)["w"], alone["w"])


ODD = [0.0, -0.0, 1e-45, -1e-39, 2e-38, 3.4e38, -3.4e38, 1.0, -1.00390625, 1.99999988, 0.1]


@pytest.mark.parametrize("cells", [Split(16), Split(8), Compensated()])
def test_any_number_survives(cells):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=random).to(torch.int32)
    x = torch.cat([x.view(torch.float32), torch.tensor([*ODD, math.inf, -math.inf, math.nan])])
    stored = cells.encode(x, None)
    assert stored[0].dtype is torch.bfloat16
    back = cells.decode(stored)
    if cells == Split(16):
        wrong = (back.view(torch.int32) != x.view(torch.int32)) & ~x.isnan()
        assert not wrong.any()
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back.isinf()[x.isinf()], x.isinf()[x.isinf()])
    fine = x.isfinite() & (x.abs() < 3e38) & (x.abs() > 1e-30)
    error = ((back - x).abs() / x.abs())[fine].max()
    assert error <= {Split(16): 0.0, Split(8): 2.0**-16}.get(cells, 2.0**-16)
    assert torch.equal(back.signbit()[fine], x.signbit()[fine])


def test_large_weights_of_one_kind_after_those_of_another():
    """Two kinds of cells that were equal had the same blocks."""
    p, g = torch.ones(PIECE + 1, dtype=torch.bfloat16), torch.ones(PIECE + 1)
    for kind in ("kahan", "stochastic"):
        tx = fo.master_weights(fo.sgd(1.0), kind)
        u, _ = tx.update(g, tx.init(p), p)
        assert fo.apply_updates(p, u).eq(0).all()
    assert len({Split(16), Split(8), Compensated(), *CELLS.values()}) == 3 + len(CELLS)


def test_a_parameter_set_by_hand_is_believed():
    params, grads = params_and_grads(1)
    tx = fo.master_weights(fo.sgd(1e-3))
    params, state = compiled(tx, params, grads)
    for value in (0.0, 1.0, -1e-3):
        mine = {k: torch.full_like(p, value) for k, p in params.items()}
        whole = fo.full_weights(mine, state)
        for k in mine:
            assert torch.equal(whole[k].bfloat16(), mine[k])


@pytest.mark.filterwarnings("ignore:.*but these are in float32 and float64:UserWarning")
def test_other_dtypes_are_stepped_as_without():
    params = {"w": torch.ones(5), "d": torch.ones(3, dtype=torch.float64)}
    grads = [{k: torch.ones_like(p) for k, p in params.items()}] * 3
    for kind in KINDS:
        wide, _ = run(fo.adamw(0.1), params, grads)
        mine, state = run(fo.master_weights(fo.adamw(0.1), kind), params, grads)
        assert_bitwise(mine, wide)
        assert all(x is None for k, v in state.slots.items() if "weight" in k for x in v.values())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_slots_beside_it(kind):
    params, grads = params_and_grads()
    tx = fo.stored(fo.master_weights(fo.adamw(1e-3), kind), "int8", min_size=0, where=["*"])
    other = fo.master_weights(fo.stored(fo.adamw(1e-3), "int8", min_size=0, where=["*"]), kind)
    a, state = compiled(tx, params, grads)
    b, _ = run(tx, params, grads)
    c, _ = compiled(other, params, grads)
    assert_near(a, b)
    assert set(a) == set(c)
    assert state.slots["exp_avg.int8"]["w"].dtype is torch.int8


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_without_order_are_rounded_alike(kind):
    w = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    image = w.reshape(30, 4, 5, 4).to(memory_format=torch.channels_last)
    for p in (w.t(), w[:, ::2], image, w[0, 0]):
        for tx in (
            fo.master_weights(fo.sgd(1e-2), kind),
            fo.stored(fo.sgd(1e-2, momentum=0.9), "bfloat16", where="*", min_size=0),
        ):
            g = {"w": torch.randn(p.shape, generator=torch.Generator().manual_seed(1))}
            a, _ = run(tx, {"w": p}, [g, g])
            b, _ = compiled(tx, {"w": p}, [g, g])
            mine, opt = optimizer(tx, {"w": p}, compile=False)
            step_object(opt, [{"w": g["w"].bfloat16()}] * 2)
            wanted, _ = run(tx, {"w": p}, [{"w": g["w"].bfloat16()}] * 2)
            assert torch.equal(a["w"], b["w"])
            assert torch.equal(mine["w"], wanted["w"])


def test_gradients_pass_the_rounding():
    def loss(lr: Tensor, p: Tensor, kind: str) -> Tensor:
        tx = fo.master_weights(fo.sgd(lr), kind)
        p, _ = run(tx, p, [torch.ones(3)] * 2)
        return p.float().sum()

    for kind in KINDS:
        at = torch.tensor(0.1), torch.ones(3, dtype=torch.bfloat16)
        by_lr, by_p = torch.func.grad(loss, argnums=(0, 1))(*at, kind)
        assert by_lr.item() == -6.0
        assert torch.equal(by_p, torch.ones_like(by_p))


ALONE = {
    "sgd": lambda: fo.master_weights(fo.sgd(1e-3)),
    "in a tree": lambda: fo.keep_snapshots(fo.master_weights(fo.sgd(1e-3))),
    "scheduled": lambda: fo.with_schedule(lambda lr: fo.master_weights(fo.sgd(lr)), lr=1e-3),
}


@pytest.mark.parametrize("recipe", ALONE.values(), ids=ALONE)
def test_weights_of_two_dtypes_are_found_and_loaded(recipe):
    """Also where bfloat16 has the only slot, and where a group's state is one tree."""
    made = [torch.nn.Parameter(torch.ones(3, dtype=x)) for x in (torch.float32, torch.bfloat16)]
    opt = adapters.Optimizer(made, recipe, compile=False)
    for _ in range(2):
        for p in made:
            p.grad = torch.ones_like(p)
        opt.step()
        adapters.Optimizer(made, recipe).load_state_dict(through_file(opt.state_dict()))
        both = fo.full_weights(made, opt)
        assert_close(both[1], both[0], 1e-6)


@pytest.mark.parametrize("recipe", ALONE.values(), ids=ALONE)
def test_weights_of_a_compiled_model_and_of_late_parameters_are_found(recipe):
    model, late = torch.nn.Linear(2, 1).bfloat16(), torch.nn.Parameter(torch.ones(2))
    named = [(f"_orig_mod.{name}", p) for name, p in model.named_parameters()]
    opt = adapters.Optimizer(named, recipe, compile=False)
    if recipe is ALONE["sgd"]:
        opt.param_groups[0]["params"].append(late)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    found = fo.full_weights(dict(model.named_parameters()), opt)
    assert {x.dtype for x in found.values()} == {torch.float32}


def test_kinds_are_not_taken_for_each_other():
    params, grads = params_and_grads(1)
    grads = [{k: x.bfloat16() for k, x in grads[0].items()}]
    made = {kind: fo.master_weights(fo.adamw(1e-3), kind) for kind in KINDS[:3]}
    for a, tx in made.items():
        mine, opt = optimizer(tx, params, compile=False)
        step_object(opt, grads)
        whole = fo.full_weights(mine, opt)
        wanted, state = run(tx, params, grads)
        for k, p in fo.full_weights(wanted, state).items():
            assert torch.equal(whole[k], p)
        for b, other in made.items():
            if a == b:
                continue
            with pytest.raises(ValueError, match="slots"):
                other.update(grads[0], state, wanted)
            _, loading = optimizer(other, params, compile=False)
            step_object(loading, grads)
            before = loading.state_dict()
            with pytest.raises(ValueError, match="weight_"):
                loading.load_state_dict(opt.state_dict())
            assert_bitwise(loading.state_dict()["state"], before["state"])
