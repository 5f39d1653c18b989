"""local_sgd and diloco go where plain loops go, and torchft's classes; with faults, all as one."""

import itertools

import numpy as np
import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, clone
from reference import synced as naive

import functional_optim as fo
from functional_optim.replicas import (
    Decision,
    Local,
    LocalSGDState,
    Replica,
    Scripted,
    Simulation,
    random_faults,
)

EXACT = 1e-12
SHAPES = {"a": (3, 2), "b": (4,), "c": (1,), "d": (5,)}
REPLICAS = 3
STEPS = 24
HYPER = {"lr": 0.1, "weight_decay": 0.05}
NESTEROV = fo.sgd(0.7, momentum=0.9, nesterov=True)


def random(seed):
    """A tree; threads would share the global generator."""
    source = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, dtype=torch.float64, generator=source) for n, s in SHAPES.items()}


def targets(steps=STEPS, replicas=REPLICAS):
    """By step and replica: where each is pulled to."""
    return [
        [fo.tree.map(lambda x, r=r: x + r, random(1 + t * replicas + r)) for r in range(replicas)]
        for t in range(steps)
    ]


def inner():
    return fo.adamw(**HYPER)


def train(tx, coordinator, pulled, **how):
    """The parameters after every step, and the last tree."""
    replica = Replica(coordinator, tx, **how)
    now, seen = replica.init(random(0)), []
    for target in pulled:
        now = replica.start(now)
        now, _ = replica.step(fo.tree.map(torch.sub, now.params, target), now)
        seen.append(clone(now.params))
    return seen, now


def together(work, refused=(), steps=STEPS, replicas=REPLICAS):
    """What `work(group, targets)` returns on each replica. refused: votes that are lost, from 0."""
    every = targets(steps, replicas)

    def worker(group):
        decide, votes = group.decide, itertools.count()

        def decide_or_refuse():
            if next(votes) in refused:
                group.report_error(ValueError("refused"))
            return decide()

        group.decide = decide_or_refuse
        return work(group, [mine[group.rank] for mine in every])

    options = {"heals_at_start": True, "init_sync": False, "bucket_bytes": 40}
    found = Simulation(replicas, **options).run(worker).returned
    return [found[rank] for rank in range(replicas)]


def train_group(tx, **how):
    return together(lambda group, pulled: train(tx, group, pulled), **how)


# ---------------------------------------------------------------- plain loops
def assert_follows(results, loop, *given):
    """Each replica's parameters after every step."""
    plain = lambda tree: {n: np.asarray(x) for n, x in tree.items()}  # noqa: E731
    pulled = [[plain(x) for x in mine] for mine in targets()]
    wanted = loop(plain(random(0)), pulled, lambda: naive.AdamW(**HYPER), *given)
    for r, (seen, _) in enumerate(results):
        for mine, step in zip(seen, wanted, strict=True):
            assert_close(mine, {n: torch.tensor(x) for n, x in step[r].items()}, EXACT)


@pytest.mark.parametrize("refused", [(), (0,), (1, 2)])
@pytest.mark.parametrize("every", [1, 4])
def test_local_sgd_goes_where_a_plain_loop_goes(every, refused):
    results = train_group(fo.local_sgd(inner(), every), refused=refused)
    assert_follows(results, naive.local_sgd, every, refused)


CASES = {
    "plain": (4, 1, 0, 0.0),
    "delayed": (4, 1, 3, 0.0),
    "mixed": (4, 1, 0, 0.5),
    "in turns": (6, 3, 0, 0.0),
    "all of it": (8, 2, 2, 0.25),
    "never global": (4, 2, 1, 1.0),
}
NAMES = {1: [["a", "b", "c", "d"]], 2: [["a"], ["b", "c", "d"]], 3: [["a"], ["b", "c"], ["d"]]}


def made(every, fragments, delay, alpha):
    masks = NAMES[fragments] if fragments > 1 else 1
    return fo.diloco(inner(), NESTEROV, every, fragments=masks, delay=delay, alpha=alpha)


