"""When a step of the group begins and is voted on: several optimizers, GradScaler, failures."""

import pytest
import torch
from helpers import assert_same
from torch.amp.grad_scaler import GradScaler
from voting import Counting, everything, loss_of, made, model, together, train

from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted


def pair(group, **kwargs):
    return made("adamw", group, seed=1, **kwargs), made("sgd", group, seed=2, **kwargs)


def assert_taken(optimizers, steps):
    """Each of the two optimizers ended where one alone does with these batches."""
    for opt, (seed, kind), taken in zip(optimizers, ((1, "adamw"), (2, "sgd")), steps, strict=True):
        net, alone = made(kind, Local(), seed=seed)
        for i in taken:
            train(alone, net, 1, first=i)
        assert_same(everything(opt), everything(alone))


# ---------------------------------------------------------------- two optimizers of one group
def play(script, both):
    """A loop over two optimizers, a and b, in words.

    za: zero_grad of a; ga: the backward pass of its loss, g: of the sum of both; sa: its step;
    |: the next batch.
    """
    (net_a, a), (net_b, b) = both
    i = 0
    for word in script.split():
        if word == "|":
            i += 1
        elif word == "g":
            (loss_of(net_a, i) + loss_of(net_b, i)).backward()
        else:
            net, opt = (net_a, a) if word[1] == "a" else (net_b, b)
            {"z": opt.zero_grad, "g": loss_of(net, i).backward, "s": opt.step}[word[0]]()


