"""Local SGD and (Streaming) DiLoCo as plain loops over a list of replicas.

Stich 2019, Algorithm 1; Douillard et al. 2023, Algorithm 1; Douillard et al. 2025, Algorithm 2.
Replicas are dicts of arrays; a gradient is `p - target`, with a target for each replica and step.
"""

import copy

import numpy as np


class AdamW:
    """Loshchilov, Hutter 2019, Algorithm 2, one leaf after the other."""

    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.m, self.v, self.t = {}, {}, 0

    def step(self, params, grads):
        self.t += 1
        b1, b2 = self.betas
        for name, g in grads.items():
            m = self.m[name] = b1 * self.m.get(name, 0.0) + (1 - b1) * g
            v = self.v[name] = b2 * self.v.get(name, 0.0) + (1 - b2) * g * g
            up = (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + self.eps)
            p = params[name]
            params[name] = p - self.lr * self.weight_decay * p - self.lr * up

    def back_to(self, old, names):
        """Forget what happened to some leaves; all of it if these are all."""
        if set(names) == set(self.m):
            self.__dict__ = copy.deepcopy(old.__dict__)
        for name in names:
            for mine, its in ((self.m, old.m), (self.v, old.v)):
                mine[name] = its.get(name, 0.0)


class Nesterov:
    """torch's SGD with momentum; nesterov looks ahead."""

    def __init__(self, lr, momentum=0.0, nesterov=False):
        self.lr, self.momentum, self.nesterov, self.b = lr, momentum, nesterov, {}

    def step(self, params, grads):
        for name, g in grads.items():
            b = self.b[name] = self.momentum * self.b[name] + g if name in self.b else g
            up = g + self.momentum * b if self.nesterov else b
            params[name] = params[name] - self.lr * up


def local_sgd(params, targets, inner, every, refused=()):
    """Parameters of all replicas after every step. targets: by step and replica."""
    replicas = [dict(params) for _ in targets[0]]
    inners = [inner() for _ in replicas]
    anchor, past = dict(params), [inner() for _ in replicas]
    seen = []
    for t, mine in enumerate(targets):
        for p, opt, target in zip(replicas, inners, mine, strict=True):
            opt.step(p, {n: p[n] - target[n] for n in p})
        if (t + 1) % every == 0:
            if t // every not in refused:
                anchor = {n: np.mean([p[n] for p in replicas], 0) for n in params}
                past = copy.deepcopy(inners)
            replicas = [dict(anchor) for _ in replicas]
            inners = copy.deepcopy(past)
        seen.append([dict(p) for p in replicas])
    return seen


def diloco(params, targets, inner, outer, every, fragments, delay, alpha, refused=()):
    """The same. fragments: lists of names."""
    replicas = [dict(params) for _ in targets[0]]
    inners = [inner() for _ in replicas]
    anchor = dict(params)
    past = [[inner() for _ in replicas] for _ in fragments]
    outers = [outer() for _ in fragments]
    turns = every // len(fragments)
    turn, vote, sent, seen = 0, 0, None, []
    for t, mine in enumerate(targets):
        for p, opt, target in zip(replicas, inners, mine, strict=True):
            opt.step(p, {n: p[n] - target[n] for n in p})
        names = fragments[turn]
        if (t + 1 + delay) % turns == 0:
            sent = {n: np.mean([anchor[n] - p[n] for p in replicas], 0) for n in names}
        if (t + 1) % turns == 0:
            taken = vote not in refused
            vote += 1
            if taken:
                outers[turn].step(anchor, sent)
                past[turn] = copy.deepcopy(inners)
            for r, p in enumerate(replicas):
                for n in names:
                    keep = alpha if taken else 0.0
                    p[n] = keep * p[n] + (1 - keep) * anchor[n]
                if not taken:
                    inners[r].back_to(past[turn][r], names)
            turn = (turn + taken) % len(fragments)
        seen.append([dict(p) for p in replicas])
    return seen
