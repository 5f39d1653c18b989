"""The table of cases: one row sends a recipe through every property and every reference."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import make_params
from reference.loops import LOOPS
from torch import Tensor, optim

import functional_optim as fo
from functional_optim import adapters, schedules

APART = {"shampoo-blocks"}
"""Rows that stand alone: no other is traced in blocks."""

ABILITIES = {"complex", "ensemble", "graph", "half", "meta", "object", "rest", "schedule", "vmap"}
"""What a row may say that it cannot do; `test_properties` then asks for an error instead.

complex: complex parameters, treated as pairs. ensemble: vmap over a batch of parameters, states
and gradients. graph: one full graph while hyperparameters change. half: bfloat16 and float16.
meta: the gradient with respect to its hyperparameters. object: run by `adapters.Optimizer`.
rest: a learning rate of 0. schedule: a schedule for every hyperparameter. vmap: a batch of
hyperparameters.
"""


class Case(NamedTuple):
    """A row.

    hyper: the recipe's arguments. Floats, and those in tuples, are the ones that may change while
    training: they become tensors and schedules here. All else is static.
    stock: the counterpart in torch.optim, which takes the same arguments. cannot: some of
    ABILITIES. dim: the only number of dimensions of a tensor that it takes. rounding: how far equal
    float64 results may part. both_sides: whether each side of a matrix gets eigenvectors. Where two
    eigenvalues are 0, the last bits of a product decide on these, so its tall matrix is less tall.
    """

    name: str
    recipe: Callable[..., fo.GradientTransformation]
    hyper: dict[str, Any]
    stock: Any = None
    cannot: frozenset[str] = frozenset()
    dim: int | None = None
    rounding: float = 1e-12
    both_sides: bool = False

    def params(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
        """A tree of all shapes that it takes."""
        every = make_params(dtype, seed)
        if self.both_sides:
            every["transposed"] = every["transposed"].t()[:, :3].contiguous().t()
        return {n: p for n, p in every.items() if self.dim is None or p.dim() == self.dim}

    def filled(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Those with entries: torch's Adafactor divides by the size of an empty one."""
        return {name: p for name, p in self.params(dtype).items() if p.numel()}

    def tx(self, **changed: Any) -> fo.GradientTransformation:
        return self.recipe(**{**self.hyper, **changed})

    def knobs(self, turn: Callable[[float], Any]) -> dict[str, Any]:
        """The hyperparameters that may change, each sent through `turn`."""
        return {
            name: optree.tree_map(turn, value)
            for name, value in self.hyper.items()
            if all(isinstance(x, float) for x in optree.tree_leaves(value))
        }

    @property
    def naive(self) -> Callable[..., Any] | None:
        """The paper's loop of the same name."""
        return LOOPS.get(self.recipe.__name__.removesuffix("_of_kernels"))

    @property
    def family(self) -> str:
        """The rows of one file of algorithms are a family; others stand alone."""
        home = getattr(self.recipe, "home", self.recipe.__module__)
        alone = self.name in APART or not home.startswith(fo.__name__)
        return self.name if alone else home

    @property
    def static(self) -> dict[str, Any]:
        """The hyperparameters that choose the graph."""
        return {name: self.hyper[name] for name in self.hyper.keys() - self.knobs(float).keys()}

    @property
    def drop_in(self) -> Any:
        return getattr(adapters, self.stock.__name__)

    @property
    def sign(self) -> int:
        """The direction in which the recipe goes: −1 is down."""
        return 1 if self.hyper.get("maximize") else -1


def scaled(lr, factor):
    return fo.chain(fo.scale(factor), fo.scale_by_lr(lr))


def scheduled(lr, rate):
    slow = fo.scale_by_schedule(lambda count: 1 / (1 + fo.numeric.at(rate, count + 1) * count))
    return fo.chain(slow, fo.scale_by_lr(lr))


def clipped_by_norm(lr, max_norm):
    return fo.chain(fo.clip_by_global_norm(max_norm), fo.scale_by_lr(lr))


def clipped_by_value(lr, max_value):
    return fo.chain(fo.clip_by_value(max_value), fo.scale_by_lr(lr))


def decayed(lr, weight_decay):
    return fo.chain(fo.add_decayed_weights(weight_decay), fo.scale_by_lr(lr))


def traced(lr, momentum, dampening):
    return fo.chain(fo.trace(momentum, dampening, nesterov=True), fo.scale_by_lr(lr))


