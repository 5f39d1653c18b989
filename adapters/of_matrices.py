"""Optimizer objects of algorithms for matrices, with their functions' arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from functional_optim.adapters.ready_made import ReadyMade

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from functional_optim import numeric
    from functional_optim.adapters.state.storage import Stored
    from functional_optim.algorithms.adam import Betas
    from functional_optim.algorithms.muon import Nesterov
    from functional_optim.algorithms.psgd import MemorySaveMode
    from functional_optim.algorithms.scion import Norm
    from functional_optim.algorithms.shampoo import Exponents, Grafting, WeightDecayType
    from functional_optim.engine.group import Compile
    from functional_optim.linalg import Coefficients
    from functional_optim.transforms.bases import Refresh
    from functional_optim.transforms.orthogonal import Scale


# begin: algorithms (make lists)


class AdaMuon(ReadyMade):
    """`functional_optim.adamuon` as an optimizer object."""

    algorithm = "adamuon"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.02, weight_decay: numeric.Hyper = 0.01,
        momentum: numeric.Hyper = 0.95, eps: numeric.Hyper = 1e-08, nesterov: Nesterov = True,
        ns_coefficients: Coefficients = 'jordan', ns_steps: int = 5, *, ns_eps: float = 1e-07,
        ns_dtype: torch.dtype = torch.bfloat16, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Dion2(ReadyMade):
    """`functional_optim.dion2` as an optimizer object."""

    algorithm = "dion2"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, fraction: float = 0.25,
        ef_decay: numeric.Hyper = 0.95, weight_decay: numeric.Hyper = 0.01,
        ns_coefficients: Coefficients = 'polar_express', ns_steps: int = 5, *,
        ns_eps: float = 1e-08, scale: Scale = 'spectral', ns_dtype: torch.dtype = torch.bfloat16,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class KLSOAP(ReadyMade):
    """`functional_optim.kl_soap` as an optimizer object."""

    algorithm = "kl_soap"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.0001, betas: Betas = (0.9, 0.98),
        shampoo_beta: numeric.Hyper | None = None, eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.01, precondition_frequency: Any = 10,
        normalize_grads: bool = False, init_factor: numeric.Hyper = 0.1,
        max_clamp_value: int | None = 4000, *, refresh: Refresh = 'together',
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class KLShampoo(ReadyMade):
    """`functional_optim.kl_shampoo` as an optimizer object."""

    algorithm = "kl_shampoo"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.0001, momentum: numeric.Hyper = 0.9,
        shampoo_beta: numeric.Hyper = 0.98, eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.01, precondition_frequency: Any = 10,
        normalize_grads: bool = False, init_factor: numeric.Hyper = 0.1,
        max_clamp_value: int | None = 4000, *, refresh: Refresh = 'together',
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class NorMuon(ReadyMade):
    """`functional_optim.normuon` as an optimizer object."""

    algorithm = "normuon"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.02, weight_decay: numeric.Hyper = 0.0,
        momentum: numeric.Hyper = 0.95, beta2: numeric.Hyper = 0.95, eps: numeric.Hyper = 1e-10,
        nesterov: Nesterov = True, ns_coefficients: Coefficients = 'jordan', ns_steps: int = 5, *,
        ns_eps: float = 1e-07, scale: Scale = 'original', ns_dtype: torch.dtype = torch.bfloat16,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class PSGDKron(ReadyMade):
    """`functional_optim.psgd_kron` as an optimizer object."""

    algorithm = "psgd_kron"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.0003, b1: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0,
        preconditioner_update_probability: numeric.Hyper | None = None,
        max_size_triangular: int = 8192, min_ndim_triangular: int = 2,
        memory_save_mode: MemorySaveMode = None, precond_lr: numeric.Hyper = 0.1,
        clip_rms: numeric.Hyper = 1.1, *, seed: int = 0, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class SOAP(ReadyMade):
    """`functional_optim.soap` as an optimizer object."""

    algorithm = "soap"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.003, betas: Betas = (0.95, 0.95),
        shampoo_beta: numeric.Hyper | None = None, eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.01, precondition_frequency: Any = 10,
        max_precond_dim: int = 10000, normalize_grads: bool = False, correct_bias: bool = True, *,
        refresh: Refresh = 'together', compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Scion(ReadyMade):
    """`functional_optim.scion` as an optimizer object."""

    algorithm = "scion"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, momentum: numeric.Hyper = 0.9,
        norm: Norm = 'auto', normalized: bool | None = None, radius: numeric.Hyper = 1.0,
        unconstrained: bool = False, eps: numeric.Hyper = 1e-08,
        ns_coefficients: Coefficients = 'jordan', ns_steps: int = 5, *, ns_eps: float = 1e-07,
        ns_dtype: torch.dtype = torch.bfloat16, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Shampoo(ReadyMade):
    """`functional_optim.shampoo` as an optimizer object."""

    algorithm = "shampoo"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, betas: Betas = (0.9, 1.0),
        eps: numeric.Hyper = 1e-12, weight_decay: numeric.Hyper = 0.0, *,
        weight_decay_type: WeightDecayType = 'decoupled', peak_lr: numeric.Hyper | None = None,
        momentum: numeric.Hyper = 0.0, nesterov: bool = False, beta3: numeric.Hyper | None = None,
        max_preconditioner_dim: int | None = 1024, precondition_frequency: int = 1,
        start_preconditioning_step: int | None = None, use_bias_correction: bool = True,
        grafting: Grafting = None, grafting_beta2: numeric.Hyper | None = None,
        grafting_eps: numeric.Hyper = 1e-10, exponents: Exponents = None,
        refresh: Refresh = 'together', compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


# end: algorithms
