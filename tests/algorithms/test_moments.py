"""What the averaging algorithms do in their first steps, at their limits, and on a schedule; the
blocks of Adam-mini; MoMo, which takes the loss, where `test_links` does not do it with its rows."""

import math

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, make_grads, make_params, run

import functional_optim as fo
from functional_optim import adapters, schedules

EXACT = 1e-12
W = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
G = [torch.tensor(x, dtype=torch.float64) for x in ([3.0, -0.1, 0.0], [2.0, 5.0, 0.0], [1.0, 1, 0])]


def steps(tx, grads=G):
    """The updates of some steps at one point."""
    state, found = tx.init(W), []
    for g in grads:
        u, state = tx.update(g, state, W)
        found.append(u)
    return found


# ---------------------------------------------------------------- first steps
@pytest.mark.parametrize("numbers", [{"clip_exponent": None}, {"clip_exponent": 0.0}, {"eps": 0.0}])
def test_the_first_step_of_adopt_starts_the_second_moment_only(numbers):
    tx = fo.scale_by_adopt(**numbers)
    u, state = tx.update(G[0], tx.init(W), W)  # which has a zero
    assert_same(u, torch.zeros_like(W))
    assert_same(state.slots["exp_avg_sq"], G[0] * G[0])


def test_adopt_clips_what_it_averages_by_a_power_of_the_finished_steps():
    small, large = torch.full_like(W, 1e-3), torch.ones_like(W)
    grads = [small, small, small, large]
    for exponent, bound in ((0.25, 3**0.25), (1.0, 3.0), (None, 1e3)):
        tx = fo.scale_by_adopt((0.0, 0.999999999), clip_exponent=exponent)
        assert_close(steps(tx, grads)[-1], torch.full_like(W, bound), 1e-6)
    at_once = steps(fo.scale_by_adopt((0.0, 0.9), clip_exponent=None), [small, large])[1]
    assert_close(at_once, torch.full_like(W, 1e3), EXACT)


def test_a_gradient_written_over_does_not_change_the_one_that_is_remembered():
    for tx in (fo.scale_by_adan(), fo.scale_by_optimistic_gradient(), fo.variance_reduction()):
        g = G[0].clone()
        _, state = tx.update(g, tx.init(W), W)
        g.zero_()
        assert_same(state.slots["previous_grad"], G[0])


# ---------------------------------------------------------------- limits
AT_ZERO = {
    "adabelief": lambda: fo.adabelief(0.1, eps=0.0),
    "adabelief-plain": lambda: fo.adabelief(0.1, eps=0.0, rectify=False),
    "acprop": lambda: fo.acprop(0.1, eps=0.0),
    "acprop-plain": lambda: fo.acprop(0.1, eps=0.0, rectify=False),
    "adopt": lambda: fo.adopt(0.1, eps=0.0),
    "madgrad": lambda: fo.madgrad(0.1, eps=0.0),
    "madgrad-memoryless": lambda: fo.madgrad(0.1, momentum=0.0, eps=0.0),
    "laprop": lambda: fo.laprop(0.1, eps=0.0),
    "yogi": lambda: fo.yogi(0.1, eps=0.0, initial_accumulator_value=0.0),
}


@pytest.mark.parametrize("name", AT_ZERO)
def test_without_an_epsilon_gradients_that_are_not_zero_make_finite_steps(name):
    tx = AT_ZERO[name]()
    params = {n: p for n, p in make_params().items() if p.numel()}
    moved, _ = run(tx, params, make_grads(params, 12))
    assert_finite(moved)
    assert not torch.equal(moved["matrix"], params["matrix"])


def test_madgrad_without_an_epsilon_leaves_an_entry_alone_that_never_has_a_gradient():
    updates = steps(fo.madgrad(0.1, eps=0.0))
    assert_finite(updates)
    assert all(u[2] == 0 for u in updates)


@pytest.mark.parametrize("recipe", [fo.lion, fo.signum, fo.sign_sgd])
def test_a_nan_in_a_gradient_is_not_taken_for_a_zero(recipe):
    bad = torch.tensor([math.nan, 1.0, -1.0], dtype=torch.float64)
    first, second = steps(recipe(0.1), [bad, G[0]])
    assert first.isnan().tolist() == [True, False, False]
    assert second.isnan().tolist() == [recipe is not fo.sign_sgd, False, False]
    guarded = fo.chain(fo.zero_nans(), recipe(0.1))
    assert_finite(steps(guarded, [bad, G[0]]))


