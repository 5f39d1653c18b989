"""Residuals: functions from parameters to r, and their structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.core.chain import completed
from functional_optim.core.ravel import Ravel

ResidualFn: TypeAlias = Callable[[Any], Any]
"""From a tree of parameters to residuals: a real tensor of any shape, or a tree of such."""

LIMIT = 2**24
"""Elements of a Jacobian that are computed at once: 128 MiB in float64."""
FEW = 8
"""Parameters up to which derivatives along each are computed one by one, without torch.vmap."""


class PerSample:
    """The result of `per_sample`: residuals that each belong to one sample.

    fn: of the parameters and one sample. data: trees of tensors with a leading dimension of
    samples. count: the number of samples.
    """

    def __init__(self, fn: Callable[..., Any], data: tuple[Any, ...]) -> None:
        if not callable(fn):
            raise TypeError(
                f"per_sample takes a function fn(params, *sample) first, but got a "
                f"{type(fn).__name__}; call it as per_sample(fn, x, y)."
            )
        leaves = tree.leaves(data)
        wrong = [x for x in leaves if not isinstance(x, Tensor)]
        if wrong or not leaves:
            what = f"a {type(wrong[0]).__name__}" if wrong else "nothing"
            raise TypeError(
                f"per_sample takes tensors with one row for each sample, but got {what}; put what "
                "all samples share into the function."
            )
        counts = {tuple(x.shape[:1]) for x in leaves}
        if len(counts) != 1 or () in counts or (0,) in counts:
            raise ValueError(
                "per_sample needs data with one leading dimension in common, the number of "
                f"samples, but got {tree.summary(data)}."
            )
        self.fn, self.data = fn, data
        self.count = counts.pop()[0]

    def __call__(self, params: Any) -> Tensor:
        """All residuals, in the order of the samples: (m,)."""

        def one(sample: tuple[Any, ...]) -> Tensor:
            return as_vector(self.fn(params, *sample))

        return vmap(one)(self.data).reshape(-1)

    def over(self, fill: Callable[[Any], Any]) -> PerSample:
        """The same as a function of the inputs of `fill`, which returns the parameters."""
        return PerSample(lambda params, *sample: self.fn(fill(params), *sample), self.data)


class Stacked:
    """The result of `stack_residuals`. parts: functions of the parameters."""

    def __init__(self, parts: tuple[ResidualFn, ...]) -> None:
        for part in parts:
            if not callable(part):
                raise TypeError(
                    f"stack_residuals takes functions from parameters to residuals, but got a "
                    f"{type(part).__name__}."
                )
        if not parts:
            raise ValueError("stack_residuals needs at least one function; got none.")
        self.parts = parts

    def __call__(self, params: Any) -> Tensor:
        """The concatenated residuals of all parts: (m,)."""
        return torch.cat([as_vector(part(params)) for part in self.parts])

    def over(self, fill: Callable[[Any], Any]) -> Stacked:
        """The same as a function of the inputs of `fill`, which returns the parameters."""
        return Stacked(tuple([completed(part, fill) for part in self.parts]))


def per_sample(fn: Callable[..., Any], *data: Any) -> PerSample:
    """Declare that every sample has separate residuals: residual i is `fn(params, *sample_i)`.

    A Jacobian then costs a few gradients of the loss: each row is a gradient of one sample, and all
    samples are differentiated in a batch. For an opaque function a Jacobian takes a backward pass
    per residual, or a forward pass per parameter.

    Args:
        fn: from the parameters and one sample to its residuals: a 0-dim tensor or a tensor of any
            shape. It runs under torch.vmap, so it must not branch on values, and gets a sample
            without the leading dimension.
        data: tensors, or trees of tensors, with one leading dimension in common: the samples.

    Returns:
        A function from parameters to all residuals, (samples × residuals of one,), with a structure
        that solvers use for Jacobians.

    Raises:
        TypeError: if fn cannot be called, or data has leaves that are not tensors.
        ValueError: if the tensors have no samples, or a different number of them.

    Example::

        >>> import torch, functional_optim as fo
        >>> t, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 1.0, 0.5])
        >>> fn = fo.per_sample(lambda p, t, y: p["a"] * torch.exp(-p["b"] * t) - y, t, y)
        >>> fn({"a": torch.tensor(2.0), "b": torch.tensor(0.0)})
        tensor([0.0000, 1.0000, 1.5000])
    """
    return PerSample(fn, data)


def stack_residuals(*parts: ResidualFn) -> Stacked:
    """Concatenate residuals: e.g. those of a differential equation in a domain and at its boundary.

    Args:
        parts: functions from the same parameters to residuals, each plain or a result of
            `per_sample`. To weight a part, multiply its residuals by √w.

    Returns:
        A function from parameters to all residuals, which are differentiated part by part.

    Raises:
        TypeError: for a part that cannot be called.
        ValueError: without parts.

    Example::

        >>> import torch, functional_optim as fo
        >>> inside = fo.per_sample(lambda w, x: w * x - 1, torch.tensor([1.0, 2.0]))
        >>> fn = fo.stack_residuals(inside, lambda w: 0.1 * w)
        >>> fn(torch.tensor(3.0))
        tensor([2.0000, 5.0000, 0.3000])
    """
    return Stacked(parts)


def as_vector(value: Any) -> Tensor:
    """Residuals as a vector, (m,).

    Raises:
        TypeError: for other values than real floating-point tensors.
        ValueError: without residuals.
    """
    if value is None:
        raise TypeError("the function returned None; return its residuals, a tensor.")
    leaves = [value] if isinstance(value, Tensor) else tree.leaves(value)
    for x in leaves:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise TypeError(
                f"residuals must be real floating-point tensors, but the function returned {what}; "
                "of complex residuals return torch.view_as_real(r)."
            )
    parts = [x.reshape(-1) for x in leaves]
    if not sum(x.numel() for x in parts):
        raise ValueError(
            "the function returned residuals without elements; return at least one number."
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def for_each(f: Callable[..., Any], *given: Any) -> Any:
    """f of each problem, for trees of tensors (B, ...). torch.vmap alone refuses None in them."""
    return vmap(lambda *own: f(*tree.with_leaves(given, [*own])))(*tree.leaves(given))


def searched(x: Tensor) -> Tensor:
    """A solver's x, from which autograd records. A solver inside of the function knows it."""
    point: Any = x.detach().requires_grad_()
    point.is_searched = True
    return point


