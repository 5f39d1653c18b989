"""The diagonal of the Hessian, estimated from Hessian-vector products or from sampled labels, and
its average in the state of Sophia.

An estimate is a pure function of parameters and seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import functional as F

from functional_optim import numeric, tree
from functional_optim.core import base, draws, randomness
from functional_optim.core.base import Tree
from functional_optim.core.cells import CELLS
from functional_optim.core.lift import State
from functional_optim.core.storage import wide_dtype
from functional_optim.estimators.protocol import check_some, number

Diagonal = Callable[..., Tree]
"""diagonal(params, seed, *args): a tree like params."""


def _check_function(who: str, what: str, fn: Any) -> None:
    """Raise TypeError unless an estimate is of a function."""
    if not callable(fn):
        raise TypeError(
            f"{who} takes a {what} function first, but got {fn!r}; call it as "
            f"{who}({what}_fn)(params, seed)."
        )


def hutchinson(loss_fn: Callable[..., Any], samples: int = 1) -> Diagonal:
    """Estimate the diagonal of the Hessian of a loss by z ⊙ (H z) with random signs z.

    The estimate is unbiased, and exact if H is diagonal. The variance of an element is the sum of
    the squares of the other elements of its row, divided by `samples`. A sample costs two backward
    passes.

    Args:
        loss_fn: `loss_fn(params, *args)` returns one number.
        samples: estimates to average, ≥ 1. Default 1.

    Returns:
        `diagonal(params, seed, *args)`, a tree like params. seed: a Python integer, or a 0-dim
        tensor of integers; use a different one for each estimate, such as the number of the step.

    Raises:
        ValueError: for samples out of range; from diagonal, for a loss that is not a number.

    Papers: Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix",
    https://doi.org/10.1016/j.apnum.2007.01.003; Liu et al., "Sophia",
    https://arxiv.org/abs/2305.14342, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> diagonal = fo.estimators.hutchinson(lambda w: (w**3).sum())
        >>> diagonal(torch.tensor([1.0, -2.0]), 0)
        tensor([  6., -12.])
    """
    _check_function("hutchinson", "loss", loss_fn)
    numeric.check_count("hutchinson", 1, samples=samples)

    def diagonal(params: Tree, seed: int | Tensor, *args: Any) -> Tree:
        check_some("hutchinson", params)
        paths, given = zip(*tree.items(params), strict=True)
        leaves = tuple([p.detach() for p in given])
        own = randomness.seed_tensor("hutchinson", seed, base.default_device(list(leaves)))

        def loss(*moved: Tensor) -> Tensor:
            return number("hutchinson", loss_fn(tree.with_leaves(params, list(moved)), *args))

        everywhere = tuple(range(len(leaves)))
        product = torch.func.vjp(torch.func.grad(loss, everywhere), *leaves)[1]
        total = [torch.zeros_like(p, dtype=wide_dtype(p)) for p in leaves]
        for i in range(samples):
            key = draws.stream(own, i)
            z = [
                draws.leaf(key, path, p, signs=True).to(p.dtype)
                for path, p in zip(paths, leaves, strict=True)
            ]
            found = product(tuple(z), retain_graph=i + 1 < samples)
            rows = zip(total, z, found, strict=True)
            total = [a + by_parts(b, c).to(a.dtype) / samples for a, b, c in rows]
        pairs = zip(total, leaves, strict=True)
        return tree.with_leaves(params, [x.detach().to(p.dtype) for x, p in pairs])

    return diagonal


def gauss_newton_bartlett(logits_fn: Callable[..., Any]) -> Diagonal:
    """Estimate the diagonal of the Gauss–Newton matrix of a cross-entropy from sampled labels.

    Labels are sampled from the model's predictions, and g is the gradient of the mean
    cross-entropy with these: the estimate is B · g ⊙ g, for B predictions. It is never negative,
    and costs one forward and one backward pass.

    Args:
        logits_fn: `logits_fn(params, *args)` returns logits (…, classes), one row for each
            prediction.

    Returns:
        `diagonal(params, seed, *args)`, a tree like params. seed: a Python integer, or a 0-dim
        tensor of integers; use a different one for each estimate, such as the number of the step.

    Raises:
        ValueError: from diagonal, for logits of another form.

    Paper: Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
    Pre-training", https://arxiv.org/abs/2305.14342, Algorithm 2.

    Example::

        >>> import torch, functional_optim as fo
        >>> x = torch.randn(500, 3)
        >>> diagonal = fo.estimators.gauss_newton_bartlett(lambda w, x: x @ w)
        >>> h = diagonal(torch.zeros(3, 4), 0, x)
        >>> h.shape, bool((h >= 0).all())
        (torch.Size([3, 4]), True)
    """

    _check_function("gauss_newton_bartlett", "logits", logits_fn)

    def diagonal(params: Tree, seed: int | Tensor, *args: Any) -> Tree:
        check_some("gauss_newton_bartlett", params)
        given = tree.leaves(params)
        leaves = tuple([p.detach() for p in given])
        own = randomness.seed_tensor(
            "gauss_newton_bartlett", seed, base.default_device(list(leaves))
        )

        def loss(*moved: Tensor) -> Tensor:
            logits = logits_fn(tree.with_leaves(params, list(moved)), *args)
            if not isinstance(logits, Tensor) or logits.dim() < 1 or logits.numel() == 0:
                form = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else "no tensor"
                raise ValueError(
                    f"gauss_newton_bartlett needs logits of shape (…, classes), but got {form}."
                )
            rows = logits.reshape(-1, logits.shape[-1])
            return len(rows) ** 0.5 * F.cross_entropy(rows, sampled(own, rows.detach()))

        grads = torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)
        return tree.with_leaves(params, [by_parts(g, g).detach() for g in grads])

    return diagonal


def by_parts(x: Tensor, y: Tensor) -> Tensor:
    """The product of two tensors; real and imaginary parts are multiplied separately, as rules see
    pairs of real numbers."""
    return torch.complex(x.real * y.real, x.imag * y.imag) if x.is_complex() else x * y


def sampled(seed: Tensor, logits: Tensor) -> Tensor:
    """A class for each row of logits, sampled from their softmax."""
    key = draws.stream(seed, 0)
    like = torch.empty(len(logits), 1, dtype=torch.float64, device=logits.device)
    uniform = torch.special.ndtr(draws.leaf(key, "labels", like))
    shares = logits.to(torch.float64).softmax(-1).cumsum(-1)
    return (shares < uniform).sum(-1).clamp(max=logits.shape[-1] - 1)


def observe_hessian(state: Any, hessian: Any) -> Any:
    """Add an estimate of the Hessian's diagonal to Sophia's average: h ← β₂ h + (1 − β₂) ĥ.

    A pure function: the old state does not change. The step count does not increase.

    Args:
        state: of a transformation with `scale_by_sophia` in it.
        hessian: a tree like the parameters, `None` for those without an estimate.

    Returns:
        The new state. β₂ is the value of the last step, from the state.

    Raises:
        ValueError: if the state has no Sophia, or more than one, or if `stored` has packed the
            average.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sophia(betas=(0.9, 0.75))
        >>> state = fo.estimators.observe_hessian(tx.init(torch.ones(2)), torch.tensor([4.0, 8.0]))
        >>> fo.get(state, "hessian")
        tensor([1., 2.])
    """

    def is_sophia(x: Any) -> bool:
        return isinstance(x, State) and "hessian" in x.slots

    found = [x for x in optree.tree_leaves(state, is_leaf=is_sophia) if is_sophia(x)]
    if len(found) != 1:
        raise ValueError(
            f"observe_hessian needs a state with one Sophia in it, but found {len(found)}; pass "
            "the state that the init or update of a chain with scale_by_sophia returned."
        )

    def averaged(x: Any) -> Any:
        if not is_sophia(x):
            return x
        if any(tree.leaves(x.slots.get(f"hessian.{kind}")) for kind in CELLS):
            raise ValueError(
                "observe_hessian cannot read a Hessian that is packed; store the other slot alone, "
                "e.g. stored(sophia(), {'exp_avg': 'int8'})."
            )
        if not torch.compiler.is_compiling():
            _check_estimate(x.slots["hessian"], hessian)
        known = [key for key in x.hyper if key.endswith("betas.1")]
        own = [key for key in known if "scale_by_sophia" in key] or known
        if len(own) != 1:
            raise ValueError(
                "observe_hessian needs a state with one Sophia in it, but this one has the rates "
                f"{', '.join(own)}; put one sophia around the partition."
            )
        weight = 1 - x.hyper[own[0]]

        def leaf(old: Tensor | None, new: Tensor | None) -> Tensor | None:
            return old if old is None or new is None else with_estimate(old, new, weight)

        slot = optree.tree_map(leaf, x.slots["hessian"], hessian, none_is_leaf=True)
        return base.replaced(x, slots={**x.slots, "hessian": slot})

    return tree.map_down_to(is_sophia, averaged, state)


def _check_estimate(slot: Any, hessian: Any) -> None:
    """Raise ValueError unless an estimate is like the parameters, or None for some of them."""
    spec = optree.tree_structure(slot, none_is_leaf=True)
    try:
        leaves = spec.flatten_up_to(hessian)
        pairs = zip(spec.flatten_up_to(slot), leaves, strict=True)
        fits = all(
            old is None or new is None or (isinstance(new, Tensor) and old.shape == new.shape)
            for old, new in pairs
        )
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "observe_hessian needs an estimate like the parameters, with None for those without "
            f"one, {tree.summary(slot)}, but got {tree.summary(hessian)}."
        )


def with_estimate(average: Tensor, estimate: Tensor, weight: Any) -> Tensor:
    """An average with one more estimate, in its dtype."""
    wide = torch.promote_types(average.dtype, torch.float32)
    share = weight.to(average.device, wide) if isinstance(weight, Tensor) else weight
    old, new = average.to(wide), estimate.detach().to(average.device, wide)
    return (old + share * (new - old)).to(average.dtype)
