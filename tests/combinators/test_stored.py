"""`stored`: codecs by themselves, and optimizers whose slots they pack."""

import copy
import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same, run, step_object, through_file
from torch import Tensor
from ways import WAYS, by_eager_object, by_function, by_object, by_update, slots_of, step_in

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core import codecs
from functional_optim.core.cells import Bfloat16, Companded, Float8
from functional_optim.core.codecs import InBlocks, rounding_key
from functional_optim.core.storage import SlotSpec

CELLS = {
    "int8": Companded(),
    "int8, sizes": Companded(signed=False),
    "int4": Companded(4, steps=1),
    "int4, sizes": Companded(4, signed=False, steps=1),
    "e4m3": Float8(),
    "e4m3, sizes": Float8(signed=False),
    "e5m2": Float8(torch.float8_e5m2),
    "bfloat16": Bfloat16(),
}
ERRORS = {"int8": 0.02, "int4": 0.19, "e4m3": 0.04, "e5m2": 0.08, "bfloat16": 0.004}
KINDS = ["int8", "int4", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
SIZES = {"w": (40, 48), "b": (40,)}


def through(cells: Any, x: Tensor, key: float | None, block: int = 64) -> Tensor:
    own = InBlocks(cells, block)
    return own.decode(own.encode(x, key), SlotSpec(x.shape, x.dtype))


@pytest.mark.parametrize("shape", [(), (3,), (64,), (5, 40), (0, 3)])
@pytest.mark.parametrize("name", CELLS)
def test_tensors_without_data_become_what_others_do(name, shape):
    own, x = InBlocks(CELLS[name], 64), torch.zeros(shape, dtype=torch.float64)
    like = [(y.shape, y.dtype) for y in own.encode(x)]
    assert [(y.shape, y.dtype) for y in own.encode(x.to("meta"))] == like


def numbers(cells: Any, count: int = 1000) -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return x if getattr(cells, "signed", True) else x.square()


@pytest.mark.parametrize("key", [None, 5.0])
@pytest.mark.parametrize("name", CELLS)
def test_what_comes_back_is_near(name, key):
    x = numbers(CELLS[name])
    error = (through(CELLS[name], x, key) - x).norm() / x.norm()
    assert 0 < error < ERRORS[name.split(",")[0]]


def odd_blocks(count: int, size: int = 64) -> Tensor:
    """Blocks of any spread: equal numbers, single spikes, denormals, any bits, some not finite."""
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    spread = 10 ** (8 * drawn(count, 1) + 3 * drawn(count, size))
    x = (drawn(count, size) * spread).to(torch.float32)
    x[0::7] = x[0::7, :1]
    x[1::7, 1:] = 0.0
    anything = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=random).to(torch.int32)
    x[2::7] = (anything[2::7] & ((1 << 23) - 1)).view(torch.float32)
    x[3::7, 5], x[3::7, 6], x[4::7, 7] = math.inf, -math.inf, math.nan
    x[5::7] = anything[5::7].view(torch.float32)
    return x


@pytest.mark.parametrize("key", [None, 5.0])
@pytest.mark.parametrize("name", CELLS)
def test_bad_numbers_spoil_no_other_and_no_sign_is_lost(name, key):
    cells, x = CELLS[name], odd_blocks(10_000)
    if not getattr(cells, "signed", True):
        x = x.abs()
    y, finite = through(cells, x, key), x.isfinite()
    assert not y[finite].isnan().any()
    assert not y[~finite].isfinite().any()
    assert (y[finite & (x > 0)] >= 0).all()
    assert (y[finite & (x < 0)] <= 0).all()
    if not getattr(cells, "signed", True):
        assert (y[finite & (x > 0)] > 0).all()


