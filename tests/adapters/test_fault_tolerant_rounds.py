"""When a step of the group begins and is voted on: GradScaler, several optimizers, checkpoints."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from torch.amp.grad_scaler import GradScaler
from voting import HEALS, Meeting, everything, loss_of, made, model, train

from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted


class Counting(Local):
    """starts, and the reasons of all decisions."""

    def __init__(self):
        super().__init__()
        self.starts = 0
        self.reasons = []

    def _start(self):
        self.starts += 1

    def _decide(self):
        made = super()._decide()
        self.reasons.append(made.reason)
        return made


def scaled_step(scaler, opt, loss):
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_t24_grad_scaler(average, unscale):
    group = Counting()
    net, opt = made("adamw", group, average_gradients=average)
    scaler = GradScaler("cpu", init_scale=8.0)
    for i in range(4):
        loss = loss_of(net, i)
        before = everything(opt)
        opt.zero_grad()
        scaler.scale(loss * float("inf") if i == 2 else loss).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        if i == 2:
            assert_same(everything(opt), before)
    assert group.starts == 4
    assert [not reason for reason in group.reasons] == [True, True, False, True]
    assert scaler.get_scale() == 4.0
    bare = model()
    alone = torch.optim.AdamW(bare.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    for i in range(4):
        loss = loss_of(bare, i)
        scaled_step(scaler, alone, loss * float("inf") if i == 2 else loss)
    assert_same(everything(opt), everything(alone))


def test_t24_one_replica_alone_has_infinite_gradients():
    """With gradients averaged in step(): a replica that skipped it would keep the other waiting."""
    ends, scales, committed = [None, None], [0.0, 0.0], [[], []]

    def replica(group, number):
        net, opt = made("adamw", group, average_gradients=True)
        scaler = GradScaler("cpu", init_scale=8.0)
        for i in range(4):
            loss = loss_of(net, 2 * i + number)
            scaled_step(scaler, opt, loss * float("inf") if (i, number) == (1, 0) else loss)
            committed[number].append(opt.decision.committed)
        ends[number], scales[number] = everything(opt), scaler.get_scale()

    Meeting(2).run(replica)
    assert committed == [[True, False, True, True]] * 2
    assert scales == [4.0, 8.0]
    assert_same(*ends)


@pytest.mark.parametrize("unscale", [False, True])
def test_t24_t30_a_grad_scaler_and_two_optimizers_with_one_vote(unscale):
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


def test_t24_a_loop_that_skips_a_step_closes_the_vote():
    group = Counting()
    net, opt = made("sgd", group)
    for i in range(4):
        opt.zero_grad(set_to_none=i % 2 == 0)
        loss_of(net, i).backward()
        if i != 1:
            opt.step()
    assert group.starts == 4
    assert [bool(reason) for reason in group.reasons] == [False, True, False, False]
    assert "zeroed without a step()" in group.reasons[1]
    assert group.step == 3


def pair(group, **kwargs):
    return made("adamw", group, seed=1, **kwargs), made("sgd", group, seed=2, **kwargs)


def alone(seed_and_kind):
    seed, kind = seed_and_kind
    return made(kind, Local(), seed=seed)


def test_t30_zeroed_together_they_share_a_vote():
    group = Scripted([True, False, True])
    (net_a, a), (net_b, b) = pair(group)
    for i in range(3):
        before = everything(a), everything(b)
        a.zero_grad()
        b.zero_grad()
        (loss_of(net_a, i) + loss_of(net_b, i)).backward()
        a.step()
        b.step()
        assert a.decision is b.decision
        if i == 1:
            assert_same((everything(a), everything(b)), before)
    assert group.next == 3


def test_t30_one_after_the_other_they_have_two():
    group = Scripted([True, False] * 2)
    (net_a, a), (net_b, b) = pair(group)
    start = everything(b)
    for i in range(2):
        for net, opt in ((net_a, a), (net_b, b)):
            opt.zero_grad()
            loss_of(net, i).backward()
            opt.step()
        assert a.decision.committed
        assert not b.decision.committed
    assert_same(everything(b), start)
    lone, other = alone((1, "adamw"))
    train(other, lone, 2)
    assert_same(everything(a), everything(other))


def test_t30_the_next_step_begins_when_all_have_taken_the_last():
    group = Counting()
    (net_a, a), (net_b, b) = pair(group)
    seen = []
    a.zero_grad()
    b.zero_grad()
    for i in range(3):
        (loss_of(net_a, i) + loss_of(net_b, i)).backward()
        for opt in (a, b):
            opt.step()
            seen.append(group.starts)
            opt.zero_grad()
            seen.append(group.starts)
    assert seen == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert len(group.reasons) == 3
    lone, other = alone((2, "sgd"))
    train(other, lone, 3)
    assert_same(everything(b), everything(other))


def test_t30_gradients_zeroed_before_their_backward_do_not_refuse_the_step():
    """As where the first backward also reaches the other's parameters."""
    group = Counting()
    (net_a, a), (net_b, b) = pair(group)
    for i in range(2):
        a.zero_grad()
        b.zero_grad()
        (loss_of(net_a, i) + loss_of(net_b, i)).backward()
        b.zero_grad()
        loss_of(net_b, i).backward()
        a.step()
        b.step()
    assert group.reasons == ["", ""]
    lone, other = alone((2, "sgd"))
    train(other, lone, 2)
    assert_same(everything(b), everything(other))


