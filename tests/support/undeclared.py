"""Rules for one tensor as a user writes them, without a flag that says what they are.

Each is stepped in four ways and compared with a naive loop, which calls the rule's own function on
one tensor after the other. Run as a program, it prints a table of all of them and two counts:

    python tests/support/undeclared.py [--only NAME ...] [--sets NAME ...] [--ways NAME ...]
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_optim as fo
from functional_optim.adapters import Optimizer

STEPS = 3

PRODUCTS = 1e-4
"""The tolerance of rules with products or factorisations of matrices."""


class Part(NamedTuple):
    """A rule and what `fo.leafwise` takes with it. known: the library's rule of the same formula.

    where: the tensors on which it acts.
    """

    name: str
    update: Callable[..., Any]
    init: Callable[[Tensor], Any] | None = None
    scalars: Callable[..., Any] | None = None
    reduce: Callable[..., Any] | None = None
    hyper: Mapping[str, Any] | None = None
    carry: Any = None
    known: Callable[[], Any] | None = None
    where: Callable[[str, Tensor], bool] = lambda path, p: True

    def tx(self) -> Any:
        """The transformation, without any flag."""
        if self.known is not None:
            return self.known()
        return fo.leafwise(
            self.init,
            self.update,
            self.scalars,
            reduce=self.reduce,
            hyper=self.hyper,
            carry=self.carry,
            name=self.name,
        )

    def on(self, where: Callable[[str, Tensor], bool]) -> Part:
        """The same for some of the tensors."""
        return self._replace(where=where)


class Row(NamedTuple):
    """A recipe: how it is built, and its rules, in their order, for the naive loop.

    without: the sets of tensors that it does not take. tolerance: relative to the largest element.
    """

    name: str
    build: Callable[[], Any]
    parts: tuple[Part, ...]
    without: frozenset[str] = frozenset()
    tolerance: float = 1e-5


ROWS: dict[str, Row] = {}


def add(row: Row) -> None:
    """Add a row to the table."""
    assert row.name not in ROWS
    ROWS[row.name] = row


def rule(
    *, without: Sequence[str] = (), tolerance: float = 1e-5, **more: Any
) -> Callable[[Callable[..., Any]], Part]:
    """Add a rule to the table, under the name of its `update`."""

    def added(update: Callable[..., Any]) -> Part:
        part = Part(update.__name__, update, **more)
        add(Row(part.name, part.tx, (part,), frozenset(without), tolerance))
        return part

    return added


# --- one number of the whole tensor


@rule()
def unit_norm(u, slots, p):
    return u / u.norm(), slots


@rule()
def centred(u, slots, p):
    return u - u.mean(), slots


@rule()
def by_largest(u, slots, p):
    return u / u.abs().max(), slots


@rule()
def between_amin_and_amax(u, slots, p):
    low, high = u.amin(), u.amax()
    return (u - low) / (high - low + 1e-3), slots


@rule()
def standardised(u, slots, p):
    return (u - u.mean()) / (u.std(correction=0) + 1e-3), slots


@rule()
def by_variance(u, slots, p):
    return u / (u.var(correction=0) + 1.0), slots


@rule()
def by_rms(u, slots, p):
    return u / (u.square().mean().sqrt() + 1e-8), slots


@rule()
def by_median(u, slots, p):
    return u / (u.abs().median() + 1e-3), slots


@rule()
def clipped_at_quantile(u, slots, p):
    bound = torch.quantile(u.abs(), 0.75)
    return u.clamp(-bound, bound), slots


@rule()
def softmax_of_all(u, slots, p):
    return u.flatten().softmax(0).view_as(u), slots


@rule()
def by_logsumexp(u, slots, p):
    return u / u.abs().flatten().logsumexp(0), slots


@rule()
def top_k(u, slots, p):
    k = max(1, u.numel() // 4)
    least = u.abs().flatten().topk(k).values[-1]
    return torch.where(u.abs() >= least, u, 0.0), slots


@rule()
def sorted_all(u, slots, p):
    return u.flatten().sort().values.view_as(u), slots


@rule()
def cumulated_all(u, slots, p):
    return (u.flatten().cumsum(0) / u.numel()).view_as(u), slots


@rule()
def rolled_all(u, slots, p):
    return u.roll(1), slots


@rule(without=("pieces",), tolerance=PRODUCTS)
def spectral_norm(u, slots, p):
    if u.dim() != 2:
        return u, slots
    return u / torch.linalg.matrix_norm(u, 2), slots


# --- rows and columns


@rule()
def row_norm(u, slots, p):
    return u / (u.norm(dim=-1, keepdim=True) + 1e-8), slots


@rule()
def column_norm(u, slots, p):
    return u / (u.norm(dim=0, keepdim=True) + 1e-8), slots


@rule()
def mean_over_rows(u, slots, p):
    return u - u.mean(0), slots


@rule()
def mean_over_columns(u, slots, p):
    return u - u.mean(-1, keepdim=True), slots


@rule()
def centralised(u, slots, p):
    if u.dim() < 2:
        return u, slots
    return u - u.mean(dim=tuple(range(1, u.dim())), keepdim=True), slots


@rule()
def max_over_rows(u, slots, p):
    return u / (u.abs().max(0).values + 1e-3), slots


@rule()
def amax_over_columns(u, slots, p):
    return u / (u.abs().amax(-1, keepdim=True) + 1e-3), slots


@rule()
def softmax_over_rows(u, slots, p):
    return u.softmax(-1), slots


@rule()
def log_softmax_over_columns(u, slots, p):
    return u.log_softmax(0), slots


@rule()
def row_std(u, slots, p):
    return u / (u.std(-1, keepdim=True, correction=0) + 1.0), slots


@rule()
def column_var(u, slots, p):
    return u / (u.var(0, correction=0) + 1.0), slots


@rule()
def layer_norm(u, slots, p):
    return (F.layer_norm(u, u.shape[-1:], eps=1e-3) if u.dim() else u), slots


@rule()
def normalize(u, slots, p):
    return F.normalize(u, dim=-1), slots


@rule()
def row_median(u, slots, p):
    return u - u.median(-1, keepdim=True).values, slots


@rule()
def row_quantile(u, slots, p):
    return u - u.quantile(0.25, dim=-1, keepdim=True), slots


@rule()
def transposed_mean(u, slots, p):
    if u.dim() < 2:
        return u, slots
    return u - u.mT.mean(-1).unsqueeze(-2), slots


@rule()
def row_squares_by_einsum(u, slots, p):
    if u.dim() == 0:
        return u, slots
    rows = torch.einsum("i...,i...->i", u, u) if u.dim() < 3 else u.flatten(1).square().sum(1)
    return u / (1.0 + rows.view(-1, *[1] * (u.dim() - 1))), slots


@rule()
def by_outer_product(u, slots, p):
    if u.dim() != 2:
        return u, slots
    size = u.abs()
    return u / (torch.outer(size.mean(1), size.mean(0)) + 0.1), slots


# --- order and place


@rule()
def sorted_rows(u, slots, p):
    return u.sort(-1).values, slots


@rule()
def ranks(u, slots, p):
    order = torch.argsort(u, dim=-1, stable=True) if u.dim() else torch.zeros_like(u)
    place = torch.argsort(order, dim=-1) if u.dim() else order
    return place.to(u.dtype) / (u.shape[-1] if u.dim() else 1), slots


@rule()
def gathered_backwards(u, slots, p):
    return u.gather(-1, u.argsort(dim=-1, descending=True)), slots


@rule()
def rolled_rows(u, slots, p):
    return (u.roll(1, 0) if u.dim() else u), slots


@rule()
def flipped(u, slots, p):
    return u.flip(-1), slots


@rule()
def cumulated_rows(u, slots, p):
    return u.cumsum(-1), slots


@rule()
def differences(u, slots, p):
    if u.dim() == 0:
        return u, slots
    return F.pad(u[..., 1:] - u[..., :-1], (1, 0)), slots


@rule()
def windows(u, slots, p):
    if u.dim() == 0:
        return u, slots
    return torch.cat([u, u[..., -1:]], -1).unfold(-1, 2, 1).mean(-1), slots


@rule()
def minus_first(u, slots, p):
    return (u - u[0] if u.dim() else u), slots


@rule()
def minus_first_column(u, slots, p):
    return u - 0.5 * u[..., :1] if u.dim() else u, slots


@rule()
def lower_triangle(u, slots, p):
    return (u.tril() if u.dim() >= 2 else u), slots


@rule()
def upper_triangle(u, slots, p):
    return (u.triu(1) if u.dim() >= 2 else u), slots


@rule()
def halves_exchanged(u, slots, p):
    if u.dim() == 0 or u.shape[-1] < 2:
        return u, slots
    first, second = u.split([u.shape[-1] // 2, u.shape[-1] - u.shape[-1] // 2], -1)
    return torch.cat([second, first], -1), slots


@rule()
def chunks_centred(u, slots, p):
    if u.dim() == 0:
        return u, slots
    return torch.cat([x - x.mean() for x in u.chunk(2)]), slots


@rule()
def pairs_normalised(u, slots, p):
    if u.numel() % 2:
        return u, slots
    pairs = u.reshape(-1, 2)
    return (pairs / (pairs.norm(dim=1, keepdim=True) + 1e-3)).view(u.shape), slots


@rule()
def weighted_by_place(u, slots, p):
    if u.dim() == 0:
        return u, slots
    return u * torch.linspace(0.5, 1.5, u.shape[-1], dtype=u.dtype, device=u.device), slots


@rule()
def without_diagonal(u, slots, p):
    if u.dim() != 2:
        return u, slots
    return u * (1 - torch.eye(*u.shape, dtype=u.dtype, device=u.device)), slots


@rule()
def positives_masked(u, slots, p):
    return u.masked_fill(u > 0, 0.5) - torch.where(u > 1, u, 0.0), slots


@rule()
def sum_of_positives(u, slots, p):
    return u - u[u > 0].sum() / u.numel(), slots


@rule()
def own_copy_written(u, slots, p):
    v = u.clone()
    if v.dim():
        v[0] = 0.0
    return v.mul_(2.0), slots


# --- shape and size


@rule()
def by_root_of_rows(u, slots, p):
    return u * (u.shape[0] if u.dim() else 1) ** 0.5, slots


@rule()
def by_dimensions(u, slots, p):
    return u * u.dim(), slots


@rule()
def by_size(u, slots, p):
    return u / u.numel() ** 0.5, slots


@rule()
def by_aspect_ratio(u, slots, p):
    rows, columns = (u.shape[-2], u.shape[-1]) if u.dim() >= 2 else (1, 1)
    return u * max(1.0, rows / columns) ** 0.5, slots


@rule()
def large_tensors_only(u, slots, p):
    return (u.sign() if u.numel() > 1000 else u), slots


@rule()
def both_sides_large(u, slots, p):
    return (u.sign() if min(u.shape, default=0) > 32 else u), slots


@rule()
def even_sizes_only(u, slots, p):
    return (u if u.numel() % 2 else 2 * u), slots


@rule()
def by_length_of_p(u, slots, p):
    return u * (len(p) if p.dim() else 1) ** -0.5, slots


# --- matrices


@rule(tolerance=PRODUCTS)
def cubic(u, slots, p):
    if u.dim() < 2:
        return u, slots
    m = u.flatten(1) / u.norm()
    return (1.5 * m - 0.5 * m @ m.T @ m).view(u.shape), slots


@rule(tolerance=PRODUCTS)
def cubic_by_einsum(u, slots, p):
    if u.dim() != 2:
        return u, slots
    return torch.einsum("ij,kj,kl->il", u, u, u) / u.numel(), slots


@rule(tolerance=PRODUCTS)
def orthogonal_by_qr(u, slots, p):
    if u.dim() < 2:
        return u, slots
    m = u.flatten(1)
    tall = m if m.shape[0] >= m.shape[1] else m.T
    q = torch.linalg.qr(tall).Q
    return (q if tall is m else q.T).reshape(u.shape), slots


@rule(tolerance=PRODUCTS)
def solved(u, slots, p):
    if u.dim() != 2:
        return u, slots
    gram = u @ u.T + torch.eye(u.shape[0], dtype=u.dtype, device=u.device)
    return torch.linalg.solve(gram, u), slots


# --- the parameter


@rule()
def trust_ratio(u, slots, p):
    return u * (p.norm() / (u.norm() + 1e-8)), slots


@rule()
def row_trust_ratio(u, slots, p):
    size = p.norm(dim=-1, keepdim=True)
    return u * size / (u.norm(dim=-1, keepdim=True) + 1e-3), slots


@rule(tolerance=PRODUCTS)
def tangential(u, slots, p):
    flat = p.flatten()
    return u - (flat @ u.flatten()) / (flat @ flat + 1e-8) * p, slots


# --- slots


class Momentum(NamedTuple):
    exp_avg: Any


class Factored(NamedTuple):
    rows: Any
    columns: Any
    whole: Any


class Size(NamedTuple):
    size: Any


class Rows(NamedTuple):
    per_row: Any


class Counted(NamedTuple):
    counts: Any
    row_counts: Any


class Seen(NamedTuple):
    seen: Any


def momentum(p):
    return Momentum(torch.zeros_like(p))


def half_momentum(p):
    return Momentum(torch.zeros_like(p, dtype=torch.bfloat16))


def factored(p):
    if p.dim() < 2:
        return Factored(None, None, torch.zeros_like(p))
    zero = torch.zeros_like(p)
    return Factored(zero.amax(-1, keepdim=True), zero.amax(-2, keepdim=True), None)


def size(p):
    return Size(p.new_zeros(()))


def per_row(p):
    return Rows(p.new_zeros(p.shape[:1]))


def counted(p):
    counts = torch.zeros_like(p, dtype=torch.int64)
    return Counted(counts, torch.zeros(p.shape[:1], dtype=torch.int32, device=p.device))


def seen(p):
    return Seen(torch.zeros_like(p, dtype=torch.bool))


PAIRS = ("complex64",)
"""The set whose tensors arrive as pairs: slots of other shapes than the parameter's do not fit."""