SKIPPED = "zeroed without a step()"
LOOPS = {
    "zeroed together they share a vote": (
        "za zb g sa sb | za zb g sb sa",
        ["", ""],
        ([0, 1], [0, 1]),
    ),
    "one after the other they have two": (
        "za ga sa zb gb sb | za ga sa zb gb sb",
        [""] * 4,
        ([0, 1], [0, 1]),
    ),
    "zeroed after their steps, they wait for each other": (
        "za zb g sa za sb zb | g sa za sb zb | g sa za sb zb",
        [""] * 3,
        ([0, 1, 2], [0, 1, 2]),
    ),
    "zeroed before their own backward, which another's has reached": (
        "za zb g zb gb sa sb | za zb g zb gb sa sb",
        [""] * 2,
        ([0, 1], [0, 1]),
    ),
    "skipped by both, a step is refused": (
        "za zb g sa sb | za zb g | za zb g sa sb",
        ["", SKIPPED, ""],
        ([0, 2], [0, 2]),
    ),
    "alone, one that skips a step closes its vote": (
        "za ga sa | za ga | za ga sa",
        ["", SKIPPED, ""],
        ([0, 2], []),
    ),
    "skipped by one, it is a step of the other": (
        "za zb g sa sb | za zb g sb | za zb g sa sb",
        [""] * 3,
        ([0, 2], [0, 1, 2]),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_which_steps_two_optimizers_take(name):
    script, reasons, taken = LOOPS[name]
    group = Counting()
    both = pair(group)
    play(script, both)
    assert_taken([opt for _, opt in both], taken)
    assert len(group.reasons) == len(reasons)
    assert all(mine in found for mine, found in zip(reasons, group.reasons, strict=True))
    assert group.starts == len(reasons) + group.is_open


@pytest.mark.parametrize(
    ("script", "last", "says"),
    [
        ("za zb ga sa za ga", "sa", "another optimizer that shares it"),
        ("za zb ga sa gb", "sb", "made after another optimizer's step"),
    ],
)
def test_a_loop_that_mixes_two_steps_is_an_error(script, last, says):
    both = pair(Counting())
    play(script, both)
    with pytest.raises(RuntimeError, match=says):
        play(last, both)
    if last == "sa":
        with pytest.raises(RuntimeError, match=says):
            both[0][1].step(lambda: 0.0)
        play("sb sa", both)


def test_gradients_added_to_averaged_ones_are_an_error():
    """They would be those of one replica. Clipping may change the averaged ones."""
    both = pair(Local(), average_gradients=True)
    play("za zb g sa gb", both)
    (_, b) = both[1]
    before = everything(b)
    with pytest.raises(RuntimeError, match="made after another optimizer's step"):
        b.step()
    assert_same(everything(b), before)
    play("zb gb sb za zb g sa", both)
    torch.nn.utils.clip_grad_norm_(both[1][0].parameters(), 0.1)
    play("sb", both)
    assert b.decision.committed
    assert not any(p._post_accumulate_grad_hooks for net, _ in both for p in net.parameters())


def test_a_refusal_is_one_for_all_that_share_the_vote():
    group = Scripted([True, False, True])
    both = pair(group)
    for refused in (False, True, False):
        before = [everything(opt) for _, opt in both]
        play("za zb g sa sb", both)
        decisions = [opt.decision for _, opt in both]
        assert decisions[0] is decisions[1]
        if refused:
            assert_same([everything(opt) for _, opt in both], before)
    assert group.next == 3


def test_gradients_of_both_are_averaged_before_the_one_vote():
    def replica(group, number):
        (net_a, a), (net_b, b) = pair(group, average_gradients=True)
        for i in range(3):
            a.zero_grad()
            b.zero_grad()
            (loss_of(net_a, 2 * i + number) + loss_of(net_b, 2 * i + number)).backward()
            b.step()
            a.step()
        return everything(a), everything(b)

    assert_same(*together(replica))


def test_an_optimizer_takes_gradients_that_only_another_replica_has():
    def replica(group, number):
        (net_a, a), (net_b, b) = pair(group, average_gradients=True)
        for set_to_none in (True, False):
            for opt in (a, b):
                opt.zero_grad(set_to_none)
            (loss_of(net_a) + (loss_of(net_b) if number else 0)).backward()
            a.step()
            b.step()
        a.zero_grad()
        b.zero_grad(set_to_none=False)
        loss_of(net_a).backward()
        a.step()
        loss_of(net_b).backward()
        with pytest.raises(RuntimeError, match="made after another optimizer's step"):
            b.step()
        return everything(a), everything(b)

    assert_same(*together(replica))


def test_what_fails_in_one_is_not_taken_by_the_other():
    group = Counting()
    both = pair(group)
    a, b = (opt for _, opt in both)

    def fails(*_):
        raise ValueError("no memory")

    a.optim.register_step_pre_hook(fails)
    play("za zb g", both)
    before = everything(b)
    with pytest.raises(ValueError, match="no memory"):
        a.step()
    b.step()
    assert not b.decision.committed
    assert_same(everything(b), before)
    assert group.step == 0


def test_optimizers_with_coordinators_of_their_own_do_not_wait():
    (net_a, a), (_, b) = made("sgd", Local()), made("sgd", Local())
    b.zero_grad()
    train(a, net_a, 2)
    b.step()


# ---------------------------------------------------------------- GradScaler
def scaled_steps(scaler, opt, losses, unscale=False):
    for loss in losses:
        opt.zero_grad()
        scaler.scale(loss()).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()


def losses_of(net, bad=2, number=0, replicas=1):
    """Of four batches, one of them infinite, in the one of several replicas that has it."""
    return [
        lambda i=i: loss_of(net, replicas * i + number) * (float("inf") if i == bad else 1.0)
        for i in range(4)
    ]


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_leaves_infinite_gradients_out(average, unscale):
    group = Counting()
    net, opt = made("adamw", group, average_gradients=average)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaled_steps(scaler, opt, losses_of(net), unscale)
    assert group.starts == 4
    assert [not reason for reason in group.reasons] == [True, True, False, True]
    assert scaler.get_scale() == 4.0
    bare = model()
    alone = torch.optim.AdamW(bare.parameters(), lr=0.1)
    scaled_steps(GradScaler("cpu", init_scale=8.0), alone, losses_of(bare))
    assert_same(everything(opt), everything(alone))


def test_one_replica_alone_has_infinite_gradients():
    """With gradients averaged in step(): a replica that skipped it would keep the other waiting."""

    def replica(group, number):
        net, opt = made("adamw", group, average_gradients=True)
        scaler, committed = GradScaler("cpu", init_scale=8.0), []
        for loss in losses_of(net, -1 if number else 1, number, 2):
            scaled_steps(scaler, opt, [loss])
            committed.append(opt.decision.committed)
        return everything(opt), scaler.get_scale(), committed

    ends, scales, committed = zip(*together(replica), strict=True)
    assert committed == ([True, False, True, True],) * 2
    assert scales == (4.0, 8.0)
    assert_same(*ends)


def test_an_infinite_gradient_that_is_clipped_before_the_step_is_refused_by_all():
    """Only the scaler of one replica has seen it."""

    def replica(group, number):
        w = torch.nn.Parameter(torch.ones(2))
        opt = FaultTolerantOptimizer(group, torch.optim.SGD([w], lr=0.25), average_gradients=True)
        scaler = GradScaler("cpu", init_scale=8.0)
        for i in range(3):
            opt.zero_grad()
            scaler.scale(w.sum() * (float("inf") if (i, number) == (1, 1) else 1.0)).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_value_([w], 1.0)
            scaler.step(opt)
            scaler.update()
        return w.detach(), scaler.get_scale()

    ends, scales = zip(*together(replica), strict=True)
    assert_same(*ends)
    assert (ends[0] == 0.5).all()
    assert scales == (8.0, 4.0)


def test_an_infinite_gradient_of_one_that_shared_the_vote_is_an_error():
    both = pair(Local(), average_gradients=True)
    (net, _), (other, opt) = both
    scaler = GradScaler("cpu", init_scale=8.0)
    play("za zb", both)
    scaler.scale(loss_of(net) + loss_of(other) * float("inf")).backward()
    for _, each in both:
        scaler.unscale_(each)
    other.weight.grad = other.bias.grad = None
    before = everything(opt)
    scaler.step(both[0][1])
    with pytest.raises(RuntimeError, match="clip by norm"):
        scaler.step(opt)
    assert_same(everything(opt), before)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_and_two_averaging_optimizers_with_one_vote(unscale):
    group = Counting()
    (net_a, a), (net_b, b) = pair(group, average_gradients=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    for i in range(3):
        before = everything(a), everything(b)
        for opt in (a, b):
            opt.zero_grad()
        bad = float("inf") if i == 1 else 1.0
        scaler.scale(loss_of(net_a, i) + bad * loss_of(net_b, i)).backward()
        for opt in (a, b) if unscale else ():
            scaler.unscale_(opt)
        scaler.step(a)
        if not unscale:
            with pytest.raises(RuntimeError, match="before they were unscaled"):
                scaler.step(b)
            return
        scaler.step(b)
        scaler.update()
        if i == 1:
            assert_same((everything(a), everything(b)), before)
    assert [not reason for reason in group.reasons] == [True, False, True]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("at_end", [False, True])
def test_one_of_two_optimizers_has_infinite_gradients(bad, at_end):
    """It skips the step that they share, wherever zero_grad is called."""
    group = Counting()
    both = pair(group)
    scaler = GradScaler("cpu", init_scale=8.0)
    if at_end:
        play("za zb", both)
    for i in range(3):
        if not at_end:
            play("za zb", both)
        for number, (net, _) in enumerate(both):
            factor = float("inf") if (i, number) == (1, bad) else 1.0
            scaler.scale(loss_of(net, i) * factor).backward()
        for _, opt in both:
            scaler.step(opt)
            if at_end:
                opt.zero_grad()
        scaler.update()
    assert group.reasons == ["", "", ""]
    taken = [[i for i in range(3) if (i, number) != (1, bad)] for number in (0, 1)]
    assert_taken([opt for _, opt in both], taken)


# ---------------------------------------------------------------- no quorum, closed
class NoQuorum(Counting):
    """As torchft, whose quorum fails at the start or, if asynchronous, in a reduction."""

    fails = ""

    def _start(self):
        super()._start()
        self._fail("start")

    def allreduce(self, values):
        self._open = self._open and self.fails != "reduction"
        self._fail("reduction")
        return super().allreduce(values)

    def _fail(self, where):
        if self.fails == where:
            self.fails = ""
            raise TimeoutError("no quorum")


@pytest.mark.parametrize("where", ["start", "reduction"])
def test_a_step_that_finds_no_quorum_takes_nothing_back_and_is_tried_again(where):
    group = NoQuorum()
    net, opt = made("adamw", group, average_gradients=True)
    train(opt, net, 2)
    before = everything(opt)
    group.fails = where
    with pytest.raises(TimeoutError):
        train(opt, net, 1, first=2)
    assert_same(everything(opt), before)
    assert group.step == 2
    train(opt, net, 1, first=2)
    alone, other = made("adamw", Local())
    train(other, alone, 3)
    assert_same(everything(opt), everything(other))
    assert (group.step, group.starts) == (3, 4)


def test_a_scale_is_not_used_again_after_a_step_that_finds_no_quorum():
    group = NoQuorum()
    net, opt = made("sgd", group, average_gradients=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    losses = losses_of(net, bad=None)
    group.fails = "reduction"
    with pytest.raises(TimeoutError):
        scaled_steps(scaler, opt, losses[:1])
    scaled_steps(scaler, opt, losses)
    alone_net, alone = made("sgd", Local())
    train(alone, alone_net, 4)
    assert_same(everything(opt), everything(alone))


def test_zero_grad_of_a_closed_coordinator_takes_nothing_back():
    net, opt = made("sgd", Counting())
    train(opt, net, 1)
    opt.zero_grad()
    loss_of(net).backward()
    opt.coordinator.close()
    for call, says in ((opt.zero_grad, "is closed"), (opt.step, "could not start one")):
        with pytest.raises(RuntimeError, match=says):
            call()
    assert opt.coordinator.step == 1
    assert opt.decision.committed


def test_gradients_that_were_made_in_inference_mode_count():
    w = torch.nn.Parameter(torch.ones(3))
    opt = FaultTolerantOptimizer(Local(), torch.optim.SGD([w], lr=0.25))
    for _ in range(2):
        opt.zero_grad()
        with torch.inference_mode():
            w.grad = torch.ones(3)
            opt.zero_grad()
            w.grad = torch.ones(3)
            opt.step()
    assert torch.equal(w.detach(), torch.full((3,), 0.5))
