"""Rules with slots, measurements over all tensors, scalars, hyperparameters or carried numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from undeclared_table import PRODUCTS, rule

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


# --- slots that keep other tensors


class Two(NamedTuple):
    first: Any
    second: Any


def two(p):
    return Two(torch.zeros_like(p), torch.ones_like(p))


@rule(init=two)
def keeps_the_last_gradient_and_the_last_parameter(u, slots, p):
    x = u.flatten().sort().values.reshape(u.shape)
    return -0.1 * (x + slots.first + slots.second), Two(u, p)


@rule(init=two)
def swaps_its_slots(u, slots, p):
    return -0.1 * (u.sort(-1).values + slots.first), Two(slots.second, slots.first)


@rule(init=two)
def swaps_its_slots_by_element(u, slots, p):
    return -0.1 * (u + slots.first), Two(slots.second, u + p)


@rule(init=size)
def keeps_one_number(u, slots, p):
    return u * (1 + slots.size), Size(slots.size + 1)


class Whole(NamedTuple):
    count: Any
    seen: Any


def whole(p):
    like = torch.view_as_real(p) if p.is_complex() else p
    return Whole(torch.full(like.shape, 2**24), torch.zeros(like.shape, dtype=torch.bool))


@rule(init=whole)
def slots_of_integers_and_bools(u, slots, p):
    count = slots.count + 1
    x = torch.where(slots.seen, 2 * u, u) * (1 + (count & 1)) + (count - 2**24)
    return x, Whole(count, slots.seen | ~slots.seen)


# --- numbers of columns, and numbers of these


@rule()
def columns_and_a_number_of_all_of_them(u, slots, p):
    c = u.abs().sum(0, keepdim=True) if u.dim() else u.abs()
    return u + c * (c > 0.5).any().to(u.dtype).clamp(0, 1) + c / c.mean(), slots


@rule()
def functions_of_columns(u, slots, p):
    c = u.sum(0, keepdim=True) if u.dim() else u
    return u + c.tanh() + c.sin() + torch.atan2(c, c + 1) + c.exp().log1p(), slots
