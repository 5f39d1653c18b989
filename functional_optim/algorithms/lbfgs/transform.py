"""L-BFGS.

Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical
Programming 45 (1989), https://doi.org/10.1007/BF01589116; Nocedal, Wright, "Numerical
Optimization", 2nd ed. (2006), Algorithm 7.5. The algorithm is in `quasi_newton` and `line_search`;
this module lifts it to trees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import kernels, numeric, tree
from functional_optim.algorithms.lbfgs.batching import BatchLayout, like
from functional_optim.algorithms.lbfgs.line_search import can_branch, is_column
from functional_optim.algorithms.lbfgs.quasi_newton import (
    Past,
    Run,
    Settings,
    advance,
    aim,
    begin,
    remember,
    two_loop,
)
from functional_optim.core import base
from functional_optim.core.base import GradientTransformation, check_grads, replaced
from functional_optim.core.factory import factory
from functional_optim.core.ravel import Ravel
from functional_optim.engine.graphs import TorchCompiled
from functional_optim.transforms.scaling import check_lr

ValueAndGrad = Callable[[Any], tuple[Tensor, Any]]
"""From parameters to the value and the gradients, in this order."""


class LbfgsState(NamedTuple):
    """m: history size. n: number of parameters. With `batched` all have a leading dimension."""

    n_iter: Tensor
    """Iterations so far: 0-dim, int64."""
    func_evals: Tensor
    """Evaluations so far: 0-dim, int64."""
    d: Tensor
    """The last direction, (n,)."""
    t: Tensor
    """The last step length, 0-dim."""
    old_dirs: Tensor
    """Differences y of gradients, oldest first, (m, n); the empty places come first."""
    old_stps: Tensor
    """Steps s, (m, n)."""
    ro: Tensor
    """1 / sᵀy, (m,); 0 in an empty place."""
    H_diag: Tensor
    """Scale γ of the first guess at the inverse Hessian, 0-dim."""
    prev_flat_grad: Tensor
    """The gradient before the last step, (n,)."""


class ScaleByLbfgsState(NamedTuple):
    """m: history size. n: number of parameters."""

    n_iter: Tensor
    """Steps so far: 0-dim, int64."""
    old_dirs: Tensor
    """Differences y of gradients, oldest first, (m, n); the empty places come first."""
    old_stps: Tensor
    """Steps s, (m, n)."""
    ro: Tensor
    """1 / sᵀy, (m,); 0 in an empty place."""
    H_diag: Tensor
    """Scale γ of the first guess at the inverse Hessian, 0-dim."""
    prev_flat_params: Tensor
    """The parameters of the last step, (n,)."""
    prev_flat_grad: Tensor
    """The gradient of the last step, (n,)."""


@factory
def scale_by_lbfgs(history_size: int = 100) -> GradientTransformation:
    """Multiply the gradient by the inverse Hessian that the last steps imply: H g.

    A part of a chain: add `scale_by_lr` after it, or `scale(-1)` and
    `scale_by_backtracking_linesearch`. At the first step H is 1. s and y are differences of the
    parameters and gradients that `update` receives, so no transform before it should change the
    gradient. A pair is stored if its sᵀy is above 1e-10, as in torch.optim.LBFGS.

    Args:
        history_size: number of pairs to store, ≥ 1. Default 100, torch's; 5 to 20 are usual.

    State: `ScaleByLbfgsState`.

    Raises:
        ValueError: if `history_size` is less than 1, or the parameters have no elements.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_lbfgs(5), fo.scale_by_lr(1.0))
        >>> stiffness, w = torch.tensor([1.0, 1.5]), torch.ones(2)
        >>> state = tx.init(w)
        >>> for _ in range(6):
        ...     updates, state = tx.update(stiffness * w, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.abs().max() < 1e-5)
        True
    """
    numeric.check_count("scale_by_lbfgs", 1, history_size=history_size)

    def init(params: Any) -> ScaleByLbfgsState:
        flat = Ravel(params)
        return ScaleByLbfgsState(
            n_iter=flat.zeros(dtype=torch.int64),
            old_dirs=flat.zeros(history_size, flat.size),
            old_stps=flat.zeros(history_size, flat.size),
            ro=flat.zeros(history_size),
            H_diag=flat.zeros() + 1,
            prev_flat_params=flat.zeros(flat.size),
            prev_flat_grad=flat.zeros(flat.size),
        )

    def update(
        grads: Any, state: ScaleByLbfgsState, params: Any = None
    ) -> tuple[Any, ScaleByLbfgsState]:
        flat = flat_of(params, grads)
        check_state(state, ScaleByLbfgsState, history_size, flat)
        x, g = flat.vector(params), flat.vector(grads)
        many = not can_branch(x, g, state.prev_flat_grad)
        form = BatchLayout(flat, many=many, whole=many)
        s = form.vector(x - state.prev_flat_params)
        y = form.vector(g - state.prev_flat_grad)
        memory = form.memory(state)
        going = form.condition(state.n_iter > 0)
        memory = remember(memory, s, y, history_size, going)
        direction, _ = two_loop(form.vector(g), memory)
        new = replaced(
            state,
            n_iter=state.n_iter + 1,
            **form.stored(memory, state),
            prev_flat_params=x,
            prev_flat_grad=g,
        )
        return flat.tree(direction.reshape(g.shape), stored=False), new

    return GradientTransformation(init, update)


@factory
def lbfgs(
    lr: numeric.Number = 1.0,
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    history_size: int = 100,
    line_search_fn: str | None = None,
    *,
    batched: bool = False,
    compile: bool = False,
) -> GradientTransformation:
    """L-BFGS, with torch.optim.LBFGS's arguments, defaults and results.

    One update corresponds to one `step` of torch's class: up to `max_iter` iterations, with the
    same number of evaluations at the same points. It needs the function itself::

        updates, state = tx.update(grads, state, params, value=value, value_and_grad=fn)

    where `value, grads = fn(params)`. (torch.func.grad_and_value returns them in the opposite
    order.)

    The loop ends when the problem is solved. Under torch.vmap and torch.compile, which cannot read
    values, it always runs `max_eval` evaluations, and masks preserve finished results; for many
    problems use `batched=True`, which stops early. A run is differentiable, also with respect to
    `lr`; the step lengths that a line search interpolates count as constants.

    Args:
        lr: the step length without a line search, and the first that a search tries; ≥ 0. In the
            very first step it is multiplied by min(1, 1 / |g|₁). A number or a 0-dim tensor.
        max_iter: iterations in one update.
        max_eval: evaluations in one update, including the one passed as `value`; a line search may
            use one more, and may not move with 1. Default 1.25 max_iter.
        tolerance_grad: stop when no element of the gradient is larger.
        tolerance_change: stop when a step, or the change of the value, is smaller.
        history_size: number of pairs to store, ≥ 1. Default 100, torch's; 5 to 20 are usual.
        line_search_fn: None, or "strong_wolfe". For backtracking see `scale_by_lbfgs`.
        batched: every leaf has a leading dimension of independent problems, which are solved in a
            batch until the last one is done. `value` is 1-dim, `fn` evaluates all problems.
        compile: compile the code between two evaluations, for small problems: compilation takes
            about 5 s for a history of 10, 15 s for one of 100, and sums are in another order than
            in torch. Ignored if a derivative is recorded.

    State: `LbfgsState`.

    Raises:
        ValueError: torch's message for a bad lr; if `history_size` is less than 1, `max_iter` or
            `max_eval` negative, or the parameters have no elements.
        RuntimeError: torch's message for an unknown `line_search_fn`.
        TypeError: for a schedule as lr; if `fn` does not return a value for each problem and
            gradients.

    Do not use it with noisy gradients: the pairs and the search interpret differences between
    evaluations as curvature.

    Example::

        >>> import torch, functional_optim as fo
        >>> def rosenbrock(x):
        ...     return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
        >>> def fn(x):
        ...     grad, value = torch.func.grad_and_value(rosenbrock)(x)
        ...     return value, grad
        >>> tx = fo.lbfgs(max_iter=100, line_search_fn="strong_wolfe")
        >>> x = torch.tensor([-1.2, 1.0], dtype=torch.float64)
        >>> value, grads = fn(x)
        >>> updates, state = tx.update(grads, tx.init(x), x, value=value, value_and_grad=fn)
        >>> fo.apply_updates(x, updates)
        tensor([1.0000, 1.0000], dtype=torch.float64)
        >>> int(state.func_evals)
        43
    """
    check_lr(lr)
    numeric.check_count("lbfgs", 1, history_size=history_size)
    if callable(lr):
        raise TypeError(
            "lr must be a number or a 0-dim tensor; for a schedule call lbfgs again at every step, "
            "with its value."
        )
    if line_search_fn not in (None, "strong_wolfe"):
        raise RuntimeError(
            f"only 'strong_wolfe' is supported as line_search_fn, or None, but got "
            f"{line_search_fn!r}."
        )
    numeric.check_count("lbfgs", 0, max_iter=max_iter)
    most = max_iter * 5 // 4 if max_eval is None else max_eval
    numeric.check_count("lbfgs", 0, max_eval=most)
    if line_search_fn and most == 1 and not torch.compiler.is_compiling():
        kernels.warn_once(
            "lbfgs with max_eval=1 (the default of max_iter=1) ends a line search after its first "
            "try, and may not move; pass max_iter=1, max_eval=25 for one iteration in each update",
            UserWarning,
        )
    tolerances = (tolerance_grad, tolerance_change)

    def init(params: Any) -> LbfgsState:
        flat = Ravel(params, batched=batched)
        return LbfgsState(
            n_iter=flat.zeros(dtype=torch.int64),
            func_evals=flat.zeros(dtype=torch.int64),
            d=flat.zeros(flat.size),
            t=flat.zeros(),
            old_dirs=flat.zeros(history_size, flat.size),
            old_stps=flat.zeros(history_size, flat.size),
            ro=flat.zeros(history_size),
            H_diag=flat.zeros() + 1,
            prev_flat_grad=flat.zeros(flat.size),
        )

    def update(
        grads: Any,
        state: LbfgsState,
        params: Any = None,
        *,
        value: Tensor = base.NEEDED,
        value_and_grad: ValueAndGrad = base.NEEDED,
        **extra: Any,
    ) -> tuple[Any, LbfgsState]:
        base.check_extra(extra, ("value", "value_and_grad"))
        check_function("lbfgs", value, value_and_grad)
        flat = flat_of(params, grads, batched=batched)
        check_state(state, LbfgsState, history_size, flat)
        x, g = flat.vector(params), flat.vector(grads)
        look = can_branch(x, g, value, lr, state.t, state.prev_flat_grad)
        whole = compile or not look
        form = BatchLayout(flat, many=batched or whole, whole=whole)
        wolfe = line_search_fn is not None
        settings = Settings(
            form.lr(lr), max_iter, most, *tolerances, history_size, wolfe, flat.snap
        )

        def evaluate(point: Tensor) -> tuple[Any, Tensor]:
            value, grads = pair_of(value_and_grad(flat.tree(point.reshape(x.shape))))
            f = form.value(value)
            check_grads(params, grads)
            return f, form.vector(flat.vector(grads))

        past = Past(
            form.memory(state),
            form.vector(state.d),
            form.number(state.t),
            form.vector(state.prev_flat_grad),
            form.count(state.n_iter),
        )
        run = begin(settings, form.vector(x), form.value(value), form.vector(g), past)
        if look and compile and not has_grad(run):
            run = run_compiled(settings, run, evaluate, flat.layout)
        else:
            run = run_eagerly(settings, run, evaluate, early_exit=look)
        past = run.past()
        new = LbfgsState(
            n_iter=like(past.n_iter, state.n_iter),
            func_evals=state.func_evals + like(run.evals, state.func_evals),
            d=like(past.d, state.d),
            t=like(past.t, state.t),
            **form.stored(past.memory, state),
            prev_flat_grad=like(past.g, state.prev_flat_grad),
        )
        return flat.tree(run.x.reshape(x.shape) - x, stored=False), new

    return GradientTransformation(init, update)


# ---------------------------------------------------------------- running


Evaluate = Callable[[Tensor], tuple[Any, Tensor]]


def run_eagerly(settings: Settings, run: Run, evaluate: Evaluate, *, early_exit: bool) -> Run:
    """The maximum number of evaluations; with `early_exit`, until the last problem is done."""
    for _ in range(settings.transitions()):
        if early_exit and is_over(run.done):
            break
        run = advance(settings, run, *evaluate(aim(settings, run)))
    return run


def run_compiled(settings: Settings, run: Run, evaluate: Evaluate, layout: Any) -> Run:
    """Run until the last problem is done; each transition is one call of a torch.compile graph."""

    def transition(old: Run, f: Any, g: Tensor, lr: Tensor) -> tuple[Run, Tensor, Tensor]:
        now = settings._replace(lr=lr.reshape(1, 1))
        after = advance(now, old, f, g)
        return after, aim(now, after), after.done.all()

    looks = tuple([(x.shape, x.dtype, x.device) for x in tree.leaves(run)])
    key = (settings[1:-1], tree.structure(run), layout, looks)
    if key not in _transitions:
        _transitions[key] = TorchCompiled(transition)
    lr, point, over = settings.lr.reshape(1), aim(settings, run), is_over(run.done)
    while not over:
        inputs = tree.map(lambda x: x.detach().contiguous(), (run, *evaluate(point)))
        try:
            run, point, over = _transitions[key](*inputs, lr)
        except Exception as error:
            if not kernels.is_compile_error(error):
                raise
            kernels.warn_failed("a transition of lbfgs cannot be compiled", error)
            return run_eagerly(settings, run, evaluate, early_exit=True)
    return run


_transitions: dict[Any, TorchCompiled] = {}
"""The graphs of transitions, by their settings and shapes."""


def is_over(done: Any) -> bool:
    """Are all problems done?"""
    return bool(done.all()) if is_column(done) else done


def flat_of(params: Any, grads: Any, *, batched: bool = False) -> Ravel:
    """The vector view of the parameters, after a check of the gradients' structure."""
    base.check_passed(params)
    check_grads(params, grads)
    return Ravel(params, batched=batched)


