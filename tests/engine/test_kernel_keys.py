"""What a rule is known by inside of a process: everything that it computes with counts."""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import pytest
import torch

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.kernels import static_key

PRELUDE = "import functools, math, torch\nfrom typing import NamedTuple\n"


def rule(source, name="update", prelude=PRELUDE, **given):
    """The function that a module with this source defines."""
    space = {"__name__": "somebodys", **given}
    exec(prelude + source, space)
    return space[name]


UPDATE = "def update(u, slots, p):\n    return {}, slots\n"
FACTORY = (
    "def make(x, y=None):\n    def update(u, slots, p):\n        return {}, slots\n"
    "    return update\n"
)


class Pair(NamedTuple):
    """Two rules that compute different things."""

    one: types.FunctionType
    other: types.FunctionType


def constant(definition):
    """A rule that uses a global called x."""
    return rule(f"{definition}\n" + UPDATE.format("x * u"))


def helper(body):
    return rule(f"def helper(u):\n    return {body}\n" + UPDATE.format("helper(u)"))


def deep(body):
    inner = f"def inner(u):\n    return {body}\n"
    return rule(inner + "def outer(u):\n    return inner(u)\n" + UPDATE.format("outer(u)"))


def closed(body="x * u", *constants):
    return rule(FACTORY.format(body), "make")(*constants)


def record(method, default=1.0):
    return rule(
        f"class Pair(NamedTuple):\n    x: float = {default}\n"
        f"    def twice(self):\n        return {method}\n" + UPDATE.format("Pair().twice() * u")
    )


def attributed(x):
    f = rule(UPDATE.format("update.x * u"))
    f.x = x
    return f


def method(x):
    space = rule(
        "class Rule(NamedTuple):\n    x: float\n"
        "    def update(self, u, slots, p):\n        return self.x * u, slots\n",
        "Rule",
    )
    return space(x).update


