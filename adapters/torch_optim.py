"""Drop-ins for torch.optim: the same names, arguments, errors, state and checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from functional_optim import algorithms, base
from functional_optim.adapters.optimizer import Runs
from functional_optim.engine import Compile, how_to

try:  # torch's own checks, for the same refusals in the same words
    from torch.optim.optimizer import (
        _device_dtype_check_for_fused as _check_fused,
    )
    from torch.optim.optimizer import (
        _get_capturable_supported_devices,
    )

    CAPTURABLE = _get_capturable_supported_devices()
except ImportError:
    _check_fused = None
    CAPTURABLE = ["cuda"]


class DropIn(Runs):
    """A class of torch.optim whose steps are run by a recipe.

    Takes the arguments of the torch class, and the keyword `compile`: True, False, or "strict",
    which raises a RuntimeError at a step that cannot be compiled, where True falls back with a
    warning. torch's names for hyperparameters are the recipe's, so a group is what the recipe is
    called with.

    recipe: the function that makes the transformation.
    sparse: what a sparse gradient does: raises "never", moves its rows only ("lazy").
    counted: what torch's error for `capturable` on a wrong device calls the tensors of numbers.
    """

    recipe: ClassVar[Callable[..., base.GradientTransformation]]
    sparse: ClassVar[str] = "never"
    counted: ClassVar[str] = "params and state_steps"
    _names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, compile: Compile = True, **kwargs: Any) -> None:
        how_to(compile)
        self.compile = compile
        super().__init__(*args, **kwargs)
        # set by torch's own classes when fused=True, for a step that unscales gradients itself
        self._step_supports_amp_scaling = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "recipe" in cls.__dict__:
            cls._names = tuple(inspect.signature(cls.recipe).parameters)
        theirs = next(c for c in cls.__mro__ if c.__module__.startswith("torch.optim"))
        signature = inspect.signature(theirs)
        flag = inspect.Parameter("compile", inspect.Parameter.KEYWORD_ONLY, default=True)
        cls.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        return type(self).recipe(**{name: group[name] for name in self._names})

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if g.layout != torch.strided and self.sparse == "never":
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        if torch.compiler.is_compiling():
            return
        if group.get("capturable") and p.device.type not in CAPTURABLE:
            raise AssertionError(
                f"If capturable=True, {self.counted} must be on supported devices: {CAPTURABLE}."
            )
        if group.get("fused") and _check_fused is not None:
            _check_fused(p)


class Adadelta(DropIn, torch.optim.Adadelta):
    """torch.optim.Adadelta, run by `functional_optim.adadelta`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `square_avg`, `acc_delta`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Adadelta
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Adadelta([w], lr=1.0, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.adadelta


class Adafactor(DropIn, torch.optim.Adafactor):
    """torch.optim.Adafactor, run by `functional_optim.adafactor`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`; `row_var` and `col_var`, or `variance` below two dimensions.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Adafactor
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Adafactor([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.adafactor


class Adagrad(DropIn, torch.optim.Adagrad):
    """torch.optim.Adagrad, run by `functional_optim.adagrad`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` and `fused` are checked and kept, but
    choose nothing here.

    State: `step` and `sum`, made at construction, as in torch. Sparse gradients move their rows
    only; with weight decay or `fused` they are refused, as in torch.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Adagrad
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Adagrad([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.adagrad
    sparse = "lazy"

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        super().check_gradient(p, g, group)
        if g.layout == torch.strided:
            return
        if group["fused"]:
            raise RuntimeError("`fused` does not support sparse grad or complex param")
        if group["weight_decay"] != 0:
            raise RuntimeError("weight_decay option is not compatible with sparse gradients")


class Adam(DropIn, torch.optim.Adam):
    """torch.optim.Adam, run by `functional_optim.adam`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` and `fused` are checked and kept, but
    choose nothing here.

    State: `step`, `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Adam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Adam([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.adam

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if g.layout != torch.strided:
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam instead"
            )
        super().check_gradient(p, g, group)


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, run by `functional_optim.adamw`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` and `fused` are checked and kept, but
    choose nothing here.

    State: `step`, `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import AdamW
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = AdamW([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """


class Adamax(DropIn, torch.optim.Adamax):
    """torch.optim.Adamax, run by `functional_optim.adamax`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `exp_avg`, `exp_inf`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Adamax
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Adamax([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.adamax


class ASGD(DropIn, torch.optim.ASGD):
    """torch.optim.ASGD, run by `functional_optim.asgd`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `eta`, `mu`, and `ax`, the average of the parameter.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import ASGD
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = ASGD([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.asgd
    counted = "params, mus, etas, and state_steps"


class Muon(DropIn, torch.optim.Muon):
    """torch.optim.Muon, run by `functional_optim.muon`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError).

    State: `momentum_buffer`. No step count, as in torch. Matrices only.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Muon
        >>> w = torch.nn.Parameter(torch.ones(2, 2))
        >>> opt = Muon([w], lr=0.1, compile=False)
        >>> (w * torch.eye(2)).sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.muon
    counts_steps = False


class NAdam(DropIn, torch.optim.NAdam):
    """torch.optim.NAdam, run by `functional_optim.nadam`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `mu_product`, `exp_avg`, `exp_avg_sq`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import NAdam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = NAdam([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.nadam
    counted = "params, mu_products and state_steps"


class RAdam(DropIn, torch.optim.RAdam):
    """torch.optim.RAdam, run by `functional_optim.radam`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `exp_avg`, `exp_avg_sq`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import RAdam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = RAdam([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.radam


class RMSprop(DropIn, torch.optim.RMSprop):
    """torch.optim.RMSprop, run by `functional_optim.rmsprop`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `square_avg`; `momentum_buffer` with momentum, `grad_avg` if centered.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import RMSprop
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = RMSprop([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.rmsprop


class Rprop(DropIn, torch.optim.Rprop):
    """torch.optim.Rprop, run by `functional_optim.rprop`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` is checked and kept, but chooses nothing
    here.

    State: `step`, `prev`, `step_size`.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import Rprop
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = Rprop([w], lr=0.1, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.rprop


class SGD(DropIn, torch.optim.SGD):
    """torch.optim.SGD, run by `functional_optim.sgd`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError). `foreach` and `fused` are checked and kept, but
    choose nothing here.

    State: `momentum_buffer`, if there is momentum. No step count, as in torch.
    Sparse gradients move their rows only; with momentum or weight decay they are made dense, and
    with `fused` refused, as in torch.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import SGD
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = SGD([w], lr=0.5, compile=False)
        >>> w.sum().backward()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.sgd
    counts_steps = False
    sparse = "lazy"

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        super().check_gradient(p, g, group)
        if g.layout != torch.strided and group["fused"]:
            raise RuntimeError("`_fused_sgd` does not support sparse gradients")

    def dense_gradient(self, g: Tensor, group: dict[str, Any]) -> Tensor:
        return g.to_dense() if group["momentum"] != 0 or group["weight_decay"] != 0 else g


class SparseAdam(DropIn, torch.optim.SparseAdam):
    """torch.optim.SparseAdam, run by `functional_optim.sparse_adam`.

    Takes torch's arguments with torch's defaults, and `compile` (True: compiled kernels; False:
    eager; "strict": compiled or a RuntimeError).

    State: `step`, a Python int as in torch; `exp_avg`, `exp_avg_sq`, dense.

    Raises:
        ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import SparseAdam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = SparseAdam([w], lr=0.1, compile=False)
        >>> w.grad = torch.ones(2).to_sparse()
        >>> opt.step()
        >>> bool((w < 1).all())
        True
    """

    recipe = algorithms.sparse_adam
    sparse = "lazy"
    integer_steps = True

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if g.layout == torch.strided:
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam instead"
            )
