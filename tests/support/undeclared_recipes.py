"""Recipes of several rules: chains, partitions and masks.

The library's own rules are here as well, with their formulas for the naive loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from undeclared_numbers import (
    by_largest,
    centralised,
    centred,
    mean_over_columns,
    row_norm,
    softmax_over_rows,
    trust_ratio,
    unit_norm,
)
from undeclared_places import by_aspect_ratio, by_root_of_rows, cubic, flipped, sorted_rows
from undeclared_slots import PAIRS, factored_second_moment, row_normalised_momentum, sum_of_norms
from undeclared_table import PRODUCTS, Part, Row, add

import functional_optim as fo


def is_matrix(path: str, p: Tensor) -> bool:
    """Whether the parameter has rows and columns."""
    return p.dim() >= 2


def is_vector(path: str, p: Tensor) -> bool:
    """Whether it does not."""
    return p.dim() < 2


class Moments(NamedTuple):
    exp_avg: Any
    exp_avg_sq: Any


def adam(u, slots, p, correction1, correction2):
    m = 0.9 * slots.exp_avg + 0.1 * u
    v = 0.99 * slots.exp_avg_sq + 0.01 * u * u
    return (m / correction1) / ((v / correction2).sqrt() + 1e-3), Moments(m, v)


CLIP = Part(
    "clip",
    lambda u, slots, p, factor: (u * factor, slots),
    scalars=lambda t, total: (min(1.0, 1.0 / math.sqrt(total[0])),),
    reduce=lambda u, slots, p: (u.square().sum(),),
    known=lambda: fo.clip_by_global_norm(1.0),
)
ADAM = Part(
    "adam",
    adam,
    lambda p: Moments(torch.zeros_like(p), torch.zeros_like(p)),
    lambda t: (1 - 0.9**t, 1 - 0.99**t),
    known=lambda: fo.scale_by_adam((0.9, 0.99), 1e-3),
)
DECAY = Part(
    "decay",
    lambda u, slots, p: (u + 0.1 * p, slots),
    known=lambda: fo.add_decayed_weights(0.1),
)
RATE = Part("rate", lambda u, slots, p: (-0.5 * u, slots), known=lambda: fo.scale_by_lr(0.5))


def chained(name: str, *parts: Part, tolerance: float = 1e-5, without: Sequence[str] = ()) -> None:
    """Add a chain to the table."""

    def build() -> Any:
        return fo.chain(*[part.tx() for part in parts])

    add(Row(name, build, parts, frozenset(without), tolerance))


chained("chain: two of rows", row_norm, mean_over_columns, RATE)
chained("chain: clip, rows, rate", CLIP, row_norm, RATE)
chained("chain: adam, norm of all, decay, rate", ADAM, unit_norm, DECAY, RATE)
chained("chain: clip, adam, trust ratio, rate", CLIP, ADAM, DECAY, trust_ratio, RATE)
chained("chain: centralised, adam, shape, rate", centralised, ADAM, by_root_of_rows, RATE)
chained("chain: softmax, clip, sorted, decay, rate", softmax_over_rows, CLIP, sorted_rows, DECAY)
chained("chain: rows, sum of norms, cubic", row_norm, sum_of_norms, cubic, tolerance=PRODUCTS)
chained(
    "chain: factored, clip, flipped", factored_second_moment, CLIP, flipped, RATE, without=PAIRS
)
add(
    Row(
        "partition: rows of matrices, norm of others",
        lambda: fo.partition(
            {"rows": fo.chain(row_norm.tx(), RATE.tx()), "all": unit_norm.tx()},
            lambda path, p: "rows" if p.dim() >= 2 else "all",
        ),
        (row_norm.on(is_matrix), RATE.on(is_matrix), unit_norm.on(is_vector)),
    )
)
add(
    Row(
        "partition: momentum of rows, centred others, measured",
        lambda: fo.chain(
            fo.partition(
                {
                    "rows": row_normalised_momentum.tx(),
                    "all": fo.chain(sum_of_norms.tx(), centred.tx()),
                },
                lambda path, p: "rows" if p.dim() >= 2 else "all",
            ),
            RATE.tx(),
        ),
        (
            row_normalised_momentum.on(is_matrix),
            sum_of_norms.on(is_vector),
            centred.on(is_vector),
            RATE,
        ),
    )
)
add(
    Row(
        "masked: softmax of matrices",
        lambda: fo.chain(fo.masked(softmax_over_rows.tx(), is_matrix), DECAY.tx(), RATE.tx()),
        (softmax_over_rows.on(is_matrix), DECAY, RATE),
    )
)
add(
    Row(
        "masked: shape of matrices, clip",
        lambda: fo.chain(
            CLIP.tx(), fo.masked(by_aspect_ratio.tx(), is_matrix), by_largest.tx(), RATE.tx()
        ),
        (CLIP, by_aspect_ratio.on(is_matrix), by_largest, RATE),
    )
)
