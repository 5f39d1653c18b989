"""What editors and type checkers read of drop_ins.py: torch's arguments, and ours."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.state.storage import Stored
from functional_optim.core import base
from functional_optim.engine.group import Compile

class DropIn(OptimizerBase):
    recipe: ClassVar[Callable[..., base.GradientTransformation]]
    how: ClassVar[tuple[str, ...]]

    def _construct(self, arguments: dict[str, Any]) -> None: ...

# begin: algorithms (make lists)

class Adadelta(DropIn, torch.optim.Adadelta):
    """torch.optim.Adadelta, run by `functional_optim.adadelta`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-06,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Adafactor(DropIn, torch.optim.Adafactor):
    """torch.optim.Adafactor, run by `functional_optim.adafactor`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 0.001),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Adagrad(DropIn, torch.optim.Adagrad):
    """torch.optim.Adagrad, run by `functional_optim.adagrad`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Adam(DropIn, torch.optim.Adam):
    """torch.optim.Adam, run by `functional_optim.adam`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, run by `functional_optim.adamw`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Adamax(DropIn, torch.optim.Adamax):
    """torch.optim.Adamax, run by `functional_optim.adamax`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class ASGD(DropIn, torch.optim.ASGD):
    """torch.optim.ASGD, run by `functional_optim.asgd`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        lambd: float = 0.0001,
        alpha: float = 0.75,
        t0: float = 1000000.0,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Muon(DropIn, torch.optim.Muon):
    """torch.optim.Muon, run by `functional_optim.muon`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class NAdam(DropIn, torch.optim.NAdam):
    """torch.optim.NAdam, run by `functional_optim.nadam`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum_decay: float = 0.004,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class RAdam(DropIn, torch.optim.RAdam):
    """torch.optim.RAdam, run by `functional_optim.radam`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class RMSprop(DropIn, torch.optim.RMSprop):
    """torch.optim.RMSprop, run by `functional_optim.rmsprop`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class Rprop(DropIn, torch.optim.Rprop):
    """torch.optim.Rprop, run by `functional_optim.rprop`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-06, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class SGD(DropIn, torch.optim.SGD):
    """torch.optim.SGD, run by `functional_optim.sgd`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None: ...

class SparseAdam(DropIn, torch.optim.SparseAdam):
    """torch.optim.SparseAdam, run by `functional_optim.sparse_adam`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        maximize: bool = False,
        *,
        compile: Compile = True,
    ) -> None: ...

# end: algorithms
