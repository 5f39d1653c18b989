"""Steps inside torch.compile: the pure update is traced once, never again, by few instructions a
tensor; a loop around an object is compiled once for all rates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from helpers import assert_close
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.optim.lr_scheduler import LambdaLR

import functional_optim as fo
from functional_optim import adapters

MOST = 1550
"""Instructions of this package that torch may trace for a tensor; AdamW has 1,534. What torch adds
to them of its own depends on its version."""


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    clear_compilation_metrics()


def tree(n=2):
    return {f"layers.{i}.weight": torch.linspace(-1.0, 1.0, 6).reshape(2, 3) for i in range(n)}


def step_of(tx) -> Callable[..., Any]:
    def step(params, state):
        grads = torch.func.grad(lambda p: sum((x**4).sum() for x in p.values()))(params)
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    return step


def traced_once() -> bool:
    """Whether there was one compilation, and torch has not started it anew."""
    (only,) = get_compilation_metrics()
    return not only.restart_reasons


def parts():
    labels = {"layers.0.*": "one", "*": "two"}
    return fo.partition({"one": fo.adamw(0.1), "two": fo.sgd(0.1, momentum=0.9)}, labels)


COSINE = fo.schedules.warmup_cosine(0.0, 0.1, warmup_steps=2, decay_steps=9)
RECIPES = {
    "a float": lambda: fo.adamw(0.1),
    "a schedule": lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(COSINE)),
    "a tensor": lambda: fo.adamw(torch.tensor(0.1)),
    "a double tensor": lambda: fo.adamw(torch.tensor(0.1, dtype=torch.float64)),
    "a carried product": lambda: fo.nadam(0.1),
    "carried counts": lambda: fo.accumulate(fo.adamw(0.1), every=2),
    "parts": parts,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_traced_once(name):
    step = step_of(RECIPES[name]())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    params, state = tree(), RECIPES[name]().init(tree())
    eager = params, state
    for _ in range(4):
        params, state = compiled(params, state)
        eager = step(*eager)
        torch.testing.assert_close((params, tuple(state)), (eager[0], tuple(eager[1])))
    assert traced_once()


IN_PLACE = pytest.mark.xfail(
    torch.__version__ < "2.12", reason="torch 2.11 cannot trace how optree flattens the trees"
)


@pytest.mark.parametrize("donate", [pytest.param(True, marks=IN_PLACE), False])
def test_a_compiled_step_is_traced_as_operations(donate):
    tx = RECIPES["a schedule"]()
    step = fo.compile(tx, donate=donate)
    traced = torch.compile(step.__call__, fullgraph=True, backend="aot_eager")
    params, expected = tree(), tree()
    state, own = tx.init(params), tx.init(expected)
    for _ in range(3):
        grads = fo.tree.map(torch.clone, expected)
        params, state = traced(grads, state, params)
        expected, own = fo.compile(tx, donate=False)(grads, own, expected)
        torch.testing.assert_close((params, state.hyper), (expected, own.hyper))
    assert traced_once()


def test_a_leaf_without_a_gradient_does_not_trace_again():
    tx = parts()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(params, state):
        grads = {"layers.0.weight": params["layers.0.weight"], "layers.1.weight": None}
        return tx.update(grads, state, params)

    state = tx.init(tree())
    before = {key: float(x) for key, x in state.hyper.items()}
    for _ in range(2):
        _, state = step(tree(), state)
    assert {key: float(x) for key, x in state.hyper.items()} == before
    assert traced_once()


def test_a_tensor_of_the_user_acts_without_another_trace():
    lr = torch.tensor(0.1, dtype=torch.float64)
    step = step_of(fo.sgd(lr))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    params, state = tree(), fo.sgd(lr).init(tree())
    for value in (0.1, 0.2, 0.3):
        lr.fill_(value)
        expected, _ = step(params, state)
        params, state = compiled(params, state)
        torch.testing.assert_close(params, expected)
        assert fo.get(state, "lr").item() == value
    assert traced_once()


def test_instructions_grow_with_the_number_of_tensors_alone(monkeypatch):
    count, step, home = [0], InstructionTranslatorBase.step, str(Path(fo.__file__).parent)

    def counted(self):
        count[0] += self.f_code.co_filename.startswith(home)
        return step(self)

    monkeypatch.setattr(InstructionTranslatorBase, "step", counted)
    found = []
    for n in (4, 8, 12):
        torch._dynamo.reset()
        count[0] = 0
        tx = fo.adamw(0.1)
        update = torch.compile(tx.update, fullgraph=True, backend="eager")
        update(tree(n), tx.init(tree(n)), tree(n))
        found.append(count[0])
    first, second = found[1] - found[0], found[2] - found[1]
    assert second == pytest.approx(first, rel=0.02)
    assert first < 4 * MOST


class Update(torch.nn.Module):
    """An update over lists of tensors: torch does not save the types of other trees."""

    def __init__(self, tx, params):
        super().__init__()
        self.tx = tx
        self.state = optree.tree_structure(tx.init(params))

    def forward(self, grads, state, params):
        state = optree.tree_unflatten(self.state, state)
        updates, state = self.tx.update(grads, state, params)
        return optree.tree_leaves(state), fo.apply_updates(params, updates)


@pytest.mark.parametrize("make", [RECIPES["carried counts"], lambda: fo.flatten(fo.adamw(COSINE))])
def test_a_module_that_holds_a_transformation_is_exported_and_saved(make, tmp_path):
    """torch.export copies all that a module holds, as a pytree."""
    tx, params = make(), tree()
    module = Update(tx, params)
    given = optree.tree_leaves(tx.init(params)), params
    exported = torch.export.export(module, ({key: x + 1 for key, x in params.items()}, *given))
    assert module.tx is tx
    assert tx._asdict() == {"init": tx.init, "update": tx.update}
    torch.export.save(exported, tmp_path / "update.pt2")
    loaded = torch.export.load(tmp_path / "update.pt2").module()
    found = expected = given
    for scale in (1.0, -2.0, 0.5):
        grads = {key: scale * x for key, x in params.items()}
        found, expected = loaded(grads, *found), module(grads, *expected)
        torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------- a loop around an object
RATES = [0.1, 0.07, 0.05, 0.03, 0.02, 0.01]


def measured(params, lr):
    def recipe(lr):
        return fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr), fo.params_ema(0.9))

    return adapters.Optimizer(params, recipe, lr=torch.tensor(lr, dtype=torch.float64))


def trained(make, backend=None):
    """A model after some steps, and how many graphs there were after each; lr always changes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    opt = make(model.double().parameters(), lr=RATES[0])
    scheduler = LambdaLR(opt, lambda i: RATES[min(i, len(RATES) - 1)] / RATES[0])

    def step(x):
        opt.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()

    go = step if backend is None else torch.compile(step, backend=backend)
    graphs, seen = [], set()
    for x in torch.randn(len(RATES), 6, 4, dtype=torch.float64):
        seen.add(float(opt.param_groups[0]["lr"]))
        go(x)
        graphs.append(backend.frame_count if backend else 0)
        scheduler.step()
    assert len(seen) == len(RATES)
    return [p.detach() for p in model.parameters()], graphs


FLOATS = pytest.mark.xfail(
    torch.__version__ < "2.13",
    reason="torch 2.11 and 2.12 compile again for a float that meets tensors only as -lr",
)


@pytest.mark.parametrize("make", [pytest.param(adapters.AdamW, marks=FLOATS), measured])
def test_a_compiled_loop_around_an_object_equals_the_eager_one(make):
    """torch.optim's own way; torch's compiler breaks the graph at `backward` and goes on."""
    plain = make is adapters.AdamW
    found, graphs = trained(make, CompileCounterWithBackend("aot_eager" if plain else "eager"))
    for other in (make, torch.optim.AdamW) if plain else (make,):
        assert_close(found, trained(other)[0], 1e-10)
    assert graphs[2:] == [graphs[2]] * (len(RATES) - 2)  # the first makes the state