DIFFERENT = {
    "code": Pair(rule(UPDATE.format("u + 1")), rule(UPDATE.format("u - 1"))),
    "a constant": Pair(rule(UPDATE.format("u * 0.5")), rule(UPDATE.format("u * 0.25"))),
    "the sign of zero": Pair(closed("x * u", 0.0), closed("x * u", -0.0)),
    "a type": Pair(closed("x * u", 1), closed("x * u", 1.0)),
    "a closure": Pair(closed("x * u", 0.5), closed("x * u", 0.25)),
    "a tuple in a closure": Pair(closed("x[0] * u", (1, 2)), closed("x[0] * u", (2, 2))),
    "a list in a closure": Pair(closed("x[0] * u", [1, 2]), closed("x[0] * u", [2, 2])),
    "a dict in a closure": Pair(closed("x['a'] * u", {"a": 1}), closed("x['a'] * u", {"a": 2})),
    "a function in a closure": Pair(
        closed("x(u)", lambda u: u + 1), closed("x(u)", lambda u: u + 2)
    ),
    "a builtin in a closure": Pair(closed("x(u)", torch.sin), closed("x(u)", torch.cos)),
    "what a method is bound to": Pair(
        closed("u * len(x())", "a".upper), closed("u * len(x())", "ab".upper)
    ),
    "an attribute of self": Pair(method(0.5), method(0.25)),
    "a default": Pair(
        rule("def update(u, slots, p, x=1):\n    return x * u, slots\n"),
        rule("def update(u, slots, p, x=2):\n    return x * u, slots\n"),
    ),
    "a default by name": Pair(
        rule("def update(u, slots, p, *, x=1):\n    return x * u, slots\n"),
        rule("def update(u, slots, p, *, x=2):\n    return x * u, slots\n"),
    ),
    "a lambda's default": Pair(
        rule("update = lambda u, slots, p, x=1: (x * u, slots)\n"),
        rule("update = lambda u, slots, p, x=2: (x * u, slots)\n"),
    ),
    "a partial's argument": Pair(
        functools.partial(closed("u", 0), x=1), functools.partial(closed("u", 0), x=2)
    ),
    "a function's attribute": Pair(attributed(0.5), attributed(0.25)),
    "a global float": Pair(constant("x = 0.5"), constant("x = 0.25")),
    "a global int": Pair(constant("x = 1"), constant("x = 2")),
    "a global that is called as a builtin": Pair(
        rule("def abs(u):\n    return -u\n" + UPDATE.format("abs(u)")),
        rule("def abs(u):\n    return u\n" + UPDATE.format("abs(u)")),
    ),
    "a global NamedTuple": Pair(
        rule("class C(NamedTuple):\n    x: float\nc = C(0.5)\n" + UPDATE.format("c.x * u")),
        rule("class C(NamedTuple):\n    x: float\nc = C(0.25)\n" + UPDATE.format("c.x * u")),
    ),
    "a method of a NamedTuple": Pair(record("self.x * 2"), record("self.x * 3")),
    "a default of a NamedTuple": Pair(record("self.x", 1.0), record("self.x", 2.0)),
    "a function it calls": Pair(helper("u * 2"), helper("u * 3")),
    "a function that one calls": Pair(deep("u * 2"), deep("u * 3")),
    "a function inside it": Pair(
        rule(UPDATE.format("(lambda: math.sin(x) * u)()"), x=0.5),
        rule(UPDATE.format("(lambda: math.sin(x) * u)()"), x=0.25),
    ),
    "a set of constants": Pair(
        rule(UPDATE.format("u * ('a' in {'a', 'b'})")),
        rule(UPDATE.format("u * ('a' in {'c', 'b'})")),
    ),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_all_that_a_rule_computes_with_counts(pair):
    assert static_key(pair.one) != static_key(pair.other)
    assert static_key(pair.one) == static_key(pair.one)
    assert hash(static_key(pair.one)) == hash(static_key(pair.one))


def test_the_same_rule_made_twice_is_one_rule():
    make = rule(FACTORY.format("x * u"), "make")
    assert static_key(make(0.5)) == static_key(make(0.5))
    assert static_key(functools.partial(make(0.5), x=1)) == static_key(
        functools.partial(make(0.5), x=1)
    )


def test_a_function_that_calls_itself():
    def make():
        def power(u, n):
            return u if n == 0 else u * power(u, n - 1)

        return lambda u, slots, p: (power(u, 2), slots)

    assert static_key(make()) == static_key(make())


def test_a_list_that_holds_itself():
    loop = [1]
    loop.append(loop)
    f = closed("u", loop)
    assert hash(static_key(f)) == hash(static_key(f))


def unset(nesterov):
    """A rule with a variable that is set on one branch only."""
    if nesterov:
        factor = 0.9
    return lambda u, slots, p: (factor * u if nesterov else -u, slots)


def test_a_variable_that_was_never_set_is_no_error():
    params = {"w": torch.ones(3)}
    tx = fo.leafwise(None, unset(False), name="unset")
    got, _ = fo.compile(tx)({"w": torch.ones(3)}, tx.init(params), params)
    assert got["w"].tolist() == [0.0] * 3


def test_the_same_text_in_two_modules_is_two_rules():
    """Equal code on equal lines, as a template writes it, that reads each module's own number."""
    one, other = constant("x = object()"), constant("x = object()")
    assert one.__code__ == other.__code__
    assert static_key(one) != static_key(other)


def test_a_global_that_changes_makes_a_new_kernel():
    space = {"__name__": "somebodys"}
    exec("x = 1.0\n" + UPDATE.format("-x * u"), space)
    for x in (1.0, 2.0):
        space["x"] = x
        tx = fo.leafwise(None, space["update"], name="changing")
        params = {"w": torch.zeros(3)}
        got, _ = fo.compile(tx)({"w": torch.ones(3)}, tx.init(params), params)
        assert got["w"].tolist() == [-x] * 3


def test_a_rule_that_is_a_method_takes_its_own_numbers():
    """Two methods of one function have one code, and each its own self."""

    class Rule:
        def __init__(self, sign):
            self.sign = sign

        def update(self, u, slots, p):
            return self.sign * u, slots

    w = torch.nn.Parameter(torch.zeros(3))
    opt = Optimizer(
        [w], lambda sign: fo.leafwise(None, Rule(sign).update, name="method"), sign=-1.0
    )
    w.grad = torch.ones(3)
    opt.step()
    opt.param_groups[0]["sign"] = 3.0
    opt.step()
    assert w.tolist() == [2.0] * 3


def test_the_dtype_that_new_tensors_get_counts():
    def update(u, slots, p):
        return -(u + torch.full((), 1e-12) + 1.0 - 1.0).double() * torch.ones(()).element_size(), ()

    params, seen = {"w": torch.zeros(3, dtype=torch.float64)}, []
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            tx = fo.leafwise(None, update, name="default")
            p = fo.tree.map(torch.clone, params)
            got, _ = fo.compile(tx)(fo.tree.map(torch.ones_like, p), tx.init(p), p)
            seen.append(round(got["w"][0].item()))
    finally:
        torch.set_default_dtype(before)
    assert seen == [-4, -8]
