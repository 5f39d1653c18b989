"""Gradients through steps: differentiable=True, and pure transforms under torch.func."""

from typing import Any

import cases
import optree
import pytest
import torch
from helpers import assert_close, make_grads, run, step_object

import functional_optim as fo
from functional_optim import adapters

WARM = 4
"""Ordinary steps before those that are recorded: RAdam's rectification begins between them."""


# ---------------------------------------------------------------- differentiable=True
SIGNS = ("adamuon", "lion", "rprop", "scion-sign", "sign_sgd", "signum")
RECORDED = [
    param
    for param in cases.with_torch("meta")
    if "differentiable" in param.values[0].stock([torch.zeros(2, 2)]).defaults
    and param.values[0].name != "muon"
]
every_recorded = pytest.mark.parametrize("case", RECORDED)


def leaf(shape=(3,)):
    return torch.randn(shape, requires_grad=True)


def as_leaf(x: float) -> torch.Tensor:
    return torch.tensor(x, requires_grad=True)


def warm_state(case):
    """A parameter's state after some ordinary steps."""
    p = torch.nn.Parameter(torch.randn(3))
    opt = case.drop_in([p], compile=False, **case.hyper)
    # of one sign, so that Rprop has no gradient of 0 in its state
    step_object(opt, [[g] for g in torch.rand(WARM, 3) + 0.5])
    return dict(opt.state.get(p, {}))


def recorded_steps(case, state, keys, spec):
    """A function of parameter, gradients, slots and hyperparameters: where three steps lead."""

    def moved(p, g1, g2, g3, *rest):
        slots, values = rest[: len(keys)], rest[len(keys) :]
        p = p.clone()  # not a leaf, as in torch's own tests: a leaf cannot be moved in place
        hyper = {**case.hyper, **optree.tree_unflatten(spec, values)}
        opt = case.drop_in([p], differentiable=True, compile=False, **hyper)
        if state:
            held = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in state.items()}
            own = {k: x.clone() for k, x in zip(keys, slots, strict=True)}
            opt.state[p].update({**held, **own})
        for g in (g1, g2, g3):
            p.grad = g
            opt.step()
        return (p, *[x for x in opt.state.get(p, {}).values() if x.requires_grad])

    return moved


@pytest.mark.parametrize("start", ["new", "mid-run"])
@every_recorded
def test_gradients_of_parameters_gradients_slots_and_hyperparameters(case, start):
    """Hyperparameters as tensors, all at once."""
    state = warm_state(case) if start == "mid-run" else {}
    keys = [k for k in state if k != "step"]
    slots = [state[k].detach().clone().requires_grad_() for k in keys]
    knobs = case.knobs(as_leaf)
    leaves, spec = optree.tree_flatten(knobs)
    moved = recorded_steps(case, state, keys, spec)
    inputs = (leaf(), leaf(), leaf(), leaf(), *slots, *leaves)
    assert torch.autograd.gradcheck(moved, inputs)
    asked = [*inputs[:4], knobs["lr"]]
    *reached, slope = torch.autograd.grad(moved(*inputs)[0].sum(), asked, allow_unused=True)
    # the sign is all that Rprop reads of a gradient, and its rate when it makes its state
    assert all(g is not None for g in reached) or case.name == "rprop"
    assert (case.name, start) == ("rprop", "mid-run") or abs(slope) > 1e-3


@every_recorded
def test_recorded_steps_go_where_others_go(case):
    params = case.filled()
    grads = make_grads(params, WARM)
    ordinary = [torch.nn.Parameter(p) for p in params.values()]
    recorded = [p.clone() for p in ordinary]
    plain = case.drop_in(ordinary, compile=False, **case.hyper)
    opt = case.drop_in(recorded, differentiable=True, compile=False, **case.hyper)
    step_object(plain, grads)
    step_object(opt, grads)
    assert_close([p.detach() for p in recorded], [p.detach() for p in ordinary], 1e-12)
    for p, q in zip(recorded, ordinary, strict=True):
        assert p.requires_grad
        found = {k: x.detach() for k, x in opt.state.get(p, {}).items()}
        assert_close(found, plain.state.get(q, {}), 1e-12)


