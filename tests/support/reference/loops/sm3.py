"""Anil et al. 2019, SM3-II, with the cover of a tensor by its slices, entry by entry."""

from __future__ import annotations

import numpy as np


def sm3(p, grads, lr, momentum=0.9, eps=1e-30, maximize=False):
    rank, m = p.ndim, np.zeros_like(p)
    mu = [np.zeros(size) for size in p.shape]
    total = np.zeros_like(p)
    for g in grads:
        g = -g if maximize else g
        if rank < 2:
            nu = total = total + g**2
        else:
            nu, new = np.zeros_like(p), [np.zeros(size) for size in p.shape]
            for at in np.ndindex(p.shape):
                nu[at] = min(mu[r][at[r]] for r in range(rank)) + g[at] ** 2
                for r in range(rank):
                    new[r][at[r]] = max(new[r][at[r]], nu[at])
            mu = new
        m = momentum * m + (1 - momentum) * g / np.sqrt(nu + eps)
        p = p - lr * m
    return p
