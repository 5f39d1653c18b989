"""Triton kernels of recipes in the simulator, next to the graphs of their rules run by torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cases import CASES
from gpu.ahead import facts, forbidden, own_cache
from gpu.interpreter import interpret
from gpu.kernel_cases import Host, Simulated, Traced, asked, on_host
from gpu.kernel_runs import NAME, Table, compile_for, text_of

import functional_optim as fo
from functional_optim.kernels import triton_builds
from functional_optim.kernels.tracing import Signature
from functional_optim.kernels.triton_builds import CONFIGS, KernelVariant, function_of
from functional_optim.kernels.triton_source import LaunchConfig

CONFIG = CONFIGS[0]
BLOCK = CONFIG.block
SIZES = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12, CONFIG.chunk + 5)
BY_NAME = {case.name: case for case in CASES}
NOT_ELEMENTWISE = {
    *("adafactor", "adam_mini", "came", "muon", "normuon", "adamuon", "dion2", "psgd_kron"),
    *("psgd_kron-seldom", "soap", "soap-both-sides", "kl_soap", "kl_shampoo", "shampoo"),
    *("shampoo-blocks", "novograd", "sm3", "scion-row", "scion-col", "scion-sign"),
    "fromage-bounded",
}
"""Recipes all of whose rules look at shapes."""
LOGARITHMIC = {"madgrad"}
"""Recipes with a logarithm. Libdevice's is not torch's, so their parameters may part a little."""
LITTLE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
FROM_LIBRARY = {"ex2.approx.ftz.f32", "rcp.approx.ftz.f64"}
"""Instructions that do not round as IEEE 754 has it: in libdevice's `exp`, and its `log` of
float64, for numbers that are not small."""


@cache
def kernels_of(name: str, dtype: torch.dtype, mixed: bool = False) -> list[Traced]:
    case = BY_NAME[name]
    tx: Any = case.tx()
    if mixed:
        tx = fo.slot_dtypes(tx, **dict.fromkeys(tx.layout.keys, torch.float32))
    return asked(tx, case.params(dtype))


def loose(name: str, dtype: torch.dtype) -> float:
    return LITTLE[dtype] if name in LOGARITHMIC else 0.0


def mixed_sources(kernel: Traced) -> tuple[str, ...]:
    """One of each three numbers from a row, from the launch, and from a tensor; rows first."""
    count = kernel.rule.numbers[0]
    rows, rest = count // 3, count - count // 3
    return ("row",) * rows + (("value", "tensor") * rest)[:rest]


def check(
    kernel: Traced,
    sources: tuple[str, ...] | None = None,
    change: Callable[[str], str] = str,
    aligned: bool = True,
    loose: float = 0.0,
    sizes: tuple[int, ...] = SIZES,
    **options: Any,
) -> Table:
    """Assert that a kernel, whose text may be changed, does what its rule does.

    loose: how far parameters may part, where a rule takes a logarithm. sources: of the numbers.
    """
    own = mixed_sources(kernel) if sources is None else sources
    text = text_of(kernel, KernelVariant(own, aligned), CONFIG)
    text = text._replace(text=change(text.text))
    table = Table(kernel, sizes, own, CONFIG, **options)
    ptx = compile_for(text, CONFIG).asm["ptx"]
    assert forbidden(ptx).keys() <= (FROM_LIBRARY if loose else set())
    table.check(lambda: table.run(ptx), loose)
    return table


def late(first: Collection[str]) -> list[Any]:
    """All element-wise recipes; those that are not among the first are for `make test-full`."""
    return [
        pytest.param(c.name, marks=[] if c.name in first else [pytest.mark.full], id=c.name)
        for c in ELEMENTWISE
    ]


ELEMENTWISE = [case for case in CASES if case.name not in NOT_ELEMENTWISE]
MIXED = ("sgd-momentum", "adamw", "lion", "adan", "prodigy", "lamb", "composed", "madgrad")
HALF = (
    *("adabelief", "adadelta", "adagrad", "adamax", "ademamix", "adopt", "asgd", "mars", "nadam"),
    *("radam", "rmsprop", "rprop", "sign_sgd", "schedule_free_adamw", "lars", "sophia", "cocob"),
    *("dadapt_adam", "dog", "clip_by_value", "mechanize", "params_ema", "yogi", "fromage"),
    *MIXED,
)
"""Recipes that are also tested in bfloat16, and those of MIXED with slots in float32 then; the rest
of ELEMENTWISE is for `make test-full`."""


@pytest.mark.parametrize("name", [case.name for case in ELEMENTWISE])
def test_kernels_in_float32_are_the_rule_to_the_bit(name: str) -> None:
    kernels = kernels_of(name, torch.float32)
    assert kernels
    for kernel in kernels:
        check(kernel, loose=loose(name, torch.float32))


@pytest.mark.parametrize("name", late(HALF))
def test_kernels_in_bfloat16_are_the_rule_to_the_bit(name: str) -> None:
    for kernel in kernels_of(name, torch.bfloat16):
        check(kernel, loose=loose(name, torch.bfloat16))


@pytest.mark.parametrize("name", late(MIXED))
def test_kernels_with_slots_in_float32_are_the_rule_to_the_bit(name: str) -> None:
    for kernel in kernels_of(name, torch.bfloat16, mixed=True):
        check(kernel, loose=loose(name, torch.bfloat16))


def test_the_recipes_without_kernels_are_those_of_the_list() -> None:
    assert BY_NAME.keys() >= NOT_ELEMENTWISE
    assert not any(kernels_of(name, torch.float32) for name in NOT_ELEMENTWISE)


# ---------------------------------------------------------------- where things lie


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "lamb"])
def test_tensors_that_begin_anywhere(name: str, dtype: torch.dtype) -> None:
    for kernel in kernels_of(name, dtype):
        check(kernel, aligned=False, offset=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "lamb", "madgrad"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    for kernel in kernels_of(name, dtype):
        check(kernel, loose=loose(name, dtype))


@pytest.mark.parametrize("source", ["value", "tensor", "row"])
def test_numbers_come_from_one_place(source: str) -> None:
    (kernel,) = kernels_of("adamw", torch.float32)
    check(kernel, (source,) * kernel.rule.numbers[0])


FAR = 2**31 // CONFIG.chunk + 1
"""Chunks before an entry whose index does not fit into 32 bits."""


def test_entries_beyond_two_to_the_31() -> None:
    (kernel,) = kernels_of("adamw", torch.bfloat16)
    check(kernel, skipped=FAR, sizes=(BLOCK + 5, 7))


def test_adamw_moves_28_bytes_of_each_entry() -> None:
    (kernel,) = kernels_of("adamw", torch.float32)
    for ranges, size in zip(check(kernel).ranges, SIZES, strict=True):
        assert sum(one.read for one in ranges if one) == 16 * size
        assert [one.written for one in ranges if one] == [0, 4 * size, 4 * size, 4 * size][
            : 4 * (size > 0)
        ]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", ["adamw", "prodigy"])
def test_the_interpreter_does_the_same(name: str, aligned: bool) -> None:
    for kernel in kernels_of(name, torch.bfloat16):
        sources = mixed_sources(kernel)
        text = text_of(kernel, KernelVariant(sources, aligned), CONFIG)
        table = Table(kernel, (0, 7, BLOCK, CONFIG.chunk + 5), sources, CONFIG)
        function = function_of(text.text, NAME)
        table.check(lambda: interpret(function, (table.programs,), *table.arguments()))  # noqa: B023


# ---------------------------------------------------------------- operations

EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x)
        for name in ("round", "trunc", "floor", "ceil", "abs", "neg", "sign", "sqrt", "reciprocal")
    },
    **{
        name: lambda x, y, name=name: torch.where(getattr(torch, name)(x, y), x, y)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x, y)
        for name in ("copysign", "maximum", "minimum", "div")
    },
    "rsqrt": lambda x, y: torch.rsqrt(x),
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

OF_LIBRARY: dict[str, int] = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "erf"), 2),
    **dict.fromkeys(("tanh", "atan", "cosh", "sinh", "atanh", "asinh", "sigmoid"), 3),
    **dict.fromkeys(("tan", "acosh", "hypot", "atan2", "erfc"), 4),
    "pow": 4,
}
"""Functions of libdevice, and by how many units in the last place NVIDIA lets them be wrong. The
simulator takes `ex2.approx` as rounded correctly, which a card's is not."""


