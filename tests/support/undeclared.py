"""Rules without flags (`undeclared_rules.py`), stepped in four ways and by a naive loop.

The loop calls the rule's own function on one tensor after the other.
"""

import collections
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import undeclared_slots  # noqa: F401  (which adds rows)
from torch import Tensor
from undeclared_rules import ROWS, Row
from ways import by_eager_object, by_function, by_object, by_update

__all__ = ["MODELS", "ROWS", "WAYS", "naive", "outcomes", "worst"]

STEPS = 3
SHAPES = {"scalar": (), "vector": (7,), "matrix": (6, 8), "tall": (33, 5), "kernel": (4, 3, 3, 3)}
SHAPES |= {"large": (130, 70), "row": (1, 9), "column": (9, 1), "thin": (300, 2)}
FEW = ("scalar", "vector", "matrix", "kernel")


class Model(NamedTuple):
    """A set of tensors that are stepped together."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    strided: bool = False

    def tensors(self, seed: int, *, like_params: bool = True) -> dict[str, Tensor]:
        """Random tensors, by name. like_params: with the strides of the parameters."""
        made = {}
        for i, (name, shape) in enumerate(self.shapes.items()):
            x = random_tensor(1000 * seed + i, shape, self.dtype)
            made[name] = by_columns(x) if self.strided and like_params else x.clone()
        return made

    def params(self) -> dict[str, Tensor]:
        """The first parameters. They are small, so that an update shows beside them."""
        return {name: 0.1 * x for name, x in self.tensors(0).items()}

    def grads(self) -> list[dict[str, Tensor]]:
        """The gradients of each step, of which some lie in memory as the parameters do."""
        return [self.tensors(k + 1, like_params=k % 2 == 0) for k in range(STEPS)]


@functools.cache
def random_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A random tensor, of which callers take copies."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        pairs = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(pairs).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def by_columns(x: Tensor) -> Tensor:
    """A copy in channels_last, or transposed."""
    if x.dim() == 4:
        return x.clone(memory_format=torch.channels_last)
    return x.mT.clone(memory_format=torch.contiguous_format).mT if x.dim() == 2 else x.clone()


MODELS = {
    "together": Model(SHAPES),
    **{name: Model({name: SHAPES[name]}) for name in ("scalar", "vector", "matrix", "large")},
    "twins": Model({f"{name}{i}": SHAPES[name] for i in range(3) for name in FEW}),
    "pieces": Model({"huge": (300, 512), "vector": (7,)}),
    "float64": Model({name: SHAPES[name] for name in FEW}, torch.float64),
    "bfloat16": Model({name: SHAPES[name] for name in FEW}, torch.bfloat16),
    "complex64": Model({name: SHAPES[name] for name in FEW[:3]}, torch.complex64),
    "strided": Model({"kernel": (4, 3, 5, 3), "matrix": (6, 8), "vector": (7,)}, strided=True),
}


# ---------------------------------------------------------------- the naive loop
def computed_in(p: Tensor) -> torch.dtype:
    """The dtype in which a rule gets a tensor."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def seen_by_rule(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as its rule gets it: complex numbers as pairs."""
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.to(dtype) if real.is_floating_point() else real