# ---------------------------------------------------------------- numbers that change
def test_laprop_weighs_each_gradient_by_the_learning_rate_of_its_step():
    rates, (b1, b2), eps = (0.1, 0.4, 0.2), (0.5, 0.8), 1e-3
    tx = fo.laprop(lambda count: torch.tensor(rates)[int(count)].item(), (b1, b2), eps, 0.25)
    v, weighed, weights = torch.zeros_like(W), torch.zeros_like(W), 0.0
    for t, (g, rate, u) in enumerate(zip(G, rates, steps(tx), strict=True), start=1):
        v = b2 * v + (1 - b2) * g * g
        n = g / ((v / (1 - b2**t)).sqrt() + eps)
        weighed = b1 * weighed + rate * n
        weights = b1 * weights + rate
        assert_close(W + u, 0.75 * (W - rate * weighed / weights), 1e-7)


def test_warm_ups_of_ademamix_that_end_at_once_are_none():
    grads = [g for _ in range(4) for g in G]
    b = (0.5, 0.9, 0.99)
    for warmup in (None, 0, 1):
        tx = fo.ademamix(0.1, b, 3.0, beta3_warmup=warmup, alpha_warmup=warmup)
        assert_same(steps(tx, grads), steps(fo.ademamix(0.1, b, 3.0), grads))
    slow = steps(fo.ademamix(0.1, b, 3.0, beta3_warmup=5), grads)
    weak = steps(fo.ademamix(0.1, b, 3.0, alpha_warmup=5), grads)
    plain = steps(fo.ademamix(0.1, b, 3.0), grads)
    for found in (slow, weak):
        assert (found[1] - plain[1]).abs().max() > 1e-3
    assert_same(weak[5:], plain[5:])  # alpha has risen, and the averages are the same


@pytest.mark.parametrize("rectify", [False, True])
def test_acprop_has_derivatives_in_forward_mode(rectify):
    """Its first step multiplies the root of 0 by 0."""
    w = torch.ones(3, dtype=torch.float64)
    g = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def moved(lr):
        return run(fo.acprop(lr, rectify=rectify), w, [g] * 7)[0].sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    assert_close(torch.func.jacfwd(moved)(lr), torch.func.jacrev(moved)(lr), 1e-10)


# ---------------------------------------------------------------- blocks of Adam-mini
ADAM = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3}
SHAPES = {"heads": (6, 4), "rows": (3, 5), "kernel": (4, 2, 3, 3), "whole": (7,), "b.bias": (4,)}


def test_parts_of_a_projection_are_tensors_of_their_own():
    params = {"a": torch.randn(4, 3), "b": torch.randn(2, 3)}
    joined = {"ab": torch.cat([params["a"][:2], params["a"][2:], params["b"]])}
    grads = make_grads(params)
    together = [{"ab": torch.cat([g["a"], g["b"]])} for g in grads]
    alone = {"x": params["a"][:2], "y": params["a"][2:], "z": params["b"]}
    cut = [{"x": g["a"][:2], "y": g["a"][2:], "z": g["b"]} for g in grads]
    end, state = run(fo.adam_mini(**ADAM, blocks={"ab": 3}), joined, together)
    wanted, one = run(fo.adam_mini(**ADAM, blocks={"*": "tensor"}), alone, cut)
    assert_close(end["ab"], torch.cat(list(wanted.values())), 1e-6)
    found = state.slots["exp_avg_sq"]["ab"].flatten()
    assert_close(found, torch.stack(list(one.slots["exp_avg_sq"].values())), 1e-6)


def test_a_pattern_of_blocks_that_fits_nothing_is_told():
    params = {"q_proj": {"weight": torch.ones(4, 3)}}
    with pytest.warns(UserWarning, match=r"'\*\.query' of the blocks matches no leaf; .*'q_proj"):
        fo.adam_mini(blocks={"*.query": 2, "*": "tensor"}).init(params)


