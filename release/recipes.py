"""The recipes whose kernels a wheel brings: torch's optimizers, and what is asked for most.

Run by `release/wheel.py`, with the folder that the package must come from.
"""

from __future__ import annotations

import sys

import torch

import functional_optim as fo
from functional_optim.warmup import warm

FLOATS = (torch.float32,)
BOTH = (torch.float32, torch.bfloat16)


def clipped(tx: fo.GradientTransformation) -> fo.GradientTransformation:
    return fo.chain(fo.clip_by_global_norm(1.0), tx)


RECIPES = [
    (fo.adamw(), BOTH),
    (fo.adamw(amsgrad=True), FLOATS),
    (fo.adam(), BOTH),
    (fo.adam(weight_decay=0.1), FLOATS),
    (fo.sgd(), BOTH),
    (fo.sgd(momentum=0.9), BOTH),
    (fo.sgd(momentum=0.9, nesterov=True), FLOATS),
    (fo.sgd(momentum=0.9, weight_decay=0.1), FLOATS),
    (fo.sgd(momentum=0.9, nesterov=True, weight_decay=0.1), FLOATS),
    (fo.adagrad(), FLOATS),
    (fo.adadelta(), FLOATS),
    (fo.adamax(), FLOATS),
    (fo.asgd(), FLOATS),
    (fo.nadam(), FLOATS),
    (fo.radam(), FLOATS),
    (fo.rmsprop(), FLOATS),
    (fo.rmsprop(momentum=0.9), FLOATS),
    (fo.rprop(), FLOATS),
    (fo.adafactor(), FLOATS),
    (fo.lion(), FLOATS),
    (fo.lamb(), FLOATS),
    (fo.muon_adamw(), FLOATS),
    (fo.prodigy(), FLOATS),
    (fo.schedule_free_adamw(), FLOATS),
    (clipped(fo.adamw()), BOTH),
    (clipped(fo.adam()), FLOATS),
    (clipped(fo.sgd(momentum=0.9)), FLOATS),
    (fo.chain(clipped(fo.adamw()), fo.params_ema(0.999)), FLOATS),
]


def main(root: str) -> None:
    if not str(fo.__file__).startswith(root):
        raise SystemExit(f"the package comes from {fo.__file__}, not from {root}.")
    for i, (tx, dtypes) in enumerate(RECIPES):
        unkept = [x for x in warm(tx, dtypes) if x.unkept]
        if unkept:
            raise SystemExit(f"recipe {i} has kernels that cannot be kept: {unkept}.")


if __name__ == "__main__":
    main(sys.argv[1])