@pytest.mark.parametrize(("cells", "steps"), [
    (Companded(), 16), (Companded(signed=False), 16),
    (Companded(4, steps=1), 2), (Companded(4, signed=False, steps=1), 2),
])  # fmt: skip
def test_codes_mean_what_checkpoints_of_0_2_0_say(cells, steps):
    codes = torch.arange(256, dtype=torch.uint8)[None]
    scale = torch.tensor([0.37])
    found = cells.decode((codes.view(torch.int8) if cells.signed else codes, scale))[0].tolist()
    for i, x in enumerate(found):
        code = i
        if cells.bits == 4:
            code = i % 256 & 15 if i < 256 else i % 256 >> 4
        width = 1 << cells.bits
        code -= width if cells.signed and code >= width // 2 else 0
        size = (1 + abs(code) % steps / steps) * 2.0 ** (abs(code) // steps) - 1
        expected = math.copysign(float(torch.tensor(size) * scale[0]), code)
        assert math.isnan(x) if abs(code) == cells.nan else x == expected


@pytest.mark.parametrize("name", CELLS)
def test_rounding_by_chance_is_right_in_the_mean(name):
    x = numbers(CELLS[name], 64) + (0 if "int4" not in name else 0.5)
    found = [through(CELLS[name], x, rounding_key(3, float(t))) for t in range(1, 1001)]
    once = (found[0] - x).norm()
    assert (torch.stack(found).mean(0) - x).norm() < 0.3 * once
    again = through(CELLS[name], x, rounding_key(3, torch.tensor(7.0, dtype=torch.float64)))
    assert_same(again, found[6])


def tensors(seed: int) -> dict[str, Tensor]:
    """Of many layouts. No size is a multiple of the block, and one is smaller."""
    random = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "plain": new(41, 50),
        "less than a block": new(5, 7),
        "transposed": new(50, 41).t(),
        "channels last": new(6, 5, 3, 3).to(memory_format=torch.channels_last),
        "every second": new(30, 22)[:, ::2],
        "expanded after": new(3, 4, 5).permute(2, 0, 1),
        "not packed": new(40),
    }


STEPPED = {"update": by_update, "compile": functools.partial(by_function, strict=True)}
STEPPED |= {"object": functools.partial(by_object, compile="strict"), "eager": by_eager_object}


