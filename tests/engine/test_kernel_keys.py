"""What a rule is known by inside of a process: everything that it computes with counts."""

import functools

import pytest
import torch

import functional_optim as fo
from functional_optim.kernels import static_key

PRELUDE = "import functools, math, torch\nfrom typing import NamedTuple\n"
UPDATE = "def update(u, slots, p):\n    return {}, slots\n"
FACTORY = (
    "def make(x, y=None):\n    def update(u, slots, p):\n        return {}, slots\n"
    "    return update\n"
)


def rule(source, name="update", **given):
    """What a module with this source defines."""
    space = {"__name__": "somebodys", **given}
    exec(PRELUDE + source, space)
    return space[name]


def closed(body, x):
    """A rule that closes over an object."""
    return rule(FACTORY.format(body), "make")(x)


def attributed(x):
    f = rule(UPDATE.format("update.x * u"))
    f.x = x
    return f


def methods(*values):
    """Of objects of one class, so that both are one function."""
    made = rule(
        "class Rule(NamedTuple):\n    x: float\n"
        "    def update(self, u, slots, p):\n        return self.x * u, slots\n",
        "Rule",
    )
    return [made(x).update for x in values]


PAIR = "class Pair(NamedTuple):\n    x: float = {}\n    def twice(self): return self.x * {}\n"
HELPER = "def helper(u):\n    return u * X\n"
SOURCES = {
    "code": (UPDATE.format("u X 1"), "+", "-"),
    "a constant": (UPDATE.format("u * X"), "0.5", "0.25"),
    "a default": ("def update(u, slots, p, x=X):\n    return x * u, slots\n", "1", "2"),
    "a default by name": ("def update(u, slots, p, *, x=X):\n    return x * u, slots\n", "1", "2"),
    "a lambda's default": ("update = lambda u, slots, p, x=X: (x * u, slots)\n", "1", "2"),
    "a global": (f"x = X\n{UPDATE.format('x * u')}", "0.5", "0.25"),
    "a builtin's name": (f"def abs(u): return X\n{UPDATE.format('abs(u)')}", "-u", "u"),
    "a NamedTuple": (f"{PAIR.format(1, 2)}c = Pair(X)\n{UPDATE.format('c.x * u')}", "0.5", "0.25"),
    "its method": (f"{PAIR.format(1, 'X')}{UPDATE.format('Pair().twice() * u')}", "2", "3"),
    "its default": (f"{PAIR.format('X', 1)}{UPDATE.format('Pair().twice() * u')}", "1.0", "2.0"),
    "a function it calls": (HELPER + UPDATE.format("helper(u)"), "2", "3"),
    "a function that one calls": (
        f"{HELPER}def outer(u):\n    return helper(u)\n{UPDATE.format('outer(u)')}",
        *("2", "3"),
    ),
    "a function inside it": (f"x = X\n{UPDATE.format('(lambda: x * u)()')}", "0.5", "0.25"),
    "a set": (UPDATE.format("u * ('a' in {X, 'b'})"), "'a'", "'c'"),
}
"""Sources of rules, where X stands for what two of them differ in."""


class Named:
    """Equal to all others."""

    def __init__(self, x):
        self.x = [x]

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


CLOSED = {
    "the sign of zero": ("x * u", 0.0, -0.0),
    "a type": ("x * u", 1, 1.0),
    "a number": ("x * u", 0.5, 0.25),
    "a tuple": ("x[0] * u", (1, 2), (2, 2)),
    "a list": ("x[0] * u", [1, 2], [2, 2]),
    "a dict": ("x['a'] * u", {"a": 1}, {"a": 2}),
    "an object": ("x.x[0] * u", Named(0.5), Named(0.25)),
    "the sign of a complex zero": ("x * u", 0j, -0j),
    "a function": ("x(u)", lambda u: u + 1, lambda u: u + 2),
    "a builtin": ("x(u)", torch.sin, torch.cos),
    "what a method is bound to": ("u * len(x())", "a".upper, "ab".upper),
}
"""Rules that close over something else."""

DIFFERENT = {
    **{name: [rule(text.replace("X", x)) for x in both] for name, (text, *both) in SOURCES.items()},
    **{f"{name} in a closure": [closed(f, x) for x in both] for name, (f, *both) in CLOSED.items()},
    "an attribute of self": methods(0.5, 0.25),
    "a partial's argument": [functools.partial(closed("u", 0), x=x) for x in (1, 2)],
    "a function's attribute": [attributed(x) for x in (0.5, 0.25)],
    # equal code on equal lines, as a template writes it, that reads each module's own number
    "a module": [rule(f"x = object()\n{UPDATE.format('x * u')}") for _ in range(2)],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_all_that_a_rule_computes_with_counts(name):
    one, other = DIFFERENT[name]
    assert static_key(one) != static_key(other)
    assert static_key(one) == static_key(one)
    assert hash(static_key(one)) == hash(static_key(one))


def recursive():
    def power(u, n):
        return u if n == 0 else u * power(u, n - 1)

    return lambda u, slots, p: (power(u, 2), slots)


def test_the_same_rule_made_twice_is_one_rule():
    make = rule(FACTORY.format("x * u"), "make")
    assert static_key(make(0.5)) == static_key(make(0.5))
    one, other = (functools.partial(make(0.5), x=1) for _ in range(2))
    assert static_key(one) == static_key(other)
    assert static_key(recursive()) == static_key(recursive())  # a function that calls itself
    loop = [1]
    loop.append(loop)
    f = closed("u", loop)
    assert hash(static_key(f)) == hash(static_key(f))


def test_a_function_that_many_others_call_is_described_once():
    calls = "".join(
        f"def f{n}(u): return f{n + 1}(u) + f{n + 1}(-u) * f{n + 2}(u)\n" for n in range(60)
    )
    functions = f"def f60(u): return u\ndef f61(u): return 2 * u\n{calls}"
    make = rule(functions + FACTORY.format("f0(u)"), "make")
    assert static_key(make(0.5)) == static_key(make(0.5))


def test_an_attribute_is_no_global_of_the_same_name():
    update = rule(UPDATE.format("u.round()"))
    before = static_key(update)
    update.__globals__["round"] = 2
    assert static_key(update) == before


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


def test_a_global_that_changes_makes_a_new_kernel():
    space = {"__name__": "somebodys"}
    exec("x = 1.0\n" + UPDATE.format("-x * u"), space)
    for x in (1.0, 2.0):
        space["x"] = x
        tx = fo.leafwise(None, space["update"], name="changing")
        params = {"w": torch.zeros(3)}
        got, _ = fo.compile(tx)({"w": torch.ones(3)}, tx.init(params), params)
        assert got["w"].tolist() == [-x] * 3


def test_the_dtype_that_new_tensors_get_counts():
    def update(u, slots, p):
        return -(u + torch.full((), 1e-12) + 1.0 - 1.0).double() * torch.ones(()).element_size(), ()

    params, seen = {"w": torch.zeros(3, dtype=torch.float64)}, []
    tx = fo.leafwise(None, update, name="default")
    step, before = fo.compile(tx), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            for again in (step, fo.compile(tx)):
                p = fo.tree.map(torch.clone, params)
                got, _ = again(fo.tree.map(torch.ones_like, p), tx.init(p), p)
                seen.append(round(got["w"][0].item()))
    finally:
        torch.set_default_dtype(before)
    assert seen == [-4, -4, -8, -8]
