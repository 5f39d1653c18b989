"""Each link against its published formula, written once more in plain torch; and its errors."""

import math

import pytest
import torch
from helpers import assert_close, assert_same, run

import functional_optim as fo
from functional_optim import projections

EXACT = 1e-12


def tree(seed=0):
    torch.manual_seed(seed)
    shapes = {"kernel": (2, 3, 2, 2), "matrix": (3, 4), "scalar": (), "vector": (5,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def once(tx, grads, params, **given):
    return tx.update(grads, tx.init(params), params, **given)[0]


def flat(x):
    return torch.cat([y.reshape(-1) for y in x.values()])


# ---------------------------------------------------------------- averages and decay
def test_three_kinds_of_weight_decay():
    p, g, lr, wd = tree(), tree(1), 0.1, 0.3
    adapt, descend = fo.scale(2.0), fo.scale_by_lr(lr)
    coupled = once(fo.chain(fo.add_decayed_weights(wd), adapt, descend), g, p)
    decoupled = once(fo.chain(adapt, fo.add_decayed_weights(wd), descend), g, p)
    alone = once(fo.chain(adapt, descend, fo.add_decayed_weights(wd, independent=True)), g, p)
    for name, x in p.items():
        assert_close(coupled[name], -lr * 2 * (g[name] + wd * x), EXACT)
        assert_close(decoupled[name], -lr * (2 * g[name] + wd * x), EXACT)
        assert_close(alone[name], -lr * 2 * g[name] - wd * x, EXACT)


def test_decays_of_what_a_step_leads_to():
    p, g, lr, wd = tree(), tree(1), 0.1, 0.3
    after = once(fo.chain(fo.scale_by_lr(lr), fo.decay_after_step(wd)), g, p)
    proximal = once(fo.proximal_step(lr, wd), g, p)
    for name, x in p.items():
        reached = x - lr * g[name]
        assert_close(x + after[name], (1 - wd) * reached, EXACT)
        assert_close(x + proximal[name], reached / (1 + lr * wd), EXACT)
    for tx in (fo.decay_after_step(wd), fo.proximal_step(lr, wd)):
        with pytest.raises(ValueError, match="works on the step"):
            fo.chain(tx, fo.scale_by_lr(lr))
    assert fo.decay_after_step(0.0).placements == ()


def test_variance_reduction_clips_each_tensor_and_copies_the_gradient():
    tx, p = fo.variance_reduction(0.2, 0.5, max_norm=3.0), tree()
    state, before = tx.init(p), fo.tree.map(torch.zeros_like, p)
    for t in range(1, 4):
        g = fo.tree.map(lambda x: x.clone(), tree(t))
        kept = fo.tree.map(lambda x: x.clone(), g)
        u, state = tx.update(g, state, p)
        for name, x in kept.items():
            c = x + 0.2 * (x - before[name])
            assert_close(u[name], c * min(1.0, 3.0 / float(c.norm())), EXACT)
        for x in g.values():
            x.zero_()  # as zero_grad(set_to_none=False) does
        before = kept
    assert u["kernel"].norm() < 3 + EXACT < (u["kernel"].numel()) ** 0.5
    assert u["scalar"].abs() < 3


def test_a_scheduled_decay_leaves_the_state_as_it_is():
    p = tree()
    plain = fo.add_decayed_weights(0.5).init(p)
    slow = fo.add_decayed_weights(fo.schedules.linear(0.5, 0.0, 4))
    state = slow.init(p)
    assert_same(state, plain)
    u, state = slow.update(fo.tree.map(torch.zeros_like, p), state, p)
    u, state = slow.update(fo.tree.map(torch.zeros_like, p), state, p)
    assert_close(u["matrix"], 0.375 * p["matrix"], EXACT)
    assert fo.get(state, "weight_decay") == 0.375


LAST = [fo.keep_params_nonnegative, lambda: fo.add_decayed_weights(0.1, independent=True)]
LAST += [lambda: fo.keep_params_in(projections.l2_ball, scale=1.0)]


@pytest.mark.parametrize("last", LAST)
def test_a_learning_rate_after_what_works_on_the_step_is_refused(last):
    name = last().placements[0].name
    with pytest.raises(ValueError, match=f"scale_by_lr stands after {name}.*put {name} after"):
        fo.chain(last(), fo.scale_by_lr(0.1))
    with pytest.raises(ValueError, match="works on the step"):
        fo.chain(last(), fo.add_decayed_weights(0.1), fo.sgd(0.1))
    fo.chain(fo.scale_by_lr(0.1), last())
    parts = {"a": fo.chain(fo.sgd(0.1), last()), "b": fo.sgd(0.1)}
    fo.partition(parts, {"x": "a", "*": "b"})  # on other leaves


# ---------------------------------------------------------------- sizes
def test_sign_keeps_a_nan():
    g = torch.tensor([-3.0, 0.0, -0.0, 2e-30, math.inf, math.nan])
    u = once(fo.sign(), g, torch.zeros(6))
    assert u.isnan().tolist() == [False] * 5 + [True]
    assert_same(u[:5], torch.tensor([-1.0, 0.0, 0.0, 1.0, 1.0]))


def test_centralize():
    g = tree(1)
    u = once(fo.centralize(), g, tree())
    assert_close(u["matrix"], g["matrix"] - g["matrix"].mean(1, keepdim=True), EXACT)
    assert_close(u["kernel"], g["kernel"] - g["kernel"].mean((1, 2, 3), keepdim=True), EXACT)
    assert_same((u["vector"], u["scalar"]), (g["vector"], g["scalar"]))
    zero = fo.tree.map(torch.zeros_like, g)
    assert_same(once(fo.normalize(eps=0.0), zero, g), zero)


def test_adaptive_grad_clip():
    g, p = tree(1), tree()
    p["matrix"][0] = 0  # the least norm counts
    g["vector"] *= 0.01  # is not clipped
    u = once(fo.adaptive_grad_clip(0.3, eps=0.05), g, p)
    for name, x in g.items():
        rows, weights = (y.reshape(len(y) if y.dim() > 1 else 1, -1) for y in (x, p[name]))
        for i, (row, w) in enumerate(zip(rows, weights, strict=True)):
            most = 0.3 * max(w.norm(), 0.05)
            expected = row * (most / row.norm()) if row.norm() > most else row
            assert_close(u[name].reshape(rows.shape)[i], expected, EXACT)
    assert_same(u["vector"], g["vector"])


def test_scale_by_trust_ratio_is_1_beside_zeros():
    g, p = tree(1), tree()
    p["vector"], g["scalar"] = torch.zeros_like(p["vector"]), torch.zeros_like(g["scalar"])
    u = once(fo.scale_by_trust_ratio(), g, p)
    for name, x in g.items():
        null = name in ("vector", "scalar")
        assert_close(u[name], x if null else x * p[name].norm() / x.norm(), EXACT)


def test_clip_by_trust_ratio_shortens_what_is_longer_than_its_parameter():
    p = {"short": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)}
    for size, kept in ((0.5, 0.5), (2.0, 1.0)):
        g = {name: torch.tensor([0.0, 5.0 * size]) for name in p}
        u = once(fo.clip_by_trust_ratio(), g, p)
        assert_close(u, {"short": torch.tensor([0.0, 5.0 * kept]), "zero": g["zero"]}, 1e-6)
    u = once(fo.clip_by_trust_ratio(0.1), {"w": torch.tensor([0.0, 5.0])}, {"w": p["short"]})
    assert_close(u["w"], torch.tensor([0.0, 0.5]), 1e-6)


def test_keep_norms_within_is_a_ball_of_the_first_norm():
    p, first = tree(), {name: x.norm() for name, x in tree().items()}
    grads = [fo.tree.map(lambda x: 0.4 * x, tree(seed)) for seed in range(1, 6)]
    tx = fo.chain(fo.scale_by_lr(1.0), fo.keep_norms_within(1.1))
    moved, state = run(tx, p, grads)
    bounded = 0
    for name, x in p.items():
        for g in grads:
            x = x - g[name]
            bounded += bool(x.norm() > 1.1 * first[name])
            x = x * min(1.0, 1.1 * first[name] / x.norm())
        assert_close(moved[name], x, EXACT)
    assert_close(state.slots["start_norm"], first, EXACT)
    assert bounded > 3


def test_hyperball_walks_on_the_sphere_of_the_first_norm():
    p, first = tree(), {name: x.norm() for name, x in tree().items()}
    grads = [tree(seed) for seed in range(1, 6)]
    moved, _ = run(fo.chain(fo.trace(0.9), fo.hyperball(0.3)), p, grads)
    for name, x in p.items():
        b, R = torch.zeros_like(x), first[name]
        for g in grads:
            b = 0.9 * b + g[name]
            x = x - 0.3 * R * b / b.norm()
            x = R * x / x.norm()
        assert_close(moved[name], x, EXACT)
    w = torch.tensor([3.0, 4.0])
    for direction, start in ((torch.zeros(2), w), (w, torch.zeros(2))):
        u = once(fo.hyperball(0.3), {"w": direction}, {"w": start})
        assert_close(u["w"], torch.zeros(2), 1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        *(fo.clip_by_block_rms(1.0), fo.adaptive_grad_clip(0.1), fo.scale_by_trust_ratio()),
        *(fo.clip_by_trust_ratio(), fo.scale_by_lars(0.1), fo.scale_by_novograd()),
        *(fo.keep_norms_within(1.1), fo.hyperball(0.1)),
    ],
)
def test_derivatives_at_zero_are_finite(tx):
    for p in (torch.zeros(2, 3), torch.ones(2, 3)):
        for slope in torch.func.jacrev(lambda g, p: once(tx, g, p), (0, 1))(torch.zeros(2, 3), p):
            assert slope.isfinite().all()


