"""lookahead, flatten and with_schedule against the formulas by hand."""

import pytest
import torch
from combined import decayed
from helpers import assert_close, assert_same, clone, make_grads, make_params, run

import functional_optim as fo
from functional_optim.adapters import Optimizer

DECAYING = fo.schedules.linear(1.0, 0.0, 8)


def test_lookahead_is_the_papers_algorithm():
    params, grads = make_params(), make_grads(make_params(), 10)
    got, state = run(fo.lookahead(fo.adam(0.1), 3, 0.4), params, grads)
    tx, slow, fast = fo.adam(0.1), clone(params), clone(params)
    inner = tx.init(fast)
    for i, g in enumerate(grads):
        updates, inner = tx.update(g, inner, fast)
        fast = fo.apply_updates(fast, updates)
        if i % 3 == 2:
            slow = fo.tree.map(lambda a, b: a + 0.4 * (b - a), slow, fast)
            fast = clone(slow)
    assert_close(got, fast, 1e-12)
    assert_close(state.slots["slow_params"], slow, 1e-12)


@pytest.mark.parametrize(
    "around",
    [fo.flatten, lambda tx: fo.cautious(fo.flatten(tx)), lambda tx: fo.with_schedule(lambda: tx)],
)
def test_extra_arguments_pass_through(around):
    tx = fo.chain(around(fo.scale_by_polyak()), fo.params_ema(0.9))
    w, g = torch.ones(2), torch.ones(2)
    updates, _ = tx.update(g, tx.init(w), w, value=1.0)
    assert updates.tolist() == [0.5, 0.5]  # value / ‖g‖² of g
    with pytest.raises(TypeError, match="value"):
        tx.update(g, tx.init(w), w)


def test_flatten_shows_one_vector():
    seen = []

    def update(grads, state, params=None):
        seen.append((grads, params))
        return -2 * grads, state

    inner = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
    params = {"a": torch.zeros(2), "b": {"c": torch.ones(1, 2)}}
    grads = {"a": torch.tensor([1.0, 2.0]), "b": {"c": None}}
    updates, _ = fo.flatten(inner).update(grads, fo.EmptyState(), params)
    assert seen[0][0].tolist() == [1.0, 2.0, 0.0, 0.0]
    assert seen[0][1].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert updates["a"].tolist() == [-2.0, -4.0]
    assert updates["b"]["c"] is None


def test_vectors_of_one_tree_get_independent_noise():
    noise = fo.add_noise(1.0, 0.0, seed=0)
    tx = fo.partition({"a": fo.flatten(noise), "b": fo.flatten(noise)}, {"a": "a", "b": "b"})
    params = {"a": torch.zeros(64), "b": torch.zeros(64)}
    found = tx.update(params, tx.init(params), params)[0]
    assert abs(torch.corrcoef(torch.stack([found["a"], found["b"]]))[0, 1]) < 0.5


def residuals(params):
    return params["a"] @ params["b"] - torch.tensor([3.0, -1.0], dtype=torch.float64)


def loss(params):
    return residuals(params).square().sum()


def value_and_grad(params):
    grads, value = torch.func.grad_and_value(loss)(params)
    return value, grads


