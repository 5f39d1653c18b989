"""The real torchft: replicas are killed with SIGKILL, come back, and are equal bit for bit.

Everything that torchft starts lives in namespaces of its own (`torchft_spaces.py` says why).
"""

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torchft_spaces import alone, why_not

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

GROUPS = [(api, quorum) for api in ("functional", "adapter") for quorum in ("async", "sync")]
PLACES = {"functional": ["between", "before", "within", "after"], "adapter": ["between", "within"]}
"""Where the second replica is killed in each of its lives; it has one more, which it survives."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Settings of the programs, which must have one thread when they fork."""


class Group:
    """What two replicas have written: `survivor`, and the other one's `lives`."""

    def __init__(self, folder: Path, places: list[str]) -> None:
        self.name = folder.name
        self.places = places
        self.survivor = self.read(folder / "survivor.out")
        self.lives = [self.read(folder / f"life{i}.out") for i in range(len(places) + 1)]
        self.steps = {line["step"]: line for line in committed(self.survivor)}

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]


def committed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("committed")]


def run(folder: Path, program: str, *flags: str) -> Path:
    """Run a program of this folder, alone; what is left of its words is told if it fails."""
    command = alone(str(SUPPORT / program), *flags, "--out", str(folder))
    with (folder / "group.err").open("wb") as errors:
        done = subprocess.run(command, stderr=errors, env={**os.environ, **ONE_THREAD}, timeout=300)
    tails = [f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.err"))]
    assert done.returncode == 0, "\n".join(tails)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All groups, three at a time: they mostly wait."""
    with ThreadPoolExecutor(3) as pool:
        begun: dict[Any, Future[Path]] = {
            "rows": pool.submit(run, tmp_path_factory.mktemp("rows"), "torchft_rows.py")
        }
        for api, quorum in GROUPS:
            folder = tmp_path_factory.mktemp(f"{api}-{quorum}")
            flags = ("--api", api, "--quorum", quorum, "--places", *PLACES[api])
            begun[api, quorum] = pool.submit(run, folder, "torchft_group.py", *flags)
        yield begun
        for future in begun.values():
            future.cancel()


@pytest.fixture(scope="module", params=GROUPS, ids="-".join)
def group(request: pytest.FixtureRequest, runs: dict[Any, Future[Path]]) -> Group:
    return Group(runs[request.param].result(), PLACES[request.param[0]])


def test_replicas_of_different_seeds_are_equal_after_the_first_step(group: Group) -> None:
    (mine, first), (theirs, peers) = group.survivor[:2], group.lives[0][:2]
    assert mine["seed"] != theirs["seed"]
    assert first["step"] == peers["step"] == 1
    assert first["healed"] + peers["healed"] == 1
    assert first["digest"] == peers["digest"]


def test_every_shared_step_is_equal_bit_for_bit(group: Group) -> None:
    shared = [line for life in group.lives for line in committed(life)]
    wrong = [
        line["step"] for line in shared if line["digest"] != group.steps[line["step"]]["digest"]
    ]
    assert wrong == []
    assert len(shared) >= 8 * len(group.places) + 16
    assert len({line["lr"] for line in shared}) == len(shared)  # a schedule that stands still


def test_the_survivor_goes_on_and_counts_every_step_once(
    group: Group, record_testsuite_property: Callable[[str, object], None]
) -> None:
    steps = [line["step"] for line in committed(group.survivor)]
    assert steps == list(range(1, len(steps) + 1))
    assert sum(line["participants"] == 1 for line in committed(group.survivor)) >= 3 * len(
        group.places
    )
    assert group.survivor[-1] == {"closed": True}  # ten steps after its peer has left
    times = [line["at"] for line in group.survivor[1:-1]]
    pauses = [b - a for a, b in itertools.pairwise(times)]
    record_testsuite_property(f"{group.name}: longest pause [s]", round(max(pauses), 2))


def test_a_kill_refuses_the_step_that_it_interrupts(group: Group) -> None:
    """Between steps, and after the reduction, there is nothing to refuse."""
    refused = [line for line in group.survivor if line.get("committed") is False]
    for place, life in zip(group.places, group.lives, strict=False):
        at = committed(life)[-1]["step"]
        here = [line for line in refused if line["step"] == at]
        assert bool(here) == (place in ("before", "within")), place
        for line in here:
            assert "Connection closed by peer" in line["reason"]
            assert line["digest"] == group.steps[at]["digest"]  # as it was, bit for bit


def test_a_replica_that_comes_back_is_healed_in_its_first_step(group: Group) -> None:
    for before, life in itertools.pairwise(group.lives):
        first, *others = life[1:]
        assert first["healed"]
        assert first["step"] > committed(before)[-1]["step"]
        assert not any(line.get("healed") for line in others)


ROWS = (
    "reported error",
    "update fails",
    "checkpoint",
    "too few",
    "quantize",
    "lighthouse gone, async",
    "lighthouse gone, sync",
)


@pytest.mark.parametrize("row", ROWS)
def test_what_the_manager_does_comes_through(runs: dict[Any, Future[Path]], row: str) -> None:
    """`torchft_rows.py` says what is asked in each row."""
    answers = json.loads((runs["rows"].result() / "answers.json").read_text())
    assert answers.keys() == set(ROWS)
    assert answers[row] == ""
