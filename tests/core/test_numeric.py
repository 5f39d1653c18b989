"""Numbers on the host and numbers in tensors: one arithmetic, NaN, infinities and signed zeros too.

The sign of a zero is left open by IEEE 754 for the larger and the smaller of 0.0 and -0.0; it is
compared everywhere else.
"""

import inspect
import math
import re
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import assert_close, clone
from hypothesis import example, given
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from ways import by_eager_object, by_function, by_object, by_update

import functional_optim as fo
from functional_optim import numeric
from functional_optim.engine.plan import filling

SPECIAL = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e-320,
    1e39, -1e39, 1e300, -1e300,
)  # fmt: skip
NUMBERS = st.sampled_from(SPECIAL) | st.floats(-1e6, 1e6)
FLAGS = st.booleans()
ULPS = 4 * 2.0**-52
"""Two libraries of elementary functions may round differently."""

FUNCTIONS = {
    "at": (lambda x, t: numeric.at(lambda n: x + n, t), (NUMBERS, NUMBERS)),
    "clip": (numeric.clip, (NUMBERS, NUMBERS, NUMBERS)),
    "cos": (numeric.cos, (NUMBERS,)),
    "divide": (numeric.divide, (NUMBERS, NUMBERS)),
    "float64": (numeric.float64, (NUMBERS,)),
    "floor": (numeric.floor, (NUMBERS,)),
    "lerp": (numeric.lerp, (NUMBERS, NUMBERS, NUMBERS)),
    "like": (lambda x, y: numeric.like(x, y), (NUMBERS, NUMBERS)),
    "log": (numeric.log, (NUMBERS,)),
    "maximum": (numeric.maximum, (NUMBERS, NUMBERS)),
    "minimum": (numeric.minimum, (NUMBERS, NUMBERS)),
    "power": (numeric.power, (NUMBERS, NUMBERS)),
    "rounded": (numeric.rounded, (NUMBERS,)),
    "sqrt": (numeric.sqrt, (NUMBERS,)),
    "stored": (numeric.stored, (NUMBERS,)),
    "where": (numeric.where, (FLAGS, NUMBERS, NUMBERS)),
}
"""Each function of numbers, with what it takes."""
ABOUT_KINDS = {
    "is_static", "is_zero", "equals", "check", "check_count", "check_least", "check_range", "pair",
    "triple",
    "storage_dtype",
    "carry_dtype", "storing_wide", "trusting",
}  # fmt: skip
"""What asks whether a number is a tensor, or is no function of numbers; tested below or by use."""
OPEN_ZEROS = {"clip", "maximum", "minimum"}


def test_every_function_of_the_module_is_compared():
    found = inspect.getmembers(numeric, inspect.isfunction)
    public = {name for name, f in found if f.__module__ == numeric.__name__ and name[0] != "_"}
    assert public == FUNCTIONS.keys() | ABOUT_KINDS


def test_a_root_of_one_number_is_one_number():
    assert numeric.sqrt(torch.tensor([4.0])).shape == ()


def tensor(x):
    return torch.tensor(x, dtype=None if isinstance(x, bool) else torch.float64)


def value(x):
    return x.to(torch.float64).item() if isinstance(x, torch.Tensor) else float(x)


def assert_agree(name, here, there, size):
    if math.isnan(here) or math.isnan(there) or math.isinf(here) or math.isinf(there):
        assert repr(here) == repr(there)
        return
    assert abs(here - there) <= ULPS * max(abs(here), abs(there), size)
    if name not in OPEN_ZEROS and size == 0:
        assert math.copysign(1, here) == math.copysign(1, there)


def check(name, args):
    function, _ = FUNCTIONS[name]
    here, there = value(function(*args)), value(function(*map(tensor, args)))
    # what lerp adds may cancel, so it is compared with what goes in; it ends exactly
    size = max(map(abs, args)) if name == "lerp" else 0.0
    assert_agree(name, here, there, size)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_host_and_tensor_arithmetic_agree(name, data):
    check(name, [data.draw(numbers) for numbers in FUNCTIONS[name][1]])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_host_and_tensor_arithmetic_agree_on_special_values(name):
    kinds = FUNCTIONS[name][1]
    choices = [(True, False) if kind is FLAGS else SPECIAL for kind in kinds]
    for args in torch.cartesian_prod(*[torch.arange(len(own)) for own in choices]).tolist():
        places = args if isinstance(args, list) else [args]
        check(name, [own[i] for own, i in zip(choices, places, strict=True)])


@pytest.mark.parametrize("name", ["clip", "divide", "lerp", "maximum", "minimum", "power"])
@given(data=st.data())
def test_one_tensor_among_numbers_changes_nothing(name, data):
    function, kinds = FUNCTIONS[name]
    args = [data.draw(numbers) for numbers in kinds]
    every = value(function(*map(tensor, args)))
    for i, x in enumerate(args):
        mixed = function(*args[:i], tensor(x), *args[i + 1 :])
        assert isinstance(mixed, torch.Tensor)
        assert_agree(name, value(mixed), every, 0.0)


@given(a=NUMBERS, b=NUMBERS)
@example(a=1e300, b=0.0)
def test_a_number_fills_a_tensor_as_a_tensor_does(a, b):
    for dtype in (torch.float32, torch.float64):
        here, there = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
        filling(here, a)()
        there.copy_(tensor(a))
        torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)