@rule(init=momentum)
def row_normalised_momentum(u, slots, p):
    m = slots.exp_avg + 0.1 * (u - slots.exp_avg)
    return m / (m.norm(dim=-1, keepdim=True) + 1e-3), Momentum(m)


@rule(init=momentum)
def momentum_of_rows(u, slots, p):
    m = 0.9 * slots.exp_avg + u / (u.norm(dim=-1, keepdim=True) + 1e-3)
    return m, Momentum(m)


@rule(init=momentum)
def sorted_momentum(u, slots, p):
    m = 0.9 * slots.exp_avg + u
    return m.sort(-1).values, Momentum(m)


@rule(init=momentum)
def rolled_slot(u, slots, p):
    m = 0.5 * (slots.exp_avg.roll(1) + u)
    return m, Momentum(m)


@rule(init=momentum)
def centred_momentum(u, slots, p):
    m = 0.9 * slots.exp_avg + (u - u.mean())
    return m * (u.shape[0] if u.dim() else 1) ** 0.5, Momentum(m)


@rule(init=momentum, tolerance=PRODUCTS)
def cubic_momentum(u, slots, p):
    m = 0.9 * slots.exp_avg + u
    if m.dim() < 2:
        return m, Momentum(m)
    x = m.flatten(1) / m.norm()
    return (1.5 * x - 0.5 * x @ x.T @ x).view(u.shape), Momentum(m)


