"""What a kernel is known by: everything that a rule computes with counts, and nothing else."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import cases
import pytest
import torch

import functional_optim as fo
from functional_optim.kernels import fingerprints
from functional_optim.kernels.fingerprints import fingerprint, static_key

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
    one, other = fingerprint(pair.one), fingerprint(pair.other)
    assert one is not None
    assert other is not None
    assert one != other


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_it_counts_within_a_process(pair):
    assert static_key(pair.one) != static_key(pair.other)
    assert static_key(pair.one) == static_key(pair.one)
    assert hash(static_key(pair.one)) == hash(static_key(pair.one))


def test_the_same_rule_made_twice_is_one_rule():
    make = rule(FACTORY.format("x * u"), "make")
    assert static_key(make(0.5)) == static_key(make(0.5))
    assert static_key(functools.partial(make(0.5), x=1)) == static_key(
        functools.partial(make(0.5), x=1)
    )
    assert fingerprint(make(0.5)) == fingerprint(make(0.5))


def test_where_and_when_a_rule_was_written_does_not_count():
    assert fingerprint(helper("u * 2")) == fingerprint(
        rule("\n\nother = 3\ndef helper(u):\n    return u * 2\n" + UPDATE.format("helper(u)"))
    )


class Numbers:
    """Somebody's object."""

    x = 0.5


INDESCRIBABLE = {
    "an object": rule(UPDATE.format("numbers.x * u"), numbers=Numbers()),
    "a class": rule(UPDATE.format("Numbers.x * u"), Numbers=Numbers),
    "a module": rule(UPDATE.format("os.getpid() * u"), os=os),
    "an import": rule(
        "def update(u, slots, p):\n    import os\n    return u * os.getpid(), slots\n"
    ),
    "a relative import": rule(
        "def update(u, slots, p):\n    from .math import x\n    return u * x, slots\n"
    ),
    "a tensor": rule(UPDATE.format("x * u"), x=torch.ones(2)),
    "a tensor's method": rule(UPDATE.format("x(u)"), x=torch.ones(2).add),
    "anybody's operator": rule(UPDATE.format("torch.ops.somebodys.op(u)")),
    "anybody's operators": rule(UPDATE.format("x.op(u)"), x=torch.ops.aten),
    "a global by its name": rule(UPDATE.format("globals()['x'] * u"), x=1),
    "evaluated text": rule(UPDATE.format("eval('u')")),
    "a hash": rule(UPDATE.format("hash('x') * u")),
    "a method of somebody's object": closed("x(u)", Numbers().__init__),
}


@pytest.mark.parametrize("f", INDESCRIBABLE.values(), ids=INDESCRIBABLE)
def test_what_cannot_be_described_has_no_fingerprint(f):
    assert fingerprint(f) is None


def test_functions_that_call_themselves_and_each_other():
    source = (
        "def even(u, n):\n    return u if n == 0 else odd(u, n - 1)\n"
        "def odd(u, n):\n    return -u if n == 0 else {}even(u, n - 1)\n"
        + UPDATE.format("odd(u, 3)")
    )
    assert fingerprint(rule(source.format(""))) != fingerprint(rule(source.format("2 * ")))

    def make():
        def power(u, n):
            return u if n == 0 else u * power(u, n - 1)

        return lambda u, slots, p: (power(u, 2), slots)

    assert static_key(make()) == static_key(make())
    assert fingerprint(make()) == fingerprint(make()) is not None


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
    assert fingerprint(unset(False)) is not None
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
    opt = fo.adapters.Optimizer(
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


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_rule_of_this_package_has_a_fingerprint(case):
    links = case.tx().placements
    found = [fingerprint(link.rule.updates, link.rule.slots, link.rule.reduce) for link in links]
    assert None not in found
    codes = [static_key((link.rule.updates, link.rule.slots, link.rule.reduce)) for link in links]
    assert len(set(found)) == len(set(codes))


def test_a_source_that_has_changed_since_it_was_imported_has_no_fingerprint(monkeypatch):
    monkeypatch.setattr(fingerprints, "own_source", fingerprints.own_source.__wrapped__)
    monkeypatch.setattr(fingerprints, "LOADED", float("inf"))
    assert fingerprint(1) is not None
    monkeypatch.setattr(fingerprints, "LOADED", 0.0)
    assert fingerprint(1) is None


def test_a_source_that_is_not_there_has_no_fingerprint(monkeypatch, tmp_path):
    monkeypatch.setattr(fingerprints, "own_source", fingerprints.own_source.__wrapped__)
    monkeypatch.setattr(fingerprints, "__file__", str(tmp_path / "a" / "b" / "fingerprints.py"))
    assert fingerprint(1) is None


SCRIPT = """
import functional_optim as fo
from functional_optim.kernels.fingerprints import fingerprint

def update(u, slots, p):
    return u * (str(p.dim()) in {"1", "2", "three", "four"}), slots

links = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(), fo.leafwise(None, update)).placements
print([fingerprint(link.rule.updates, link.rule.slots, link.rule.reduce) for link in links])
"""


def test_fingerprints_are_the_same_in_every_process(tmp_path):
    said = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(done.stdout)
    assert len(said) == 1
    assert "None" not in said.pop()


def test_math_is_known_and_a_neighbour_of_its_name_is_not():
    assert fingerprint(rule(UPDATE.format("math.pi * u"), math=math)) is not None
    stranger = types.ModuleType("mathematics")
    assert fingerprint(rule(UPDATE.format("x.pi * u"), x=stranger)) is None
    assert Path(fingerprints.__file__).name == "fingerprints.py"
