"""The training loop that all runs share."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from checkpoint import Interrupts, Record
from corpus import Corpus, batch, windows
from gpt import GPT, Shape, next_byte_loss
from report import Display
from runs import Run, Tensors
from torch import Tensor
from torch.func import functional_call


@dataclass(frozen=True)
class Size:
    """How much is trained.

    batch: windows of text a step. steps: how many, unless --steps says otherwise.
    valid: windows of validation text.
    """

    shape: Shape
    batch: int
    steps: int
    valid: int

    @property
    def bytes_a_step(self) -> int:
        return self.batch * self.shape.context


FULL = Size(Shape(layers=4, heads=4, width=160, context=64), batch=16, steps=500, valid=512)
QUICK = Size(Shape(layers=2, heads=2, width=32, context=32), batch=8, steps=60, valid=64)


@dataclass(frozen=True)
class Job:
    """What all runs have in common."""

    size: Size
    steps: int
    seed: int
    device: torch.device
    text: Corpus

    def new_model(self) -> GPT:
        """The model before training: the same weights each time."""
        torch.manual_seed(self.seed)
        return GPT(self.size.shape).to(self.device)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step: the same for each run, and after a resume."""
        context = self.size.shape.context
        x, y = batch(self.text.train, self.seed, step, self.size.batch, context)
        return x.to(self.device), y.to(self.device)

    def describe(self) -> str:
        parameters = sum([p.numel() for p in self.new_model().parameters()])
        (trains, valids), text = self.text.files, self.text
        return (
            f"A GPT of {parameters:,} parameters, {self.steps} steps of {self.size.batch} × "
            f"{self.size.shape.context} bytes on {self.device}. Training text: {trains} files, "
            f"{len(text.train):,} bytes; validation: {valids} files, {len(text.valid):,} bytes. "
            "The functional run's first step compiles forward and backward, and at the same time "
            "its update."
        )


def train(run: Run, record: Record, job: Job, display: Display, interrupts: Interrupts) -> None:
    """Take the steps that are not in the record yet, and put them there."""
    done = len(record.losses)
    begin = time.perf_counter()
    if done < job.steps:
        run.warm_up(*job.batch(done))
    for step in range(done, job.steps):
        x, y = job.batch(step)
        with interrupts.held():  # so that the run and its record are always at the same step
            loss = run.step(x, y).item()
            seconds = time.perf_counter() - begin
            record.losses.append(loss)
            record.step_seconds.append(seconds)
            if run.watch.seconds is not None:
                record.optimizer_seconds.append(run.watch.seconds)
        display.advance(loss, seconds)
        begin = time.perf_counter()


@torch.no_grad()
def validate(model: GPT, weights: Tensors, job: Job) -> float:
    """Mean loss in nats a byte, over windows spread evenly over the validation text."""
    text, context, count = job.text.valid, job.size.shape.context, job.size.valid
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    total = 0.0
    for some in starts.split(32):
        x, y = windows(text, some, context)
        logits = functional_call(model, weights, (x.to(job.device),))
        total += next_byte_loss(logits, y.to(job.device)).item() * len(some)
    return total / count
