"""Drop-ins for torch.optim: the same names, arguments, errors, state and checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from functional_optim import algorithms, base
from functional_optim.adapters.optimizer import Runs


class DropIn(Runs):
    """A class of torch.optim whose steps are run by a recipe.

    Takes the arguments of the torch class, and the keyword `compile`.
    """

    def __init__(self, *args: Any, compile: bool = True, **kwargs: Any) -> None:
        self.compile = compile
        super().__init__(*args, **kwargs)
        # set by torch's own classes when fused=True, for a step that unscales gradients itself
        self._step_supports_amp_scaling = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        theirs = next(c for c in cls.__mro__ if c.__module__.startswith("torch.optim."))
        signature = inspect.signature(theirs)
        flag = inspect.Parameter("compile", inspect.Parameter.KEYWORD_ONLY, default=True)
        cls.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])


class SGD(DropIn, torch.optim.SGD):
    """torch.optim.SGD, run by `functional_optim.sgd`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager). `foreach` and `fused` are checked and kept, but choose nothing here.

    State: `momentum_buffer`, like the parameter, if there is momentum. No step count, as in torch.

    Raises:
        ValueError, RuntimeError: torch's, for hyperparameters that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import SGD
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = SGD([w], lr=0.5, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> w.tolist()
        [0.5, 0.5]
    """

    counts_steps = False

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        return algorithms.sgd(
            group["lr"],
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            maximize=group["maximize"],
        )


class Adam(DropIn, torch.optim.Adam):
    """torch.optim.Adam, run by `functional_optim.adam`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager). `foreach` and `fused` are checked and kept, but choose nothing here.

    State: `step`, `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`.

    Raises:
        ValueError, RuntimeError: torch's, for hyperparameters that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Adam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Adam([w], lr=0.5, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> w.tolist()
        [0.5, 0.5]
    """

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        return algorithms.adam(
            group["lr"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["amsgrad"],
            maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def check_gradient(self, g: torch.Tensor) -> None:
        if g.layout != torch.strided:
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam instead"
            )


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, run by `functional_optim.adamw`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager). `foreach` and `fused` are checked and kept, but choose nothing here.

    State: `step`, `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`.

    Raises:
        ValueError, RuntimeError: torch's, for hyperparameters that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import AdamW
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = AdamW([w], lr=0.1, weight_decay=1.0, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> w.detach()
        tensor([0.8000, 0.8000])
    """
