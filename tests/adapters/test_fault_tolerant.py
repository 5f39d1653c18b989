"""The fault-tolerant optimizer, step by step, and as an object that stands for the one inside."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from helpers import assert_close, assert_same
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from voting import KINDS, batch, everything, loss_of, made, model, together, train

import functional_optim as fo
from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted

kinds = pytest.mark.parametrize("kind", KINDS)


# ---------------------------------------------------------------- the order of a step
class Recording(Local):
    """What happens, in order."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def _start(self):
        self.log.append("start")

    def _decide(self):
        self.log.append("decide")
        return super()._decide()


def recorded(log):
    net = model()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    plain = optim.zero_grad, optim.step
    optim.zero_grad = lambda *args: (log.append("zero"), plain[0](*args))
    optim.step = lambda: (log.append("update"), plain[1]())
    return net, FaultTolerantOptimizer(Recording(log), optim)


def play(opt, net, script):
    """z: zero_grad; 0: one that leaves zeros; g: a backward pass; s: a step."""
    zero = {"z": opt.zero_grad, "0": lambda: opt.zero_grad(False)}
    for word in script.split():
        {**zero, "g": lambda: loss_of(net).backward(), "s": opt.step}[word]()


def step_with_a_closure_that_fails_first(opt, net):
    def fails():
        raise OSError("no batch")

    with pytest.raises(OSError, match="no batch"):
        opt.step(fails)
    opt.step(lambda: loss_of(net).backward())


