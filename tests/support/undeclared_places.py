"""Rules with the order of elements, their places, the shape of the tensor, or matrix products.

They have no slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from undeclared_table import PRODUCTS, rule

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
