"""The fault-tolerant optimizer under Lightning, Accelerate, distributed checkpoint, torchft."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from voting import KINDS, Counting, everything, halving, loss_of, made, model, train

from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
def test_a_distributed_checkpoint_is_loaded_without_a_vote(kind, flat, tensor):
    """It makes the state of a fresh optimizer by an empty step: no vote, and none left open."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, opt = made(kind, Counting())
    if tensor:
        opt.param_groups[0]["lr"] = torch.tensor(0.1)
    train(opt, net, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(net, opt, options=options))
    other_net, other = made(kind, Counting(), seed=1)
    if tensor:
        other.param_groups[0]["lr"] = torch.tensor(0.1)
    before = other_net.weight.detach().clone()
    set_optimizer_state_dict(other_net, other, saved, options=options)
    assert_same(other_net.weight.detach(), before)
    assert other.coordinator.starts == 0
    assert not other.coordinator.is_open
    other_net.load_state_dict(net.state_dict())
    train(opt, net, 2)
    train(other, other_net, 2)
    assert_same(everything(other), everything(opt))
    assert other.coordinator.starts == 2


def test_steps_that_look_empty_are_steps():
    """With gradients of 0, or a learning rate of 0, or a checkpoint that is asked for meanwhile."""
    net, opt = made("adamw", Counting())
    before = net.weight.detach().clone()
    opt.zero_grad()
    (loss_of(net) * 0.0).backward()
    opt.step()
    assert opt.coordinator.step == 1
    assert (net.weight != before).all()  # weight decay
    net, opt = made("sgd", Counting())
    opt.param_groups[0]["lr"] = 0.0
    train(opt, net, 2)
    opt.zero_grad()
    get_optimizer_state_dict(net, opt)
    loss_of(net).backward()
    opt.step()
    assert (opt.coordinator.starts, opt.coordinator.step) == (3, 3)


class Manager:
    """The part of a torchft Manager that its LocalSGD asks; the group's mean is half of ours."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.calls.append(name)

    def allreduce(self, tensor):
        tensor.mul_(0.5)
        return self

    def should_commit(self):
        return True


def test_torchfts_local_sgd_over_it():
    torchft = pytest.importorskip("torchft.local_sgd")
    net, opt = made("adamw", Scripted([True, False, True]))
    bare, alone = made("adamw", Local())
    manager = Manager()
    with torchft.LocalSGD(manager, net, opt, sync_every=2):
        train(opt, net, 3)
    sync = ["disallow_state_dict_read", "allow_state_dict_read"]
    assert manager.calls == [*sync, *sync, "start_quorum", "wait", "wait", *sync]
    train(alone, bare, 1)
    with torch.no_grad():
        for p in bare.parameters():
            p.mul_(0.5)
    train(alone, bare, 1, first=2)
    assert_same(everything(opt), everything(alone))


BATCHES = 6


def module(pl, group, manual=False, **kwargs):
    """A LightningModule over a linear layer, with a scheduler that steps after each batch."""

    class Module(pl.lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.automatic_optimization = not manual

        def training_step(self, batch, i):
            if not manual:
                return loss_of(self.net, i)
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss_of(self.net, i))
            opt.step()
            self.lr_schedulers().step()
            return None

        def configure_optimizers(self):
            inside = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            opt = inside if group is None else FaultTolerantOptimizer(group, inside, **kwargs)
            scheduler = halving(opt) if group is None else opt.follow(halving(opt))
            return [opt], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


def fit(pl, module, batches=BATCHES, **kwargs):
    return pl.fit(module, torch.utils.data.DataLoader(torch.zeros(batches, 1)), **kwargs)


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_steps_where_the_group_commits(pl, manual):
    script = [True, False, True, False, False, True]
    mine = module(pl, Scripted(script), manual)
    trainer = fit(pl, mine)
    (opt,) = trainer.optimizers
    assert opt.coordinator.next == BATCHES
    assert opt.coordinator.step == 3
    assert opt.param_groups[0]["lr"] == 0.1 * 0.5**3
    net, alone = made("sgd", Local())
    scheduler = alone.follow(halving(alone))
    for i in (0, 2, 5):
        train(alone, net, 1, first=i)
        scheduler.step()
    assert_same(everything(opt), everything(alone))


def test_lightning_accumulates_and_clips(pl):
    args = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ends = []
    for group in (Local(), None):
        trainer = fit(pl, module(pl, group), **args)
        ends.append(everything(trainer.optimizers[0]))
        if group is not None:
            assert group.step == 3
    assert_same(*ends)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_lightning_resumes(pl, tmp_path):
    trainer = fit(pl, module(pl, Local()))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    ends = []
    for path in (tmp_path / "saved.ckpt", None):
        resumed = fit(pl, module(pl, Local()), max_epochs=2, ckpt_path=path)
        ends.append(everything(resumed.optimizers[0]))
    assert_same(*ends)


@pytest.fixture
def accelerator():
    import accelerate

    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_accelerate_accumulates_and_schedules(accelerator):
    net, opt = made("adamw", Scripted([True, False, True, True]))  # one is open at the end
    scheduler = opt.follow(halving(opt))
    prepared, optimizer, steps = accelerator.prepare(net, opt, scheduler)
    optimizer.zero_grad()
    for i in range(6):
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, i))
            optimizer.step()
            steps.step()
            optimizer.zero_grad()
    assert opt.coordinator.step == 2
    assert scheduler.last_epoch == 2
    lone, alone = made("adamw", Local())
    slower = alone.follow(halving(alone))
    for i in (0, 4):
        alone.zero_grad()
        for j in (i, i + 1):
            (loss_of(lone, j) / 2).backward()
        alone.step()
        slower.step()
    assert_same(everything(opt), everything(alone))


def test_accelerate_saves_and_loads(accelerator, tmp_path):
    net, opt = made("adamw", Local())
    scheduler = opt.follow(halving(opt))
    prepared = accelerator.prepare(net, opt, scheduler)

    def steps(first):
        for i in range(first, first + 4):
            with accelerator.accumulate(prepared[0]):
                accelerator.backward(loss_of(prepared[0], i))
                for each in prepared[1:]:
                    each.step()
                prepared[1].zero_grad()
        return everything(opt), scheduler.state_dict()

    prepared[1].zero_grad()
    steps(0)
    accelerator.save_state(str(tmp_path))
    ends = steps(4)
    accelerator.load_state(str(tmp_path))
    assert scheduler.last_epoch == 2
    assert_same(steps(4), ends)