def test_orthogonalize_is_what_muon_does():
    torch.manual_seed(0)
    p, grads = {"w": torch.randn(6, 4)}, [{"w": torch.randn(6, 4)} for _ in range(3)]
    for adjust in ("original", "match_rms_adamw"):
        turn = fo.orthogonalize(scale=adjust)
        tx = fo.chain(fo.ema(0.95, debias=False), turn)
        muon = fo.scale_by_muon(0.95, nesterov=False, adjust_lr_fn=adjust)
        assert_same(run(tx, p, grads)[0], run(muon, p, grads)[0])
    u = once(fo.orthogonalize(), grads[0]["w"], p["w"])
    sizes = torch.linalg.svdvals(u)
    assert ((sizes > 0.6) & (sizes < 1.3)).all()
    U, _, V = torch.linalg.svd(grads[0]["w"], full_matrices=False)
    assert torch.linalg.matrix_norm(u - U @ V) < 0.8  # five steps come within 0.3 of each value


# ---------------------------------------------------------------- constraints
def test_zero_nans_counts_over_all_leaves():
    tx, p = fo.zero_nans(), tree()
    g, state = tree(1), tx.init(p)
    g["matrix"][0, 1], g["vector"][2:4], g["vector"][0] = math.nan, math.nan, math.inf
    u, state = tx.update(g, state, p)
    assert u["vector"][0] == math.inf
    assert fo.get(state, "nan_count") == fo.get(state, "total_nan_count") == 3
    _, state = tx.update(tree(1), state, p)
    assert (fo.get(state, "nan_count"), fo.get(state, "total_nan_count")) == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_stay_nonnegative_whatever_rounding(dtype):
    torch.manual_seed(0)
    p, u = torch.rand(1000).to(dtype), torch.randn(1000)
    tx = fo.keep_params_nonnegative()
    moved = fo.apply_updates(p, once(tx, u, p))
    assert (moved >= 0).all()
    assert_same(moved, torch.where(p.float() + u < 0, 0.0, p.float() + u).to(dtype))