@pytest.mark.parametrize("refused", [(), (1,), (0, 2, 3)])
@pytest.mark.parametrize("case", CASES)
def test_diloco_goes_where_a_plain_loop_goes(case, refused):
    every, fragments, delay, alpha = CASES[case]
    results = train_group(made(*CASES[case]), refused=refused)
    outer = lambda: naive.Nesterov(0.7, 0.9, nesterov=True)  # noqa: E731
    given = (outer, every, NAMES[fragments], delay, alpha, refused)
    assert_follows(results, naive.diloco, *given)


@pytest.mark.parametrize(
    ("tx", "tolerance"),
    [(fo.local_sgd(inner(), 4), 0.0), (fo.diloco(inner(), fo.sgd(1.0), 4), EXACT)],
    ids=["local_sgd", "diloco with an outer step of 1"],
)
def test_alone_it_is_the_inner_transformation(tx, tolerance):
    pulled = [mine[0] for mine in targets()]
    (seen, now), (plain, alone) = (train(x, Local(), pulled) for x in (tx, inner()))
    assert_close((seen, now.state.inner), (plain, alone.state), tolerance)


# ---------------------------------------------------------------- torchft's own classes
class Manager:
    """A coordinator behind the methods of a torchft Manager that its classes call."""

    _use_async_quorum = False

    def __init__(self, member):
        self.member = member
        self.current_step = lambda: member.step
        self.start_quorum = member.start
        self.register_state_dict_fn = member.register
        self.allow_state_dict_read = self.disallow_state_dict_read = lambda: None

    def should_commit(self):
        return self.member.decide().committed

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


def wrapped(manager, model, optimizer, every, **how):
    """torchft's class around a model: DiLoCo, or LocalSGD if there is nothing more to say."""
    local_sgd = pytest.importorskip("torchft.local_sgd")
    if not how:
        return local_sgd.LocalSGD(manager, model, optimizer, every)
    outer = [torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True) for m in model]
    return local_sgd.DiLoCo(manager, list(model), optimizer, outer, every, **how)


def theirs(fragments, *given, **how):
    """Work of a replica: the parameters after every step of torchft's class, and the optimizer."""

    def work(group, pulled):
        start = random(0)
        model = torch.nn.ModuleList([part({n: start[n] for n in names}) for names in fragments])
        every = {name.split(".")[-1]: p for name, p in model.named_parameters()}
        optimizer, seen = torch.optim.AdamW(model.parameters(), **HYPER), []
        with wrapped(Manager(group), model, optimizer, *given, **how):
            for target in pulled:
                for name, p in every.items():
                    p.grad = p.detach() - target[name]
                optimizer.step()
                seen.append({name: p.detach().clone() for name, p in every.items()})
        return seen, optimizer

    return work


@pytest.mark.parametrize("case", [None, (4, 1, 0, 0.0), (4, 1, 2, 0.5), (6, 3, 1, 0.25)], ids=str)
def test_both_go_where_torchfts_go(case):
    every, fragments, delay, alpha = case or (4, 1, 0, 0.0)
    tx = made(*case) if case else fo.local_sgd(inner(), every)
    how = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha} if case else {}
    its = together(theirs(NAMES[fragments], every, **how), replicas=2)
    for (a, _), (b, _) in zip(train_group(tx, replicas=2), its, strict=True):
        assert_close(a, b, EXACT)


def test_a_refused_mean_takes_the_local_steps_back_here_and_not_there():
    """torchft documents what we do."""
    mine = train_group(fo.local_sgd(inner(), 4), refused=(1,), replicas=2)
    its = together(theirs(NAMES[1], 4), refused=(1,), replicas=2)
    for (a, _), (b, _) in zip(mine, its, strict=True):
        assert_close(a[:7], b[:7], EXACT)
        assert_same(a[7], a[3])
        assert (b[7]["a"] - b[3]["a"]).abs().max() > 0.1


def test_a_refused_pseudo_gradient_takes_the_inner_state_back_here_and_not_there():
    """Parameters go back in both."""
    tx, how = made(4, 1, 0, 0.0), {"fragment_sync_delay": 0}
    mine = train_group(tx, refused=(1,), replicas=2, steps=8)
    its = together(theirs(NAMES[1], 4, **how), refused=(1,), replicas=2, steps=8)
    with_more = train_group(tx, replicas=2, steps=4)
    for (a, now), (b, optimizer), (_, before) in zip(mine, its, with_more, strict=True):
        assert_close(a, b, EXACT)
        assert_same(now.state.inner, before.state.inner)
        assert {int(s["step"]) for s in optimizer.state.values()} == {8}
        assert int(now.state.inner.step) == 4


