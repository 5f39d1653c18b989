"""Compile kernels ahead of time: in a CI image, or while a container is built.

`python -m functional_optim.warmup adamw sgd --dtype float32 bfloat16` compiles the kernels of these
algorithms, or finds them in the cache. A later process on the same kind of processor then steps
without a compiler, with any version of torch and of Python. To share the kernels with other users,
set a folder that they can read: `FUNCTIONAL_OPTIM_CACHE=/srv/kernels`, and `chmod -R a+rX
/srv/kernels` afterwards. For other processors, set `FUNCTIONAL_OPTIM_LEVEL` to an instruction set
level that all of them support, `x86-64-v3` or `x86-64-v4`: these kernels are used if none was
compiled for the processor itself.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import kernels
from functional_optim.core.base import GradientTransformation
from functional_optim.engine.compile import FusedStep, compile
from functional_optim.engine.native import LOADED
from functional_optim.kernels import isa_levels


class Warmed(NamedTuple):
    """The number of kernels of a transformation for one dtype.

    built: compiled and cached. found: cached before. unkept: compiled, but there is no folder to
    cache them in.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.warmup import warm
        >>> ready = warm(fo.sgd(lr=0.1), [torch.float32, torch.bfloat16])
        >>> [kernels.dtype for kernels in ready if kernels.unkept]  # would be compiled again
        []
    """

    dtype: torch.dtype
    built: int
    found: int
    unkept: int


def warm(
    tx: GradientTransformation, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> list[Warmed]:
    """Compile and cache the kernels of a transformation, by a step on a temporary tensor.

    `compile(tx)` and the optimizer objects in `functional_optim.adapters` use the same kernels, for
    every size of tensor and every value of the hyperparameters, except those that change the code:
    flags, and the transforms in a chain.

    Args:
        tx: a transformation that consists of one-tensor rules, such as `adamw()` or a chain.
        dtypes: of the parameters that it will step.

    Returns:
        For each dtype the number of kernels that were built, found, and could not be cached. Rules
        over rows or columns have kernels for vectors and for matrices. Rules that run eagerly have
        none.

    Raises:
        TypeError: for a transformation that does not consist of one-tensor rules.
        RuntimeError: if there is no working compiler.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.warmup import warm
        >>> (kernels,) = warm(fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(lr=0.1)))
        >>> kernels.dtype
        torch.float32
    """
    step = compile(tx, strict=True)
    if not isinstance(step, FusedStep):
        raise TypeError(
            "only transformations made of one-tensor rules have kernels that can be cached; this "
            "one is compiled whole, by torch.compile, for each model."
        )
    return [_warm(step, tx, dtype) for dtype in dtypes]


LARGER = ((40, 40), (40, 200))
"""A square and a wide matrix, on which libraries iterate that smaller ones do not need."""


def _warm(step: FusedStep, tx: GradientTransformation, dtype: torch.dtype) -> Warmed:
    used = _kernels(step, tx, torch.ones(4, 4, dtype=dtype, device="cpu"))
    if any(x.source.axes > 1 for x in used):  # one for each number of dimensions
        used += _kernels(step, tx, torch.ones(4, dtype=dtype, device="cpu"))
    if any(x.rule.runs.batched for x in step.tx.placements):
        for shape in LARGER:
            _kernels(step, tx, torch.ones(shape, dtype=dtype, device="cpu"))
    kept = [x for x in dict.fromkeys(used) if kernels.is_kept(x)]
    found = sum(x.found for x in kept)
    return Warmed(dtype, len(kept) - found, found, len({*used} - {*kept}))


def _kernels(step: FusedStep, tx: GradientTransformation, p: Tensor) -> list[kernels.Native]:
    """The kernels of a step on one tensor."""
    params = {"w": p}
    LOADED.clear()
    step({"w": torch.ones_like(p)}, tx.init(params), params)
    return [*LOADED]


def known() -> dict[str, Callable[..., GradientTransformation]]:
    """The algorithms that can be named.

    Example::

        >>> from functional_optim import warmup
        >>> recipe = warmup.known()["adamw"]
        >>> [kernels.unkept for kernels in warmup.warm(recipe(lr=1e-3))]
        [0]
    """
    found = {name: getattr(fo, name) for name in dir(fo)}
    return {
        name: thing
        for name, thing in found.items()
        if inspect.isfunction(thing)
        and thing.__module__.startswith("functional_optim.algorithms.")
        and not name.startswith("scale_by_")
        and "lr" in inspect.signature(thing).parameters
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 if all kernels are cached for the next process.

    Example::

        >>> from functional_optim import warmup
        >>> warmup.main(["sgd", "--dtype", "float32"])  # doctest: +ELLIPSIS
        sgd, float32: 1 ...
        The folder of kernels is ...
        0
    """
    parser = argparse.ArgumentParser(
        prog="python -m functional_optim.warmup",
        description="Compile the kernels of algorithms ahead of time, and cache them.",
    )
    parser.add_argument("names", nargs="+", metavar="algorithm", help=", ".join(known()))
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], help="of the parameters (default: float32)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="name=value",
        help="hyperparameters that change the code, e.g. momentum=0.9 nesterov=True",
    )
    given = parser.parse_args(argv)
    try:
        isa_levels.chosen()
        recipes = {name: _recipe(name, given.set) for name in given.names}
        dtypes = [_dtype(name) for name in given.dtype]
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    complete = [_report(name, tx, dtypes) for name, tx in recipes.items()]
    folder = kernels.folder()
    if folder is None:
        _say("Nothing can be cached: FUNCTIONAL_OPTIM_CACHE is off, or its folder is unusable.")
    else:
        _say(f"The folder of kernels is {folder}.")
    return 0 if all(complete) else 1


def _recipe(name: str, settings: Sequence[str]) -> GradientTransformation:
    factory = known().get(name)
    if factory is None:
        raise ValueError(
            f"there is no algorithm called {name!r}; the known ones are {', '.join(known())}."
        )
    hyper = dict(map(_setting, settings))
    takes = inspect.signature(factory).parameters
    if unknown := hyper.keys() - takes.keys():
        raise TypeError(
            f"{name} does not take the hyperparameter {', '.join(sorted(unknown))}; it takes "
            f"{', '.join(takes)}."
        )
    return factory(**hyper)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a hyperparameter is set by name=value, but got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"parameters cannot have the dtype {name!r}; pass one such as float32 or bfloat16."
        )
    return dtype


def _report(name: str, tx: GradientTransformation, dtypes: Sequence[torch.dtype]) -> bool:
    """Compile one algorithm and print the result; are all its kernels cached?"""
    try:
        results = warm(tx, dtypes)
    except (TypeError, RuntimeError) as error:
        _say(f"{name}: {error}")
        return False
    for dtype, built, found, unkept in results:
        counts = {"built": built, "found": found, "compiled, but not kept": unkept}
        parts = [f"{count} {what}" for what, count in counts.items() if count]
        _say(f"{name}, {str(dtype).removeprefix('torch.')}: {', '.join(parts) or 'no kernels'}")
    return not any(result.unkept for result in results)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    raise SystemExit(main())
