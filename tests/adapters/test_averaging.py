"""Objects with two modes: where their parameters are, and what each mode allows."""

import pytest
import torch
from helpers import (
    as_parameters,
    assert_close,
    assert_same,
    copy_of,
    make_grads,
    make_params,
    run,
    step_object,
    through_file,
)
from torch.distributed.tensor import distribute_tensor

import functional_optim as fo
from functional_optim import adapters


def around_gpa(lr, train_interp_coeff=0.7, eval_interp_coeff=0.9):
    return fo.gpa(fo.adam(lr), train_interp_coeff, eval_interp_coeff)


KINDS = {
    "sgd": (adapters.ScheduleFreeSGD, fo.schedule_free_sgd),
    "adamw": (adapters.ScheduleFreeAdamW, fo.schedule_free_adamw),
    "gpa": (lambda p, **hyper: adapters.AveragingOptimizer(p, around_gpa, **hyper), around_gpa),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind, params, **hyper):
    return KINDS[kind][0](params, compile=False, lr=0.1, **hyper)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128], ids=str)
@kinds
def test_eval_puts_in_the_averages_and_train_takes_them_out(kind, dtype):
    params = make_params(dtype)
    grads = make_grads(params, 4)
    tx = KINDS[kind][1](lr=0.1)
    moved, state = run(tx, params, grads)
    mine = as_parameters(params)
    opt = make(kind, mine)
    step_object(opt, grads)
    before = copy_of(mine)
    opt.eval()
    assert not opt.training
    assert_close(copy_of(mine), list(fo.eval_params(state, moved).values()), 1e-12)
    assert not torch.equal(mine[2], before[2])
    opt.eval()
    assert_close(copy_of(mine), list(fo.eval_params(state, moved).values()), 1e-12)
    opt.train()
    assert opt.training
    # through bfloat16, rounding is that of the parameters
    assert_close(copy_of(mine), before, 3e-2 if dtype is torch.bfloat16 else 1e-12)


@kinds
def test_the_average_is_that_of_the_iterates(kind):
    """Kept apart, from z after each step."""
    p, grads = make_params()["matrix"], [g["matrix"] for g in make_grads(make_params(), 5)]
    tx = KINDS[kind][1](lr=0.1)
    state, y, x = tx.init(p), p, p
    for t, g in enumerate(grads, start=1):
        u, state = tx.update(g, state, y)
        y = fo.apply_updates(y, u)
        c = 0.1 if kind == "gpa" else 1 / t
        x = x + c * (state.slots["z"] - x)
        assert_close(fo.eval_params(state, y), x, 1e-12)


@kinds
def test_a_step_in_evaluation_mode_raises_and_calls_no_closure(kind):
    mine = as_parameters(make_params())
    opt = make(kind, mine)
    step_object(opt, make_grads(make_params(), 1))
    opt.eval()
    before = copy_of(mine)
    with pytest.raises(RuntimeError, match=r"is in evaluation mode.*call opt\.train\(\)"):
        opt.step(lambda: pytest.fail("the closure ran"))
    assert_same(copy_of(mine), before)
    opt.train(False)
    assert not opt.training
    opt.train()
    opt.step()


@pytest.mark.parametrize("mode", ["train", "eval"])
@kinds
def test_a_state_of_either_mode_goes_on_bitwise(kind, mode):
    params = make_params()
    grads = make_grads(params, 6)
    through = as_parameters(params)
    a = make(kind, through)
    step_object(a, grads[:3])
    getattr(a, mode)()
    saved = through_file({"params": copy_of(through), "opt": a.state_dict()})
    second = [torch.nn.Parameter(p) for p in saved["params"]]
    b = make(kind, second)
    b.load_state_dict(saved["opt"])
    assert b.training == (mode == "train")
    for opt in (a, b):
        opt.train()
        step_object(opt, grads[3:])
    assert_same(copy_of(second), copy_of(through))
    assert_same([b.state[p] for p in second], [a.state[p] for p in through])


def test_a_group_that_joins_is_in_the_mode_of_the_others():
    params = as_parameters(make_params())
    opt = make("sgd", params[:3])
    opt.eval()
    opt.add_param_group({"params": params[3:]})
    assert [group["train_mode"] for group in opt.param_groups] == [False, False]
    opt.train()
    step_object(opt, make_grads(make_params(), 1))


def test_a_state_dict_without_a_mode_is_that_of_training():
    opt = make("sgd", as_parameters(make_params()))
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["train_mode"]
    opt.eval()
    opt.load_state_dict(saved)
    assert opt.training