def of_functions(functions: list[Callable[[Tensor, Tensor], Tensor]], dtype: Any) -> Traced:
    """A kernel that puts functions of the gradient and the parameter into slots."""

    def body(leaves: list[list[Tensor]], numbers: Tensor) -> tuple[()]:
        ((x, y, *slots),) = leaves
        for slot, function in zip(slots, functions, strict=True):
            slot.copy_(function(x, y))
        return ()

    dtypes = (dtype,) * (2 + len(functions))
    numbers = (0, torch.float64 if dtype is torch.float64 else torch.float32)
    with on_host(Host()):
        return Traced(body, Signature((dtypes,), None, numbers, torch.device("cpu"), 1), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("part", range(3))
def test_operations_that_are_rounded_correctly(part: int, dtype: torch.dtype) -> None:
    check(of_functions(list(EXACT.values())[part::3], dtype), sizes=(3 * BLOCK + 5,))


@pytest.mark.parametrize("part", range(4))
def test_functions_of_the_library(part: int) -> None:
    names = list(OF_LIBRARY)[part::4]

    def function(name: str, x: Tensor, y: Tensor) -> Tensor:
        two = name in ("hypot", "atan2", "pow")
        return getattr(torch, name)(x, y) if two else getattr(torch, name)(x)

    kernel = of_functions([partial(function, name) for name in names], torch.float32)
    table = Table(kernel, (BLOCK + 5,), (), CONFIG)
    x, y, *_ = [x.clone() for x in table.leaves[0]]
    table.run(compile_for(text_of(kernel, KernelVariant((), True), CONFIG), CONFIG).asm["ptx"])
    for name, found in zip(names, table.leaves[0][2:], strict=True):
        exact = function(name, x.double(), y.double())
        want = exact.float()
        step = (torch.nextafter(want.abs(), torch.tensor(torch.inf)) - want.abs()).double()
        near = (found.double() - exact).abs() <= OF_LIBRARY[name] * step
        alike = near | (found == want) | (found.isnan() & want.isnan())
        bad = [(float(a), float(b), float(c)) for a, b, c in zip(x, found, want)]  # noqa: B905
        assert alike.all(), (name, [one for one, ok in zip(bad, alike, strict=True) if not ok][:4])


# ---------------------------------------------------------------- mutants


def tail_left_out(text: str) -> str:
    return text.replace("if left > blocks", "if left < 0 * blocks")


def one_too_many(text: str) -> str:
    return text.replace("offsets < left - blocks", "offsets <= left - blocks")


def row_of_a_neighbour(text: str) -> str:
    return text.replace("tensor = at >> 32", "tensor = (at >> 32) ^ 1")


def wrong_width(text: str) -> str:
    return text.replace("row = rows + tensor * 4", "row = rows + tensor * 3")


def short_start(text: str) -> str:
    return text.replace("= at & 0xFFFFFFFF", "= (at & 0xFFFFFFFF).to(tl.int32)")


def rough_quotient(text: str) -> str:
    return re.sub(r"tl\.div_rn\((\w+), (\w+)\)", r"\1 / \2", text)


def rough_root(text: str) -> str:
    return text.replace("tl.sqrt_rn", "tl.sqrt")


def number_of_another_tensor(text: str) -> str:
    return text.replace("found + tensor * stride", "found + (tensor ^ 1) * stride")


def another_number(text: str) -> str:
    return text.replace("tl.load(a3)", "tl.load(a3 + 1)")


def stored_twice(text: str) -> str:
    return text.replace("tl.store(p1 + (k *", "tl.store(p1 + (0 *")


@pytest.mark.parametrize(
    "change",
    [
        *(tail_left_out, one_too_many, row_of_a_neighbour, wrong_width, short_start),
        *(rough_quotient, rough_root, number_of_another_tensor, another_number, stored_twice),
    ],
)
def test_a_wrong_kernel_is_found(change: Callable[[str], str]) -> None:
    (kernel,) = kernels_of("adamw", torch.float32)
    sources = mixed_sources(kernel)
    text = text_of(kernel, KernelVariant(sources, True), CONFIG).text
    assert change(text) != text
    far: dict[str, Any] = {"skipped": FAR, "sizes": (7,)} if change is short_start else {}
    with pytest.raises((AssertionError, MemoryError)):
        check(kernel, change=change, **far)


def test_a_false_hint_of_alignment_is_found() -> None:
    (kernel,) = kernels_of("adamw", torch.float32)
    with pytest.raises(MemoryError, match="misaligned"):
        check(kernel, offset=1)


def test_a_fused_product_and_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = kernels_of("sgd-decay", torch.float32)
    monkeypatch.setitem(triton_builds.OPTIONS, "enable_fp_fusion", True)
    with pytest.raises(AssertionError):
        check(kernel, ("value",) * kernel.rule.numbers[0])


def test_a_sum_of_more_than_the_tensor_is_found() -> None:
    kernel, _ = kernels_of("clip_by_global_norm", torch.float32)

    def unmasked(text: str) -> str:
        return text.replace("tl.where(mask, ", "tl.where(mask | True, ").replace(
            "mask=mask, other=0.0", "mask=mask, other=1.0"
        )

    with pytest.raises(AssertionError):
        check(kernel, change=unmasked)


# ---------------------------------------------------------------- ahead of time

MEASURED = (
    *("adamw", "nadam", "radam", "adadelta", "asgd", "sgd-momentum", "lion", "rmsprop"),
    *("composed", "prodigy", "madgrad"),
)


def facts_of(name: str, dtype: torch.dtype, config: LaunchConfig, of: int) -> list[Any]:
    """The last kernel of a recipe, and what its machine code says."""
    *_, kernel = kernels_of(name, dtype)
    sources: tuple[Any, ...] = ("value",) * kernel.rule.numbers[0]
    found = facts(compile_for(text_of(kernel, KernelVariant(sources, True), config), config, of))
    assert found.stack == found.local == found.local_loads == found.local_stores == 0
    assert found.forbidden.keys() == ({"ex2.approx.ftz.f32"} if name in LOGARITHMIC else set())
    return [found, len(kernel.rule.read), len(kernel.rule.stored)]


@pytest.mark.parametrize("of", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize("name", MEASURED)
def test_float32_goes_by_16_bytes_in_64_registers(name: str, of: int) -> None:
    found, read, stored = facts_of(name, torch.float32, CONFIGS[0], of)
    assert found.registers <= 64
    unrolled, rest = divmod(found.loads128, read)
    assert (rest, found.stores128) == (0, unrolled * stored)
    assert unrolled


@pytest.mark.parametrize("of", [80, 90])
def test_bfloat16_goes_by_8_bytes_or_needs_more_registers(of: int) -> None:
    found, read, stored = facts_of("adamw", torch.bfloat16, CONFIGS[0], of)
    assert found.registers <= 64
    assert (found.loads128, found.stores128) == (0, 0)
    assert (found.loads64 - 6, found.stores64) == (read, stored)  # and the table
    found, read, stored = facts_of("adamw", torch.bfloat16, CONFIGS[1], of)
    assert 64 < found.registers <= 80
    assert (found.loads128, found.stores128) == (read, stored)


# ---------------------------------------------------------------- how often it is compiled


def test_a_new_learning_rate_and_another_model_need_no_new_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("functional_optim.kernels._built", {})
    monkeypatch.setattr(triton_builds, "TIMED", 1)
    driver = Simulated()
    loaded: list[list[str]] = []
    for lr, sizes in ((0.1, (3, 2000)), (0.01, (3, 2000)), (0.3, (40, 1, 17))):
        tx = fo.adamw(lr)
        params = {str(i): torch.randn(size) for i, size in enumerate(sizes)}
        grads = {name: torch.randn_like(p) for name, p in params.items()}
        state = tx.init(params)
        updates, _ = tx.update(grads, state, params)
        wanted = fo.apply_updates(params, updates)
        with on_host(driver), own_cache():
            found, _ = fo.compile(tx)(grads, state, params)
        for name, p in found.items():
            torch.testing.assert_close(p, wanted[name])
        loaded.append([*driver.names])
    assert loaded[0]
    assert loaded[0] == loaded[1] == loaded[2]
