"""The fault-tolerant optimizer, step by step; T01 … are the rows of what torchft's wrapper does."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from voting import KINDS, Meeting, everything, loss_of, made, model, train

from functional_optim.adapters import LBFGS, FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted, TorchFT, as_coordinator

kinds = pytest.mark.parametrize("kind", KINDS)


class Recording(Local):
    """What happens, in order."""

    def __init__(self, log, **kwargs):
        super().__init__(**kwargs)
        self.log = log

    def _start(self):
        self.log.append("start")

    def _decide(self):
        self.log.append("decide")
        return super()._decide()


def recorded(log, **kwargs):
    net = model()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    plain = optim.zero_grad, optim.step
    optim.zero_grad = lambda *args: (log.append(("zero", *args)), plain[0](*args))
    optim.step = lambda: (log.append("update"), plain[1]())
    return net, FaultTolerantOptimizer(Recording(log, **kwargs), optim)


@kinds
def test_alone_it_is_the_optimizer_inside_bit_for_bit(kind):
    net, opt = made(kind, Local())
    train(opt, net, 5)
    bare = model()
    inside = KINDS[kind](bare.parameters())
    train(inside, bare, 5)
    assert_same(everything(opt), everything(inside))


class StandIn:
    """The part of a torchft Manager that a step asks."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        answers = {"should_commit": True, "current_step": 0, "num_participants": 1, "errored": None}
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append(name)
            return answers.get(name)

        return call


def test_t01_any_coordinator_or_a_manager():
    for group in (Local(), Scripted([True])):
        assert made("sgd", group)[1].coordinator is group
    manager = StandIn()
    _, opt = made("sgd", manager)
    assert isinstance(opt.coordinator, TorchFT)
    assert as_coordinator(manager) is opt.coordinator
    opt.zero_grad()
    opt.step()
    assert [name for name in manager.calls if name in ("start_quorum", "should_commit")] == [
        "start_quorum",
        "should_commit",
    ]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"coordinator": 3}, TypeError, "coordinator or a torchft Manager"),
        ({"optimizer": 3}, TypeError, "torch optimizer is needed"),
        ({"heal": "all"}, ValueError, "heal"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite"),
    ],
)
def test_t01_bad_arguments(change, error, says):
    net = model()
    args = {"coordinator": Local(), "optimizer": KINDS["sgd"](net.parameters()), **change}
    with pytest.raises(error, match=says):
        FaultTolerantOptimizer(**args)


def test_t01_optimizers_that_try_steps_out_are_refused():
    for kind in (torch.optim.LBFGS, LBFGS):
        with pytest.raises(TypeError, match="several trial points"):
            FaultTolerantOptimizer(Local(), kind(model().parameters()))
    with pytest.raises(TypeError, match="already"):
        FaultTolerantOptimizer(Local(), made("sgd", Local())[1])


def test_t02_it_is_an_optimizer():
    assert isinstance(made("sgd", Local())[1], torch.optim.Optimizer)


def test_t03_t05_the_order_of_a_step():
    log = []
    net, opt = recorded(log)
    train(opt, net, 2)
    assert log == ["start", ("zero", True), "decide", "update"] * 2


def test_t04_set_to_none_by_position_and_by_name():
    net, opt = made("sgd", Local())
    train(opt, net, 1)
    opt.zero_grad(False)
    assert not net.weight.grad.any()
    opt.zero_grad(set_to_none=True)
    assert net.weight.grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_t10_groups_may_come_and_go_while_a_step_is_open(set_to_none):
    """As fine-tuning does it between two epochs, where zero_grad ends a loop and begins one."""
    log = []
    net, opt = recorded(log)
    train(opt, net, 1)
    log.clear()
    opt.zero_grad(set_to_none)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    opt.zero_grad(set_to_none)
    del opt.param_groups[0]
    opt.zero_grad(set_to_none)
    opt.step()
    assert [what for what in log if isinstance(what, str)] == ["start", "decide", "update"]
    assert opt.decision.committed


@kinds
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_t05_t06_a_refused_step_changes_nothing(kind, value):
    net, opt = made(kind, Scripted([True, False, True]))
    train(opt, net, 1)
    before = everything(opt)
    opt.zero_grad()
    (loss_of(net, 1) * value).backward()
    opt.step()
    assert not opt.decision.committed
    assert opt.decision.reason == "the script says so"
    assert_same(everything(opt), before)
    train(opt, net, 1, first=1)
    bare, alone = made(kind, Local())
    train(alone, bare, 2)
    assert_same(everything(opt), everything(alone))


def test_t07_t08_a_closure_is_evaluated_once_and_its_loss_returned():
    log = []
    net, opt = recorded(log)

    def closure():
        log.append("closure")
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = opt.step(closure)
    assert loss == loss_of(model())
    assert log == ["start", "closure", ("zero", True), "decide", "update"]
    assert opt.decision.committed
    opt.zero_grad()
    assert opt.step() is None


def test_t08_a_closure_after_zero_grad_belongs_to_the_same_step():
    log = []
    net, opt = recorded(log)
    opt.zero_grad()
    opt.step(lambda: loss_of(net).backward())
    assert log == ["start", ("zero", True), "decide", "update"]


def test_t08_a_closure_that_raises_leaves_the_step_open():
    log = []
    net, opt = recorded(log)

    def fails():
        raise OSError("no batch")

    with pytest.raises(OSError, match="no batch"):
        opt.step(fails)
    opt.step(lambda: loss_of(net).backward())
    assert log == ["start", "decide", "update"]


def test_t10_a_parameter_group_is_added_inside():
    _, opt = made("adamw", Local())
    more = torch.nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [more], "lr": 0.5})
    assert opt.optim.param_groups[1]["lr"] == 0.5
    opt.zero_grad()
    more.sum().backward()
    opt.step()
    assert more[0] != 1.0


