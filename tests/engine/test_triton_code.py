"""The machine code of Triton kernels, compiled for a GPU that is not there."""

from __future__ import annotations

import re
from typing import Any

import operations
import pytest
import torch
from gpu.ahead import check_types, compile_ahead, facts, forbidden
from gpu.kernel_runs import EVERY, LOGARITHMIC, asked, served
from operations import OPERATIONS

import functional_optim as fo
from functional_optim.engine.native import Served
from functional_optim.kernels import triton_compiler
from functional_optim.kernels.print_triton import KernelVariant, source_of
from functional_optim.kernels.triton_primitives import KernelText
from functional_optim.kernels.triton_spaces import CONFIGS, LaunchConfig

FROM_LIBRARY = {"ex2.approx.ftz.f32", "rcp.approx.ftz.f64"}
"""Instructions that do not round as IEEE 754 has it: in libdevice's `exp`, and its `log` of
float64, for numbers that are not small."""


def texts_of(own: Served, config: LaunchConfig | None = None) -> list[KernelText]:
    source = source_of(own.graph)
    variant = KernelVariant(("value",) * own.body.count, True)
    return source.texts(variant, config or source.configs()[0])


@pytest.mark.parametrize("name", EVERY)
def test_triton_takes_the_kernels(name: str) -> None:
    for own in served(name):
        for text in texts_of(own):
            check_types(text)


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
def test_kernels_round_as_they_should(name: str) -> None:
    for text in [text for own in served(name) for text in texts_of(own)]:
        found = facts(compile_ahead(text))
        allowed = FROM_LIBRARY if name in LOGARITHMIC else set()
        assert found.forbidden.keys() <= allowed
        assert not found.spilled


REGISTERS = {
    **{"adamw": 48, "nadam": 48, "radam": 48, "lion": 32, "sgd-momentum": 32, "rmsprop": 48},
    **{"composed": 64, "prodigy": 64, "madgrad": 64},
    **{"adafactor": 128, "sm3": 128, "lamb": 128},
}
"""Of a thread, at most; of the last ones, which reduce, in each launch of the first kernel."""
REDUCING = ("adafactor", "sm3", "lamb")


@pytest.mark.parametrize("of", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize("name", REGISTERS)
def test_float32_goes_by_16_bytes_in_few_registers_and_needs_no_stack(name: str, of: int) -> None:
    every = served(name)
    own = every[0] if name in REDUCING else next(x for x in every if x.graph.stores)
    allowed = {"ex2.approx.ftz.f32"} if name in LOGARITHMIC else set()
    for text in texts_of(own):
        found = facts(compile_ahead(text, of))
        assert found.registers <= REGISTERS[name]
        assert (found.spilled, found.forbidden.keys()) == (0, allowed)
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


def test_instructions_that_round_otherwise_are_seen() -> None:
    (own,) = served("adamw")
    (text,) = texts_of(own)
    rough = re.sub(r"tl\.div_rn\((\w+), (\w+)\)", r"(\1 / \2)", text.text)
    found = forbidden(compile_ahead(text._replace(text=rough)).asm["ptx"])
    assert found.keys() == {"div.full.f32"}


def test_functions_of_the_library_are_those_of_libdevice() -> None:
    tx = operations.computed(tuple(OPERATIONS), torch.float32)
    (own,) = asked(tx, {"vector": torch.ones(5)})
    (text,) = texts_of(own)
    assert ".extern .func" not in compile_ahead(text).asm["ptx"]  # libdevice has all of them
