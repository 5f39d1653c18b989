"""Writes authors.json: where the optimizers of the authors' packages go. test_authors.py reads it.

    pip install --no-deps schedulefree prodigyopt dadaptation dog-optimizer momo-opt
    python tests/support/reference/make_authors.py [name ...]

A row here and a row of the same name there are one comparison. With names, only these rows are
made anew. Arguments that are not defaults on both sides stand in both files.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from reference import waves

FILE = Path(__file__).with_name("authors.json")


def of(package: str, name: str, **hyper: Any) -> tuple[str, Callable[[Any], Any]]:
    """A package of the registry, and how its optimizer is made. name: of module and class."""
    module, _, cls = name.rpartition(".")
    return package, lambda params: getattr(importlib.import_module(module), cls)(params, **hyper)


ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": 0.1}

ROWS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "schedule_free_sgd": of(
        "schedulefree",
        "schedulefree.SGDScheduleFree",
        **{"lr": 0.2, "momentum": 0.8, "weight_decay": 0.1, "warmup_steps": 5, "r": 1.0},
    ),
    "schedule_free_adamw": of(
        "schedulefree",
        "schedulefree.AdamWScheduleFree",
        **{"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, "warmup_steps": 5},
    ),
    "prodigy": of("prodigyopt", "prodigyopt.Prodigy", **ADAM, d0=1e-3),
    "prodigy-corrected": of(
        "prodigyopt",
        "prodigyopt.Prodigy",
        **{**ADAM, "d0": 1e-3, "beta3": 0.9, "d_coef": 0.7, "growth_rate": 1.1},
        **{"decouple": False, "use_bias_correction": True, "safeguard_warmup": True, "lr": 0.5},
    ),
    "dadapt_adam": of("dadaptation", "dadaptation.DAdaptAdam", **ADAM, d0=1e-3),
    "dadapt_adam-corrected": of(
        "dadaptation",
        "dadaptation.DAdaptAdam",
        **{**ADAM, "d0": 1e-3, "growth_rate": 1.1, "decouple": True},
        **{"use_bias_correction": True, "lr": 0.5},
    ),
    "dog": of("dog-optimizer", "dog.DoG", reps_rel=1e-3, weight_decay=0.1),
    "dog-eta": of("dog-optimizer", "dog.DoG", init_eta=0.01),
    "momo": of("momo-opt", "momo.Momo", weight_decay=0.1),
    "momo-fstar": of("momo-opt", "momo.Momo", lr=0.5, bias_correction=True, use_fstar=True),
    "momo_adam": of("momo-opt", "momo.MomoAdam", **ADAM, lr=0.5),
    "momo_adam-fstar": of("momo-opt", "momo.MomoAdam", **ADAM, lr=0.5, use_fstar=True),
}
"""By name: the package of the registry, and its optimizer of some parameters."""


def trajectory(make: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters after some steps."""
    params = [torch.nn.Parameter(torch.as_tensor(x)) for x in waves.leaves(waves.params())]
    opt = make(params)
    if hasattr(opt, "train"):
        opt.train()
    found = {}
    for step in range(1, waves.STEPS + 1):
        now = [p.detach().numpy() for p in params]
        value, grads = waves.downhill(step, now)
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.as_tensor(g).clone()
        opt.step(lambda value=value: torch.tensor(value))
        if step in waves.KEPT:
            found[str(step)] = [p.detach().tolist() for p in params]
    return found


def main(names: list[str]) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}, "rows": {}}
    torch.set_default_dtype(torch.float64)
    for name in names or ROWS:
        package, make = ROWS[name]
        known["rows"][name] = trajectory(make)
        known["versions"][package] = importlib.metadata.version(package)
    lines = [f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(known["rows"].items())]
    body = ",\n".join(lines)
    versions = json.dumps(dict(sorted(known["versions"].items())))
    FILE.write_text(f'{{"versions": {versions},\n"rows": {{\n{body}\n}}}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