@rule(init=half_momentum, without=PAIRS)
def slot_in_bfloat16(u, slots, p):
    m = slots.exp_avg + 0.5 * (u - slots.exp_avg)
    return m / (m.norm(dim=-1, keepdim=True) + 1e-3), Momentum(m)


@rule(init=factored, without=PAIRS)
def factored_second_moment(u, slots, p):
    if u.dim() < 2:
        v = 0.9 * slots.whole + 0.1 * u.square()
        return u / (v.sqrt() + 1e-3), Factored(None, None, v)
    rows = 0.9 * slots.rows + 0.1 * u.square().mean(-1, keepdim=True)
    columns = 0.9 * slots.columns + 0.1 * u.square().mean(-2, keepdim=True)
    v = rows * columns / rows.mean(-2, keepdim=True)
    return u / (v.sqrt() + 1e-3), Factored(rows, columns, None)


@rule(init=factored, without=PAIRS)
def factored_by_maxima(u, slots, p):
    if u.dim() < 2:
        v = slots.whole + u.square()
        return u / (v.sqrt() + 1e-3), Factored(None, None, v)
    v = torch.minimum(slots.rows, slots.columns) + u.square()
    new = Factored(v.amax(-1, keepdim=True), v.amax(-2, keepdim=True), None)
    return u / (v.sqrt() + 1e-3), new


