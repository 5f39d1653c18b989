"""Optimizer objects of algorithms that torch.optim lacks, with their functions' arguments.

Each class is created from its function on first access. Editors and type checkers read
ready_made.pyi, which `make lists` writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, ClassVar

import functional_optim as fo
from functional_optim.adapters.averaging import AveragingOptimizer
from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.optimizer import Optimizer
from functional_optim.adapters.state.recipes import constructor
from functional_optim.core.importing import homes_of

CLASSES = tuple(
    [x for x, home in homes_of("functional_optim.adapters").items() if home == __name__]
)
"""The names of the classes. Functions have the same names, except for capitals and underscores."""

DOC = """`functional_optim.{name}` as an optimizer object{modes}.

Args:
    params: parameters, named parameters, or dicts of parameter groups, as torch takes them{model}.
    compile: True (the default) runs compiled kernels, and falls back to the eager rule with a
        warning; False runs eagerly; "strict" raises a RuntimeError at a step that cannot be
        compiled.
    stored: storage format of slots, as in :class:`Optimizer`; None (the default): full
        precision.{capturable}

    The other arguments are those of :func:`functional_optim.{name}`, with its defaults. They become
    the entries of the parameter groups, and a group may override them.

State of each parameter: `step`, and the slots of :func:`functional_optim.{name}`.

Raises:
    TypeError, ValueError: for invalid arguments and gradients.{raises}

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
{switch}    >>> bool(w.square().sum() < 2)
    True
"""
"""The docstring of each class."""


CAPTURABLE = """
    capturable: keep step counts on the device, so that a step can be captured in a CUDA graph, as
        in :class:`Optimizer`. Default False."""


class ReadyMade(Optimizer):
    """An `Optimizer` that runs one algorithm.

    algorithm: its name. how: the names of the arguments for execution. texts: parts of the
    docstrings of subclasses.
    """

    algorithm: ClassVar[str]
    how: ClassVar[tuple[str, ...]] = ("compile", "stored", "capturable")
    texts: ClassVar[dict[str, str]] = {"modes": "", "raises": "", "switch": ""}

    def _construct(self, arguments: dict[str, Any]) -> None:
        """Call the constructor. arguments: those of the subclass, by name."""
        hyper = {k: x for k, x in arguments.items() if k not in ("self", "params", "__class__")}
        super().__init__(arguments["params"], getattr(fo, type(self).algorithm), **hyper)

    def __init_subclass__(cls) -> None:
        if "algorithm" in vars(cls):
            _complete(cls)
        super().__init_subclass__()


def _complete(cls: type[ReadyMade]) -> None:
    """Add the constructor and the docstring to a class, from its function."""
    if "__init__" not in vars(cls):
        own = inspect.signature(getattr(fo, cls.algorithm)).parameters
        given = "ParamsT | torch.nn.Module" if "views" in own else "ParamsT"
        first = [Parameter("self", KIND), Parameter("params", KIND, annotation=given)]
        cls.__init__ = constructor(cls.__name__, [*first, *own.values()], cls.how)
    if cls.__doc__ is None and ReadyMade.__doc__ is not None:  # -OO leaves none
        more = CAPTURABLE if "capturable" in cls.how else ""
        model = "; or a model" if "views" in inspect.signature(cls.__init__).parameters else ""
        names = {"name": cls.algorithm, "optimizer": cls.__name__, "capturable": more}
        names["model"] = model
        cls.__doc__ = DOC.format(**names, **cls.texts)


KIND = Parameter.POSITIONAL_OR_KEYWORD


class OneRate(ReadyMade):
    """A `ReadyMade` whose groups have one learning rate, or 0."""

    how = ("compile", "stored")

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; see :meth:`Optimizer.step`.

        Raises:
            RuntimeError: if two parameter groups have different learning rates other than 0.
        """
        rates = [group["lr"] for group in self.param_groups]
        if len(rates) > 1:
            known = {float(lr) for lr in rates if not callable(lr)} - {0.0}
            if len(known) > 1:
                raise RuntimeError(
                    f"{type(self).__name__} estimates one scale for all parameters, but its "
                    f"parameter groups have the learning rates {sorted(known)}; give all of them "
                    "one rate, or 0 to freeze them."
                )
        return super()._step(closure)

    step = with_hooks(_step)


class ScheduleFree(AveragingOptimizer, ReadyMade):
    """A `ReadyMade` with two modes."""

    how = ("compile", "stored")
    texts: ClassVar[dict[str, str]] = {
        "modes": " with two modes, as :class:`AveragingOptimizer`",
        "raises": "\n    RuntimeError: from a step in evaluation mode.",
        "switch": "    >>> opt.eval()\n",
    }


def base_of(name: str) -> Any:
    """The base of a class of this name."""
    if name.startswith("ScheduleFree"):
        return ScheduleFree
    return OneRate if name in ("DAdaptAdam", "Prodigy") else ReadyMade


def made(name: str) -> Any:
    """The class of this name."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    functions = {x.replace("_", ""): x for x in dir(fo)}
    body = {"algorithm": functions[name.lower()], "__module__": __name__}
    return globals().setdefault(name, type(name, (base_of(name),), body))


__getattr__ = made
