"""Measured numbers reach a log, and no step waits for them in between."""

from __future__ import annotations

import pytest
import torch
from events import read_events
from helpers import assert_same
from loops import backward, batches, make_model, row
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter

import functional_optim as fo
from functional_optim import adapters

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class NoReads(TorchDispatchMode):
    """Raises where the value of a tensor is read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise AssertionError(f"the step reads a tensor: {func}")
        return func(*args, **(kwargs or {}))


def test_a_read_is_noticed():
    with NoReads(), pytest.raises(AssertionError, match="reads a tensor"):
        torch.ones(1).item()


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


@pytest.mark.parametrize("compile", [False, "strict"])
def test_what_was_measured_is_in_the_event_file(compile, tmp_path):
    """Every second step; the number is the norm of the gradients, the rate the scheduler's."""

    def recipe(lr):
        return fo.chain(fo.monitor({"norm": fo.measures.global_norm}), fo.adamw(lr))

    model = make_model(row("adamw"), torch.float32)
    opt = adapters.Optimizer(model.parameters(), recipe, lr=0.1, compile=compile)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    wanted = {"norm": [], "lr": []}
    with SummaryWriter(tmp_path) as writer:
        for step, x in enumerate(batches(6, torch.float32), 1):
            backward(model, opt, x)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            opt.step()
            scheduler.step()
            if step % 2 == 0:
                values = {
                    "norm": opt.state[model[0].weight]["norm"],
                    "lr": scheduler.get_last_lr()[0],
                }
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                wanted["norm"].append((step, norm))
                wanted["lr"].append((step, 0.1 * 0.5**step))
    events = read_events(tmp_path)
    for name, pairs in wanted.items():
        assert [step for step, _ in events[name]] == [2, 4, 6]
        assert [v for _, v in events[name]] == pytest.approx([v for _, v in pairs], rel=1e-5)


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
