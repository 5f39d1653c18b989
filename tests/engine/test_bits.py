"""The bits of compiled steps: those of ATen, and the same for any number of threads."""

import math
import re
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import CASES
from forks import forks
from operations import ATEN, OPERATIONS, apart, computed, numbers
from torch import Tensor
from torch.overrides import TorchFunctionMode

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.core import traits
from functional_optim.kernels import ops, print_triton
from functional_optim.kernels.comparison import compare
from functional_optim.kernels.node import Unsuitable

Sums = namedtuple(
    "Sums",
    "whole squares rows columns means largest row_largest column_least some every_row",
)


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
def test_every_operation_has_the_bits_of_aten(dtype):
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    tx = computed(tuple(OPERATIONS), wide)
    most = dict.fromkeys(OPERATIONS, 0)
    for wild in (False, True):
        x, y = (numbers(1037, dtype, seed, wild=wild) for seed in (0, 1))
        params = {"w": y.clone()}
        step = fo.compile(tx, strict=True)
        _, state = step({"w": x}, tx.init(params), params)
        for name, operation in OPERATIONS.items():
            wanted = operation(x.to(wide), y.to(wide), 0.3)
            found = apart(state.slots[name]["w"], wanted).max().item()
            most[name] = max(found, most[name])
    assert {name: found for name, found in most.items() if found > ATEN.get(name, 0)} == {}


