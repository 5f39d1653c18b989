"""How parameters are seen as matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from functional_optim.core import base
from functional_optim.core.chain import Sequence, chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.rule import Placement
from functional_optim.core.views import MatrixView


@factory
def as_matrix(
    tx: base.GradientTransformation,
    *,
    kernel: Literal["flatten", "batch"] = "flatten",
    heads: int | tuple[int, ...] | None = None,
    split: int | tuple[int, ...] | None = None,
    orientation: Literal["out_in", "in_out"] = "out_in",
) -> base.GradientTransformation:
    """Say how the rules of matrices in a transformation see the parameters.

    A fused projection is several matrices, a head of attention is one of its own, and the kernel of
    a convolution has more than two dimensions. Rules that act on matrices (Newton–Schulz,
    decompositions, row norms) see each of these for itself, and factors of shape are those of what
    they see. All other rules act on the parameter as before. Vectors are left as they are.

    Args:
        tx: a transformation with rules that take batches of matrices, such as `muon()`.
        kernel: what a kernel (out, in, height, width) is: "flatten": the matrix
            (out, in · height · width); "batch": a matrix (out, in) for each place.
        heads: into how many matrices the outputs are divided: an int, or one for each part of
            `split`. None: one.
        split: the parts of a fused projection: their outputs, e.g. (1024, 256, 256) for query, key
            and value, or into how many equal parts. None: it is not divided.
        orientation: "out_in": the first dimension counts outputs, as in torch.nn.Linear and Conv2d;
            "in_out": the second does, as in ConvTranspose2d and in JAX.

    State: that of tx. A slot of such a rule has one more dimension in front, which counts the
    matrices; where these differ in size, it is a vector in which the tensors of all of them lie one
    after the other.

    Raises:
        ValueError: for other words or numbers, or without such a rule; from init, for a parameter
            that cannot be divided so.
        TypeError: if tx is no transformation.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.as_matrix(fo.orthogonalize(), split=3)
        >>> qkv, g = torch.zeros(6, 2), torch.tensor([[3.0, 0.0], [0.0, 1.0]]).repeat(3, 1)
        >>> u, state = tx.update(g, tx.init(qkv), qkv)
        >>> torch.allclose(u[:2], u[4:]) and bool((torch.linalg.svdvals(u[:2]) > 0.6).all())
        True
    """
    base.check_transformation("as_matrix", tx, "as_matrix(muon(), split=3)")
    if kernel not in ("flatten", "batch"):
        raise ValueError(f"as_matrix needs a kernel 'flatten' or 'batch', but got {kernel!r}.")
    if orientation not in ("out_in", "in_out"):
        raise ValueError(
            f"as_matrix needs an orientation 'out_in' or 'in_out', but got {orientation!r}."
        )
    for name, value in {"heads": heads, "split": split}.items():
        each = value if isinstance(value, tuple) else (value,)
        if value is not None and not (each and all(type(x) is int and x > 0 for x in each)):
            raise ValueError(
                f"as_matrix needs for {name} a number of 1 or more, or a tuple of such, but got "
                f"{value!r}."
            )
    view = MatrixView(kernel, heads, split, orientation == "in_out")
    seen = each_placement(tx, lambda x: x.seen_as(view))
    if not any(x.rule.storage.view is not None for x in seen.placements):
        raise ValueError(
            "as_matrix was given a transformation without a rule that takes batches of matrices; "
            "pass one such as muon(), or leave as_matrix out."
        )
    return seen


def each_placement(tx: Any, change: Callable[[Placement], Placement]) -> Any:
    """A transformation with each of its rules placed otherwise; parts of whole trees stay."""
    if isinstance(tx, Leafwise):
        return Leafwise(tuple([change(x) for x in tx.placements]))
    if isinstance(tx, Sequence):
        return chain(*[each_placement(part, change) for part in tx.parts])
    return tx