def test_t30_both_skipped_is_one_refused_step():
    group = Counting()
    (net_a, a), (net_b, b) = pair(group)
    for i in range(3):
        a.zero_grad()
        b.zero_grad()
        (loss_of(net_a, i) + loss_of(net_b, i)).backward()
        if i != 1:
            a.step()
            b.step()
    assert [bool(reason) for reason in group.reasons] == [False, True, False]
    assert group.starts == 3


def test_t30_one_skipped_is_a_step_of_the_other():
    group = Counting()
    (net_a, a), (net_b, b) = pair(group)
    for i in range(3):
        a.zero_grad()
        b.zero_grad()
        (loss_of(net_a, i) + loss_of(net_b, i)).backward()
        if i != 1:
            a.step()
        b.step()
    assert group.reasons == ["", "", ""]
    assert group.starts == 3


def test_t30_a_step_cannot_be_taken_before_the_last_one_is_over():
    (net_a, a), (_, b) = pair(Counting())
    a.zero_grad()
    b.zero_grad()
    loss_of(net_a).backward()
    a.step()
    a.zero_grad()
    loss_of(net_a).backward()
    with pytest.raises(RuntimeError, match="another optimizer that shares it"):
        a.step()
    with pytest.raises(RuntimeError, match="another optimizer that shares it"):
        a.step(lambda: 0.0)
    b.step()
    a.step()


def test_t30_gradients_made_after_the_vote_are_an_error():
    (net_a, a), (net_b, b) = pair(Counting())
    a.zero_grad()
    b.zero_grad()
    loss_of(net_a).backward()
    a.step()
    loss_of(net_b).backward()
    with pytest.raises(RuntimeError, match="made after another optimizer's step"):
        b.step()


def test_t30_gradients_of_both_are_averaged_before_the_one_vote():
    ends = [None, None]

    def replica(group, number):
        (net_a, a), (net_b, b) = pair(group, average_gradients=True)
        for i in range(3):
            a.zero_grad()
            b.zero_grad()
            (loss_of(net_a, 2 * i + number) + loss_of(net_b, 2 * i + number)).backward()
            b.step()
            a.step()
        ends[number] = everything(a), everything(b)

    Meeting(2).run(replica)
    assert_same(*ends)


def test_t27_t30_what_fails_in_one_is_not_taken_by_the_other():
    group = Counting()
    (net_a, a), (net_b, b) = pair(group)

    def fails(*_):
        raise ValueError("no memory")

    a.optim.register_step_pre_hook(fails)
    a.zero_grad()
    b.zero_grad()
    (loss_of(net_a) + loss_of(net_b)).backward()
    before = everything(b)
    with pytest.raises(ValueError, match="no memory"):
        a.step()
    b.step()
    assert not b.decision.committed
    assert_same(everything(b), before)
    assert group.step == 0


