"""Packed slots and weights in Triton kernels, which run in the simulator of PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from gpu import device as fake
from torch import Tensor

pytest.importorskip("triton")

from gpu.simulated import Simulated, simulated
from gpu.trials import floats, same

import functional_optim as fo
from functional_optim import kernels
from functional_optim.adapters import Optimizer
from functional_optim.core.cells import CELLS, Compensated, Split
from functional_optim.core.codecs import InBlocks
from functional_optim.core.storage import SlotSpec
from functional_optim.engine import unpacked
from functional_optim.kernels import triton_builds
from functional_optim.kernels.building import Unsuitable

pytestmark = pytest.mark.own_process

KEY = 11_234_567.0
"""Of 24 bits, of which a half would lose some."""

EVERY: dict[str, Any] = {
    **CELLS,
    "split16": Split(16),
    "split8": Split(8),
    "kahan": Compensated(),
}


@pytest.fixture
def driver() -> Iterator[Simulated]:
    with simulated() as found:
        fake.reset()
        yield found


# ---------------------------------------------------------------- codes, bit for bit


def exchange(leaves: list[list[Tensor]], numbers: Tensor) -> tuple[Tensor, ...]:
    """What was packed goes into the parameter, and the gradient is packed."""
    ((g, p, packed),) = leaves
    p.copy_(packed)
    packed.copy_(g)
    return ()


def exchange_raised(leaves: list[list[Tensor]], numbers: Tensor) -> tuple[Tensor, ...]:
    """The same of a gradient that is one more, also where there is none."""
    ((g, p, packed),) = leaves
    p.copy_(packed)
    packed.copy_(g + 1)
    return ()


def exchanging(
    codec: InBlocks, key: int | None, name: str | None = None, body: Any = exchange
) -> Any:
    """The kernel that exchanges."""
    count = len(codec.fields)
    packed = (kernels.PackedSlot(2, codec, key, count),)
    wide, cpu = torch.float32, torch.device("cpu")
    signature = kernels.Signature(((wide,) * 3,), None, (1, wide), cpu, 1, packed)
    return triton_builds.build(body, signature, 0, torch.device(fake.DEVICE, 0), name)


def launched(kernel: Any, tensors: list[list[Tensor]], source: kernels.Source) -> None:
    """Launch it on tensors of the device: gradient, parameter, and the parts of the slot."""
    rows = [[x.data_ptr() for x in own[1:]] for own in tensors]
    launch = kernels.TableLaunch(kernel, [own[0].numel() for own in tensors], rows, each=False)
    grads = [own[0].data_ptr() for own in tensors]
    key = torch.tensor(KEY, dtype=torch.float64).to(fake.DEVICE)
    numbers = [KEY if source == "value" else key.data_ptr()]
    given = kernels.Gradients(kernel.device, len(grads))
    launch.run(launch.ready(grads, (source,)), given.address(grads), numbers, None, None)


def difficult(size: int, seed: int) -> Tensor:
    """Numbers of all magnitudes, with special ones in front; a block is zero."""
    x = floats(max(size, 121), torch.float32, seed)[:size].clone()
    x[256:512] = 0.0
    return x


def any_codes(codec: InBlocks, size: int, seed: int) -> list[Tensor]:
    """What a slot may be stored as: in 8 or 4 bits, every code."""
    found = codec.encode(difficult(size, seed))
    generator = torch.Generator().manual_seed(seed)
    for x in found:
        if x.element_size() == 1:
            noise = torch.randint(0, 256, x.shape, generator=generator, dtype=torch.uint8)
            x.view(torch.uint8).copy_(noise)
    return list(found)


def exchanged(
    codec: InBlocks,
    key: float | None,
    source: kernels.Source = "value",
    kernel: Any = None,
    more: float = 0.0,
) -> None:
    """Have tensors exchanged, and compare them with what the codec does."""
    sizes = [8192 + 2048 + 37, 1, 255, 513]
    tensors: list[list[Tensor]] = []
    expected: list[list[Tensor]] = []
    for seed, size in enumerate(sizes):
        g, codes = difficult(size, seed), any_codes(codec, size, seed + 7)
        g = g if getattr(codec.cells, "signed", True) else g.abs()
        new = g + more if more else g
        seen = codec.decode(tuple(codes), SlotSpec(g.shape, torch.float32))
        expected.append([g, seen, *codec.encode(new, key)])
        tensors.append([x.to(fake.DEVICE) for x in (g, torch.zeros(size), *codes)])
    launched(kernel or exchanging(codec, None if key is None else 0), tensors, source)
    for mine, wanted in zip(tensors, expected, strict=True):
        assert [same(x.cpu(), y) for x, y in zip(mine, wanted, strict=True)] == [True] * len(wanted)


BY_CHANCE = [
    *("int8", "int4", "float8_e4m3fn", "bfloat16", "split8"),
    *[pytest.param(name, marks=pytest.mark.full) for name in ("uint8", "uint4", "float8_e5m2")],
]


@pytest.mark.parametrize("kind", EVERY)
def test_codes_are_those_of_the_codec(kind, driver):
    exchanged(InBlocks(EVERY[kind], 256, 3), None)


@pytest.mark.parametrize("kind", BY_CHANCE)
def test_rounding_by_chance_is_that_of_the_codec(kind, driver):
    exchanged(InBlocks(EVERY[kind], 256, 3), KEY)


@pytest.mark.parametrize("block", [16, 4096])
def test_blocks_of_any_size(block, driver):
    exchanged(InBlocks(EVERY["int4"], block, 1), KEY)


@pytest.mark.parametrize("kind", ["int4", "split16"])
def test_what_is_behind_the_end_of_a_tensor_counts_for_nothing(kind, driver):
    codec = InBlocks(EVERY[kind], 256)
    kernel = exchanging(codec, None, body=exchange_raised)
    exchanged(codec, None, kernel=kernel, more=1.0)


def test_the_key_may_be_on_the_device(driver):
    exchanged(InBlocks(EVERY["bfloat16"], 256, 2), KEY, "tensor")


def test_what_is_kept_on_disk_is_the_same_kernel(driver, monkeypatch):
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(triton_builds.disk_cache, "read", kept.get)
    monkeypatch.setattr(triton_builds.disk_cache, "keep", kept.__setitem__)
    codec = InBlocks(EVERY["int8"], 256)
    first = exchanging(codec, 0, "name")
    monkeypatch.delattr(triton_builds, "rule_source")
    second = exchanging(codec, 0, "name")
    assert second.rule == first.rule
    exchanged(codec, KEY, kernel=second)


def test_a_kernel_that_packs_otherwise_is_refused(driver):
    kernel = exchanging(InBlocks(EVERY["int8"], 256), None)
    (text,) = kernel.rule.packed
    wrong = [line.replace("tl.full((), 128,", "tl.full((), 100,") for line in text.pack]
    assert wrong != text.pack
    kernel.rule = kernel.rule._replace(packed=[text._replace(pack=wrong)])
    with pytest.raises(Unsuitable, match="packs slots in another way"):
        kernel.launcher(triton_builds.KernelVariant(("value",), True))


class Halves(NamedTuple):
    """A codec of a user's own."""

    fields: tuple[str, ...] = ("half",)

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        return (x.half(),)

    def decode(self, stored: tuple[Tensor, ...], spec: SlotSpec) -> Tensor:
        return stored[0].to(spec.dtype)


