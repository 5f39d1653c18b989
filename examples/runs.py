"""The same optimizer three ways: functional, as a torch.optim.Optimizer, and torch's own parts.

Each run starts from the model that it is given and takes one step at a time. All three clip the
global norm of the gradients, take an AdamW step at a scheduled learning rate, and average the
weights.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeAlias

import torch
from gpt import GPT, next_byte_loss
from torch import Tensor
from torch.func import functional_call
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.numeric import Hyper, Schedule

MAX_NORM = 1.0
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
EMA_DECAY = 0.98

Tensors: TypeAlias = dict[str, Tensor]


def learning_rate(steps: int) -> Schedule:
    """Up for a twentieth of the steps, then down a cosine to a twentieth of the peak."""
    peak = 3e-3
    return fo.schedules.warmup_cosine(0.0, peak, steps // 20, steps, peak / 20)


def recipe(lr: Hyper) -> fo.GradientTransformation:
    """The optimizer of runs (a) and (b). eps is the one of torch's clip_grad_norm_."""
    return fo.chain(
        fo.clip_by_global_norm(MAX_NORM, eps=1e-6),
        fo.adamw(lr, BETAS, weight_decay=WEIGHT_DECAY),
        fo.params_ema(EMA_DECAY),
    )


class Stopwatch:
    """`with watch:` measures seconds, up to the moment when the device has done its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: float | None = None

    def __enter__(self) -> None:
        self.start = self.now()

    def __exit__(self, *_: object) -> None:
        self.seconds = self.now() - self.start

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class Run(Protocol):
    """A model in training. watch: what the optimizer took at the last step, where it is apart."""

    watch: Stopwatch

    def __init__(self, model: GPT, lr: Schedule) -> None: ...

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        """Compile what can be compiled without taking a step."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; returns the loss before it."""
        ...

    def weights(self) -> Tensors: ...

    def average(self) -> Tensors:
        """The average of the weights over the steps, by the weights' names."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: plain dicts, lists, numbers and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Functional(Run):
    """(a) A step from weights, state and batch to new ones, compiled."""

    def __init__(self, model: GPT, lr: Schedule) -> None:
        tx = recipe(lr)

        def loss(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return next_byte_loss(functional_call(model, params, (x,)), y)

        self.watch = Stopwatch(model.head.weight.device)  # not used: it is all one step
        self.compiled = fo.compile_train_step(loss, tx)
        self.params = {name: p.detach() for name, p in model.named_parameters()}
        self.state: fo.State = tx.init(self.params)

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        self.compiled(*fo.tree.map(Tensor.clone, (self.params, self.state)), x, y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.params, self.state, loss = self.compiled(self.params, self.state, x, y)
        return loss

    def weights(self) -> Tensors:
        return self.params

    def average(self) -> Tensors:
        return self.state.slots["params_ema"]

    def state_dict(self) -> dict[str, Any]:
        return {"params": self.params, "state": self.state._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = (state["params"], fo.State(**state["state"]))
        device = self.state.step.device
        self.params, self.state = fo.tree.map(lambda x: x.to(device), saved)


class Adapter(Run):
    """(b) The same recipe as a torch.optim.Optimizer in an ordinary training loop."""

    def __init__(self, model: GPT, lr: Schedule) -> None:
        self.model = model
        self.optimizer = Optimizer(model.parameters(), recipe, lr=1.0)
        self.scheduler = LambdaLR(self.optimizer, lr)  # multiplies the 1.0
        self.watch = Stopwatch(model.head.weight.device)

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        """Its kernels are compiled at the first step."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = next_byte_loss(self.model(x), y)
        loss.backward()
        with self.watch:
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> Tensors:
        return dict(self.model.named_parameters())

    def average(self) -> Tensors:
        state = self.optimizer.state
        return {name: state[p]["params_ema"] for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


class Torch(Run):
    """(c) torch.optim.AdamW in its fastest form, with torch's clipping, schedule and average."""

    def __init__(self, model: GPT, lr: Schedule) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), 1.0, BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.scheduler = LambdaLR(self.optimizer, lr)
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
        self.averaged.update_parameters(model)  # the first call copies: start from these weights
        self.watch = Stopwatch(model.head.weight.device)

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        """Nothing is compiled."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = next_byte_loss(self.model(x), y)
        loss.backward()
        with self.watch:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            self.scheduler.step()
            self.averaged.update_parameters(self.model)
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> Tensors:
        return dict(self.model.named_parameters())

    def average(self) -> Tensors:
        return dict(self.averaged.module.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "averaged": self.averaged.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.averaged.load_state_dict(state["averaged"])


RUNS: dict[str, type[Run]] = {"functional": Functional, "adapter": Adapter, "torch": Torch}
