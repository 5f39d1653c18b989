"""Fifty steps in float64 go where those of the authors' own packages go.

A row is one comparison. This file is a program, too, which writes down where the packages go:

    pip install --no-deps adabelief-pytorch adam-mini came-pytorch dadaptation dog-optimizer \
        lion-pytorch madgrad momo-opt prodigyopt pytorch_optimizer schedulefree timm torch-adopt \
        torch-optimi colorama tabulate
    PYTHONPATH=tests/support python tests/algorithms/test_authors.py [name ...]

With names, only these rows are made anew. Where authors have no package, a port that does as their
code does is in its place.
"""

import importlib
import importlib.metadata
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference import waves, write

import functional_optim as fo

FILE = Path(__file__).parents[1] / "support" / "reference" / "authors.json"
FOUND = json.loads(FILE.read_text())["rows"]


class Row(NamedTuple):
    """ours: a recipe. theirs: a package of the registry, and the module and class of an optimizer.

    both: arguments that have one name. own, its: those that only one side has.
    """

    ours: Callable[..., fo.GradientTransformation]
    theirs: str
    both: dict[str, Any]
    own: dict[str, Any]
    its: dict[str, Any]

    def tx(self) -> fo.GradientTransformation:
        return self.ours(**self.both, **self.own)

    def optimizer(self, params: list[Any]) -> Any:
        package, _, path = self.theirs.partition(":")
        module, _, name = path.rpartition(".")
        if package == "timm":
            alone(package, module)
        hyper = {**self.both, **self.its}
        if package == "adam-mini":  # its blocks go by names: entries, rows, one block
            params = list(zip(("bias", "mlp", "other"), params, strict=True))
        return getattr(importlib.import_module(module), name)(params, **hyper)


def alone(package: str, module: str) -> None:
    """Make a module importable without the packages around it, which ask for others."""
    path, parent = Path(str(importlib.metadata.distribution(package).locate_file(package))), package
    for step in module.split(".")[1:]:
        stand_in = sys.modules.setdefault(parent, types.ModuleType(parent))
        stand_in.__path__ = [str(path)]
        path, parent = path / step, f"{parent}.{step}"


def row(ours: Any, theirs: str, own: Any = None, its: Any = None, **both: Any) -> Row:
    return Row(ours, theirs, both, own or {}, its or {})


ADAM: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3}
DECAYED: dict[str, Any] = {**ADAM, "weight_decay": 0.1}
THREE: dict[str, Any] = {**DECAYED, "betas": (0.9, 0.8, 0.95)}
FREE: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": 0.1}
SLOW: dict[str, Any] = {**ADAM, "betas": (0.8, 0.95, 0.99)}
LARS: dict[str, Any] = {"lr": 1.0, "momentum": 0.8, "weight_decay": 0.1}
TRUST: dict[str, Any] = {"own": {"trust_coefficient": 0.05}, "its": {"trust_coeff": 0.05}}
GROWN: dict[str, Any] = {**FREE, "lr": 0.5, "d0": 1e-3, "growth_rate": 1.1}
GROWN |= {"use_bias_correction": True}
BLOCKS = {"0": "element", "1": "row", "2": "tensor"}
QUIET = {"print_change_log": False}
BELIEF = (fo.adabelief, "adabelief-pytorch:adabelief_pytorch.AdaBelief")
ADAN = (fo.adan, "pytorch_optimizer:pytorch_optimizer.Adan")
ADOPT = (fo.adopt, "torch-adopt:adopt.ADOPT")
DADAPT = (fo.dadapt_adam, "dadaptation:dadaptation.DAdaptAdam")
DOG = (fo.dog, "dog-optimizer:dog.DoG")
FREE_ADAMW = (fo.schedule_free_adamw, "schedulefree:schedulefree.AdamWScheduleFree")
FROMAGE = (fo.fromage, "pytorch_optimizer:pytorch_optimizer.Fromage")
IN_TIMM = (fo.lamb, "timm:timm.optim.lamb.Lamb")
MOMO = (fo.momo, "momo-opt:momo.Momo")
MOMO_ADAM = (fo.momo_adam, "momo-opt:momo.MomoAdam")
PRODIGY = (fo.prodigy, "prodigyopt:prodigyopt.Prodigy")
MINI = (fo.adam_mini, "adam-mini:adam_mini.Adam_mini")
CAME = (fo.came, "came-pytorch:came_pytorch.CAME")
FREE_SGD = (fo.schedule_free_sgd, "schedulefree:schedulefree.SGDScheduleFree")
FACTORED: dict[str, Any] = {"eps": (1e-3, 1e-3), "weight_decay": 0.1}
SUMMED, RISING = {"lr": 0.05, "momentum": 0.8}, {"warmup_steps": 5}
ADOPTED, GUARDED = {"decoupled_weight_decay": True}, {"d_coef": 0.7, "safeguard_warmup": True}
STABLE = (fo.stable_adamw, "torch-optimi:optimi.StableAdamW")

