"""Tests that share a process with no other file: `pytestmark = pytest.mark.own_process`.

The tests of such a file that are to run do so together, when the first of them comes up, in another
pytest. Its reports are handed on as if they had been made here.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FUNCTIONAL_OPTIM_TEST_REPORTS"
"""Names the file that the other pytest writes its reports to."""

LIMIT = 500  # seconds for all tests of a file

Reports = dict[str, list[pytest.TestReport]]


def register(config: pytest.Config) -> None:
    config.pluginmanager.register(Writer(config) if VARIABLE in os.environ else Starter())


class Starter:
    """Starts the other pytest and hands on its reports."""

    def __init__(self) -> None:
        self.files: dict[Path, Reports] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        if item.get_closest_marker("own_process") is None:
            return None
        if item.path not in self.files:
            self.files[item.path] = _run(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.files[item.path][item.nodeid]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)
        return True


class Writer:
    """In the other pytest: keeps all reports for the one that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with Path(os.environ[VARIABLE]).open("ab") as file:
            pickle.dump(data, file)


def _run(first: pytest.Item) -> Reports:
    every = [item for item in first.session.items if item.path == first.path]
    items = [item for item in every if item.get_closest_marker("own_process")]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "reports"
        written.touch()
        printed = _other_pytest(first.config, [item.nodeid for item in items], written)
        written_reports = _read(written)
    reports: Reports = {item.nodeid: [] for item in items}
    for data in written_reports:
        report = first.config.hook.pytest_report_from_serializable(config=first.config, data=data)
        reports[report.nodeid].append(report)
    for item in items:
        if not any(report.when == "teardown" for report in reports[item.nodeid]):
            reports[item.nodeid].append(_unfinished(item, printed))
    return reports


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    with path.open("rb") as file:
        while file.peek(1):
            found.append(pickle.load(file))
    return found


def _other_pytest(config: pytest.Config, names: list[str], written: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    options = ["-q", "-m", "own_process", "-p", "no:cacheprovider", "-p", "no:xdist"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *names],
            cwd=config.rootpath,
            env={**environment, VARIABLE: str(written)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as expired:
        return f"not done after {LIMIT} s\n{expired.output!r}"
    return f"exit code {done.returncode}\n{done.stdout}"


def _unfinished(item: pytest.Item, printed: str) -> pytest.TestReport:
    """What stands for a test that the other pytest did not get to the end of."""
    reason = f"The process of these tests ended before this one did: {printed[-4000:]}"
    keywords: dict[str, Any] = {}
    return pytest.TestReport(item.nodeid, item.location, keywords, "failed", reason, "call")
