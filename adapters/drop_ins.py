"""Drop-ins for torch.optim: the same names, arguments, errors, state and checkpoints."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from functional_optim import algorithms
from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.state.recipes import check_arguments, check_iterable, constructor
from functional_optim.adapters.state.storage import KEY
from functional_optim.core import base
from functional_optim.core.modes import with_cpu_as_default
from functional_optim.engine.group import how_to

CAPTURABLE, UNCAPTURABLE = ["cuda", "xpu", "hpu", "xla"], ("cpu", "meta", "mps", "mtia")
FUSED, UNFUSED = ["mps", "cuda", "xpu", "hpu", "cpu", "mtia"], ("meta", "xla")
"""The devices of torch that support an argument, for its messages, and those that do not. Devices
of other packages are not checked."""

DOC = """{summary}

Args:
    compile: True (the default) runs compiled kernels, and falls back to the eager rule with a
        warning; False runs eagerly; "strict" raises a RuntimeError at a step that cannot be
        compiled.{stored}

    The other arguments and their defaults are those of `torch.optim.{name}`.{kept}

Raises:
    ValueError, RuntimeError: torch's, for arguments and gradients that it refuses.

Example::

    >>> import torch
    >>> from functional_optim.adapters import {name}
    >>> w = torch.nn.Parameter(torch.eye(2))
    >>> opt = {name}([w], lr=0.1, compile=False)
    >>> {backward}
    >>> opt.step()
    >>> bool(w.trace() < 2)
    True
"""
"""The docstring of each drop-in."""

STORED = """
    stored: storage format of slots, as in :class:`Optimizer`; None (the default): as in torch."""


TORCHS = {
    "foreach": "\n    Beyond torch's checks, nothing depends on `foreach`.",
    "fused": "\n    `fused` keeps step counts on the device and unscales gradients.",
}
"""Notes on arguments that select an implementation in torch."""


class DropIn(OptimizerBase):
    """A class of torch.optim whose steps run a recipe.

    A subclass has the signature of torch's class of its name, and the keywords `compile` and
    `stored`. Editors and type checkers read it in drop_ins.pyi, which `make lists` writes. Its
    hyperparameters have the recipe's names, so the recipe is called with a parameter group.

    recipe: the function that makes the transformation.
    how: the keywords for execution.
    sparse: support of sparse gradients: "never" raises an error, "lazy" steps their rows only.
    refusal: the error of "never".
    counted: the name of the scalar tensors in torch's error for `capturable` on a wrong device.
    backward: how its docstring's example computes gradients.
    optional: hyperparameters that a loaded group may lack, in addition to those that torch's class
    adds.
    """

    recipe: ClassVar[Callable[..., base.GradientTransformation]]
    how: ClassVar[tuple[str, ...]] = ("compile", "stored")
    sparse: ClassVar[str] = "never"
    refusal: ClassVar[str] = "{} does not support sparse gradients"
    counted: ClassVar[str] = "params and state_steps"
    backward: ClassVar[str] = "w.square().sum().backward()"
    optional: ClassVar[tuple[str, ...]] = ()
    _names: ClassVar[tuple[str, ...]] = ()

    def _construct(self, arguments: dict[str, Any]) -> None:
        """Call torch's constructor. arguments: those of the drop-in, by name."""
        own = type(self).__name__
        name = own.lower() if hasattr(algorithms, own.lower()) else type(self).recipe.__name__
        instead = f"adapters.Optimizer(params, fo.{name}, lr=schedule)"
        check_arguments(own, arguments["params"], arguments.get("lr"), instead)
        how_to(arguments["compile"])
        self.compile = arguments.pop("compile")
        self.stored = arguments.pop("stored", None)
        try:
            super().__init__(**{k: x for k, x in arguments.items() if k != "self"})
        except TypeError:  # torch compares, indexes and iterates over what it gets
            type(self).recipe(**{k: arguments[k] for k in self._names if k in arguments})
            check_iterable(own, arguments["params"])
            raise
        if callable(self.stored):
            self._check_selections()
        if arguments.get("fused"):
            self._step_supports_amp_scaling = True  # torch 2.11's Adagrad does not set it

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            theirs = inspect.signature(getattr(torch.optim, cls.__name__).__init__).parameters
            cls.__init__ = constructor(cls.__name__, theirs.values(), cls.how)
        super().__init_subclass__()
        if "recipe" in cls.__dict__:
            own = inspect.signature(cls).parameters  # the recipe may have more
            names = inspect.signature(cls.recipe).parameters
            cls._names = tuple([name for name in names if name in own])
        if cls.__module__ == __name__ and cls.__doc__:  # None with -OO
            cls.__doc__ = _documented(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = inspect.signature(type(self)).parameters if self.optional else {}
        for group in state["param_groups"]:
            for name in self.optional:
                group.setdefault(name, known[name].default)
        super().__setstate__(state)

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        return type(self).recipe(**{name: group[name] for name in self._names})

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if g.layout != torch.strided and self.sparse == "never":
            raise RuntimeError(self.refusal.format(type(self).__name__))
        if torch.compiler.is_compiling():
            return
        apart = group.get("capturable") and not group.get("fused")
        if apart and p.device.type in UNCAPTURABLE:
            raise AssertionError(
                f"If capturable=True, {self.counted} must be on supported devices: {CAPTURABLE}."
            )
        if group.get("fused") and (p.device.type in UNFUSED or not p.is_floating_point()):
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of "
                f"supported devices: {FUSED} but {p.dtype} and {p.device.type}"
            )


