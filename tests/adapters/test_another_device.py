"""Steps on other devices: the host waits for no number, nor for what is measured."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from loops import backward, batches, make_model, row
from torch.utils._python_dispatch import TorchDispatchMode

import functional_optim as fo
from functional_optim import adapters

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class NoReads(TorchDispatchMode):
    """Raises where the value of a tensor is read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise AssertionError(f"the step reads a tensor: {func}")
        return func(*args, **(kwargs or {}))


def test_no_functional_step_reads_a_tensor():
    before = {"norm": fo.measures.global_norm, "size": fo.measures.rms}
    tx = fo.chain(
        fo.monitor(before),
        fo.monitor({"share": fo.measures.clip_share}, around=fo.clip_by_global_norm(0.5)),
        fo.monitor(
            fo.measures.diagnostics,
            around=fo.adamw(fo.schedules.linear(0.1, 0.0, 10)),
            per_tensor=True,
        ),
    )
    params = {"a": torch.ones(3, 4), "b": torch.ones(5)}
    state, kept = tx.init(params), []
    with NoReads():
        for i in range(4):
            grads = {name: p * (i + 1) for name, p in params.items()}
            updates, state = tx.update(grads, state, params)
            params = fo.apply_updates(params, updates)
            kept.append(torch.stack([fo.get(state, "norm"), fo.get(state, "lr")]))
    norms, rates = torch.stack(kept).T.tolist()
    assert norms[0] == pytest.approx(17**0.5)
    assert len(set(norms)) == 4
    assert rates == pytest.approx([0.1, 0.09, 0.08, 0.07])


def test_numbers_of_the_cpu_stay_in_their_tensors():
    model = make_model(row("nadam"))
    opt = adapters.NAdam(model.parameters(), lr=0.1, compile=False)
    for x in batches(2):
        backward(model, opt, x)
        opt.step()
    before = [opt.state[p]["mu_product"] for p in model.parameters()]
    backward(model, opt, batches(1)[0])
    opt.step()
    now = [opt.state[p]["mu_product"] for p in model.parameters()]
    assert all(a is b for a, b in zip(now, before, strict=True))
    assert_same(now, [now[0]] * len(now))
