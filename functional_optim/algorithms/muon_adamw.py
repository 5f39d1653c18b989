"""Muon for the matrices of hidden layers, AdamW for all other parameters.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/, and `MuonWithAuxAdam` of
https://github.com/KellerJordan/Muon, of which the defaults are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, adamw
from functional_optim.algorithms.muon import Accumulator, Nesterov, muon
from functional_optim.combinators.as_matrix import as_matrix
from functional_optim.combinators.hidden_matrices import HiddenMatrices
from functional_optim.combinators.partition import partition
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.paths import Answers, Choice, Mask
from functional_optim.linalg import Coefficients
from functional_optim.transforms.orthogonal import Scale

Views = Mapping[str, Mapping[str, Any]]
"""From path patterns to arguments of `as_matrix`."""


@factory
def muon_adamw(
    lr: numeric.Hyper = 0.02,
    adamw_lr: numeric.Hyper = 3e-4,
    weight_decay: numeric.Hyper = 0.01,
    adamw_weight_decay: numeric.Hyper = 0.01,
    momentum: numeric.Hyper = 0.95,
    betas: Betas = (0.9, 0.95),
    eps: numeric.Hyper = 1e-10,
    *,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    ns_eps: float = 1e-7,
    ns_steps: int = 5,
    ns_dtype: torch.dtype = torch.bfloat16,
    scale: Scale = "original",
    accumulator: Accumulator = "ema",
    muon: Mask = (),
    adamw: Mask = (),
    views: Views | None = None,
) -> GradientTransformation:
    """A whole network in one recipe: hidden matrices by `muon`, everything else by `adamw`.

    A parameter's name and shape tell which it gets. AdamW gets biases, gains and all that has fewer
    than two dimensions longer than 1; embeddings (names with `embed`, `emb`, `wte`, `wpe`,
    `token`, `position`); tables of biases and tokens; heads (`head`, `lm_head`, `*_head`, and
    `output`, `classifier`, `score` or `fc` at the top of the model). Muon gets the rest, with the
    kernels of convolutions as matrices (out, in · height · width). `summary` shows who got what.

    Args:
        lr: Muon's learning rate, ≥ 0.
        adamw_lr: AdamW's learning rate, ≥ 0.
        weight_decay: decoupled decay of hidden matrices, ≥ 0.
        adamw_weight_decay: that of all others, ≥ 0.
        momentum: decay rate μ of Muon's momentum, ≥ 0.
        betas: decay rates of AdamW's averages, each in [0, 1).
        eps: added to the root of AdamW's second moment, ≥ 0.
        nesterov, ns_coefficients, ns_steps, ns_dtype, scale, accumulator: as in `muon`.
        ns_eps: least norm to divide by in Newton–Schulz; `eps` of `muon`.
        muon: which leaves Muon gets, whatever their names: a path pattern, patterns, a function of
            path and leaf, or a tree of bools, as in `masked`. Of a branch it gets the leaves with
            two dimensions or more.
        adamw: which leaves AdamW gets, likewise.
        views: from path patterns, of which the first that fits counts, to arguments of `as_matrix`:
            `{"*.qkv.weight": {"split": 3}}`.

        Numbers may also be 0-dim tensors or schedules. Defaults: those of the article's repository,
        with the decay of its example.

    State: `momentum_buffer` of hidden matrices, `exp_avg` and `exp_avg_sq` of all others, like the
    parameters.

    Raises:
        ValueError: for numbers out of range; from init, for a leaf that both `muon` and `adamw`
            claim, a pattern that fits nothing, a tree in which Muon gets nothing, and parameters
            without names.
        TypeError: for a view that `as_matrix` does not take.
        RuntimeError: from init, for a complex matrix.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.muon_adamw(lr=0.1, adamw_lr=0.01, weight_decay=0.0)
        >>> params = {"up": {"weight": torch.eye(2)}, "head": {"weight": torch.eye(2)}}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> state.slots["exp_avg"]["up"]["weight"], state.slots["momentum_buffer"]["head"]["weight"]
        (None, None)
        >>> [float(updates[name]["weight"][0, 0].abs() > 0.05) for name in ("up", "head")]
        [1.0, 0.0]
    """
    seen = _checked(views or {})
    choice = HiddenMatrices("muon_adamw", ("muon", "adamw"), muon, adamw, tuple(seen))
    parts = {
        "muon": _seen_by_path(
            _muon(
                lr, weight_decay, momentum, nesterov, ns_coefficients, ns_eps, ns_steps,
                scale=scale, accumulator=accumulator, ns_dtype=ns_dtype,
            ),
            choice,
            [*seen.values()],
        ),
        "adamw": _adamw(adamw_lr, betas, eps, adamw_weight_decay),
    }  # fmt: skip
    return partition(parts, choice)


_muon, _adamw = muon, adamw  # whose names are arguments above


def _checked(views: Any) -> dict[str, Mapping[str, Any]]:
    """The views, or a TypeError for something else than a dict of dicts."""
    if not isinstance(views, Mapping) or not all(isinstance(x, Mapping) for x in views.values()):
        raise TypeError(
            "muon_adamw takes for views a dict from path patterns to arguments of as_matrix, e.g. "
            f"{{'*.qkv.weight': {{'split': 3}}}}, but got {views!r}."
        )
    return dict(views)


def _seen_by_path(tx: Any, choice: HiddenMatrices, views: Sequence[Mapping[str, Any]]) -> Leafwise:
    """A transformation whose rules of matrices see each leaf in its own way, else flattened."""
    known: list[Any] = [as_matrix(tx, **view) for view in (*views, {})]
    if not views:
        return known[0]
    answers = Answers(choice.view, range(len(known)), "views")
    placements = []
    for i, own in enumerate(tx.placements):
        if own.rule.runs.batched:
            ways = [seen.placements[i] for seen in known]
            placements += [x.on(Choice(answers, k)) for k, x in enumerate(ways)]
        else:
            placements.append(own)
    return Leafwise(tuple(placements))
