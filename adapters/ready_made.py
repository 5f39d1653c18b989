"""Optimizer objects of algorithms that torch.optim lacks, with their functions' arguments.

Each is made of its function when it is first read. Editors and type checkers read ready_made.pyi,
which `make lists` writes.
"""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import Any, ClassVar

import functional_optim as fo
from functional_optim.adapters.optimizer import Optimizer

CLASSES = {
    # begin: algorithms (make lists)
    "ADOPT": "adopt",
    "APOLLO": "apollo",
    "AdEMAMix": "ademamix",
    "AdaBelief": "adabelief",
    "AdaMuon": "adamuon",
    "AdamMini": "adam_mini",
    "Adan": "adan",
    "CAME": "came",
    "COCOB": "cocob",
    "Dion2": "dion2",
    "DoG": "dog",
    "DoWG": "dowg",
    "Fromage": "fromage",
    "GaLore": "galore",
    "KLSOAP": "kl_soap",
    "KLShampoo": "kl_shampoo",
    "LAMB": "lamb",
    "LARS": "lars",
    "LaProp": "laprop",
    "Lion": "lion",
    "MADGRAD": "madgrad",
    "MARS": "mars",
    "Momo": "momo",
    "MomoAdam": "momo_adam",
    "NoisySGD": "noisy_sgd",
    "NorMuon": "normuon",
    "NovoGrad": "novograd",
    "PSGDKron": "psgd_kron",
    "SM3": "sm3",
    "SOAP": "soap",
    "Scion": "scion",
    "Shampoo": "shampoo",
    "SignSGD": "sign_sgd",
    "Signum": "signum",
    "StableAdamW": "stable_adamw",
    "Yogi": "yogi",
    # end: algorithms
}
"""The functions of which classes are made, by the names of these."""

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
        """Call the constructor. arguments: of the subclass's own, by name."""
        hyper = {k: x for k, x in arguments.items() if k not in ("self", "params", "__class__")}
        super().__init__(arguments["params"], getattr(fo, type(self).algorithm), **hyper)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "algorithm" in cls.__dict__ and cls.__doc__:  # -OO leaves none
            cls.__doc__ = cls.doc.format(name=cls.algorithm, optimizer=cls.__name__)


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _made(name, CLASSES[name]))


def _made(name: str, algorithm: str) -> type[ReadyMade]:
    """The class of this name, whose arguments are the parameters, the function's, and those that
    say how it is run."""
    own = [*inspect.signature(getattr(fo, algorithm)).parameters.values()]
    signature = inspect.Signature(
        [
            Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
            Parameter("params", Parameter.POSITIONAL_OR_KEYWORD, annotation="ParamsT"),
            *[x for x in own if x.kind is not Parameter.KEYWORD_ONLY],
            *[x for x in own if x.kind is Parameter.KEYWORD_ONLY],
            *HOW,
        ],
        return_annotation="None",
    )

    def __init__(self: ReadyMade, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}.__init__() {error}") from None
        given.apply_defaults()
        self._construct(given.arguments)

    __init__.__qualname__ = f"{name}.__init__"
    vars(__init__)["__signature__"] = signature
    text = None if ReadyMade.__doc__ is None else f"`functional_optim.{algorithm}` as an object."
    body = {"__init__": __init__, "__doc__": text, "__module__": __name__, "algorithm": algorithm}
    return type(name, (ReadyMade,), body)


HOW = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("compile", True, "Compile"),
        ("stored", None, "Stored | None"),
        ("capturable", False, "bool"),
    )
]
"""The arguments that say how an algorithm is run."""