def test_t29_after_too_many_refusals_the_group_can_go_on():
    group = Scripted([False, False, True], max_retries=0)
    net, opt = made("sgd", group)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="max_retries"):
            train(opt, net, 1)
    train(opt, net, 1)
    assert opt.decision.committed


def test_a_start_that_fails_is_tried_again():
    class Fails(Counting):
        def _start(self):
            super()._start()
            if self.starts == 2:
                raise TimeoutError("no quorum")

    net, opt = made("sgd", Fails())
    train(opt, net, 1)
    with pytest.raises(TimeoutError):
        opt.zero_grad()
    train(opt, net, 1)
    assert opt.decision == (True, False, 2, 1, "")


def test_optimizers_with_coordinators_of_their_own_do_not_wait():
    (net_a, a), (_, b) = made("sgd", Local()), made("sgd", Local())
    b.zero_grad()
    train(a, net_a, 2)
    b.step()


def test_a_wrong_peer_is_refused_before_anything_is_changed():
    class Peer:
        optimizer = None

        def saved(self):
            return self.optimizer.coordinator.saved()

    for kind, build, says in (
        ("sgd", lambda: torch.nn.Linear(3, 3), "parameter 0 is a torch.float32 of shape"),
        ("sgd", lambda: torch.nn.Linear(3, 2, bias=False), "it has 1 of them"),
    ):
        peer = Peer()
        net = build()
        peer.optimizer = FaultTolerantOptimizer(Local(), torch.optim.SGD(net.parameters()))
        mine, opt = made(kind, Scripted([HEALS], peer=peer.saved))
        before = everything(opt)
        with pytest.raises(ValueError, match=says):
            train(opt, mine, 1)
        assert_same(everything(opt), before)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("at_end", [False, True])
def test_t24_t30_one_of_two_optimizers_has_infinite_gradients(bad, at_end):
    """It skips the step that they share, wherever zero_grad is called."""
    group = Counting()
    both = pair(group)
    scaler = GradScaler("cpu", init_scale=8.0)
    if at_end:
        for _, opt in both:
            opt.zero_grad()
    for i in range(3):
        if not at_end:
            for _, opt in both:
                opt.zero_grad()
        for number, (net, _) in enumerate(both):
            factor = float("inf") if (i, number) == (1, bad) else 1.0
            scaler.scale(loss_of(net, i) * factor).backward()
        for _, opt in both:
            scaler.step(opt)
            if at_end:
                opt.zero_grad()
        scaler.update()
    assert group.reasons == ["", "", ""]
    for number, (seed, kind) in enumerate(((1, "adamw"), (2, "sgd"))):
        lone, other = alone((seed, kind))
        for i in range(3):
            if (i, number) != (1, bad):
                train(other, lone, 1, first=i)
        assert_same(everything(both[number][1]), everything(other))


class NoQuorum(Counting):
    """As torchft, whose asynchronous quorum may fail in the first reduction."""

    fails = False

    def allreduce(self, values):
        if self.fails:
            self.fails = self._open = False
            raise TimeoutError("no quorum")
        return super().allreduce(values)


def test_a_reduction_that_finds_no_quorum_ends_the_step_and_takes_nothing_back():
    group = NoQuorum()
    net, opt = made("adamw", group, average_gradients=True)
    train(opt, net, 2)
    before = everything(opt)
    group.fails = True
    with pytest.raises(TimeoutError):
        train(opt, net, 1, first=2)
    assert_same(everything(opt), before)
    assert group.step == 2
    train(opt, net, 1, first=2)
    lone, other = alone((0, "adamw"))
    train(other, lone, 3)
    assert_same(everything(opt), everything(other))
    assert (group.step, group.starts) == (3, 4)


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