@rule(init=size, without=PAIRS)
def slot_of_one_number(u, slots, p):
    v = 0.9 * slots.size + 0.1 * u.square().mean()
    return u / (v.sqrt() + 1e-3), Size(v)


@rule(init=size, without=PAIRS)
def slot_of_largest(u, slots, p):
    top = torch.maximum(slots.size, u.abs().max())
    return u / top, Size(top)


@rule(init=per_row, without=PAIRS)
def slot_per_row(u, slots, p):
    new = u.square() if u.dim() == 0 else u.reshape(u.shape[0], -1).square().mean(1)
    v = 0.9 * slots.per_row + 0.1 * new
    wide = v if u.dim() == 0 else v.view(-1, *[1] * (u.dim() - 1))
    return u / (wide.sqrt() + 1e-3), Rows(v)


@rule(init=counted, without=PAIRS)
def slots_that_count(u, slots, p):
    counts = slots.counts + (u > 0)
    most = (u > 0).flatten(1).sum(1) if u.dim() > 1 else (u > 0).to(u.dtype)
    rows = slots.row_counts + most
    wide = rows if u.dim() == 0 else rows.view(-1, *[1] * (u.dim() - 1))
    return u / (1 + counts) + wide / (1 + wide), Counted(counts, rows)


@rule(init=seen, without=PAIRS)
def slot_of_bools(u, slots, p):
    known = torch.logical_or(slots.seen, u > 0.5)
    return torch.where(known, u - u.mean(-1, keepdim=True), 0.1 * u), Seen(known)


# --- measurements over all tensors, scalars, hyperparameters, carried numbers


def norm_of_one(u, slots, p):
    return (u.norm(),)