@pytest.mark.parametrize("case", [p for p in RECORDED if p.values[0].name != "rprop"])
def test_a_second_derivative_goes_through_recorded_steps(case):
    lr = as_leaf(case.hyper["lr"])
    moved = recorded_steps(case, warm_state(case), [], optree.tree_structure({"lr": 0.0}))
    inputs = [leaf() for _ in range(4)]

    def slope(lr, *inputs):
        (p, *_) = moved(*inputs, lr)
        return torch.autograd.grad(p.square().sum(), [inputs[1]], create_graph=True)[0]

    assert torch.autograd.gradcheck(slope, (lr, *inputs))


@pytest.mark.parametrize("clip", [fo.clip_by_value, fo.clip_by_global_norm])
def test_a_recipe_is_recorded_through_the_general_optimizer(clip):
    """Two parameters, decayed, clipped and averaged."""

    def recipe(lr, decay, bound, differentiable=True):
        decayed = fo.add_decayed_weights(decay)
        return fo.chain(decayed, clip(bound), fo.adamw(lr, eps=1e-3), fo.params_ema(0.5))

    def moved(lr, decay, bound, a, b, *grads):
        params = [a.clone(), b.clone()]
        opt = adapters.Optimizer(params, recipe, compile=False, lr=lr, decay=decay, bound=bound)
        for g in grads:
            params[0].grad, params[1].grad = g, 2 * g
            opt.step()
        slots = [opt.state[p][key] for p in params for key in ("exp_avg", "params_ema")]
        return (*params, *slots)

    inputs = (as_leaf(0.1), as_leaf(0.2), as_leaf(0.5), *[leaf() for _ in range(5)])
    assert torch.autograd.gradcheck(moved, inputs)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_ordinary_steps_are_not_recorded(compile):
    """Neither from a parameter nor from a rate that needs a gradient."""

    def recipe(lr):
        return fo.chain(fo.asgd(lr), fo.params_ema(0.5))

    p = leaf()
    opt = adapters.Optimizer([p], recipe, compile=compile, lr=as_leaf(0.1))
    p.grad = torch.ones_like(p)
    opt.step()
    assert not any(x.requires_grad for x in opt.state[p].values())


def test_a_compiled_step_cuts_a_state_from_the_parameters_that_it_began_with():
    """As its results are written into the old tensors, which say nothing of it."""
    tx = fo.params_ema(0.5)
    params = {"w": leaf()}
    state = tx.init(params)
    assert state.slots["params_ema"]["w"].requires_grad
    _, state = fo.compile(tx)({"w": torch.ones(3)}, state, params)
    assert not state.slots["params_ema"]["w"].requires_grad


# ---------------------------------------------------------------- pure transforms
DEGENERATE = ("soap", "soap-both-sides", "kl_soap")
"""Their first gradients have a null space here, whose basis has no slopes."""
# slopes along the numbers of every row: test_properties
every = cases.able("meta", costly=True)
PURE = [x for x in every if x.values[0].rounding == 1e-12 and x.id not in DEGENERATE]
FIXED = torch.Generator().manual_seed(7)
DATA = torch.randn(4, 6, 3, dtype=torch.float64, generator=FIXED)
SIZES = {"first": (3, 4), "second": (4, 3)}
START = {n: torch.randn(size, dtype=torch.float64, generator=FIXED) for n, size in SIZES.items()}
every_pure = pytest.mark.parametrize("case", PURE)
# torch's own rules for forward mode are scripted at their first use
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("doubles"),  # a finite difference would see the rounding of others
]
BATCH = [p for p in PURE if not p.values[0].cannot & {"vmap", "schedule"}]


def inner_loop(case, params, weights, steps=5, **hyper):
    """Train a small model on weighted examples, and say how well it does on others."""
    x, y, x_test, y_test = DATA

    def loss(params, x, y, weights):
        hidden = torch.tanh(x @ params["first"])
        return (((hidden @ params["second"] - y) ** 2).sum(1) * weights).mean()

    slope = lambda params: torch.func.grad(loss)(params, x, y, weights)  # noqa: E731
    params, _ = run(case.tx(**hyper), params, [slope] * steps)
    return loss(params, x_test, y_test, 1.0)


def start():
    return {name: x.clone() for name, x in START.items()}


def difference(f: Any, x: Any, direction: Any, h: float = 1e-6) -> torch.Tensor:
    """The central difference of f along a direction."""
    there = optree.tree_map(lambda a, v: a + h * v, x, direction)
    back = optree.tree_map(lambda a, v: a - h * v, x, direction)
    return (f(there) - f(back)) / (2 * h)


