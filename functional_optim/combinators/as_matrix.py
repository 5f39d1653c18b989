"""Matrix views of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from functional_optim.core import base
from functional_optim.core.calls import check_choice
from functional_optim.core.chain import each_placement
from functional_optim.core.factory import factory
from functional_optim.core.paths import Answers, Choice, fits
from functional_optim.core.rule import Placement
from functional_optim.core.views import Kernel, MatrixView

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
WEIGHTS = (
    *("weight", "weight.original", "weight.original0", "weight.original1"),
    *("weight_orig", "weight_g", "weight_v"),
)
"""The names of a weight: plain, parametrized, and as torch.nn.utils.prune and weight_norm do it."""

COMPILED = "_orig_mod."
"""The prefix of torch.compile in the names of a model."""

Views = Mapping[str, Mapping[str, Any]]
"""From path patterns to arguments of `as_matrix`; the first matching pattern counts."""


@factory
def as_matrix(
    tx: base.GradientTransformation,
    *,
    kernel: Kernel = "flatten",
    heads: int | tuple[int, ...] | None = None,
    split: int | tuple[int, ...] | None = None,
    orientation: Literal["out_in", "in_out"] = "out_in",
    stack: bool = False,
    views: Views | torch.nn.Module | None = None,
) -> base.GradientTransformation:
    """Set the matrix views of the parameters for the matrix rules in a transformation.

    A fused projection consists of several matrices, as does a parameter that holds the weights of
    all experts. The kernel of a convolution has more than two dimensions. Rules that act on
    matrices (Newton–Schulz, decompositions, row norms) update each matrix as if it were a separate
    parameter, in batches. All other rules act on the whole parameter. Vectors stay vectors.

    Without `as_matrix`, a parameter with four or five dimensions is a kernel, as with "auto". A
    parameter with three dimensions raises an error, because it may be a kernel or a stack.

    Args:
        tx: a transformation with rules that take batches of matrices, such as `muon()`.
        kernel: what a kernel (out, in, height, width) is: "flatten": the matrix
            (out, in · height · width); "batch": a matrix (out, in) for each position; "tensor":
            unchanged, for rules that treat each dimension, such as those of `soap`; "auto": the
            default of the rule: "tensor" for `soap`, `kl_soap`, `kl_shampoo` and the norm of
            `scion`, "flatten" for all others.
        heads: the number of matrices into which the outputs are divided: an int, or one for each
            part of `split`. None: one.
        split: the parts of a fused projection: their outputs, e.g. (1024, 256, 256) for query, key
            and value, or the number of equal parts. None: no split.
        orientation: "out_in": the first dimension counts outputs, as in torch.nn.Linear and Conv2d;
            "in_out": the second does, as in ConvTranspose2d and in JAX.
        stack: whether a parameter with more than two dimensions is a stack of matrices, such as
            (experts, out, in) or (layers, heads, out, in).
        views: a dict from path patterns to these arguments, instead of the arguments themselves:
            `{"experts.*": {"stack": True}, "*.qkv.weight": {"split": 3}}`. Parameters without a
            matching pattern keep the default. A `torch.nn.Module` is converted by `matrix_views`.

    State: that of tx. A slot of such a rule has an additional leading dimension for the matrices;
    if these differ in size, it is a vector that concatenates the tensors of all matrices. Slots of
    a kernel with "tensor" have no such dimension.

    Raises:
        ValueError: for invalid arguments, or without such a rule; from init, for a parameter that
            cannot be divided in this way.
        TypeError: if tx is not a transformation; for invalid views.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.as_matrix(fo.orthogonalize(), split=3)
        >>> qkv, g = torch.zeros(6, 2), torch.tensor([[3.0, 0.0], [0.0, 1.0]]).repeat(3, 1)
        >>> u, state = tx.update(g, tx.init(qkv), qkv)
        >>> torch.allclose(u[:2], u[4:]) and bool((torch.linalg.svdvals(u[:2]) > 0.6).all())
        True
    """
    base.check_transformation("as_matrix", tx, "as_matrix(muon(), split=3)")
    view = _view(kernel, heads, split, orientation, stack)
    if views is None:
        found = each_placement(tx, lambda x: [x.seen_as(view)])
    elif view != MatrixView():
        raise ValueError(
            "as_matrix takes either views or other arguments; put those of all other parameters "
            "into views, under '*'."
        )
    else:
        known = views_of("as_matrix", views)
        found = seen_by_path(tx, known)
    if not any(x.rule.storage.view is not None for x in found.placements):
        raise ValueError(
            "as_matrix got a transformation without a rule that takes batches of matrices; "
            "pass one such as muon(), or leave as_matrix out."
        )
    return found


def seen(tx: base.GradientTransformation, views: Any) -> base.GradientTransformation:
    """A transformation with these views of `as_matrix`, if any."""
    return tx if views is None else as_matrix(tx, views=views)


def _view(
    kernel: Any = "flatten",
    heads: Any = None,
    split: Any = None,
    orientation: Any = "out_in",
    stack: Any = False,
) -> MatrixView:
    """The view of these arguments; raises ValueError for invalid ones."""
    check_choice("as_matrix", ("flatten", "batch", "tensor", "auto"), kernel=kernel)
    check_choice("as_matrix", ("out_in", "in_out"), orientation=orientation)
    if not isinstance(stack, bool):
        raise ValueError(
            f"as_matrix needs stack=True for a stack of matrices, or False, but got {stack!r}."
        )
    for name, value in {"heads": heads, "split": split}.items():
        each = value if isinstance(value, tuple) else (value,)
        if value is not None and not (each and all(type(x) is int and x > 0 for x in each)):
            raise ValueError(
                f"as_matrix needs for {name} a number of 1 or more, or a tuple of such, but got "
                f"{value!r}."
            )
    if kernel == "tensor" and (heads, split) != (None, None):
        raise ValueError(
            "as_matrix cannot divide a tensor by heads or split; leave these out, or pass another "
            "kernel than 'tensor'."
        )
    return MatrixView(kernel, heads, split, orientation == "in_out", stack)


class ByPath(NamedTuple):
    """Views by path patterns. ways: the distinct views. patterns: each with the index of its
    view."""

    ways: list[MatrixView]
    patterns: dict[str, int]

    def answers(self) -> Answers:
        """The index of the view of a leaf: that of the first matching pattern; without a match, one
        more than the last. Patterns that only describe kernels need not match: a model may have
        more."""
        required, n = [*self.named(True), *self.named(False)], len(self.ways)
        free = {"*", *(self.patterns.keys() - required)}
        return Answers(self.patterns, range(n + 1), "views", other=n, free=free)

    def named(self, divided: bool) -> list[str]:
        """The patterns of fused projections, or of other views, except those of kernels."""
        ways = {x: self.ways[i] for x, i in self.patterns.items()}
        mine = {x: way for x, way in ways.items() if way.divided == divided}
        return [x for x, way in mine.items() if divided or way.kernel != "auto"]

    def shape(self, path: str, leaf: Any) -> Sequence[int]:
        """The shape of a leaf; for a stack, that of its matrices."""
        fit = [self.ways[i] for pattern, i in self.patterns.items() if fits(pattern, path)]
        return fit[0].each(leaf.shape) if fit else leaf.shape


def views_of(name: str, given: Any, wanted: Any = lambda path, p: True) -> ByPath:
    """Views as a user passes them. name: of the function that received them. wanted: the parameters
    that a model must describe.

    Raises:
        TypeError: for anything but a module, or a dict of arguments of `as_matrix`.
    """
    if isinstance(given, torch.nn.Module):
        given = kernels_of(given, {}, wanted)
    own = inspect.signature(_view).parameters
    if not isinstance(given, Mapping) or not all(
        isinstance(pattern, str) and isinstance(x, Mapping) and own.keys() >= x.keys()
        for pattern, x in given.items()
    ):
        raise TypeError(
            f"{name} takes for views a dict from path patterns to arguments of as_matrix, e.g. "
            f"{{'*.qkv.weight': {{'split': 3}}}}, or the model, but got {given!r}."
        )
    found = {pattern: _view(**arguments) for pattern, arguments in given.items()}
    ways = list(dict.fromkeys(found.values()))
    return ByPath(ways, {pattern: ways.index(view) for pattern, view in found.items()})


def seen_by_path(tx: Any, known: ByPath) -> Any:
    """A transformation whose matrix rules have a view for each leaf."""
    answers = known.answers()

    def each(x: Placement) -> list[Placement]:
        ways = [x.seen_as(view) for view in known.ways]
        if all(way is x for way in ways):
            return [x]
        return [way.on(Choice(answers, k)) for k, way in enumerate([*ways, x])]

    return each_placement(tx, each)


def matrix_views(model: torch.nn.Module, views: Views | None = None) -> dict[str, dict[str, Any]]:
    """The matrix views of a model, for `views` of `as_matrix` and of `muon_adamw`.

    Weights of `torch.nn.Conv1d` to `ConvTranspose3d` are kernels, also if they are parametrized.
    Weights of transformers' `Conv1D`, the linear layers of GPT-2, are matrices (in, out). Those of
    a compiled model have their names with and without `_orig_mod.`, as optimizer objects do.

    Args:
        model: a module.
        views: for other parameters, from path patterns to arguments of `as_matrix`. They take
            precedence.

    Returns:
        A dict from paths to arguments of `as_matrix`.

    Raises:
        ValueError: for a parameter with three or more dimensions of another module that requires
            gradients and that no pattern of views matches.

    Example::

        >>> import torch, functional_optim as fo
        >>> model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.ConvTranspose2d(4, 2, 3))
        >>> fo.matrix_views(model)
        {'0.weight': {'kernel': 'auto'}, '1.weight': {'kernel': 'auto', 'orientation': 'in_out'}}
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"matrix_views takes a torch.nn.Module, but got a {type(model).__name__}.")
    return kernels_of(model, views or {})


