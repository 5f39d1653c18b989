"""Pytree functions for optimizers, based on optree.

`None` is an empty subtree, as in JAX: a missing gradient is `None` at the place of a parameter.

Example::

    >>> import torch, functional_optim as fo
    >>> params = {"w": torch.ones(2), "frozen": torch.ones(2)}
    >>> grads = {"w": torch.ones(2), "frozen": None}
    >>> fo.tree.map(lambda p, g: p if g is None else p - 0.5 * g, params, grads)
    {'w': tensor([0.5000, 0.5000]), 'frozen': tensor([1., 1.])}
    >>> len(fo.tree.leaves(params)), len(fo.tree.leaves(grads))
    (2, 1)
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

__all__ = ["check_same", "global_norm", "items", "leaves", "map", "map_unzip", "rows", "summary"]


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` to every leaf of `tree` and the subtrees at its place in `rest`.

    Example::

        >>> import functional_optim as fo
        >>> fo.tree.map(lambda a, b: a + b, {"x": 1, "y": 2}, {"x": 10, "y": 20})
        {'x': 11, 'y': 22}
    """
    return optree.tree_map(fn, tree, *rest)


def map_down_to(stop: Callable[[Any], bool], fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`map`, with subtrees as leaves where `stop` returns True."""
    return optree.tree_map(fn, tree, *rest, is_leaf=stop)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in optree's order (dicts by sorted key).

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}
        >>> sum(p.numel() for p in fo.tree.leaves(params))
        16
    """
    return optree.tree_leaves(tree)


def rows(tree: Any, *rest: Any) -> list[tuple[Any, ...]]:
    """One tuple per leaf of `tree`: the leaf, and the subtree at its place in each of `rest`.

    Example::

        >>> import torch, functional_optim as fo
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 3.0])}
        >>> sum(p.dot(g) for p, g in fo.tree.rows(params, grads))
        tensor(4.)
    """
    return list(zip(*columns(tree, *rest), strict=True))


def columns(tree: Any, *rest: Any) -> list[list[Any]]:
    """The leaves of `tree`, and for each of `rest` the subtrees at their places."""
    found, spec = optree.tree_flatten(tree)
    return [found, *[spec.flatten_up_to(other) for other in rest]]


def structure(tree: Any) -> Any:
    """The properties of a tree that `places` needs."""
    return optree.tree_structure(tree)


def places(structure: Any, *trees: Any) -> list[list[Any]]:
    """For each tree the subtrees at the places of the leaves of that structure."""
    return [structure.flatten_up_to(tree) for tree in trees]


def outline(tree: Any) -> Any:
    """The containers of a tree as nested tuples of type, keys and contents, with None for a leaf.

    The C++ library next to the kernels traverses trees by it, in optree's order. None for a tree
    that is itself a leaf, or that has containers other than lists, tuples and dicts.
    """
    try:
        return _outline(tree)
    except TypeError:
        return None


def _outline(tree: Any) -> Any:
    if optree.tree_is_leaf(tree):
        return None
    if tree is None:
        return (type(None), None, ())
    children, _, entries, _ = optree.tree_flatten_one_level(tree)
    keys = tuple(entries) if isinstance(tree, dict) else None
    if not isinstance(tree, (list, tuple, dict)):
        raise TypeError("a container of another type")
    found = [tree[key] for key in keys or range(len(children))]
    if any(x is not child for x, child in zip(found, children, strict=True)):
        raise TypeError("a container with a custom flattening")
    return (type(tree), keys, tuple([_outline(x) for x in children]))


def map_unzip(n: int, fn: Callable[..., tuple[Any, ...]], tree: Any, *rest: Any) -> list[Any]:
    """`map` for a function that returns n values: n trees.

    In a trace built from `tree_map` alone: there `treespec.unflatten` fails if no leaf is a tensor,
    and `tree_map` visits a dict in another order than `tree_flatten`.

    Example::

        >>> import torch, functional_optim as fo
        >>> grads = {"w": torch.tensor([3.0, -4.0])}
        >>> signs, sizes = fo.tree.map_unzip(2, lambda g: (g.sign(), g.abs()), grads)
        >>> signs, sizes
        ({'w': tensor([ 1., -1.])}, {'w': tensor([3., 4.])})
    """
    if torch.compiler.is_compiling():
        results = optree.tree_map(fn, tree, *rest)
        return [optree.tree_map(lambda _, result, i=i: result[i], tree, results) for i in range(n)]
    found, spec = optree.tree_flatten(tree)
    results = list(builtins.map(fn, found, *[spec.flatten_up_to(other) for other in rest]))
    return [spec.unflatten([result[i] for result in results]) for i in range(n)]


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`map` for a function whose first argument is the leaf's path, as in `items`.

    optree's function gives other paths under torch.compile, and truncates some of them.
    """

    def placed(leaf: Any, path: str, *more: Any) -> Any:
        return fn(path, leaf, *more)

    return optree.tree_map(placed, tree, paths(tree), *rest)


def paths(tree: Any, above: tuple[Any, ...] = ()) -> Any:
    """A tree of the same structure with the path of each leaf, which begins with the keys `above`.

    Raises ValueError if two leaves have one path.
    """
    found = _paths(tree, above)
    if not torch.compiler.is_compiling():
        names = optree.tree_leaves(found)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"two leaves of a tree have the path {twice!r}, such as those of {{'a.b': x}} and "
                "{'a': {'b': y}}; rename one of them."
            )
    return found


def _paths(tree: Any, above: tuple[Any, ...]) -> Any:
    """Dicts, lists and tuples are built here: torch.compile does not unflatten trees of
    constants."""
    if tree is None or isinstance(tree, Tensor) or optree.tree_is_leaf(tree):
        return None if tree is None else _joined(above)
    if isinstance(tree, dict):
        made = {key: _paths(x, (*above, key)) for key, x in tree.items()}
        return OrderedDict(made) if isinstance(tree, OrderedDict) else made
    if isinstance(tree, (list, tuple)):
        keys = getattr(tree, "_fields", range(len(tree)))
        inner = [_paths(x, (*above, key)) for key, x in zip(keys, tree, strict=True)]
        if isinstance(tree, list):
            return inner
        return type(tree)(*inner) if hasattr(tree, "_fields") else tuple(inner)
    children, metadata, entries, join = optree.tree_flatten_one_level(tree)
    named = zip(children, entries, strict=True)
    return join(metadata, [_paths(child, (*above, entry)) for child, entry in named])


def map_unzip_with_path(
    n: int, fn: Callable[..., tuple[Any, ...]], tree: Any, *rest: Any
) -> list[Any]:
    """`map_unzip` for a function whose first argument is the leaf's path."""
    results = map_with_path(fn, tree, *rest)
    return [optree.tree_map(lambda _, result, i=i: result[i], tree, results) for i in range(n)]


def with_leaves(like: Any, new: list[Any]) -> Any:
    """A tree of the structure of `like` with the leaves `new`, in optree's order."""
    return optree.tree_unflatten(optree.tree_structure(like), new)


def items(tree: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of (path, leaf); a path is the keys joined by dots, "" for a lone leaf.

    A NamedTuple's keys are the names of its fields. Raises ValueError if two leaves have one path.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"layers": [{"weight": torch.zeros(2, 2)}, {"weight": torch.zeros(1, 2)}]}
        >>> for path, p in fo.tree.items(params):
        ...     print(path, tuple(p.shape))
        layers.0.weight (2, 2)
        layers.1.weight (1, 2)
    """
    found, spec = optree.tree_flatten(tree)
    names: list[Any] = spec.flatten_up_to(paths(tree))
    return zip(names, found, strict=True)


def global_norm(tree: Any) -> Tensor:
    """The common Euclidean norm of all leaves: 0-dim, float64.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.tree.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5., dtype=torch.float64)
    """
    squares = [x.abs().to(torch.float64).square().sum() for x in leaves(tree)]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def first_not_finite(tensors: list[Tensor]) -> int | None:
    """The index of the first tensor with an infinite or NaN element, or None. Reads one flag."""
    flags = [_stored(x).isfinite().all() for x in tensors]
    if not flags or torch.stack([flag.to(flags[0].device) for flag in flags]).all():
        return None
    return next(i for i, flag in enumerate(flags) if not flag)


def _stored(x: Tensor) -> Tensor:
    """The elements that a tensor stores."""
    return x if x.layout is torch.strided else x.coalesce().values()


def check_same(
    a: Any, b: Any, a_name: str, b_name: str, advice: str, *, shapes: bool | Sequence[bool] = True
) -> None:
    """Raise ValueError, naming both sides, unless `b` has a subtree at every leaf of `a`.

    shapes: whether shapes must match, too; or one bool for each leaf. Under torch.compile optree
    itself checks, and raises a shorter error.

    Example::

        >>> import torch, functional_optim as fo
        >>> params, target = {"w": torch.zeros(2)}, {"w": torch.zeros(3)}
        >>> fo.tree.check_same(params, target, "params", "target", "start both from one model")
        Traceback (most recent call last):
        ValueError: params and target differ at 'w': (2,) against (3,). Start both from one model.
    """
    if torch.compiler.is_compiling():
        return
    found, spec = optree.tree_flatten(a)
    try:
        others = spec.flatten_up_to(b)
    except (ValueError, TypeError):
        raise ValueError(
            f"{a_name} and {b_name} have different structures:\n  {a_name}: {summary(a)}\n"
            f"  {b_name}: {summary(b)}\n{advice[0].upper()}{advice[1:]}."
        ) from None
    compared = [shapes] * len(found) if isinstance(shapes, bool) else shapes
    for i, (x, y, wanted) in enumerate(zip(found, others, compared, strict=True)):
        ours, theirs = _shape_of(x), _shape_of(y)
        if wanted and y is not None and theirs != ours:
            path = [path for path, _ in items(a)][i]
            raise ValueError(
                f"{a_name} and {b_name} differ at {path!r}: {_shape(ours)} against "
                f"{_shape(theirs)}. {advice[0].upper()}{advice[1:]}."
            )


def summary(tree: Any, most: int = 6) -> str:
    """The first paths of a tree with their shapes, in one line for an error message.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.tree.summary({"weight": torch.zeros(4, 3), "bias": torch.zeros(4)})
        '2 leaves: bias (4,), weight (4, 3)'
    """
    parts = [f"{path or '(root)'} {_shape(_shape_of(leaf))}" for path, leaf in items(tree)]
    more = f", … {len(parts) - most} more" if len(parts) > most else ""
    return f"{len(parts)} leaves: {', '.join(parts[:most])}{more}" if parts else "no leaves"


def _joined(path: tuple[Any, ...]) -> str:
    return ".".join([str(key) for key in path])


def _shape_of(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_nested:
        return "nested"
    return getattr(x, "shape", type(x).__name__)


def _shape(shape: Any) -> str:
    return str(tuple(shape)) if isinstance(shape, torch.Size) else str(shape)
