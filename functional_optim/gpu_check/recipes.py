"""The recipes that are checked, with hyperparameters by which a few steps go far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import functional_optim as fo
from functional_optim import warmup
from functional_optim.core.base import GradientTransformation


class CheckedRecipe(NamedTuple):
    """A recipe to check.

    make: from hyperparameters to the transformation. matrices: it takes nothing else. exact: its
    results in float32 are as near to those in float64 as rounding allows; a rule that goes through
    bfloat16 or eigenvectors is not.
    """

    name: str
    make: Callable[..., GradientTransformation]
    hyper: dict[str, Any]
    matrices: bool = False
    exact: bool = True

    def tx(self) -> GradientTransformation:
        return self.make(**self.hyper)


def row(name: str, algorithm: str, *, matrices: bool = False, **hyper: Any) -> CheckedRecipe:
    """A recipe of the package."""
    exact = INEXACT.isdisjoint((name, algorithm))
    return CheckedRecipe(name, getattr(fo, algorithm), hyper, matrices, exact)


def clipped(lr: float, max_norm: float, decay: float) -> GradientTransformation:
    """Clip, AdamW, and an average."""
    return fo.chain(fo.clip_by_global_norm(max_norm), fo.adamw(lr), fo.params_ema(decay))


def accumulated(lr: float) -> GradientTransformation:
    """A step with every second gradient."""
    return fo.accumulate(fo.adamw(lr), 2)


def parted(lr: float) -> GradientTransformation:
    """Two rules for two kinds of tensors."""
    rules = {"matrices": fo.adamw(lr), "others": fo.sgd(lr, momentum=0.9)}
    return fo.partition(rules, {"matrix*": "matrices", "*": "others"})


def packed(lr: float) -> GradientTransformation:
    """Slots in 8 bits, rounded at random by a seed."""
    return fo.stored(fo.adamw(lr), "int8")


INEXACT = frozenset(
    {"muon", "muon_adamw", "shampoo", "soap", "kl_soap", "kl_shampoo", "scion-sign"}
)
"""Algorithms and rows that go through bfloat16, through bases that rounding can turn, or through
signs of sums that cancel."""

WITHOUT = {
    "dpsgd": "needs a gradient of each sample",
    "lbfgs": "needs the loss as a function",
    "momo": "needs the loss",
    "momo_adam": "needs the loss",
}
"""Algorithms that gradients alone do not step, and why."""

SMOOTH: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3}
DECAYED: dict[str, Any] = {**SMOOTH, "weight_decay": 0.1}
NESTEROV: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SLOW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95, 0.9), "eps": 1e-3, "alpha": 1.5}
RMS: dict[str, Any] = {"lr": 0.02, "alpha": 0.9, "eps": 1e-3}
PROJECTED: dict[str, Any] = {**SMOOTH, "lr": 0.05, "weight_decay": 0.02, "update_proj_gap": 7}
ITERATED: dict[str, Any] = {"matrices": True, "ns_dtype": torch.float64}
FREE: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "radius": 2.0, "unconstrained": True}
KRON: dict[str, Any] = {"lr": 0.05, "b1": 0.8, "weight_decay": 0.1, "precond_lr": 0.3}
DISTANCE: dict[str, Any] = {**DECAYED, "lr": 0.5, "d0": 0.05}
KL: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "shampoo_beta": 0.9, "eps": 1e-3}


FREED: dict[str, Any] = {"weight_decay": 0.1, "r": 0.5}


def known() -> list[CheckedRecipe]:
    """All recipes; a public algorithm without a row of its own has its defaults."""
    table = [
        row("sgd", "sgd", lr=0.1),
        row("sgd-momentum", "sgd", lr=0.05, momentum=0.9),
        row("sgd-dampening", "sgd", lr=0.1, momentum=0.8, dampening=0.3),
        row("sgd-nesterov", "sgd", lr=0.05, momentum=0.9, nesterov=True),
        row("sgd-decay", "sgd", lr=0.05, momentum=0.9, weight_decay=0.1),
        row("sgd-maximize", "sgd", lr=0.1, weight_decay=0.1, maximize=True),
        row("adam", "adam", **SMOOTH),
        row("adam-l2", "adam", **DECAYED),
        row("adam-amsgrad", "adam", **SMOOTH, amsgrad=True),
        row("adam-maximize", "adam", **DECAYED, maximize=True),
        row("adabelief", "adabelief", **DECAYED),
        row("adabelief-plain", "adabelief", **DECAYED, rectify=False),
        row("acprop", "acprop", **DECAYED),
        row("acprop-plain", "acprop", **DECAYED, rectify=False),
        row("adamw", "adamw", **DECAYED),
        row("adamw-amsgrad", "adamw", **SMOOTH, amsgrad=True),
        row("adadelta", "adadelta", lr=0.5, rho=0.9, eps=1e-3, weight_decay=0.1),
        row("adafactor", "adafactor", lr=0.05, weight_decay=0.1),
        row("adagrad", "adagrad", lr=0.3, lr_decay=0.01, weight_decay=0.1, eps=1e-3),
        row("adam_mini", "adam_mini", **DECAYED),
        row("adamax", "adamax", **DECAYED),
        row("adamaxw", "adamaxw", **DECAYED),
        row("adan", "adan", **NESTEROV),
        row("adan-no-prox", "adan", **NESTEROV, no_prox=True),
        row("ademamix", "ademamix", **SLOW, weight_decay=0.1),
        row("ademamix-warmups", "ademamix", **SLOW, beta3_warmup=6.5, alpha_warmup=4.5),
        row("adopt", "adopt", **DECAYED),
        row("adopt-decoupled", "adopt", **DECAYED, clip_exponent=0.3, decoupled_weight_decay=True),
        row(
            "came",
            "came",
            **{"lr": 0.05, "betas": (0.8, 0.95, 0.9), "eps": (1e-3, 1e-3), "weight_decay": 0.01},
            clip_threshold=0.7,
        ),
        row("asgd", "asgd", lr=0.1, lambd=0.01, alpha=0.75, t0=0.5, weight_decay=0.1),
        row("galore", "galore", **PROJECTED, rank=2, scale=0.7),
        row("apollo", "apollo", **PROJECTED, rank=2, scale=2.0, growth=1.1),
        row("apollo-mini", "apollo", **PROJECTED, rank=1, scale=4.0, scale_type="tensor", seed=3),
        row("laprop", "laprop", **SMOOTH),
        row("lion", "lion", lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
        row("madgrad", "madgrad", lr=0.05, momentum=0.9, eps=1e-3, weight_decay=0.1),
        row("mars", "mars", **DECAYED, gamma=0.1, optimize_1d=True),
        row("muon", "muon", matrices=True, lr=0.05, momentum=0.9),
        row("normuon", "normuon", **ITERATED, lr=0.05, momentum=0.9, beta2=0.8, weight_decay=0.1),
        row("adamuon", "adamuon", **ITERATED, lr=0.1, momentum=0.9, weight_decay=0.05),
        row("dion2", "dion2", **ITERATED, lr=0.05, ef_decay=0.8, weight_decay=0.03),
        row("scion", "scion", ns_dtype=torch.float64, lr=0.05, momentum=0.8, radius=8.0),
        row("scion-row", "scion", **ITERATED, **FREE, norm="row"),
        row("scion-col", "scion", **ITERATED, **FREE, norm="col", normalized=True),
        row("scion-sign", "scion", **ITERATED, **FREE, norm="sign"),
        row("psgd_kron", "psgd_kron", matrices=True, **KRON),
        row(
            "psgd_kron-seldom",
            "psgd_kron",
            **{**KRON, "preconditioner_update_probability": 0.4, "clip_rms": 0.8},
            memory_save_mode="one_diag",
        ),
        row(
            "soap",
            "soap",
            **{**DECAYED, "lr": 0.05, "matrices": True, "precondition_frequency": 2},
            max_precond_dim=3,
        ),
        row("kl_soap", "kl_soap", **{**DECAYED, "matrices": True, "precondition_frequency": 2}),
        row("kl_shampoo", "kl_shampoo", matrices=True, **KL),
        row("shampoo", "shampoo", lr=0.3, betas=(0.8, 1.0), eps=1e-3),
        row(
            "shampoo-blocks",
            "shampoo",
            **{**DECAYED, "lr": 0.05, "max_preconditioner_dim": 2, "precondition_frequency": 2},
            **{"grafting": "adam", "grafting_eps": 1e-3, "momentum": 0.5, "peak_lr": 1.0},
            weight_decay_type="independent",
        ),
        row("nadam", "nadam", **DECAYED, momentum_decay=4e-3),
        row("nadamw", "nadam", **DECAYED, decoupled_weight_decay=True),
        row("noisy_sgd", "noisy_sgd", lr=0.1),
        row("optimistic", "optimistic_gradient_descent", lr=0.1, alpha=0.9, beta=0.7),
        row("optimistic-adam", "optimistic_adam_v2", **SMOOTH, alpha=0.9, beta=0.7),
        row("radam", "radam", **DECAYED),
        row("rmsprop", "rmsprop", **RMS, momentum=0.5),
        row("rmsprop-centered", "rmsprop", **RMS, centered=True),
        row("rprop", "rprop", lr=0.03125, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0)),
        row("sign_sgd", "sign_sgd", lr=0.02, weight_decay=0.1),
        row("signum", "signum", lr=0.02, momentum=0.9, weight_decay=0.1),
        row(
            "simplified_ademamix",
            "simplified_ademamix",
            **{**DECAYED, "lr": 0.01, "alpha": 0.5, "beta1_warmup": 4.5, "min_beta1": 0.5},
        ),
        row("sparse_adam", "sparse_adam", **SMOOTH),
        row(
            "schedule_free_sgd",
            "schedule_free_sgd",
            **{**FREED, "lr": 0.2, "momentum": 0.8, "warmup_steps": 5, "weight_lr_power": 1.5},
        ),
        row(
            "schedule_free_adamw",
            "schedule_free_adamw",
            **{**DECAYED, "lr": 0.1, "warmup_steps": 3, "r": 0.3, "weight_lr_power": 2.5},
        ),
        row("yogi", "yogi", **DECAYED),
        row("lamb", "lamb", **DECAYED, max_grad_norm=2.0),
        row("lamb-clipped", "lamb", **SMOOTH, trust_clip=True, always_adapt=True, maximize=True),
        row("lars", "lars", lr=1.0, momentum=0.5, weight_decay=0.1, trust_coefficient=0.05),
        row("stable_adamw", "stable_adamw", **DECAYED),
        row("novograd", "novograd", **DECAYED),
        row("sm3", "sm3", lr=0.3, momentum=0.8, eps=1e-3),
        row("fromage", "fromage", lr=0.03),
        row("fromage-bounded", "fromage", lr=0.03, p_bound=1.5),
        row("sophia", "sophia", lr=0.02, betas=(0.8, 0.95), rho=0.5, weight_decay=0.1, eps=0.5),
        row("cocob", "cocob", lr=1.0, alpha=20.0, eps=1e-3, weight_decay=0.01),
        row("prodigy", "prodigy", **DISTANCE, beta3=0.9, d_coef=1.5, growth_rate=1.2),
        row(
            "prodigy-corrected",
            "prodigy",
            **{**DISTANCE, "decouple": False, "use_bias_correction": True, "growth_rate": 4.0},
            safeguard_warmup=True,
        ),
        row("dadapt_adam", "dadapt_adam", **DISTANCE, growth_rate=1.2),
        row(
            "dadapt_adam-corrected",
            "dadapt_adam",
            **{**DISTANCE, "decouple": True, "use_bias_correction": True, "growth_rate": 4.0},
        ),
        row("dog", "dog", lr=0.9, reps_rel=0.05, weight_decay=0.1, eps=1e-3),
        row("dog-eta", "dog", lr=0.9, init_eta=0.05),
        row("dowg", "dowg", lr=0.9, eps=0.01),
        row("muon_adamw", "muon_adamw", lr=0.05, adamw_lr=0.02, muon="matrix*"),
        CheckedRecipe("clip", clipped, {"lr": 0.02, "max_norm": 0.5, "decay": 0.9}),
        CheckedRecipe("accumulate", accumulated, {"lr": 0.02}),
        CheckedRecipe("partition", parted, {"lr": 0.02}),
        CheckedRecipe("stored", packed, {"lr": 0.02}, exact=False),
    ]
    named = {recipe.make for recipe in table}
    others = {name: make for name, make in warmup.known().items() if make not in named}
    return table + [row(name, name) for name in others if name not in WITHOUT]
