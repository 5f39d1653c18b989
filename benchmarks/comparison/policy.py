"""A policy gradient: a pole on a cart, balanced by REINFORCE."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from comparison.tasks import Batch, Model, Params, Task, draws

CARTS, LENGTH, DISCOUNT = 4, 60, 0.98
GRAVITY, CART, POLE, HALF, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.04
"""Barto, Sutton and Anderson's cart, in steps twice as long as usual."""


class Policy(nn.Module):
    """The state of a cart to the logit of a push to the right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 32)])
        self.head = nn.Linear(32, 1)

    def forward(self, state: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers[0](state)))[..., 0]


def moved(state: Tensor, right: Tensor) -> Tensor:
    """The states after one push each."""
    place, speed, angle, turning = state.unbind(-1)
    sine, cosine = angle.sin(), angle.cos()
    both = CART + POLE
    push = (FORCE * (2 * right - 1) + POLE * HALF * turning**2 * sine) / both
    bend = (GRAVITY * sine - cosine * push) / (HALF * (4 / 3 - POLE * cosine**2 / both))
    gain = push - POLE * HALF * bend * cosine / both
    return torch.stack(
        [place + SECONDS * speed, speed + SECONDS * gain,
         angle + SECONDS * turning, turning + SECONDS * bend], -1,
    )  # fmt: skip


def rollout(model: Model, params: Params, start: Tensor, chances: Tensor) -> tuple[Tensor, ...]:
    """States, pushes, and whether each cart was up before each; chances decide the pushes."""
    states, pushes, ups = [], [], []
    with torch.no_grad():
        state, up = start, torch.ones(start.shape[:-1])
        for chance in chances:
            right = (chance < model(params, state).sigmoid()).float()
            states.append(state)
            pushes.append(right)
            ups.append(up)
            state = moved(state, right)
            fallen = (state[..., 0].abs() > 2.4) | (state[..., 2].abs() > 0.21)
            up = up * (1 - fallen.float())
            state = state * up[..., None]
    return torch.stack(states), torch.stack(pushes), torch.stack(ups)


def cases(count: int, length: int, generator: torch.Generator) -> Batch:
    """Where carts start, and the numbers that decide their pushes."""
    start = 0.3 * torch.rand(count, 4, generator=generator) - 0.15
    return start, torch.rand(length, count, generator=generator)


def cart() -> Task:
    model = Model(Policy)

    def batch(seed: int, step: int) -> Batch:
        return cases(CARTS, LENGTH, draws(seed, step))

    def loss(params: Params, start: Tensor, chances: Tensor) -> Tensor:
        states, pushes, ups = rollout(model, params, start, chances)
        gains = [ups[-1]]
        for up in ups.flip(0)[1:]:
            gains.append(up + DISCOUNT * gains[-1])
        returns = torch.stack(gains[::-1])
        advantage = (returns - returns.mean(1, keepdim=True)) * ups
        likelihood = logsigmoid((2 * pushes - 1) * model(params, states))
        return -(advantage * likelihood).sum(0).mean() / LENGTH

    seen = cases(128, 3 * LENGTH, draws(10_000, 0))

    def score(params: Params) -> Tensor:
        """The share of the time for which the poles are down."""
        return 1 - rollout(model, params, *seen)[2].mean()

    return Task(
        "cart", "policy gradient: a pole on a cart", 80, model.init, loss, batch, score,
        "share of the time for which the pole is down",
    )  # fmt: skip


def tasks() -> list[Task]:
    return [cart()]
