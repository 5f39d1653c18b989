"""What the averaging algorithms do in their first steps, at their limits, and on a schedule."""

import math

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, make_grads, make_params, run

import functional_optim as fo

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
        tx = fo.acprop(lr, rectify=rectify)
        state, p = tx.init(w), w
        for _ in range(7):
            updates, state = tx.update(g, state, p)
            p = fo.apply_updates(p, updates)
        return p.sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    assert_close(torch.func.jacfwd(moved)(lr), torch.func.jacrev(moved)(lr), 1e-10)