def test_only_codecs_in_blocks_are_unpacked():
    p = torch.ones(1)
    packed = fo.stored(fo.adamw(), "int8", where="*").placements
    own = [x._replace(rule=x.rule._replace(codecs=(Halves(), None))) for x in packed]
    assert unpacked.all_in_blocks(packed, p)
    assert unpacked.all_in_blocks(fo.master_weights(fo.sgd(0.1), "kahan").placements, p.bfloat16())
    assert not unpacked.all_in_blocks(own, p)


# ---------------------------------------------------------------- optimizer objects

SHAPES = [(71, 61), (64, 65)]


def recipe(
    rule: Callable[..., Any], seed: int | None, names: Sequence[str]
) -> Callable[[Any], Any]:
    """A way to store for each tensor, by the first part of its name."""

    def made(lr: Any) -> Any:
        ways = {
            name: fo.stored(rule(lr), name, where="*", seed=seed)
            for name in ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "bfloat16")
        }
        weights = {name: fo.master_weights(rule(lr), name) for name in BFLOAT16[:-1]}
        both = fo.master_weights(fo.stored(rule(lr), "int8", where="*", seed=seed), "split8")
        ways |= {**weights, "split8": both}
        mine = {name: ways[name] for name in names}
        return fo.partition(mine, {f"{name}.*": name for name in names})

    return made


