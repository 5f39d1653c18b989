"""Rules with numbers of a whole tensor, of its rows or columns, or of the parameter: norms, means.

They have no slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from undeclared_table import PRODUCTS, rule

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
