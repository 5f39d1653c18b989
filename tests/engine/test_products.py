"""Rules with products of matrices: by ATen on stacks, with kernels around them."""

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same, step_object
from torch import Tensor
from ways import random_tree

import functional_optim as fo
from functional_optim import adapters, kernels
from functional_optim.core import memory

SHAPES = {"a": (6, 9), "b": (9, 6), "c": (6, 9), "d": (6, 9), "e": (3, 3), "f": (1, 4)}


def make_tree(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return random_tree(seed, dtype, SHAPES)


soap = functools.partial(fo.scale_by_soap, precondition_frequency=3)
spread = functools.partial(soap, refresh="spread")


def among_others(product: Any) -> Any:
    """Rules of each kind around a product."""
    return lambda: fo.chain(
        fo.clip_by_global_norm(1.0),
        fo.trace(0.9),
        product(),
        fo.add_decayed_weights(0.1),
        fo.clip_by_block_rms(0.5),
        fo.scale_by_lr(1e-2),
        fo.params_ema(0.9),
    )


def named_parameters(dtype: torch.dtype = torch.float64) -> Any:
    return [(key, torch.nn.Parameter(p)) for key, p in make_tree(0, dtype).items()]


def stepped(opt: Any, named: Any, steps: int, dtype: torch.dtype = torch.float64) -> None:
    step_object(opt, [make_tree(k + 1, dtype) for k in range(steps)])


def test_a_product_that_raises_leaves_everything_as_it_was():
    def update(u, slots, p):
        gram = u @ u.mT + torch.eye(len(u), dtype=u.dtype)
        return torch.linalg.cholesky(gram).sum() * u, slots

    def recipe():
        rule = fo.leafwise(None, update, name="cholesky")
        return fo.chain(fo.trace(0.9), rule, fo.scale_by_lr(1e-3))

    named = named_parameters()
    opt = adapters.Optimizer(named, recipe, compile="strict")
    stepped(opt, named, 2)
    before = [p.detach().clone() for _, p in named]
    slots = [opt.state[p]["momentum_buffer"].clone() for _, p in named]
    named[4][1].grad[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="cholesky"):
        opt.step()
    assert_same([p.detach() for _, p in named], before)
    assert_same([opt.state[p]["momentum_buffer"] for _, p in named], slots)


@pytest.mark.parametrize(("product", "order"), [(soap, (0, 2, 3)), (spread, (0, 3, 2))])
def test_a_checkpoint_goes_on_bit_by_bit(product, order):
    recipe = among_others(product)
    named, other = named_parameters(), named_parameters()
    opt, loaded = (adapters.Optimizer(x, recipe, compile="strict") for x in (named, other))
    stepped(opt, named, 3)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, other, strict=True):
            q.copy_(p)
    stepped(opt, named, 3)
    stepped(loaded, other, 3)
    for x, pairs in ((opt, named), (loaded, other)):  # of one shape are a, c and d
        slots = [x.state[p]["left_factor"] for _, p in pairs]
        assert memory.whole([slots[i] for i in order]) is not None
        assert memory.whole([slots[i] for i in (0, 1, 3)]) is None
    assert_same([p.detach() for _, p in other], [p.detach() for _, p in named])
    for (_, p), (_, q) in zip(named, other, strict=True):
        assert_same(dict(loaded.state[q]), dict(opt.state[p]))


def test_tensors_of_one_turn_are_renewed_as_one_part_of_their_stack(monkeypatch):
    """Of nine alike, three in each step; all that differs between steps is which of them."""
    stacks, qr = [], torch.linalg.qr

    def counted(x: Tensor) -> Any:
        stacks.append((len(x), x.dim()))
        return qr(x)

    monkeypatch.setattr(torch.linalg, "qr", counted)
    shapes = {f"{i}": (6, 6) for i in range(9)}
    start, grads = random_tree(0, torch.float64, shapes), random_tree(1, torch.float64, shapes)
    named = [(key, torch.nn.Parameter(p)) for key, p in start.items()]
    opt = adapters.Optimizer(named, spread, compile="strict")
    for (_, p), g in zip(named, grads.values(), strict=True):
        p.grad = g
    opt.step()
    counts = set()
    for _ in range(3):
        stacks.clear()
        before = [opt.state[p]["left_basis"].clone() for _, p in named]
        opt.step()
        after = [opt.state[p]["left_basis"] for _, p in named]
        renewed = [i for i in range(9) if not torch.equal(before[i], after[i])]
        assert renewed in ([0, 3, 6], [1, 4, 7], [2, 5, 8])
        assert stacks == [(3, 3)] * 2  # its left and its right bases
        counts.add(kernels.count())
    assert len(counts) == 1
    order = [0, 3, 6, 1, 4, 7, 2, 5, 8]  # where they lie in memory, one behind the other
    slots = [opt.state[p]["left_factor"] for _, p in named]
    assert any(memory.whole([slots[(i + k) % 9] for i in order]) is not None for k in range(3))


def test_what_a_batched_rule_cannot_have():
    def init(p):
        return Momentum(p)

    def update(u, slots, p):
        return u, slots

    runs, packed = fo.Runs(batched=True), fo.Storage(codecs={"average": object()})
    for more in ({"runs": runs, "storage": packed}, {"runs": runs._replace(after="step")}):
        with pytest.raises(ValueError, match="takes batches of tensors, so it can have no codecs"):
            fo.leafwise(init, update, name="cube", **more)


class Momentum(NamedTuple):
    average: torch.Tensor


def cubed() -> Any:
    def update(u, slots, p):
        m = 0.9 * slots.average + u
        return -0.01 * (m @ m.mT @ m), Momentum(m)

    def init(p):
        return Momentum(torch.zeros_like(p))

    return fo.leafwise(init, update, runs=fo.Runs(batched=True), name="cubed")


def test_slots_keep_their_dtypes_where_parameters_of_one_shape_have_different_ones():
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    results = []
    for compile in ("strict", False):
        params = [torch.nn.Parameter(torch.eye(4, dtype=dtype)) for dtype in dtypes]
        opt = adapters.Optimizer(params, cubed, compile=compile)
        for _ in range(3):
            for k, p in enumerate(params):
                p.grad = torch.full_like(p, 0.1 * (k + 1)).tril()
            opt.step()
        assert tuple(opt.state[p]["average"].dtype for p in params) == dtypes
        results.append([p.detach() for p in params])
    assert_close(*results, 1e-2)


def test_muon_takes_matrices_without_entries():
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 0), (0, 4), (2, 3))]
    opt = adapters.Muon(params)
    step_object(opt, [[torch.ones_like(p) for p in params]])
    shapes = [tuple(opt.state[p]["momentum_buffer"].shape) for p in params]
    assert shapes == [(4, 0), (0, 4), (2, 3)]