FUNCTIONS = {"grad_fn": (fo.sam(fo.sgd(0.1)), torch.func.grad(loss))}
FUNCTIONS |= {"value_and_grad": (fo.lbfgs(), value_and_grad)}
FUNCTIONS |= {"residual_fn": (fo.levenberg_marquardt(), residuals)}
MATRICES = {"a": torch.tensor([[1.0, 2.0], [0.5, -1.0]]).double()}
MATRICES |= {"b": torch.tensor([0.3, 0.1], dtype=torch.float64)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_tree_are_functions_of_the_vector(name):
    tx, fn = FUNCTIONS[name]
    value, grads = value_and_grad(MATRICES)
    given = grads if tx.reads_gradients else None
    extra = {name: fn, **({"value": value} if "value" in tx.extra else {})}
    pair = (fo.flatten(tx), tx)
    found, expected = (t.update(given, t.init(MATRICES), MATRICES, **extra)[0] for t in pair)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("tx", [fo.sam(fo.sgd(0.1)), fo.lbfgs()])
def test_functions_of_one_micro_batch_are_refused(tx):
    with pytest.raises(TypeError, match="that of the last micro-batch; pass functions of"):
        fo.accumulate(tx, 2)


def test_cautious_refuses_whatever_reverses_signs_inside():
    for tx in (fo.sam(fo.sgd(0.1)), fo.lookahead(fo.sam(fo.sgd(0.1))), fo.flatten(fo.sgd(0.1))):
        with pytest.raises(ValueError, match="a learning rate reverses"):
            fo.cautious(tx)
    for tx in (fo.lbfgs(), fo.ssbfgs(), fo.chain(fo.levenberg_marquardt(), fo.trace(0.9))):
        with pytest.raises(ValueError, match="returns a complete step; leave cautious out"):
            fo.cautious(tx)


@pytest.mark.parametrize(
    "make", [lambda n: fo.scale(-n), lambda n: fo.chain(fo.sign(), fo.scale(-n))]
)
def test_cautious_refuses_a_negative_factor_inside(make):
    with pytest.raises(ValueError, match="scale reverses by a negative number; put it around"):
        fo.cautious(fo.chain(fo.scale_by_adam(), make(1e-3)))
    with pytest.raises(ValueError, match="scale reverses by a negative number"):
        fo.cautious(fo.partition({"a": make(0.1), "b": fo.trace(0.9)}, {"w": "a", "*": "b"}))
    with pytest.raises(ValueError, match="scale reverses by a negative number"):
        fo.cautious(fo.adafactor())
    fo.cautious(fo.chain(make(1.0), fo.scale_by_adam(), fo.scale(-1)))


@pytest.mark.parametrize("rule", [fo.scale_by_adafactor, fo.scale_by_laprop, fo.scale_by_rprop])
def test_cautious_takes_rules_that_keep_signs_with_a_rate(rule):
    w, a, b = torch.ones(2), torch.tensor([3.0, 1.0]), torch.tensor([3.0, -0.1])
    for tx in (rule(0.1), fo.cautious(rule(0.1))):
        _, state = tx.update(a, tx.init(w), w)
        u, _ = tx.update(b, state, w)
        if tx.placements[-1].name != "cautious":
            plain = u
    mask = (plain * b > 0).float()
    assert_close(u, plain * mask / mask.mean(), 1e-6)


LM = fo.levenberg_marquardt()
CHECKING = [lambda: fo.apply_if_finite(LM, 2), lambda: fo.dynamic_loss_scale(fo.flatten(LM))]
CHECKING += [lambda: fo.skip_large_updates(fo.chain(LM, fo.trace(0.9)), 1.0)]


@pytest.mark.parametrize("make", CHECKING)
def test_gates_that_check_gradients_refuse_methods_that_read_none(make):
    with pytest.raises(TypeError, match="checks gradients, but a method for residuals or"):
        make()


@pytest.mark.parametrize("around", [fo.conditionally_mask, fo.conditionally_transform])
@pytest.mark.parametrize("given", [None, {"a": None, "b": None}])
def test_a_method_for_residuals_may_wait_behind_a_gate(around, given):
    tx = around(LM, lambda step: step >= 1)
    first, state = tx.update(given, tx.init(MATRICES), MATRICES, residual_fn=residuals)
    assert_same(first, fo.tree.map(torch.zeros_like, MATRICES))
    second, _ = tx.update(given, state, MATRICES, residual_fn=residuals)
    alone, _ = LM.update(given, LM.init(MATRICES), MATRICES, residual_fn=residuals)
    assert_same(second, alone)


@pytest.mark.parametrize("around", [fo.conditionally_mask, fo.conditionally_transform])
def test_a_condition_that_is_a_number_counts_one_step(around):
    """Of `step % 3` is 2 as open as 1."""
    params, grads = make_params(), make_grads(make_params(), 7)
    found, state = run(around(fo.adam(0.1), lambda step: step % 3), params, grads)
    wanted, counted = run(around(fo.adam(0.1), lambda step: step % 3 > 0), params, grads)
    assert_same(found, wanted)
    assert (fo.get(state, "open_steps"), fo.get(state, "gate")) == (4, 0)
    assert fo.get(counted, "open_steps") == 4


def test_a_masked_method_for_residuals_needs_no_gradients():
    tx, none = fo.masked(LM, "a"), {"a": None, "b": None}
    found, expected = (
        tx.update(given, tx.init(MATRICES), MATRICES, residual_fn=residuals)[0]
        for given in (None, none)
    )
    assert found["a"].any()
    assert found["b"] is None
    assert_same(found, expected)


@pytest.mark.parametrize("params", [torch.zeros(2), {"a": torch.zeros(2), "b": torch.zeros(1)}])
def test_a_vector_without_gradients_does_not_step(params):
    tx = fo.flatten(fo.sgd(1.0, momentum=0.5))
    g = fo.tree.map(torch.ones_like, params)
    none, state = fo.tree.map(lambda p: None, params), tx.init(params)
    for given in (g, none, none, g):
        updates, state = tx.update(given, state, params)
    assert_same(updates, fo.tree.map(lambda x: -1.5 * x, g))
    if isinstance(params, dict):
        with pytest.raises(ValueError, match="params and grads have different structures"):
            tx.update(None, state, params)


def test_a_function_of_a_vector_need_not_know_none():
    tenth = lambda g, state, params=None: (-0.1 * g, state)  # noqa: E731
    tx = fo.apply_if_finite(fo.flatten(fo.GradientTransformation(lambda p: (), tenth)), 3)
    w = torch.ones(2)
    updates, state = tx.update({"w": None}, tx.init({"w": w}), {"w": w})
    assert updates == {"w": None}
    assert_close(tx.update({"w": w}, state, {"w": w})[0]["w"], -0.1 * w, 1e-6)


def test_a_vector_may_be_frozen():
    params = {"a": torch.zeros(2), "b": torch.zeros(1)}
    tx = fo.flatten(fo.chain(fo.freeze(), fo.sgd(0.1)))
    assert tx.update(params, tx.init(params), params)[0] == {"a": None, "b": None}


def test_a_scheduled_recipe_is_the_recipe_with_the_values_of_each_step():
    params, grads = make_params(), make_grads(make_params(), 6)
    got, state = run(fo.with_schedule(decayed, lr=DECAYING, weight_decay=0.3), params, grads)
    for i, g in enumerate(grads):
        params, _ = run(decayed(1.0 - i / 8, 0.3), params, [g])
    assert_close(got, params, 1e-12)
    assert fo.get(state, "lr").item() == pytest.approx(1.0 - 5 / 8)
    assert fo.get(state, "weight_decay").item() == 0.3


def test_an_argument_counts_and_not_what_the_state_remembers():
    w = torch.zeros(1)
    state = fo.with_schedule(fo.sgd, lr=0.5, nesterov=False).init(w)
    assert sorted(state.hyper) == ["lr"]
    state.hyper["lr"].fill_(9.0)
    tx = fo.with_schedule(fo.sgd, lr=0.25, nesterov=False)
    updates, state = tx.update(torch.ones(1), state, w)
    assert updates.item() == -0.25
    assert fo.get(state, "lr").item() == 0.25


def test_torchs_schedulers_reach_a_scheduled_recipe():
    w = torch.nn.Parameter(torch.zeros(1))
    opt = Optimizer([w], lambda lr: fo.with_schedule(decayed, lr=lr, weight_decay=0.1), lr=0.5)
    halves = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for _ in range(2):
        w.grad = torch.ones(1)
        opt.step()
        halves.step()
    by_hand = -0.5
    assert w.item() == pytest.approx(by_hand - 0.25 * (1 + 0.1 * 0.25 * by_hand), rel=1e-6)


def test_pairs_are_scheduled_too():
    tx = fo.with_schedule(fo.adam, lr=0.1, betas=(fo.schedules.constant(0.5), 0.99))
    state = tx.init(torch.zeros(2))
    assert [x.item() for x in state.hyper["betas"]] == [0.5, 0.99]
    plain = fo.adam(0.1, betas=(0.5, 0.99))
    grads = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])]
    assert_close(run(tx, torch.zeros(2), grads)[0], run(plain, torch.zeros(2), grads)[0], 1e-12)


def custom_tenth():
    return fo.GradientTransformation(
        lambda params: (), lambda g, state, p=None: (None if g is None else -0.1 * g, state)
    )


def test_rules_beside_a_custom_part_count_a_step_without_gradients():
    w, g = torch.zeros(1), torch.ones(1)
    ends = []
    for around in (fo.flatten, lambda tx: tx):
        tx = around(fo.chain(custom_tenth(), fo.adam(0.1)))
        _, state = tx.update(None, tx.init(w), w)
        ends.append(tx.update(g, state, w)[0])
    assert_same(*ends)


def test_a_gate_around_a_custom_part_keeps_time_without_gradients():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [a]}, {"params": [b]}]
    opt = Optimizer(groups, lambda: fo.flatten(fo.accumulate(custom_tenth(), 2)), compile=False)
    moved = []
    for k in range(6):
        a.grad, b.grad = torch.ones(1), None if k == 1 else torch.ones(1)
        before = a.detach().clone(), b.detach().clone()
        opt.step()
        moved.append((bool(a != before[0]), bool(b != before[1])))
    assert [x for x, _ in moved] == [False, True] * 3
    assert [y for _, y in moved][2:] == [False, True] * 2