def test_a_projection_leaves_what_lies_in_its_set():
    u, p = torch.tensor([0.1, 0.7]), torch.tensor([0.2, 0.7])
    tx = fo.keep_params_in(projections.box, lower=0.0, upper=1.0)
    got = once(tx, u, p)
    assert got[0] == u[0]
    assert_close(fo.apply_updates(p, got), torch.tensor([0.3, 1.0]), 1e-6)


def test_the_numbers_of_a_projection_are_hyperparameters():
    p, u = torch.zeros(4), torch.ones(4)
    tx = fo.keep_params_in(projections.l2_ball, scale=fo.schedules.linear(1.0, 0.0, 2))
    first, state = tx.update(u, tx.init(p), p)
    second, state = tx.update(u, state, p)
    assert_close(torch.stack([first.norm(), second.norm()]), torch.tensor([1.0, 0.5]), 1e-6)
    assert fo.get(state, "scale") == 0.5
    radii = torch.tensor([0.5, 1.0])
    ball = projections.l2_ball
    got = torch.vmap(lambda r: once(fo.keep_params_in(ball, scale=r), u, p).norm())(radii)
    assert_close(got, radii, 1e-6)


def test_a_projection_of_ones_own():
    def halfspace(x, bound):
        return x - ((x.sum() - bound).clamp(min=0.0) / x.numel())

    p, u = torch.zeros(2), torch.tensor([3.0, 1.0])
    tx = fo.keep_params_in(halfspace, bound=2.0)
    assert_same(once(tx, u, p), torch.tensor([2.0, 0.0]))
    for said in (True, False):
        with pytest.warns(DeprecationWarning, match=r"elementwise=\.\.\.\) is deprecated"):
            tx = fo.keep_params_in(halfspace, elementwise=said, bound=2.0)
        assert_same(once(tx, u, p), torch.tensor([2.0, 0.0]))