def is_searched(x: Tensor) -> bool:
    """Whether a tensor is the x of a solver."""
    return getattr(x, "is_searched", False)


def on_vector(fn: ResidualFn, flat: Ravel) -> Callable[[Tensor], Tensor]:
    """The same residuals as a function of the parameters as one vector: (n,) → (m,)."""
    return lambda x: as_vector(fn(flat.tree(x)))


def forward_over(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and its derivative along each parameter: (..., n, m) for x of shape (..., n).

    f may map a batch of points independently. It is evaluated once, for all directions.
    """
    n = x.shape[-1]
    eye = torch.eye(n, dtype=x.dtype, device=x.device)

    def push(direction: Tensor) -> Any:
        return jvp(f, (x,), (direction.expand_as(x),))

    r, columns = vmap(push)(eye)
    return r[0], columns.movedim(0, -2)  # r is the same for all directions


def backward_over(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by one backward pass for each residual."""
    found: Any = vjp(f, x)
    r, pull = found
    m = r.shape[-1]
    eye = torch.eye(m, dtype=r.dtype, device=r.device)

    def back(cotangent: Tensor) -> Tensor:
        return pull(cotangent.expand_as(r))[0]

    chunk = max(1, LIMIT // max(x.numel(), 1))
    rows = vmap(back, chunk_size=chunk if chunk < m else None)(eye)
    return r, rows.movedim(0, -1)


def twice_backward(
    f: Callable[[Tensor], Tensor], x: Tensor, few: int = FEW, *, recorded: bool = False
) -> tuple[Tensor, Tensor]:
    """The same as `forward_over` by plain autograd: Jᵀu is linear in u, and its derivative is J.

    It takes less time than a forward pass. The first forward pass imports torch's compiler, and the
    first call of autograd with `grad_outputs` imports sympy, which take seconds: so this function
    differentiates sums. few: parameters up to which it differentiates along each separately.
    recorded: as in `linearized`.
    """
    x = x if recorded else searched(x)
    n = x.shape[-1]
    with torch.enable_grad():
        r = f(x)
        if not r.requires_grad:
            return r, r.new_zeros((*x.shape, r.shape[-1]))
        u = torch.zeros_like(r, requires_grad=True)
        (pulled,) = torch.autograd.grad((r * u).sum(), x, create_graph=True)
        sums = [row.sum() for row in pulled.unbind(-1)] if n <= few else []
    if n > few:
        eye = torch.eye(n, dtype=x.dtype, device=x.device)
        along = eye.reshape(n, *[1] * (x.dim() - 1), n).expand(n, *x.shape)
        (columns,) = torch.autograd.grad(
            pulled, u, along, is_grads_batched=True, create_graph=recorded
        )
    else:
        found = [torch.autograd.grad(x, u, None, True, recorded)[0] for x in sums]
        columns = torch.stack(found)
    return r if recorded else r.detach(), columns.movedim(0, -2)


def linearized(
    f: Callable[[Tensor], Tensor], x: Tensor, m: int, *, recorded: bool = False
) -> tuple[Tensor, Tensor]:
    """f(x) and its transposed Jacobian, (..., n, m), in the mode that takes fewer passes.

    recorded: whether both must be differentiable by autograd.
    """
    if m < x.shape[-1]:
        return backward_over(f, x)
    if not modes.traced():
        return twice_backward(f, x, recorded=recorded)
    try:
        return forward_over(f, x)
    except NotImplementedError as error:
        if "forward" not in str(error):  # of an operation, or a torch.autograd.Function
            raise
        return backward_over(f, x)


def blocks(fn: ResidualFn, flat: Ravel, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Residuals and rows of the Jacobian, (k,) and (k, n), block by block.

    Samples are differentiated in blocks of bounded size. An opaque function is one block; one that
    has its own way to be differentiated has `derivatives(x)`.
    """
    own: Any = getattr(fn, "derivatives", None)
    if own is not None:
        yield own(x)
    elif isinstance(fn, Stacked):
        for part in fn.parts:
            yield from blocks(part, flat, x)
    elif isinstance(fn, PerSample):
        yield from _blocks_of_samples(fn, flat, x)
    else:
        f = on_vector(fn, flat)
        recorded = x.requires_grad and torch.is_grad_enabled()
        r, columns = linearized(f, x, count(f, x), recorded=recorded)
        yield r, columns.mT


def _blocks_of_samples(fn: PerSample, flat: Ravel, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    def one(x: Tensor, sample: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        r = as_vector(fn.fn(flat.tree(x), *sample))
        return r, r

    def alone(x: Tensor, sample: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        r, _ = one(x, sample)
        return r.sum(), r

    k = _of_a_sample(fn, flat, x)
    if k == 1:
        derive = grad(alone, has_aux=True)  # faster than jacrev
    else:
        derive = (jacrev if k < x.shape[-1] else jacfwd)(one, has_aux=True)
    rows = vmap(derive, in_dims=(None, 0))
    most = max(1, LIMIT // (k * x.shape[-1]))
    for start in range(0, fn.count, most):
        part = tree.map(lambda data, a=start: data[a : a + most], fn.data)
        J, r = rows(x, part)
        yield r.reshape(-1), J.reshape(-1, x.shape[-1])


def _of_a_sample(fn: PerSample, flat: Ravel, x: Tensor) -> int:
    """The number of residuals of one sample."""
    first = tree.map(lambda data: data[0], fn.data)
    return count(lambda x: as_vector(fn.fn(flat.tree(x), *first)), x)


def size(fn: ResidualFn, flat: Ravel, x: Tensor) -> int:
    """The number of residuals, from as few of them as the structure allows."""
    if isinstance(fn, Stacked):
        return sum(size(part, flat, x) for part in fn.parts)
    if isinstance(fn, PerSample):
        return fn.count * _of_a_sample(fn, flat, x)
    return count(on_vector(fn, flat), x)


def count(f: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The number of residuals. f may need gradients of other tensors than x."""
    with torch.enable_grad():
        return f(x.detach()).shape[-1]


def jacobian(fn: ResidualFn, flat: Ravel, x: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals and the dense Jacobian: (m,) and (m, n)."""
    parts = list(blocks(fn, flat, x))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([r for r, _ in parts]), torch.cat([J for _, J in parts])


def products(
    fn: ResidualFn, flat: Ravel, x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Residuals, and the functions v ↦ J v and u ↦ Jᵀ u, without a Jacobian in memory."""
    f = on_vector(fn, flat)
    found: Any = vjp(f, x)
    r, pull = found
    return r, lambda v: jvp(f, (x,), (v,))[1], lambda u: pull(u)[0]
