"""What editors and type checkers read of ready_made.py, which makes its classes late."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim import numeric
from functional_optim.adapters.averaging import AveragingOptimizer
from functional_optim.adapters.optimizer import Optimizer
from functional_optim.adapters.state.storage import Stored
from functional_optim.algorithms.adam import Betas
from functional_optim.algorithms.apollo import ScaleType
from functional_optim.algorithms.muon import Nesterov
from functional_optim.algorithms.psgd import MemorySaveMode
from functional_optim.algorithms.scion import Norm
from functional_optim.algorithms.shampoo import Exponents, Grafting, WeightDecayType
from functional_optim.combinators.as_matrix import Views
from functional_optim.engine.group import Compile
from functional_optim.linalg import Coefficients
from functional_optim.transforms.bases import Refresh
from functional_optim.transforms.orthogonal import Scale

CLASSES: tuple[str, ...]

def base_of(name: str) -> type[ReadyMade]: ...
def made(name: str) -> type[ReadyMade]: ...

class ReadyMade(Optimizer):
    algorithm: ClassVar[str]
    how: ClassVar[tuple[str, ...]]
    texts: ClassVar[dict[str, str]]

    def _construct(self, arguments: dict[str, Any]) -> None: ...

class OneRate(ReadyMade): ...
class ScheduleFree(AveragingOptimizer, ReadyMade): ...

# begin: algorithms (make lists)

class ADOPT(ReadyMade):
    """`functional_optim.adopt` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.9999),
        eps: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.0,
        clip_exponent: numeric.Hyper | None = 0.25,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class APOLLO(ReadyMade):
    """`functional_optim.apollo` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.0,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: numeric.Hyper = 1.0,
        scale_type: ScaleType = "channel",
        *,
        growth: numeric.Hyper = 1.01,
        seed: int = 0,
        maximize: bool = False,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class AdEMAMix(ReadyMade):
    """`functional_optim.ademamix` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
        alpha: numeric.Hyper = 2.0,
        beta3_warmup: numeric.Hyper | None = None,
        alpha_warmup: numeric.Hyper | None = None,
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class AdaBelief(ReadyMade):
    """`functional_optim.adabelief` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-16,
        weight_decay: numeric.Hyper = 0.0,
        rectify: bool = True,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class AdaMuon(ReadyMade):
    """`functional_optim.adamuon` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.02,
        weight_decay: numeric.Hyper = 0.01,
        momentum: numeric.Hyper = 0.95,
        eps: numeric.Hyper = 1e-08,
        nesterov: Nesterov = True,
        ns_coefficients: Coefficients = "jordan",
        ns_steps: int = 5,
        *,
        ns_eps: float = 1e-07,
        ns_dtype: torch.dtype = torch.bfloat16,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class AdamMini(ReadyMade):
    """`functional_optim.adam_mini` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        blocks: Mapping[str, Literal["row", "tensor", "element"] | int] | None = None,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Adan(ReadyMade):
    """`functional_optim.adan` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.98, 0.92, 0.99),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        no_prox: bool = False,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class CAME(ReadyMade):
    """`functional_optim.came` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.0002,
        betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
        eps: tuple[numeric.Hyper, numeric.Hyper] = (1e-30, 1e-16),
        clip_threshold: numeric.Hyper = 1.0,
        weight_decay: numeric.Hyper = 0.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class COCOB(ReadyMade):
    """`functional_optim.cocob` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        alpha: numeric.Hyper = 100.0,
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class DAdaptAdam(OneRate):
    """`functional_optim.dadapt_adam` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        decouple: bool = False,
        use_bias_correction: bool = False,
        d0: numeric.Hyper = 1e-06,
        growth_rate: numeric.Hyper = math.inf,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Dion2(ReadyMade):
    """`functional_optim.dion2` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.01,
        fraction: float = 0.25,
        ef_decay: numeric.Hyper = 0.95,
        weight_decay: numeric.Hyper = 0.01,
        ns_coefficients: Coefficients = "polar_express",
        ns_steps: int = 5,
        *,
        ns_eps: float = 1e-08,
        scale: Scale = "spectral",
        ns_dtype: torch.dtype = torch.bfloat16,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class DoG(ReadyMade):
    """`functional_optim.dog` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        reps_rel: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.0,
        eps: numeric.Hyper = 1e-08,
        init_eta: numeric.Hyper | None = None,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class DoWG(ReadyMade):
    """`functional_optim.dowg` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        eps: numeric.Hyper = 0.0001,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Fromage(ReadyMade):
    """`functional_optim.fromage` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.01,
        p_bound: numeric.Hyper | None = None,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class GaLore(ReadyMade):
    """`functional_optim.galore` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.0,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: numeric.Hyper = 0.25,
        *,
        maximize: bool = False,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class KLSOAP(ReadyMade):
    """`functional_optim.kl_soap` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.0001,
        betas: Betas = (0.9, 0.98),
        shampoo_beta: numeric.Hyper | None = None,
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.01,
        precondition_frequency: Any = 10,
        normalize_grads: bool = False,
        init_factor: numeric.Hyper = 0.1,
        max_clamp_value: int | None = 4000,
        *,
        refresh: Refresh = "together",
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class KLShampoo(ReadyMade):
    """`functional_optim.kl_shampoo` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.0001,
        momentum: numeric.Hyper = 0.9,
        shampoo_beta: numeric.Hyper = 0.98,
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.01,
        precondition_frequency: Any = 10,
        normalize_grads: bool = False,
        init_factor: numeric.Hyper = 0.1,
        max_clamp_value: int | None = 4000,
        *,
        refresh: Refresh = "together",
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class LAMB(ReadyMade):
    """`functional_optim.lamb` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.01,
        max_grad_norm: numeric.Hyper | None = 1.0,
        trust_clip: bool = False,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class LARS(ReadyMade):
    """`functional_optim.lars` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        momentum: numeric.Hyper = 0.0,
        dampening: numeric.Hyper = 0.0,
        weight_decay: numeric.Hyper = 0.0,
        nesterov: bool = False,
        trust_coefficient: numeric.Hyper = 0.001,
        eps: numeric.Hyper = 1e-08,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class LaProp(ReadyMade):
    """`functional_optim.laprop` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.0004,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-15,
        weight_decay: numeric.Hyper = 0.0,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Lion(ReadyMade):
    """`functional_optim.lion` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.0001,
        betas: Betas = (0.9, 0.99),
        weight_decay: numeric.Hyper = 0.0,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class MADGRAD(ReadyMade):
    """`functional_optim.madgrad` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.01,
        momentum: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0,
        eps: numeric.Hyper = 1e-06,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class MARS(ReadyMade):
    """`functional_optim.mars` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.003,
        betas: Betas = (0.95, 0.99),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        gamma: numeric.Hyper = 0.025,
        optimize_1d: bool = False,
        lr_1d: numeric.Hyper = 0.003,
        betas_1d: Betas = (0.9, 0.95),
        weight_decay_1d: numeric.Hyper = 0.1,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Momo(ReadyMade):
    """`functional_optim.momo` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        weight_decay: numeric.Hyper = 0.0,
        beta: numeric.Hyper = 0.9,
        lb: numeric.Hyper = 0.0,
        bias_correction: bool = False,
        use_fstar: bool = False,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class MomoAdam(ReadyMade):
    """`functional_optim.momo_adam` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.01,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        lb: numeric.Hyper = 0.0,
        use_fstar: bool = False,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class NoisySGD(ReadyMade):
    """`functional_optim.noisy_sgd` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        eta: numeric.Hyper = 0.01,
        gamma: numeric.Hyper = 0.55,
        seed: int | Tensor = 0,
        momentum: numeric.Hyper = 0.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class NorMuon(ReadyMade):
    """`functional_optim.normuon` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.02,
        weight_decay: numeric.Hyper = 0.0,
        momentum: numeric.Hyper = 0.95,
        beta2: numeric.Hyper = 0.95,
        eps: numeric.Hyper = 1e-10,
        nesterov: Nesterov = True,
        ns_coefficients: Coefficients = "jordan",
        ns_steps: int = 5,
        *,
        ns_eps: float = 1e-07,
        scale: Scale = "original",
        ns_dtype: torch.dtype = torch.bfloat16,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class NovoGrad(ReadyMade):
    """`functional_optim.novograd` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.95, 0.98),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class PSGDKron(ReadyMade):
    """`functional_optim.psgd_kron` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.0003,
        b1: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0,
        preconditioner_update_probability: numeric.Hyper | None = None,
        max_size_triangular: int = 8192,
        min_ndim_triangular: int = 2,
        memory_save_mode: MemorySaveMode = None,
        precond_lr: numeric.Hyper = 0.1,
        clip_rms: numeric.Hyper = 1.1,
        *,
        seed: int = 0,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Prodigy(OneRate):
    """`functional_optim.prodigy` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        betas: Betas = (0.9, 0.999),
        beta3: numeric.Hyper | None = None,
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: numeric.Hyper = 1e-06,
        d_coef: numeric.Hyper = 1.0,
        growth_rate: numeric.Hyper = math.inf,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class SM3(ReadyMade):
    """`functional_optim.sm3` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.1,
        momentum: numeric.Hyper = 0.9,
        eps: numeric.Hyper = 1e-30,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class SOAP(ReadyMade):
    """`functional_optim.soap` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.003,
        betas: Betas = (0.95, 0.95),
        shampoo_beta: numeric.Hyper | None = None,
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.01,
        precondition_frequency: Any = 10,
        max_precond_dim: int = 10000,
        normalize_grads: bool = False,
        correct_bias: bool = True,
        *,
        merge_dims: bool = False,
        refresh: Refresh = "together",
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class ScheduleFreeAdamW(ScheduleFree):
    """`functional_optim.schedule_free_adamw` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.0025,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0,
        warmup_steps: int = 0,
        r: numeric.Hyper = 0.0,
        weight_lr_power: numeric.Hyper = 2.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class ScheduleFreeSGD(ScheduleFree):
    """`functional_optim.schedule_free_sgd` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        momentum: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0,
        warmup_steps: int = 0,
        r: numeric.Hyper = 0.0,
        weight_lr_power: numeric.Hyper = 2.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Scion(ReadyMade):
    """`functional_optim.scion` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.001,
        momentum: numeric.Hyper = 0.9,
        norm: Norm = "auto",
        normalized: bool | None = None,
        radius: numeric.Hyper = 1.0,
        unconstrained: bool = False,
        eps: numeric.Hyper = 1e-08,
        ns_coefficients: Coefficients = "jordan",
        ns_steps: int = 5,
        *,
        ns_eps: float = 1e-07,
        ns_dtype: torch.dtype = torch.bfloat16,
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Shampoo(ReadyMade):
    """`functional_optim.shampoo` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: numeric.Hyper = 0.01,
        betas: Betas = (0.9, 1.0),
        eps: numeric.Hyper = 1e-12,
        weight_decay: numeric.Hyper = 0.0,
        *,
        weight_decay_type: WeightDecayType = "decoupled",
        peak_lr: numeric.Hyper | None = None,
        momentum: numeric.Hyper = 0.0,
        nesterov: bool = False,
        beta3: numeric.Hyper | None = None,
        max_preconditioner_dim: int | None = 1024,
        precondition_frequency: int = 1,
        start_preconditioning_step: int | None = None,
        use_bias_correction: bool = True,
        grafting: Grafting = None,
        grafting_beta2: numeric.Hyper | None = None,
        grafting_eps: numeric.Hyper = 1e-10,
        exponents: Exponents = None,
        target_parameter_dimensionality: float | None = None,
        refresh: Refresh = "together",
        views: Views | torch.nn.Module | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class SignSGD(ReadyMade):
    """`functional_optim.sign_sgd` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.01,
        weight_decay: numeric.Hyper = 0.0,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Signum(ReadyMade):
    """`functional_optim.signum` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.01,
        momentum: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class StableAdamW(ReadyMade):
    """`functional_optim.stable_adamw` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.001,
        betas: Betas = (0.9, 0.99),
        eps: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.01,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

class Yogi(ReadyMade):
    """`functional_optim.yogi` as an optimizer object."""

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.01,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 0.001,
        weight_decay: numeric.Hyper = 0.0,
        initial_accumulator_value: float = 1e-06,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
        capturable: bool = False,
    ) -> None: ...

# end: algorithms