def check_function(name: str, value: Any, value_and_grad: Any) -> None:
    """Raise TypeError unless there are a value and a function."""
    base.check_needed(name, value=value, value_and_grad=value_and_grad)
    if not callable(value_and_grad):
        raise TypeError(
            f"value_and_grad must be a function from parameters to (value, gradients), but got a "
            f"{type(value_and_grad).__name__}; pass the function, not its result."
        )


def pair_of(found: Any) -> tuple[Any, Any]:
    """A value and gradients, as `value_and_grad` must return them."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            f"value_and_grad returned a {type(found).__name__}; return (value, gradients)."
        )
    return found


def has_grad(run: Run) -> bool:
    """Is a derivative being recorded?"""
    tensors = [x for x in tree.leaves(run) if isinstance(x, Tensor)]
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def check_state(state: Any, kind: type, history_size: int, flat: Ravel) -> None:
    """Raise an error unless the state has this type and size, and fits the parameters."""
    if not isinstance(state, kind):
        raise TypeError(
            f"update got a state of type {type(state).__name__}; pass the state that this "
            "transformation's init returned, in this order: update(grads, state, params)."
        )
    places = state.ro.shape[-1]
    if places != history_size:
        raise ValueError(
            f"update got a state with places for {places} pairs, but history_size is "
            f"{history_size}; pass the state that this transformation's init returned."
        )
    found, needed = state.prev_flat_grad, (*flat.problems, flat.size)
    if found.shape != needed or found.dtype != flat.dtype:
        raise ValueError(
            f"update got a state with vectors of shape {tuple(found.shape)} in {found.dtype}, but "
            f"the parameters need {needed} in {flat.dtype}; pass the state that init returned for "
            "these parameters."
        )
