"""Rules that do another thing to large tensors, and rules that ask more of a tensor than numbers.

Rules are recorded on tensors of at most a few hundred elements; each of these does something else
to them than to the large tensors of the table.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple

import torch
from undeclared_table import rule

MANY = 1000
"""Between the elements of recorded tensors and those of large ones."""


class Kept(NamedTuple):
    kept: Any


def in_order(u, order):
    """A softmax over the last of permuted dimensions."""
    x = u.permute(order)
    return (x / (1 + x.abs().sum(-1, keepdim=True))).permute(
        [order.index(i) for i in range(u.dim())]
    )


@rule()
def permuted_by_size(u, slots, p):
    order = [*range(u.dim())]
    if u.numel() > MANY:
        order.reverse()
    return in_order(u, order), slots


@rule()
def joined_by_size(u, slots, p):
    if u.dim() < 2:
        return u, slots
    x = u.reshape(len(u), -1) if u.numel() > MANY else u.reshape(-1, u.shape[-1])
    return (x / (1 + x.abs().sum(-1, keepdim=True))).reshape(u.shape), slots


@rule()
def filled_by_size(u, slots, p):
    count = u.shape[0 if u.numel() > MANY else -1] if u.dim() else 3
    return u + 0.01 * torch.ones(count).sum(), slots


@rule()
def places_by_size(u, slots, p):
    count = u.shape[0 if u.numel() > MANY else -1] if u.dim() else 3
    return u * torch.arange(count).sum().sqrt(), slots


@rule()
def reduced_by_size(u, slots, p):
    dims = (0,) if u.numel() > MANY else (-1,)
    return u - u.mean(dims, keepdim=True), slots


@rule()
def counts_rows_by_unbind(u, slots, p):
    return u * len(u.reshape(-1, 2 if u.numel() % 2 == 0 else 1).unbind(0)), slots


@rule()
def counts_rows_as_they_come(u, slots, p):
    return u * sum(1 for _ in u.flatten()), slots


@rule()
def counts_pieces(u, slots, p):
    return u * len(u.flatten().split(4)), slots


@rule()
def asks_whether_sizes_are_the_same(u, slots, p):
    return u * (2.0 if u.is_same_size(u.mT if u.dim() == 2 else u) else 0.5), slots


@rule()
def counts_bytes(u, slots, p):
    return u * (2.0 if u.nbytes > 8 * MANY else 0.5), slots


@rule()
def catches_an_error_of_sizes(u, slots, p):
    with contextlib.suppress(RuntimeError):
        return u * u.reshape(3, -1).shape[1], slots
    return 0.5 * u, slots


@rule()
def asks_whether_it_is_contiguous(u, slots, p):
    return u * (1.0 if p.is_contiguous() else 3.0), slots


@rule()
def reads_strides(u, slots, p):
    return u * sum(p.stride()), slots


@rule()
def reads_an_attribute_that_none_has(u, slots, p):
    return u * getattr(p, "lr_mult", 0.5), slots


def by_size(p):
    return Kept(p.new_zeros(p.shape[::-1] if p.numel() > MANY else [1] * p.dim()))


@rule(init=by_size)
def a_slot_whose_shape_depends_on_the_size(u, slots, p):
    kept = slots.kept + 1
    return u * kept.mean(), Kept(kept)


@rule(init=lambda p: Kept(p.new_zeros(min(p.shape, default=1))))
def a_slot_of_the_smaller_side(u, slots, p):
    kept = slots.kept + 1
    return u * kept.sum(), Kept(kept)


@rule(init=lambda p: Kept(torch.zeros(11)))
def a_slot_of_the_size_of_a_recorded_one(u, slots, p):
    kept = slots.kept + 1
    return u * kept.sum(), Kept(kept)


@rule()
def constants_of_the_size_of_a_recorded_one(u, slots, p):
    return u * torch.ones(11).sum().sqrt() + torch.arange(17).sum() / 100, slots


@rule(scalars=lambda t: (2.5,))
def counts_beside_a_number(u, slots, p, least):
    return u * ((u > 0).sum(-1, keepdim=True) >= least), slots


@rule(scalars=lambda t: (0.5,))
def a_mask_times_a_number(u, slots, p, lr):
    x = (u > 0) * lr
    return u.clamp(min=torch.finfo(x.dtype).eps) + x, slots


@rule()
def any_of_no_dimension(u, slots, p):
    return u * (u > 0).any(dim=()), slots


@rule()
def a_row_written_into_a_matrix(u, slots, p):
    row = u.mean(0) if u.dim() else u
    return u + 1e-3 * torch.zeros_like(u).copy_(row).sum(-1, keepdim=True), slots


@rule()
def a_variance_of_few(u, slots, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are none left
        return u + 1 / (1 + u.var(dim=-1, correction=40, keepdim=True)), slots


@rule(scalars=lambda t: (0.5,) * int(t))
def more_numbers_in_each_step(u, slots, p, *numbers):
    return u * sum(numbers), slots


@rule(scalars=lambda t: (0.5,))
def the_root_by_a_number(u, slots, p, half):
    return u + u.abs() ** half, slots


@rule(scalars=lambda t: (0.3,))
def numbers_where_torch_takes_python_numbers(u, slots, p, lr):
    x = torch.add(u, p, alpha=lr) + torch.full_like(u, lr) + u.new_full(u.shape, lr)
    return torch.addcmul(x.sub(p, alpha=lr), u, p, value=lr), slots


@rule()
def integers(u, slots, p):
    n = (1e6 * u).long() & 0xFFFFFF
    m = torch.addcmul(torch.add(n, n, alpha=3), n, n) + n.round() + (n >> 70) + (n << (n & 127))
    return u + ((m + n**3) & 0xFF).to(u.dtype), slots


@rule()
def powers_of_integers(u, slots, p):
    n = (10 * u).int() & 7
    return u + (n**5 + 3**n + n**n).to(u.dtype), slots


@rule()
def bits_of_another_size(u, slots, p):
    return (2 * u).reshape(-1).view(torch.int8).view(u.dtype).reshape(u.shape), slots


@rule()
def mapped_over_rows(u, slots, p):
    return torch.vmap(lambda row: row / (1 + row.norm()))(u if u.dim() else u[None]).reshape(
        u.shape
    ), slots
