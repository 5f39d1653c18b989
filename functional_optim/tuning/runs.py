"""Training runs that differ in one number of their recipe: all in one vmapped step, or in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels, tree
from functional_optim.core import base
from functional_optim.engine.train_step import Loss, TrainStep

Factory = Callable[[Any], base.GradientTransformation]
"""From a number to a transformation."""

PROVIDED = ("value", "grad_fn", "value_and_grad")
"""Extra arguments of transformations that a run provides."""

Show = Callable[[int], object]
"""Called with the number of steps that have been made, one of several copies counted as several."""


class RandomState:
    """The states of torch's generators as they are now: of the CPU's and of the parameters'."""

    def __init__(self, params: Any) -> None:
        self.kept: list[tuple[Callable[[Tensor], object], Tensor]]
        self.kept = [(torch.set_rng_state, torch.get_rng_state())]
        for device in {p.device for p in tree.leaves(params)}:
            if device.type != "cpu":
                module = torch.get_device_module(device)
                put = partial(module.set_rng_state, device=device)
                self.kept.append((put, module.get_rng_state(device)))

    def restore(self) -> None:
        for put, state in self.kept:
            put(state)


@dataclass(eq=False)
class SweepRuns:
    """Runs from the same parameters over the same batches.

    params: the parameters, which are copied. batches: the arguments of the loss after the
    parameters, one tuple for each step. random: from where random numbers start in each run.
    said: what was run in another way than asked for, and why.
    """

    loss_fn: Loss
    tx_factory: Factory
    params: Any
    batches: Sequence[tuple[Any, ...]]
    random: RandomState
    has_aux: bool
    said: list[str] = field(default_factory=list)
    functions: tuple[Callable[..., Any], ...] = ()

    def losses(self, values: Sequence[float], chunk: int, compile: bool, show: Show) -> Tensor:
        """The losses [values, steps], in chunks of equal size, in the first way that works."""
        ways: list[tuple[str, Callable[[Sequence[float], Show], Tensor]]] = [
            ("", self._in_turn),
            ("vmap refuses the loss or the recipe ({}); the values run in turn", self._together),
        ]
        if compile:
            failed = "torch.compile failed ({}); find_lr runs the vmapped step eagerly"
            ways.append((failed, partial(self._together, compile=True)))
        size = math.ceil(len(values) / math.ceil(len(values) / chunk))
        rows: list[Tensor] = []
        for start in range(0, len(values), size):
            some = values[start : start + size]
            if compile:  # one size, one compilation
                some = [*some, *[some[-1]] * (size - len(some))]
            said = ""
            while len(rows) == start // size:
                text, way = ways[-1]
                self.random.restore()
                try:
                    rows.append(
                        way(some, lambda done, start=start: show(start * len(self.batches) + done))
                    )
                except Exception as error:
                    _refuse(error, len(some))
                    if len(ways) == 1:
                        raise
                    ways.pop()
                    if isinstance(error, kernels.NoCompiler):
                        kernels.tell_failed("torch.compile failed", error)
                    else:
                        said = text.format(kernels.line(error))
            if said:
                self.said.append(said)
        return torch.cat(rows)[: len(values)]

    def _in_turn(self, values: Sequence[float], show: Show) -> Tensor:
        """The losses [values, steps] of runs one after another."""
        rows: list[Tensor] = []
        for i, value in enumerate(values):
            self.random.restore()
            rows.append(self._alone(value, lambda k, i=i: show(i * len(self.batches) + k)))
        return torch.stack(rows)

    def _together(self, values: Sequence[float], show: Show, *, compile: bool = False) -> Tensor:
        """The losses [values, steps] of runs that vmap makes side by side.

        Outside of the vmapped functions trees are flat lists of tensors: vmap refuses the None of
        a slot that a parameter does without.
        """
        leaves = tree.leaves(self.params)
        numbers = torch.tensor(values, dtype=torch.float64, device=leaves[0].device)
        if compile:
            kernels.require_compiler(leaves[0].device)
        if not self.functions:
            of_state = _numbered(self.tx_factory(numbers[0]).init(self.params))
            init_all, step_all = self._vmapped(_numbered(self.params), of_state)
            self.functions = (init_all, step_all, _compiled(step_all) if compile else step_all)
        init_all, *steps = self.functions
        run = steps[compile]
        flat = [p.expand(len(values), *p.shape).clone() for p in leaves]
        slots = init_all(numbers, flat)
        losses: list[Tensor] = []
        for batch in self.batches:
            flat, slots, loss = run(numbers, flat, slots, batch)
            losses.append(loss.detach())  # recorded, if it depends on a module's other parameters
            show(len(losses) * len(values))
        return _on_cpu(losses).T

    def _vmapped(self, of_params: Any, of_state: Any) -> tuple[Callable[..., Any], ...]:
        """`init` and a step of several copies; of trees as lists, by the places of their leaves."""

        def init(number: Tensor, flat: list[Tensor]) -> list[Tensor]:
            state = self.tx_factory(number).init(_filled(of_params, flat))
            return _flat(of_state, state)

        def step_all(
            numbers: Tensor, flat: list[Tensor], slots: list[Tensor], batch: tuple[Any, ...]
        ) -> tuple[list[Tensor], list[Tensor], Tensor]:
            def step(number: Tensor, flat: list[Tensor], slots: list[Tensor]) -> Any:
                params, state = _filled(of_params, flat), _filled(of_state, slots)
                params, state, loss = self._step(number, params, state, batch)
                return _flat(of_params, params), _flat(of_state, state), loss

            return torch.vmap(step, randomness="same")(numbers, flat, slots)

        return torch.vmap(init, randomness="same"), step_all

    def _alone(self, value: float, show: Show) -> Tensor:
        """The losses [steps] of one run, by autograd."""
        params, state = self.params, self.tx_factory(value).init(self.params)
        losses: list[Tensor] = []
        for batch in self.batches:
            params, state, loss = self._step(value, params, state, batch)
            losses.append(loss)
            show(len(losses))
        return _on_cpu(losses)

    def _step(
        self, number: Any, params: Any, state: Any, batch: tuple[Any, ...]
    ) -> tuple[Any, Any, Tensor]:
        tx = self.tx_factory(number)

        def value_and_grad(params: Any) -> tuple[Tensor, Any]:
            found = torch.func.grad_and_value(self.loss_fn, has_aux=self.has_aux)(params, *batch)
            return (found[1][0] if self.has_aux else found[1]), found[0]

        extra = {"value_and_grad": value_and_grad} if "value_and_grad" in tx.extra else {}
        step = TrainStep(self.loss_fn, tx, self.has_aux, 1, False, False, False)
        return step(params, state, *batch, **extra)[:3]