STEP = ["start", "zero", "decide", "update"]
ORDERS = {
    "two steps": (lambda opt, net: play(opt, net, "z g s z g s"), STEP * 2),
    "accumulation is one vote": (lambda opt, net: play(opt, net, "z g g g s"), STEP),
    "a closure after zero_grad": (
        lambda opt, net: (opt.zero_grad(), opt.step(lambda: loss_of(net).backward())),
        STEP,
    ),
    "a closure that raises leaves the step open": (
        step_with_a_closure_that_fails_first,
        ["start", "decide", "update"],
    ),
    "zero_grad often is one step": (
        lambda opt, net: play(opt, net, "z g s z z z g s"),
        [*STEP, "start", "zero", "zero", "zero", "decide", "update"],
    ),
    "zeros are no gradients": (
        lambda opt, net: play(opt, net, "z g s 0 0 0 g s"),
        [*STEP, "start", "zero", "zero", "zero", "decide", "update"],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_step(name):
    loop, wanted = ORDERS[name]
    log = []
    net, opt = recorded(log)
    loop(opt, net)
    assert log == wanted


def test_a_closure_is_evaluated_once_and_its_loss_returned():
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
        assert opt.step(closure) == loss_of(model())
    assert log == ["start", "closure", "zero", "decide", "update"]
    assert opt.decision.committed
    opt.zero_grad()
    assert opt.step() is None
    opt.register_step_pre_hook(lambda self, args, kwargs: ((self, closure), {}))
    expected = loss_of(net)
    assert opt.step() == expected
    opt.register_step_pre_hook(lambda *_: 3)
    with pytest.raises(RuntimeError, match="pre-hook must return None or a tuple"):
        opt.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_groups_may_come_and_go_while_a_step_is_open(set_to_none):
    """As fine-tuning does it between two epochs, where zero_grad ends a loop and begins one."""
    log = []
    net, opt = recorded(log)
    train(opt, net, 1)
    log.clear()
    opt.zero_grad(set_to_none)
    assert net.weight.grad is None if set_to_none else not net.weight.grad.any()
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert opt.optim.param_groups[1]["lr"] == 0.5
    opt.zero_grad(set_to_none=set_to_none)
    del opt.param_groups[0]
    opt.zero_grad(set_to_none)
    opt.step()
    assert [what for what in log if what != "zero"] == ["start", "decide", "update"]
    assert opt.decision.committed


# ---------------------------------------------------------------- committed, refused, failed
@kinds
def test_alone_it_is_the_optimizer_inside_bit_for_bit(kind):
    net, opt = made(kind, Local())
    train(opt, net, 5)
    bare = model()
    inside = KINDS[kind](bare.parameters())
    train(inside, bare, 5)
    assert_same(everything(opt), everything(inside))


@kinds
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_refused_step_changes_nothing(kind, value):
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


@kinds
@pytest.mark.parametrize("average", [False, True])
def test_infinite_gradients_are_committed_or_refused(kind, average):
    net, opt = made(kind, Local(), nonfinite="refuse", average_gradients=average)
    before = everything(opt)
    opt.zero_grad()
    loss_of(net).backward()
    net.bias.grad[1] = float("inf")
    opt.step()
    assert not opt.decision.committed
    assert "parameter 1, of shape (2,), has an infinite or NaN element" in opt.decision.reason
    assert_same(everything(opt), before)
    train(opt, net, 1)
    assert opt.decision.committed
    net, opt = made("sgd", Local())
    opt.zero_grad()
    (loss_of(net) * float("nan")).backward()
    opt.step()
    assert opt.decision.committed
    assert net.weight.isnan().all()


def test_sparse_gradients_are_looked_at_and_not_averaged():
    table = torch.nn.Embedding(4, 2, sparse=True)

    def step(factor, **options):
        inside = torch.optim.SparseAdam(table.parameters())
        opt = FaultTolerantOptimizer(Local(), inside, **options)
        opt.zero_grad()
        (table(torch.tensor([1])).sum() * factor).backward()
        opt.step()
        return opt.decision.committed

    assert [step(x, nonfinite="refuse") for x in (float("nan"), 1.0)] == [False, True]
    with pytest.raises(TypeError, match="sparse"):
        step(1.0, average_gradients=True)


def test_step_before_zero_grad_and_step_twice():
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


@pytest.mark.parametrize("error", [ValueError("no memory"), KeyboardInterrupt()])
def test_a_step_that_raises_is_taken_back(error):
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


def test_gradients_are_averaged_over_the_group():
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
        return [p.detach().clone() for p in net], [p.grad for p in net]

    (values, grads), (others, _) = together(replica)
    assert_same(values, others)
    for x, want in zip(values, (-2.75, -0.5, 1.0, 1.0), strict=True):
        assert (x == want).all()
    assert grads[2:] == [None, None]
    assert_same(grads[1], torch.full((2,), 0.5))


def test_a_gradient_in_shared_memory_is_averaged_alone():
    """autograd.grad returns one tensor for both summands, and expanded ones."""

    def replica(group, number):
        a, b, c, d = params = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
        optim = torch.optim.SGD(params, lr=1.0)
        opt = FaultTolerantOptimizer(group, optim, average_gradients=True, nonfinite="refuse")
        found = []
        for factor in (float("nan"), 2.0):
            used = [a] if number else [a, b]
            opt.zero_grad()
            loss = sum(used).square().sum() / 2 * (1 + number)
            a.grad, *rest = torch.autograd.grad(loss, used)
            b.grad = rest[0] if rest else None
            (c.grad,) = torch.autograd.grad(factor * c.sum(), [c])
            d.grad = torch.zeros(2) if number else d.detach()
            opt.step()
            found += [p.tolist() for p in params]
        return found

    one, two = together(replica)
    assert one == two
    assert one == [[1.0, 1.0]] * 4 + [[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0], [0.5, 0.5]]


def test_a_gradient_that_another_replica_lacks_has_the_dtype_of_gradients():
    def replica(group, number):
        w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        w.grad_dtype = torch.float32
        optim = fo.adapters.SGD([w], lr=1.0, compile=False)
        opt = FaultTolerantOptimizer(group, optim, average_gradients=True)
        opt.zero_grad()
        w.grad = torch.ones(2) if number else None
        opt.step()
        return w.tolist(), w.grad

    assert_same(*together(replica))


# ---------------------------------------------------------------- the object
def test_state_dicts_are_those_of_the_optimizer_inside():
    net, opt = made("adamw", Local())
    train(opt, net, 2)
    assert_same(opt.state_dict(), opt.optim.state_dict())
    other_net, other = made("adamw", Local(), seed=1)
    other.load_state_dict(state_dict=copy.deepcopy(opt.state_dict()))
    assert_same(other.state_dict(), opt.state_dict())
    other_net.load_state_dict(net.state_dict())
    train(opt, net, 2)
    train(other, other_net, 2)
    assert_same(everything(opt), everything(other))
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict({"state": {}, "param_groups": []})


def test_groups_state_and_defaults_are_read_and_written_through():
    net, opt = made("adamw", Local())
    train(opt, net, 1)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    values = {
        "param_groups": [dict(opt.param_groups[0], lr=0.7)],
        "state": defaultdict(dict),
        "defaults": {"lr": 0.7},
    }
    for name, value in values.items():
        assert getattr(opt, name) is getattr(opt.optim, name)
        setattr(opt, name, value)
        assert getattr(opt, name) is getattr(opt.optim, name) is value


def test_step_hooks_of_all_kinds():
    log = []

    def noted(name):
        return lambda *args: log.append((name, type(args[0]).__name__))

    class Derived(FaultTolerantOptimizer):
        def step(self, closure=None):
            return super().step(closure)

    net = model()
    opt = Derived(Scripted([True, False, True]), KINDS["sgd"](net.parameters()))
    handles = [
        opt.register_step_pre_hook(noted("own before")),
        opt.register_step_post_hook(noted("own after")),
        opt.optim.register_step_pre_hook(noted("inner before")),
        opt.optim.register_step_post_hook(noted("inner after")),
        register_optimizer_step_pre_hook(noted("global before")),
        register_optimizer_step_post_hook(noted("global after")),
    ]
    mine = "Derived"
    of_inside = [(f"{what} before", "SGD") for what in ("global", "inner")]
    of_inside += [(f"{what} after", "SGD") for what in ("inner", "global")]
    try:
        for taken in (of_inside, []):
            log.clear()
            train(opt, net, 1)
            assert log == [("own before", mine), *taken, ("own after", mine)]
    finally:
        for handle in handles:
            handle.remove()
    log.clear()
    train(opt, net, 1)
    assert log == []


def test_state_dict_hooks_of_both():
    log = []
    _, opt = made("sgd", Local())

    def hooks(of, name):
        of.register_state_dict_pre_hook(lambda self: log.append(f"{name} saves"))
        of.register_state_dict_post_hook(lambda self, d: (log.append(f"{name} saved"), d)[1])
        of.register_load_state_dict_pre_hook(lambda self, d: log.append(f"{name} loads"))
        of.register_load_state_dict_post_hook(lambda self: log.append(f"{name} loaded"))

    hooks(opt, "own")
    hooks(opt.optim, "inner")
    opt.register_state_dict_post_hook(lambda self, d: {**d, "more": 1})
    opt.register_load_state_dict_pre_hook(lambda self, d: {k: d[k] for k in d if k != "more"})
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    saving = ["own saves", "inner saves", "inner saved", "own saved"]
    assert log == [*saving, "own loads", "inner loads", "inner loaded", "own loaded"]
    _, other = made("sgd", Local())
    other.register_load_state_dict_pre_hook(lambda self, d: d.pop("more") and None)
    other.load_state_dict(saved)
    assert saved["more"] == 1  # a hook works on a copy, as torch's do


@kinds
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_no_coordinator(kind, way):
    net, opt = made(kind, Local(), nonfinite="refuse", average_gradients=True, heal="schedules")
    train(opt, net, 2)
    other_net, other = way((net, opt))
    assert_same(everything(other), everything(opt))
    assert other.coordinator is None
    for call in (other.zero_grad, other.step):
        with pytest.raises(RuntimeError, match="no coordinator; assign"):
            call()
    assert way(other).coordinator is None
    other.coordinator = Local()
    train(opt, net, 2)
    train(other, other_net, 2)
    assert_same(everything(opt), everything(other))
    other.zero_grad()
    other_net.weight.sum().mul(float("nan")).backward()
    other.step()
    assert not other.decision.committed
    assert list(other.coordinator.saved()["optimizer"]) == ["schedule"]


def test_a_coordinator_can_be_assigned_between_steps():
    _, opt = made("sgd", Local())
    mine = opt.coordinator
    opt.coordinator = mine
    assert list(mine.saved()) == ["optimizer"]
    assert repr(opt) == f"FaultTolerantOptimizer over {opt.optim!r}"
    _, second = made("sgd", mine)
    assert list(mine.saved()) == ["optimizer", "optimizer.1"]
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="has begun with another coordinator"):
        opt.coordinator = Local()
    with pytest.raises(TypeError, match="coordinator"):
        second.coordinator = 3


def test_within_torch_compile_a_step_breaks_the_graph_and_is_the_same(fresh_dynamo):
    net, opt = made("adamw", Scripted([True, False, True]))
    for i in range(3):
        opt.zero_grad()
        torch.compile(net, backend="eager")(batch(i)).square().sum().backward()
        torch.compile(opt.step, backend="eager")()
    bare, alone = made("adamw", Local())
    train(alone, bare, 1)
    train(alone, bare, 1, first=2)
    assert_close(everything(opt), everything(alone), 1e-5)  # torch's is another one there