BFLOAT16 = ("split16", "kahan", "stochastic", "split8")
NAMES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "bfloat16", *BFLOAT16)


def trained(on: str, make: Callable[[Any], Any], names: Sequence[str], **options: Any) -> Any:
    """All that an optimizer has stored after three steps, the last of which must not wait."""
    torch.manual_seed(0)
    params: dict[str, Tensor] = {}
    for name in names:
        dtype = torch.bfloat16 if name in BFLOAT16 else torch.float32
        for i, shape in enumerate(SHAPES):
            params[f"{name}.{i}"] = torch.randn(shape).to(dtype).to(on).requires_grad_()
    opt = Optimizer(params.items(), make, lr=1e-2, **options)
    for step in range(3):
        for p in params.values():
            p.grad = (torch.randn(p.shape) * torch.rand(p.shape) ** 3).to(p.dtype).to(on)
        with fake.raising() if step == 2 else nullcontext(), fake.logged() as log:
            opt.step()
    found = {
        (name, key): x.detach().cpu()
        for name, p in params.items()
        for key, x in {"": p, **opt.state[p]}.items()
        if isinstance(x, Tensor)
    }
    return found, log


@pytest.mark.parametrize(
    ("rule", "seed", "names"),
    [
        (fo.adamw, 5, ("int8", "float8_e4m3fn", "bfloat16", *BFLOAT16)),
        pytest.param(fo.adamw, 5, ("int4", "float8_e5m2"), marks=pytest.mark.full),
        pytest.param(fo.lion, None, NAMES, marks=pytest.mark.full),
    ],
    ids=["adamw-chance", "adamw-others", "lion-nearest"],
)
def test_steps_are_those_of_native_kernels(rule, seed, names, driver):
    """Of tensors of a kind in one launch, to the last code and bit."""
    make = recipe(rule, seed, names)
    expected, _ = trained("cpu", make, names, compile="strict")
    found, log = trained(fake.DEVICE, make, names, compile="strict")
    assert log == ["pinned"] * len(names) + ["step_kernel"] * len(names)
    assert found.keys() == expected.keys()
    assert [key for key, x in expected.items() if not same(found[key], x)] == []


def test_rules_that_measure_read_packed_slots(driver):
    def make(lr: Any) -> Any:
        return fo.stored(fo.lamb(lr), "int8", where="*", seed=None)

    expected, _ = trained("cpu", make, ["int8"], compile=False)
    found, log = trained(fake.DEVICE, make, ["int8"], compile="strict")
    assert log.count("step_kernel") == 1
    assert log.count("measure_kernel") == log.count("sum_kernel") > 0
    for key, x in expected.items():
        if x.is_floating_point():
            torch.testing.assert_close(found[key], x, rtol=1e-3, atol=1e-5)
        else:
            assert (found[key].int() - x.int()).abs().max() <= 1
