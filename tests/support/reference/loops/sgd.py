"""Sutskever et al. 2013, with torch.optim's momentum: the learning rate stays out of the buffer."""

from __future__ import annotations

import numpy as np


def sgd(
    p, grads, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
):
    b = np.zeros_like(p)
    for t, g in enumerate(grads):
        g = (-g if maximize else g) + weight_decay * p
        b = g if t == 0 else momentum * b + (1 - dampening) * g
        p = p - lr * (g + momentum * b if nesterov else b if momentum else g)
    return p
