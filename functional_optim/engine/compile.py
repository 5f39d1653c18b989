"""`compile`: a transformation as a step that updates parameters and state in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from functional_optim import kernels, tree
from functional_optim.combinators.commit import CommitIf, as_flag
from functional_optim.combinators.local_steps import Synced, advanced
from functional_optim.combinators.sharpness import SamState, SharpnessAware, check_grad_fn
from functional_optim.core import base, memory, modes
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import Reconstructible, factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import State, check_state, check_trees
from functional_optim.core.recording import kept_for
from functional_optim.engine.executor import How
from functional_optim.engine.graph_step import WholeStep, first_places, written
from functional_optim.engine.graphs import stepped
from functional_optim.engine.plan import commit
from functional_optim.engine.tree_plan import TreePlan, check_apart
from functional_optim.kernels.interrupts import held
from functional_optim.kernels.private import differentiated, set_grad_enabled

Backend = Literal["kernels", "torch"]
"""The compiler of a step: this package's kernels, or torch.compile."""


@factory
def compile(
    tx: base.GradientTransformation,
    *,
    donate: bool = True,
    strict: bool = False,
    capturable: bool = False,
    backend: Backend = "kernels",
) -> Callable[..., tuple[Any, Any]]:
    """Compile a transformation into a step: `params, state = step(grads, state, params, **extra)`.

    One kernel is compiled for the recipe and is used for tensors of all sizes, all models and all
    values of the hyperparameters: compiling `adamw(lr=1e-3)` and then `adamw(lr=1e-4)` takes one
    compilation. A transformation that does not consist of one-tensor rules is compiled as a whole,
    with torch.compile: once for each structure and shape of the trees, for all values of float
    hyperparameters.

    Args:
        tx: a transformation.
        donate: write the results into the tensors of `params` and `state`, and return these (about
            five times faster than new tensors), for any tx. A tensor that occurs several times,
            such as a parameter that the state of `keep_snapshots` holds, is written once,
            parameters before state; the other occurrences get new tensors. Inside a transform of
            torch.func only one-tensor rules write in place. A KeyboardInterrupt is raised before or
            after all writes. False does not modify params and state.
        strict: raise a RuntimeError if the step cannot be compiled, before anything is written.
            False (the default) falls back to slower executors, and finally to the plain rules, with
            a warning that states the reason. Sparse gradients and tensors of unusual layouts run
            eagerly in both cases.
        capturable: read the step count and carried scalars on the device of the state at every
            step, so that a step captured as a CUDA graph keeps counting when it is replayed. False
            (the default): the host caches them, which saves launches; it reads them from the device
            only after other code has written them. Capturing then raises an error.
        backend: "kernels" (the default) compiles one-tensor rules with this package's kernels, and
            with torch.compile on devices without such kernels (XPU). "torch" compiles `tx.update`
            and `apply_updates` as one graph of torch.compile on every device: once for each
            structure and shape of the trees, for all values of float hyperparameters. See the page
            on training loops for the times of both.

    Returns:
        The step, which can be copied and pickled if tx can. Gradients are never modified. A `None`
        gradient leaves its parameter unchanged. Traced by make_fx, or inside a transform of
        torch.func, it runs as plain operations.

    Raises:
        TypeError: if tx is not a transformation; from the step, for an unknown extra argument.
        ValueError: for an unknown backend; from the step, if grads, state and params do not match;
            with `donate`, also if two parameters or slots that have gradients share memory, even in
            part.
        RuntimeError: from the step, if `strict` and it cannot be compiled; if it is captured
            without `capturable`, or before a step that compiled its kernels; with `donate`, if
            `torch.func.grad` differentiates the step.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sgd(lr=0.5)
        >>> step = fo.compile(tx)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = step({"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    base.check_transformation("compile", tx, "compile(adamw(lr=1e-3))")
    check_choice("compile", get_args(Backend), backend=backend)
    options = Options(donate, strict, capturable, backend)
    if isinstance(tx, CommitIf):
        return CommittedStep(tx, options)
    if isinstance(tx, Synced):
        return LocalStep(tx, options)
    if isinstance(tx, SharpnessAware):
        return SharpnessAwareStep(tx, options)
    if isinstance(tx, Leafwise) and backend == "kernels":
        return FusedStep(tx, options)
    return CompiledUpdate(tx, options)


class Options(NamedTuple):
    """The arguments of `compile`."""

    donate: bool
    strict: bool
    capturable: bool
    backend: Backend


class Step(Reconstructible):
    """The result of `compile`."""

    stateful = True

    def __init__(self, tx: base.GradientTransformation, options: Options) -> None:
        self.tx: Any = tx
        self.options = options
        self.donate = options.donate

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.tx, self.options

    def by_operations(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The step for a tracer or a transform of torch.func."""
        if self.donate and not modes.traced():
            check_params_apart(params)
        new_params, new_state = stepped(self.tx, grads, state, params, extra)
        if not self.donate:
            return new_params, new_state
        if modes.transformed() and not isinstance(self.tx, Leafwise):
            return new_params, new_state  # a tensor may be shared by a batch
        if modes.transformed() and not torch.compiler.is_compiling():
            _check_no_derivative((new_params, new_state))

        def write() -> tuple[Any, Any]:
            if isinstance(self.tx, Leafwise):  # whose state has separate memory
                # except hyperparameters under vmap, which a batch shares
                shared = {"hyper": {}} if modes.transformed() else {}
                old, new = state._replace(**shared), new_state._replace(**shared)
                tree.map(Tensor.copy_, (params, old), (new_params, new))
                return params, old._replace(hyper=new_state.hyper) if shared else state
            firsts = first_places(params, state)
            return written(params, state, new_params, new_state, firsts)

        return base.unrecorded(held, write)