def kept(x: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    return (torch.view_as_complex(x.contiguous()) if like.is_complex() else x).to(like.dtype)


def naive(row: Row, model: Model) -> tuple[Any, Any]:
    """One tensor after the other, in plain torch: the parameters, and the slots by field."""
    params = model.params()
    slots: list[dict[str, Any]] = [
        {n: part.init(p) for n, p in params.items() if part.init and part.where(n, p)}
        for part in row.parts
    ]
    carry = [part.carry for part in row.parts]
    for k, grads in enumerate(model.grads()):
        dtypes = {name: computed_in(p) for name, p in params.items()}
        us = {name: seen_by_rule(g, dtypes[name]) for name, g in grads.items()}
        ps = {name: seen_by_rule(p, dtypes[name]) for name, p in params.items()}
        for i, part in enumerate(row.parts):
            mine = [name for name, p in params.items() if part.where(name, p)]
            given = {}
            for name in mine:
                own = slots[i].get(name, ())
                seen = [None if s is None else seen_by_rule(s, dtypes[name]) for s in own]
                given[name] = type(own)(*seen) if own else ()
            total: Any = None
            if part.reduce is not None and mine:
                found = [part.reduce(us[name], given[name], ps[name]) for name in mine]
                total = tuple(sum(float(x) for x in column) for column in zip(*found, strict=True))
            numbers: Any = () if total is None else total
            if part.scalars is not None and mine:
                carried = [] if carry[i] is None else [carry[i]]
                totals = [] if total is None else [total]
                numbers = part.scalars(float(k + 1), *carried, *totals, **(part.hyper or {}))
                if carried:
                    numbers, after = numbers
                    carry[i] = type(after)(*[torch.tensor(x).item() for x in after])
            for name in mine:
                us[name], new = part.update(us[name], given[name], ps[name], *numbers)
                old = slots[i].get(name)
                if old is not None:
                    pairs = zip(new, old, strict=True)
                    slots[i][name] = type(old)(*[s if s is None else kept(s, o) for s, o in pairs])
        params = {
            name: (p + kept(us[name], p if p.is_complex() else us[name])).to(p.dtype)
            for name, p in params.items()
        }
    return params, by_field(slots)


def by_field(slots: Sequence[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Slots by the names of their fields, but for names that several rules have."""
    firsts = [next(iter(own.values()))._fields for own in slots if own]
    times = collections.Counter(field for fields in firsts for field in fields)
    found: dict[str, dict[str, Tensor]] = {}
    for own in slots:
        for name, record in own.items():
            for field, s in zip(record._fields, record, strict=True):
                if times[field] == 1 and s is not None:
                    found.setdefault(field, {})[name] = s
    return found


# ---------------------------------------------------------------- outcomes
WAYS: dict[str, Callable[..., Any]] = {"update": by_update, "fo.compile": by_function}
WAYS |= {"Optimizer": by_object, "Optimizer, compile=False": by_eager_object}

EAGER = {"together", "twins", "complex64", "strided"}
"""Sets of tensors for the object with compile=False, which mostly runs what `update` runs."""

LEAST = 1e-2
"""What a difference is relative to where all elements are smaller, or zero."""


def difference(x: Any, y: Tensor) -> float:
    """The largest difference relative to the largest element of y; inf for another shape."""
    if x is None or x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    wide = torch.complex128 if y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    if not bool((x.isfinite() == y.isfinite()).all()):
        return math.inf
    apart = (x - y).abs().nan_to_num(0.0).max().item()
    return apart / max(y.abs().nan_to_num(0.0).max().item(), LEAST)


def worst(found: Any, expected: Any) -> tuple[float, str]:
    """The largest difference between two ends, and where it is."""
    (params, slots), (wanted, wanted_slots) = found, expected
    apart = [(difference(params[n], y), f"parameter {n!r}") for n, y in wanted.items()]
    for field, own in wanted_slots.items():
        pairs = [(f"slot {field!r} of {n!r}", slots[field][n], y) for n, y in own.items()]
        apart += [(difference(x, y), where) for where, x, y in pairs]
    return max(apart)


def outcomes(
    row: Row, models: Sequence[str] = tuple(MODELS), ways: Sequence[str] = tuple(WAYS)
) -> Iterator[str]:
    """What is wrong in some way on a set of tensors that the rule takes."""
    for name in models:
        if name in row.without:
            continue
        model = MODELS[name]
        expected = naive(row, model)
        near = row.tolerance * (1e-4 if model.dtype is torch.float64 else 1.0)
        near = max(near, 2.0**-8) if model.dtype is torch.bfloat16 else near
        for way in ways if name in EAGER else [x for x in ways if "compile=False" not in x]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps that run eagerly, and why
                found = WAYS[way](row.build(), model.params(), model.grads())
            apart, where = worst(found, expected)
            if apart > near:
                yield f"{row.name}, by {way}, on {name}: x {apart:.1e} in {where}"
