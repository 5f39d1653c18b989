"""Rules that compute in half types, or with numbers of the step that are no floats.

`u` is of float32 for a parameter of a half type, so each rule casts by itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from undeclared_table import rule

HALVES = (torch.bfloat16, torch.float16)


@rule()
def norms_in_half(u, slots, p):
    x = (200 * u).half()
    found = x.norm() + x.norm(1) + x.norm(dim=-1, keepdim=True)
    return u + found.float().clamp(max=6e4) / 2e4, slots


@rule()
def softmax_in_half(u, slots, p):
    x = u.bfloat16().reshape(-1)
    return u + (x.softmax(0) + F.log_softmax(x, 0)).float().reshape(u.shape), slots


@rule()
def spread_in_half(u, slots, p):
    x = (300 * u).half()
    return u + (x.var(correction=0).sqrt() + x.std(correction=0)).float() / 300, slots


@rule()
def places_in_half(u, slots, p):
    found = [torch.arange(u.numel(), dtype=dtype).float() for dtype in HALVES]
    return u + 1e-4 * sum(found).reshape(u.shape), slots


@rule()
def sums_in_half(u, slots, p):
    x = torch.full_like(u, 1.003)
    return u + x.sum(dtype=torch.bfloat16).float() / u.numel() + x.mean(dtype=torch.half), slots


@rule()
def sums_of_whole_parts(u, slots, p):
    return u + (10 * u).sum(dtype=torch.int64), slots


@rule(scalars=lambda t: (0.1,))
def half_beside_numbers(u, slots, p, number):
    found = u
    for dtype in HALVES:
        x = torch.full_like(u, 0.1).to(dtype)
        found = found + (x == 0.1) + (x == number) + (x + 0.1003).float() + (x * 0.1003).float()
        found = found + 2 * (x >= number) + (x - number).float() + (number - x).float()
    return found, slots


@rule(scalars=lambda t: (3, True, 0.5))
def numbers_that_are_whole(u, slots, p, k, flag, x):
    n = ((u > 0).long() + 1_000_000_001) * k + k - 3_000_000_006
    found = n + ((u > 0) + flag) + k / 7 + flag * x + 2 * k + (k + flag) * x
    return u + found.to(u.dtype), slots


@rule(scalars=lambda t: (t if t < 2 else int(t),))
def a_number_that_becomes_whole(u, slots, p, k):
    return u + ((u > 0).long() + k).to(u.dtype) * (k / 7), slots


@rule(scalars=lambda t: (0.3,))
def bounds_of_which_one_is_a_number(u, slots, p, bound):
    x = u.clamp(0.0, bound) + u.clamp(min=-0.1, max=bound) + torch.clip(u, bound, 2.0)
    return x + u.clamp(-bound, bound) + u.clamp(max=bound), slots


@rule(scalars=lambda t: (0.3,))
def fills_by_a_number(u, slots, p, number):
    return u.masked_fill(u > 0, number) + torch.masked_fill(u, u < 0, value=number), slots


@rule(scalars=lambda t: (3, 5, True))
def an_int_number_that_divides(u, slots, p, n, total, flag):
    return u * (1 / n) + u * n**-0.5 + u * (1 - n / total) * (1.0 / (total - n)) * flag, slots


@rule(scalars=lambda t: (0.3,))
def numbers_beside_bools(u, slots, p, number):
    x, y = (u > 0) * number, torch.where(u > 0, number, 0.0)
    found = u / x.clamp(min=torch.finfo(x.dtype).eps) + u / y.clamp(min=torch.finfo(y.dtype).eps)
    return 1e-7 * found + u * (u.norm() * number) + y * (u > 0).sum() * number, slots
