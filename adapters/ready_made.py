"""Optimizer objects of the algorithms that torch lacks, each with its function's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import functional_optim as fo
from functional_optim.adapters.optimizer import Optimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from functional_optim import numeric
    from functional_optim.algorithms.adam import Betas
    from functional_optim.engine.group import Compile

DOC = """`functional_optim.{name}` as an optimizer object.

Args:
    params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
    compile: True (the default) runs compiled kernels, and falls back to the eager rule with a
        warning; False runs eagerly; "strict" raises a RuntimeError at a step that cannot be
        compiled.

    The other arguments are those of :func:`functional_optim.{name}`, with its defaults. They become
    the entries of the parameter groups, and a group may have its own.

State of each parameter: `step`, and the slots of :func:`functional_optim.{name}`.

Raises:
    TypeError, ValueError: for arguments and gradients that cannot be used.

Example::

    >>> import torch
    >>> from functional_optim.adapters import {optimizer}
    >>> w = torch.nn.Parameter(torch.eye(2, dtype=torch.float64))
    >>> opt = {optimizer}([w], compile=False)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> bool(w.square().sum() < 2)
    True
"""
"""What the docstring of each becomes."""


class ReadyMade(Optimizer):
    """An `Optimizer` that runs one algorithm.

    algorithm: its name. doc: the text of a subclass's docstring, which is made of its name.
    """

    algorithm: ClassVar[str]
    doc: ClassVar[str] = DOC

    def _construct(self, arguments: dict[str, Any]) -> None:
        """Call the constructor. arguments: the `locals()` of the subclass's own."""
        hyper = {k: x for k, x in arguments.items() if k not in ("self", "params", "__class__")}
        super().__init__(arguments["params"], getattr(fo, type(self).algorithm), **hyper)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "algorithm" in cls.__dict__ and cls.__doc__:  # -OO leaves none
            cls.__doc__ = cls.doc.format(name=cls.algorithm, optimizer=cls.__name__)


# begin: algorithms (make lists)


class COCOB(ReadyMade):
    """`functional_optim.cocob` as an optimizer object."""

    algorithm = "cocob"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, alpha: numeric.Hyper = 100.0,
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, *, maximize: bool = False,
        compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Fromage(ReadyMade):
    """`functional_optim.fromage` as an optimizer object."""

    algorithm = "fromage"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, p_bound: numeric.Hyper | None = None, *,
        maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class LAMB(ReadyMade):
    """`functional_optim.lamb` as an optimizer object."""

    algorithm = "lamb"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-06, weight_decay: numeric.Hyper = 0.01,
        max_grad_norm: numeric.Hyper | None = 1.0, trust_clip: bool = False,
        always_adapt: bool = False, *, maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class LARS(ReadyMade):
    """`functional_optim.lars` as an optimizer object."""

    algorithm = "lars"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, momentum: numeric.Hyper = 0.0,
        dampening: numeric.Hyper = 0.0, weight_decay: numeric.Hyper = 0.0, nesterov: bool = False,
        trust_coefficient: numeric.Hyper = 0.001, eps: numeric.Hyper = 1e-08,
        always_adapt: bool = False, *, maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class NoisySGD(ReadyMade):
    """`functional_optim.noisy_sgd` as an optimizer object."""

    algorithm = "noisy_sgd"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, eta: numeric.Hyper = 0.01,
        gamma: numeric.Hyper = 0.55, seed: int | Tensor = 0, momentum: numeric.Hyper = 0.0, *,
        maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class NovoGrad(ReadyMade):
    """`functional_optim.novograd` as an optimizer object."""

    algorithm = "novograd"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.95, 0.98),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, *, maximize: bool = False,
        compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class SM3(ReadyMade):
    """`functional_optim.sm3` as an optimizer object."""

    algorithm = "sm3"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.1, momentum: numeric.Hyper = 0.9,
        eps: numeric.Hyper = 1e-30, *, maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class StableAdamW(ReadyMade):
    """`functional_optim.stable_adamw` as an optimizer object."""

    algorithm = "stable_adamw"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.99),
        eps: numeric.Hyper = 1e-06, weight_decay: numeric.Hyper = 0.01, *, maximize: bool = False,
        compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


# end: algorithms
