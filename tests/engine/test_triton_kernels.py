"""Triton kernels of recipes in Triton's interpreter, next to the C++ of the same graphs; and what
their machine code says, compiled for a GPU that is not there."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import operations
import pytest
import torch
import undeclared
from gpu.ahead import check_types, compile_ahead, facts, forbidden
from gpu.drivers import Host, on_host
from gpu.kernel_runs import (
    BY_NAME,
    EVERY,
    OF_MATRICES,
    WITH_ROOTS,
    Table,
    alike,
    asked,
    check,
    served,
)
from operations import OPERATIONS
from sampling import some

import functional_optim as fo
from functional_optim.engine.native import Served
from functional_optim.kernels import triton_compiler
from functional_optim.kernels.print_triton import KernelVariant, source_of
from functional_optim.kernels.triton_primitives import KernelText
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
        loose = LITTLE[dtype] if name in WITH_ROOTS else loose
        dims = own.like[1].dim()
        shapes = FLAT if flat and dims == 1 else SHAPES[dims]
        check(own, shapes, special=flat, loose=loose, **options)


MIXED = ("sgd-momentum", "adamw", "lion", "adan", "prodigy", "lamb", "composed", "madgrad", "sm3")
HALF = (*MIXED, "adabelief", "asgd", "cocob", "rprop", "mechanize", "adam_mini", "novograd")
FEW, BEGIN = ("adamw", "lamb", "madgrad", "adafactor"), ("sgd-momentum", "adamw", "lamb")
RUNS: dict[str, tuple[Any, Any, torch.dtype, dict[str, Any]]] = {
    "in_bfloat16": (EVERY, HALF, torch.bfloat16, {}),
    "wide slots": (EVERY, MIXED, torch.bfloat16, {"mixed": True}),
    "in_float16": (FEW, FEW, torch.float16, {}),
    "in_float64": (FEW, FEW, torch.float64, {}),
    "tensors that begin anywhere": (BEGIN, BEGIN, torch.bfloat16, {"offset": 1, "aligned": False}),
}
"""Recipes, those of them that are not for `make test-full` alone, the dtype, and more."""
NAMED = [(how, name) for how, (names, *_) in RUNS.items() for name in names]


@pytest.mark.parametrize("name", EVERY)
def test_kernels_in_float32_do_what_the_cpp_does_and_triton_takes_them(name: str) -> None:
    assert served(name)
    check_all(name, torch.float32)
    for own in served(name):
        for text in texts_of(own):
            check_types(text)


@pytest.mark.parametrize(
    ("how", "name"), some(NAMED, 0, [(how, name) for how, name in NAMED if name in RUNS[how][1]])
)
def test_kernels_do_what_the_cpp_does(how: str, name: str) -> None:
    _, _, dtype, options = RUNS[how]
    check_all(name, dtype, **options)


def test_noise_is_that_of_the_cpp() -> None:
    tx = fo.noisy_sgd(0.1, eta=1.0, momentum=0.9)
    (own,) = asked(tx, {"w": torch.zeros(67)})
    own.like[2][0][0].fill_(-(2**62) + 12345)
    check(own, FLAT, loose=LITTLE[torch.float32])
    rows = fo.leafwise(None, lambda u, slots, p: (u / u.norm(dim=-1, keepdim=True), slots))
    for own in asked(fo.chain(fo.add_noise(1.0, 0.0, 3), rows), {"w": torch.zeros(5, 67)}):
        check(own, SHAPES[2], loose=LITTLE[torch.float32])


def test_the_recipes_without_kernels_are_those_of_the_list() -> None:
    assert BY_NAME.keys() >= OF_MATRICES
    assert not any(served(name) for name in OF_MATRICES)


LONG = (
    "a_variance_of_few", "softmax_at_temperature", "row_std", "corrected_rows", "transposed_mean",
    "sum_of_largest_rows", "column_norm", "amax_over_columns", "mean_over_columns",
    "softmax_of_all", "columns_and_a_number_of_all_of_them", "row_normalised_momentum",
    "mapped_over_rows", "log_softmax_over_columns", "by_outer_product", "counts_beside_a_number",
    "row_trust_ratio", "slots_that_count",
)  # fmt: skip
"""One to seven seconds each, of kinds of which another rule is here too."""


@pytest.mark.parametrize("name", some(undeclared.ROWS, 0, undeclared.ROWS.keys() - set(LONG)))
def test_rules_without_flags_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they have kernels or not; a kernel that cannot be used would be told."""
    told: list[str] = []
    monkeypatch.setattr("functional_optim.kernels.warn_once", told.append)
    with on_host(Host()) as host:
        assert not [*undeclared.outcomes(undeclared.ROWS[name], ["together"], ["fo.compile"])]
    assert not told
    for text in host.texts:
        check_types(text)


