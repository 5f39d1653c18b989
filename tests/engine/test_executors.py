"""Executors: which tensors each of them takes, and that a new one is an entry in a list."""

from __future__ import annotations

import pytest
import torch
from helpers import make_grads, make_params

import functional_optim as fo
from functional_optim.adapters import AdamW, Optimizer
from functional_optim.engine import group
from functional_optim.engine.dynamic_shapes import DynamicShapeExecutor
from functional_optim.engine.inductor import InductorExecutor
from functional_optim.engine.joined import JoinedExecutor
from functional_optim.engine.native import NativeExecutor
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.engine.shards import ShardExecutor


def executors(opt):
    """The executors of an optimizer object's last step."""
    return [x for entry in opt._plan.entries for x in entry.tensors.executors]


def stepped(params, make, steps=3):
    """An optimizer after some steps over copies of these parameters, and the copies."""
    mine = [p.detach().clone() for p in params]
    opt = make(mine)
    for i in range(steps):
        for k, p in enumerate(mine):
            p.grad = torch.full_like(p, 0.1 * (i + 1) + 0.01 * k)
        opt.step()
    return opt, mine


PLAIN = [torch.ones(3), torch.ones(2, 5), torch.ones(())]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (AdamW, [NativeExecutor]),
        (lambda params: AdamW(params, compile=False), [JoinedExecutor]),
        (lambda params: Optimizer(params, fo.adafactor), [DynamicShapeExecutor] * 3),
        (
            lambda params: Optimizer(params, lambda: fo.adafactor(0.1), compile=False),
            [PerTensorExecutor],
        ),
    ],
    ids=["native", "joined", "any shape", "one by one"],
)
def test_each_recipe_finds_its_executor(make, expected):
    opt, _ = stepped(PLAIN, make)
    assert [type(x) for x in executors(opt)] == expected


def test_a_new_executor_is_an_entry_in_the_list(monkeypatch):
    seen = []

    class Noting(PerTensorExecutor):
        @classmethod
        def accepts(cls, links, g, p, slots, how):
            return cls if p.dim() == 2 else None

        def step(self, grads, scalars):
            seen.append(len(self.members))
            return super().step(grads, scalars)

    monkeypatch.setattr(group, "EXECUTORS", [Noting, *group.EXECUTORS])
    opt, mine = stepped(PLAIN, AdamW)
    assert {type(x) for x in executors(opt)} == {Noting, NativeExecutor}
    assert seen == [1, 1, 1]
    monkeypatch.undo()
    _, expected = stepped(PLAIN, AdamW)
    for x, y in zip(mine, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("measures", [False, True], ids=["nothing", "measurements alone"])
def test_what_an_executor_cannot_prepare_goes_to_the_next(measures, monkeypatch):
    """With all that was ready: the next executor also measures."""
    build = NativeExecutor.build

    def some(self, body):
        return build(self, body) if measures and body.task == "reduce" else None

    monkeypatch.setattr(NativeExecutor, "build", some)
    recipe = lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(0.1))  # noqa: E731
    opt, mine = stepped(PLAIN, lambda params: Optimizer(params, recipe))
    assert {type(x) for x in executors(opt)} == {InductorExecutor}
    monkeypatch.undo()
    _, expected = stepped(PLAIN, lambda params: Optimizer(params, recipe))
    for x, y in zip(mine, expected, strict=True):
        torch.testing.assert_close(x, y)


# ---------------------------------------------------------------- shards


@pytest.fixture
def mesh():
    """A device mesh of this process alone."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def divided(tensors, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    return {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in tensors.items() if x.dim()}


RECIPES = {
    "adamw": lambda: fo.adamw(0.1),
    "composed": lambda: fo.chain(
        fo.clip_by_global_norm(0.5), fo.adamw(0.1, weight_decay=0.1), fo.params_ema(0.9)
    ),
    "accumulate": lambda: fo.accumulate(fo.chain(fo.clip_by_global_norm(0.5), fo.nadam(0.1)), 2),
}


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_shard_steps_bit_for_bit_as_the_plain_tensor_that_it_is(name, compiled, mesh):
    plain = {k: p for k, p in make_params(torch.float32).items() if p.dim()}
    grads = make_grads(plain, steps=4)
    whole = {k: torch.nn.Parameter(p.clone()) for k, p in plain.items()}
    parts = {k: torch.nn.Parameter(p) for k, p in divided(plain, mesh).items()}
    theirs = Optimizer(whole.values(), RECIPES[name], compile=compiled)
    ours = Optimizer(parts.values(), RECIPES[name], compile=compiled)
    for tree in grads:
        for k, g in divided(tree, mesh).items():
            whole[k].grad, parts[k].grad = tree[k], g
        ours.step()
        theirs.step()
    assert {type(x) for x in executors(ours)} == {ShardExecutor}
    kind = NativeExecutor if compiled else JoinedExecutor
    assert {type(y) for x in executors(ours) for y in x.inner.executors} == {kind}
    for k in plain:
        assert torch.equal(parts[k].full_tensor(), whole[k]), k
        for key, slot in theirs.state[whole[k]].items():
            mine = ours.state[parts[k]][key]
            assert torch.equal(getattr(mine, "full_tensor", lambda x=mine: x)(), slot), (k, key)


def test_a_shard_that_moves_is_noticed(mesh):
    (p,) = divided({"w": torch.zeros(4, 2)}, mesh).values()
    (g,) = divided({"w": torch.ones(4, 2)}, mesh).values()
    opt = Optimizer([torch.nn.Parameter(p)], lambda: fo.sgd(0.5))
    (q,) = opt.param_groups[0]["params"]
    for _ in range(3):
        q.grad = g
        opt.step()
        q._local_tensor = q._local_tensor.clone()
    assert q.full_tensor().unique().tolist() == [-1.5]


def test_a_functional_step_takes_shards(mesh):
    params = divided({"w": torch.ones(4, 2), "b": torch.ones(3)}, mesh)
    grads = divided({"w": torch.ones(4, 2), "b": torch.ones(3)}, mesh)
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.5))
    expected = fo.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    stepped, _ = fo.compile(tx)(grads, tx.init(params), params)
    for k in params:
        assert stepped[k] is params[k]
        torch.testing.assert_close(stepped[k].full_tensor(), expected[k].full_tensor())


def test_a_rule_that_raises_for_one_shape_leaves_all_tensors(recwarn):
    """It cannot be compiled for that shape, so it runs before anything is written."""

    def update(u, slots, p):
        if p.shape[0] == 3:
            raise RuntimeError("three rows")
        return -u, slots

    params = [torch.nn.Parameter(torch.ones(n, n)) for n in (2, 3)]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = Optimizer(params, lambda: fo.leafwise(None, update, elementwise=False, name="picky"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="three rows"):
            opt.step()
    assert all(bool((p == 1).all()) for p in params)
    assert any("the steps run eagerly" in str(w.message) for w in recwarn)
