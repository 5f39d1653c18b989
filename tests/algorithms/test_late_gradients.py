"""Rules with a basis train a matrix from its first gradient on, whenever that comes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, run
from sampling import some
from torch import Tensor
from ways import by_object, random_tree

import functional_optim as fo

RECIPES: dict[str, Callable[..., Any]] = {
    "galore": lambda lr=0.1: fo.chain(fo.scale_by_galore(rank=2), fo.scale_by_lr(lr)),
    "apollo": lambda lr=0.1: fo.chain(fo.scale_by_apollo(rank=2), fo.scale_by_lr(lr)),
    "soap": lambda lr=0.1: fo.soap(lr, precondition_frequency=50),
    "soap-spread": lambda lr=0.1: fo.soap(lr, precondition_frequency=50, refresh="spread"),
    "kl_soap": lambda lr=0.1: fo.kl_soap(lr),
    "kl_shampoo": lambda lr=0.1: fo.kl_shampoo(lr),
    "shampoo": lambda lr=0.1: fo.shampoo(lr),
    "psgd": lambda lr=0.1: fo.psgd_kron(lr),
    "muon": lambda lr=0.1: fo.muon(lr),
}
LATE = 3
"""The step of the first gradient of "late", which goes into one batch with "early"."""

each_recipe = pytest.mark.parametrize("name", RECIPES)


def matrices(seed: int) -> dict[str, Tensor]:
    return random_tree(seed, torch.float32, {"early": (5, 5), "late": (5, 5), "other": (4, 4)})


def gradients(step: int) -> dict[str, Any]:
    found: dict[str, Any] = matrices(1 + step)
    return {**found, "late": found["late"] if step >= LATE else None}


def after(tx: Any, steps: int) -> dict[str, Tensor]:
    return run(tx, matrices(0), [gradients(k) for k in range(steps)])[0]


@each_recipe
def test_the_first_gradient_moves_a_matrix_at_once(name):
    tx = RECIPES[name]()
    first, second = (after(tx, LATE + k)["late"] for k in (1, 2))
    start = matrices(0)["late"]
    basis = name.startswith(("soap", "kl"))  # whose first gradient makes a basis, and no step
    assert ((first - start).norm() < 0.01) == basis  # but for weight decay
    assert (second - start).norm() > 0.02


@each_recipe
def test_all_ways_start_it_alike(name):
    recipe, steps = RECIPES[name], LATE + 4
    tx = recipe()
    plain = after(tx, steps)
    moved, state = matrices(0), tx.init(matrices(0))
    step = fo.compile(tx)
    for k in range(steps):
        moved, state = step(gradients(k), state, moved)
    assert_close(moved, plain, 1e-5)
    for compile in (True, False):  # a gate counts the steps of all tensors, as the update does
        grads = [gradients(k) for k in range(steps)]
        gated, _ = by_object(fo.apply_if_finite(recipe(), 5), matrices(0), grads, compile)
        assert_close(gated, plain, 1e-5)


@pytest.mark.parametrize("name", some(RECIPES, 0, ["soap", "psgd"]))
def test_torch_compile_starts_it_alike(name, fresh_dynamo):
    tx, steps = RECIPES[name](), LATE + 2
    traced = torch.compile(tx.update, backend="eager", fullgraph=True)
    assert_close(after(fo.GradientTransformation(tx.init, traced), steps), after(tx, steps), 1e-5)


@pytest.mark.parametrize("name", ["galore", "soap", "kl_shampoo"])
def test_members_of_an_ensemble_start_each_by_itself(name):
    tx = RECIPES[name]()
    params = torch.stack([matrices(0)["early"], matrices(0)["late"]])
    other = torch.stack([matrices(k)["early"] for k in (1, 2)])
    own = [tx.init(p) for p in params]
    _, own[0] = tx.update(matrices(3)["early"], own[0], params[0])
    own[1] = own[1]._replace(step=own[0].step)  # which has had no gradient yet
    both = fo.tree.map(lambda *x: torch.stack(x), *own)
    updates, after = torch.vmap(tx.update)(other, both, params)
    for i in range(2):
        update, state = tx.update(other[i], own[i], params[i])
        assert_close(updates[i], update, 1e-5)
        assert_close(fo.tree.map(lambda x, i=i: x[i], after.slots), state.slots, 1e-4)


def test_a_start_needs_a_batch_and_slots_that_there_are():
    def update(u: Tensor, slots: Any, p: Any) -> Any:
        return u, slots

    for batched in (False, True):
        with pytest.raises(ValueError, match="has a start, which needs batched=True and names"):
            fo.leafwise(None, update, runs=fo.Runs(start=(update, ["basis"]), batched=batched))


@pytest.mark.parametrize("shape", [(3, 2), (5, 4), (4, 3, 2, 2)], ids=str)
def test_came_takes_zero_rows_that_meet_zero_columns(shape):
    tx, w = fo.came(0.1), torch.ones(shape)
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    g[0], g[:, 0] = 0, 0
    compiled, state = fo.compile(tx, donate=False, strict=True), tx.init(w)
    for _ in range(3):
        moved, _ = compiled(g, state, w)
        updates, state = tx.update(g, state, w)
        w = fo.apply_updates(w, updates)
        assert_close(moved, w, 1e-6)
    assert w.isfinite().all()
    assert (w[0] == 1).all()
    assert (w[1:, 1:] != 1).any()


@pytest.mark.parametrize("shape", [(7,), (6, 4)], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e5])
def test_shampoo_in_float32_is_that_of_float64_at_every_scale(scale, shape):
    tx, found = fo.shampoo(1.0), []
    for dtype in (torch.float32, torch.float64):
        generator, w = torch.Generator().manual_seed(0), torch.zeros(shape, dtype=dtype)
        state = tx.init(w)
        for _ in range(3):
            g = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            update, state = tx.update(g.to(dtype), state, w)
        found.append(update.double())
    assert (found[0] - found[1]).norm() < 1e-3 * found[1].norm()