# ---------------------------------------------------------------- where things are
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_operation_does_what_the_cpp_does(dtype: torch.dtype) -> None:
    """But for functions of the library, which are torch's in the interpreter."""
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    params = {"vector": torch.ones(5, dtype=dtype)}
    (own,) = asked(operations.computed(tuple(OPERATIONS), wide), params)
    table = Table(own, [(3 * BLOCK + 5,)], special=True)
    ((_, _, *expected),), _ = table.by_cpp()
    ((_, _, *found),), _ = table.by_triton()
    for name, x, y in zip(OPERATIONS, found, expected, strict=True):
        assert operations.apart(x, y).max() <= operations.ATEN.get(name, 0), name


def test_a_false_hint_of_alignment_is_found() -> None:
    (own,) = served("adamw")
    with pytest.raises(MemoryError, match="no multiple of 16"):
        check(own, SHAPES[3], offset=1)


def test_a_wrong_kernel_is_found() -> None:
    """One element too many; one step in 64 bits that is made in 32."""
    (own,) = asked(fo.adamw(0.1), {"vector": torch.ones(5)})
    for old, new, ahead in (
        ("offsets < left - k", "offsets <= left - k", 0),
        ("= at & 0xFFFFFFFF", "= (at & 0xFFFFFFFF).to(tl.int32)", FAR),
    ):
        with pytest.raises((AssertionError, MemoryError)):
            check(
                own,
                [(CHUNK + 12,), (7,)],
                change=lambda x, old=old, new=new: x.replace(old, new),
                ahead=ahead,
            )


# ---------------------------------------------------------------- machine code
FROM_LIBRARY = {"ex2.approx.ftz.f32", "lg2.approx.f32", "rcp.approx.ftz.f32"}
"""Instructions that do not round as IEEE 754 has it: in libdevice's `cbrt`, before a last step that
does."""


def texts_of(own: Served, config: LaunchConfig | None = None) -> list[KernelText]:
    source = source_of(own.graph)
    variant = KernelVariant(("value",) * own.body.count, True)
    return source.texts(variant, config or source.configs()[0])


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
def test_kernels_round_as_they_should(name: str) -> None:
    for text in [text for own in served(name) for text in texts_of(own)]:
        found = facts(compile_ahead(text))
        allowed = FROM_LIBRARY if name in WITH_ROOTS else set()
        assert found.forbidden.keys() <= allowed
        assert not found.spilled


REGISTERS = {
    **{"adamw": 48, "nadam": 48, "radam": 48, "lion": 32, "sgd-momentum": 32, "rmsprop": 48},
    **{"composed": 64, "prodigy": 64, "madgrad": 64},
    **{"adafactor": 128, "sm3": 128, "lamb": 128},
}
"""Of a thread, at most; of the last ones, which reduce, in each launch of the first kernel."""
REDUCING = ("adafactor", "sm3", "lamb")
TWINS = {"nadam", "radam", "rmsprop", "composed"}
"""Of AdamW, by element."""
SPILLED = 40
"""Bytes that these may need of the stack: Adafactor's takes 36 with Triton 3.8, none with 3.7."""


