"""One replica of a group that trains with torchft: a program, run by `torchft_group.py`.

It waits for a line on its input, trains, kills itself where it was told to, and writes a line of
JSON about every step to its output.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

import functional_optim as fo
from functional_optim.replicas import Decision, TorchFT

SHARED = 8
"""After so many steps together a replica that is to die does."""


Connect = Callable[[], Manager]
"""Called when all that is slow at first has been done: whoever is connected is waited for."""


def connect(rank: int, quorum: str) -> Manager:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=quorum == "async",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=str(rank),
        hostname="localhost",
    )


class Taken(NamedTuple):
    """A step: what the group said, all that must be equal on both replicas, and the rate."""

    decision: Decision
    tensors: Any
    lr: float


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_inside(manager: Manager, place: str) -> None:
    """Arm the Manager: it dies before its first reduction, its second one, or its vote.

    By then the quorum is known and the peer waits for this replica, in the midst of a reduction.
    """
    allreduce = manager.allreduce
    calls = {"before": 0, "within": 1}.get(place, sys.maxsize)

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if calls == 0:
            manager.wait_quorum()
            time.sleep(0.3)
            kill()
        calls -= 1
        return allreduce(*arguments, **named)

    manager.allreduce = dying
    if place == "after":
        manager.should_commit = kill


def make_model(rank: int) -> torch.nn.Sequential:
    """Other weights on every replica: the group must make them equal."""
    torch.manual_seed(rank)
    layers = torch.nn.Linear(20, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    return torch.nn.Sequential(*layers)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 20, generator=generator)


def functional(connect: Connect, rank: int) -> tuple[TorchFT, Iterator[Taken]]:
    """The loop over pure functions; batch-norm statistics and a count are its `extra`."""
    model = make_model(rank)
    params = {name: p.detach() for name, p in model.named_parameters()}
    statistics = dict(model.named_buffers())

    def loss(params: Any, statistics: Any, x: Tensor) -> tuple[Tensor, Any]:
        statistics = {name: b.clone() for name, b in statistics.items()}
        y = torch.func.functional_call(model, (params, statistics), x)
        return y.square().mean(), statistics

    gradient = torch.func.grad(loss, has_aux=True)
    gradient(params, statistics, batch(rank, 0))  # the first call imports half of torch
    coordinator = TorchFT(connect(), bucket_bytes=256)
    lr = fo.schedules.linear(1e-2, 1e-4, 5000)
    replica = fo.replicas.Replica(coordinator, fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr)))

    def steps() -> Iterator[Taken]:
        now = replica.init(params, extra=(statistics, torch.zeros((), dtype=torch.int64)))
        while True:
            now = replica.start(now)
            grads, _ = gradient(now.params, now.extra[0], batch(rank, coordinator.step))
            now, decision = replica.step(grads, now)
            assert decision is not None
            if decision.committed:
                means, seen = now.extra
                _, means = gradient(now.params, means, batch(7, decision.step))
                now = now._replace(extra=(means, seen + 8))
            yield Taken(decision, tuple(now), float(fo.get(now.state, "lr")))

    return coordinator, steps()


def adapter(connect: Connect, rank: int) -> tuple[TorchFT, Iterator[Taken]]:
    """An optimizer object with a scheduler; torchft's own DDP, or the adapter, averages."""
    from functional_optim.adapters import AdamW, FaultTolerantOptimizer

    net = make_model(rank)
    net[1] = torch.nn.Identity()
    net(batch(rank, 0)).square().mean().backward()
    manager = connect()
    with_ddp = manager._use_async_quorum
    model = DistributedDataParallel(manager, net, bucket_cap_mb=1e-4) if with_ddp else net
    inner = AdamW(net.parameters(), lr=1e-2)
    coordinator = TorchFT(manager, bucket_bytes=256)
    opt = FaultTolerantOptimizer(coordinator, inner, average_gradients=not with_ddp)
    scheduler = opt.follow(torch.optim.lr_scheduler.ExponentialLR(opt, 0.999))

    def steps() -> Iterator[Taken]:
        while True:
            opt.zero_grad()
            model(batch(rank, coordinator.step)).square().mean().backward()
            opt.step()
            scheduler.step()
            decision = coordinator.decision
            assert decision is not None
            lr = opt.param_groups[0]["lr"]
            state = [inner.state[p] for p in net.parameters()]
            numbers = torch.tensor([lr, scheduler.last_epoch], dtype=torch.float64)
            yield Taken(decision, (list(net.parameters()), state, numbers), lr)

    return coordinator, steps()


APIS: dict[str, Any] = {"functional": functional, "adapter": adapter}


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for x in fo.tree.leaves(tensors):
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", choices=APIS, required=True)
    parser.add_argument("--quorum", choices=("async", "sync"), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--dies", choices=("between", "before", "within", "after"))
    parser.add_argument("--ends", action="store_true", help="say when all shall stop")
    parser.add_argument("--stop", type=Path, required=True, help="the file that says where")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdin.readline()
    coordinator, steps = APIS[flags.api](lambda: connect(flags.rank, flags.quorum), flags.rank)
    shared = 0
    print(json.dumps({"seed": digest(list(make_model(flags.rank).parameters()))}), flush=True)
    sys.stdin.readline()
    for decision, tensors, lr in steps:
        line = {**decision._asdict(), "digest": digest(tensors), "lr": lr, "at": time.monotonic()}
        print(json.dumps(line), flush=True)
        shared += decision.committed and decision.participants == 2
        if flags.ends and shared == 2 * SHARED and not flags.stop.exists():
            flags.stop.with_suffix(".part").write_text(str(decision.step + 3))
            flags.stop.with_suffix(".part").rename(flags.stop)
        last = int(flags.stop.read_text()) if flags.stop.exists() else sys.maxsize
        if decision.step >= last + (0 if flags.ends else 10):
            break
        if decision.participants < 2:
            time.sleep(0.02)
        if flags.dies and shared == SHARED:
            if flags.dies == "between":
                kill()
            die_inside(coordinator.manager, flags.dies)
    coordinator.close()
    print(json.dumps({"closed": True}), flush=True)


if __name__ == "__main__":
    main()