# ---------------------------------------------------------------- refusals
RECIPES = {
    "local_sgd": fo.local_sgd(inner(), 2),
    "diloco": fo.diloco(inner(), NESTEROV, 2),
    "delayed": fo.diloco(inner(), NESTEROV, 2, delay=1, alpha=0.5),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("compile", [False, True])
def test_a_refused_synchronization_leaves_no_bit_changed(name, compile):
    """Parameters and the inner state, though the local steps went wrong altogether."""
    replica = Replica(Scripted([True, False, True]), RECIPES[name], compile=compile)
    now, trees = replica.init(random(0)), []
    for t in range(6):
        now = replica.start(now)
        size = float("nan") if t in (2, 3) else 1.0
        now, _ = replica.step(fo.tree.map(lambda p, x=size: x * p, now.params), now)
        trees.append(clone(now))
    before, after = trees[1], trees[3]
    assert_same((after.params, after.state), (before.state.anchor, before.state))
    assert_finite(trees[5])
    assert not torch.equal(trees[5].params["a"], after.params["a"])


def pulled_back():
    """A transformation whose state is the first parameters."""

    def update(grads, state, params=None):
        return fo.tree.map(lambda g, a, p: -g / 2 - (p - a) / 9, grads, state, params), state

    return fo.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("outer", [pulled_back, lambda: fo.keep_snapshots(fo.sgd(0.7))])
def test_an_outer_state_may_hold_parameters(outer, fragments):
    found = []
    for compile in (False, True):
        tx = fo.diloco(fo.sgd(0.1), outer(), 2 * fragments, fragments=fragments)
        replica = Replica(Local(), tx, compile=compile)
        now = replica.init(random(0))
        for t in range(8):
            now = replica.start(now)
            now, _ = replica.step(fo.tree.map(lambda p, t=t: p + t, now.params), now)
        found.append(now)
    assert_close((found[1].params, found[1].state), (found[0].params, found[0].state), 1e-12)


def test_the_state_of_fragments_is_saved_and_read_and_has_the_names_of_the_present():
    params = random(0)
    tx = fo.diloco(inner(), NESTEROV, 4, fragments=2)
    state = tx.init(params)
    saved = fo.state_dict(state, params)
    assert_same(fo.load_state_dict(tx.init(params), saved, params), state)
    assert "exp_avg" in str(fo.summary(tx, params))
    now = fo.local_sgd(fo.adamw(0.25), 2).init(params)
    assert fo.get(now, "lr").item() == 0.25
    assert_same(fo.get(now, "exp_avg"), fo.tree.map(torch.zeros_like, params))


def test_a_refused_fragment_goes_back_alone():
    tx = fo.diloco(inner(), fo.sgd(0.7, momentum=0.9), 4, fragments=[["a", "b"], "*"])
    replica = Replica(Scripted([True, True, False, True]), tx)
    now, trees = replica.init(random(0)), []
    for mine in targets(8):
        now = replica.start(now)
        now, _ = replica.step(fo.tree.map(torch.sub, now.params, mine[0]), now)
        trees.append(now)
    first, before, after, last = (trees[i] for i in (1, 4, 5, 7))
    for name in SHAPES:
        mine = name in ("a", "b")
        slots = [x.state.inner.slots["exp_avg"][name] for x in (first, before, after)]
        assert torch.equal(after.params[name], first.params[name]) is mine
        assert torch.equal(slots[2], slots[0]) is mine
    assert int(after.state.inner.step) == 6
    assert_same(after.state.outer, trees[3].state.outer)
    assert (int(after.state.turn), int(last.state.turn)) == (0, 1)


# ---------------------------------------------------------------- replicas that come back
@pytest.mark.parametrize("name", ["local_sgd", "delayed"])
def test_a_peer_that_stands_elsewhere_does_not_move_this_replicas_synchronization(name):
    """One that is through, for instance, and has no local steps behind it: what it has is taken,
    momenta and counts included, but not how far it is."""
    peer = Replica(Scripted([]), RECIPES[name])
    theirs = peer.init(random(7), extra={"seed": 3})
    theirs = theirs._replace(state=theirs.state._replace(since=torch.tensor(5)))
    healed = [Decision(True, True, 4, 1)]
    group = Scripted(healed, peer=lambda: {"replica": theirs}, heals_at_start=True)
    replica = Replica(group, RECIPES[name])
    now = replica.init(random(1), extra={"seed": 4})
    for t in range(2):
        now, decision = replica.step(fo.tree.map(torch.neg, now.params), replica.start(now))
        assert (decision is None) is (t == 0)
    assert decision.healed
    assert int(now.state.since) == 0
    assert now.extra == theirs.extra
    if name == "local_sgd":  # which is healed behind its last local step
        assert_same(now.state.inner, theirs.state.inner)


SCHEDULES = 30
END = 5
"""Synchronizations until a replica is through; one that is then healed by those takes one more."""

INNER = fo.sgd(0.1, momentum=0.9)
SLOWING = fo.adamw(fo.schedules.cosine_decay(0.1, 40))
HEALING = {
    "local_sgd": (fo.local_sgd(INNER, 2), {}),
    "local_sgd at start": (fo.local_sgd(SLOWING, 2), {"heals_at_start": True}),
    "diloco": (fo.diloco(INNER, NESTEROV, 2, alpha=0.25), {}),
    "in turns": (
        fo.diloco(SLOWING, NESTEROV, 4, fragments=2, delay=1, alpha=0.25),
        {"heals_at_start": True},
    ),
}
PARAMS = {"a": torch.arange(3.0), "b": torch.ones(2)}


def common(now):
    """What must be the same bits everywhere after a synchronization."""
    state = now.state
    own = isinstance(state, LocalSGDState)
    same = (now.params, state.anchor) if own else (state.anchor, state.outer, state.turn)
    return tuple([x.numpy().tobytes() for x in fo.tree.leaves(same)])


class Training:
    """A worker; ends: what each replica had after its synchronizations, by their number."""

    def __init__(self, tx, compile):
        self.tx = tx
        self.compile = compile
        self.ends = {}
        self.changed = 0

    def __call__(self, group):
        replica = Replica(group, self.tx, compile=self.compile)
        now = replica.init(fo.tree.map(lambda x: x + group.rank, PARAMS), extra={"taken": 0})
        t, last = 0, None
        while now.extra["taken"] < END:
            now = replica.start(now)
            t += 1
            grads = fo.tree.map(lambda p, t=t: p * (1 + 0.1 * group.rank) - 0.01 * t, now.params)
            now, said = replica.step(grads, now)
            if said is None:
                continue
            if said.committed:
                now = now._replace(extra={"taken": said.step})
            if said.committed or not said.healed:
                self.ends.setdefault(now.extra["taken"], []).append(common(now))
            if not said.committed and not said.healed and last is not None:
                self.changed += common(now) != last
            last = common(now)
        replica.finish(now)
        return now.extra["taken"]


def wrong(recipe, seed, compile):
    """What does not hold of a run."""
    tx, how = recipe
    training = Training(tx, compile)
    faults = random_faults(seed, until=END)
    run = Simulation(3, seed=seed, faults=faults, **how).run(training)
    found = [
        f"several trees after {n}" for n, ends in training.ends.items() if n and len({*ends}) > 1
    ]
    found += ["changed in a refused one"] * training.changed
    found += ["too early"] * any(taken < END for taken in run.returned.values())
    found += ["nowhere"] * (len(training.ends) < END)
    found += ["lost"] * bool(run.lost)
    steps = [commit.step for commit in run.commits]
    return found + ["out of order"] * (steps != [*range(1, len(steps) + 1)])


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", HEALING)
def test_replicas_have_the_same_bits_whatever_happens(name, compile):
    seeds = range(4 if compile else SCHEDULES)
    bad = {seed: found for seed in seeds if (found := wrong(HEALING[name], seed, compile))}
    assert not bad, next(iter(bad.items()))