def test_rows_that_cannot_be_divided_are_refused_by_name():
    with pytest.raises(ValueError, match=r"3 parts of the parameter 'q.weight', .* \(4, 2\); pass"):
        fo.adam_mini(blocks={"q": 3}).init({"q": {"weight": torch.ones(4, 2)}})
    with pytest.raises(ValueError, match="3 parts of the parameter '0'"):
        adapters.AdamMini([torch.nn.Parameter(torch.ones(4, 3))], blocks={"*": 3})


def test_blocks_of_elements_are_adam():
    params = make_params()
    grads = make_grads(params)
    mini = fo.adam_mini(**ADAM, weight_decay=0.1, blocks={"*": "element"})
    with pytest.warns(DeprecationWarning, match="now called 'element'"):
        old = fo.adam_mini(**ADAM, weight_decay=0.1, blocks={"*": "entry"})
    assert_same(run(mini, params, grads)[0], run(old, params, grads)[0])
    adam = fo.adamw(**ADAM, weight_decay=0.1)
    assert_same(run(mini, params, grads)[0], run(adam, params, grads)[0])


def test_the_first_pattern_counts_and_all_else_goes_by_its_shape():
    params = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    tx = fo.adam_mini(blocks={"he*": 2, "heads": 3})
    with pytest.warns(UserWarning, match="'heads' of the blocks decides for no leaf"):
        state = tx.init(params)
    found = {name: tuple(v.shape) for name, v in state.slots["exp_avg_sq"].items()}
    assert found == {
        **{"heads": (2, 1), "rows": (3, 1), "kernel": (4, 1, 1, 1), "whole": (), "b.bias": (4,)}
    }


# ---------------------------------------------------------------- MoMo
CASES = {
    "momo": (fo.momo, {"lr": 0.3, "weight_decay": 0.1, "beta": 0.8, "lb": 0.2}),
    "momo-corrected": (fo.momo, {"lr": 0.3, "beta": 0.8, "bias_correction": True}),
    "momo-fstar": (fo.momo, {"lr": 0.3, "weight_decay": 0.1, "use_fstar": True}),
    "momo_adam": (
        fo.momo_adam,
        {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "lb": 0.2},
    ),
    "momo_adam-fstar": (fo.momo_adam, {"lr": 0.2, "eps": 1e-3, "use_fstar": True}),
}
cases = pytest.mark.parametrize("name", CASES)


def losses(steps):
    """They fall from 6 to 2, with jumps."""
    return [2 + 4 * 0.8**t + (t % 3) for t in range(steps)]


def with_values(tx, params, grads, values):
    state = tx.init(params)
    for g, value in zip(grads, values, strict=True):
        updates, state = tx.update(g, state, params, value=value)
        params = fo.apply_updates(params, updates)
    return params, state


@cases
def test_numbers_may_be_tensors_and_schedules(name):
    recipe, hyper = CASES[name]
    params, values = make_params(), losses(4)
    grads = make_grads(params, 4)
    wanted = with_values(recipe(**hyper), params, grads, values)[0]
    for turn in (lambda x: torch.tensor(x, dtype=torch.float64), schedules.constant):
        other = {**hyper, "lr": turn(hyper["lr"]), "lb": turn(hyper.get("lb", 0.0))}
        assert_close(with_values(recipe(**other), params, grads, values)[0], wanted, 1e-12)


@cases
def test_the_meta_gradient_is_the_finite_difference(name):
    recipe, hyper = CASES[name]
    params, values = make_params(), losses(3)
    grads = make_grads(params)

    def loss(lr, value):
        tx = recipe(**{**hyper, "lr": lr})
        moved, _ = with_values(tx, params, grads, [value, *values[1:]])
        return sum(p.square().sum() for p in moved.values())

    at = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.05, 3.0)]
    assert torch.autograd.gradcheck(loss, at, eps=1e-6, atol=1e-6, rtol=1e-6)


@cases
def test_zeros_move_nothing(name):
    recipe, hyper = CASES[name]
    tx, params = recipe(**{**hyper, "weight_decay": 0.0}), make_params()
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    moved, state = with_values(tx, params, [zeros] * 3, [1.0] * 3)
    assert_same(moved, params)
    assert_finite(state)