def _documented(drop_in: type[DropIn]) -> str:
    """The docstring of a drop-in from the common template; its own part describes the state."""
    parameters = inspect.signature(drop_in).parameters
    kept = "".join([TORCHS[name] for name in ("foreach", "fused") if name in parameters])
    return DOC.format(
        summary=inspect.cleandoc(drop_in.__doc__ or "").replace(" State: ", "\n\nState: "),
        name=drop_in.__name__,
        stored=STORED if "stored" in parameters else "",
        kept=kept,
        backward=drop_in.backward,
    )


class Adadelta(DropIn, torch.optim.Adadelta):
    """torch.optim.Adadelta, run by `functional_optim.adadelta`. State: `step`, `square_avg`,
    `acc_delta`.
    """

    recipe = algorithms.adadelta


class Adafactor(DropIn, torch.optim.Adafactor):
    """torch.optim.Adafactor, run by `functional_optim.adafactor`. State: `step`; `row_var` and
    `col_var`, or `variance` for fewer than two dimensions.
    """

    recipe = algorithms.adafactor


class Adagrad(DropIn, torch.optim.Adagrad):
    """torch.optim.Adagrad, run by `functional_optim.adagrad`. State: `step` and `sum`, created at
    construction, as in torch. Sparse gradients step their rows only; with weight decay or `fused`
    they raise an error, as in torch. With `stored`, state is created at the first step.
    """

    recipe = algorithms.adagrad
    sparse = "lazy"
    optional = ("initial_accumulator_value",)  # torch reads it at construction only

    @with_cpu_as_default  # torch's count of steps, which is read in each step
    def _construct(self, arguments: dict[str, Any]) -> None:
        super()._construct(arguments)
        if self.stored is not None or any(KEY in group for group in self.param_groups):
            self.state.clear()  # created by torch

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        super().check_gradient(p, g, group)
        if g.layout == torch.strided:
            return
        if group["fused"]:
            raise RuntimeError("`fused` does not support sparse grad or complex param")
        if group["weight_decay"] != 0:
            raise RuntimeError("weight_decay option is not compatible with sparse gradients")


class Adam(DropIn, torch.optim.Adam):
    """torch.optim.Adam, run by `functional_optim.adam`. State: `step`, `exp_avg`, `exp_avg_sq`, and
    with amsgrad `max_exp_avg_sq`.
    """

    recipe = algorithms.adam
    refusal = "Adam does not support sparse gradients, please consider SparseAdam instead"


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, run by `functional_optim.adamw`. State: `step`, `exp_avg`, `exp_avg_sq`,
    and with amsgrad `max_exp_avg_sq`.
    """


class Adamax(DropIn, torch.optim.Adamax):
    """torch.optim.Adamax, run by `functional_optim.adamax`. State: `step`, `exp_avg`, `exp_inf`."""

    recipe = algorithms.adamax


class ASGD(DropIn, torch.optim.ASGD):
    """torch.optim.ASGD, run by `functional_optim.asgd`. State: `step`, `eta`, `mu`, and `ax`, the
    average of the parameter.
    """

    recipe = algorithms.asgd
    counted = "params, mus, etas, and state_steps"


class Muon(DropIn, torch.optim.Muon):
    """torch.optim.Muon, run by `functional_optim.muon`. State: `momentum_buffer`. No step count, as
    in torch. Matrices only.
    """

    recipe = algorithms.muon
    counts_steps = False


class NAdam(DropIn, torch.optim.NAdam):
    """torch.optim.NAdam, run by `functional_optim.nadam`. State: `step`, `mu_product`, `exp_avg`,
    `exp_avg_sq`.
    """

    recipe = algorithms.nadam
    counted = "params, mu_products and state_steps"


class RAdam(DropIn, torch.optim.RAdam):
    """torch.optim.RAdam, run by `functional_optim.radam`. State: `step`, `exp_avg`,
    `exp_avg_sq`.
    """

    recipe = algorithms.radam


class RMSprop(DropIn, torch.optim.RMSprop):
    """torch.optim.RMSprop, run by `functional_optim.rmsprop`. State: `step`, `square_avg`;
    `momentum_buffer` with momentum, `grad_avg` if centered.
    """

    recipe = algorithms.rmsprop


class Rprop(DropIn, torch.optim.Rprop):
    """torch.optim.Rprop, run by `functional_optim.rprop`. State: `step`, `prev`, `step_size`."""

    recipe = algorithms.rprop
    optional = ("lr",)  # torch reads it at a parameter's first step only


class SGD(DropIn, torch.optim.SGD):
    """torch.optim.SGD, run by `functional_optim.sgd`. State: `momentum_buffer`, if there is
    momentum. No step count, as in torch. Sparse gradients step their rows only; with momentum or
    weight decay they are converted to dense; with `fused` they raise an error, as in torch.
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
    """torch.optim.SparseAdam, run by `functional_optim.sparse_adam`. State: `step`, a Python int as
    in torch; `exp_avg`, `exp_avg_sq`, dense.
    """

    recipe = algorithms.sparse_adam
    how = ("compile",)
    optional = ("maximize",)  # old checkpoints lack it
    sparse = "lazy"
    integer_steps = True
    backward = "torch.nn.functional.embedding(torch.arange(2), w, sparse=True).sum().backward()"

    def check_gradient(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if g.layout == torch.strided:
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam instead"
            )