def _numbered(held: Any) -> Any:
    """A tree with the place of each leaf among all leaves.

    Under torch.compile `tree.map` visits a dict in another order, and nothing else makes trees.
    """
    return tree.with_leaves(held, list(range(len(tree.leaves(held)))))


def _flat(places: Any, held: Any) -> list[Tensor]:
    """The leaves of a tree, by their places."""
    found: dict[int, Tensor] = {}
    tree.map(found.__setitem__, places, held)
    return [found[i] for i in range(len(found))]


def _filled(places: Any, leaves: list[Tensor]) -> Any:
    """The tree of leaves that lie in their places."""
    return tree.map(leaves.__getitem__, places)


def _compiled(function: Any) -> Callable[..., Any]:
    """torch.compile of a function with a code of its own, for one code has few variants."""
    code, closure = function.__code__.replace(), function.__closure__
    own = FunctionType(code, function.__globals__, closure=closure)
    return torch.compile(own, fullgraph=True)


def _refuse(error: Exception, copies: int) -> None:
    """Raise for what other ways to run would not mend, or would hide."""
    if isinstance(error, torch.OutOfMemoryError):
        error.add_note(f"find_lr trained {copies} copies at once; pass a smaller chunk=.")
        raise error
    if "mutate a captured Tensor" in str(error):
        raise RuntimeError(
            "loss_fn changes a tensor in place that is not among params, but find_lr must leave it "
            "as it is. If it is a running average of batch norm, call a copy of the module "
            "without: torch.func.replace_all_batch_norm_modules_(copy.deepcopy(model))."
        ) from error


def _on_cpu(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).to("cpu", torch.float64)