def largest_of_one(u, slots, p):
    return (u.abs().max(),)


def count_of_one(u, slots, p):
    return ((u > 0).sum(), torch.ones_like(u).sum())


def largest_row_of_one(u, slots, p):
    return (u.norm(dim=-1).max() * (u.shape[0] if u.dim() else 1),)


@rule(reduce=norm_of_one)
def sum_of_norms(u, slots, p, total):
    return u / total, slots


@rule(reduce=largest_of_one)
def sum_of_maxima(u, slots, p, total):
    return u / total, slots


@rule(reduce=count_of_one)
def share_of_positives(u, slots, p, positive, every):
    return u * (positive / every), slots


@rule(reduce=largest_row_of_one)
def sum_of_largest_rows(u, slots, p, total):
    return (u - u.mean(-1, keepdim=True)) / total, slots


def two_scalars(t, *, lr, beta):
    return lr, 1 - beta**t


@rule(init=momentum, scalars=two_scalars, hyper={"lr": 0.5, "beta": 0.9})
def corrected_rows(u, slots, p, lr, correction):
    m = 0.9 * slots.exp_avg + 0.1 * u
    return -lr * m / correction / (m.norm(dim=-1, keepdim=True) + 1e-3), Momentum(m)


class Smoothed(NamedTuple):
    norm: float
    steps: int


def smoothed(t, carry, total, *, beta):
    norm = beta * carry.norm + (1 - beta) * total[0]
    steps = carry.steps + 1
    return (norm / steps,), Smoothed(norm, steps)


@rule(scalars=smoothed, reduce=norm_of_one, hyper={"beta": 0.5}, carry=Smoothed(norm=1.0, steps=0))
def carried_norm(u, slots, p, norm):
    return (u - u.mean()) / norm, slots


def slowly(t):
    return (1 / (1 + t),)


@rule(scalars=slowly)
def softmax_at_temperature(u, slots, p, rate):
    return rate * (u * rate).softmax(-1), slots


# --- recipes of several rules; the library's own rules, with their formulas for the naive loop


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


# --- rules that are refused


class Refusal(NamedTuple):
    """A rule that cannot be run, and what the error must say besides its name."""

    name: str
    arguments: Callable[[], dict[str, Any]]
    """Of `fo.leafwise`, but for the name."""
    says: tuple[str, ...]

    def tx(self) -> Any:
        """The transformation."""
        return fo.leafwise(**self.arguments(), name=self.name)


REFUSED: dict[str, Refusal] = {}


def refused(says: str, *more: str, **arguments: Any) -> Callable[[Callable[..., Any]], None]:
    """Add a rule that is refused, under the name of its `update`."""

    def added(update: Callable[..., Any]) -> None:
        given = {"init": None, "update": update, **arguments}
        REFUSED[update.__name__] = Refusal(update.__name__, lambda: given, (says, *more))

    return added


@refused("in place")
def writes_into_u(u, slots, p):
    return u.mul_(0.5), slots


@refused("in place")
def writes_into_a_view_of_u(u, slots, p):
    u.view(-1)[:1] = 0.0
    return u, slots


@refused("in place")
def writes_by_out(u, slots, p):
    torch.mul(u, 2.0, out=u)
    return u, slots


@refused("in place")
def writes_into_p(u, slots, p):
    p.sub_(0.1 * u)
    return u, slots


@refused("in place", init=momentum)
def writes_into_a_slot(u, slots, p):
    slots.exp_avg.lerp_(u, 0.1)
    return slots.exp_avg, slots


@refused("reads a value")
def reads_item(u, slots, p):
    return u / max(1.0, u.norm().item()), slots


@refused("reads a value")
def reads_bool(u, slots, p):
    return (u if u.sum() > 0 else 2 * u), slots


@refused("reads a value")
def reads_float(u, slots, p):
    return u * float(p.sum()), slots


@refused("reads a value")
def reads_list(u, slots, p):
    return u * sum(u.flatten().tolist()), slots


@refused("reads a value")
def reads_equality(u, slots, p):
    return (2 * u if torch.equal(u, p) else u), slots


def reads_while_reducing(u, slots, p):
    return (u.sum() if u.abs().sum() > 1e9 else u.norm(),)


@refused("reads a value", reduce=reads_while_reducing)
def reads_in_reduce(u, slots, p, total):
    return u / total, slots


@refused("random")
def draws_rand_like(u, slots, p):
    return u + torch.rand_like(u), slots


@refused("random")
def draws_randn(u, slots, p):
    return u + torch.randn(u.shape, dtype=u.dtype, device=u.device), slots


@refused("random")
def draws_dropout(u, slots, p):
    return F.dropout(u, 0.5), slots


