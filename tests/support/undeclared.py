"""Rules for one tensor as a user writes them, without a flag that says what they are.

Each is stepped in four ways and compared with a naive loop, which calls the rule's own function on
one tensor after the other. Run as a program, it prints a table of all of them and two counts:

    python tests/support/undeclared.py [--only NAME ...] [--sets NAME ...] [--ways NAME ...]

Here are the sets of tensors, the naive loop, the four ways and the comparison. The rules are in
`undeclared_halves.py`, `undeclared_numbers.py`, `undeclared_places.py`, `undeclared_sizes.py`,
`undeclared_slots.py` and `undeclared_recipes.py`.
`undeclared_table.py` says what a rule is. `undeclared_refused.py` has the rules that are refused.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import undeclared_halves  # noqa: F401 this module and the next five fill the table
import undeclared_numbers  # noqa: F401
import undeclared_places  # noqa: F401
import undeclared_recipes  # noqa: F401
import undeclared_sizes  # noqa: F401
import undeclared_slots  # noqa: F401
from torch import Tensor
from undeclared_table import ROWS, Row

import functional_optim as fo
from functional_optim.adapters import Optimizer

STEPS = 3


# --- tensors


SHAPES = {
    "scalar": (),
    "vector": (7,),
    "matrix": (6, 8),
    "tall": (33, 5),
    "kernel": (4, 3, 3, 3),
    "large": (130, 70),
    "row": (1, 9),
    "column": (9, 1),
    "thin": (300, 2),
}
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
    **{name: Model({name: shape}) for name, shape in SHAPES.items()},
    "twins": Model({f"{name}{i}": SHAPES[name] for i in range(3) for name in FEW}),
    "pieces": Model({"huge": (300, 512), "vector": (7,)}),
    "float64": Model({name: SHAPES[name] for name in FEW}, torch.float64),
    "bfloat16": Model({name: SHAPES[name] for name in FEW}, torch.bfloat16),
    "complex64": Model({name: SHAPES[name] for name in FEW[:3]}, torch.complex64),
    "strided": Model({"kernel": (4, 3, 5, 3), "matrix": (6, 8), "vector": (7,)}, strided=True),
}

BAR = ("together", "scalar", "vector", "matrix", "tall", "kernel", "large")
"""The sets of the issue's bar: its six shapes, each alone and in one model."""


# --- the naive loop, and the four ways


class End(NamedTuple):
    """Where some steps lead. slots: by field and by name of the parameter."""

    params: dict[str, Tensor]
    slots: dict[str, dict[str, Tensor]]


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


def naive(row: Row, model: Model) -> End:
    """One tensor after the other, in plain torch."""
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
    return End(params, by_field(slots))