@kinds
def test_t25_steps_with_nan_gradients_are_committed_or_refused(kind):
    net, opt = made(kind, Local(), nonfinite="refuse")
    before = everything(opt)
    opt.zero_grad()
    loss_of(net).backward()
    net.bias.grad[1] = float("inf")
    opt.step()
    assert not opt.decision.committed
    assert "parameter 1, of shape (2,), has an infinite or NaN entry" in opt.decision.reason
    assert_same(everything(opt), before)
    train(opt, net, 1)
    assert opt.decision.committed
    net, opt = made("sgd", Local())
    opt.zero_grad()
    (loss_of(net) * float("nan")).backward()
    opt.step()
    assert opt.decision.committed
    assert net.weight.isnan().all()


def test_t25_sparse_gradients_are_looked_at_too():
    table = torch.nn.Embedding(4, 2, sparse=True)
    inside = torch.optim.SparseAdam(table.parameters())
    opt = FaultTolerantOptimizer(Local(), inside, nonfinite="refuse")
    for factor, committed in ((float("nan"), False), (1.0, True)):
        opt.zero_grad()
        (table(torch.tensor([1])).sum() * factor).backward()
        opt.step()
        assert opt.decision.committed is committed


def test_t26_step_before_zero_grad_and_step_twice():
    net, opt = made("sgd", Local())
    loss_of(net).backward()
    with pytest.raises(RuntimeError, match=r"before zero_grad\(\)"):
        opt.step()
    train(opt, net, 1)
    before = everything(opt)
    with pytest.raises(RuntimeError, match="twice for the same gradients"):
        opt.step()
    assert_same(everything(opt), before)
    assert not opt.coordinator.is_open


def test_t26_zero_grad_twice_is_one_step_of_the_group():
    for set_to_none in (True, False):
        log = []
        net, opt = recorded(log)
        train(opt, net, 1)
        for _ in range(3):
            opt.zero_grad(set_to_none)
        assert log.count("start") == 2
        loss_of(net).backward()
        opt.step()
        assert log.count("decide") == 2


@pytest.mark.parametrize("error", [ValueError("no memory"), KeyboardInterrupt()])
def test_t27_a_step_that_raises_is_taken_back(error):
    net, opt = made("sgd", Local())
    train(opt, net, 1)

    def fails(*_):
        raise error

    handle = opt.optim.register_step_pre_hook(fails)
    opt.zero_grad()
    loss_of(net).backward()
    with pytest.raises(type(error)):
        opt.step()
    assert opt.coordinator.step == 1
    assert not opt.decision.committed
    handle.remove()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="restart it from a checkpoint"):
        opt.step()


def test_t28_a_reported_error_refuses_one_step():
    net, opt = made("adamw", Local())
    opt.zero_grad()
    opt.coordinator.report_error(OSError("a peer hangs"))
    loss_of(net).backward()
    opt.step()
    assert opt.decision.reason == "OSError: a peer hangs"
    train(opt, net, 2)
    assert opt.decision.committed
    assert opt.coordinator.step == 2
    bare, alone = made("adamw", Local())
    train(alone, bare, 2)
    assert_same(everything(opt), everything(alone))


def test_t29_more_refused_steps_than_max_retries():
    net, opt = made("sgd", Scripted([True, False, False, False], max_retries=2))
    train(opt, net, 3)
    with pytest.raises(RuntimeError, match="max_retries=2"):
        train(opt, net, 1)


def test_t39_gradient_accumulation_is_one_vote():
    log = []
    net, opt = recorded(log)
    opt.zero_grad()
    for i in range(3):
        loss_of(net, i).backward()
    opt.step()
    assert log == ["start", ("zero", True), "decide", "update"]
    bare = model()
    sum(loss_of(bare, i) for i in range(3)).backward()
    torch.testing.assert_close(net.weight, bare.weight - 0.1 * bare.weight.grad)


def test_gradients_are_averaged_over_the_group():
    ends = [None, None]
    meeting = Meeting(2)

    def replica(group, number):
        net = torch.nn.ParameterList([torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(())])
        optim = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.5)
        opt = FaultTolerantOptimizer(group, optim, average_gradients=True)
        net[3].requires_grad_(False)
        for _ in range(2):
            opt.zero_grad()
            (net[0].sum() * (1.0 if number else 3.0)).backward()
            if number:
                net[1].sum().backward()
            opt.step()
        ends[number] = [p.detach().clone() for p in net], [p.grad for p in net]

    meeting.run(replica)
    values, grads = ends[0]
    assert_same(values, ends[1][0])
    for x, want in zip(values, (-2.75, -0.5, 1.0, 1.0), strict=True):
        assert (x == want).all()
    assert grads[2] is None
    assert grads[3] is None
    assert_same(grads[1], torch.full((2,), 0.5))


def test_one_replica_with_infinite_gradients_refuses_for_all():
    committed = [[], []]

    def replica(group, number):
        net, opt = made("adamw", group, average_gradients=True, nonfinite="refuse")
        for i in range(3):
            opt.zero_grad()
            loss = loss_of(net, i)
            (loss * float("inf") if (i, number) == (1, 0) else loss).backward()
            opt.step()
            committed[number].append(opt.decision.committed)

    Meeting(2).run(replica)
    assert committed == [[True, False, True]] * 2


def test_sparse_gradients_are_not_averaged():
    table = torch.nn.Embedding(4, 2, sparse=True)
    inside = torch.optim.SparseAdam(table.parameters())
    opt = FaultTolerantOptimizer(Local(), inside, average_gradients=True)
    opt.zero_grad()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        opt.step()
