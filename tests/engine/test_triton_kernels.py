"""Triton kernels of recipes in Triton's interpreter, next to the C++ of the same graphs; and what
their machine code says, compiled for a GPU that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import undeclared
from gpu.ahead import check_types
from gpu.drivers import Host, on_host
from gpu.kernel_runs import (
    BY_NAME,
    EVERY,
    LOGARITHMIC,
    OF_MATRICES,
    Table,
    alike,
    asked,
    check,
    recorded,
    served,
)
from torch import Tensor

import functional_optim as fo
from functional_optim.kernels.print_triton import KernelVariant, source_of
from functional_optim.kernels.triton_spaces import CHUNK, CONFIGS, LaunchConfig

BLOCK = CONFIGS[0].block
FLAT = [(n,) for n in (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12, CHUNK + 5)]
SHAPES: dict[int, list[Any]] = {
    1: [(1,), (67,), (CHUNK + BLOCK + 3,)],
    2: [(1, 1), (3, 5), (520, 17), (2, 2100)],
    3: [(2, 3, 4), (130, 4, 17)],
}
"""By dimensions, for rules with reductions: several programs share rows, columns and chunks."""

LITTLE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
SUMMED = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""How far elements may part that depend on sums, which are taken in another order."""


def check_all(name: str, dtype: torch.dtype, mixed: bool = False, **options: Any) -> None:
    for own in served(name, dtype, mixed):
        flat = own.graph.by_element() and not own.graph.results
        loose = 0.0 if flat else SUMMED[dtype]
        loose = LITTLE[dtype] if name in LOGARITHMIC else loose
        dims = own.like[1].dim()
        shapes = FLAT if flat and dims == 1 else SHAPES[dims]
        check(own, shapes, special=flat, loose=loose, **options)


def late(every: Collection[str], first: Collection[str]) -> list[Any]:
    """Recipes; those that are not among the first are for `make test-full`."""
    marks = {True: [], False: [pytest.mark.full]}
    return [pytest.param(name, marks=marks[name in first], id=name) for name in every]


MIXED = ("sgd-momentum", "adamw", "lion", "adan", "prodigy", "lamb", "composed", "madgrad", "sm3")
HALF = (*MIXED, "adabelief", "asgd", "cocob", "rprop", "mechanize", "adam_mini", "novograd")


@pytest.mark.parametrize("name", EVERY)
def test_kernels_in_float32_do_what_the_cpp_does(name: str) -> None:
    assert served(name)
    check_all(name, torch.float32)


@pytest.mark.parametrize("name", late(EVERY, HALF))
def test_kernels_in_bfloat16_do_what_the_cpp_does(name: str) -> None:
    check_all(name, torch.bfloat16)


