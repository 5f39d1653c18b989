"""Schedules made from torch's schedulers, against those schedulers stepping a real optimizer."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torchs

from functional_optim import schedules

STEPS = 230
TOLERANCE = 1e-12
"""Of the largest rate. torch multiplies the last rate by a factor, which rounds at every step."""


def optimizer(*rates):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in rates]
    return torch.optim.SGD(groups, momentum=0.9)


def rates(opt, scheduler, steps=STEPS):
    """The learning rate of every group, step after step."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in opt.param_groups])
        opt.step()
        scheduler.step()
    return torch.tensor(seen, dtype=torch.float64)


def table(k):
    return [1.0, 0.5, 0.7][k % 3]  # of an int alone


SCHEDULERS = {
    "lambda": lambda o: torchs.LambdaLR(o, lambda k: 0.97**k / (1 + k)),
    "lambda-int": lambda o: torchs.LambdaLR(o, table),
    "lambda-each": lambda o: torchs.LambdaLR(o, [lambda k: 1 + k, lambda k: 1 / (1 + k)]),
    "step": lambda o: torchs.StepLR(o, 30),
    "step-up": lambda o: torchs.StepLR(o, 7, gamma=1.25),
    "step-to-zero": lambda o: torchs.StepLR(o, 50, gamma=0.0),
    "multi-step": lambda o: torchs.MultiStepLR(o, [100, 20, 57], gamma=0.3),
    "multi-step-twice": lambda o: torchs.MultiStepLR(o, [0, 40, 40, 90], gamma=0.5),
    "constant": lambda o: torchs.ConstantLR(o),
    "constant-long": lambda o: torchs.ConstantLR(o, factor=0.7, total_iters=150),
    "linear": lambda o: torchs.LinearLR(o),
    "linear-long": lambda o: torchs.LinearLR(o, 0.01, 0.8, total_iters=150),
    "linear-down": lambda o: torchs.LinearLR(o, 1.0, 0.0, total_iters=60),
    "exponential": lambda o: torchs.ExponentialLR(o, 0.95),
    "exponential-up": lambda o: torchs.ExponentialLR(o, 1.01),
    "polynomial": lambda o: torchs.PolynomialLR(o),
    "polynomial-steep": lambda o: torchs.PolynomialLR(o, 200, power=3.0),
    "polynomial-root": lambda o: torchs.PolynomialLR(o, 170, power=0.5),
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 200),
    "cosine-again": lambda o: torchs.CosineAnnealingLR(o, 45, eta_min=0.03),
    "cosine-every-step": lambda o: torchs.CosineAnnealingLR(o, 1, eta_min=0.01),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 40),
    "restarts-grow": lambda o: torchs.CosineAnnealingWarmRestarts(o, 10, T_mult=2, eta_min=0.02),
    "restarts-grow-fast": lambda o: torchs.CosineAnnealingWarmRestarts(o, 1, T_mult=3),
    "cyclic": lambda o: torchs.CyclicLR(o, 0.01, 0.3, step_size_up=20),
    "cyclic-uneven": lambda o: torchs.CyclicLR(
        o, [0.01, 0.02], [0.3, 0.5], step_size_up=9, step_size_down=28, mode="triangular2"
    ),
    "cyclic-range": lambda o: torchs.CyclicLR(
        o, 0.01, 0.3, step_size_up=15, mode="exp_range", gamma=0.98
    ),
    "cyclic-own": lambda o: torchs.CyclicLR(
        o, 0.01, 0.3, step_size_up=15, scale_fn=table, scale_mode="cycle"
    ),
    "cyclic-own-steps": lambda o: torchs.CyclicLR(
        o, 0.01, 0.3, step_size_up=15, scale_fn=lambda k: 1 / (1 + k), scale_mode="iterations"
    ),
    "one-cycle": lambda o: torchs.OneCycleLR(o, 0.3, total_steps=STEPS),
    "one-cycle-linear": lambda o: torchs.OneCycleLR(
        o, [0.3, 0.1], total_steps=STEPS, pct_start=0.123, anneal_strategy="linear", div_factor=7.0
    ),
    "one-cycle-phases": lambda o: torchs.OneCycleLR(
        o, 0.3, total_steps=STEPS, pct_start=0.37, three_phase=True, final_div_factor=50.0
    ),
    "one-cycle-no-rise": lambda o: torchs.OneCycleLR(o, 0.3, total_steps=STEPS, pct_start=0.0),
    "sequential": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=20), torchs.CosineAnnealingLR(o, 180, 0.01)], [20]
    ),
    "sequential-all": lambda o: torchs.SequentialLR(
        o,
        [
            torchs.ConstantLR(o, 0.5, total_iters=10),
            torchs.StepLR(o, 5, 0.7),
            torchs.MultiStepLR(o, [4, 11]),
            torchs.PolynomialLR(o, 20, 2.0),
            torchs.ExponentialLR(o, 0.9),
            torchs.CosineAnnealingWarmRestarts(o, 4, 2),
            torchs.CyclicLR(o, 0.01, 0.2, 8),
            torchs.LambdaLR(o, table),
            torchs.LinearLR(o, 0.3, total_iters=9),
        ],
        [25, 50, 75, 100, 125, 150, 175, 200],
    ),
    "sequential-one-cycle": lambda o: torchs.SequentialLR(
        o, [torchs.ExponentialLR(o, 0.9), torchs.OneCycleLR(o, 0.3, total_steps=200)], [30]
    ),
    "sequential-cosine-one-cycle": lambda o: torchs.SequentialLR(
        o, [torchs.CosineAnnealingLR(o, 9, 0.01), torchs.OneCycleLR(o, 0.3, total_steps=190)], [40]
    ),
    "chained": lambda o: torchs.ChainedScheduler(
        [
            torchs.ConstantLR(o, 0.1, total_iters=20),
            torchs.ExponentialLR(o, 0.99),
            torchs.StepLR(o, 50, 0.5),
            torchs.MultiStepLR(o, [33, 66], 0.8),
            torchs.LinearLR(o, 0.5, 0.9, total_iters=90),
            torchs.PolynomialLR(o, 225, 1.5),
        ]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_schedule_equals_the_scheduler(name):
    opt = optimizer(0.5, 0.05)
    scheduler = SCHEDULERS[name](opt)
    mine = [schedules.from_torch(scheduler, group) for group in (0, 1)]
    found = torch.tensor([[f(k) for f in mine] for k in range(STEPS)], dtype=torch.float64)
    wanted = rates(opt, scheduler)
    assert wanted.unique().numel() > 1
    for ours, theirs in zip(found.T, wanted.T, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * float(theirs.max())
        )


INTS_ALONE = {"lambda-int", "cyclic-own", "sequential-all"}
"""Those with the table."""


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in INTS_ALONE])
def test_a_converted_schedule_is_vmappable(name):
    schedule = schedules.from_torch(SCHEDULERS[name](optimizer(0.5, 0.05)))
    counts = torch.arange(0, STEPS, 3)
    alone = torch.tensor([schedule(k) for k in counts.tolist()], dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(schedule)(counts), alone, rtol=1e-13, atol=1e-13)