def test_a_change_of_momentum_leaves_the_average_where_it_is():
    """In the authors' code the average jumps; here x is found by the share that y was made with."""
    p, grads = torch.tensor([1.0, -2.0], dtype=torch.float64), [torch.ones(2).double()] * 6
    opt = make("sgd", [mine := torch.nn.Parameter(p)], momentum=0.9)
    x = p
    for t, g in enumerate(grads, start=1):
        if t == 4:
            opt.param_groups[0]["momentum"] = 0.3
        step_object(opt, [[g]])
        x = x + (opt.state[mine]["z"] - x) / t
    opt.eval()
    assert_close(mine.detach(), x, 1e-12)


def test_eval_params_says_what_it_needs():
    w = torch.ones(2)
    with pytest.raises(ValueError, match="occurs once"):
        fo.eval_params(fo.sgd(0.1).init(w), w)
    parts = {"a": fo.schedule_free_sgd(), "b": fo.schedule_free_sgd()}
    tx = fo.partition(parts, {"a": "a", "b": "b"})
    params = {"a": w, "b": w}
    with pytest.raises(ValueError, match=r"schedule_free\(partition"):
        fo.eval_params(tx.init(params), params)
    params, tx = {"a": torch.ones(2), "b": torch.ones(1)}, fo.flatten(fo.schedule_free_sgd(0.1))
    with pytest.raises(ValueError, match=r"different structures(.|\n)*put flatten inside"):
        fo.eval_params(tx.init(params), params)


def test_leaves_that_are_not_averaged_stay():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    tx = fo.partition({"a": fo.schedule_free_sgd(0.5), "b": fo.sgd(0.5)}, {"a": "a", "b": "b"})
    moved, state = run(tx, params, [{"a": torch.ones(2), "b": torch.ones(2)}] * 3)
    averages = fo.eval_params(state, moved)
    assert torch.equal(averages["b"], moved["b"])
    assert not torch.equal(averages["a"], moved["a"])


def two_averages(lr):
    parts = {"a": fo.schedule_free(fo.sgd(lr)), "b": fo.schedule_free(fo.sgd(lr), momentum=0.8)}
    return fo.partition(parts, {"a*": "a", "b*": "b"})


def test_parts_of_a_partition_have_their_own_averages():
    named = [(name, torch.nn.Parameter(torch.ones(3))) for name in "ab"]
    opt = adapters.AveragingOptimizer(named, two_averages, lr=0.1, compile=False)
    tx = two_averages(0.1)
    params = {name: p.detach().clone() for name, p in named}
    grads = [{name: torch.ones(3) for name in params}] * 3
    step_object(opt, grads)
    params, _ = run(tx, params, grads)
    opt.eval()
    assert_close([p.detach() for _, p in named], [torch.full((3,), 0.8)] * 2, 1e-6)
    opt.train()
    assert_close([p.detach() for _, p in named], [*params.values()], 1e-6)


def test_a_mode_that_cannot_be_set_changes_nothing():
    params = as_parameters(make_params())
    opt = make("sgd", params)
    step_object(opt, make_grads(make_params()))
    del opt.state[params[-1]]["average_share"]
    before = copy_of(params)
    for _ in range(2):
        with pytest.raises(TypeError):
            opt.eval()
        assert opt.training
        assert_same(copy_of(params), before)


def test_an_object_without_modes_refuses_a_checkpoint_of_evaluation_mode():
    """Its steps would begin at the averages."""
    params = make_params()
    opt = adapters.AveragingOptimizer(as_parameters(params), around_gpa, compile=False, lr=0.1)
    plain = adapters.Optimizer(as_parameters(params), around_gpa, compile=False, lr=0.1)
    step_object(opt, make_grads(params, 2))
    plain.load_state_dict(opt.state_dict())
    opt.eval()
    with pytest.raises(ValueError, match=r"evaluation mode.* and Optimizer has no train\(\)"):
        plain.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["split16", "split8", "kahan"])
def test_a_switch_keeps_the_bits_of_master_weights(kind, sharded, mesh):
    """Those of the averages, too; each switch moved weights by units of bfloat16, and wrote
    anything into those of DTensors, which torch does not shift by bits."""
    torch.manual_seed(0)

    def put(x):
        return distribute_tensor(x, mesh) if sharded else x

    w = torch.nn.Parameter(put(torch.randn(64, 8).to(torch.bfloat16)))
    goal = put(torch.randn(64, 8))

    def recipe():
        return fo.master_weights(fo.schedule_free(fo.sgd(0.01)), kind)

    opt = adapters.AveragingOptimizer([("w", w)], recipe, compile=False)

    def full():
        return fo.full_weights([w], opt)[0].detach().float().clone()

    for _ in range(20):
        w.grad = (full() - goal).to(w.dtype)
        opt.step()
    before = full()
    opt.eval()
    average = before + (1 - 1 / 0.9) * (opt.state[w]["z"] - before)
    near = {"split16": 1e-6, "split8": 3e-4, "kahan": 1e-4}[kind]
    torch.testing.assert_close(full(), average, rtol=near, atol=near)
    opt.train()
    torch.testing.assert_close(full(), before, rtol=near, atol=near)
