"""A wrong gradient, parameter or slot ends in a sentence: never in a signal, nor half a step.

Run as a program, the file prints a line for each case that ends in anything but the pure update's
result or a sentence.
"""

import os
import subprocess
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, clone, run
from sampling import some
from torch import Tensor
from torch._subclasses import FakeTensorMode

import functional_optim as fo
from functional_optim import kernels, tree
from functional_optim.adapters import Optimizer

Case = namedtuple("Case", "way recipe later role kind")
SIZE = 6


class Odd(Tensor):
    """A subclass that changes nothing."""


def freed(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def shrunk(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(8)
    return x


def behind(x: Tensor) -> Tensor:
    """The same, not at the beginning of its storage."""
    return torch.cat([x.reshape(-1), x.reshape(-1)])[x.numel() :].reshape(x.shape)


def escaped(transform: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """What a function leaked out of a transform of torch.func."""

    def make(x: Tensor) -> Tensor:
        leaked = []

        def loss(given: Tensor) -> Tensor:
            leaked.append(given)
            return given.sum()

        transform(loss)(x)
        return leaked[0]

    return make


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "meta": lambda x: x.to("meta"),
    "meta, with an offset": lambda x: behind(x).to("meta")[1:],
    "freed": freed,
    "freed, with an offset": lambda x: freed(behind(x)),
    "shrunk": shrunk,
    "longer": lambda x: torch.cat([x, x]),
    "shorter": lambda x: x[1:],
    "a column": lambda x: x[:, None],
    "0-dim": lambda x: x.sum(),
    "empty": lambda x: x[:0],
    "integers": lambda x: (x * 3).to(torch.int64),
    "bools": lambda x: x > 0,
    "complex": lambda x: x + 1j,
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x[None].to_sparse_csr(),
    "for MKLDNN": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape),
    "escaped from vmap": escaped(lambda f: torch.vmap(f)),
    "escaped from grad": escaped(torch.func.grad),
    "fake": fake,
    "a subclass": lambda x: x.as_subclass(Odd),
    "an array": lambda x: x.numpy(),
    "a number": lambda x: 1.0,
    "expanded": lambda x: x[:1].expand(SIZE),
    "every second": lambda x: torch.stack([x, x], 1).reshape(-1)[::2],
    "negated when read": lambda x: torch._neg_view(x),
    "behind another": behind,
    "recorded": lambda x: x.clone().requires_grad_() * 1,
    "as it should be": lambda x: x,
}
FIRST = ("shrunk", "negated when read")
"""What a later step does not see: a storage that torch itself would read past, and a mark that only
a private function puts on a vector of such strides."""
ALIASES = ("its parameter", "another parameter", "its slot", "a part of its slot")


WAYS = ("donate", "donate strict", "keep", "keep strict", "True", "strict", "False")
RECIPES = {
    "adamw": lambda: fo.adamw(0.1),
    "clipped": lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(0.1)),
}


def cases() -> list[Case]:
    found = []
    for i, way in enumerate(WAYS):
        for later in (False, True):
            kinds = [(role, kind) for role in ("gradient", "parameter", "slot") for kind in WRONG]
            kinds += [("gradient", kind) for kind in ALIASES]
            kinds += [(role, kind) for role in ("parameter", "slot") for kind in ALIASES]
            for k, (role, kind) in enumerate(kinds):
                if later and role == "gradient" and kind in FIRST:
                    continue
                recipe = ("adamw", "clipped")[(i + k + later) % 2]
                found.append(Case(way, recipe, later, role, kind))
    return found


def start() -> dict[str, Tensor]:
    return {name: torch.linspace(-1, 1, SIZE) + i for i, name in enumerate("abc")}


def gradients(step: int) -> dict[str, Tensor]:
    return {name: torch.linspace(1, 2, SIZE) * (i + step) for i, name in enumerate("abc")}