def averaged(lr, decay):
    return fo.chain(fo.scale_by_lr(lr), fo.params_ema(decay))


def mechanized(lr, s_decay, betas, s_init):
    return fo.mechanize(fo.sgd(lr), s_decay, betas, s_init, eps=1e-4)


def composed(lr, max_norm, decay):
    """The training recipe of the README: clip, AdamW on a schedule, average."""
    warm = schedules.warmup_cosine(0.1 * lr, lr, 3, 1000)
    return fo.chain(fo.clip_by_global_norm(max_norm), fo.adamw(warm), fo.params_ema(decay))


def primal_averaged(lr, train_interp_coeff, eval_interp_coeff):
    return fo.gpa(fo.adam(lr, (0.8, 0.95), 1e-3), train_interp_coeff, eval_interp_coeff)


def at_home_with(recipe):
    """Counts a function of this file to the family of a recipe."""

    def counted(made):
        made.home = recipe.__module__
        return made

    return counted


@at_home_with(fo.mars)
def mars_at_one_rate(lr, **hyper):
    """Matrices and others, which have a learning rate of their own."""
    return fo.mars(lr, lr_1d=lr, **hyper)


@at_home_with(fo.muon_adamw)
def muon_adamw_at_one_rate(lr, **hyper):
    """Hidden matrices and others, which have a learning rate of their own."""
    return fo.muon_adamw(lr, lr, **hyper)


def of_kernels(recipe):
    """A recipe of matrices that takes a tensor of three dimensions for a kernel."""

    def made(lr, **hyper):
        return fo.as_matrix(recipe(lr, **hyper), kernel="auto")

    made.home = getattr(recipe, "home", recipe.__module__)
    made.__name__ = made.__qualname__ = f"{recipe.__name__}_of_kernels"
    return globals().setdefault(made.__name__, made)  # where pickle finds it


def is_matrix(path, p):
    return p.dim() >= 2


@at_home_with(fo.soap)
def soap_on_both_sides(**hyper):
    """Without a loop to follow: null spaces have no basis of their own."""
    return fo.soap(**hyper)


def kl_soap_of_both_sides(**hyper):
    """Likewise."""
    return fo.kl_soap(**hyper)


def kl_shampoo_of_both_sides(**hyper):
    """Likewise."""
    return fo.kl_shampoo(**hyper)


def row(name, recipe, stock=None, cannot=(), dim=None, rounding=1e-12, both_sides=False, **hyper):
    return Case(name, recipe, hyper, stock, frozenset(cannot), dim, rounding, both_sides)


