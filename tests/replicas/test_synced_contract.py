"""The parts of local_sgd and diloco are pure and can be traced, and replicas keep to them."""

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, clone, make_grads, make_params, run
from sampling import some
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim.replicas import Decision, Local, Replica, Scripted
from functional_optim.replicas.sync.diloco import Division

OUTER = fo.sgd(0.7, momentum=0.9, nesterov=True)
RECIPES = {
    "local_sgd": fo.local_sgd(fo.adamw(0.1), 2),
    "diloco": fo.diloco(fo.adamw(0.1), OUTER, 2, alpha=0.25),
    "in turns": fo.diloco(fo.adamw(0.1), OUTER, 4, fragments=2, alpha=0.25),
    "of parts": fo.diloco(
        fo.chain(fo.flatten(fo.trace(0.9)), fo.masked(fo.adam(), "matrix")),
        fo.adam(0.1),
        6,
        fragments=["matrix", lambda path, p: p.ndim == 1, "*"],
    ),
}


@pytest.mark.parametrize("how", [{"fragments": 2}, {"delay": 1}])
def test_turns_need_a_group_that_heals_before_anything_is_offered(how):
    tx = fo.diloco(fo.adam(), OUTER, 4, **how)
    healed = [Decision(True, True, 1, 1)]
    with pytest.raises(ValueError, match="use_async_quorum=False"):
        Replica(Scripted(healed, peer=dict), tx)
    Replica(Scripted(healed, peer=dict, heals_at_start=True), tx)


def test_leaves_are_divided_in_order_and_by_bytes_or_by_the_first_mask():
    params = [torch.zeros(n) for n in (10, 10, 10, 10, 40, 1, 1)]
    params[3] = torch.zeros(5, dtype=torch.float64)
    assert Division(2).owners(params) == [0, 0, 0, 0, 1, 1, 1]
    assert Division(3).owners(params) == [0, 0, 0, 1, 2, 2, 2]
    assert Division(7).owners(params) == [0, 1, 2, 3, 4, 5, 6]

    params = {"blocks": [torch.ones(1), torch.ones(1)], "head": {"bias": torch.ones(1)}}
    division = Division(["blocks.0", ["head", "*.1"], "*"][:2])
    assert division.owners(params) == {"blocks": [0, 1], "head": {"bias": 1}}


def state_after(tx, steps, params):
    return run(tx, params, make_grads(params, steps))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("commit", [True, False])
def test_a_flag_on_the_device_says_the_same_as_one_on_the_host(name, commit):
    tx = RECIPES[name]
    params, state = state_after(tx, 2, make_params())
    before = clone((params, state))
    mean = fo.tree.map(lambda x: 0.5 * x, tx.offer(state, params))
    if not commit:
        mean = fo.tree.map(lambda x: x * float("nan"), mean)
    wanted = tx.settle(mean, state, params, commit)
    assert_same(tx.settle(mean, state, params, torch.tensor(commit)), wanted)
    assert_same(tx.settle(mean, state, params, torch.tensor(float(commit))), wanted)
    assert_finite(wanted)
    assert_same((params, state), before)
    assert fo.tree.structure(wanted[1]) == fo.tree.structure(state)
    memory = [x.data_ptr() for x in fo.tree.leaves(wanted) if x.numel()]
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize("name", some(RECIPES, 0, ["local_sgd", "of parts"]))
def test_one_graph_serves_both_answers(name, fresh_dynamo):
    tx = RECIPES[name]
    backend = CompileCounterWithBackend("aot_eager")

    def compiled(fn):
        return torch.compile(fn, fullgraph=True, backend=backend)

    few = {name: p for name, p in make_params().items() if name in ("matrix", "scalar", "vector")}
    params, state = state_after(tx, 2, few)
    (g,) = make_grads(params, 1)
    turn = {} if name == "local_sgd" else {"fragment": 0}
    assert_close(compiled(tx.update)(g, state, params), tx.update(g, state, params), 1e-12)
    offer = compiled(lambda state, params: tx.offer(state, params, **turn))
    mean = tx.offer(state, params)
    assert_close(offer(state, params), mean, 1e-12)
    settle = compiled(tx.settle)
    counts = []
    for commit in (torch.tensor(True), torch.tensor(False)):
        made = settle(mean, state, params, commit)
        assert_close(made, tx.settle(mean, state, params, commit), 1e-12)
        counts.append(backend.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_half_type_is_kept(name):
    tx = RECIPES[name]
    params, state = state_after(tx, 2, make_params(torch.bfloat16))
    made, after = tx.settle(tx.offer(state, params), state, params, True)
    assert all(p.dtype == torch.bfloat16 for p in fo.tree.leaves((made, after.anchor)))


def test_extra_arguments_reach_the_inner_transformation():
    replica = Replica(Local(), fo.local_sgd(fo.polyak_sgd(), 1))
    now = replica.start(replica.init(torch.ones(1)))
    now, _ = replica.step(torch.ones(1), now, value=0.5)
    assert_close(now.params, torch.tensor([0.5]), 1e-6)
    with pytest.raises(TypeError, match="no part of this"):
        replica.step(torch.ones(1), replica.start(now), size=2.0)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "in turns"])
def test_steps_in_place_leave_the_anchor_alone(name):
    """And the trees passed in are the ones returned."""
    tx = RECIPES[name]
    ends = []
    for compile in (False, True):
        params = make_params(torch.float32)
        replica = Replica(Scripted([True, False, True]), tx, compile=compile)
        first = now = replica.init(params)
        for g in make_grads(params, 6, dtype=torch.float32):
            now, _ = replica.step(g, replica.start(now))
        ends.append(now)
        assert (now.params["matrix"] is params["matrix"]) is compile
        assert (now.state.anchor["matrix"] is first.state.anchor["matrix"]) is compile
    assert_close(*ends, 1e-5)


def test_a_mean_that_is_not_finite_can_be_refused():
    tx = fo.local_sgd(fo.sgd(1.0), 1)
    replica = Replica(Local(), tx, nonfinite="refuse")
    now = replica.init({"w": torch.ones(1)})
    now, decision = replica.step({"w": torch.tensor([float("inf")])}, replica.start(now))
    assert "mean of 'w'" in decision.reason
    assert_same(now.params, {"w": torch.ones(1)})


def test_a_settlement_that_fails_is_reported():
    """Such a step is not committed here: a peer has to heal this replica."""

    def broken(*_):
        raise RuntimeError("out of memory")

    group = Local()
    outer = fo.GradientTransformation(lambda params: fo.EmptyState(), broken)
    replica = Replica(group, fo.diloco(fo.sgd(1.0), outer, 1))
    now = replica.start(replica.init(torch.ones(1)))
    with pytest.raises(RuntimeError, match="out of memory"):
        replica.step(torch.ones(1), now)
    assert (group.step, group.decision.committed) == (0, False)
    assert "out of memory" in group.decision.reason


def test_training_goes_on_from_a_checkpoint_between_offer_and_use():
    tx = fo.diloco(fo.sgd(1.0), OUTER, 3, delay=2)
    replica = Replica(Local(), tx)
    now = replica.init(torch.ones(1))
    for _ in range(2):
        now, _ = replica.step(torch.ones(1), replica.start(now))
    other = Replica(Local(), tx)
    after, decision = other.step(torch.ones(1), other.start(now))
    assert decision.committed
    assert int(after.state.since) == 0
