"""Writes authors.json: where the optimizers of the authors' packages go. test_authors.py reads it.

    pip install --no-deps adabelief-pytorch adam-mini came-pytorch dadaptation dog-optimizer \
        lion-pytorch madgrad momo-opt prodigyopt pytorch_optimizer schedulefree timm torch-adopt \
        torch-optimi colorama tabulate
    python tests/support/reference/make_authors.py [name ...]

A row here and a row of the same name there are one comparison. With names, only these rows are
made anew. Arguments that are not defaults on both sides stand in both files. Where authors have no
package, a port that does as their code does is in its place.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import types
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


def part_of(package: str, name: str, **hyper: Any) -> tuple[str, Callable[[Any], Any]]:
    """The same without importing the packages around its module, which ask for others."""
    make = of(package, name, **hyper)[1]

    def made(params: Any) -> Any:
        at = importlib.metadata.distribution(package).locate_file(package)
        path, parent = Path(str(at)), package
        for step in name.split(".")[1:-1]:
            stand_in = sys.modules.setdefault(parent, types.ModuleType(parent))
            stand_in.__path__ = [str(path)]
            path, parent = path / step, f"{parent}.{step}"
        return make(params)

    return package, made


ADAM: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
LARS: dict[str, Any] = {"lr": 1.0, "momentum": 0.8, "weight_decay": 0.1, "trust_coeff": 0.05}
FREE: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": 0.1}


def adam_mini(params: Any) -> Any:
    """Its blocks go by names: entries, rows, one block."""
    module = importlib.import_module("adam_mini")
    named = list(zip(("bias", "mlp", "other"), params, strict=True))
    hyper = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0}
    return module.Adam_mini(named, **hyper, verbose=False)


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
    "adabelief": of(
        "adabelief-pytorch",
        "adabelief_pytorch.AdaBelief",
        **{"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        print_change_log=False,
    ),
    "adabelief-plain": of(
        "adabelief-pytorch",
        "adabelief_pytorch.AdaBelief",
        **{"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        **{"print_change_log": False, "rectify": False},
    ),
    "adam_mini": ("adam-mini", adam_mini),
    "adan": of(
        "pytorch_optimizer",
        "pytorch_optimizer.Adan",
        **{"lr": 0.05, "betas": (0.9, 0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "ademamix": of(
        "pytorch_optimizer",
        "pytorch_optimizer.AdEMAMix",
        **{"lr": 0.05, "betas": (0.8, 0.95, 0.99), "eps": 1e-3, "alpha": 2.0},
    ),
    "adopt": of(
        "torch-adopt",
        "adopt.ADOPT",
        **{"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adopt-decoupled": of(
        "torch-adopt",
        "adopt.ADOPT",
        **{"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        decouple=True,
    ),
    "came": of(
        "came-pytorch",
        "came_pytorch.CAME",
        **{"lr": 0.05, "betas": (0.8, 0.95, 0.9), "eps": (1e-3, 1e-3), "weight_decay": 0.1},
        clip_threshold=0.7,
    ),
    "lion": of(
        "lion-pytorch",
        "lion_pytorch.Lion",
        **{"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ),
    "madgrad": of(
        "madgrad",
        "madgrad.MADGRAD",
        **{"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "eps": 1e-3},
    ),
    "yogi": of(
        "pytorch_optimizer",
        "pytorch_optimizer.Yogi",
        **{"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "lamb": part_of("timm", "timm.optim.lamb.Lamb", **ADAM),
    "lamb-clipped": part_of(
        "timm", "timm.optim.lamb.Lamb", **ADAM, trust_clip=True, max_grad_norm=None
    ),
    "lamb-always": part_of(
        "timm", "timm.optim.lamb.Lamb", **{**ADAM, "weight_decay": 0.0}, always_adapt=True
    ),
    "lars": part_of("timm", "timm.optim.lars.Lars", **LARS),
    "lars-nesterov": part_of("timm", "timm.optim.lars.Lars", **LARS, nesterov=True),
    "novograd": part_of("timm", "timm.optim.nvnovograd.NvNovoGrad", **ADAM),
    "stable_adamw": of("torch-optimi", "optimi.StableAdamW", **ADAM),
    "fromage": of("pytorch_optimizer", "pytorch_optimizer.Fromage", lr=0.05),
    "fromage-bounded": of("pytorch_optimizer", "pytorch_optimizer.Fromage", lr=0.05, p_bound=1.05),
    "sm3": of("pytorch_optimizer", "pytorch_optimizer.SM3", lr=0.1, momentum=0.8, eps=1e-30),
    "soap": of("pytorch_optimizer", "pytorch_optimizer.SOAP", **ADAM, precondition_frequency=5),
    "prodigy": of("prodigyopt", "prodigyopt.Prodigy", **FREE, d0=1e-3),
    "prodigy-corrected": of(
        "prodigyopt",
        "prodigyopt.Prodigy",
        **{**FREE, "d0": 1e-3, "beta3": 0.9, "d_coef": 0.7, "growth_rate": 1.1},
        **{"decouple": False, "use_bias_correction": True, "safeguard_warmup": True, "lr": 0.5},
    ),
    "dadapt_adam": of("dadaptation", "dadaptation.DAdaptAdam", **FREE, d0=1e-3),
    "dadapt_adam-corrected": of(
        "dadaptation",
        "dadaptation.DAdaptAdam",
        **{**FREE, "d0": 1e-3, "growth_rate": 1.1, "decouple": True},
        **{"use_bias_correction": True, "lr": 0.5},
    ),
    "dog": of("dog-optimizer", "dog.DoG", reps_rel=1e-3, weight_decay=0.1),
    "dog-eta": of("dog-optimizer", "dog.DoG", init_eta=0.01),
    "momo": of("momo-opt", "momo.Momo", weight_decay=0.1),
    "momo-fstar": of("momo-opt", "momo.Momo", lr=0.5, bias_correction=True, use_fstar=True),
    "momo_adam": of("momo-opt", "momo.MomoAdam", **FREE, lr=0.5),
    "momo_adam-fstar": of("momo-opt", "momo.MomoAdam", **FREE, lr=0.5, use_fstar=True),
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
