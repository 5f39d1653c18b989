"""Loss curves of quasi-Newton methods with a matrix, each compared with L-BFGS."""

from __future__ import annotations

import functools

from trainings import Curve

import functional_optim as fo

RUNS = {
    "L-BFGS": functools.partial(
        fo.lbfgs, max_iter=4, history_size=10, line_search_fn="strong_wolfe"
    ),
    "SSBFGS": functools.partial(fo.ssbfgs, max_iter=4),
    "SSBroyden": functools.partial(fo.ssbroyden, max_iter=4),
}


def beside(*labels: str) -> Curve:
    """Full batches, by the number of evaluations."""
    return Curve(
        {label: RUNS[label] for label in labels},
        on="whole",
        asks=("value", "value_and_grad"),
        count=lambda state: int(state.func_evals),
        axis="evaluation",
        steps=100,
    )


DENSE = {
    "ssbfgs": beside("L-BFGS", "SSBFGS", "SSBroyden"),
    "ssbroyden": beside("L-BFGS", "SSBroyden", "SSBFGS"),
}
