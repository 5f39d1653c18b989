"""Tensors to step, and steps by the optimizer object and by `fo.compile`."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters, kernels, tree
from functional_optim.core.base import GradientTransformation
from functional_optim.core.traits import is_elementwise
from gpu_check.platform import NotHere, Platform, Step
from gpu_check.recipes import CheckedRecipe

SHAPES: dict[str, tuple[int, ...]] = {
    "cube": (3, 4, 5),
    "matrix": (97, 130),
    "matrix_b": (6, 7),
    "scalar": (),
    "vector": (67,),
}
"""Of more than one program of a kernel, and of less."""

GPT = [(50257, 768), (1024, 768)]
GPT += [
    *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)],
    *[(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)],
] * 12
GPT += [(768,), (768,)]
"""The 148 tensors of GPT-2, of 124 million parameters."""

Tree = dict[str, Tensor]


def drawn(seed: int, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]) -> Tree:
    """Random tensors on the CPU, the same at every call but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def moved(given: Tree, device: torch.device, dtype: torch.dtype | None = None) -> Tree:
    """Copies on a device."""
    return {name: x.to(device, dtype, copy=True) for name, x in given.items()}


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Inside, the warning that a program fails, and that another way was taken, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def parameters(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Parameters with gradients on a device, the same at every call."""
    torch.manual_seed(0)
    params: list[Tensor] = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02))
        p.grad = torch.empty_like(p).normal_(std=0.01)
        params.append(p)
    return params


class Way(NamedTuple):
    """How a recipe is stepped: called with gradients, it writes to `params`.

    plan: what holds the executors. state: the tensors of the state, by name.
    """

    params: Tree
    step: Callable[[Tree], object]
    plan: Callable[[], Any]
    state: Callable[[], dict[str, Tensor]]


def by_object(recipe: CheckedRecipe, start: Tree) -> Way:
    """A recipe in an optimizer object."""
    params = {name: torch.nn.Parameter(p) for name, p in start.items()}
    opt = adapters.Optimizer(list(params.items()), recipe.make, **recipe.hyper)

    def step(grads: Tree) -> None:
        for name, p in params.items():
            if p.grad is None:
                p.grad_dtype = grads[name].dtype
            p.grad = grads[name]
        opt.step()

    return Way(
        {name: p.detach() for name, p in params.items()},
        step,
        lambda: opt.__dict__.get("_plan"),
        lambda: tensors_of(opt),
    )


def by_function(recipe: CheckedRecipe, start: Tree) -> Way:
    """A recipe in `fo.compile`'s step."""
    tx = recipe.tx()
    step = fo.compile(tx)
    held: dict[str, Any] = {"state": tx.init(start)}

    def run(grads: Tree) -> None:
        _, held["state"] = step(grads, held["state"], start)

    return Way(
        start,
        run,
        lambda: next(iter(getattr(step, "plans", ())), None),
        lambda: {path: x for path, x in tree.items(held["state"]) if isinstance(x, Tensor)},
    )


WAYS = {"object": by_object, "function": by_function}


def by_operations(tx: GradientTransformation, start: Tree, grads: Sequence[Tree]) -> Tree:
    """The parameters after steps of the pure transformation: what all others are compared with."""
    params, state = start, tx.init(start)
    with torch.no_grad():
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = fo.apply_updates(params, updates)
    return params


def tensors_of(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors in the state of an optimizer object."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": x
        for i, p in enumerate(params)
        for key, x in opt.state.get(p, {}).items()
        if isinstance(x, Tensor)
    }


def executors_of(plan: Any) -> list[str]:
    """What steps the tensors of a plan."""
    if plan is None:
        return ["no plan"]
    found = [type(x).__name__ for entry in plan.entries for x in entry.tensors.executors]
    return found + ["whole trees"] * len(getattr(plan, "trees", ()))


def check_executors(plan: Any, platform: Platform) -> None:
    """Raise AssertionError if something else steps plain tensors than the kernels that should."""
    wanted = "NativeExecutor" if platform.device.type == "cpu" else "TritonExecutor"
    if wanted == "TritonExecutor" and platform.device.type not in kernels.DRIVERS:
        return
    for entry in () if plan is None else plan.entries:
        placements, first = entry.tensors.placements, entry.tensors.params[0]
        names = {type(x).__name__ for x in entry.tensors.executors}
        if all(is_elementwise(x, first) for x in placements) and names - {wanted}:
            rules = ", ".join([x.name for x in placements])
            raise AssertionError(f"{rules}: stepped by {', '.join(sorted(names))}, not {wanted}.")


def launches(platform: Platform, step: Step) -> list[str] | None:
    """The kernels that a step launches, which is made in any case; None where they are not told."""
    try:
        return platform.launched(step)
    except NotHere:
        step()
        return None


def gaps(found: Tree, expected: Tree, start: Tree, steps: int) -> dict[str, tuple[float, float]]:
    """For each tensor how far it is from where it should be, and how far it should go.

    What rounding may take from a weight in so many steps counts as a way, too: of a step that is
    smaller than that, nothing can be seen.
    """
    found_gaps: dict[str, tuple[float, float]] = {}
    for name, x in found.items():
        wanted, begin = expected[name].double().cpu(), start[name].double()
        way, size, gap = (
            float(torch.linalg.vector_norm(own))
            for own in (wanted - begin, begin, x.detach().double().cpu() - wanted)
        )
        rounding = steps * torch.finfo(start[name].dtype).eps * size
        found_gaps[name] = (gap if gap == gap else float("inf"), way + rounding)
    return found_gaps


def error_of_all(far: dict[str, tuple[float, float]]) -> float:
    """The error over all tensors, as a part of the way."""
    gap, way = (math.hypot(*column) for column in zip(*far.values(), strict=True))
    return gap / way


def error_of_each(far: dict[str, tuple[float, float]]) -> float:
    """The largest error of a tensor, as a part of its way."""
    return max([gap / way for gap, way in far.values()])


def check_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError, with the largest difference, unless two tensors are equal but for a few
    roundings of float32; they may be on two devices."""
    torch.testing.assert_close(
        found.detach().cpu(),
        expected.detach().cpu(),
        rtol=1e-5,
        atol=1e-6,
        msg=lambda text: f"{what} differs: {' '.join(text.split())}",
    )


class Warned:
    """Inside, warnings of this package are kept in `texts`."""

    def __enter__(self) -> Warned:
        self.context = warnings.catch_warnings(record=True)
        self.caught = self.context.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.context.__exit__(*exception)

    @property
    def texts(self) -> list[str]:
        every = [str(x.message) for x in self.caught or []]
        return [text for text in every if text.startswith("functional_optim:")]