# ---------------------------------------------------------------- Polyak, cautious
@pytest.mark.parametrize("variant", ["sps", "sps+"])
@pytest.mark.parametrize("value", [0.05, 1.5, 1e9])
def test_scale_by_polyak(variant, value):
    g, p = tree(1), tree()
    u = once(fo.scale_by_polyak(0.3, 0.7, 0.2, variant), g, p, value=value)
    gap = max(value - 0.3, 0.0) if variant == "sps+" else value - 0.3
    assert_close(flat(u), flat(g) * min(gap / (flat(g).square().sum() + 0.2), 0.7), EXACT)
    zero = fo.tree.map(torch.zeros_like, p)
    assert_same(once(fo.scale_by_polyak(), zero, p, value=value), zero)
    down = once(fo.polyak_sgd(0.7, 0.5, 0.3, 0.2, variant), g, p, value=value)
    assert_close(flat(down), -0.5 * flat(u), EXACT)


def by_hand(tx, params, grads):
    """`cautious` around any transformation, from outside."""
    state = tx.init(params)
    for g in grads:
        u, state = tx.update(g, state, params)
        kept = {}
        for name, x in u.items():
            mask = (x * g[name] > 0).double()
            kept[name] = x * mask / mask.mean().clamp(min=1e-3)
        params = {n: p - 0.1 * kept[n] for n, p in params.items()}
    return params


def whole():
    """A transformation that is not made of rules."""
    return fo.GradientTransformation(
        lambda params: {"m": fo.tree.map(torch.zeros_like, params)},
        lambda grads, state, params=None: (
            m := fo.tree.map(lambda a, g: 0.9 * a + g, state["m"], grads),
            {"m": m},
        ),
    )


@pytest.mark.parametrize(
    "inner",
    [
        fo.identity(),
        fo.trace(0.9),
        fo.chain(fo.add_decayed_weights(0.5), fo.trace(0.9), fo.clip_by_global_norm(1.0)),
        fo.masked(fo.trace(0.9), "matrix"),
        fo.partition({"a": fo.trace(0.9), "b": fo.scale_by_adam()}, {"matrix": "a", "*": "b"}),
        fo.conditionally_transform(fo.trace(0.9), lambda step: step % 2 == 0),
        whole(),
    ],
    ids=["identity", "trace", "chain", "masked", "partition", "gate", "whole"],
)
def test_cautious_looks_back_over_whatever_it_wraps(inner):
    p, grads = tree(), [tree(i) for i in range(1, 5)]
    tx = fo.chain(fo.cautious(inner), fo.scale_by_lr(0.1))
    assert_close(run(tx, p, grads)[0], by_hand(inner, p, grads), EXACT)
    above = fo.masked(fo.chain(fo.scale(2.0), fo.cautious(inner)), ["*"])
    tx = fo.chain(above, fo.scale_by_lr(0.1))
    doubled = [fo.tree.map(lambda g: 2 * g, g) for g in grads]
    assert_close(run(tx, p, grads)[0], by_hand(inner, p, doubled), EXACT)


def test_cautious_behind_a_gate_sees_what_passes_it():
    p, (a, b) = tree(), [tree(1), tree(2)]
    inner = fo.chain(fo.cautious(fo.trace(0.9)), fo.scale_by_lr(0.1))
    got, _ = run(fo.accumulate(inner, every=2), p, [a, b, b, a])
    mean = fo.tree.map(lambda x, y: (x + y) / 2, a, b)
    assert_close(got, run(inner, p, [mean, mean])[0], EXACT)
