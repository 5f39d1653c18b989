"""Single questions to the real torchft, all in one process: a program, run by `test_torchft.py`.

Each of `CHECKS` answers "" or what went wrong; two replicas are two threads. The answers are
written to a file, as JSON.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft_group import lighthouse

import functional_optim as fo
from functional_optim.replicas import Replica, TorchFT, as_coordinator


def make_manager(server: LighthouseServer | str, rank: int, **settings: Any) -> Manager:
    """A Manager for a lighthouse, or for one at a port."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = server if isinstance(server, str) else server.address().rsplit(":", 1)[1]
    given = {
        "pg": ProcessGroupGloo(timeout=timedelta(seconds=2)),
        "load_state_dict": None,
        "state_dict": None,
        "min_replica_size": 1,
        "timeout": timedelta(seconds=10),
        "quorum_timeout": timedelta(seconds=10),
        "rank": 0,
        "world_size": 1,
        "store_addr": "localhost",
        "store_port": store.port,
        "lighthouse_addr": f"http://localhost:{port}",
        "replica_id": str(rank),
        "hostname": "localhost",
    }
    made = Manager(**{**given, **settings})
    vars(made)["its_store"] = store
    return made


def together(work: Callable[[int, Manager], Any], **settings: Any) -> list[Any]:
    """Run a function of rank and Manager for two replicas at once; what both return."""
    server = lighthouse()
    both_known = threading.Barrier(2)

    def one(rank: int) -> Any:
        manager = make_manager(server, rank, **settings)
        both_known.wait()
        try:
            return work(rank, manager)
        finally:
            as_coordinator(manager).close()

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(one, (0, 1)))
    server.shutdown()
    return done


def train(
    rank: int, manager: Manager, spoil: Callable[[int, int, Replica], None], steps: int = 8
) -> list[tuple[Any, float]]:
    """Steps of one number; `spoil` is called in each, between start and the vote."""
    replica = Replica(manager, fo.adam(fo.schedules.linear(0.1, 0.01, 20)))
    now, taken = replica.init(torch.full((1,), float(rank))), []
    while replica.coordinator.step < steps:
        now = replica.start(now)
        spoil(rank, len(taken), replica)
        try:
            now, decision = replica.step(now.params * 0.5 + rank, now)
        except ArithmeticError:
            decision = replica.coordinator.decision
        taken.append((decision, now.params.item()))
    return taken


def check_equal(runs: list[list[tuple[Any, float]]]) -> None:
    first, second = ({d.step: value for d, value in run if d.committed} for run in runs)
    shared = first.keys() & second.keys()
    assert len(shared) >= 6, runs
    assert [step for step in shared if first[step] != second[step]] == [], runs


def a_reported_error_refuses_the_step_and_its_replica_heals() -> None:
    def spoil(rank: int, count: int, replica: Replica) -> None:
        if (rank, count) == (1, 3):
            replica.coordinator.report_error(ValueError("a bad batch"))

    runs = together(lambda rank, manager: train(rank, manager, spoil))
    refused = [d for d, _ in runs[1] if not d.committed]
    assert [d.reason for d in refused] == ["ValueError: a bad batch"], runs
    check_equal(runs)


def an_update_that_fails_after_its_vote_is_taken_back_and_heals() -> None:
    def spoil(rank: int, count: int, replica: Replica) -> None:
        def fail(*_: Any) -> Any:
            replica._apply = whole
            raise ArithmeticError("no memory")

        if (rank, count) == (1, 3):
            whole, replica._apply = replica._apply, fail

    runs = together(lambda rank, manager: train(rank, manager, spoil))
    broken, healed = runs[1][3][0], runs[1][4][0]
    assert not broken.committed, runs
    assert broken.reason == "ArithmeticError: no memory", runs
    assert healed.healed, runs
    check_equal(runs)


def a_run_goes_on_where_its_checkpoint_was() -> None:
    def resumed(rank: int, manager: Manager) -> list[tuple[Any, float]]:
        manager.load_state_dict({"step": 5, "batches_committed": 10})
        assert as_coordinator(manager).step == 5
        return train(rank, manager, lambda *_: None)

    for run in together(resumed):
        assert [(d.step, d.participants, d.healed) for d, _ in run] == [
            (step, 2, False) for step in (6, 7, 8)
        ], run


def too_few_replicas_refuse_a_step() -> None:
    server = lighthouse()
    with TorchFT(make_manager(server, 0, min_replica_size=2)) as group:
        group.register("nothing", lambda saved: None, lambda: None)
        group.start()
        decision = group.decide()
        assert not decision.committed
        assert decision.reason == "1 replicas take part, but min_replica_size=2", decision
    server.shutdown()


def quantize_says_that_there_is_no_triton() -> None:
    server = lighthouse()
    manager = make_manager(server, 0)
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(RuntimeError, match="install triton"):
            TorchFT(manager, quantize=True)
    else:
        assert TorchFT(manager, quantize=True).quantize
    manager.shutdown()
    server.shutdown()


def a_lighthouse_that_is_gone_ends_the_step_in_words(use_async_quorum: bool) -> None:
    """It is a process of its own here, so that killing it breaks its connections."""
    command = [sys.executable, "-c", "import torchft_group; torchft_group.serve()"]
    there = subprocess.Popen([*command, "0"], cwd=Path(__file__).parent, stdout=subprocess.PIPE)
    assert there.stdout is not None
    port = there.stdout.readline().decode().strip()
    short = timedelta(seconds=2)
    manager = make_manager(
        port, 0, quorum_timeout=short, connect_timeout=short, use_async_quorum=use_async_quorum
    )
    group = TorchFT(manager)
    replica = Replica(group, fo.sgd(0.5))
    now = replica.init(torch.ones(1))

    def step() -> str:
        nonlocal now
        try:
            now = replica.start(now)
            now, decision = replica.step(torch.ones(1), now)
        except RuntimeError as error:
            assert not group.is_open
            return str(error)
        assert decision is not None
        return decision.reason

    assert step() == ""
    there.kill()
    there.wait()
    for _ in range(2):
        assert "torchft has found no quorum" in step()
    there = subprocess.Popen([*command, port], cwd=Path(__file__).parent, stdout=subprocess.PIPE)
    said = [step() for _ in range(20) if group.step < 2]
    assert group.step == 2, said
    assert now.params.item() == 0.0
    group.close()
    there.kill()


CHECKS: dict[str, Callable[[], None]] = {
    "reported error": a_reported_error_refuses_the_step_and_its_replica_heals,
    "update fails": an_update_that_fails_after_its_vote_is_taken_back_and_heals,
    "checkpoint": a_run_goes_on_where_its_checkpoint_was,
    "too few": too_few_replicas_refuse_a_step,
    "quantize": quantize_says_that_there_is_no_triton,
    "lighthouse gone, async": lambda: a_lighthouse_that_is_gone_ends_the_step_in_words(True),
    "lighthouse gone, sync": lambda: a_lighthouse_that_is_gone_ends_the_step_in_words(False),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    answers = {}
    for name, check in CHECKS.items():
        if flags.only in (None, name):
            try:
                check()
                answers[name] = ""
            except Exception:
                answers[name] = traceback.format_exc()
            (flags.out / "answers.json").write_text(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
