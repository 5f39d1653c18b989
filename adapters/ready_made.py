"""Optimizer objects of algorithms that torch.optim lacks, with their functions' arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import functional_optim as fo
from functional_optim.adapters.optimizer import Optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from functional_optim import numeric
    from functional_optim.adapters.state.storage import Stored
    from functional_optim.algorithms.adam import Betas
    from functional_optim.algorithms.apollo import ScaleType
    from functional_optim.engine.group import Compile

DOC = """`functional_optim.{name}` as an optimizer object.

Args:
    params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
    compile: True (the default) runs compiled kernels, and falls back to the eager rule with a
        warning; False runs eagerly; "strict" raises a RuntimeError at a step that cannot be
        compiled.
    stored: how slots are stored, as in :class:`Optimizer`; None (the default): in full.
    capturable: keep step counts on the device, so that a step can be captured in a CUDA graph, as
        in :class:`Optimizer`. Default False.

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
    >>> def closure():
    ...     opt.zero_grad()
    ...     loss = w.square().sum() / 4
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(3):
    ...     loss = opt.step(closure)
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


class ADOPT(ReadyMade):
    """`functional_optim.adopt` as an optimizer object."""

    algorithm = "adopt"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.9999),
        eps: numeric.Hyper = 1e-06, weight_decay: numeric.Hyper = 0.0,
        clip_exponent: numeric.Hyper | None = 0.25, decoupled_weight_decay: bool = False, *,
        maximize: bool = False, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class APOLLO(ReadyMade):
    """`functional_optim.apollo` as an optimizer object."""

    algorithm = "apollo"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-06, weight_decay: numeric.Hyper = 0.0, rank: int = 256,
        update_proj_gap: int = 200, scale: numeric.Hyper = 1.0, scale_type: ScaleType = 'channel',
        *, growth: numeric.Hyper = 1.01, seed: int = 0, maximize: bool = False,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class AdEMAMix(ReadyMade):
    """`functional_optim.ademamix` as an optimizer object."""

    algorithm = "ademamix"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001,
        betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
        alpha: numeric.Hyper = 2.0, beta3_warmup: numeric.Hyper | None = None,
        alpha_warmup: numeric.Hyper | None = None, eps: numeric.Hyper = 1e-08,
        weight_decay: numeric.Hyper = 0.0, *, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class AdaBelief(ReadyMade):
    """`functional_optim.adabelief` as an optimizer object."""

    algorithm = "adabelief"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-16, weight_decay: numeric.Hyper = 0.0, rectify: bool = True, *,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class AdamMini(ReadyMade):
    """`functional_optim.adam_mini` as an optimizer object."""

    algorithm = "adam_mini"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0,
        blocks: Mapping[str, Literal['row', 'tensor', 'entry'] | int] | None = None, *,
        maximize: bool = False, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Adan(ReadyMade):
    """`functional_optim.adan` as an optimizer object."""

    algorithm = "adan"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001,
        betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.98, 0.92, 0.99),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, no_prox: bool = False, *,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class CAME(ReadyMade):
    """`functional_optim.came` as an optimizer object."""

    algorithm = "came"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.0002,
        betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
        eps: tuple[numeric.Hyper, numeric.Hyper] = (1e-30, 1e-16),
        clip_threshold: numeric.Hyper = 1.0, weight_decay: numeric.Hyper = 0.0, *,
        maximize: bool = False, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class COCOB(ReadyMade):
    """`functional_optim.cocob` as an optimizer object."""

    algorithm = "cocob"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, alpha: numeric.Hyper = 100.0,
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, *, maximize: bool = False,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class DoG(ReadyMade):
    """`functional_optim.dog` as an optimizer object."""

    algorithm = "dog"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, reps_rel: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.0, eps: numeric.Hyper = 1e-08,
        init_eta: numeric.Hyper | None = None, *, maximize: bool = False, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class DoWG(ReadyMade):
    """`functional_optim.dowg` as an optimizer object."""

    algorithm = "dowg"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, eps: numeric.Hyper = 0.0001, *,
        maximize: bool = False, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Fromage(ReadyMade):
    """`functional_optim.fromage` as an optimizer object."""

    algorithm = "fromage"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, p_bound: numeric.Hyper | None = None, *,
        maximize: bool = False, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class GaLore(ReadyMade):
    """`functional_optim.galore` as an optimizer object."""

    algorithm = "galore"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-06, weight_decay: numeric.Hyper = 0.0, rank: int = 128,
        update_proj_gap: int = 200, scale: numeric.Hyper = 0.25, *, maximize: bool = False,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
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
        stored: Stored | None = None, capturable: bool = False,
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
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class LaProp(ReadyMade):
    """`functional_optim.laprop` as an optimizer object."""

    algorithm = "laprop"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.0004, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-15, weight_decay: numeric.Hyper = 0.0, *, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Lion(ReadyMade):
    """`functional_optim.lion` as an optimizer object."""

    algorithm = "lion"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.0001, betas: Betas = (0.9, 0.99),
        weight_decay: numeric.Hyper = 0.0, *, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class MADGRAD(ReadyMade):
    """`functional_optim.madgrad` as an optimizer object."""

    algorithm = "madgrad"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, momentum: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0, eps: numeric.Hyper = 1e-06, *, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class MARS(ReadyMade):
    """`functional_optim.mars` as an optimizer object."""

    algorithm = "mars"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.003, betas: Betas = (0.95, 0.99),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, gamma: numeric.Hyper = 0.025,
        optimize_1d: bool = False, lr_1d: numeric.Hyper = 0.003, betas_1d: Betas = (0.9, 0.95),
        weight_decay_1d: numeric.Hyper = 0.1, *, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Momo(ReadyMade):
    """`functional_optim.momo` as an optimizer object."""

    algorithm = "momo"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, weight_decay: numeric.Hyper = 0.0,
        beta: numeric.Hyper = 0.9, lb: numeric.Hyper = 0.0, bias_correction: bool = False,
        use_fstar: bool = False, *, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class MomoAdam(ReadyMade):
    """`functional_optim.momo_adam` as an optimizer object."""

    algorithm = "momo_adam"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, lb: numeric.Hyper = 0.0,
        use_fstar: bool = False, *, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class NoisySGD(ReadyMade):
    """`functional_optim.noisy_sgd` as an optimizer object."""

    algorithm = "noisy_sgd"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, eta: numeric.Hyper = 0.01,
        gamma: numeric.Hyper = 0.55, seed: int | Tensor = 0, momentum: numeric.Hyper = 0.0, *,
        maximize: bool = False, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class NovoGrad(ReadyMade):
    """`functional_optim.novograd` as an optimizer object."""

    algorithm = "novograd"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.95, 0.98),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, *, maximize: bool = False,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class SM3(ReadyMade):
    """`functional_optim.sm3` as an optimizer object."""

    algorithm = "sm3"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.1, momentum: numeric.Hyper = 0.9,
        eps: numeric.Hyper = 1e-30, *, maximize: bool = False, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class SignSGD(ReadyMade):
    """`functional_optim.sign_sgd` as an optimizer object."""

    algorithm = "sign_sgd"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, weight_decay: numeric.Hyper = 0.0, *,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Signum(ReadyMade):
    """`functional_optim.signum` as an optimizer object."""

    algorithm = "signum"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, momentum: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0, *, compile: Compile = True, stored: Stored | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class StableAdamW(ReadyMade):
    """`functional_optim.stable_adamw` as an optimizer object."""

    algorithm = "stable_adamw"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.001, betas: Betas = (0.9, 0.99),
        eps: numeric.Hyper = 1e-06, weight_decay: numeric.Hyper = 0.01, *, maximize: bool = False,
        compile: Compile = True, stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Yogi(ReadyMade):
    """`functional_optim.yogi` as an optimizer object."""

    algorithm = "yogi"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 0.001, weight_decay: numeric.Hyper = 0.0,
        initial_accumulator_value: float = 1e-06, *, compile: Compile = True,
        stored: Stored | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        self._construct(locals())


# end: algorithms
