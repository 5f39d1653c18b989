"""`find_lr`: the learning rate, or another hyperparameter, by many short runs at once.

Runs differ in one hyperparameter. They run in one vmapped step, or one after another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels, numeric, tree
from functional_optim.core import base
from functional_optim.core.calls import check_flags
from functional_optim.engine.train_step import Loss, TrainStep
from functional_optim.tuning.lr_sweep import LRSweep
from functional_optim.tuning.tables import progress as showing

MEMORY = 2**30
"""Default memory limit of the copies of one chunk in bytes, without activations: 1 GiB."""


def find_lr(
    loss_fn: Loss,
    tx_factory: Factory,
    params: Any,
    batches: Iterable[Any],
    *,
    values: Iterable[float] | None = None,
    low: float = 1e-6,
    high: float = 10.0,
    count: int = 29,
    steps: int = 100,
    name: str = "lr",
    has_aux: bool = False,
    chunk: int | None = None,
    compile: bool = False,
    progress: bool | None = None,
) -> LRSweep:
    """Train a copy of the parameters with each learning rate, all in one vmapped step.

    Every copy starts from the same parameters and sees the same batches and the same random
    numbers, so the runs differ in one hyperparameter only. `print` the result, or `plot()` it; use
    its `suggestion` for training.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns the loss, a real 0-dim tensor, as for
            `compile_train_step`. For a module, call it by `torch.func.functional_call`. It must not
            modify anything: see the error below for batch norm.
        tx_factory: from the value to a transformation, such as `fo.adamw`, or `lambda lr:
            fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr))`. The value may be any
            hyperparameter: a decay, a momentum, the peak of a schedule. It is passed as a 0-dim
            float64 tensor that vmap maps over.
        params: a pytree of tensors, such as `dict(model.named_parameters())`. It is not modified.
        batches: an iterable, such as a list or a DataLoader. Tensors in a tuple or a list are the
            arguments of loss_fn after the parameters; anything else is one argument. The first
            `steps` are taken and kept in memory. If there are fewer, they are used again from the
            first one on.
        values: the values to try, finite numbers. Default: `count` values from `low` to `high`.
        low, high, count: values in equal ratios, rounded to 4 digits; 0 < low < high, count ≥ 2.
            Default: from 1e-6 to 10, 4 in a decade.
        steps: number of steps of each run, ≥ 1. Default 100.
        name: name of the value in the table and the plot.
        has_aux: whether `loss_fn` returns `(loss, aux)`; aux is ignored.
        chunk: number of copies that are trained at once, ≥ 1. Default: as many as fit in 1 GiB,
            counting parameters and state twice (before and after the step), gradients and updates,
            but not the activations. Chunks run one after another.
        compile: whether to compile the vmapped step with torch.compile. False (the default) is
            faster for a short sweep: compiling alone takes longer than a hundred steps of a small
            network.
        progress: True shows a progress bar on stderr, False none; None (the default) shows it if
            stderr is a terminal.

    Returns:
        An `LRSweep` with `values`, `losses` [values, steps], `final`, `diverged`, `best` and
        `suggestion`. A run that diverges has losses of inf or NaN, and does not affect the others.
        The state of torch's random generators is restored.

    If vmap fails for the loss or the recipe, for example because it branches on values, the values
    run one after another with the same results, with a warning. tx_factory then receives Python
    floats.

    Raises:
        TypeError: if an argument has the wrong type; if tx_factory does not return a
            transformation, or returns one that needs an extra argument other than the loss and its
            gradients; if loss_fn does not return a real 0-dim tensor.
        ValueError: if there are no values, batches or parameters, or a number is out of range.
        RuntimeError: if loss_fn modifies a tensor that is not in params, as batch norm does in
            training mode. Call a copy of the module without running averages:
            `torch.func.replace_all_batch_norm_modules_(copy.deepcopy(model))`.

    Do not use it to compare small differences: every value is tried once, over a short horizon.
    Another length, a schedule or another seed shifts the best value. For a short training run, pass
    its number of steps, and a tx_factory with its schedule.

    Example::

        >>> import torch, functional_optim as fo
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> y = x @ torch.tensor([1.0, -2.0, 0.5])
        >>> def loss_fn(params, x, y):
        ...     return (x @ params["w"] - y).square().mean()
        >>> params = {"w": torch.zeros(3)}
        >>> rates = [0.01, 0.1, 10.0]
        >>> found = fo.find_lr(loss_fn, fo.sgd, params, [(x, y)], values=rates, steps=20)
        >>> found.best
        0.1
        >>> found.losses.shape
        torch.Size([3, 20])
    """
    if not callable(loss_fn) or isinstance(loss_fn, base.GradientTransformation):
        raise TypeError(
            f"find_lr takes a loss function first, but got a {type(loss_fn).__name__}; call it as "
            "find_lr(loss_fn, tx_factory, params, batches)."
        )
    if not callable(tx_factory):
        raise TypeError(
            f"find_lr takes a function from a number to a transformation second, but got a "
            f"{type(tx_factory).__name__}; pass e.g. fo.adamw, or lambda lr: fo.adamw(lr), not "
            "what it returns."
        )
    if isinstance(tx_factory, type) and issubclass(tx_factory, torch.optim.Optimizer):
        raise TypeError(
            f"find_lr needs a transformation, but {tx_factory.__name__} makes an optimizer object; "
            "pass the function instead, e.g. fo.adamw or fo.sgd."
        )
    flags = {"has_aux": has_aux, "compile": compile}
    flags |= {} if progress is None else {"progress": progress}
    check_flags(dict.fromkeys(flags, "bool"), flags)
    numeric.check_count("find_lr", 1, steps=steps, **({} if chunk is None else {"chunk": chunk}))
    tried = _spaced(low, high, count) if values is None else _numbers(values)
    base.check_params(params)
    if not tree.leaves(params):
        raise ValueError(
            "find_lr got params without a tensor; pass a pytree of tensors such as "
            "dict(model.named_parameters())."
        )
    detached = tree.map(Tensor.detach, params)
    for value in tried:  # a recipe checks Python numbers, but not tensors
        _check_made(tx_factory(value))
    if chunk is None:
        state = _bytes(tx_factory(tried[0]).init(detached))
        chunk = max(1, MEMORY // max(1, 2 * state + 4 * _bytes(params)))
    restore = random_state(params)
    try:
        given = _batches(batches, steps)
        runs = SweepRuns(loss_fn, tx_factory, detached, given, restore, has_aux=has_aux)
        text = f"find_lr, {len(tried)} values of {name}: steps"
        with showing(text, len(tried) * steps, progress) as show:
            losses = base.unrecorded(runs.losses, tried, chunk, compile, show)
    finally:
        restore()
    for said in runs.said:
        warnings.warn(f"functional_optim: {said}.", RuntimeWarning, stacklevel=2)
    if len(tried) > 1 and steps > 1 and bool((losses == losses[0]).all()):
        warnings.warn(
            f"find_lr found the same losses for every {name}: tx_factory must use its argument, "
            "and loss_fn the parameters that it is called with.",
            stacklevel=2,
        )
    return LRSweep(name, tuple(tried), losses)


def _spaced(low: float, high: float, count: int) -> list[float]:
    """Values in equal ratios from low to high."""
    numeric.check_count("find_lr", 2, count=count)
    if not all(isinstance(x, (int, float)) for x in (low, high)) or not 0 < low < high < math.inf:
        raise ValueError(
            f"find_lr needs numbers with 0 < low < high, but got low={low!r} and high={high!r}; "
            "for other values pass values=[...]."
        )
    ends = math.log10(low), math.log10(high)
    exponents = torch.linspace(*ends, count, dtype=torch.float64, device="cpu")
    return [float(f"{10**x:.4g}") for x in exponents.tolist()]


def _numbers(values: Any) -> list[float]:
    """The values as Python floats."""
    try:
        found = [float(x) for x in values]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"find_lr takes a sequence of numbers as values, but got {values!r}; pass e.g. "
            "values=[0.01, 0.03, 0.1]."
        ) from None
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(
            f"find_lr needs one finite number or more as values, but got {values!r}; pass e.g. "
            "values=[0.01, 0.03, 0.1]."
        )
    return found


def _check_made(tx: Any) -> None:
    """Raise TypeError unless tx_factory has returned a transformation that runs can step."""
    if not isinstance(tx, base.GradientTransformation):
        raise TypeError(
            f"find_lr's tx_factory must return a transformation, but it returned a "
            f"{type(tx).__name__}; return e.g. fo.adamw(lr)."
        )
    needed = [x for x in tx.required if x not in PROVIDED]
    if needed:
        raise TypeError(
            f"find_lr cannot provide the extra argument {', '.join(needed)}, which the "
            "transformation of tx_factory needs; leave out the part that takes it."
        )


def _batches(batches: Any, steps: int) -> list[tuple[Any, ...]]:
    """The arguments of the loss after the parameters, for each step."""
    try:
        kept = list(islice(batches, steps))
    except TypeError as error:
        if isinstance(batches, Iterable) and not (
            isinstance(batches, Tensor) and not batches.dim()
        ):
            raise  # of the iterable itself
        raise TypeError(
            f"find_lr takes an iterable of batches, but got a {type(batches).__name__}; pass a "
            f"DataLoader, or a list such as [(x, y)]."
        ) from error
    if not kept:
        raise ValueError(
            "find_lr got no batch; pass an iterable that is not used up, such as a list or a "
            "DataLoader."
        )
    given = [tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in kept]
    return list(islice(cycle(given), steps))


def _bytes(held: Any) -> int:
    """The bytes of a tree's tensors."""
    return sum([x.nbytes for x in tree.leaves(held) if isinstance(x, Tensor)])


