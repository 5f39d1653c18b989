"""Refused steps change no bit, one graph serves both answers, and steps can be taken back."""

import copy

import pytest
import torch
from cases import able
from combined import LEAFWISE, WHOLE, conditional, deep, named_params, whole_part
from helpers import assert_close, assert_same, clone, make_grads, make_params, run
from sampling import some
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim import adapters

RECIPES = [pytest.param(recipe, id=recipe.__name__) for recipe in (*LEAFWISE, *WHOLE)]
KINDS = {"bool": bool, "tensor": torch.tensor, "number": lambda flag: torch.tensor(float(flag))}
FLAGS = [pytest.param(make, id=name) for name, make in KINDS.items()]
BAD = (float("nan"), float("inf"), -float("inf"), 1.0)


def bits(tree):
    """The bytes of every leaf: 0.0 and -0.0 differ, and a NaN equals itself."""
    return [(str(x.dtype), x.detach().numpy().tobytes()) for x in fo.tree.leaves(tree)]


def refuse(tx, params, state, flag, bad):
    grads = fo.tree.map(lambda p: torch.full_like(p, bad), params)
    return tx.update(grads, state, params, commit=flag(False))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("case", able(costly=True))
def test_a_refused_step_changes_no_bit(case, flag):
    params = case.params()
    tx = fo.commit_if(case.tx())
    params, state = run(tx, params, make_grads(params, steps=2), commit=flag(True))
    params = {name: torch.where(p > 1, -0.0, p) for name, p in params.items()}
    for bad in BAD:
        u, after = refuse(tx, params, state, flag, bad)
        assert bits(after) == bits(state)
        assert bits(fo.apply_updates(params, u)) == bits(params)
        assert not any(x.any() for x in fo.tree.leaves(u))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_refused_steps_between_committed_ones_leave_no_trace(recipe, flag):
    params = named_params()
    grads = make_grads(params, steps=4)
    tx = fo.commit_if(recipe(0.1))
    plain, plain_state = run(recipe(0.1), params, grads)
    state = tx.init(params)
    for g in grads:
        _, state = refuse(tx, params, state, flag, float("nan"))
        params, state = run(tx, params, [g], state, commit=flag(True))
    assert_same((params, state), (plain, plain_state))


# their graphs without a flag: test_links
@pytest.mark.parametrize("recipe", some([*LEAFWISE, *WHOLE], 0, [conditional, whole_part]))
def test_one_graph_serves_both_answers(recipe, fresh_dynamo):
    params = named_params()
    tx = fo.commit_if(recipe(0.1))
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(grads, state, params, commit):
        u, state = tx.update(grads, state, params, commit=commit)
        return fo.apply_updates(params, u), state

    state = tx.init(params)
    eager, eager_state = params, state
    answers = (True, False, True, False)
    frames = []
    for g, answer in zip(make_grads(params, steps=4), answers, strict=True):
        commit = torch.tensor(answer)
        params, state = step(g, state, params, commit)
        frames.append(counter.frame_count)
        u, eager_state = tx.update(g, eager_state, eager, commit=commit)
        eager = fo.apply_updates(eager, u)
    # Dynamo traces twice before the first step ends if a Python float turns out to be a constant
    assert frames == [frames[0]] * 4
    assert_close((params, state), (eager, eager_state), 5e-2 if recipe is deep else 1e-12)


@pytest.mark.parametrize("donate", [None, True, False])
def test_a_batch_of_flags_under_vmap(donate):
    """As many answers, and as many snapshots, as there are members."""
    tx = fo.commit_if(fo.keep_snapshots(fo.sgd(1.0), last=2))
    step = tx.update if donate is None else fo.compile(tx, donate=donate)

    def once(w, state, commit):
        moved, state = step(torch.ones_like(w), state, w.clone(), commit=commit)
        return fo.apply_updates(w, moved) if donate is None else moved, state

    w, flags = torch.zeros(3, 1), torch.tensor([True, True, False])
    state = torch.vmap(tx.init)(w)
    for _ in range(2):
        w, state = torch.vmap(once)(w, state, flags)
    assert w.flatten().tolist() == [-2.0, -2.0, 0.0]
    assert state.inner.step.tolist() == [2, 2, 0]
    assert state.past[0].params.flatten().tolist() == [-1.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="can undo 0 steps"):
        fo.rollback(state)


