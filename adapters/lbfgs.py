"""The drop-in for torch.optim.LBFGS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.joint import check_undivided, checked_closure, undone, write
from functional_optim.adapters.state.places import check_places, in_order, remember, remembered
from functional_optim.adapters.stepping.loss import check_loss
from functional_optim.algorithms.lbfgs import quasi_newton
from functional_optim.algorithms.lbfgs.quasi_newton import Memory, Past, Run, Settings
from functional_optim.algorithms.lbfgs.transform import lbfgs
from functional_optim.checkpoint.errors import described, refuse
from functional_optim.core import base, sharding
from functional_optim.core.ravel import Ravel, real_dtype
from functional_optim.kernels.interrupts import held

NAMES = ("lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size")
PAIRS = ("old_stps", "old_dirs", "ro")


class LBFGS(OptimizerBase, torch.optim.LBFGS):
    """torch.optim.LBFGS, run by the transitions of `functional_optim.lbfgs`.

    It has torch's arguments and defaults, and evaluates at the same points. Unlike torch's class,
    it also accepts parameters of any strides, steps after deepcopy and pickle, and restores
    parameters and state if the closure raises an error.

    State, with the first parameter, as in torch: `func_evals`, `n_iter`, `d`, `t`,
    `old_dirs`, `old_stps`, `ro`, `al`, `H_diag`, `prev_flat_grad`, `prev_loss`.

    Raises:
        ValueError: torch's, for a bad lr and for more than one parameter group; for a
            `history_size` less than 1, and a negative `max_iter` or `max_eval`.
        RuntimeError: torch's, from the step, for an unknown `line_search_fn`.
        TypeError: from a step without a closure that returns a number.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import LBFGS
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> opt = LBFGS([w], line_search_fn="strong_wolfe")
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w - 3).square().sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item()
        5.0
        >>> torch.allclose(w, torch.tensor(3.0))
        True
    """

    keeps_trees = False
    tries_points = True
    steps_all = True

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        return lbfgs(**{name: group[name] for name in (*NAMES, "line_search_fn")})

    def checked_transform(
        self, group: dict[str, Any], *, in_step: bool = False
    ) -> base.GradientTransformation:
        """As for all; only the step raises an error for an unknown line search, as in torch."""
        given = group if in_step else {**group, "line_search_fn": None}
        return super().checked_transform(given, in_step=in_step)

    def check_parameters(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a second group, and for a part of a model."""
        if len(self.param_groups) > 1:
            raise ValueError("LBFGS doesn't support per-parameter options (parameter groups)")
        super().check_parameters(group)
        check_undivided("LBFGS", group["params"])

    def check_loaded(self, given: dict[str, Any], before: list[set[str]]) -> None:
        """Raise ValueError if what was loaded does not fit."""
        super().check_loaded(given, before)
        params = self.param_groups[0]["params"]
        mine = self.state.get(params[0]) or {}
        size = Ravel(params).size
        faults = []
        if len({len(mine.get(key) or ()) for key in PAIRS}) > 1:
            faults.append(f"{', '.join(PAIRS[:-1])} and {PAIRS[-1]} differ in length")
        for key in ("d", "prev_flat_grad", "old_dirs", "old_stps"):
            found = mine.get(key)
            vectors = [x for x in (found if isinstance(found, list) else [found]) if x is not None]
            kinds = [described(x) for x in vectors if not isinstance(x, Tensor)]
            faults += [f"{key} is a {kind}, but it needs a tensor" for kind in kinds[:1]]
            sizes = {x.numel() for x in vectors if isinstance(x, Tensor)} - {size}
            faults += [f"{key} has {n} elements, but the parameters have {size}" for n in sizes]
        refuse("the loaded state", faults, "load an undamaged checkpoint of this model")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run up to `max_iter` iterations.

        Args:
            closure: clears the gradients, computes the loss, calls its backward, and returns it.
                Called up to `max_eval` times (a line search may need one more call) with gradients
                enabled.

        Returns:
            The loss that the first call returned.

        Raises:
            TypeError: without a closure.
        """
        if closure is None and self._only_creates_state():
            return None
        closure = checked_closure("LBFGS", closure)
        if len(self.param_groups) != 1:
            raise AssertionError(
                f"Expected exactly one param_group, but got {len(self.param_groups)}"
            )
        group = self.param_groups[0]
        self.checked_transform(group, in_step=True)
        return base.unrecorded(self._step_whole, partial(base.recorded, closure), group)

    def _step_whole(self, closure: Callable[[], Any], group: dict[str, Any]) -> Any:
        flat = flat_of(group["params"])
        return undone(flat.leaves, partial(self._run, closure, flat))

    def _run(
        self, closure: Callable[[], Any], flat: Ravel, before: list[tuple[Tensor, Tensor]]
    ) -> Any:
        """The run; writes the state at its end, after the last possible error.

        before: the initial parameters, emptied once the step is done.
        """
        settings, mesh = settings_of(self.param_groups[0], flat), sharding.mesh_of(flat.leaves)
        places = in_order(flat.leaves)
        check_places(self, places)
        _, known = remembered(self, places)
        loss = closure()
        old = self.state.get(flat.leaves[0], {})
        here = point(flat), number(loss, mesh), gradient(flat)
        run = quasi_newton.begin(settings, *here, past_of(old, flat))
        while not run.done:
            write(flat.leaves, flat.tree(quasi_newton.aim(settings, run)))
            f = number(closure(), mesh)
            if not settings.wolfe:
                run = run._replace(x=point(flat))  # a closure may project the parameters
            run = quasi_newton.advance(settings, run, f, gradient(flat))
        new = state_of(run, old, settings.history_size)

        def finish() -> None:
            if run.here:
                write(flat.leaves, flat.tree(run.x))
            self.state[flat.leaves[0]].update(new)
            remember(self, places, known)
            before.clear()

        held(finish)
        return loss


def flat_of(params: list[Tensor]) -> Ravel:
    """The parameters as one vector in the widest of their dtypes, as in torch."""
    dtypes = [real_dtype(p) for p in params]
    return Ravel(params, dtype=reduce(torch.promote_types, dtypes) if dtypes else None)


def settings_of(group: dict[str, Any], flat: Ravel) -> Settings:
    """A parameter group's hyperparameters."""
    own = {name: group[name] for name in NAMES}
    if isinstance(own["lr"], Tensor) and own["lr"].dim():
        own["lr"] = own["lr"].squeeze()
    return Settings(**own, wolfe=group["line_search_fn"] is not None, snap=flat.snap)