SGD = (fo.sgd, optim.SGD)
ADAM = (fo.adam, optim.Adam)
ADAMW = (fo.adamw, optim.AdamW)
# eps is large enough here for a finite difference to see it; torch's own is in test_drop_ins.
SMOOTH: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3}
BELIEF: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
DIVIDED: dict[str, Any] = {**SMOOTH, "clip_exponent": 0.3}
NESTEROV: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.8, 0.95), "eps": 1e-3}
OTHERS: dict[str, Any] = {"betas_1d": (0.7, 0.9), "weight_decay_1d": 0.1}
SLOW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95, 0.9), "eps": 1e-3, "alpha": 1.5}
SUMMED: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "alpha": 0.5}
SUMMED |= {"beta1_warmup": 4.5, "min_beta1": 0.5}
BOTH_SIDES: dict[str, Any] = {"cannot": ["complex"], "without": "transposed"}
SOAP: dict[str, Any] = {**SMOOTH, "lr": 0.05, "dim": 2, "weight_decay": 0.1}
SOAP |= {"precondition_frequency": 2}
KL: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "shampoo_beta": 0.9, "eps": 1e-3, "dim": 2}
KL |= {"weight_decay": 0.1, "precondition_frequency": 2, "init_factor": 0.5}
# torch.vmap refuses the None of a slot that a tensor does without
NO_SLOT = ["complex", "ensemble", "vmap"]
KRON: dict[str, Any] = {"lr": 0.05, "b1": 0.8, "weight_decay": 0.1, "precond_lr": 0.3}
# eigenvectors depend on their matrix by as much as their eigenvalues are near each other
EIGH: dict[str, Any] = {"cannot": ["complex"], "rounding": 1e-9}
# Muon's iteration is in bfloat16
BFLOAT16: dict[str, Any] = {"cannot": ["complex"], "rounding": 2e-2}
# the same in float64, in which small steps are seen
NEWTON_SCHULZ: dict[str, Any] = {"cannot": ["complex"], "dim": 2, "ns_dtype": torch.float64}
CAME: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95, 0.9), "eps": (1e-3, 1e-3)}
CAME |= {"weight_decay": 0.01}
SELDOM: dict[str, Any] = {"preconditioner_update_probability": 0.4, "clip_rms": 0.8}
SELDOM |= {"memory_save_mode": "one_diag"}
FREED: dict[str, Any] = {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.1}
RISING: dict[str, Any] = {**SMOOTH, "lr": 0.1, "weight_decay": 0.1, "weight_lr_power": 2.5}
GROWN: dict[str, Any] = {**SMOOTH, "lr": 0.5, "weight_decay": 0.1, "d0": 0.05}
BALL: dict[str, Any] = {**NEWTON_SCHULZ, "dim": None}
FREE: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "radius": 2.0, "unconstrained": True}
PARTED: dict[str, Any] = {**SMOOTH, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
PARTED |= {"muon": is_matrix}
PARTED |= {"adamw_weight_decay": 0.05, "ns_dtype": torch.float64}
PROJECTED: dict[str, Any] = {**SMOOTH, "lr": 0.05, "weight_decay": 0.02, "update_proj_gap": 7}
MINI: dict[str, Any] = {"rank": 1, "scale": 4.0, "scale_type": "tensor", "seed": 3}

CASES = (
    row("sgd", *SGD, lr=0.1),
    row("sgd-momentum", *SGD, lr=0.05, momentum=0.9),
    row("sgd-dampening", *SGD, lr=0.1, momentum=0.8, dampening=0.3),
    row("sgd-nesterov", *SGD, lr=0.05, momentum=0.9, nesterov=True),
    row("sgd-decay", *SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    row("sgd-maximize", *SGD, lr=0.1, weight_decay=0.1, maximize=True),
    row("adam", *ADAM, **SMOOTH),
    row("adam-l2", *ADAM, **SMOOTH, weight_decay=0.1),
    row("adam-amsgrad", *ADAM, **SMOOTH, amsgrad=True),
    row("adam-maximize", *ADAM, **SMOOTH, weight_decay=0.1, maximize=True),
    row("adabelief", fo.adabelief, **BELIEF),
    row("adabelief-plain", fo.adabelief, **BELIEF, rectify=False),
    row("acprop", fo.acprop, **BELIEF),
    row("acprop-plain", fo.acprop, **BELIEF, rectify=False),
    row("adamw", *ADAMW, **SMOOTH, weight_decay=0.1),
    row("adamw-amsgrad", *ADAMW, **SMOOTH, amsgrad=True),
    row("adadelta", fo.adadelta, optim.Adadelta, lr=0.5, rho=0.9, eps=1e-3, weight_decay=0.1),
    row("adafactor", fo.adafactor, optim.Adafactor, cannot=NO_SLOT, lr=0.05, weight_decay=0.1),
    row("adagrad", fo.adagrad, optim.Adagrad, lr=0.3, lr_decay=0.01, weight_decay=0.1, eps=1e-3),
    row("adam_mini", fo.adam_mini, cannot=["complex"], **SMOOTH, weight_decay=0.1),
    row("adamax", fo.adamax, optim.Adamax, **SMOOTH, weight_decay=0.1),
    row("adamaxw", fo.adamaxw, **SMOOTH, weight_decay=0.1),
    row("adan", fo.adan, **NESTEROV, weight_decay=0.1),
    row("adan-no-prox", fo.adan, **NESTEROV, weight_decay=0.1, no_prox=True),
    row("ademamix", fo.ademamix, **SLOW, weight_decay=0.1),
    row("ademamix-warmups", fo.ademamix, **SLOW, beta3_warmup=6.5, alpha_warmup=4.5),
    row("adopt", fo.adopt, **SMOOTH, weight_decay=0.1),
    row("adopt-decoupled", fo.adopt, **DIVIDED, weight_decay=0.1, decoupled_weight_decay=True),
    row("came", fo.came, cannot=NO_SLOT, **CAME, clip_threshold=0.7),
    row("asgd", fo.asgd, optim.ASGD, lr=0.1, lambd=0.01, alpha=0.75, t0=0.5, weight_decay=0.1),
    row("galore", of_kernels(fo.galore), cannot=NO_SLOT, **PROJECTED, rank=2, scale=0.7),
    row("apollo", of_kernels(fo.apollo), cannot=NO_SLOT, **PROJECTED, rank=2, scale=2, growth=1.1),
    row("apollo-mini", of_kernels(fo.apollo), cannot=NO_SLOT, **PROJECTED, **MINI),
    row("laprop", fo.laprop, **SMOOTH),
    row("lion", fo.lion, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
    row("madgrad", fo.madgrad, cannot=["rest"], lr=0.05, momentum=0.9, eps=1e-3, weight_decay=0.1),
    row("mars", fo.mars, **SMOOTH, gamma=0.1, weight_decay=0.1, optimize_1d=True),
    row("mars-routed", mars_at_one_rate, cannot=NO_SLOT, **SMOOTH, **OTHERS, gamma=0.1),
    row("muon", fo.muon, optim.Muon, **BFLOAT16, dim=2, lr=0.05, momentum=0.9),
    row("normuon", fo.normuon, **NEWTON_SCHULZ, lr=0.05, momentum=0.9, beta2=0.8, weight_decay=0.1),
    row("adamuon", fo.adamuon, **NEWTON_SCHULZ, lr=0.1, momentum=0.9, weight_decay=0.05),
    row("dion2", fo.dion2, **NEWTON_SCHULZ, lr=0.05, ef_decay=0.8, weight_decay=0.03),
    row("scion", of_kernels(fo.scion), **BALL, lr=0.05, momentum=0.8, radius=8.0),
    row("scion-row", fo.scion, **{**NEWTON_SCHULZ, **FREE, "norm": "row"}),
    row("scion-col", fo.scion, **{**NEWTON_SCHULZ, **FREE, "norm": "col", "normalized": True}),
    row("scion-sign", fo.scion, **{**NEWTON_SCHULZ, **FREE, "norm": "sign"}),
    row("psgd_kron", fo.psgd_kron, cannot=["complex"], dim=2, **KRON),
    row("psgd_kron-seldom", of_kernels(fo.psgd_kron), cannot=NO_SLOT, **KRON, **SELDOM),
    row("muon_adamw", of_kernels(muon_adamw_at_one_rate), cannot=NO_SLOT, **PARTED),
    row("soap", fo.soap, cannot=NO_SLOT, **SOAP, max_precond_dim=3),
    row("soap-both-sides", soap_on_both_sides, cannot=["complex"], both_sides=True, **SOAP),
    row("kl_soap", kl_soap_of_both_sides, cannot=["complex"], both_sides=True, **SOAP),
    row("kl_shampoo", kl_shampoo_of_both_sides, cannot=["complex"], both_sides=True, **KL),
    row("shampoo", of_kernels(fo.shampoo), **EIGH, lr=0.3, betas=(0.8, 1.0), eps=1e-3),
    row(
        "shampoo-blocks",
        of_kernels(fo.shampoo),
        **{**EIGH, "lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3},
        **{"max_preconditioner_dim": 2, "precondition_frequency": 2, "grafting": "adam"},
        **{"grafting_eps": 1e-3, "weight_decay": 0.1, "momentum": 0.5, "peak_lr": 1.0},
        weight_decay_type="independent",
    ),
    row("nadam", fo.nadam, optim.NAdam, **SMOOTH, weight_decay=0.1, momentum_decay=4e-3),
    row("nadamw", fo.nadam, optim.NAdam, **SMOOTH, weight_decay=0.1, decoupled_weight_decay=True),
    row("optimistic", fo.optimistic_gradient_descent, lr=0.1, alpha=0.9, beta=0.7),
    row("optimistic-adam", fo.optimistic_adam_v2, **SMOOTH, alpha=0.9, beta=0.7),
    row("radam", fo.radam, optim.RAdam, **SMOOTH, weight_decay=0.1),
    row("rmsprop", fo.rmsprop, optim.RMSprop, lr=0.02, alpha=0.9, eps=1e-3, momentum=0.5),
    row("rmsprop-centered", fo.rmsprop, optim.RMSprop, lr=0.02, alpha=0.9, eps=1e-3, centered=True),
    row("rprop", fo.rprop, optim.Rprop, lr=0.03125, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0)),
    row("sign_sgd", fo.sign_sgd, lr=0.02, weight_decay=0.1),
    row("signum", fo.signum, lr=0.02, momentum=0.9, weight_decay=0.1),
    row("simplified_ademamix", fo.simplified_ademamix, **SUMMED, weight_decay=0.1),
    row("sparse_adam", fo.sparse_adam, cannot=["rest"], **SMOOTH),
    row(
        "schedule_free_sgd",
        fo.schedule_free_sgd,
        **FREED,
        warmup_steps=5,
        r=0.5,
        weight_lr_power=1.5,
    ),
    row("schedule_free_adamw", fo.schedule_free_adamw, **RISING, warmup_steps=3, r=0.3),
    row("gpa", primal_averaged, lr=0.05, train_interp_coeff=0.7, eval_interp_coeff=0.9),
    row("yogi", fo.yogi, **SMOOTH, weight_decay=0.1),
    row("lamb", fo.lamb, **SMOOTH, weight_decay=0.1, max_grad_norm=2.0),
    row("lamb-clipped", fo.lamb, **SMOOTH, trust_clip=True, always_adapt=True, maximize=True),
    row("lars", fo.lars, lr=1.0, momentum=0.5, weight_decay=0.1, trust_coefficient=0.05),
    row("stable_adamw", fo.stable_adamw, **SMOOTH, weight_decay=0.1),
    row("novograd", fo.novograd, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    row("sm3", fo.sm3, cannot=NO_SLOT, lr=0.3, momentum=0.8, eps=1e-3),
    row("fromage", fo.fromage, lr=0.03),
    row("fromage-bounded", fo.fromage, lr=0.03, p_bound=1.5),
    row("sophia", fo.sophia, lr=0.02, betas=(0.8, 0.95), rho=0.5, weight_decay=0.1, eps=0.5),
    row("cocob", fo.cocob, lr=1.0, alpha=20.0, eps=1e-3, weight_decay=0.01),
    row("prodigy", fo.prodigy, **GROWN, beta3=0.9, d_coef=1.5, growth_rate=1.2),
    row(
        "prodigy-corrected",
        fo.prodigy,
        **{**SMOOTH, "lr": 0.5, "weight_decay": 0.1, "d0": 0.05},
        **{"decouple": False, "use_bias_correction": True, "safeguard_warmup": True},
        growth_rate=4.0,  # infinite by default, which is no number to compare
    ),
    row("dadapt_adam", fo.dadapt_adam, **GROWN, growth_rate=1.2),
    row(
        "dadapt_adam-corrected",
        fo.dadapt_adam,
        **{**GROWN, "decouple": True, "use_bias_correction": True, "growth_rate": 4.0},
    ),
    row("dog", fo.dog, lr=0.9, reps_rel=0.05, weight_decay=0.1, eps=1e-3),
    row("dog-eta", fo.dog, lr=0.9, init_eta=0.05),
    row("dowg", fo.dowg, lr=0.9, eps=0.01),
    row("scale", scaled, lr=0.1, factor=0.5),
    row("scale_by_schedule", scheduled, lr=0.1, rate=0.01),
    row("clip_by_global_norm", clipped_by_norm, lr=0.1, max_norm=0.5),
    row("clip_by_value", clipped_by_value, lr=0.1, max_value=0.7),
    row("add_decayed_weights", decayed, lr=0.1, weight_decay=0.1),
    row("trace", traced, lr=0.05, momentum=0.9, dampening=0.2),
    row("params_ema", averaged, lr=0.1, decay=0.9),
    row("mechanize", mechanized, lr=0.3, s_decay=0.1, betas=(0.5, 0.9), s_init=0.1),
    row("composed", composed, lr=0.02, max_norm=0.5, decay=0.9, cannot=["schedule"]),
)


def families() -> list[Case]:
    """The first row of each family."""
    return list({case.family: case for case in reversed(CASES)}.values())[::-1]


def able(*abilities: str, costly: bool = False, keep: Iterable[str] = ()) -> list[Any]:
    """The rows that can do all of these, as parameters of a test.

    costly: leave all but the first of each family, and those to keep, to `make test-full`.
    """
    chosen, seen = [], set()
    for case in CASES:
        if not case.cannot.isdisjoint(abilities):
            continue
        late = costly and case.family in seen and case.name not in keep
        chosen.append(pytest.param(case, id=case.name, marks=[pytest.mark.full] if late else []))
        seen.add(case.family)
    return chosen


def with_torch(*abilities: str, costly: bool = False) -> list[Any]:
    every = able(*abilities, costly=costly)
    return [param for param in every if param.values[0].stock is not None]


def with_naive() -> list[Any]:
    return [pytest.param(c, id=c.name) for c in CASES if c.naive is not None]