@refused("random")
def draws_a_permutation(u, slots, p):
    return u.flatten()[torch.randperm(u.numel(), device=u.device)].view_as(u), slots


SHARED = torch.tensor(0.5)


@refused("closes over a tensor")
def closes_over_a_global(u, slots, p):
    return u * SHARED, slots


def closing_over(name: str, tensor: Tensor) -> None:
    """Add a rule that closes over a tensor."""

    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u * tensor.sum(), slots

    given = {"init": None, "update": update}
    REFUSED[name] = Refusal(name, lambda: given, ("closes over a tensor",))


closing_over("closes_over_one_number", torch.tensor(2.0))
closing_over("closes_over_a_vector", torch.linspace(0.0, 1.0, 16))
closing_over("closes_over_a_parameter", torch.nn.Parameter(torch.ones(3)))


def sizes_of_one(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
    return (u.abs().max(),)


CONTRADICTED: dict[str, Refusal] = {
    "elementwise_rows": Refusal(
        "elementwise_rows",
        lambda: {"init": None, "update": row_norm.update, "elementwise": True},
        ("elementwise", "norm"),
    ),
    "elementwise_sort": Refusal(
        "elementwise_sort",
        lambda: {"init": None, "update": sorted_rows.update, "elementwise": True},
        ("elementwise", "sort"),
    ),
    "batched_with_p": Refusal(
        "batched_with_p",
        lambda: {
            "init": None,
            "update": row_trust_ratio.update,
            "elementwise": False,
            "batched": True,
        },
        ("batched", r"\bp\b"),
    ),
    "batched_norm_of_all": Refusal(
        "batched_norm_of_all",
        lambda: {
            "init": None,
            "update": unit_norm.update,
            "elementwise": False,
            "batched": True,
        },
        ("batched", "norm"),
    ),
    "measured_maximum": Refusal(
        "measured_maximum",
        lambda: {
            "init": None,
            "update": lambda u, slots, p, top: (u / top, slots),
            "measure": sizes_of_one,
        },
        ("measure", "max"),
    ),
}
"""Rules whose arguments say what their operations deny."""


# --- tensors


SHAPES = {
    "scalar": (),
    "vector": (7,),
    "matrix": (6, 8),
    "tall": (33, 5),
    "kernel": (4, 3, 3, 3),
    "large": (130, 70),
    "row": (1, 9),
    "column": (9, 1),
    "thin": (300, 2),
}
FEW = ("scalar", "vector", "matrix", "kernel")


class Model(NamedTuple):
    """A set of tensors that are stepped together."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    strided: bool = False

    def tensors(self, seed: int, *, like_params: bool = True) -> dict[str, Tensor]:
        """Random tensors, by name. like_params: with the strides of the parameters."""
        made = {}
        for i, (name, shape) in enumerate(self.shapes.items()):
            x = random_tensor(1000 * seed + i, shape, self.dtype)
            made[name] = by_columns(x) if self.strided and like_params else x.clone()
        return made

    def params(self) -> dict[str, Tensor]:
        """The first parameters. They are small, so that an update shows beside them."""
        return {name: 0.1 * x for name, x in self.tensors(0).items()}

    def grads(self) -> list[dict[str, Tensor]]:
        """The gradients of each step, of which some lie in memory as the parameters do."""
        return [self.tensors(k + 1, like_params=k % 2 == 0) for k in range(STEPS)]


@functools.cache
def random_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A random tensor, of which callers take copies."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        pairs = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(pairs).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def by_columns(x: Tensor) -> Tensor:
    """A copy in channels_last, or transposed."""
    if x.dim() == 4:
        return x.clone(memory_format=torch.channels_last)
    return x.mT.clone(memory_format=torch.contiguous_format).mT if x.dim() == 2 else x.clone()


MODELS = {
    "together": Model(SHAPES),
    **{name: Model({name: shape}) for name, shape in SHAPES.items()},
    "twins": Model({f"{name}{i}": SHAPES[name] for i in range(3) for name in FEW}),
    "pieces": Model({"huge": (300, 512), "vector": (7,)}),
    "float64": Model({name: SHAPES[name] for name in FEW}, torch.float64),
    "bfloat16": Model({name: SHAPES[name] for name in FEW}, torch.bfloat16),
    "complex64": Model({name: SHAPES[name] for name in FEW[:3]}, torch.complex64),
    "strided": Model({"kernel": (4, 3, 5, 3), "matrix": (6, 8), "vector": (7,)}, strided=True),
}

BAR = ("together", "scalar", "vector", "matrix", "tall", "kernel", "large")
"""The sets of the issue's bar: its six shapes, each alone and in one model."""


# --- the naive loop, and the four ways


class End(NamedTuple):
    """Where some steps lead. slots: by field and by name of the parameter."""

    params: dict[str, Tensor]
    slots: dict[str, dict[str, Tensor]]


def computed_in(p: Tensor) -> torch.dtype:
    """The dtype in which a rule gets a tensor."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def seen_by_rule(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as its rule gets it: complex numbers as pairs."""
    return (torch.view_as_real(x) if x.is_complex() else x).to(dtype)


def kept(x: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    return (torch.view_as_complex(x.contiguous()) if like.is_complex() else x).to(like.dtype)


def naive(row: Row, model: Model) -> End:
    """One tensor after the other, in plain torch."""
    params = model.params()
    slots: list[dict[str, Any]] = [
        {n: part.init(p) for n, p in params.items() if part.init and part.where(n, p)}
        for part in row.parts
    ]
    carry = [part.carry for part in row.parts]
    for k, grads in enumerate(model.grads()):
        dtypes = {name: computed_in(p) for name, p in params.items()}
        us = {name: seen_by_rule(g, dtypes[name]) for name, g in grads.items()}
        ps = {name: seen_by_rule(p, dtypes[name]) for name, p in params.items()}
        for i, part in enumerate(row.parts):
            mine = [name for name, p in params.items() if part.where(name, p)]
            given = {}
            for name in mine:
                own = slots[i].get(name, ())
                seen = [None if s is None else seen_by_rule(s, dtypes[name]) for s in own]
                given[name] = type(own)(*seen) if own else ()
            total: Any = None
            if part.reduce is not None and mine:
                found = [part.reduce(us[name], given[name], ps[name]) for name in mine]
                total = tuple(sum(float(x) for x in column) for column in zip(*found, strict=True))
            numbers: Any = () if total is None else total
            if part.scalars is not None and mine:
                carried = [] if carry[i] is None else [carry[i]]
                totals = [] if total is None else [total]
                numbers = part.scalars(float(k + 1), *carried, *totals, **(part.hyper or {}))
                if carried:
                    numbers, after = numbers
                    carry[i] = type(after)(*[torch.tensor(x).item() for x in after])
            for name in mine:
                us[name], new = part.update(us[name], given[name], ps[name], *numbers)
                old = slots[i].get(name)
                if old is not None:
                    pairs = zip(new, old, strict=True)
                    slots[i][name] = type(old)(*[s if s is None else kept(s, o) for s, o in pairs])
        params = {
            name: (p + kept(us[name], p if p.is_complex() else us[name])).to(p.dtype)
            for name, p in params.items()
        }
    return End(params, by_field(slots))


def by_field(slots: Sequence[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Slots by the names of their fields, but for names that several rules have."""
    times = collections.Counter(field for own in slots for field in fields_of(own))
    found: dict[str, dict[str, Tensor]] = {}
    for own in slots:
        for name, record in own.items():
            for field, s in zip(record._fields, record, strict=True):
                if times[field] == 1 and s is not None:
                    found.setdefault(field, {})[name] = s
    return found


def fields_of(own: dict[str, Any]) -> tuple[str, ...]:
    """The names of the slots of one rule."""
    return next(iter(own.values()))._fields if own else ()


def updated(tx: Any, model: Model) -> End:
    """By `tx.update` and `fo.apply_updates`."""
    params = model.params()
    state = tx.init(params)
    for grads in model.grads():
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    return End(params, state.slots)


def compiled(tx: Any, model: Model) -> End:
    """By `fo.compile`."""
    params = model.params()
    step, state = fo.compile(tx), tx.init(params)
    for grads in model.grads():
        params, state = step(grads, state, params)
    return End(params, state.slots)


def stepped(tx: Any, model: Model, *, compile: bool) -> End:
    """By an optimizer object."""
    params = {name: torch.nn.Parameter(p) for name, p in model.params().items()}
    opt = Optimizer(list(params.items()), lambda: tx, compile=compile)
    for grads in model.grads():
        for name, p in params.items():
            p.grad = grads[name]
        opt.step()
    slots: dict[str, dict[str, Tensor]] = {}
    for name, p in params.items():
        for field, s in opt.state[p].items():
            slots.setdefault(field, {})[name] = s
    return End({name: p.detach() for name, p in params.items()}, slots)


WAYS: dict[str, Callable[[Any, Model], End]] = {
    "update": updated,
    "fo.compile": compiled,
    "Optimizer": lambda tx, model: stepped(tx, model, compile=True),
    "Optimizer, compile=False": lambda tx, model: stepped(tx, model, compile=False),
}


# --- outcomes


LEAST = 1e-2
"""What a difference is relative to where all elements are smaller, or zero."""


def difference(x: Any, y: Tensor) -> float:
    """The largest difference relative to the largest element of y; inf for another shape."""
    if x is None or x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    wide = torch.complex128 if y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    if not bool((x.isfinite() == y.isfinite()).all()):
        return math.inf
    apart = (x - y).abs().nan_to_num(0.0).max().item()
    return apart / max(y.abs().nan_to_num(0.0).max().item(), LEAST)


def worst(found: End, expected: End) -> tuple[float, str]:
    """The largest difference between two ends, and where it is."""
    most, at = 0.0, ""
    for name, y in expected.params.items():
        apart = difference(found.params[name], y)
        if apart > most:
            most, at = apart, f"parameter {name!r}"
    for field, own in expected.slots.items():
        for name, y in own.items():
            apart = difference(found.slots[field][name], y)
            if apart > most:
                most, at = apart, f"slot {field!r} of {name!r}"
    return most, at


SENTENCES = (ValueError, RuntimeError, TypeError)
"""The errors of what is refused in a sentence."""


class Outcome(NamedTuple):
    """What came of a rule in one way on one set of tensors.

    kind: "equal", "DIFFERS", "refused", or "crashed" for an error that is none of SENTENCES. apart:
    the largest relative difference. says: where it is, or the error.
    """

    rule: str
    way: str
    model: str
    kind: str
    apart: float = 0.0
    says: str = ""

    def __str__(self) -> str:
        head = f"{self.rule}, by {self.way}, on {self.model}: {self.kind}"
        return f"{head} x {self.apart:.1e} in {self.says}" if self.apart else f"{head} {self.says}"


def tolerance(row: Row, model: Model) -> float:
    """How far two ends may be apart: for bfloat16 one rounding, for float64 a part of float32's."""
    if model.dtype is torch.bfloat16:
        return max(2.0**-8, row.tolerance)
    return row.tolerance * (1e-4 if model.dtype is torch.float64 else 1.0)


def outcomes(
    row: Row, models: Sequence[str] = tuple(MODELS), ways: Sequence[str] = tuple(WAYS)
) -> Iterator[Outcome]:
    """Every way on every set of tensors that the rule takes."""
    for name in models:
        if name in row.without:
            continue
        model = MODELS[name]
        expected = naive(row, model)
        for way in ways:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of steps that run eagerly, and why
                    found = WAYS[way](row.build(), model)
            except Exception as error:
                says = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                kind = "refused" if isinstance(error, SENTENCES) else "crashed"
                yield Outcome(row.name, way, name, kind, says=says)
                continue
            apart, where = worst(found, expected)
            kind = "equal" if apart <= tolerance(row, model) else "DIFFERS"
            yield Outcome(row.name, way, name, kind, apart, where)


def cell(found: Sequence[Outcome]) -> str:
    """What a way makes of a rule on all sets: the worst of it."""
    apart = [x.apart for x in found if x.kind == "DIFFERS"]
    if apart:
        return f"DIFFERS x {max(apart):.0e}"
    kinds = {x.kind for x in found}
    return next((kind for kind in ("crashed", "refused") if kind in kinds), "equal")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Rules without flags, in four ways.")
    parser.add_argument("--only", nargs="+", default=list(ROWS), metavar="RULE")
    parser.add_argument("--sets", nargs="+", default=list(MODELS), choices=[*MODELS, "bar"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--file", type=Path, help="for each outcome that is not equal, a line")
    args = parser.parse_args()
    models = [x for name in args.sets for x in (BAR if name == "bar" else (name,))]
    torch.set_num_threads(1)
    width = max(len(name) for name in args.only)
    count: collections.Counter[str] = collections.Counter()
    bad: list[Outcome] = []
    say = functools.partial(print, flush=True)
    say(" | ".join(["rule".ljust(width), *[way.ljust(24) for way in args.ways], "seconds"]))
    for name in args.only:
        start = time.perf_counter()
        found = list(outcomes(ROWS[name], models, args.ways))
        cells = [cell([x for x in found if x.way == way]) for way in args.ways]
        seconds = f"{time.perf_counter() - start:.1f}"
        say(" | ".join([name.ljust(width), *[x.ljust(24) for x in cells], seconds]))
        for kind in ("DIFFERS", "refused", "crashed"):
            count[kind] += any(x.startswith(kind) for x in cells)
        bad += [x for x in found if x.kind != "equal"]
    if args.file:
        args.file.write_text("".join(f"{x}\n" for x in bad))
    silent = [x for x in bad if x.kind == "DIFFERS"]
    say(
        f"{len(args.only)} rules: {count['DIFFERS']} differ silently in some way, "
        f"{count['refused']} are refused, {count['crashed']} crash; of all outcomes {len(silent)} "
        "differ."
    )


if __name__ == "__main__":
    main()
