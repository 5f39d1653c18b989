"""torchft's own LocalSGD and DiLoCo, driven beside ours by the same group.

They need of a Manager what stands here. What it does over a network is the business of others.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close
from lockstep import Group
from test_synced import SHAPES, params, targets

import functional_optim as fo
from functional_optim.replicas import Replica

theirs = pytest.importorskip("torchft.local_sgd")

EXACT = 1e-12
HYPER = {"lr": 0.1, "weight_decay": 0.05}


class Manager:
    """A lockstep group behind the methods that torchft's classes call."""

    _use_async_quorum = False

    def __init__(self, member):
        self.member = member

    def current_step(self):
        return self.member.step

    def start_quorum(self):
        self.member.start()

    def should_commit(self):
        return self.member.decide().committed

    def register_state_dict_fn(self, key, load, save):
        self.member.register(key, load, save)

    def allow_state_dict_read(self):
        pass

    disallow_state_dict_read = allow_state_dict_read

    def allreduce(self, x, should_quantize=False):
        return Work(x, self.member.allreduce([x]))


class Work:
    def __init__(self, x, reduction):
        self.x, self.reduction = x, reduction

    def wait(self):
        self.x.copy_(self.reduction.wait()[0])


def part(values):
    """A module with some parameters."""
    module = torch.nn.Module()
    for name, x in values.items():
        module.register_parameter(name, torch.nn.Parameter(x.clone()))
    return module


def drive(wrap, fragments, pulled):
    """The parameters after every step of torchft's class."""
    start = params()
    model = torch.nn.ModuleList([part({n: start[n] for n in names}) for names in fragments])
    every = {name.split(".")[-1]: p for name, p in model.named_parameters()}
    inner = torch.optim.AdamW(model.parameters(), **HYPER)
    seen = []
    with wrap(model, inner):
        for target in pulled:
            for name, p in every.items():
                p.grad = p.detach() - target[name]
            inner.step()
            seen.append({name: p.detach().clone() for name, p in every.items()})
    return seen, inner


def ours(tx, member, pulled):
    replica = Replica(member, tx)
    now = replica.init(params())
    seen = []
    for target in pulled:
        now = replica.start(now)
        now, _ = replica.step(fo.tree.map(torch.sub, now.params, target), now)
        seen.append(now.params)
    return seen, now


def both(tx, wrap, fragments, refused=(), steps=24, replicas=2):
    """Our trajectories and theirs, for each replica, and the two optimizers' last states."""
    every = targets(steps, replicas)

    def mine(rank, member):
        return ours(tx, member, [x[rank] for x in every])

    def its(rank, member):
        manager = Manager(member)
        return drive(
            lambda model, inner: wrap(manager, model, inner), fragments, [x[rank] for x in every]
        )

    return Group(replicas, refused).run(mine), Group(replicas, refused).run(its)


def difference(a, b):
    return max([(a[n] - b[n]).abs().max().item() for n in SHAPES])


def local_sgd(every):
    return lambda manager, model, inner: theirs.LocalSGD(manager, model, inner, every)


def diloco(every, **how):
    def wrap(manager, model, inner):
        outer = [
            torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True) for m in model
        ]
        return theirs.DiLoCo(manager, list(model), inner, outer, every, **how)

    return wrap


def test_local_sgd_goes_where_torchfts_goes():
    mine, its = both(fo.local_sgd(fo.adamw(**HYPER), 4), local_sgd(4), [list(SHAPES)])
    for (a, _), (b, _) in zip(mine, its, strict=True):
        assert_close([*a], [*b], EXACT)


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "alpha"),
    [
        (4, [["a", "b", "c", "d"]], 0, 0.0),
        (4, [["a", "b", "c", "d"]], 2, 0.5),
        (6, [["a"], ["b", "c"], ["d"]], 1, 0.25),
    ],
)
def test_diloco_goes_where_torchfts_goes(every, fragments, delay, alpha):
    outer = fo.sgd(0.7, momentum=0.9, nesterov=True)
    masks = fragments if len(fragments) > 1 else 1
    tx = fo.diloco(fo.adamw(**HYPER), outer, every, fragments=masks, delay=delay, alpha=alpha)
    wrap = diloco(every, fragment_sync_delay=delay, fragment_update_alpha=alpha)
    mine, its = both(tx, wrap, fragments)
    for (a, _), (b, _) in zip(mine, its, strict=True):
        assert_close([*a], [*b], EXACT)


def test_t41_a_refused_mean_takes_the_local_steps_back_here_and_not_there():
    """torchft documents what we do."""
    mine, its = both(fo.local_sgd(fo.adamw(**HYPER), 4), local_sgd(4), [list(SHAPES)], [1])
    for (a, _), (b, _) in zip(mine, its, strict=True):
        assert_close(a[:7], b[:7], EXACT)
        assert_close(a[7], a[3], 0.0)
        assert difference(b[7], b[3]) > 0.1


def test_t42_a_refused_pseudo_gradient_takes_the_inner_state_back_here_and_not_there():
    """Parameters go back in both."""
    tx = fo.diloco(fo.adamw(**HYPER), fo.sgd(0.7, momentum=0.9, nesterov=True), 4)
    mine, its = both(tx, diloco(4), [list(SHAPES)], [1], steps=8)
    with_more, _ = both(tx, diloco(4), [list(SHAPES)], [], steps=4)
    for (a, now), (b, inner), (_, before) in zip(mine, its, with_more, strict=True):
        assert_close([*a], [*b], EXACT)
        assert_close(now.state.inner, before.state.inner, 0.0)
        assert {int(s["step"]) for s in inner.state.values()} == {8}
        assert int(now.state.inner.step) == 4


@pytest.mark.parametrize(
    ("every", "how", "fragments", "words"),
    [
        (4, {"fragment_sync_delay": 4}, 1, "must be synced before"),
        (5, {}, 2, "must divide"),
        (4, {"fragment_update_alpha": 1.5}, 1, "between 0 and 1"),
    ],
)
def test_what_torchft_refuses_is_refused_here(every, how, fragments, words):
    names = {"fragment_sync_delay": "delay", "fragment_update_alpha": "alpha"}
    named = {names[key]: x for key, x in how.items()}
    with pytest.raises(ValueError, match="diloco"):
        fo.diloco(fo.adamw(), fo.sgd(0.7), every, fragments=fragments, **named)
    parts = [part({"w": torch.ones(1)}) for _ in range(fragments)]
    inner = torch.optim.AdamW([p for x in parts for p in x.parameters()])
    with pytest.raises(ValueError, match=words):
        diloco(every, **how)(Manager(Group(1).members[0]), parts, inner)
