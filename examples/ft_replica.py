"""One of the two replicas that `fault_tolerant.py` starts: a separate program, so that it can be
killed.

It trains a small GPT, and prints a line of JSON when it is ready, and one for the result of each
step. It reads from its input when to begin and when to stop, and exits when its input ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import corpus
import torch
import torch.distributed as dist
from gpt import GPT, Shape, next_byte_loss
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torchft import Manager, ProcessGroupGloo

import functional_optim as fo

SHAPE = Shape(layers=2, heads=2, width=64, context=32)
BATCH = 8
"""Windows of text a step, on each replica."""


class Orders:
    """What the parent says: `last` is the step to stop at, None as long as it is not known."""

    def __init__(self) -> None:
        self.begin = threading.Event()
        self.last: int | None = None
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "begin":
                self.begin.set()
            else:
                self.last = int(line)
        if self.last is None:
            os._exit(1)  # the parent is gone


def connect(rank: int) -> Manager:
    """torchft's part: who takes part in a step, averages, votes, and heals."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # it is public
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=str(rank),
        hostname="localhost",
    )


def digest(tree: Any) -> str:
    """A fingerprint of all bits of a tree: parameters, moments and counts."""
    found = hashlib.sha256()
    for x in fo.tree.leaves(tree):
        found.update(x.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    flags = parser.parse_args()
    orders = Orders()
    torch.set_num_threads(1)
    torch.manual_seed(flags.seed + flags.rank)  # other weights on each: the first step heals them
    text = corpus.load(None, SHAPE.context).train
    model = GPT(SHAPE)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return next_byte_loss(functional_call(model, params, (x,)), y)

    # a replica that is connected keeps the other one waiting: what is slow at first is done before
    params = {name: p.detach() for name, p in model.named_parameters()}
    grad_and_value(loss)(params, *corpus.batch(text, 0, 0, BATCH, SHAPE.context))
    lr = fo.schedules.inverse_square_root(3e-3, warmup_steps=20)
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr, weight_decay=0.1))
    replica = fo.replicas.Replica(connect(flags.rank), tx)
    group = replica.coordinator
    now = replica.init(params)
    print(json.dumps({"ready": True}), flush=True)
    orders.begin.wait()
    while orders.last is None or group.step < orders.last:
        now = replica.start(now)
        # which text comes next depends on the step, so a healed replica reads on where its peer is
        x, y = corpus.batch(text, flags.seed + flags.rank, group.step, BATCH, SHAPE.context)
        grads, value = grad_and_value(loss)(now.params, x, y)
        now, decision = replica.step(grads, now)
        assert decision is not None
        said = {"loss": value.item(), "digest": digest(now[:2]), "time": time.time()}
        print(json.dumps({**decision._asdict(), **said}), flush=True)
    group.close()


if __name__ == "__main__":
    main()
