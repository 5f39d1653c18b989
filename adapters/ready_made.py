"""Optimizer objects of the algorithms that torch.optim has not, each with its function's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import functional_optim as fo
from functional_optim.adapters.optimizer import Optimizer

if TYPE_CHECKING:
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
    >>> def closure():
    ...     opt.zero_grad()
    ...     loss = w.square().sum()
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


class DoG(ReadyMade):
    """`functional_optim.dog` as an optimizer object."""

    algorithm = "dog"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, reps_rel: numeric.Hyper = 1e-06,
        weight_decay: numeric.Hyper = 0.0, eps: numeric.Hyper = 1e-08,
        init_eta: numeric.Hyper | None = None, *, maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class DoWG(ReadyMade):
    """`functional_optim.dowg` as an optimizer object."""

    algorithm = "dowg"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, eps: numeric.Hyper = 0.0001, *,
        maximize: bool = False, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class Momo(ReadyMade):
    """`functional_optim.momo` as an optimizer object."""

    algorithm = "momo"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1.0, weight_decay: numeric.Hyper = 0.0,
        beta: numeric.Hyper = 0.9, lb: numeric.Hyper = 0.0, bias_correction: bool = False,
        use_fstar: bool = False, *, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


class MomoAdam(ReadyMade):
    """`functional_optim.momo_adam` as an optimizer object."""

    algorithm = "momo_adam"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 0.01, betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-08, weight_decay: numeric.Hyper = 0.0, lb: numeric.Hyper = 0.0,
        use_fstar: bool = False, *, compile: Compile = True,
    ) -> None:  # fmt: skip
        self._construct(locals())


# end: algorithms