def past_of(old: dict[str, Any], flat: Ravel) -> Past:
    """The run so far, from the state of the first parameter."""

    def wide(x: Any) -> Any:
        return x.to(flat.dtype) if isinstance(x, Tensor) else x

    known = {key: value for key, value in old.items() if value is not None}
    s, y, rho = [[wide(x) for x in known.get(key, ())] for key in PAIRS]
    nothing = flat.zeros(flat.size)
    return Past(
        memory=Memory(s, y, rho, wide(known.get("H_diag", 1))),
        d=wide(known.get("d", nothing)),
        t=known.get("t", 0.0),
        g=wide(known.get("prev_flat_grad", nothing)),
        n_iter=known.get("n_iter", 0),
    )


def state_of(run: Run, old: dict[str, Any], history_size: int) -> dict[str, Any]:
    """The state of a run in torch's format."""
    counts = {"func_evals": old.get("func_evals", 0) + run.evals, "n_iter": run.n_iter}
    if not run.here:
        return counts
    past = run.past()
    kept = {
        **counts,
        "d": past.d,
        "t": past.t,
        "old_dirs": past.memory.y,
        "old_stps": past.memory.s,
        "ro": past.memory.rho,
        "H_diag": past.memory.gamma,
        "prev_flat_grad": past.g,
        "prev_loss": run.line.origin.f,
    }
    if run.n_iter > 1:
        kept["al"] = run.alphas + [None] * (history_size - len(run.alphas))
    return kept


def point(flat: Ravel) -> Tensor:
    """The parameters."""
    return flat.vector(flat.leaves)


def gradient(flat: Ravel) -> Tensor:
    """Their gradients."""
    return flat.vector([p.grad for p in flat.leaves])


def number(loss: Any, mesh: Any = None) -> float:
    """A loss as a Python number: of sharded parameters, the mean over the processes of their mesh.

    All processes must take the same path.
    """
    check_loss(loss)
    if mesh is not None:
        return sharding.mean_over(loss, mesh)
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
