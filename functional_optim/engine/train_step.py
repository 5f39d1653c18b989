"""`compile_train_step`: the loss compiled, its gradients outside the graph, and the update.

In one graph with the update Inductor does not separate forward and backward, and compiles 1.6 to
2.3 times as long. The update has other kernels anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels, numeric, tree
from functional_optim.checkpoint.lookup import get, keys
from functional_optim.combinators.sharpness import SamState
from functional_optim.core import base, memory, modes
from functional_optim.core.chain import freezing_rules
from functional_optim.core.factory import Reconstructible, factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import State
from functional_optim.core.paths import chosen
from functional_optim.engine.compile import compile as compile_update

Loss = Callable[..., Any]
"""From the parameters and a batch to the loss, or to the loss and something else."""


@factory
def compile_train_step(
    loss_fn: Loss,
    tx: base.GradientTransformation,
    *,
    has_aux: bool = False,
    accumulate: int = 1,
    donate: bool = True,
    strict: bool = False,
    compile: bool = True,
) -> Callable[..., tuple[Any, ...]]:
    """Compile a train step: `params, state, loss = step(params, state, *batch)`.

    The loss and its gradients are compiled with torch.compile, the update as by `fo.compile`. It
    compiles in about the time of torch's own loop (a compiled model, `loss.backward()` and a fused
    optimizer), and steps as fast. A new learning rate, a schedule, or another `accumulate` compiles
    nothing.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns the loss, a real 0-dim tensor. For a module, call
            it by `torch.func.functional_call`. Autocast, checkpointing and other contexts of
            autograd belong into it.
        tx: a transformation. If it takes `value`, it gets the loss.
        has_aux: `loss_fn` returns `(loss, aux)`, and the step `params, state, loss, aux`. Buffers,
            such as those of batch norm, go in as a part of the batch and come out so.
        accumulate: into how many micro-batches of equal size each tensor of a batch is cut along
            its first dimension, ≥ 1; all have the same size there. Their gradients are summed in
            place; the step is that of the mean of their losses, which is returned. `aux` is then a
            tuple, one for each.
        donate: write into the tensors of `params` and `state`, as in `fo.compile`.
        strict: raise a RuntimeError, or torch.compile's own error, where the loss is not one graph
            or the update cannot be compiled. False (the default) falls back to what works.
        compile: False runs everything eagerly, for a look into it.

    Returns:
        The step. Named arguments go to tx if it takes extra arguments of that name, else to
        `loss_fn`. A leaf that the loss does not use and one that tx freezes have no gradient, and
        stay as they are. If the state has a number `loss_scale` (see `fo.dynamic_loss_scale`),
        gradients are taken of the loss times that number. Inside torch.compile, make_fx or a
        transform of torch.func the step runs as plain operations, in which a leaf that the loss
        does not use has a gradient of zeros; for meta-gradients also pass `donate=False`.

    Raises:
        TypeError: if loss_fn or tx is something else; from the step, if loss_fn returns no real
            0-dim tensor, or an extra argument that tx needs is missing.
        ValueError: if accumulate is no positive whole number; from the step, if a batch cannot be
            cut, the loss depends on none of the parameters that tx updates, parameters of a module
            are frozen there and not in tx, or a loss scale is that of some parameters only.

    Example::

        >>> import torch, functional_optim as fo
        >>> def loss_fn(params, x, y):
        ...     return ((x @ params["w"] - y) ** 2).mean()
        >>> tx = fo.sgd(lr=0.5)
        >>> step = fo.compile_train_step(loss_fn, tx, compile=False)
        >>> params = {"w": torch.zeros(2)}
        >>> params, state, loss = step(params, tx.init(params), torch.eye(2), torch.ones(2))
        >>> params["w"], loss
        (tensor([0.5000, 0.5000]), tensor(1.))
    """
    if not callable(loss_fn) or isinstance(loss_fn, base.GradientTransformation):
        raise TypeError(
            f"compile_train_step takes a loss function first, but got a {type(loss_fn).__name__}; "
            "call it as compile_train_step(loss_fn, tx)."
        )
    if isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters()):
        raise TypeError(
            "compile_train_step calls loss_fn(params, *batch), but got a module with parameters of "
            "its own; pass e.g. lambda params, x, y: F.cross_entropy(torch.func.functional_call("
            "model, params, (x,)), y)."
        )
    base.check_transformation("compile_train_step", tx, "compile_train_step(loss_fn, adamw(1e-3))")
    numeric.check_count("compile_train_step", 1, accumulate=accumulate)
    return TrainStep(loss_fn, tx, has_aux, accumulate, donate, strict, compile)


class TrainStep(Reconstructible):
    """What `compile_train_step` returns."""

    stateful = True

    def __init__(
        self,
        loss_fn: Loss,
        tx: base.GradientTransformation,
        has_aux: bool,
        accumulate: int,
        donate: bool,
        strict: bool,
        compile: bool,
    ) -> None:
        self.given = (loss_fn, tx, has_aux, accumulate, donate, strict, compile)
        self.tx, self.has_aux, self.parts, self.compiled = tx, has_aux, accumulate, compile
        self.extra = tx.extra
        self.required = [name for name in tx.required if name not in ("value", "grad_fn")]
        self.strict, self.plain = strict, loss_fn
        self.loss: Loss = loss_fn
        self.update: Any = compile_update(tx, donate=donate, strict=strict)
        self.begun = False
        self.scaled: bool | None = None

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.given

    def __call__(self, params: Any, state: Any, /, *batch: Any, **named: Any) -> tuple[Any, ...]:
        extra = {name: x for name, x in named.items() if name in self.extra}
        for name in self.required:
            if name not in extra:
                raise TypeError(
                    f"the transformation needs the extra argument {name}; pass it to the step by "
                    f"name, as step(params, state, *batch, {name}=...)."
                )
        rest = {name: x for name, x in named.items() if name not in extra}
        parts = micro_batches((batch, rest), self.parts)
        traced = modes.traced()
        if not (traced or self.begun):
            if isinstance(params, State):
                raise TypeError("call a train step in this order: step(params, state, *batch).")
            base.check_params(params)
            self._check_frozen(params)
            if self.compiled:
                self._compile_loss(params)
            self.begun = True
        find = self._by_transforms if traced else self._by_autograd
        scale = self._loss_scale(state)
        if scale is not None and self.scaled is None:
            self._check_scaled(params)
        try:
            grads, loss, auxes = base.recorded(find, params, scale, parts)
        except Exception as error:
            eager = traced or self.strict or self.loss is self.plain
            if eager or not kernels.is_compile_error(error):
                raise
            grads, loss, auxes = self._uncompiled(error, params, scale, parts)
        if "value" in self.extra:
            extra.setdefault("value", loss)
        if "grad_fn" in self.extra:
            later = scale if _scales_inside(state) else None
            extra.setdefault("grad_fn", lambda worse: base.recorded(find, worse, later, parts)[0])
        if self.compiled and not traced:
            step = partial(self.update, grads, state, params, **extra)
        else:
            step = partial(self.update.by_operations, grads, state, params, extra)
        params, state = modes.uncast(loss.device.type, step)
        self.scaled = scale is not None
        if not self.has_aux:
            return params, state, loss
        return params, state, loss, tuple(auxes) if self.parts > 1 else auxes[0]

    def _check_frozen(self, params: Any) -> None:
        """Raise ValueError for leaves that are frozen as parameters of a module are, which autograd
        would respect and a step of trees does not."""
        places = [x.where for x in freezing_rules(self.tx)]
        moving = [
            (path, p)
            for path, p in tree.items(params)
            if not any(chosen(where, path, p) for where in places)
        ]
        marked = [x for x in moving if isinstance(x[1], torch.nn.Parameter)]
        still = [path for path, p in marked if not p.requires_grad]
        if still and any(p.requires_grad for _, p in moving):
            raise ValueError(
                f"some parameters require gradients, and others, such as {still[0]!r}, do not, "
                "but a step moves all of them; freeze these in the recipe, as by "
                f"fo.freeze({still[0]!r}), or pass detached tensors, to train all."
            )

    def _compile_loss(self, params: Any) -> None:
        """Have the loss compiled by its first call, if there is a compiler."""
        device = base.default_device([x for x in tree.leaves(params) if isinstance(x, Tensor)])
        try:
            kernels.require_compiler(device)
            self.loss = torch.compile(self.plain, fullgraph=self.strict)
        except kernels.NoCompiler as error:
            if self.strict:
                raise kernels.refusal(str(error)) from error
            kernels.warn_failed("torch.compile failed", error)

    def _uncompiled(self, error: Exception, *given: Any) -> Any:
        """The gradients without the compiler that has failed, from now on."""
        before, self.loss = self.loss, self.plain
        try:
            found = base.recorded(self._by_autograd, *given)
        except BaseException:  # of the loss itself, which may raise what a compiler does
            self.loss = before
            raise
        kernels.warn_failed(
            "torch.compile failed", error, "; the loss of a train step runs eagerly"
        )
        return found

    def _loss_scale(self, state: Any) -> Any:
        """What the loss is multiplied with; None for nothing."""
        if self.scaled is None:
            found = keys(state, "loss_scale")
            if len(found) > 1:
                raise ValueError(
                    f"the state has several loss scales ({', '.join(found)}), but there is one "
                    "loss; put one dynamic_loss_scale around the whole transformation."
                )
            if not found:
                return None
        scale = get(state, "loss_scale") if self.scaled is not False else None
        return scale if isinstance(scale, Tensor) and not scale.dim() else None

    def _check_scaled(self, params: Any) -> None:
        """Raise ValueError if the gradient of a leaf would not be divided by the loss scale."""
        if not isinstance(self.tx, Leafwise) or not self.tx.layout.routed:
            return
        for path, p in tree.items(params):
            part = self.tx.on(path, p)
            names = () if part is None else (*part.layout.carry, *part.layout.hyper)
            if part is not None and not any(x.endswith("loss_scale") for own in names for x in own):
                raise ValueError(
                    f"the loss is scaled, but dynamic_loss_scale does not act on the parameter "
                    f"{path!r}, whose gradient would stay as large; put it around the whole "
                    "transformation."
                )

    def _moving(self, params: Any) -> list[bool]:
        """For each leaf, whether a rule acts on it."""
        if not isinstance(self.tx, Leafwise) or not self.tx.layout.routed:
            return [True] * len(tree.leaves(params))
        return [self.tx.on(path, p) is not None for path, p in tree.items(params)]

    def _value(self, loss: Loss, params: Any, part: Any) -> tuple[Tensor, Any]:
        """The loss of a micro-batch, and what comes with it."""
        batch, named = part
        value, aux = loss(params, *batch, **named), None
        if self.has_aux:
            if not (isinstance(value, tuple) and len(value) == 2):
                raise TypeError(
                    "with has_aux=True loss_fn must return a pair (loss, aux), but it returned a "
                    f"{type(value).__name__}."
                )
            value, aux = value
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            what = f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            raise TypeError(
                f"loss_fn must return a real 0-dim tensor, but it returned {what}; if the loss "
                "function has an auxiliary output, pass has_aux=True."
            )
        return value, aux

    def _weight(self, scale: Any, value: Tensor) -> Any:
        """What the loss of a micro-batch is multiplied with, a tensor like it; None for 1."""
        if scale is None and self.parts == 1:
            return None
        share = 1.0 / self.parts
        if scale is None:
            return value.new_full((), share)
        wide = torch.promote_types(value.dtype, scale.dtype)  # a scale may be too large for float16
        return (scale.to(wide) * share).to(value)

    def _by_autograd(
        self, params: Any, scale: Any, parts: list[Any]
    ) -> tuple[Any, Tensor, list[Any]]:
        """Gradients, the loss, and what comes with each micro-batch."""
        leaves = [
            p.detach().requires_grad_(moves)
            for p, moves in zip(tree.leaves(params), self._moving(params), strict=True)
        ]
        mine = [p for p in leaves if p.requires_grad]
        given = tree.with_leaves(params, leaves)
        losses, auxes = [], []
        for part in parts:
            value, aux = self._value(self.loss, given, part)
            if mine and torch.is_inference_mode_enabled():
                raise RuntimeError(
                    "there are no gradients inside of torch.inference_mode(); call the step "
                    "outside of it."
                )
            if mine and value.requires_grad:
                base.unrecorded(_backward, value, self._weight(scale, value), mine)
            old = self.update.donate and (self.has_aux or _is_old(value))
            taken = _places(leaves) if old else set()
            losses.append(_kept(value, taken))
            auxes.append(tree.map(lambda x, taken=taken: _kept(x, taken), aux))
        if mine and all(p.grad is None for p in mine):
            raise ValueError(
                "the loss depends on none of the parameters that tx updates; compute it from the "
                "tree that loss_fn is called with, without detach() or no_grad(); for a module by "
                "torch.func.functional_call(model, params, (x,))."
            )
        grads = tree.with_leaves(params, [p.grad for p in leaves])
        return grads, _mean(losses), auxes

    def _by_transforms(
        self, params: Any, scale: Any, parts: list[Any]
    ) -> tuple[Any, Tensor, list[Any]]:
        """The same as operations that can be traced; a leaf that is not used has zeros."""
        moving, leaves = self._moving(params), tree.leaves(params)
        mine = [p for p, moves in zip(leaves, moving, strict=True) if moves]

        auxes: list[Any] = []

        def value_of(own: list[Tensor], part: Any) -> tuple[Tensor, list[Tensor]]:
            new = iter(own)
            pairs = zip(leaves, moving, strict=True)
            given = tree.with_leaves(params, [next(new) if moves else p for p, moves in pairs])
            value, aux = self._value(self.plain, given, part)
            auxes.append(aux)
            weight = self._weight(scale, value)
            beside = [x for x in tree.leaves(aux) if isinstance(x, Tensor)]
            return value if weight is None else value * weight, [value, *beside]

        total: list[Tensor] = []
        losses: list[Tensor] = []
        for part in parts:
            grads, (value, *beside) = torch.func.grad(value_of, has_aux=True)(mine, part)
            total = list(map(torch.add, total, grads)) if total else grads
            losses.append(value)
            outside = iter(beside)
            auxes[-1] = tree.map(
                lambda x, new=outside: next(new) if isinstance(x, Tensor) else x, auxes[-1]
            )
        found = iter(total)
        grads = tree.with_leaves(params, [next(found) if moves else None for moves in moving])
        return grads, _mean(losses), auxes


def _backward(value: Tensor, weight: Any, leaves: list[Tensor]) -> None:
    """Add the gradients of a loss to those of the leaves, in place after the first time."""
    torch.autograd.backward(value, weight, inputs=leaves)


def _is_old(x: Tensor) -> bool:
    """Whether a tensor may have memory that was there before the loss was computed."""
    return x.is_leaf or x._is_view()


def _places(tensors: list[Tensor]) -> set[int]:
    """Where the memory of tensors begins."""
    return {x.untyped_storage().data_ptr() for x in tensors if memory.has_address(x)}


def _kept(x: Any, taken: set[int]) -> Any:
    """What the step returns besides the parameters; a copy if it is in memory that is written."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return x.clone() if taken and not taken.isdisjoint(_places([x])) else x


