"""Accelerate with two processes over gloo: replicas, shards, local steps, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import accelerate_ranks as ranks
import pytest
import torch
from helpers import assert_close, assert_same
from loops import EXACT, loss_of, make_model
from torch import distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler as lrs

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
every_row = pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in ranks.CASES])
LIMIT = 120  # seconds


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What the two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(ranks.__file__)), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks.WORLD)]


def of(both, name):
    """Its results, the same in both processes."""
    for mine in both:
        assert not isinstance(mine[name], str), mine[name]
    assert_same(both[1][name], both[0][name])
    return both[0][name]


def passes(case, count=1):
    """The parameters that one process has after each pass over the data, in batches of both."""
    model = make_model(case)
    opt = ranks.make(case, model)
    scheduler = lrs.StepLR(opt, 1, 0.7)
    ends = []
    for _ in range(count):
        for x in ranks.data().split(ranks.WORLD * ranks.BATCH):
            loss_of(model, x).backward()
            clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            for _ in range(ranks.WORLD):  # as Accelerate does: batches are counted
                scheduler.step()
            opt.zero_grad()
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return ends


@every_row
def test_replicas_go_where_one_process_goes_and_resume(case, both):
    found = of(both, f"replicated-{case.name}")
    first, second = passes(case, 2)
    assert_close(found["ended"], first, EXACT)
    assert_close(found["further"], second, EXACT)
    assert_same(found["resumed"], found["further"])


@every_row
def test_shards_go_where_one_process_goes(case, both):
    assert_close(of(both, f"sharded-{case.name}")["ended"], passes(case)[0], EXACT)


@every_row
def test_local_steps_are_averaged(case, both):
    models = [make_model(case) for _ in range(ranks.WORLD)]
    opts = [ranks.make(case, model) for model in models]
    parts = ranks.data().split(ranks.BATCH)
    for i in range(len(parts) // ranks.WORLD):
        for rank, (model, opt) in enumerate(zip(models, opts, strict=True)):
            opt.zero_grad()
            loss_of(model, parts[i * ranks.WORLD + rank]).backward()
            opt.step()
        if (i + 1) % ranks.EVERY == 0:
            average(models)
    average(models)
    wanted = {name: p.detach() for name, p in models[0].named_parameters()}
    assert_close(of(both, f"local-{case.name}")["ended"], wanted, EXACT)


def average(models):
    with torch.no_grad():
        for row in zip(*[model.parameters() for model in models], strict=True):
            mean = sum(row) / len(row)
            for p in row:
                p.copy_(mean)
