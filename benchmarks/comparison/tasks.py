"""What is trained: the parts of a task, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

Params = dict[str, Tensor]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """A training problem whose runs can be batched by torch.vmap.

    init: from a seed to first parameters. loss: of parameters and a batch. batch: from a seed and a
    step to tensors, () if each step sees the same. score: what is reported of parameters, less is
    better. steps: of a run. decay: whether weight decay is searched; where the loss itself is the
    aim, it is 0. passes: the score with which a run has found the minimum, if there is such.
    reach: how much further parameters go than those of networks; rates of optimizers whose steps do
    not depend on the size of gradients are searched as much higher. data: a checksum, where the
    data may differ between machines. residuals: of parameters, where the loss is a sum of squares.
    """

    name: str
    title: str
    steps: int
    init: Callable[[int], Params]
    loss: Callable[..., Tensor]
    batch: Callable[[int, int], Batch]
    score: Callable[[Params], Tensor]
    measure: str = "training loss"
    decay: bool = False
    passes: float | None = None
    reach: float = 1.0
    data: str = ""
    residuals: Callable[[Params], Tensor] | None = None

    @property
    def noisy(self) -> bool:
        """Whether two steps see different batches."""
        return bool(self.batch(0, 0))


def always(seed: int, step: int) -> Batch:
    """No batch: each step sees all data."""
    return ()


def draws(seed: int, step: int) -> torch.Generator:
    """The random numbers of one step of one seed."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


def drawn_rows(count: int, size: int) -> Callable[[int, int], Tensor]:
    """From a seed and a step to `size` of `count` rows."""

    def rows(seed: int, step: int) -> Tensor:
        return torch.randint(count, (size,), generator=draws(seed, step))

    return rows


class Model:
    """A network as functions of its parameters. make: a new one, with random weights."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make = make
        self.network = make().requires_grad_(False)

    def init(self, seed: int) -> Params:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return {name: p.detach() for name, p in self.make().named_parameters()}

    def __call__(self, params: Params, *inputs: Tensor) -> Tensor:
        return functional_call(self.network, params, inputs)


@cache
def all_tasks() -> dict[str, Task]:
    """Every task by its name, in the order in which they are run and shown."""
    from comparison import functions, networks, physics, policy

    found: list[Task] = [*functions.structured(), *physics.tasks(), *networks.tasks()]
    found += [*policy.tasks(), *functions.valleys()]
    return {task.name: task for task in found}