def assert_slope(f: Any, x: Any, direction: Any) -> torch.Tensor:
    """torch.func.grad and torch.func.jvp agree with the difference; returns the slope."""
    _, forward = torch.func.jvp(f, (x,), (direction,))
    gradient = torch.func.grad(f)(x)
    pairs = zip(optree.tree_leaves(gradient), optree.tree_leaves(direction), strict=True)
    slope = sum((g * v).sum() for g, v in pairs)
    assert_close(slope, difference(f, x, direction), 1e-6)
    assert_close(forward, slope, 1e-10)
    return slope


@every_pure
def test_the_slope_along_initial_parameters_and_weights_of_the_examples(case):
    """As in meta-learning of an initialization: second derivatives of the inner loss. The weights
    reach the parameters through the gradients alone."""
    torch.manual_seed(4)
    direction = optree.tree_map(torch.randn_like, start())
    slope = assert_slope(lambda p: inner_loop(case, p, torch.ones(6)), start(), direction)
    assert abs(slope) > 1e-4
    f = lambda weights: inner_loop(case, start(), weights)  # noqa: E731
    slope = assert_slope(f, torch.rand(6) + 0.5, torch.randn(6))
    assert abs(slope) > 1e-6 or case.name in SIGNS  # which read signs alone


@pytest.mark.parametrize("case", [p for p in BATCH if p.id != "kl_shampoo"])
def test_elements_without_a_gradient_have_slopes(case):
    """As the rows of an embedding that do not occur, whose second moments are 0. KL-Shampoo's
    factors have equal eigenvalues there."""
    reached = torch.tensor([[0.0], [1.0], [1.0]])

    def f(lr):
        p, _ = run(case.tx(lr=lr), start()["first"], [lambda p: reached * p.cos()] * 3)
        return p.square().sum()

    assert_slope(f, torch.tensor(case.hyper["lr"]), torch.ones(()))


@pytest.mark.parametrize(
    "recipe",
    [
        lambda b: fo.accumulate(fo.adam(0.05, (0.9, b)), every=2),
        lambda b: fo.soap(0.05, (0.8, b), eps=1e-3, precondition_frequency=2),
        lambda b: fo.kl_soap(0.05, (0.8, b), eps=1e-3),
    ],
    ids=["accumulate", "soap", "kl_soap"],
)
def test_a_variant_that_is_not_chosen_leaves_slopes_alone(recipe):
    """torch.func runs all of them, and drops the results of others."""
    W, *Gs = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0))

    def f(b):
        p, _ = run(recipe(b), W, [lambda p, g=g: g + 0.3 * p.sin() for g in Gs])
        return p.sin().sum()

    assert_slope(f, torch.tensor(0.95), torch.ones(()))


@pytest.mark.parametrize("tx", [fo.adam(1e-2), fo.madgrad(1e-2)])
def test_vmapped_steps_that_autograd_records_have_slopes(tx):
    def one(g):
        p = torch.zeros(3)
        return tx.update(g, tx.init(p), p)[0]

    g = torch.tensor([[1.0, 0.0, 2.0]] * 2, requires_grad=True)
    torch.vmap(one)(g).sum().backward()
    assert g.grad is not None
    assert g.grad.isfinite().all()


def test_the_norm_of_gradients_that_are_0_has_a_slope():
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.1))
    slopes = torch.func.grad(lambda p: tx.update(0 * p, tx.init(p), p)[0].sum())(torch.ones(3))
    assert slopes.tolist() == [0.0] * 3


def test_numbers_given_in_float64_are_not_rounded():
    """A numerical derivative along a carried number sees nothing finer than its rounding."""
    torch.set_default_dtype(torch.float32)  # until the end of this test
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    p = w.clone()
    p.grad = torch.full((2,), 0.5, dtype=torch.float64)
    opt = adapters.NAdam([w], lr=0.1, differentiable=True)
    opt.param_groups[0]["params"] = [p]
    slots = {"exp_avg": p.grad.clone(), "exp_avg_sq": p.grad.clone()}
    product = torch.tensor(0.4, dtype=torch.float64)
    opt.state[p] = {"step": torch.tensor(3.0), "mu_product": product, **slots}
    opt.step()
    mu = 0.9 * (1 - 0.5 * 0.96 ** (4 * 0.004))
    assert opt.state[p]["mu_product"].item() == pytest.approx(0.4 * mu, rel=1e-15)
