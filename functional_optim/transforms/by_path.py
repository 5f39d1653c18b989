"""Factors on the learning rate per parameter: by layer, and by width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.combinators.partition import partition
from functional_optim.core.base import GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.paths import fits
from functional_optim.transforms.scaling import scale


@factory
def scale_by_path(factors: Mapping[str, numeric.Hyper]) -> GradientTransformation:
    """Multiply the update of each leaf by the factor of the first pattern that matches its path.

    Leaves without a matching pattern pass unchanged. Before `scale_by_lr`, a factor scales the
    learning rate of the leaf. Put it before `add_decayed_weights` to leave the decay unscaled.

    Args:
        factors: from path patterns, as in `partition`, to numbers, 0-dim tensors, or schedules.
            `layerwise_decay` and `mup` compute them from the names and shapes of parameters.

    Raises:
        TypeError: if factors is not a dict from patterns.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_path({"head.*": 10.0}), fo.scale_by_lr(0.1))
        >>> params = {"head": {"w": torch.ones(1)}, "body": {"w": torch.ones(1)}}
        >>> tx.update(params, tx.init(params), params)[0]
        {'head': {'w': tensor([-1.])}, 'body': {'w': tensor([-0.1000])}}
    """
    if not isinstance(factors, Mapping) or not all(isinstance(x, str) for x in factors):
        raise TypeError(
            f"scale_by_path takes a dict from path patterns to factors, but got {factors!r}; pass "
            "e.g. {'embedding.*': 0.1, '*.bias': 2.0}."
        )
    known: dict[Any, str] = {}
    labels = {}
    for pattern, factor in factors.items():
        kind = factor if type(factor) in (int, float) else id(factor)
        labels[pattern] = known.setdefault((type(factor), kind), f"factor{len(known)}")
    parts = {label: scale(factors[pattern]) for pattern, label in labels.items()}
    return partition({**parts, "rest": scale(1)}, {**labels, "*": labels.get("*", "rest")})


def layerwise_decay(
    params: Any, decay: float, layers: Sequence[str | Sequence[str]] | None = None
) -> dict[str, float]:
    """Factors for `scale_by_path` that decrease from the last layer, whose factor is 1, to the
    first.

    In fine-tuning, layers near the input have learned general features and should change less.

    Args:
        params: the parameters, a tree; without `layers` a dict in the order of the layers, such as
            `dict(model.named_parameters())`.
        decay: the factor from a layer to the one before it, in (0, 1].
        layers: from the input to the output, for each layer a path pattern, or several. Default:
            numbered blocks (`blocks.0`, `blocks.1`, …) that have parameters; all parameters before
            them form one layer, and all parameters after them another.

    Returns:
        A dict from the path of each parameter to decay^(number of later layers).

    Raises:
        ValueError: for a decay out of range, a parameter without a layer, and, without `layers`, if
            there are no numbered blocks, or several stacks of them.
        TypeError: if `layers` is a string; without `layers`, if params is not a dict of tensors.

    Papers: Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather
    Than Generators", https://arxiv.org/abs/2003.10555; Bao, Dong, Piao, Wei, "BEiT: BERT
    Pre-Training of Image Transformers", https://arxiv.org/abs/2106.08254.

    Example::

        >>> import torch, functional_optim as fo
        >>> names = ("embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight")
        >>> params = {name: torch.ones(1) for name in names}
        >>> factors = fo.layerwise_decay(params, 0.5)
        >>> factors
        {'embed.weight': 0.125, 'blocks.0.weight': 0.25, 'blocks.1.weight': 0.5, 'head.weight': 1.0}
        >>> tx = fo.chain(fo.scale_by_adam(), fo.scale_by_path(factors), fo.scale_by_lr(1e-3))
    """
    if isinstance(decay, (Mapping, tuple, list)):
        raise TypeError(
            f"layerwise_decay takes a number as decay, but got a {type(decay).__name__}; call "
            "layerwise_decay(params, decay)."
        )
    if not 0 < decay <= 1:
        raise ValueError(f"layerwise_decay needs a decay in (0, 1], but got {decay!r}.")
    if isinstance(layers, str):
        raise TypeError(
            "layerwise_decay takes a list of layers, from the input to the output, but got the "
            f"string {layers!r}; pass e.g. ['embedding.*', 'blocks.*', 'head.*']."
        )
    if layers is None:
        depths = _numbered(params)
    else:
        depths = {path: _layer_of(path, layers) for path, _ in tree.items(params)}
    last = max(depths.values(), default=0) if layers is None else len(layers) - 1
    return {path: float(decay ** (last - depth)) for path, depth in depths.items()}


def _layer_of(path: str, layers: Sequence[str | Sequence[str]]) -> int:
    for i, patterns in enumerate(layers):
        several = [patterns] if isinstance(patterns, str) else patterns
        if any(fits(pattern, path) for pattern in several):
            return i
    raise ValueError(
        f"layerwise_decay found no layer for the parameter {path!r}; add a pattern that matches it "
        "to one of the layers."
    )


def _numbered(params: Any) -> dict[str, int]:
    """The layer of each parameter, by the first number in its path."""
    if not isinstance(params, Mapping) or not all(isinstance(x, Tensor) for x in params.values()):
        raise TypeError(
            "layerwise_decay needs names in the order of the layers: pass "
            "dict(model.named_parameters()), or layers=, from the input to the output."
        )
    found: dict[str, tuple[str, int]] = {}
    for path in params:
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None:
            found[path] = (".".join(parts[:at]), int(parts[at]))
    stacks = dict.fromkeys([stack for stack, _ in found.values()])
    if len(stacks) != 1:
        named = " and ".join([repr(x) for x in stacks]) or "none"
        raise ValueError(
            f"layerwise_decay needs one stack of numbered blocks, but found {named}; pass layers=, "
            "from the input to the output."
        )
    numbers = sorted({number for _, number in found.values()})
    place = {number: i for i, number in enumerate(numbers, 1)}
    depths, begun = {}, False
    for path in params:
        begun = begun or path in found
        depths[path] = place[found[path][1]] if path in found else (1 + len(place)) * begun
    return depths


class MupFactors(NamedTuple):
    """Factors by the paths of parameters.

    lr: factors on the learning rate, for `scale_by_path`. weight_decay: factors on a decay that is
    multiplied by the learning rate: the inverses, so that the decay of a step is unchanged.
    """

    lr: dict[str, float]
    weight_decay: dict[str, float]


def mup(params: Any, base: Any, delta: Any = None, *, rule: str = "adam") -> MupFactors:
    """µP's learning rate factors, from the shapes of the narrow model on which the rates were
    tuned.

    If the model uses the initialization and the output multiplier of µP, the best learning rate
    does not depend on the width. Matrices are (out, in), as in torch::

        factors = fo.mup(params, base)
        tx = fo.chain(
            fo.scale_by_adam(),
            fo.scale_by_path(factors.lr),
            fo.add_decayed_weights(0.1),  # µP does not scale lr · weight_decay
            fo.scale_by_lr(lr),
        )

    Args:
        params: the parameters, a tree of tensors.
        base: those of the narrow model, in the same tree; may be on the meta device.
        delta: those of a model of a third width: dimensions in which it differs from `base` are
            widths. Default: dimensions in which `params` differs from `base`; this misses a width
            that happens to be equal.
        rule: "adam" for methods that normalize each element: 1 / (growth of the fan-in) for a
            parameter with two widths, 1 for all others. "sgd": growth of the fan-out over growth of
            the fan-in for two widths, the growth for one.

    Raises:
        TypeError: for a leaf that is not a tensor, such as a module.
        ValueError: for different trees or numbers of dimensions, more than two widths, and an
            unknown rule.

    Paper: Yang, Hu, Babuschkin et al., "Tensor Programs V: Tuning Large Neural Networks via
    Zero-Shot Hyperparameter Transfer", https://arxiv.org/abs/2203.03466, Table 8;
    https://github.com/microsoft/mup.

    Example::

        >>> import torch, functional_optim as fo
        >>> def params(width):
        ...     return {"in": torch.ones(width, 10), "hidden": torch.ones(width, width)}
        >>> fo.mup(params(512), params(64)).lr
        {'hidden': 0.125, 'in': 1.0}
    """
    check_choice("mup", ("adam", "sgd"), rule=rule)
    trees = (params, base, params if delta is None else delta)
    named, small, other = [dict(tree.items(x)) for x in trees]
    for x in (*named.values(), *small.values(), *other.values()):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"mup takes trees of tensors, but got a {type(x).__name__}; pass e.g. "
                "dict(model.named_parameters())."
            )
    if not named.keys() == small.keys() == other.keys():
        apart = sorted((named.keys() ^ small.keys()) | (named.keys() ^ other.keys()))
        raise ValueError(
            f"mup compares models of one kind, but some lack {', '.join(map(repr, apart))}."
        )
    found = {path: _growth(path, p, small[path], other[path]) for path, p in named.items()}
    lr = {path: _factor_of(growth, rule) for path, growth in found.items()}
    return MupFactors(lr, {path: 1 / x for path, x in lr.items()})


def _growth(path: str, p: Tensor, base: Tensor, other: Tensor) -> list[float]:
    """The growth of each width of a parameter over the base model."""
    if not p.dim() == base.dim() == other.dim():
        raise ValueError(
            f"mup got shapes of different dimensions for {path!r}: {tuple(p.shape)}, "
            f"{tuple(base.shape)} and {tuple(other.shape)}."
        )
    sizes = zip(p.shape, base.shape, other.shape, strict=True)
    growth = [now / before for now, before, varied in sizes if varied != before]
    if len(growth) > 2:
        raise ValueError(
            f"mup takes parameters with up to two widths, but {path!r} has {len(growth)}."
        )
    return growth


def _factor_of(growth: list[float], rule: str) -> float:
    """growth: first that of the fan-out, then that of the fan-in."""
    if len(growth) == 2:
        fan_out, fan_in = growth
        return 1 / fan_in if rule == "adam" else fan_out / fan_in
    return growth[0] if growth and rule == "sgd" else 1.0