ROWS = {
    "adabelief": row(*BELIEF, its=QUIET, **DECAYED),
    "adabelief-plain": row(*BELIEF, its=QUIET, **DECAYED, rectify=False),
    "adam_mini": row(
        *MINI, own={"blocks": BLOCKS}, its={"verbose": False}, **ADAM, weight_decay=0.0
    ),
    "adan": row(*ADAN, **THREE),
    "adan-no-prox": row(*ADAN, own={"no_prox": True}, its={"weight_decouple": True}, **THREE),
    "ademamix": row(fo.ademamix, "pytorch_optimizer:pytorch_optimizer.AdEMAMix", **SLOW),
    "adopt": row(*ADOPT, **DECAYED),
    "adopt-decoupled": row(*ADOPT, own=ADOPTED, its={"decouple": True}, **DECAYED),
    "came": row(*CAME, lr=0.05, betas=(0.8, 0.95, 0.9), **FACTORED, clip_threshold=0.7),
    "dadapt_adam": row(*DADAPT, **FREE, d0=1e-3),
    "dadapt_adam-corrected": row(*DADAPT, **GROWN, decouple=True),
    "dog": row(*DOG, reps_rel=1e-3, weight_decay=0.1),
    "dog-eta": row(*DOG, init_eta=0.01),
    "fromage": row(*FROMAGE, lr=0.05),
    "fromage-bounded": row(*FROMAGE, lr=0.05, p_bound=1.05),
    "lamb": row(*IN_TIMM, **DECAYED),
    "lamb-clipped": row(*IN_TIMM, **DECAYED, trust_clip=True, max_grad_norm=None),
    "lamb-always": row(*IN_TIMM, **ADAM, weight_decay=0.0, always_adapt=True),
    "lars": row(fo.lars, "timm:timm.optim.lars.Lars", **TRUST, **LARS),
    "lars-nesterov": row(fo.lars, "timm:timm.optim.lars.Lars", **TRUST, **LARS, nesterov=True),
    "lion": row(fo.lion, "lion-pytorch:lion_pytorch.Lion", lr=0.05, **FREE),
    "madgrad": row(fo.madgrad, "madgrad:madgrad.MADGRAD", **SUMMED, weight_decay=0.1, eps=1e-3),
    "momo": row(*MOMO, weight_decay=0.1),
    "momo-bound": row(*MOMO, lr=0.3, weight_decay=0.1, beta=0.8, lb=0.5),
    "momo-fstar": row(*MOMO, lr=0.5, bias_correction=True, use_fstar=True),
    "momo-fstar-bound": row(*MOMO, lr=0.5, use_fstar=True, lb=0.5),
    "momo_adam": row(*MOMO_ADAM, **FREE, lr=0.5),
    "momo_adam-bound": row(*MOMO_ADAM, **FREE, lr=0.5, lb=0.5, eps=1e-3),
    "momo_adam-fstar": row(*MOMO_ADAM, **FREE, lr=0.5, use_fstar=True),
    "novograd": row(fo.novograd, "timm:timm.optim.nvnovograd.NvNovoGrad", **DECAYED),
    "prodigy": row(*PRODIGY, **FREE, d0=1e-3),
    "prodigy-corrected": row(*PRODIGY, **GROWN, beta3=0.9, **GUARDED, decouple=False),
    "schedule_free_sgd": row(*FREE_SGD, lr=0.2, momentum=0.8, weight_decay=0.1, **RISING, r=1.0),
    "schedule_free_adamw": row(*FREE_ADAMW, lr=0.05, **FREE, warmup_steps=5),
    "schedule_free_adamw-power": row(*FREE_ADAMW, lr=0.05, **FREE, **RISING, weight_lr_power=1.5),
    "sm3": row(fo.sm3, "pytorch_optimizer:pytorch_optimizer.SM3", lr=0.1, momentum=0.8, eps=1e-30),
    "soap": row(
        fo.soap, "pytorch_optimizer:pytorch_optimizer.SOAP", **DECAYED, precondition_frequency=5
    ),
    "stable_adamw": row(*STABLE, its={"triton": False}, **DECAYED),
    "yogi": row(fo.yogi, "pytorch_optimizer:pytorch_optimizer.Yogi", **DECAYED),
}
TOLERANCE: dict[str, float] = {"soap": 1e-5}
"""Where the authors' numbers are rounded to float32 on their way: SOAP's decompositions."""


def start() -> list[torch.Tensor]:
    return [torch.as_tensor(x) for x in waves.leaves(waves.params())]


@pytest.mark.parametrize("name", ROWS)
def test_fifty_steps_are_those_of_the_authors(name):
    tx, params, tolerance = ROWS[name].tx(), start(), TOLERANCE.get(name, 1e-12)
    state = tx.init(params)
    for step in range(1, waves.STEPS + 1):
        value, slopes = waves.downhill(step, [p.numpy() for p in params])
        grads = [torch.as_tensor(g) for g in slopes]
        extra = {"value": value} if "value" in tx.extra else {}
        updates, state = tx.update(grads, state, params, **extra)
        params = fo.apply_updates(params, updates)
        for p, wanted in zip(params, FOUND[name].get(str(step), params), strict=True):
            wanted = torch.as_tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(p, wanted, rtol=tolerance, atol=tolerance)


def test_every_row_is_written_down():
    assert ROWS.keys() == FOUND.keys()
    assert all(set(steps) == {str(n) for n in waves.KEPT} for steps in FOUND.values())


# ---------------------------------------------------------------- where the packages go
def trajectory(row: Row) -> dict[str, Any]:
    """The parameters after some steps of theirs."""
    params = [torch.nn.Parameter(p) for p in start()]
    opt = row.optimizer(params)
    if hasattr(opt, "train"):
        opt.train()
    found = {}
    for step in range(1, waves.STEPS + 1):
        value, grads = waves.downhill(step, [p.detach().numpy() for p in params])
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.as_tensor(g).clone()
        opt.step(lambda value=value: torch.tensor(value))
        if step in waves.KEPT:
            found[str(step)] = [p.detach().tolist() for p in params]
    return found


def main(names: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    found = {name: trajectory(ROWS[name]) for name in names or ROWS}
    packages = {row.theirs.partition(":")[0] for row in ROWS.values()}
    versions = {package: importlib.metadata.version(package) for package in sorted(packages)}
    rows = {name: x for name, x in sorted({**FOUND, **found}.items()) if name in ROWS}
    write(FILE, {"versions": versions}, rows=rows)


if __name__ == "__main__":
    main(sys.argv[1:])