def test_the_gradient_of_the_learning_rate_passes_a_flag_and_no_refused_nan():
    def end(lr, steps):
        tx = fo.commit_if(fo.adam(lr))
        w = torch.ones(2, dtype=torch.float64)
        state = tx.init(w)
        for scale, commit in steps:
            g = torch.full_like(w, scale)
            w, state = run(tx, w, [g], state, commit=torch.tensor(commit))
        return w.sum()

    slope = torch.func.grad(end)
    lr = torch.tensor(0.1, dtype=torch.float64)
    assert_close(slope(lr, [(1.0, True)]), torch.tensor(-2.0, dtype=torch.float64), 1e-6)
    assert slope(lr, [(1.0, False)]) == 0.0
    found = slope(lr, [(1.0, True), (float("nan"), False), (2.0, True)])
    assert_close(found, slope(lr, [(1.0, True), (2.0, True)]), 1e-12)


def test_half_parameters_and_missing_gradients_keep_their_places():
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2)}
    tx = fo.commit_if(fo.adam(0.1))
    for commit in (True, False, torch.tensor(True), torch.tensor(False)):
        u, state = tx.update({"a": params["a"], "b": None}, tx.init(params), params, commit=commit)
        assert u["b"] is None
        assert fo.apply_updates(params, u)["a"].dtype is torch.bfloat16
        assert fo.get(state, "exp_avg")["a"].dtype is torch.bfloat16


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_compiled_step_reads_the_flag_first(flag, donate):
    params = named_params(torch.float32)
    grads = make_grads(params, steps=3)
    tx = fo.commit_if(fo.adamw(0.1))
    step = fo.compile(tx, donate=donate)
    start = clone(params)
    expected, _ = run(fo.adamw(0.1), clone(params), grads)
    now, state = params, tx.init(params)
    for g in grads:
        bad = fo.tree.map(lambda x: x * float("nan"), g)
        before = bits((now, state))
        now, state = step(bad, state, now, commit=flag(False))
        assert bits((now, state)) == before
        now, state = step(g, state, now, commit=flag(True))
    assert_close(now, expected, 1e-6)
    assert (bits(params) == bits(start)) is not donate


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("back", [1, 2, 3])
def test_rollback_returns_to_the_very_bits(recipe, back):
    params = named_params()
    tx = fo.keep_snapshots(recipe(0.1), last=3)
    state = tx.init(params)
    history = [(params, state.inner)]
    for g in make_grads(params, steps=5):
        params, state = run(tx, params, [g], state)
        history.append((params, state.inner))
    there, past = fo.rollback(state, back)
    assert bits((there, past.inner)) == bits(history[-1 - back])
    assert past.kept == 3 - back
    if back < 3:
        again, older = fo.rollback(past)
        assert bits((again, older.inner)) == bits(history[-2 - back])


def test_after_a_rollback_training_goes_on_as_it_did():
    params = named_params()
    grads = make_grads(params, steps=4)
    tx = fo.keep_snapshots(fo.adamw(fo.schedules.linear(0.1, 0.01, 4)), last=2)
    straight, end = run(tx, params, grads)
    now, state = run(tx, params, grads[:3])
    now, state = fo.rollback(state, 2)
    assert state.kept == 0
    now, state = run(tx, now, grads[1:], state)
    assert bits((now, state.inner)) == bits((straight, end.inner))


def test_an_optimizer_object_remembers_what_stood_before_each_step():
    """It writes into the parameters, which must not be the snapshots, too."""
    params = [torch.nn.Parameter(p.clone()) for p in make_params().values()]
    opt = adapters.Optimizer(params, lambda lr: fo.keep_snapshots(fo.sgd(lr), last=2), lr=0.1)
    before = []
    for grads in make_grads(make_params(), steps=3):
        for p, g in zip(params, grads.values(), strict=True):
            p.grad = g
        before.append([p.detach().clone() for p in params])
        opt.step()
        opt = copy.deepcopy(opt)
        params = opt.param_groups[0]["params"]
    state = opt.state[params[0]]
    for k, wanted in enumerate(reversed(before[1:])):
        assert_same([state[f"past.{k}.params.{i}"] for i in range(len(params))], wanted)


