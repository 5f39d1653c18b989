"""Executors: which tensors each of them takes, and what one leaves to the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compilers import forget

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.engine import group
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.kernels import print_cpp

PLAIN = [torch.ones(3), torch.ones(2, 5), torch.ones(())]
MATRICES = [torch.ones(4, 3), torch.ones(3, 3)]
TRANSPOSED = [torch.ones(4, 3).mT]


def executors(opt: Any) -> set[str]:
    """The kinds of executors of an optimizer object's last step."""
    every = [type(x).__name__ for entry in opt._plan.entries for x in entry.tensors.executors]
    return {name.removesuffix("Executor") for name in every}


def stepped(params: list[torch.Tensor], recipe: Any, compile: Any = True, steps: int = 3) -> Any:
    """An optimizer after some steps over copies of these parameters, and the copies."""
    mine = [p.detach().clone() for p in params]
    opt = Optimizer(mine, recipe, compile=compile)
    for i in range(steps):
        for k, p in enumerate(mine):
            p.grad = torch.arange(1.0, 1 + p.numel()).reshape(p.shape) * 0.1 * (i + 1) + 0.01 * k
        opt.step()
    return opt, mine


def rule(update: Any) -> Any:
    return lambda: fo.leafwise(None, lambda u, slots, p: (update(u), slots), name="rule")


@pytest.mark.parametrize(
    ("params", "recipe", "compile", "expected"),
    [
        (PLAIN, fo.adamw, "strict", "Native"),
        (PLAIN, fo.adamw, False, "Joined"),
        (PLAIN, fo.lamb, "strict", "Native"),
        (PLAIN, fo.lamb, False, "PerTensor"),
        (PLAIN, fo.adafactor, "strict", "Native"),
        (PLAIN, fo.adafactor, False, "PerTensor"),
        (MATRICES, fo.muon, "strict", "Product"),
        (MATRICES, fo.muon, False, "PerTensor"),
        (PLAIN[:2], rule(lambda u: u.cumsum(0)), "strict", "Product"),
        (MATRICES, rule(lambda u: u @ u.mT @ u), "strict", "Product"),
        (MATRICES, rule(lambda u: u if len(u) > 3 else -u), "strict", "Product"),
        (TRANSPOSED, fo.adamw, "strict", "Native"),
        (TRANSPOSED, fo.lamb, "strict", "Native"),
        (TRANSPOSED, rule(lambda u: u - u.mean(0)), True, "PerTensor"),
    ],
)
def test_each_recipe_finds_its_executor(params, recipe, compile, expected):
    opt, mine = stepped(params, recipe, compile)
    assert executors(opt) == {expected}
    for x, y in zip(mine, stepped(params, recipe, False)[1], strict=True):
        torch.testing.assert_close(x, y)


def test_a_new_executor_is_an_entry_in_the_list(monkeypatch):
    seen = []

    class Noting(PerTensorExecutor):
        @classmethod
        def accepts(cls, placements, g, p, slots, how):
            return cls if p.dim() == 2 else None

        def step(self, grads, scalars):
            seen.append(len(self.members))
            return super().step(grads, scalars)

    monkeypatch.setattr(group, "EXECUTORS", [Noting, *group.EXECUTORS])
    opt, mine = stepped(PLAIN, fo.adamw)
    assert executors(opt) == {"Native", "Noting"}
    assert seen == [1, 1, 1]
    monkeypatch.undo()
    for x, y in zip(mine, stepped(PLAIN, fo.adamw)[1], strict=True):
        torch.testing.assert_close(x, y)


def test_a_library_that_does_something_else_is_not_used(monkeypatch):
    """What the chunks leave is put together wrongly, which only tensors of several chunks show."""
    wrong = print_cpp.HEAD.replace("return a + b", "return a")
    assert wrong != print_cpp.HEAD
    monkeypatch.setattr(print_cpp, "HEAD", wrong)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    recipe = rule(lambda u: u / u.sum(0, keepdim=True))
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="something else than the rules do"):
        opt, mine = stepped([torch.ones(5, 4)], recipe)
    assert executors(opt) == {"PerTensor"}
    torch.testing.assert_close(mine, stepped([torch.ones(5, 4)], recipe, False)[1])


def test_a_rule_that_raises_for_one_shape_leaves_all_tensors():
    def update(u: Any, slots: Any, p: Any) -> Any:
        if p.shape[0] == 3:
            raise RuntimeError("three rows")
        return -u, slots

    params = [torch.nn.Parameter(torch.ones(n, n)) for n in (2, 3)]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = Optimizer(params, lambda: fo.leafwise(None, update, name="picky"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="three rows"):
            opt.step()
    assert all(bool((p == 1).all()) for p in params)


@pytest.fixture
def part() -> Any:
    """Makes shards, on a device mesh of this process alone."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda x: distribute_tensor(x, mesh, [Shard(0)])
    dist.destroy_process_group()


def test_a_shard_that_moves_is_noticed(part):
    q = torch.nn.Parameter(part(torch.zeros(4, 2)))
    opt = Optimizer([q], lambda: fo.sgd(0.5))
    for _ in range(3):
        q.grad = part(torch.ones(4, 2))
        opt.step()
        q._local_tensor = q._local_tensor.clone()
    assert executors(opt) == {"Shard"}
    assert q.full_tensor().unique().tolist() == [-1.5]


def test_a_functional_step_takes_shards(part):
    params, grads = ({"w": part(torch.ones(4, 2)), "b": part(torch.ones(3))} for _ in range(2))
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.5))
    expected = fo.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    moved, _ = fo.compile(tx)(grads, tx.init(params), params)
    for k in params:
        assert moved[k] is params[k]
        torch.testing.assert_close(moved[k].full_tensor(), expected[k].full_tensor())