def test_the_docs_say_which_functions_differ():
    page = (Path(__file__).parents[2] / "docs" / "training_loops.md").read_text()
    rows = re.findall(r"^\| (\d) \| (`.*) \|$", page, re.MULTILINE)
    said = {name: int(most) for most, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert said == {"pow" if name.startswith("pow") else name: x for name, x in ATEN.items()}


def test_the_table_has_every_operation_of_kernels():
    graph = traits.graph_of(computed(tuple(OPERATIONS), torch.float32).placements[0], torch.ones(3))
    seen = {node.op.partition(".")[0] for node in graph.nodes}
    same = {"sgn": "sign", **{f"__{x}__": f"bitwise_{x}" for x in ("and", "or", "xor")}}
    every = {op.partition(".")[0] for op in ops.POINT}
    others = {"bitwise_left_shift", "bitwise_right_shift", "isfinite", "square"}
    """Names under which torch's dispatcher does not show what the table has."""
    assert {x for x in every - others if x not in seen and same.get(x) not in seen} == set()


@pytest.mark.parametrize("size", [1e-24, 1e22])
def test_a_variance_is_that_of_numbers_whose_squares_leave_their_dtype(size):
    rules = {
        "std": lambda u, slots, p: (u / u.std(-1, keepdim=True), slots),
        "var": lambda u, slots, p: (u / size * (u / u.var().sqrt()), slots),
    }
    for name, update in rules.items():
        tx, p = fo.leafwise(None, update, name=name), torch.zeros(3, 4)
        g = size * numbers(12, torch.float32, 0, wild=False).reshape(3, 4)
        updates, _ = tx.update(g, tx.init(p), p)
        found, _ = fo.compile(tx, strict=True)(g, tx.init(p), p)
        assert updates.isfinite().all()
        torch.testing.assert_close(found, updates)


# ---------------------------------------------------------------- every element-wise rule
class Rounded(TorchFunctionMode):
    """Functions for which ATen calls MKL are rounded once, as kernels do it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "pow":
            x, e = args
            if x.dtype is torch.float64:
                return x.clone().apply_(lambda y: math.pow(y, e))
            return x.double().pow(e).to(x.dtype)
        if name not in ("sqrt", "exp", "log"):
            return func(*args, **(kwargs or {}))
        (x,) = args
        if x.dtype is not torch.float64:
            return func(x.double()).to(x.dtype)
        if name == "sqrt":
            return torch.from_numpy(np.sqrt(x.numpy()))
        return x.clone().apply_({"exp": exp, "log": log}[name])


def exp(x: float) -> float:
    return math.exp(x) if x < 709.7 else math.inf * x / x


def log(x: float) -> float:
    return math.log(x) if x > 0 and x < math.inf else (-math.inf if x == 0 else x + 0 * x)


def elementwise() -> list[Any]:
    """The cases all of whose rules are element-wise, and measure nothing."""
    found = []
    for case in CASES:
        rules = [x for x in case.tx().placements if x.rule.updates]
        if case.dim is None and all(
            x.rule.reduce is None and traits.is_elementwise(x, torch.ones(3)) for x in rules
        ):
            found.append(pytest.param(case, id=case.name))
    return found


@each_dtype
@pytest.mark.parametrize("case", elementwise())
def test_every_element_wise_rule_has_the_bits_of_aten(case, dtype):
    for wild in (False, True):
        params = [torch.nn.Parameter(numbers(1037, dtype, 0, wild=wild)) for _ in range(2)]
        both = [
            Optimizer([("w", p)], case.tx, compile=compile)
            for p, compile in zip(params, ("strict", False), strict=True)
        ]
        for k in range(3):
            for p in params:
                p.grad = numbers(1037, dtype, k + 1, wild=wild)
            both[0].step()
            with Rounded():
                both[1].step()
            mine, theirs = (opt.state[p] for opt, p in zip(both, params, strict=True))
            assert not apart(*[p.detach() for p in params]).any()
            assert not any(apart(mine[key], theirs[key]).any() for key in mine)


# ---------------------------------------------------------------- functions and sums of our own
POWERS = (1 / 3, -0.25, 0.3, 0.75, 1.5, -1.7, 2.5)


def test_functions_are_right_to_the_last_bit():
    """On all kinds of numbers, and mostly rounded correctly."""

    class Values(NamedTuple):
        exp: Any
        log: Any
        powers: Any

    count = 1 << 19

    def init(p: Tensor) -> Values:
        return Values(torch.zeros(count), torch.zeros(count), torch.zeros(count))

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32)
    near = torch.randn(count, generator=generator) * 20
    for k, x in enumerate((words.view(torch.float32), near, near.abs() / 20)):
        for e in POWERS if k != 1 else POWERS[:1]:

            def update(u: Tensor, slots: Values, p: Tensor, e: float = e) -> Any:
                return u, Values(u.exp(), u.log(), u**e)

            tx, params = fo.leafwise(init, update, name="functions"), {"w": torch.zeros(count)}
            _, state = fo.compile(tx, strict=True)({"w": x}, tx.init(params), params)
            wide, exponent = x.double(), e if e == 1 / 3 else float(torch.tensor(e))
            expected = {"exp": wide.exp(), "log": wide.log(), "powers": wide**exponent}
            for name, y in expected.items():
                found = apart(state.slots[name]["w"], y.float())
                assert found.max() <= 1, (name, e)
                assert (found > 0).float().mean() < 1e-4, (name, e)


def sums_of(u: Tensor) -> Sums:
    """In the dtype of u."""
    return Sums(
        u.sum(),
        (u * u).sum(),
        u.sum(-1, keepdim=True),
        u.sum(0, keepdim=True),
        u.mean(0, keepdim=True),
        u.amax(),
        u.amax(-1, keepdim=True),
        u.amin(0, keepdim=True),
        (u > 300).any(),
        (u > -300).all(-1, keepdim=True),
    )


ADDED = ("whole", "squares", "rows", "columns", "means")
SUMMED = {"tall": (501, 33), "wide": (3, 20011), "cube": (11, 40, 90), "row": (1, 9), "one": (1, 1)}


def summing() -> Any:
    """Sums of all kinds, and one over all tensors, by which these are divided."""

    def update(u: Tensor, slots: Sums, p: Tensor) -> Any:
        return u, sums_of(u)

    return fo.chain(fo.leafwise(sums_of, update, name="sums"), fo.clip_by_global_norm(1e-3))


def summed(dtype: torch.dtype, threads: int, grads: Any) -> Any:
    """The parameters and the sums after a step."""
    torch.set_num_threads(threads)
    tx, params = summing(), {name: torch.ones_like(g) for name, g in grads.items()}
    step = fo.compile(tx, strict=True)
    params, state = step(grads, tx.init(params), params)
    return params, state.slots


@each_dtype
@pytest.mark.parametrize("nan", [False, True], ids=["finite", "nan"])
def test_sums_do_not_depend_on_threads_and_are_right_to_two_bits(dtype, nan):
    grads = {
        name: numbers(math.prod(shape), dtype, i, wild=False).reshape(shape)
        for i, (name, shape) in enumerate(SUMMED.items())
    }
    if nan:
        for g in grads.values():
            g.view(-1)[g.numel() // 2] = math.nan
    alone = summed(dtype, 1, grads)
    for threads in (2, 3):
        shared = summed(dtype, threads, grads)
        for x, y in zip(fo.tree.leaves(alone), fo.tree.leaves(shared), strict=True):
            assert not apart(x, y).any()
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    for name, g in grads.items():
        u = g.to(wide)
        exact = Sums(*sums_of(u.double()))._replace(squares=(u * u).double().sum())
        for key, x in exact._asdict().items():
            found = alone[1][key][name]
            most = apart(found, x.to(wide).to(found.dtype)).max()
            assert most <= (2 if key in ADDED and dtype is not torch.float64 else 0) or (
                key in ADDED and torch.allclose(found, x.to(found.dtype), 1e-12, equal_nan=True)
            ), (name, key, most)


# ---------------------------------------------------------------- integers, and no elements
class Found(NamedTuple):
    """Of all elements."""

    total: Tensor
    largest: Tensor
    every: Tensor


def found(p: Tensor) -> Found:
    """Slots of a rule before its first step."""
    wide = torch.zeros((), dtype=torch.int64)
    return Found(wide, wide.clone(), torch.zeros((), dtype=torch.bool))


def hashed(u: Tensor) -> Tensor:
    """Integers that need all of 64 bits."""
    return u.view(torch.int32).to(torch.int64) * 2654435761 + 12345678912345


def finding(u: Tensor, slots: Found, p: Tensor) -> Any:
    wide = hashed(u)
    return u, Found(wide.sum(), wide.max(), (u == u).all())


@pytest.mark.parametrize("shape", [(37,), (5000,), (200, 300)], ids=str)
def test_integers_of_64_bits_are_put_together_exactly(shape):
    tx, g = fo.leafwise(found, finding, name="finding"), torch.randn(shape)
    _, state = fo.compile(tx, strict=True)(g, tx.init(g), torch.zeros(shape))
    assert int(state.slots["total"]) == int(hashed(g).sum())
    assert int(state.slots["largest"]) == int(hashed(g).max())


def test_programs_of_a_gpu_do_not_put_them_together():
    tx = fo.leafwise(found, finding, name="finding")
    with pytest.raises(Unsuitable, match="sum of int64"):
        print_triton.source_of(traits.graph_of(tx.placements[0], torch.ones(3)))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (4, 2)], ids=str)
def test_all_of_no_element_is_true(shape):
    def update(u: Tensor, slots: Found, p: Tensor) -> Any:
        return u, slots._replace(every=(u == u).all())

    tx, g = fo.leafwise(found, update, name="every"), torch.ones(shape)
    _, state = fo.compile(tx, strict=True)(g, tx.init(g), torch.zeros(shape))
    assert bool(state.slots["every"])


def test_a_wrong_number_of_a_kernel_is_seen():
    compare(torch.tensor(5), torch.tensor(5))
    with pytest.raises(Unsuitable):
        compare(torch.tensor(5), torch.tensor(7))


class Eight(NamedTuple):
    """A slot of 8 bits that its rule rounds itself."""

    m: Tensor


def test_a_cast_to_float8_is_left_to_torch():
    def init(p: Tensor) -> Eight:
        return Eight(torch.zeros_like(p, dtype=torch.float8_e4m3fn))

    def update(u: Tensor, slots: Eight, p: Tensor) -> Any:
        m = slots.m.to(torch.float32) * 0.5 + u
        return m, Eight(m.to(torch.float8_e4m3fn))

    tx, g = fo.leafwise(init, update, name="rounded"), torch.randn(100)
    _, state = tx.update(g, tx.init(g), g)
    _, kept = fo.compile(tx, strict=True)(g, tx.init(g), g)
    assert torch.equal(kept.slots["m"].float(), state.slots["m"].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_powers_of_all_half_numbers_are_those_of_aten(dtype):
    exponents = (0.5, -0.5, 1 / 3, -1, 2, -2, 3, 4, -1.7)
    Powers = namedtuple("Powers", [f"x{i}" for i in range(len(exponents))])

    def init(p: Tensor) -> Any:
        return Powers(*map(torch.clone, [p] * len(exponents)))

    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u, Powers(*[p.to(dtype) ** e for e in exponents])

    tx = fo.leafwise(init, update)
    p = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    state = fo.compile(tx, strict=True)(torch.zeros_like(p), tx.init(p), p.clone())[1]
    for e, found in zip(exponents, state.slots.values(), strict=True):
        same = (found == p**e) & (found.signbit() == (p**e).signbit())
        assert (same | (found.isnan() & (p**e).isnan())).all(), e


REFUSED = """
import resource, torch
from functional_optim.linalg import newton_schulz
torch.set_num_threads(1)
newton_schulz(torch.ones(64, 64), dtype=torch.float32)
large = torch.ones(4096, 4096)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20),) * 2)
try:
    newton_schulz(large, dtype=torch.float32)
except RuntimeError as error:
    print(error)
"""


def test_memory_that_is_refused_raises_torchs_error(tmp_path):
    with forks() as run:  # a process that is new has no free blocks that serve instead
        assert "can't allocate memory" in run(REFUSED, tmp_path)