def test_snapshots_and_rollback_trace(fresh_dynamo):
    tx = fo.keep_snapshots(fo.adam(0.1), last=2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def there_and_back(g, state, w):
        _, state = tx.update(g, state, w)
        return fo.rollback(state)

    w = torch.ones(2)
    back, state = there_and_back(w, tx.init(w), w)
    assert_same(back, w)
    assert state.inner.step == 0


def test_rollback_refuses_what_is_not_kept():
    tx, w = fo.keep_snapshots(fo.sgd(1.0), last=2), torch.zeros(1)
    _, state = run(tx, w, [w, w, w])
    with pytest.raises(ValueError, match="can undo 2 steps"):
        fo.rollback(state, 3)


def test_a_refused_step_keeps_the_signs_of_complex_zeros():
    w = torch.tensor([complex(a, b) for a in (0.0, -0.0) for b in (0.0, -0.0)])
    tx = fo.commit_if(fo.sgd(0.1, momentum=0.9))
    for flag in (False, torch.tensor(False)):
        u, _ = refuse(tx, w, tx.init(w), lambda _, flag=flag: flag, float("nan"))
        assert bits(fo.apply_updates(w, u)) == bits(w)


@pytest.mark.parametrize("answer", [True, False])
def test_a_flag_with_one_element_changes_no_shape(answer):
    w, flag = torch.ones(2), torch.tensor([[answer]])
    tx = fo.commit_if(fo.adam(0.1))
    state = tx.init(w)
    u, after = tx.update(w, state, w, commit=flag)
    synced = fo.local_sgd(fo.adam(0.1), 2)
    begun = synced.init(w)
    pairs = ((after, state), (u, w), (synced.settle(w, begun, w, flag), (w, begun)))
    for new, old in pairs:
        assert [x.shape for x in fo.tree.leaves(new)] == [x.shape for x in fo.tree.leaves(old)]
    with pytest.raises(TypeError, match="commit must be one flag"):
        synced.settle(w, begun, w, torch.ones(2))


@pytest.mark.parametrize("number", [-1.0, float("nan"), 0, 1, 0.5])
def test_numbers_mean_the_same_in_every_form(number):
    w = torch.ones(1)
    tx = fo.commit_if(fo.sgd(0.5))
    plain = tx.update(w, tx.init(w), w, commit=number)[0].any()
    tensor = tx.update(w, tx.init(w), w, commit=torch.tensor(number))[0].any()
    compiled = fo.compile(tx, donate=False)(w, tx.init(w), w, commit=number)[0] != w
    assert plain == tensor == compiled == (number > 0)


@pytest.mark.parametrize("commit", [False, torch.tensor(False)])
def test_a_step_that_reads_no_gradients_is_refused(commit):
    w = torch.ones(2, dtype=torch.float64)
    tx = fo.commit_if(fo.levenberg_marquardt())
    before = tx.init(w)
    updates, after = tx.update(None, before, w, commit=commit, residual_fn=lambda w: w - 3)
    assert_same((fo.apply_updates(w, updates), after), (w, before))


@pytest.mark.parametrize("commit", [False, True])
def test_one_flag_is_that_of_all_inside(commit):
    tx, w = fo.commit_if(fo.commit_if(fo.sgd(0.5))), torch.ones(2)
    updates, _ = tx.update(w, tx.init(w), w, commit=commit)
    params, _ = fo.compile(tx, donate=False)(w, tx.init(w), w, commit=commit)
    assert_same(params, fo.apply_updates(w, updates))
    assert params.tolist() == [0.5 if commit else 1.0] * 2


@pytest.mark.parametrize("refused", [False, torch.tensor(False)])
def test_a_refused_update_is_sparse_where_the_gradient_is(refused):
    def sparse(*rows):
        return torch.sparse_coo_tensor([list(rows)], torch.ones(len(rows)), (3,))

    tx, w = fo.chain(fo.commit_if(fo.sgd(1.0)), fo.trace(0.5)), torch.zeros(3)
    state = tx.init(w)
    for g, commit in ((sparse(0, 1), True), (sparse(0), refused)):
        w, state = run(tx, w, [g], state, commit=commit)
    assert w.tolist() == [-1.5, -1.0, 0.0]