def alias(kind: str, params: Any, slots: Any) -> Tensor:
    if kind == "its slot":
        return slots["b"]
    if kind == "a part of its slot":
        return slots["b"][:1].expand(SIZE)
    return params["b" if kind == "its parameter" else "c"]


def spoil(case: Case, trees: dict[str, dict[str, Any]]) -> bool:
    """Put what is wrong in its place. False if it cannot be made."""
    mine = trees[case.role]
    if case.kind in ALIASES:
        x = alias(case.kind, trees["parameter"], trees["slot"])
        if x is mine["b"]:
            return False
        mine["b"] = x
        return True
    try:
        mine["b"] = WRONG[case.kind](mine["b"].detach().clone())
    except RuntimeError:
        return False
    return True


def outcome(fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return fn(), None
    except Exception as error:
        return None, error


def is_sentence(error: Exception) -> bool:
    text = str(error)
    return text.endswith(".") and ("'b'" in text or "'c'" in text or "params: " in text)


def same(a: Any, b: Any) -> bool:
    try:
        assert_close(a, b, 1e-5)
    except AssertionError:
        return False
    return True


def readable(x: Any) -> Any:
    """A copy of what a tensor has; of one without memory, nothing."""
    if not isinstance(x, Tensor):
        return torch.zeros(0)
    if type(x) is Odd:
        x = x.as_subclass(Tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return outcome(lambda: x + 0)[0]
    plain = type(x) in (Tensor, torch.nn.Parameter) and not x.is_nested
    if not plain or x.device.type == "meta" or x.layout is not torch.strided:
        return torch.zeros(0)
    there, error = outcome(lambda: x.untyped_storage().nbytes())
    if error is not None or there < (x.storage_offset() + x.numel()) * x.element_size():
        return torch.zeros(0)
    return x.detach().clone()


def snapshot(*trees: Any) -> list[Any]:
    return [readable(x) for t in trees for x in tree.leaves(t)]


def judged(pure: Callable[[], Any], step: Callable[[], Any], read: Callable[[], Any]) -> str | None:
    """What is wrong with a step. pure: gives what it must end with. read: all that it writes."""
    wanted, refused = outcome(pure)
    wanted, before = clone(wanted), snapshot(read())
    _, error = outcome(step)
    if error is not None:
        if not is_sentence(error):
            return f"{type(error).__name__}: {error}"
        return None if same(snapshot(read()), before) else "changed before it raised"
    if refused is not None:
        return f"steps where the pure update says {refused}"
    found = read()[0]
    return None if same(snapshot(found), snapshot(wanted)) else "differs from the pure update"


def as_function(case: Case, tx: Any) -> str | None:
    donate = case.way.startswith("donate")
    step = fo.compile(tx, donate=donate, strict="strict" in case.way)
    params, state = start(), tx.init(start())
    for i in range(2 if case.later else 0):
        params, state = step(gradients(i), state, params)
    grads, params = gradients(3), dict(params)
    slots = dict(state.slots["exp_avg"])
    state = state._replace(slots={**state.slots, "exp_avg": slots})
    if not spoil(case, {"gradient": grads, "parameter": params, "slot": slots}):
        return None
    now = [(params, state)]

    def pure() -> Any:
        updates, new = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), new

    return judged(pure, lambda: now.__setitem__(0, step(grads, state, params)), lambda: now)


def as_object(case: Case, tx: Any) -> str | None:
    how: Any = {"True": True, "False": False, "strict": "strict"}[case.way]
    params = {name: torch.nn.Parameter(x) for name, x in start().items()}
    opt = Optimizer(params.items(), lambda: tx, compile=how)
    state = tx.init(start())
    for i in range(2 if case.later else 0):
        _, state = tx.update(gradients(i), state, {name: p.detach() for name, p in params.items()})
        for p, g in zip(params.values(), gradients(i).values(), strict=True):
            p.grad = g
        opt.step()
    if case.role == "parameter" and case.kind.startswith("escaped"):
        return None  # torch's own p.detach() dies of such a p.data
    if not case.later and (case.role == "slot" or "its slot" in case.kind):
        return None  # there is none yet
    slots = {name: opt.state[p].get("exp_avg") for name, p in params.items()}
    grads, given = gradients(3), {name: p.data for name, p in params.items()}
    if not spoil(case, {"gradient": grads, "parameter": given, "slot": slots}):
        return None
    try:
        for name, p in params.items():
            if given[name] is not p.data:
                p.data = given[name]
            p.grad = grads[name]
    except (RuntimeError, TypeError):
        return None  # torch does not let it come to a step
    if case.role == "slot":
        opt.state[params["b"]]["exp_avg"] = slots["b"]
    ours = {name: p.detach() for name, p in params.items()}
    if case.later:
        state = state._replace(slots={**state.slots, "exp_avg": slots})

    def pure() -> Any:
        return fo.apply_updates(ours, tx.update(grads, state, ours)[0])

    def read() -> Any:
        return ours, [dict(opt.state[p]) if p in opt.state else {} for p in params.values()]

    return judged(pure, opt.step, read)


def main(bare: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if bare:  # as where the library beside the kernels could not be built
        kernels.watch.tried = True
    for case in cases():
        sys.stderr.write(f"{case}\n")
        step = as_function if case.way.split()[0] in ("donate", "keep") else as_object
        found = step(case, RECIPES[case.recipe]())
        if found is not None:
            sys.stdout.write(" | ".join([*map(str, case), found[:200]]) + "\n")
    sys.stdout.write("bare\n" if kernels.watcher() is None else "watched\n")


# ---------------------------------------------------------------- in a process of its own
@pytest.mark.parametrize("library", some(["watched", "bare"]))
def test_every_wrong_tensor_ends_in_the_pure_result_or_a_sentence(library):
    """In a process of its own, which may die; with the library beside the kernels, and without."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, library]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.splitlines() == [library]


def test_a_storage_that_is_gone_is_named():
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    opt = Optimizer([("w", w)], fo.sgd, lr=0.1)
    w.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"'w' needs a storage of 12 bytes, but .* to 0"):
        opt.step()


@pytest.mark.parametrize("backend", ["kernels", "torch"])
@pytest.mark.parametrize("which", ["parameter", "slot"])
def test_a_gradient_may_be_the_memory_that_is_written(which, backend, fresh_dynamo):
    """As of a loss of half the square, whose gradient is the parameter."""
    tx = fo.adam(0.1)
    pure, params = ({name: torch.arange(3.0) + i for i, name in enumerate("ab")} for _ in range(2))
    state, mine = tx.init(pure), tx.init(params)
    step = fo.compile(tx, backend=backend)
    for _ in range(3):
        every = [(pure, params), (state.slots["exp_avg"], mine.slots["exp_avg"])]
        theirs, grads = ({"a": x["b"], "b": x["a"]} for x in every[which == "slot"])
        pure, state = run(tx, pure, [theirs], state)
        params, mine = step(grads, mine, params)
        torch.testing.assert_close(params, pure)
        torch.testing.assert_close(mine.slots, state.slots)


@pytest.mark.parametrize("compile", [True, False])
def test_a_vector_that_becomes_a_column_at_its_address_is_stepped_as_that(compile):
    memory = torch.arange(8.0)
    w = torch.nn.Parameter(memory[:4])
    opt = Optimizer([w], fo.sgd, lr=1.0, compile=compile)
    for _ in range(3):
        w.grad = torch.ones(4)
        opt.step()
    w.data, before = memory.view(4, 2)[:, 0], memory.clone()
    w.grad = torch.ones(4)
    opt.step()
    torch.testing.assert_close(before - memory, torch.tensor([1.0, 0.0] * 4))


if __name__ == "__main__":
    main("bare" in sys.argv)
