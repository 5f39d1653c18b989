"""Steps inside of something: autocast, inference mode, tracers and transforms of torch.func; steps
by lazily conjugated gradients, and late ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, clone, copy_of, run, step_object
from matrix_recipes import made
from objects import DROP_INS, parameters
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from undeclared import WAYS

import functional_optim as fo
from functional_optim import adapters

EXACT = 1e-12
SHAPE = (3, 2)

each_way = pytest.mark.parametrize("way", WAYS)
either_way = pytest.mark.parametrize("donate", [True, False])
compiled_pairs = pytest.mark.parametrize("pair", parameters([DROP_INS[1], DROP_INS[3]]))


def traced() -> Any:
    """A rule that measures a product."""

    def reduce(u: Tensor, slots: Any, p: Tensor) -> Any:
        return ((u @ u.mT).trace(),)

    return fo.leafwise(None, lambda u, s, p, total: (-u / total, s), reduce=reduce)


NAMES = ("APOLLO", "GaLore", "KLShampoo", "KLSOAP", "MuonAdamW", "PSGDKron", "Shampoo", "SOAP")
RULES: dict[str, Callable[[], Any]] = {
    **{name: made(name) for name in NAMES},
    "products": lambda: fo.leafwise(None, lambda u, slots, p: (-0.1 * u @ u.mT @ u, slots)),
    "measured": traced,
}


def stepped(tx: Any, way: str, start: Tensor, grads: list[Tensor]) -> Tensor:
    """A parameter after steps by these gradients."""
    return WAYS[way](tx, {"w": start.clone()}, [{"w": g} for g in grads])[0]["w"]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4)]


@each_way
@pytest.mark.parametrize("name", RULES)
def test_nothing_is_cast_inside_of_autocast(name, way):
    start, *grads = random(6, 4)
    plain = stepped(RULES[name](), way, start, grads)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(stepped(RULES[name](), way, start, grads), plain)


@each_way
@pytest.mark.parametrize("recipe", [fo.adamw, fo.muon])
def test_steps_in_inference_mode_are_those_outside(recipe, way):
    start, *grads = random(6, 4)
    plain = stepped(recipe(0.1), way, start, grads)
    with torch.inference_mode():
        assert torch.equal(stepped(recipe(0.1), way, start.clone(), grads), plain)


LAZY: dict[str, Callable[[], Any]] = {
    "sgd": lambda: fo.sgd(0.1, momentum=0.9),
    "adamw": lambda: fo.adamw(0.1),
    "clip": lambda: fo.chain(fo.clip_by_global_norm(0.5), fo.sgd(0.1)),
}


@each_way
@pytest.mark.parametrize("name", LAZY)
def test_gradients_that_are_lazily_conjugated_or_negated(name, way):
    start, *grads = random(5, dtype=torch.complex64)
    lazy = [g.conj() for g in grads]
    negated = [g.imag for g in lazy]
    assert all(g.is_conj() for g in lazy)
    assert all(g.is_neg() for g in negated)
    plain = stepped(LAZY[name](), way, start, [g.resolve_conj() for g in lazy])
    assert torch.equal(stepped(LAZY[name](), way, start, lazy), plain)
    plain = stepped(LAZY[name](), way, start.real, [g.resolve_neg() for g in negated])
    assert torch.equal(stepped(LAZY[name](), way, start.real, negated), plain)


@pytest.mark.parametrize("compile", [True, False])
def test_a_count_that_float32_does_not_hold_is_saved_in_float64(compile):
    def made() -> tuple[Any, Any]:
        w = torch.nn.Parameter(torch.ones(3))
        w.grad = torch.ones(3)
        return w, adapters.AdamW([w], lr=0.1, compile=compile)

    w, opt = made()
    opt.step()
    saved = opt.state_dict()
    saved["state"][0]["step"] = torch.tensor(float(2**24 - 2))
    opt.load_state_dict(saved)
    counts = []
    for _ in range(5):
        opt.step()
        counts.append(opt.state[w]["step"].clone())
    assert [int(x) - 2**24 for x in counts] == [-1, 0, 1, 2, 3]
    assert [x.dtype for x in counts[1:]] == [torch.float64] * 4
    again, other = made()
    other.load_state_dict(opt.state_dict())
    other.step()
    assert int(other.state[again]["step"]) == 2**24 + 4


# ---------------------------------------------------------------- where a kernel must not run
def doubles(n: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"matrix": torch.randn(SHAPE, dtype=torch.float64)} for _ in range(n)]


def pair_after(pair, grads):
    """A pair over one matrix; ours has its kernel, and has made the steps."""
    ours, mine, theirs, other = pair.make({"matrix": torch.ones(SHAPE, dtype=torch.float64)})
    ours.compile = True
    step_object(ours, grads)
    return ours, mine, theirs, other


@compiled_pairs
def test_a_step_that_make_fx_traces_is_in_its_graph(pair):
    """With its step count: a graph that is run again counts on."""
    grads = doubles(6)
    ours, mine, theirs, other = pair_after(pair, grads[:2])

    def step(g):
        mine[0].grad = g
        ours.step()

    graph = make_fx(step)(grads[2]["matrix"].clone())  # tracing is a step, too
    with torch.no_grad():
        for g in grads[3:5]:
            graph(g["matrix"])
    step_object(ours, grads[5:])
    step_object(theirs, grads)
    assert_close(copy_of(mine), copy_of(other), EXACT)


@compiled_pairs
def test_a_step_inside_functionalize(pair):
    """Its tensors have no memory: a kernel would read at address 0."""
    grads = doubles(3)
    ours, mine, theirs, other = pair_after(pair, grads[:2])
    step_object(theirs, grads[:2])

    def moved(p, g, opt):
        opt.param_groups[0]["params"] = [p]
        opt.state.clear()
        p.grad = g
        opt.step()
        return p.clone()

    results = [
        torch.func.functionalize(lambda p, g, opt=opt: moved(p, g, opt))(
            known[0].detach().clone(), grads[2]["matrix"]
        )
        for opt, known in ((ours, mine), (theirs, other))
    ]
    assert_close(results[0], results[1], EXACT)


def by_object(w):
    p = w.clone()
    p.grad = 2 * w
    adapters.SGD([p], lr=0.25, differentiable=True).step()
    return p


def by_function(w):
    """One that does not donate: what it wrote into its arguments would be lost."""
    tx = fo.sgd(lr=0.25)
    moved, _ = fo.compile(tx, donate=False)({"w": 2 * w}, tx.init({"w": w}), {"w": w})
    return moved["w"]


@pytest.mark.parametrize("step", [by_object, by_function])
def test_a_gradient_of_torch_func_goes_through_a_step(step):
    w = torch.tensor([1.0, -3.0], dtype=torch.float64)
    assert_close(torch.func.grad(lambda w: step(w).square().sum())(w), w / 2, EXACT)  # to w / 2


def in_place(lr, w, around=lambda tx: tx):
    """The sum of the parameters after a step into a copy of them."""
    tx, p = around(fo.sgd(lr=lr)), w.clone()
    return fo.compile(tx)(torch.ones_like(w), tx.init(p), p)[0].sum()


def test_a_step_in_place_says_that_it_has_no_derivative():
    """Its results were constants: the slope along a rate was 0, without a word."""
    w, lr = torch.ones(3, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    batched = torch.vmap(in_place, in_dims=(None, 0))
    for f, x in (
        (lambda lr: in_place(lr, w), lr),
        (lambda w: in_place(0.25, w), w),
        (lambda lr: batched(lr, w.expand(2, 3)).sum(), lr),
    ):
        with pytest.raises(RuntimeError, match=r"no derivative; pass donate=False to fo\.compile"):
            torch.func.grad(f)(x)
    whole = lambda lr: in_place(lr, w, fo.flatten)  # noqa: E731 a step of trees is not in place
    assert torch.func.grad(whole)(lr) == -3
    _, tangent = torch.func.jvp(lambda lr: in_place(lr, w), (lr,), (torch.ones_like(lr),))
    assert tangent == -3
    assert torch.func.grad(lambda x: x * in_place(lr, w))(lr) == 2.25  # of constants


@either_way
def test_a_compiled_step_that_make_fx_traces_is_in_its_graph(donate):
    tx = fo.adamw(lr=0.1)
    params = {"matrix": torch.ones(SHAPE, dtype=torch.float64)}
    first, *rest = doubles(3)
    step = fo.compile(tx, donate=donate)
    graph = make_fx(step)(first, tx.init(params), clone(params))
    got = clone((params, tx.init(params)))
    for g in rest:
        got = graph(g, got[1], got[0])
    assert_close(got, run(tx, params, rest), EXACT)


@either_way
@pytest.mark.parametrize("tx", [fo.adamw(lr=0.1), fo.nadam(lr=0.1)], ids=["adamw", "carry"])
def test_a_compiled_step_under_vmap(donate, tx):
    params, grads = ({"w": torch.randn(4, *SHAPE, dtype=torch.float64)} for _ in range(2))
    state = torch.vmap(tx.init)(params)
    held = clone(params)
    got, after = torch.vmap(fo.compile(tx, donate=donate))(grads, state, held)
    for i in range(4):
        want, _ = run(tx, {"w": params["w"][i]}, [{"w": grads["w"][i]}])
        assert_close({"w": got["w"][i]}, want, EXACT)
    assert_close(held, got if donate else params, 0.0)
    assert after.step.tolist() == [1] * 4