def _check_no_derivative(results: Any) -> None:
    """Raise an error if torch.func.grad records the results of a step that is in place."""
    if any(map(differentiated, tree.leaves(results))):
        raise RuntimeError(
            "a compiled step inside torch.func.grad writes into its arguments, which has no "
            "derivative; pass donate=False to fo.compile or compile_train_step, or detach "
            "parameters, gradients and hyperparameters before the step."
        )


class CommittedStep(Step):
    """A step that raises an error where it is not supported."""

    def __init__(self, tx: Any, options: Options) -> None:
        super().__init__(tx, options)
        self.step: Any = compile(tx.inner, **options._asdict())
        self.nested = "commit" in tx.inner.extra

    def __call__(
        self, grads: Any, state: Any, params: Any, *, commit: Any = base.NEEDED, **extra: Any
    ) -> tuple[Any, Any]:
        if isinstance(commit, Tensor) and (modes.traced()):
            return self.by_operations(grads, state, params, {**extra, "commit": commit})
        if not as_flag(commit):
            return params, state
        if self.nested:
            extra["commit"] = commit
        return self.step(grads, state, params, **extra)


class LocalStep(CommittedStep):
    """A local step, with its records."""

    def __call__(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        if self.donate:
            return held(self._in_place, grads, state, params, extra)
        params, inner = self.step(grads, state.inner, params, **extra)
        return params, advanced(state, inner)

    def _in_place(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        params, inner = self.step(grads, state.inner, params, **extra)
        return params, state._replace(inner=inner, since=state.since.add_(1))


class SharpnessAwareStep(Step):
    """An ascent step, the gradient there, and the step of the other transformation."""

    def __init__(self, tx: SharpnessAware, options: Options) -> None:
        super().__init__(tx, options)
        self.uphill: Any = compile(tx.ascent, **options._replace(donate=False)._asdict())
        self.step: Any = compile(tx.inner, **options._asdict())

    def __call__(
        self, grads: Any, state: Any, params: Any, *, grad_fn: Any = base.NEEDED, **extra: Any
    ) -> tuple[Any, Any]:
        if modes.traced():
            return self.by_operations(grads, state, params, {**extra, "grad_fn": grad_fn})
        check_grad_fn(grad_fn)
        worse, ascent = self.uphill(grads, state.ascent, params)
        grads = grad_fn(worse)
        if self.donate:
            return held(self._in_place, grads, state, params, ascent, extra)
        params, inner = self.step(grads, state.inner, params, **extra)
        return params, SamState(ascent, inner)

    def _in_place(
        self, grads: Any, state: Any, params: Any, ascent: Any, extra: dict[str, Any]
    ) -> tuple[Any, SamState]:
        params, inner = self.step(grads, state.inner, params, **extra)
        return params, SamState(tree.map(Tensor.copy_, state.ascent, ascent), inner)


class CompiledUpdate(Step):
    """The step of any transformation as one graph of torch.compile."""

    def __init__(self, tx: base.GradientTransformation, options: Options) -> None:
        super().__init__(tx, options)
        self.whole = WholeStep(tx, options.donate, options.strict, self._check)

    def __call__(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        if modes.traced():
            return self.by_operations(grads, state, params, extra)
        return base.unrecorded(self.whole, grads, state, params, extra)

    def _check(self, grads: Any, state: Any, params: Any) -> None:
        """Raise an error unless trees can be stepped in place."""
        if not isinstance(self.tx, Leafwise):
            check_params_apart(params)
            return
        check(self.tx, grads, state, params)
        keys = self.tx.layout.keys
        slots = [state.slots[key] for key in keys]
        given, *columns = tree.places(tree.structure(params), grads, params, *slots)
        check_apart(keys, params, given, columns)


class FusedStep(Step):
    """The compiled step of a chain of one-tensor rules."""

    def __init__(self, tx: Leafwise, options: Options) -> None:
        super().__init__(tx, options)
        self.how: How = "strict" if options.strict else "compiled"
        self.capturable = options.capturable
        self.extra = tx.extra
        self.plans: tuple[TreePlan, ...] = ()
        """The last one first; others are of the same tensors, with other gradients missing."""
        self.elsewhere: CompiledUpdate | None = None

    def __call__(self, grads: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        plan, given = None, None
        plans = () if torch.compiler.is_compiling() else self.plans
        for i, plan in enumerate(plans):
            given = plan.gradients(grads, state, params)
            if given is not None:
                if i:  # not among plans that another thread has put there
                    self.plans = (plan, *plans[:i], *plans[i + 1 :])
                break
        if given is None and (modes.traced() or _without_values(state)):
            return self.by_operations(grads, state, params, extra)
        recording = torch.is_grad_enabled()
        try:  # as `base.unrecorded` does
            set_grad_enabled(False)
            return self._by_kernels(grads, state, params, extra, plan, given)
        finally:
            set_grad_enabled(recording)

    def _by_kernels(
        self,
        grads: Any,
        state: State,
        params: Any,
        extra: dict[str, Any],
        plan: TreePlan | None,
        given: list[Tensor] | None,
    ) -> tuple[Any, State]:
        """plan: one for these tensors, and given: the gradients; None if there is none."""
        if extra:
            base.check_extra(extra, self.extra)
        if given is None and without_kernels(params):
            if self.elsewhere is None:
                self.elsewhere = CompiledUpdate(self.tx, self.options)
            return self.elsewhere.whole(grads, state, params, extra)
        if not self.donate:
            check(self.tx, grads, state, params)
            params, state = tree.map(memory.copied, params), tree.map(memory.copied, state)
        driven = plan is None or given is None or plan.guard.driven or torch.cuda.is_initialized()
        if driven and kernels.capturing():
            self._check_capture(given is not None)
        if plan is None or given is None:
            if self.donate:
                check(self.tx, grads, state, params)
            plan, earlier = self._planned(grads, state, params), self.plans
            given, plan.given = plan.given, []
            self.plans = (plan, *plan.beside(earlier)) if self.donate else ()
        plan.numbers.read(state)
        _, writes = plan.writes(given, extra)
        writes += plan.numbers.writes()
        commit(writes)
        plan.numbers.finish()
        return params, state

    def _planned(self, grads: Any, state: State, params: Any) -> TreePlan:
        kept = kept_for(self)
        return TreePlan(self.tx, grads, state, params, self.how, kept, captured=self.capturable)

    def _check_capture(self, planned: bool) -> None:
        """Raise RuntimeError unless a step that is being captured can be replayed."""
        if not self.capturable:
            raise RuntimeError(
                "a compiled step is being captured, but the host counts its steps, so each replay "
                "would repeat the same step; pass capturable=True to compile."
            )
        if not planned:
            raise RuntimeError(
                "a compiled step is being captured, but it is the first one with these tensors, "
                "which compiles kernels; run a few steps with the same tensors before, on a side "
                "stream, as torch.cuda.make_graphed_callables does."
            )


def _without_values(state: Any) -> bool:
    """Whether a state has no values to read, only shapes: on the meta device."""
    return isinstance(state, State) and state.step.is_meta


def without_kernels(params: Any) -> bool:
    """Whether all parameters are plain tensors of a device without our kernels, so that
    torch.compile steps them."""
    found = tree.leaves(params)
    known = ("cpu", *kernels.DRIVERS)
    return bool(found) and all(
        isinstance(p, Tensor) and p.device.type not in known and memory.has_address(p)
        for p in found
    )


def check_params_apart(params: Any) -> None:
    """Raise ValueError if two parameters that are written share memory."""
    named = [(path, p) for path, p in tree.items(params) if isinstance(p, Tensor)]
    memory.check_apart([p for _, p in named], lambda i: f"parameter {named[i][0]!r}")


def check(tx: Leafwise, grads: Any, state: Any, params: Any) -> None:
    """Raise TypeError or ValueError unless the trees of a step match."""
    check_state(tx.placements, tx.layout, state)
    base.check_params(params)
    check_trees(tx.placements, tx.layout, params, grads, state)