UNNAMED = {"lambda", "lambda-each", "cyclic-own-steps"}
"""Those with functions that pickle does not find."""


@pytest.mark.parametrize("name", [x for x in SCHEDULERS if x not in UNNAMED])
def test_a_converted_schedule_is_saved_without_the_optimizer(name):
    opt = optimizer(0.5, 0.05)
    opt.param_groups[0]["params"] = [torch.zeros(100_000)]
    schedule = schedules.from_torch(SCHEDULERS[name](opt))
    saved = pickle.dumps(schedule)
    assert len(saved) < 5_000
    for twin in (copy.deepcopy(schedule), pickle.loads(saved)):
        assert [twin(k) for k in range(STEPS)] == [schedule(k) for k in range(STEPS)]


def test_settings_are_read_and_nothing_is_changed():
    opt = optimizer(0.5)
    scheduler = torchs.CosineAnnealingLR(opt, 40)
    new = schedules.from_torch(scheduler)
    wanted = [new(k) for k in range(80)]
    rates(opt, scheduler, 13)
    before = copy.deepcopy((scheduler.state_dict(), opt.state_dict()))
    late = schedules.from_torch(scheduler)
    assert [late(k) for k in range(80)] == wanted
    assert (scheduler.state_dict(), opt.state_dict()) == before


def test_a_rate_that_is_a_tensor_is_read_and_not_shared():
    lr = torch.tensor(0.5, dtype=torch.float64)
    scheduler = torchs.ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=lr), 0.5)
    schedule = schedules.from_torch(scheduler)
    scheduler.base_lrs[0].fill_(7.0)
    assert schedule(1).item() == 0.25


class Mine(torchs.LambdaLR):
    def get_lr(self):
        return [0.0]


REFUSED = {
    "the transform reduce_on_plateau": torchs.ReduceLROnPlateau,
    "write the product as a function": lambda o: torchs.MultiplicativeLR(o, lambda k: 0.9),
    "cannot convert a Mine; it converts LambdaLR, StepLR": lambda o: Mine(o, lambda k: 1.0),
    "ChainedScheduler with a CosineAnnealingLR inside": lambda o: torchs.ChainedScheduler(
        [torchs.ExponentialLR(o, 0.9), torchs.CosineAnnealingLR(o, 5)]
    ),
    "SequentialLR with a ChainedScheduler inside": lambda o: torchs.SequentialLR(
        o, [torchs.StepLR(o, 9), torchs.ChainedScheduler([torchs.ExponentialLR(o, 0.9)])], [5]
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_converted_says_what_to_do(words):
    with pytest.raises(TypeError, match=words):
        schedules.from_torch(REFUSED[words](optimizer(0.5)))


@pytest.mark.parametrize(
    ("make", "group", "words"),
    [
        (lambda o: torchs.ExponentialLR(o, 0.9), 1, "a group from 0 to 0.* but got 1"),
        (lambda o: torchs.ExponentialLR(o, 0.9), np.float64(0), "from 0 to 0.* but got np.float64"),
        (lambda o: torchs.ExponentialLR(o, 0.9), False, "a group from 0 to 0.* but got False"),
        (lambda o: torchs.ExponentialLR(o, 0.9), -1, "a group from 0 to 0.* but got -1"),
        (lambda o: torchs.ConstantLR(o, total_iters=0), 0, "total_iters of at least 1, but got 0"),
        (lambda o: torchs.LinearLR(o, total_iters=0), 0, "total_iters of at least 1, but got 0"),
    ],
)
def test_settings_without_a_schedule_are_refused(make, group, words):
    with pytest.raises(ValueError, match=words):
        schedules.from_torch(make(optimizer(0.5)), group)
