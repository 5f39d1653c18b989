"""Fault-tolerant optimizers to test: problems, and groups of replicas in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import functional_optim as fo
from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Coordinator, Decision, Local, Simulation


def recipe(lr, decay=0.9):
    return fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr), fo.params_ema(decay))


KINDS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "our_adamw": lambda params: fo.adapters.AdamW(params, lr=0.1, compile=False),
    "recipe": lambda params: fo.adapters.Optimizer(params, recipe, lr=0.1, compile=False),
}
"""Optimizers to put inside."""


INSIDE = {"sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)}
INSIDE |= {"our_adamw": lambda params, lr: fo.adapters.AdamW(params, lr=lr, compile=False)}
"""The same for a learning rate."""


SCHEDULERS = {
    "StepLR": lambda opt: lrs.StepLR(opt, 2, 0.5),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, [1, 3]),
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, lambda i: 0.9**i),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, lambda i: 1 / (1 + i)),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, 0.5, 2),
    "LinearLR": lambda opt: lrs.LinearLR(opt, 0.1, total_iters=3),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, 4, 2.0),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, 4),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 2),
    "SequentialLR": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=2), lrs.ExponentialLR(opt, 0.5)], [2]
    ),
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler(
        [lrs.LinearLR(opt, 0.1, total_iters=2), lrs.ExponentialLR(opt, 0.5)]
    ),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, 0.2, total_steps=8),
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, 0.01, 0.2, step_size_up=2),
    "SWALR": lambda opt: SWALR(opt, 0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(opt, patience=0),
}
"""All of torch's."""


def model(seed: int = 0) -> torch.nn.Module:
    net = torch.nn.Linear(3, 2)
    given = torch.Generator().manual_seed(seed)  # of its own: replicas may run in threads
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=given))
    return net


def batch(i: int) -> torch.Tensor:
    """Another one for each step."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 + i))


def loss_of(net: torch.nn.Module, i: int = 0) -> torch.Tensor:
    """The loss of a step's batch."""
    return net(batch(i)).square().sum()


def train(opt: torch.optim.Optimizer, net: torch.nn.Module, steps: int, first: int = 0) -> None:
    for i in range(first, first + steps):
        opt.zero_grad()
        loss_of(net, i).backward()
        opt.step()


def one_step(net: Any, opt: Any, scheduler: Any, i: int) -> None:
    """A batch, and the scheduler after it."""
    opt.zero_grad()
    loss_of(net, i).backward()
    opt.step()
    if isinstance(scheduler, lrs.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def made(kind: str, group: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, Any]:
    """A model and its fault-tolerant optimizer."""
    net = model(seed)
    return net, FaultTolerantOptimizer(group, KINDS[kind](net.parameters()), **kwargs)


def halving(opt: Any) -> Any:
    return lrs.StepLR(opt, 1, 0.5)


def followed(
    group: Any, scheduler: Any = halving, seed: int = 0, lr: Any = 1.0, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """A model, its fault-tolerant SGD, and a scheduler that follows it."""
    net = model(seed)
    opt = FaultTolerantOptimizer(group, INSIDE["sgd"](net.parameters(), lr), **kwargs)
    return net, opt, opt.follow(scheduler(opt))


def everything(opt: torch.optim.Optimizer) -> Any:
    """Parameters and state, copied, to compare."""
    params = [p for group in opt.param_groups for p in group["params"]]
    state = [dict(opt.state[p]) if p in opt.state else {} for p in params]
    values = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    return Coordinator.copied(lambda: {"params": params, "state": state, "groups": values})


class Counting(Local):
    """starts, and the reasons of all decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = 0
        self.reasons: list[str] = []

    def _start(self) -> None:
        self.starts += 1

    def _decide(self) -> Decision:
        made = super()._decide()
        self.reasons.append(made.reason)
        return made


class Plain:
    """A scheduler that is none of torch's."""

    def __init__(self):
        self.steps = 0

    def step(self, by=1):
        self.steps += by

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


HEALS = Decision(committed=True, healed=True, step=1, participants=1)
"""For a script: the group commits, and this replica is healed."""


def together(replica: Callable[[Coordinator, int], Any]) -> list[Any]:
    """What each replica of a group of two returns: of its coordinator and its number."""
    group = Simulation(2, init_sync=False, heals_at_start=True)
    found = group.run(lambda member: replica(member, member.rank)).returned
    return [found[0], found[1]]
