"""`compile`: a transformation as a step that updates parameters and state in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import base, kernels, tree
from functional_optim.combine import extra_names
from functional_optim.engine import Cohort, advance
from functional_optim.leafwise import Leafwise, State, carry_of, check_state, check_trees
from functional_optim.rules import split


def compile(
    tx: base.GradientTransformation, *, donate: bool = True
) -> Callable[..., tuple[Any, Any]]:
    """Compile a transformation into a step: `params, state = step(grads, state, params, **extra)`.

    One kernel is compiled for the recipe and serves every size of tensor, every model and every
    value of the hyperparameters: compiling `adamw(lr=1e-3)` and then `adamw(lr=1e-4)` costs one
    compilation. A transformation that is not made of one-tensor rules alone is compiled whole, with
    torch.compile.

    Args:
        tx: a transformation.
        donate: write the results into the tensors of `params` and `state`, which are then the ones
            returned (about five times faster than making new ones). False leaves both untouched.

    Returns:
        The step. Gradients are never changed. A `None` gradient leaves its parameter as it is.
        Traced by make_fx, or inside a transform of torch.func, it runs as plain operations.

    Raises:
        TypeError: if tx is not a transformation; from the step, for an unknown extra argument.
        ValueError: from the step, if grads, state and params do not fit together, or two parameters
            share memory.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sgd(lr=0.5)
        >>> step = fo.compile(tx)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = step({"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    if not isinstance(tx, base.GradientTransformation):
        raise TypeError(
            f"compile takes a transformation, but got a {type(tx).__name__}; call the factory "
            "first, e.g. compile(adamw(lr=1e-3))."
        )
    return FusedStep(tx, donate) if isinstance(tx, Leafwise) else _whole(tx)


class FusedStep:
    """The compiled step of a chain of one-tensor rules."""

    def __init__(self, tx: Leafwise, donate: bool) -> None:
        self.tx = tx
        self.donate = donate
        self.cohort: Cohort | None = None
        self.tensors: list[Any] = []
        self.shapes: list[Any] = []

    def __call__(self, grads: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        run = self._by_operations if kernels.bypass() else self._by_kernels
        return run(grads, state, params, extra)

    @torch.no_grad()
    def _by_kernels(
        self, grads: Any, state: State, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, State]:
        layout, links = self.tx.layout, self.tx.links
        base.check_extra(extra, extra_names(self.tx))
        check_state(links, layout, state)
        if not self.donate:
            params, state = tree.map(torch.clone, params), tree.map(torch.clone, state)
        keys = [key for own in layout.slots for key in own]
        try:
            rows = tree.rows(params, grads, *[state.slots[key] for key in keys])
        except (ValueError, TypeError):
            check_trees(links, layout, params, grads, state)
            raise
        live = [row for row in rows if row[1] is not None]
        tensors = [x for p, _, *slots in live for x in (p, *slots)]
        # a kernel looks at memory alone: a gradient of another shape must not reach it
        fits = [(row[1].shape, row[1].is_complex(), row[1].layout) for row in live] == self.shapes
        if self.cohort is None or not fits or not _same(tensors, self.tensors):
            base.check_params(params)
            check_trees(links, layout, params, grads, state)
            _check_apart([row[0] for row in live])
            sizes = [len(own) for own in layout.slots]
            slots = [split(mine, sizes) for _, _, *mine in live]
            dense = all(row[1].layout is torch.strided for row in live)
            self.cohort = Cohort(links, [row[0] for row in live], slots, compiled=dense)
            self.tensors = tensors
            self.shapes = [(row[1].shape, row[1].is_complex(), row[1].layout) for row in live]
        here = state.step.device.type == "cpu"
        t = float(state.step.item() + 1) if here else (state.step + 1).to(torch.float64)
        carry = carry_of(layout, state.carry)
        if here:
            carry = [tuple([x.item() for x in own]) for own in carry]
        if live:
            (carry,) = advance([self.cohort], [[row[1] for row in live]], [t], [carry], extra)
        state.step.add_(1)
        for own, values in zip(layout.carry, carry, strict=True):
            for key, value in zip(own, values, strict=True):
                state.carry[key].fill_(value)
        return params, state

    def _by_operations(
        self, grads: Any, state: State, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, State]:
        """The step where a tracer or a transform of torch.func must see it."""
        updates, new_state = self.tx.update(grads, state, params, **extra)
        new_params = base.apply_updates(params, updates)
        if not self.donate:
            return new_params, new_state
        with torch.no_grad():
            tree.map(Tensor.copy_, (params, state), (new_params, new_state))
        return params, state


def _whole(tx: base.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    def step(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params, **extra)
        return base.apply_updates(params, updates), state

    return torch.no_grad()(torch.compile(step, fullgraph=True))


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _check_apart(params: list[Tensor]) -> None:
    seen: set[int] = set()
    for p in params:
        if p.numel() and p.data_ptr() in seen:
            raise ValueError(
                f"two parameters of shape {tuple(p.shape)} share their memory, so a step in place "
                "would move it twice; pass tied weights once."
            )
        seen.add(p.data_ptr())
