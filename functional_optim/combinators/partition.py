"""Different transformations for different leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from functional_optim.core import base
from functional_optim.core.chain import chain, each_placement, on_some
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import leafwise
from functional_optim.core.lift import frozen
from functional_optim.core.paths import Choice, Labels, Mask, chosen, labelled_by, masked_by


@factory
def partition(
    transforms: Mapping[str, base.GradientTransformation], labels: Labels
) -> base.GradientTransformation:
    """Apply to each leaf the transformation of its label.

    A partition of transformations that consist of one-tensor rules consists of one-tensor rules: it
    fuses with its neighbours in a chain, leaves with the same rules share a kernel, and each leaf
    has only the slots of its rules. A norm in one part covers the leaves of that part.

    Args:
        transforms: by label. Use `freeze()` for leaves to freeze.
        labels: a dict from path patterns to labels; the first matching pattern counts (`{"*.bias":
            "slow", "*": "fast"}`). Or a function of a leaf's path and the leaf. Or a tree of
            labels, which may have one label for a branch. A path is the keys joined by dots, in an
            optimizer object the parameter's name (pass `model.named_parameters()`). `*` matches any
            characters, including dots, and a pattern for a branch matches all its leaves. A label
            may have no leaves; if a pattern other than `*` matches nothing, `init` warns once.

    Raises:
        ValueError: for a label without a transformation, or none at all; from init and update, for
            a leaf without a label.
        TypeError: if `transforms` contains anything but transformations.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.partition(
        ...     {"decay": fo.adamw(0.1, weight_decay=0.5), "plain": fo.adam(0.1)},
        ...     {"*bias": "plain", "*": "decay"},
        ... )
        >>> params = {"weight": torch.ones(1), "bias": torch.ones(1)}
        >>> state = tx.init(params)
        >>> tx.update({"weight": torch.ones(1), "bias": torch.ones(1)}, state, params)[0]
        {'weight': tensor([-0.1500]), 'bias': tensor([-0.1000])}
    """
    if isinstance(labels, Mapping) and any(map(_is_transformation, labels.values())):
        raise TypeError(
            "partition takes the transformations first and the labels second: "
            "partition({'fast': adam(1e-2), 'slow': sgd(1e-3)}, {'*.bias': 'slow', '*': 'fast'})."
        )
    if not isinstance(transforms, Mapping):
        raise TypeError(
            f"partition takes a dict from labels to transformations, but got a "
            f"{type(transforms).__name__}."
        )
    if not transforms:
        raise ValueError("partition needs a transformation for at least one label.")
    for label, tx in transforms.items():
        base.check_transformation(f"partition for the label {label!r}", tx, "adam(lr=1e-3)")
    answers = labelled_by(labels, transforms)
    return chain(*[_only(Choice(answers, label), tx) for label, tx in transforms.items()])


@factory
def masked(tx: base.GradientTransformation, mask: Mask) -> base.GradientTransformation:
    """Transform the updates of some leaves; those of the others pass **unchanged**.

    Raw gradients of the other leaves also pass, and would then be added to the parameters: to train
    some leaves only, use `selective_transform` or `freeze`.

    Args:
        tx: a transformation.
        mask: the leaves to transform: a path pattern, several patterns, a function of path and
            leaf, or a tree of bools; see `partition`. Other leaves are not selected. A pattern
            without a match does nothing, and `init` warns once.

    Raises:
        ValueError: for results other than True and False.
        TypeError: if there is no mask, or tx is not a transformation.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.masked(fo.add_decayed_weights(0.5), "w"), fo.scale_by_lr(0.1))
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update({"w": torch.ones(1), "b": torch.ones(1)}, tx.init(params), params)[0]
        {'w': tensor([-0.1500]), 'b': tensor([-0.1000])}
    """
    if _is_transformation(mask):
        raise TypeError(
            "masked takes the transformation first and the mask second: masked(adam(1e-3), '*.w')."
        )
    base.check_transformation("masked", tx, "masked(adam(lr=1e-3), '*.w')")
    return _only(masked_by(mask), tx)


@factory
def freeze(mask: Mask = "*") -> base.GradientTransformation:
    """Freeze leaves: they do not change, have no state, and are not measured.

    Their updates are `None` in the whole chain, wherever `freeze` is in it.

    Args:
        mask: the leaves to freeze, as in `masked`. Default: all, for a part of a `partition`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.freeze("backbone.*"), fo.adam(0.1))
        >>> params = {"backbone": {"w": torch.ones(1)}, "head": {"w": torch.ones(1)}}
        >>> state = tx.init(params)
        >>> state.slots["exp_avg"]
        {'backbone': {'w': None}, 'head': {'w': tensor([0.])}}
        >>> tx.update(params, state, params)[0]
        {'backbone': {'w': None}, 'head': {'w': tensor([-0.1000])}}
    """
    if _is_transformation(mask):
        raise TypeError(
            "freeze takes the leaves to freeze, e.g. freeze('*.bias'), and no "
            "transformation; chain the two: chain(freeze('*.bias'), adam(1e-3))."
        )
    return _only(masked_by(mask), leafwise(None, frozen, name="freeze"))


@factory
def selective_transform(
    tx: base.GradientTransformation, *, freeze_mask: Mask
) -> base.GradientTransformation:
    """Train all leaves except those that a mask selects, which are frozen.

    Args:
        tx: a transformation.
        freeze_mask: the leaves to freeze, as in `masked`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.selective_transform(fo.sgd(0.1), freeze_mask=lambda path, p: p.ndim < 2)
        >>> params = {"w": torch.ones(1, 1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'w': tensor([[-0.1000]]), 'b': None}
    """
    if _is_transformation(freeze_mask) or not _is_transformation(tx):
        raise TypeError(
            "selective_transform takes the transformation first and the leaves to freeze by name: "
            "selective_transform(adam(1e-3), freeze_mask='*.bias')."
        )
    return chain(freeze(freeze_mask), tx)


def _is_transformation(x: Any) -> bool:
    return isinstance(x, base.GradientTransformation)


def _only(choice: Choice, tx: Any) -> base.GradientTransformation:
    """A transformation of the chosen leaves."""

    def of_some(part: Any) -> base.GradientTransformation:
        return on_some(lambda path, p: chosen((choice,), path, p), part, choices=(choice,))

    return each_placement(tx, lambda x: [x.on(choice)], of_some)
