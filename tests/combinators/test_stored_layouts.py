"""Packed slots of tensors that are not one plain matrix: layouts, tied weights, ends of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same

import functional_optim as fo
from functional_optim import adapters

KINDS = ["int8", "int4", "bfloat16", "float8_e4m3fn"]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of many layouts. No size is a multiple of the block, and one is smaller."""
    random = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "plain": new(41, 50),
        "second": new(33, 50),
        "less than a block": new(5, 7),
        "transposed": new(50, 41).t(),
        "channels last": new(6, 5, 3, 3).to(memory_format=torch.channels_last),
        "every second": new(30, 22)[:, ::2],
        "expanded after": new(3, 4, 5).permute(2, 0, 1),
    }


def steps(kind: str, way: str) -> dict[str, torch.Tensor]:
    tx = fo.stored(fo.adamw(1e-2), kind, block_size=64, min_size=0, where="*")
    params, grads = tensors(0), [tensors(i) for i in range(1, 5)]
    if way == "update":
        state = tx.init(params)
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = fo.apply_updates(params, updates)
    elif way == "compile":
        state, step = tx.init(params), fo.compile(tx)
        for g in grads:
            params, state = step(g, state, params)
    else:
        live = {k: torch.nn.Parameter(p) for k, p in params.items()}
        opt = adapters.Optimizer(live.items(), lambda: tx, compile=way == "object")
        for g in grads:
            for k, p in live.items():
                p.grad = g[k]
            opt.step()
        params = {k: p.detach() for k, p in live.items()}
    return params


@pytest.mark.filterwarnings("ignore:.*compil")
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_stepped_alike(kind):
    """Rounding by chance goes by the place in the tensor, not in memory."""
    wanted = steps(kind, "update")
    assert_same(steps(kind, "eager"), wanted)
    plain = {k: x.contiguous() for k, x in tensors(0).items()}
    for way in ("compile", "object"):
        found = steps(kind, way)
        for k, x in wanted.items():
            near = torch.isclose(found[k], x, atol=1e-6)  # but for a code now and then
            assert near.float().mean() > 0.95, (way, k)
            assert (found[k] - x).norm() < 0.01 * (x - plain[k]).norm(), (way, k)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_block_is_no_part_of_the_slot(kind):
    """A full tensor's first entries, and these alone, up to the scale of the last block."""
    tx = fo.stored(fo.adamw(1e-2), kind, block_size=64, min_size=0, where="*")
    g = torch.linspace(0.5, 1, 128)
    ends = []
    for size in (128, 128 - 27):
        p = {"w": torch.zeros(size, 1)}
        updates, _ = tx.update({"w": g[:size, None]}, tx.init(p), p)
        ends.append(updates["w"][:64])
    assert_same(ends[0], ends[1])
    state = tx.init({"w": torch.zeros(101, 1)})
    whole = fo.decoded(tx, state, {"w": torch.zeros(101, 1)})
    assert whole.slots["exp_avg"]["w"].shape == (101, 1)


class Tied(torch.nn.Module):
    """Two layers with one weight between an embedding and a head with another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(70, 64)
        self.first = torch.nn.Linear(64, 64, bias=False)
        self.second = torch.nn.Linear(64, 64, bias=False)
        self.head = torch.nn.Linear(64, 70, bias=False)
        self.second.weight = self.first.weight
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(self.embed(x)))))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), x.roll(1))


def test_tied_weights_are_packed_once_and_embeddings_are_not():
    tx = fo.stored(fo.adamw(1e-2), "int8", min_size=1000)
    batches = [torch.arange(i, 40 + i) for i in range(4)]
    model, other, third = Tied(), Tied(), Tied()
    ends = []
    for own, compile in ((model, False), (other, True)):
        opt = adapters.Optimizer(own.named_parameters(), lambda: tx, compile=compile)
        for x in batches:
            opt.zero_grad()
            loss_of(own, x).backward()
            opt.step()
        ends.append({k: p.detach() for k, p in own.named_parameters()})
        packed = {k for k, p in own.named_parameters() if "exp_avg.int8" in opt.state[p]}
        assert packed == {"first.weight"}
        assert set(ends[-1]) == {"first.weight", "embed.weight"}
        assert own.second.weight is own.first.weight
    params = {k: p.detach().clone() for k, p in third.named_parameters()}
    state = tx.init(params)
    assert [k for k, x in state.slots["exp_avg.int8"].items() if x is not None] == ["first.weight"]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return loss_of(lambda x: torch.func.functional_call(third, params, x), x)

    for x in batches:
        updates, state = tx.update(torch.func.grad(loss)(params, x), state, params)
        params = fo.apply_updates(params, updates)
    assert_close(params, ends[0], 1e-5)
    assert_close(ends[1], ends[0], 1e-4)