def a_run(tx: Any, way: str, steps: int = 5) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and slots after some steps."""
    params, grads = tensors(0), [tensors(k + 1) for k in range(steps)]
    if way in STEPPED:
        return STEPPED[way](tx, params, grads)
    live, saved = {k: torch.nn.Parameter(p) for k, p in params.items()}, {}
    for part in (grads[: steps // 2 + 1], grads[steps // 2 + 1 :]):
        opt = adapters.Optimizer(live.items(), lambda: tx, compile=False)
        if saved:
            opt.load_state_dict(saved)
        step_object(opt, part)
        saved = through_file(opt.state_dict())
    return {k: p.detach() for k, p in live.items()}, slots_of(opt, live)


def all_but_one(path: str, p: Tensor) -> bool:
    return path != "not packed"


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_give_the_same_for_every_layout_and_a_resumed_run_is_bitwise_the_same(kind):
    """Rounding by chance goes by the place in the tensor, not in memory."""
    tx = fo.stored(fo.adamw(1e-2), kind, block_size=64, min_size=0, where=all_but_one)
    ways = ("update", "eager", "resumed", "compile", "object")
    (params, slots), *others = [a_run(tx, way) for way in ways]
    for mine, _ in others[:2]:
        assert_same(mine, params)
    for mine, own in others:
        assert_close(mine, params, 1e-4)
        for key, x in slots.items():
            for name, y in x.items():
                if y is not None:  # but for a code now and then
                    near = torch.isclose(own[key][name].float(), y.float(), 1e-4, 1e-5)
                    assert near.float().mean() > 0.95, (key, name)
    exact, _ = a_run(fo.adamw(1e-2), "update")
    assert_same(params["not packed"], exact["not packed"])
    assert 0 < (params["plain"] - exact["plain"]).norm() / exact["plain"].norm() < 0.02


def test_a_leaf_in_bfloat16_that_is_not_packed_is_not_rounded_by_chance():
    """Its slots have the dtype of packed ones."""
    params = {"w": torch.ones(40, 48), "norm": torch.ones(48, dtype=torch.bfloat16)}
    random = torch.Generator().manual_seed(3)
    exact, tx = fo.adamw(1e-2), fo.stored(fo.adamw(1e-2), "bfloat16", min_size=1000)
    state, plain = tx.init(params), exact.init(params)
    for _ in range(5):
        grads = {k: torch.randn(p.shape, generator=random).to(p.dtype) for k, p in params.items()}
        _, state = tx.update(grads, state, params)
        _, plain = exact.update(grads, plain, params)
    assert plain.slots["exp_avg"]["norm"].dtype is torch.bfloat16
    assert_same(state.slots["exp_avg"]["norm"], plain.slots["exp_avg"]["norm"])
    assert state.slots["exp_avg.bfloat16"]["norm"] is None


RECIPES = {
    "lion": fo.lion,
    "sgd": lambda: fo.sgd(0.1, momentum=0.9),
    "lamb": fo.lamb,
    "adafactor": fo.adafactor,
    "muon": fo.muon,
    "soap": fo.soap,
    "clipped": lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(1e-2), fo.params_ema(0.9)),
    "accumulated": lambda: fo.accumulate(fo.adamw(1e-2), 2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_any_rule_can_be_stored(name):
    made = RECIPES[name]()
    sizes = {k: shape for k, shape in SIZES.items() if name != "muon" or k == "w"}
    params = {k: torch.ones(*shape) for k, shape in sizes.items()}
    live = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    tx = fo.stored(made, "int8", block_size=64, min_size=1000)
    state, opt = tx.init(params), adapters.Optimizer(live.items(), lambda: tx)
    random = torch.Generator().manual_seed(4)
    for _ in range(4):
        grads = {k: torch.randn(*shape, generator=random) for k, shape in sizes.items()}
        params, state = run(tx, params, [grads], state)
        step_object(opt, [grads])
    assert_close({k: p.detach() for k, p in live.items()}, params, 1e-4)
    packed = [key for key in state.slots if key.endswith("int8")]
    assert (name == "adafactor") != bool(packed)
    assert "params_ema.int8" not in packed


@pytest.mark.parametrize("key", [None, 5.0])
@pytest.mark.parametrize("name", CELLS)
def test_pieces_of_a_large_slot_are_packed_as_the_whole(name, key, monkeypatch):
    x = torch.randn(70, 33, generator=torch.Generator().manual_seed(0)).t()
    codec = InBlocks(CELLS[name], 16, 3)
    whole = codec.encode(x, key)
    monkeypatch.setattr(codecs, "PIECE", 64)
    for a, b in zip(codec.encode(x, key), whole, strict=True):
        assert torch.equal(a.float().nan_to_num(99), b.float().nan_to_num(99))
        assert a.dtype is b.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_steps_inside_the_backward_pass_are_those_after_it(kind):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    model, other = copy.deepcopy(first), copy.deepcopy(first)
    tx = fo.stored(fo.adamw(1e-2), kind, where="*", min_size=0)
    usual = adapters.Optimizer(other.named_parameters(), lambda: tx)
    own = {p: adapters.Optimizer([(n, p)], lambda: tx) for n, p in model.named_parameters()}

    def use(p: Any) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(use)
    for _ in range(4):
        model(x).square().mean().backward()
        other(x).square().mean().backward()
        usual.step()
        usual.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(p.detach(), q.detach())
        assert_same(own[p].state[p], usual.state[q])


@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_rare_rows_of_an_embedding_make_no_large_steps(kind):
    """A second moment that became 0 would divide what is left of the momentum by ε."""
    rows, width, lr = 256, 32, 1e-3
    random = torch.Generator().manual_seed(0)
    tx = fo.stored(fo.adam(lr), kind, where="*")
    share = 1.0 / torch.arange(1.0, rows + 1)
    target = torch.randn(rows, width, generator=random)
    w = {"embed": torch.zeros(rows, width)}
    state, largest = tx.init(w), 0.0
    for _ in range(300):
        seen = torch.multinomial(share, 64, replacement=True, generator=random)
        g = torch.zeros(rows, width)
        g.index_add_(0, seen, w["embed"][seen] - target[seen])
        updates, state = tx.update({"embed": g / 64}, state, w)
        largest = max(largest, float(updates["embed"].abs().max()) / lr)
        w = fo.apply_updates(w, updates)
    assert 1 < largest <= (3 if kind != "int4" else 6)


def test_copies_of_the_parameters_and_second_moments_are_known():
    """What begins as the parameter is a copy of it; what is called a square is never negative."""
    seen = set()
    p = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for name in dir(fo):
        make = getattr(fo, name)
        if not callable(make) or not getattr(make, "__module__", "").startswith("functional_optim"):
            continue
        try:
            placements = make().placements
        except Exception:
            continue
        for rule in [x.rule for x in placements]:
            known = () if rule.init is None else rule.init(p)
            seen.add(name)
            for field, x in zip(rule.storage.fields if known else (), known, strict=True):
                if isinstance(x, Tensor) and x.shape == p.shape and torch.equal(x.float(), p):
                    assert field in rule.storage.weights, (name, field)
                if "_sq" in field or "eigenvalues" in field:
                    assert field in rule.storage.nonnegative, (name, field)
    assert {"madgrad", "galore", "apollo", "came", "kl_soap", "adamw"} <= seen


@pytest.mark.parametrize("make", [fo.schedule_free_adamw, lambda lr: fo.gpa(fo.adamw(lr))])
def test_averages_in_bfloat16_are_read(make):
    live = {"w": torch.nn.Parameter(torch.ones(64, 64))}
    tx = fo.stored(make(1e-2), {"z": "bfloat16"}, where="*")
    opt = adapters.AveragingOptimizer(live.items(), lambda: tx, compile=False)
    params = {"w": torch.ones(64, 64)}
    state = tx.init(params)
    for k in range(4):
        g = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(k))}
        params, state = run(tx, params, [g], state)
        step_object(opt, [g])
    average = fo.eval_params(state, params)["w"]
    assert (average - params["w"]).abs().max() > 1e-3
    opt.eval()
    assert torch.allclose(live["w"], average, atol=1e-3)
    assert fo.get(state, "w", "z").dtype is torch.bfloat16


def test_only_large_matrices_of_hidden_layers_are_packed():
    params = {"embed.weight": torch.zeros(64, 64), "hidden.weight": torch.zeros(64, 64)}
    params |= {"hidden.bias": torch.zeros(5000), "small.weight": torch.zeros(8, 8)}
    params |= {"head.weight": torch.zeros(64, 64)}

    def packed(**more: Any) -> list[str]:
        codes = fo.stored(fo.adam(), "int8", **more).init(params).slots["exp_avg.int8"]
        return [name for name, x in codes.items() if x is not None]

    assert packed() == ["hidden.weight"]
    assert packed(where="*.bias") == ["hidden.bias"]
    assert packed(where="*", min_size=1) == list(params)


@pytest.mark.parametrize("compile", [True, False])
def test_slots_keep_the_dtypes_that_were_asked_for(compile):
    def recipe(lr=0.1):
        return fo.slot_dtypes(fo.adamw(lr), exp_avg=torch.bfloat16, exp_avg_sq=torch.float64)

    w = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    opt = adapters.Optimizer([w], recipe, compile=compile)
    p, state = w.detach().clone(), recipe().init(w.detach())
    for _ in range(3):
        w.grad = torch.sin(3 * w.detach())
        p, state = run(recipe(), p, [w.grad], state)
        opt.step()
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    kept = opt.state[w]
    assert kept["exp_avg"].dtype is state.slots["exp_avg"].dtype is torch.bfloat16
    assert kept["exp_avg_sq"].dtype is state.slots["exp_avg_sq"].dtype is torch.float64
    torch.testing.assert_close(w.detach(), p, rtol=1e-5, atol=1e-6)
    exact, _ = run(fo.adamw(0.1), torch.linspace(-1, 1, 8), [torch.sin(torch.ones(8))])
    assert not torch.equal(exact, p)


def test_slot_dtypes_is_a_storage_of_optimizer_objects():
    """Of all leaves, whatever their size, and with sparse gradients."""
    table = torch.nn.Parameter(torch.ones(8, 2))
    how = functools.partial(fo.slot_dtypes, sum=torch.float64)
    opt = adapters.Adagrad([table], stored=how, compile=False)
    table.grad = torch.eye(8, 2).to_sparse()
    opt.step()
    assert opt.state[table]["sum"].dtype is torch.float64
    assert torch.equal(opt.state[table]["sum"].float(), torch.eye(8, 2))


@pytest.mark.parametrize("shape", [(17, 16), (256, 256), (4, 4)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn"])
def test_packed_slots_of_another_size_are_refused(kind, way, shape):
    def recipe() -> Any:
        return fo.stored(fo.adamw(0.1), kind, min_size=0, block_size=64, where="*")

    other = {"w": torch.ones(shape)}
    state = recipe().init({"w": torch.ones(16, 16)})
    with pytest.raises(ValueError, match=r"the slot 'exp_avg\..*' of the state has shape"):
        step_in(way, recipe, other, {"w": torch.ones(shape)}, state)
    assert torch.equal(other["w"], torch.ones(shape))


@pytest.mark.parametrize("name", ["StableAdamW", "NovoGrad", "MARS"])
def test_packed_slots_beside_norms_are_stepped_by_kernels(name):
    w = torch.nn.Parameter(torch.ones(64, 64))
    w.grad = torch.randn(64, 64)
    getattr(adapters, name)([("w", w)], stored="int8", compile="strict").step()


# ---------------------------------------------------------------- ends of blocks, tied weights
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_block_is_no_part_of_the_slot(kind):
    """A full tensor's first entries, and these alone, up to the scale of the last block."""
    tx = fo.stored(fo.adamw(1e-2), kind, block_size=64, min_size=0, where="*")
    g = torch.linspace(0.5, 1, 128)
    ends = []
    for size in (128, 128 - 27):
        p = {"w": torch.zeros(size, 1)}
        updates, _ = tx.update({"w": g[:size, None]}, tx.init(p), p)
        ends.append(updates["w"][:64])
    assert_same(ends[0], ends[1])
    state = tx.init({"w": torch.zeros(101, 1)})
    whole = fo.decoded(tx, state, {"w": torch.zeros(101, 1)})
    assert whole.slots["exp_avg"]["w"].shape == (101, 1)


class Mean(NamedTuple):
    mean: Tensor


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rule_makes_of_nothing_is_no_part_of_the_last_block(kind):
    """Behind the end of the tensor the gradient is 0, and this rule's slot would be large."""

    def update(g, slots, p):
        mean = slots.mean + (g - 1)
        return mean, Mean(mean)

    own = fo.leafwise(lambda p: Mean(torch.zeros_like(p)), update, name="from_one")
    tx = fo.stored(fo.chain(own, fo.scale_by_lr(0.1)), kind, block_size=64, min_size=0, where="*")
    p = {"w": torch.zeros(101, 1)}
    g = {"w": 1 + torch.linspace(1e-3, 1e-2, 101)[:, None]}
    _, expected = tx.update(g, tx.init(p), p)
    _, found = fo.compile(tx, strict=True)(g, tx.init(p), p)
    assert found.slots.keys() == expected.slots.keys()
    for key, column in expected.slots.items():
        if column["w"] is not None:
            assert_same(found.slots[key]["w"].float(), column["w"].float())