def by_field(slots: Sequence[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Slots by the names of their fields, but for names that several rules have."""
    times = collections.Counter(field for own in slots for field in fields_of(own))
    found: dict[str, dict[str, Tensor]] = {}
    for own in slots:
        for name, record in own.items():
            for field, s in zip(record._fields, record, strict=True):
                if times[field] == 1 and s is not None:
                    found.setdefault(field, {})[name] = s
    return found


def fields_of(own: dict[str, Any]) -> tuple[str, ...]:
    """The names of the slots of one rule."""
    return next(iter(own.values()))._fields if own else ()


def updated(tx: Any, model: Model) -> End:
    """By `tx.update` and `fo.apply_updates`."""
    params = model.params()
    state = tx.init(params)
    for grads in model.grads():
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    return End(params, state.slots)


def compiled(tx: Any, model: Model) -> End:
    """By `fo.compile`."""
    params = model.params()
    step, state = fo.compile(tx), tx.init(params)
    for grads in model.grads():
        params, state = step(grads, state, params)
    return End(params, state.slots)


def stepped(tx: Any, model: Model, *, compile: bool) -> End:
    """By an optimizer object."""
    params = {name: torch.nn.Parameter(p) for name, p in model.params().items()}
    opt = Optimizer(list(params.items()), lambda: tx, compile=compile)
    for grads in model.grads():
        for name, p in params.items():
            p.grad = grads[name]
        opt.step()
    slots: dict[str, dict[str, Tensor]] = {}
    for name, p in params.items():
        for field, s in opt.state[p].items():
            slots.setdefault(field, {})[name] = s
    return End({name: p.detach() for name, p in params.items()}, slots)


WAYS: dict[str, Callable[[Any, Model], End]] = {
    "update": updated,
    "fo.compile": compiled,
    "Optimizer": lambda tx, model: stepped(tx, model, compile=True),
    "Optimizer, compile=False": lambda tx, model: stepped(tx, model, compile=False),
}


# --- outcomes


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


def worst(found: End, expected: End) -> tuple[float, str]:
    """The largest difference between two ends, and where it is."""
    most, at = 0.0, ""
    for name, y in expected.params.items():
        apart = difference(found.params[name], y)
        if apart > most:
            most, at = apart, f"parameter {name!r}"
    for field, own in expected.slots.items():
        for name, y in own.items():
            apart = difference(found.slots[field][name], y)
            if apart > most:
                most, at = apart, f"slot {field!r} of {name!r}"
    return most, at


SENTENCES = (ValueError, RuntimeError, TypeError)
"""The errors of what is refused in a sentence."""


class Outcome(NamedTuple):
    """What came of a rule in one way on one set of tensors.

    kind: "equal", "DIFFERS", "refused", or "crashed" for an error that is none of SENTENCES. apart:
    the largest relative difference. says: where it is, or the error.
    """

    rule: str
    way: str
    model: str
    kind: str
    apart: float = 0.0
    says: str = ""

    def __str__(self) -> str:
        head = f"{self.rule}, by {self.way}, on {self.model}: {self.kind}"
        return f"{head} x {self.apart:.1e} in {self.says}" if self.apart else f"{head} {self.says}"


def tolerance(row: Row, model: Model) -> float:
    """How far two ends may be apart: for bfloat16 one rounding, for float64 a part of float32's."""
    if model.dtype is torch.bfloat16:
        return max(2.0**-8, row.tolerance)
    return row.tolerance * (1e-4 if model.dtype is torch.float64 else 1.0)


def outcomes(
    row: Row, models: Sequence[str] = tuple(MODELS), ways: Sequence[str] = tuple(WAYS)
) -> Iterator[Outcome]:
    """Every way on every set of tensors that the rule takes."""
    for name in models:
        if name in row.without:
            continue
        model = MODELS[name]
        expected = naive(row, model)
        for way in ways:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of steps that run eagerly, and why
                    found = WAYS[way](row.build(), model)
            except Exception as error:
                says = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                kind = "refused" if isinstance(error, SENTENCES) else "crashed"
                yield Outcome(row.name, way, name, kind, says=says)
                continue
            apart, where = worst(found, expected)
            kind = "equal" if apart <= tolerance(row, model) else "DIFFERS"
            yield Outcome(row.name, way, name, kind, apart, where)


def cell(found: Sequence[Outcome]) -> str:
    """What a way makes of a rule on all sets: the worst of it."""
    apart = [x.apart for x in found if x.kind == "DIFFERS"]
    if apart:
        return f"DIFFERS x {max(apart):.0e}"
    kinds = {x.kind for x in found}
    return next((kind for kind in ("crashed", "refused") if kind in kinds), "equal")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Rules without flags, in four ways.")
    parser.add_argument("--only", nargs="+", default=list(ROWS), metavar="RULE")
    parser.add_argument("--sets", nargs="+", default=list(MODELS), choices=[*MODELS, "bar"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--file", type=Path, help="for each outcome that is not equal, a line")
    args = parser.parse_args()
    models = [x for name in args.sets for x in (BAR if name == "bar" else (name,))]
    torch.set_num_threads(1)
    width = max(len(name) for name in args.only)
    count: collections.Counter[str] = collections.Counter()
    bad: list[Outcome] = []
    say = functools.partial(print, flush=True)
    say(" | ".join(["rule".ljust(width), *[way.ljust(24) for way in args.ways], "seconds"]))
    for name in args.only:
        start = time.perf_counter()
        found = list(outcomes(ROWS[name], models, args.ways))
        cells = [cell([x for x in found if x.way == way]) for way in args.ways]
        seconds = f"{time.perf_counter() - start:.1f}"
        say(" | ".join([name.ljust(width), *[x.ljust(24) for x in cells], seconds]))
        for kind in ("DIFFERS", "refused", "crashed"):
            count[kind] += any(x.startswith(kind) for x in cells)
        bad += [x for x in found if x.kind != "equal"]
    if args.file:
        args.file.write_text("".join(f"{x}\n" for x in bad))
    silent = [x for x in bad if x.kind == "DIFFERS"]
    say(
        f"{len(args.only)} rules: {count['DIFFERS']} differ silently in some way, "
        f"{count['refused']} are refused, {count['crashed']} crash; of all outcomes {len(silent)} "
        "differ."
    )


if __name__ == "__main__":
    main()