def _mean(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def _scales_inside(state: Any) -> bool:
    """Whether a loss scale divides the second gradients of a step, those that `sam` asks for."""
    if isinstance(state, SamState) and keys(state.inner, "loss_scale"):
        return True
    return isinstance(state, tuple) and any(map(_scales_inside, state))


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """A batch cut along the first dimension of its tensors; what is not a tensor goes into each.

    batch: a pair of the positional and the named arguments.

    Raises:
        ValueError: for tensors that cannot be cut into so many equal parts, or do not belong to the
            same samples.
    """
    if parts == 1:
        return [batch]

    if not torch.compiler.is_compiling():
        _check_batch(tree.leaves(batch), parts)

    def piece(x: Any, i: int) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.dim() or x.shape[0] % parts:
            at = next(path for path, y in tree.items(batch) if y is x).partition(".")[2]
            advice = f"batches whose size is a multiple of {parts}" if x.dim() else "a number"
            raise ValueError(
                f"accumulate={parts} cuts the first dimension of each tensor of a batch into equal "
                f"parts, but {at!r} of the batch has shape {tuple(x.shape)}; pass {advice}."
            )
        size = x.shape[0] // parts
        return x[i * size : (i + 1) * size].clone()  # a view with an offset is compiled separately

    return [tree.map(lambda x, i=i: piece(x, i), batch) for i in range(parts)]


def _may_be_cut(x: Any) -> bool:
    """Whether a leaf of a batch has values of samples that are not cut."""
    if isinstance(x, Mapping):
        inside = tree.leaves(list(x.values()))
        return any(isinstance(y, Tensor) or _may_be_cut(y) for y in inside)
    return type(x).__name__ == "ndarray" and bool(x.ndim)


def _check_batch(leaves: list[Any], parts: int) -> None:
    """Raise ValueError for tensors of other samples, and for tensors in an unknown container."""
    whole = list(filter(_may_be_cut, leaves))
    if whole:
        raise ValueError(
            f"accumulate={parts} cuts the tensors of a batch, but not those in a "
            f"{type(whole[0]).__name__}; pass a dict of tensors, such as dict(batch)."
        )
    sizes = sorted({len(x) for x in leaves if isinstance(x, Tensor) and x.dim()})
    if len(sizes) > 1:
        raise ValueError(
            f"accumulate={parts} cuts the first dimension of each tensor of a batch, but there are "
            f"tensors with {' and '.join(map(str, sizes))} elements along it; close over those "
            "that belong to all samples, such as weights of classes."
        )