@given(x=NUMBERS)
def test_only_a_python_number_is_known_to_be_zero(x):
    assert numeric.is_static(x)
    assert not numeric.is_static(tensor(x))
    assert numeric.is_zero(x) == (x == 0)
    assert not numeric.is_zero(tensor(x))


RANGES = {
    "in [0, 1)": ((0.0, 0.9), (-0.1, 1.0)),
    "in [0, 1]": ((0.0, 1.0), (-0.1, 1.1)),
    "in (0, 1]": ((0.1, 1.0), (0.0, 1.1)),
    "in (0, 1)": ((0.1, 0.9), (0.0, 1.0)),
    "of 0 or more": ((0.0, 9.0), (-0.1,)),
    "of 1 or more": ((1.0, 9.0), (0.9,)),
    "that is a whole number of 1 or more": ((1, 9.0), (0, 1.5)),
    "above 0": ((0.1, 9.0), (0.0,)),
    "positive": ((0.1, 9.0), (0.0,)),
}
"""For the words of each range, what lies in it, and what does not."""


@pytest.mark.parametrize("words", numeric.RANGES)
def test_a_range_is_what_its_words_say(words):
    inside, outside = RANGES[words]
    for x in inside:
        numeric.check_range("it", words, rate=x)
    what = "a positive rate" if words == "positive" else f"a rate {words}"
    for x in (*outside, math.nan):
        with pytest.raises(ValueError, match=re.escape(f"it needs {what}, but got {x}.")):
            numeric.check_range("it", words, rate=x)
    numeric.check_range("it", words, rate=torch.tensor(-1.0))  # may change at each step


def test_the_least_value_is_allowed():
    numeric.check_least("it", 2, steps=2)
    with pytest.raises(ValueError, match=re.escape("it needs steps of at least 2, but got 1.5.")):
        numeric.check_least("it", 2, steps=1.5)


def numbers_of_flags(u: Tensor, early: Any, rate: Any) -> tuple[Tensor, ...]:
    return u * (1 - early), early * u, u - early, u * (0.9 * early + rate), u * (rate - ~early)


def masks_of_flags(u: Tensor, early: Any, rate: Any) -> tuple[Tensor, ...]:
    mask = u > 0
    chosen = torch.where(early, u, rate)
    each = torch.where(mask & early, u, 0), torch.where(mask | ~early, u, 0), u * (mask + early)
    return *each, chosen, torch.where(mask ^ early, rate, u)


@pytest.mark.parametrize("used", [numbers_of_flags, masks_of_flags])
@pytest.mark.parametrize("lr", [0.7, torch.tensor(0.7)])
def test_a_comparison_among_the_numbers_of_a_rule_is_a_bool_in_every_way(used, lr):
    def update(u: Tensor, slots: Any, p: Tensor, early: Any, high: Any, rate: Any) -> Any:
        found = [*used(u, early, rate), *used(u, high, rate)]
        return sum([(k + 1) * x for k, x in enumerate(found)]), slots

    def scalars(t, *, lr):
        return t <= 1, lr > 0.5, lr / 3

    tx = fo.leafwise(None, update, scalars, hyper={"lr": lr}, name="flags")
    params, grads = {"w": torch.zeros(3)}, [{"w": torch.tensor([1.0, -1.0, 2.0])}] * 2
    g, state = grads[0], tx.init(params)
    early, high, rate = torch.tensor(True), torch.tensor(True), 0.7 / 3
    wanted, _ = by_update(tx, params, grads)
    if used is masks_of_flags:
        own = [*used(g["w"], early, rate), *used(g["w"], high, rate)]
        first = sum([(k + 1) * x for k, x in enumerate(own)])
        assert_close(tx.update(g, state, params)[0]["w"], first, 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in (by_function, by_object, by_eager_object):
            assert_close(way(tx, clone(params), grads)[0]["w"], wanted["w"], 1e-6)
    traced = make_fx(lambda g: tx.update(g, state, params)[0])(g)
    mapped = torch.vmap(lambda g: tx.update({"w": g}, state, params)[0]["w"])
    now = tx.update(g, state, params)[0]["w"]
    assert_close(traced(g)["w"], now, 1e-6)
    assert_close(mapped(g["w"][None])[0], now, 1e-6)


def test_a_comparison_among_the_numbers_of_a_rule_is_traced(fresh_dynamo):
    def update(u: Tensor, slots: Any, p: Tensor, early: Any) -> Any:
        return u * (1 - early) + torch.where((u > 0) & early, u, 0.5), slots

    tx = fo.leafwise(None, update, lambda t: (t <= 1,), name="flag")
    p, g = torch.zeros(2), torch.tensor([1.0, -1.0])
    run = torch.compile(lambda g: tx.update(g, tx.init(p), p)[0], backend="eager", fullgraph=True)
    assert run(g).tolist() == tx.update(g, tx.init(p), p)[0].tolist() == [1.0, 0.5]


@pytest.mark.parametrize("x", [np.complex128(0.1 + 2j), np.complex64(0.1), np.array("0.1"), "0.1"])
def test_what_float_would_truncate_or_read_is_no_hyperparameter(x):
    with pytest.raises(numeric.NotANumber):
        numeric.at(lambda t: x, 1.0)


@pytest.mark.parametrize("x", [np.float32(0.5), np.array(0.5), Fraction(1, 2), Decimal("0.5")])
def test_numbers_of_other_kinds_are_hyperparameters(x):
    assert numeric.at(lambda t: x, 1.0) == 0.5


def test_integers_change_by_integers():
    assert fo.apply_updates(torch.tensor([3]), torch.tensor([1])).item() == 4
