"""First slots of packed states: never whole in float32, bitwise what the rule's own become."""

import io
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core import codecs, first_slots

Begun = namedtuple("Begun", "zeros ones weights edge column")
KINDS = ["int8", "int4", "bfloat16", "float8_e4m3fn"]
COUNT, SHAPE = 8, (512, 1024)
BYTES = 4 * 512 * 1024
"""Of one tensor in float32."""


def peak(act: Callable[[], Any]) -> int:
    """By how many bytes the memory of tensors grows at most while a function runs."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        kept = act()
    events: Any = seen.profiler
    found = [x for x in events.kineto_results.events() if x.name() == "[memory]"]
    grown = most = 0
    for event in sorted(found, key=lambda x: x.start_ns()):
        grown += event.nbytes()
        most = max(most, grown)
    del kept
    return most


def parameters() -> dict[str, torch.nn.Parameter]:
    found = {f"layers.{i}.weight": torch.nn.Parameter(torch.ones(SHAPE)) for i in range(COUNT)}
    for p in found.values():
        p.grad = torch.full(SHAPE, 0.25)
    return found


def recipe(kind: str) -> Any:
    return fo.adamw(1e-3) if kind == "float32" else fo.stored(fo.adamw(1e-3), kind)


def init(kind: str) -> Callable[[], Any]:
    params = {k: p.detach() for k, p in parameters().items()}
    return lambda: recipe(kind).init(params)


def first_step(kind: str) -> Callable[[], Any]:
    opt = adapters.Optimizer(parameters().items(), lambda: recipe(kind), compile="strict")
    return lambda: (opt.step(), opt)


def compiled(kind: str) -> Callable[[], Any]:
    tx, params = recipe(kind), {k: p.detach() for k, p in parameters().items()}
    grads = {k: torch.full(SHAPE, 0.25) for k in params}
    step = fo.compile(tx, strict=True)
    return lambda: step(grads, tx.init(params), params)


def loading(kind: str) -> Callable[[], Any]:
    opt = adapters.Optimizer(parameters().items(), lambda: recipe(kind))
    opt.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    new = adapters.Optimizer(parameters().items(), lambda: recipe(kind))

    def load() -> Any:
        file.seek(0)
        new.load_state_dict(torch.load(file))
        new.step()
        return new

    return load


@pytest.mark.parametrize("way", [init, first_step, compiled, loading])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_states_never_take_the_memory_of_float32(kind, way):
    way(kind)()  # what is made once, such as kernels
    packed, whole = peak(way(kind)), peak(way("float32"))
    assert whole >= 2 * COUNT * BYTES
    bytes_of = {"int4": 0.5, "bfloat16": 2}.get(kind, 1)
    assert packed <= (1.2 * bytes_of / 4 + 0.02) * whole


def begin(p: Tensor) -> Begun:
    edge = torch.zeros_like(p)
    edge.view(-1)[0] = 1.0
    return Begun(torch.zeros_like(p), p.new_full(p.shape, 0.3), p.clone(), edge, p.new_zeros(3))


def derived(p: Tensor) -> Begun:
    zeros = torch.zeros(p.shape, dtype=p.dtype)
    return Begun(zeros, zeros + 1.3, zeros.view(-1).view(p.shape), p * zeros, p.new_ones(3).sqrt())


def plain(p: Tensor) -> Begun:
    return Begun(torch.full_like(p, 0.7), torch.zeros_like(p), p * 2, p.abs(), p.new_ones(3))


def rule(init: Any) -> Any:
    own = fo.leafwise(init, lambda u, slots, p: (u, slots), name="begun")
    return fo.chain(own, fo.scale_by_lr(0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", [begin, derived, plain])
@pytest.mark.parametrize("shape", [(300, 301), (5,)])
def test_first_slots_are_what_the_rule_makes(monkeypatch, shape, init, kind, dtype):
    p = torch.linspace(-1, 1, shape[0] * shape[-1]).to(dtype)[: torch.Size(shape).numel()]
    p = p.reshape(shape)
    patterns = {"zeros": kind, "ones": kind, "weights": kind, "edge": kind}
    tx = fo.stored(rule(init), patterns, min_size=1, where=lambda path, p: True)
    found = tx.init({"w": p}).slots
    monkeypatch.setattr(first_slots, "LARGE", 1 << 40)
    expected = tx.init({"w": p}).slots
    assert found.keys() == expected.keys()
    for key, column in expected.items():
        x, y = found[key]["w"], column["w"]
        if y is not None:
            assert_same(x.view(torch.uint8), y.contiguous().view(torch.uint8))
            assert x.is_contiguous()


def test_slots_that_are_not_packed_have_memory_of_their_own():
    p = torch.ones(300, 301)
    tx = fo.stored(rule(plain), {"zeros": "int8"}, where=lambda path, p: True)
    slots = tx.init({"w": p}).slots
    assert slots["ones"]["w"].is_contiguous()
    assert slots["zeros.int8"]["w"].is_contiguous()
    w = torch.nn.Parameter(p)
    w.grad = torch.ones_like(w)
    opt = adapters.Optimizer([("w", w)], lambda: tx, compile=False)
    opt.step()
    assert opt.state[w]["ones"].is_contiguous()


def test_an_error_of_init_is_its_own():
    def init(p):
        raise KeyError("no such thing")

    tx = fo.stored(rule(plain), "int8", min_size=1, where=lambda path, p: True)
    placement = tx.placements[0].initialized(init)
    broken = type(tx)((placement, *tx.placements[1:]))
    with pytest.raises(KeyError, match="no such thing"):
        broken.init({"w": torch.ones(300, 301)})


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def default_dtype(request):
    """Another one, in a process that has packed nothing yet."""
    codecs._kept_of_a_block.cache_clear()
    torch.set_default_dtype(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_formats_do_not_depend_on_the_default_dtype(kind, default_dtype):
    w = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float32))
    opt = adapters.AdamW([("w", w)], lr=0.1, stored=kind, compile=False)
    w.grad = torch.ones_like(w)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert w.max() - w.min() < 1e-2  # rounded stochastically
    assert w.min() < 0.9
    half = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    fo.master_weights(fo.sgd(0.1)).init(half)