Factory = Callable[[Any], base.GradientTransformation]
"""From a number to a transformation."""

PROVIDED = ("value", "grad_fn", "value_and_grad")
"""Extra arguments of transformations that a run provides."""

Show = Callable[[int], object]
"""Called with the number of finished steps; a step of several copies counts as several."""


def random_state(params: Any) -> Callable[[], None]:
    """A function that restores the current states of torch's generators of the CPU and of the
    devices of the parameters."""
    kept = [partial(torch.set_rng_state, torch.get_rng_state())]
    for device in {p.device for p in tree.leaves(params)}:
        if device.type != "cpu":
            module = torch.get_device_module(device)
            kept.append(partial(module.set_rng_state, module.get_rng_state(device), device=device))

    def restore() -> None:
        for put in kept:
            put()

    return restore


@dataclass(eq=False)
class SweepRuns:
    """Runs from the same parameters over the same batches.

    params: the parameters, which are copied. batches: the arguments of the loss after the
    parameters, one tuple for each step. restore: sets the random generators to their
    initial states, before each run. said: fallbacks, and their reasons.
    """

    loss_fn: Loss
    tx_factory: Factory
    params: Any
    batches: Sequence[tuple[Any, ...]]
    restore: Callable[[], None]
    has_aux: bool
    said: list[str] = field(default_factory=list)
    functions: tuple[Callable[..., Any], ...] = ()

    def losses(self, values: Sequence[float], chunk: int, compile: bool, show: Show) -> Tensor:
        """The losses [values, steps], in chunks of equal size, by the first method that works."""
        ways: list[tuple[str, Callable[[Sequence[float], Show], Tensor]]] = [
            ("", self._in_turn),
            (
                "vmap fails for the loss or the recipe ({}); they run one after another",
                self._together,
            ),
        ]
        if compile:
            failed = "torch.compile failed ({}); find_lr runs the vmapped step eagerly"
            ways.append((failed, partial(self._together, compile=True)))
        size = math.ceil(len(values) / math.ceil(len(values) / chunk))
        rows: list[Tensor] = []
        for start in range(0, len(values), size):
            some = values[start : start + size]
            if compile:  # equal sizes compile once
                some = [*some, *[some[-1]] * (size - len(some))]
            said = ""
            while len(rows) == start // size:
                text, way = ways[-1]
                self.restore()
                try:
                    rows.append(
                        way(some, lambda done, start=start: show(start * len(self.batches) + done))
                    )
                except Exception as error:
                    _refuse(error, len(some))
                    if len(ways) == 1:
                        raise
                    ways.pop()
                    if len(ways) == 1:
                        self._check_pure()
                    if isinstance(error, kernels.NoCompiler):
                        kernels.warn_failed("torch.compile failed", error)
                    else:
                        said = text.format(kernels.line(error))
            if said:
                self.said.append(said)
        return torch.cat(rows)[: len(values)]

    def _check_pure(self) -> None:
        """Raise an error if the loss modifies other tensors, which only torch.func refuses."""
        try:
            torch.func.grad(self.loss_fn, has_aux=self.has_aux)(self.params, *self.batches[0])
        except Exception as error:
            _refuse(error, 1)

    def _in_turn(self, values: Sequence[float], show: Show) -> Tensor:
        """The losses [values, steps] of runs one after another, by autograd."""
        losses: list[Tensor] = []
        for value in values:
            self.restore()
            params, state = self.params, self.tx_factory(value).init(self.params)
            for batch in self.batches:
                params, state, loss = self._step(value, params, state, batch)
                losses.append(loss.detach())
                show(len(losses))
        return _on_cpu(losses).reshape(len(values), -1)

    def _together(self, values: Sequence[float], show: Show, *, compile: bool = False) -> Tensor:
        """The losses [values, steps] of runs in one vmapped step.

        Outside the vmapped functions trees are flat lists of tensors: vmap refuses the None of a
        missing slot.
        """
        leaves = tree.leaves(self.params)
        numbers = torch.tensor(values, dtype=torch.float64, device=leaves[0].device)
        if compile:
            kernels.require_compiler(leaves[0].device)
        if not self.functions:
            of_state = _numbered(self.tx_factory(numbers[0]).init(self.params))
            init_all, step_all = self._vmapped(_numbered(self.params), of_state)
            run = step_all
            if compile:
                run = torch.compile(kernels.own_code(run), fullgraph=True)
            self.functions = (init_all, step_all, run)
        init_all, *steps = self.functions
        run = steps[compile]
        flat = [p.expand(len(values), *p.shape).clone() for p in leaves]
        slots = init_all(numbers, flat)
        losses: list[Tensor] = []
        for batch in self.batches:
            flat, slots, loss = run(numbers, flat, slots, batch)
            losses.append(loss.detach())  # other parameters of a module may require grad
            show(len(losses) * len(values))
        return _on_cpu(losses).T

    def _vmapped(self, of_params: Any, of_state: Any) -> tuple[Callable[..., Any], ...]:
        """`init` and a step of several copies, of trees as lists, by the indices of their
        leaves."""

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
    """A tree with the index of each leaf among all leaves.

    Under torch.compile `tree.map` visits a dict in another order, and no other function builds
    trees.
    """
    return tree.with_leaves(held, list(range(len(tree.leaves(held)))))


def _flat(places: Any, held: Any) -> list[Tensor]:
    """The leaves of a tree, by their indices."""
    found: dict[int, Tensor] = {}
    tree.map(found.__setitem__, places, held)
    return [found[i] for i in range(len(found))]


def _filled(places: Any, leaves: list[Tensor]) -> Any:
    """The tree of leaves, from their indices."""
    return tree.map(leaves.__getitem__, places)


def _refuse(error: Exception, copies: int) -> None:
    """Re-raise errors that other methods would not fix, or would hide."""
    if isinstance(error, torch.OutOfMemoryError):
        error.add_note(f"find_lr trained {copies} copies at once; pass a smaller chunk=.")
        raise error
    if "mutate a captured Tensor" in str(error):
        raise RuntimeError(
            "loss_fn modifies a tensor that is not in params, but find_lr must not change the "
            "module. If it is a running average of batch norm, call a copy of the module "
            "without it: torch.func.replace_all_batch_norm_modules_(copy.deepcopy(model))."
        ) from error


def _on_cpu(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).to("cpu", torch.float64)