@pytest.mark.parametrize("name", late(EVERY, MIXED))
def test_kernels_with_slots_in_float32_do_what_the_cpp_does(name: str) -> None:
    check_all(name, torch.bfloat16, mixed=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "lamb", "madgrad", "adafactor"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check_all(name, dtype)


def test_the_recipes_without_kernels_are_those_of_the_list() -> None:
    assert BY_NAME.keys() >= OF_MATRICES
    assert not any(served(name) for name in OF_MATRICES)


@pytest.mark.parametrize("name", undeclared.ROWS)
def test_rules_without_flags_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they have kernels or not; a kernel that cannot be used would be told."""
    told: list[str] = []
    monkeypatch.setattr("functional_optim.kernels.tell", told.append)
    with on_host(Host()) as host:
        outcomes = undeclared.outcomes(undeclared.ROWS[name], ["together"], ["fo.compile"])
        assert {x.kind for x in outcomes} == {"equal"}
    assert not told
    for text in host.texts:
        check_types(text)


# ---------------------------------------------------------------- where things are


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "lamb"])
def test_tensors_that_begin_anywhere(name: str) -> None:
    check_all(name, torch.bfloat16, offset=1, aligned=False)


@pytest.mark.parametrize("source", ["value", "tensor"])
def test_numbers_come_from_one_place(source: str) -> None:
    (own,) = served("adamw")
    check(own, SHAPES[3], sources=(source,) * own.body.count)


def test_a_number_leaves_all_out() -> None:
    (own,) = served("adamw")
    check(own, SHAPES[3], skip=0.0)
    table = Table(own, SHAPES[3])
    leaves, _ = table.by_triton(skip=1.0)
    for mine, before in zip(leaves, table.leaves, strict=True):
        assert all(map(alike, mine, before))


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_the_division_of_the_work_does_not_matter(config: LaunchConfig) -> None:
    (own,) = served("adamw")
    check(own, SHAPES[3], config=config, special=True)


FAR = 2**31 // CHUNK + 1
"""Chunks before an element whose index does not fit into 32 bits."""


def test_elements_beyond_two_to_the_31() -> None:
    (own,) = asked(fo.adamw(0.1), {"vector": torch.ones(5, dtype=torch.bfloat16)})
    check(own, [(BLOCK + 5,), (7,)], ahead=FAR)


def test_adamw_moves_28_bytes_of_each_element() -> None:
    (own,) = asked(fo.adamw(0.1), {"vector": torch.ones(5)})
    memory = check(own, FLAT).memory
    for k, (size,) in enumerate(FLAT):
        mine = slice(4 * k, 4 * k + 4)
        assert memory.read[mine] == [4 * size] * 4
        assert memory.written[mine] == [0, 4 * size, 4 * size, 4 * size]


# ---------------------------------------------------------------- packed slots and weights


class Packed(NamedTuple):
    """A recipe with packed slots. dtype: of its weights. full: whether it is for `test-full`."""

    tx: Callable[[], Any]
    dtype: torch.dtype = torch.float32
    full: bool = False


def stored(kind: str, seed: int | None = None, **options: Any) -> Callable[[], Any]:
    return lambda: fo.stored(fo.lion(0.1), kind, where="*", seed=seed, **options)


def weights(kind: str) -> Callable[[], Any]:
    return lambda: fo.master_weights(fo.adamw(0.1), kind)


PACKED = {
    **{f"{kind}-nearest": Packed(stored(kind)) for kind in ("int8", "int4", "float8_e4m3fn")},
    **{f"{kind}-seed": Packed(stored(kind, 3)) for kind in ("int8", "int4", "float8_e4m3fn")},
    "float8_e5m2-nearest": Packed(stored("float8_e5m2"), full=True),
    "float8_e5m2-seed": Packed(stored("float8_e5m2", 3), full=True),
    "bfloat16-seed": Packed(stored("bfloat16", 3)),
    "int4 in blocks of 16": Packed(stored("int4", 1, block_size=16)),
    "int8 in blocks of 4096": Packed(stored("int8", 1, block_size=4096)),
    "int4 in blocks of 4096": Packed(stored("int4", None, block_size=4096), full=True),
    "unsigned int8": Packed(lambda: fo.stored(fo.adamw(0.1), "int8", where="*", seed=5)),
    "unsigned int4": Packed(lambda: fo.stored(fo.adamw(0.1), "int4", where="*", seed=5)),
    "lamb": Packed(lambda: fo.stored(fo.lamb(0.1), "int8", where="*", seed=None)),
    "clip": Packed(lambda: fo.chain(fo.clip_by_global_norm(0.1), stored("int8")())),
    **{kind: Packed(weights(kind), torch.bfloat16) for kind in ("split16", "kahan", "stochastic")},
    "split8": Packed(
        lambda: fo.master_weights(fo.stored(fo.adamw(0.1), "int8", where="*", seed=5), "split8"),
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.full] if own.full else []) for x, own in PACKED.items()],
)
def test_packed_slots_are_those_of_the_cpp(name: str) -> None:
    """To the last code and bit, of all codes, in one launch a step."""
    recipe = PACKED[name]
    every = asked(recipe.tx(), {"matrix": torch.randn(71, 61).to(recipe.dtype)})
    assert every
    for own in every:
        last = max(own.graph.block, BLOCK)
        shapes = [(x, 1) for x in (CHUNK + last + 37, 1, 255, 513)]
        check(own, shapes, loose=SUMMED[recipe.dtype] if name == "lamb" else 0.0)
        variant = KernelVariant(("value",) * own.body.count, True)
        texts = source_of(own.graph).texts(variant, CONFIGS[0]._replace(block=last))
        assert len(texts) == (2 if name == "lamb" and not own.graph.results else 1)
        for text in texts:
            check_types(text)


# ---------------------------------------------------------------- operations


def by_numpy(name: str) -> Any:
    """The root, rounded correctly, which torch's on the CPU may not be."""

    def root(x: Tensor, y: Tensor) -> Tensor:
        wide = x.float() if x.element_size() == 2 else x
        with np.errstate(invalid="ignore", divide="ignore"):
            found = torch.from_numpy(np.sqrt(wide.numpy()))
        return (1 / found if name == "rsqrt" else found).to(x.dtype)

    return root


EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x)
        for name in ("round", "trunc", "floor", "ceil", "abs", "neg", "sign", "reciprocal")
    },
    **{
        name: lambda x, y, name=name: torch.where(getattr(torch, name)(x, y), x, y)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x, y)
        for name in ("copysign", "maximum", "minimum", "div")
    },
    "sqrt": lambda x, y: x.sqrt(),
    "rsqrt": lambda x, y: x.rsqrt(),
    "powers": lambda x, y: x.pow(2) + y.float().pow(3) - x.pow(-1),
    "alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "isinf": lambda x, y: torch.where(x.isinf(), x, y),
    "isfinite": lambda x, y: (~x.isfinite()).to(y.dtype),
    "clamp": lambda x, y: x.clamp(-1, 2),
    "and": lambda x, y: torch.where((x > 0) & (y > 0), x, y),
    "or": lambda x, y: torch.where((x > 0) | (y > 0), x, y),
    "xor": lambda x, y: torch.where((x > 0) ^ (y > 0), x, y),
    "not": lambda x, y: torch.where(~x.isnan() & torch.logical_not(y > 0), x, y),
}
"""Operations of two tensors that are rounded correctly."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_operations_that_are_rounded_correctly(dtype: torch.dtype) -> None:
    """As torch has them, bit for bit, but for the root and the order of two zeros."""
    table = Table(recorded(EXACT, dtype), [(3 * BLOCK + 5,)], special=True)
    ((x, y, *found),), _ = table.by_triton()
    x, y = [own if dtype is torch.float64 else own.float() for own in table.leaves[0][:2]]
    for (name, function), mine in zip(EXACT.items(), found, strict=True):
        exact = by_numpy(name) if name in ("sqrt", "rsqrt") else function
        want = exact(x, y).to(dtype)
        if name in ("maximum", "minimum"):
            both = (x == 0) & (y == 0)
            mine, want = mine.masked_fill(both, 0.0), want.masked_fill(both, 0.0)
        assert alike(mine, want), name


# ---------------------------------------------------------------- mutants


def tail_left_out(text: str) -> str:
    return text.replace("if left > blocks", "if left < 0 * blocks")


def one_too_many(text: str) -> str:
    return text.replace("offsets < left - k", "offsets <= left - k")


def row_of_a_neighbour(text: str) -> str:
    return text.replace("tensor = at >> 32", "tensor = (at >> 32) ^ 1")


def wrong_width(text: str) -> str:
    return text.replace("row = rows + tensor * 4", "row = rows + tensor * 3")


def short_start(text: str) -> str:
    return text.replace("= at & 0xFFFFFFFF", "= (at & 0xFFFFFFFF).to(tl.int32)")


def another_number(text: str) -> str:
    return text.replace("tl.load(a3)", "tl.load(a3 + 1)")


def stored_twice(text: str) -> str:
    return text.replace("tl.store(p1 + (k *", "tl.store(p1 + (0 *")


def not_fused(text: str) -> str:
    return re.sub(r"tl\.fma\((.*), (\(v0 - v2\)), ", r"((\1) * \2 + ", text)


MUTANTS = (
    *(tail_left_out, one_too_many, row_of_a_neighbour, wrong_width, short_start, another_number),
    *(stored_twice, not_fused),
)


@pytest.mark.parametrize("change", MUTANTS)
def test_a_wrong_kernel_is_found(change: Callable[[str], str]) -> None:
    (own,) = asked(fo.adamw(0.1), {"vector": torch.ones(5)})
    source = source_of(own.graph)
    sources = [("value", "tensor")[i % 2] for i in range(own.body.count)]
    (text,) = source.texts(KernelVariant(tuple(sources), True), CONFIGS[0])
    assert change(text.text) != text.text
    far: dict[str, Any] = {"ahead": FAR} if change is short_start else {}
    with pytest.raises((AssertionError, MemoryError)):
        check(own, [(CHUNK + 12,), (7,)], change=change, **far)


def test_a_false_hint_of_alignment_is_found() -> None:
    (own,) = served("adamw")
    with pytest.raises(MemoryError, match="no multiple of 16"):
        check(own, SHAPES[3], offset=1)


def unmasked(text: str) -> str:
    changed = text.replace("tl.where(mask, ", "tl.where(mask | True, ")
    return re.sub(r"mask=[\w &]+, other=0", r"mask=mask, other=1", changed)


def parts_of_a_neighbour(text: str) -> str:
    return text.replace("part.to(tl.int64) * kept", "(part ^ 1).to(tl.int64) * kept")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clip_by_global_norm", unmasked),
        ("adafactor", unmasked),
        ("adafactor", parts_of_a_neighbour),
        ("sm3", lambda text: text.replace("float('-inf')", "0.5")),
    ],
)
def test_a_wrong_reduction_is_found(name: str, change: Callable[[str], str]) -> None:
    own = served(name)[-1] if name == "clip_by_global_norm" else served(name)[1]
    shapes = SHAPES[own.like[1].dim()]
    check(own, shapes, loose=1e-6)
    with pytest.raises((AssertionError, MemoryError)):
        check(own, shapes, loose=1e-6, change=change)