@pytest.mark.parametrize("of", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize("name", some(REGISTERS, 0, REGISTERS.keys() - TWINS))
def test_float32_goes_by_16_bytes_in_few_registers(name: str, of: int) -> None:
    every = served(name)
    own = every[0] if name in REDUCING else next(x for x in every if x.graph.stores)
    allowed = FROM_LIBRARY if name in WITH_ROOTS else set()
    for text in texts_of(own):
        found = facts(compile_ahead(text, of))
        assert found.registers <= REGISTERS[name]
        assert found.forbidden.keys() == allowed
        assert found.spilled <= (SPILLED if name in REDUCING else 0)
        if name not in REDUCING:
            read = {x for node in own.graph.nodes for x in node.operands() if x.op == "input"}
            unrolled, rest = divmod(found.loads128, len(read))
            assert (rest, found.stores128) == (0, unrolled * len(own.graph.stores))
            assert unrolled
            assert not found.doubles


@pytest.mark.parametrize(
    ("config", "least", "most", "moved"),
    [(CONFIGS[0], 0, 64, (0, 0, 3)), (CONFIGS[2], 65, 128, (4, 3, 0))],
)
def test_bfloat16_goes_by_8_bytes_or_needs_more_registers(config, least, most, moved) -> None:
    (text,) = texts_of(served("adamw", torch.bfloat16)[0], config)
    found = facts(compile_ahead(text))
    assert least <= found.registers <= most
    assert (found.loads128, found.stores128, found.stores64) == moved


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_slots_need_no_stack(kind: str) -> None:
    tx = fo.stored(fo.adamw(0.1), kind, where="*", seed=5)
    (text,) = texts_of(asked(tx, {"matrix": torch.randn(71, 61)})[0])
    found = facts(compile_ahead(text))
    assert found.registers <= 128
    assert (found.spilled, found.forbidden, found.doubles) == (0, {}, 0)
    assert (found.loads128, found.stores128) == (2, 1)  # gradient and parameter


def test_a_fused_product_and_sum_is_not_made_by_the_compiler(monkeypatch: Any) -> None:
    (own,) = asked(fo.sgd(0.1, weight_decay=0.1), {"vector": torch.ones(5)})
    (text,) = texts_of(own)
    assert "fma.rn.f32" not in compile_ahead(text).asm["ptx"]
    monkeypatch.setitem(triton_compiler.OPTIONS, "enable_fp_fusion", True)
    assert "fma.rn.f32" in compile_ahead(text).asm["ptx"]


def test_the_sum_of_two_masks_is_true_where_both_are() -> None:
    """Triton adds single bits modulo 2, its interpreter does not."""
    tx = fo.leafwise(None, lambda u, slots, p: (u * ((u > 0) + (p > 0)), slots), name="masks")
    (own,) = asked(tx, {"vector": torch.ones(5)})
    (text,) = texts_of(own)
    found = re.findall(r"arith\.(\w+) .*xi1>", compile_ahead(text).asm["ttir"])
    assert "ori" in found
    assert not {"addi", "xori"} & {*found}


def test_instructions_that_round_otherwise_are_seen() -> None:
    (own,) = served("adamw")
    (text,) = texts_of(own)
    rough = re.sub(r"tl\.div_rn\((\w+), (\w+)\)", r"(\1 / \2)", text.text)
    found = forbidden(compile_ahead(text._replace(text=rough)).asm["ptx"])
    assert found.keys() == {"div.full.f32"}


def test_functions_of_the_library_are_those_of_libdevice() -> None:
    texts = []
    for names in (OPERATIONS, [*operations.ATEN, "trunc", "round", "copysign"]):
        tx = operations.computed(tuple(names), torch.float32)
        (own,) = asked(tx, {"vector": torch.ones(5)})
        texts += texts_of(own)
    every, few = ({*re.findall(r"libdevice\.\w+", text.text)} for text in texts)
    assert few == every
    text = texts[1]
    assert ".extern .func" not in compile_ahead(text).asm["ptx"]  # libdevice has all of them