def kernels_of(
    model: torch.nn.Module, views: Views, wanted: Callable[[str, Any], Any] = lambda path, p: True
) -> dict[str, dict[str, Any]]:
    """`matrix_views`, which must describe only the wanted parameters."""
    views_of("matrix_views", views)
    found = {pattern: dict(arguments) for pattern, arguments in views.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, p in model.named_parameters(remove_duplicate=False):
        plain = path.replace(COMPILED, "")  # the name in optimizer objects
        if p.dim() < 2 or any(fits(x, name) for x in views for name in (path, plain)):
            continue
        owner, parametrized, name = f".{path}".rpartition(".parametrizations.")
        if not parametrized:
            owner, _, name = f".{path}".rpartition(".")
        weight = name in WEIGHTS
        holder: Any = modules.get(owner[1:])
        matrix = weight and p.dim() == 2 and _has_inputs_first(holder)
        if p.dim() == 2 and not matrix:
            continue
        if not (matrix or (weight and isinstance(holder, CONVOLUTIONS))):
            if not (p.requires_grad and wanted(path, p) and wanted(plain, p)):
                continue
            raise ValueError(
                f"the parameter {plain!r} of shape {tuple(p.shape)} belongs to no convolution of "
                f"torch.nn; describe it: views={{{plain!r}: {{'stack': True}}}} for a stack of "
                f"matrices, views={{{plain!r}: {{'kernel': 'auto'}}}} for a kernel."
            )
        turned = {"orientation": "in_out"} if matrix or holder.transposed else {}
        found |= {name: {"kernel": "auto", **turned} for name in (path, plain)}
    return found


def _has_inputs_first(module: Any) -> bool:
    """Whether a module is the `Conv1D` of transformers, a linear layer with a weight (in, out)."""
    classes = [(known.__module__, known.__name__) for known in type(module).__mro__]
    return ("transformers.pytorch_utils", "Conv1D") in classes
