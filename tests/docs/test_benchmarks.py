"""The benchmark suite runs, judges and writes; how fast anything is, no test says."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def bench(*flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), *flags]
    how = {"capture_output": True, "text": True, "check": False, "timeout": 300}
    return subprocess.run(command, cwd=cwd, **how)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a quick run of three rows, one of them of many processes, and what it said."""
    out = tmp_path_factory.mktemp("results")
    rows = "adamw-mlp,sgd-mlp,first-kept,gpu-large"
    done = bench("--quick", "--only", rows, "--out", str(out), cwd=out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_quick_run_writes_tables_and_a_picture(results):
    out, _ = results
    assert (out / "RESULTS.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "RESULTS.png").stat().st_size > 10_000
    text = (out / "RESULTS.md").read_text()
    for expected in ("torch 2", "## The bars", "≤ 0.60", "≤ 0.70", "torch.optim.AdamW, same"):
        assert expected in text
    assert "--quick" in text


def test_every_row_of_the_table_has_all_its_cells(results):
    out, _ = results
    lines = [line for line in (out / "RESULTS.md").read_text().splitlines() if line[:1] == "|"]
    assert len(lines) == 2 + 3 + 2 + 1
    assert {line.count("|") for line in lines} == {9}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_was_not_run_is_named_with_the_reason(results):
    out, said = results
    reason = "torch sees no CUDA device here."
    assert f"(`gpu-large`): {reason}" in (out / "RESULTS.md").read_text()
    assert f"gpu-large: {reason}" in said


def test_a_run_that_was_stopped_is_continued(tmp_path):
    flags = ("--quick", "--resume", "--out", str(tmp_path), "--only")
    stored = {"sgd-mlp": {"ours": [1.0], "theirs": [4.0], "rival": "a snail", "note": ""}}
    (tmp_path / "rows.json").write_text(json.dumps(stored))
    done = bench(*flags, "adamw-mlp,sgd-mlp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sgd-mlp: 1.00 s / 4.00 s, a snail = 0.25" in done.stdout
    known = json.loads((tmp_path / "rows.json").read_text())
    assert known["sgd-mlp"] == stored["sgd-mlp"]
    assert len(known["adamw-mlp"]["ours"]) > 1


@pytest.fixture
def run(monkeypatch):
    """The main module, imported as the folder's scripts import each other."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("run")


def test_a_wrong_name_is_one_sentence(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "nonsense"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(run.__file__, run_name="__main__")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--only names no row with 'nonsense'; names start with one of adamw, " in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, but is 0."),
        (["--seconds", "nan"], "--seconds must be above 0, but is nan."),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--only", "adamw,"], "--only names no row with ''"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused(run, flags, expected):
    with pytest.raises(run.BadInput, match=re.escape(expected)):
        run.main(flags)


def test_every_row_can_be_named_alone(run, capsys):
    assert run.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == len(set(names)) > 60
    assert {"adamw-many", "composed-big", "peer-optax-gpt", "train-compile"} <= set(names)


def test_every_algorithm_that_has_a_row_makes_a_step_of_its_workload(run):
    algorithms = importlib.import_module("algorithms")
    names = algorithms.measured()
    assert len(names) > 30
    for name in names:
        params = [torch.nn.Parameter(torch.randn(16, 8)), torch.nn.Parameter(torch.randn(8))]
        for p in params:
            p.grad = torch.randn_like(p)
        algorithms.stepping(name, params)()


def test_what_fails_in_a_row_is_said_in_the_table(run):
    def broken(effort):
        raise ValueError("no such thing\nat all")

    result = run.attempt(run.Row("broken", "Something", "somewhere", broken, (1.0,)), run.QUICK)
    assert result.error == "ValueError: no such thing"
    text = run.report.markdown([result], {}, "it", quick=False, missing=["later", "last"])
    assert "| Something | somewhere | not run |" in text
    assert "The run did not come to later, last." in text


def test_the_last_of_two_bars_counts(run):
    found = run.steps.Measured([0.97], [1.0])
    row = run.Row("a", "A", "b", lambda effort: found, (1.0, 0.95))
    result = run.attempt(row, run.QUICK)
    assert result.met() == [True, False]
    assert run.report.verdict(result) == "1.00 yes, 0.95 **no**"
    assert run.report.summary([result]).startswith("0 of 1 rows meet")


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.name)
def test_no_file_of_the_benchmark_is_longer_than_250_lines(path):
    assert len(path.read_text().splitlines()) <= 250


def test_missed_targets_come_with_their_reasons(run):
    """Every name in the table of reasons begins one of a row."""
    rows = importlib.import_module("rows")
    reasons = importlib.import_module("reasons")
    names = [row.name for row in run.chosen(None)]
    assert all(any(name.startswith(x) for name in names) for x in reasons.REASONS)

    def result(name: str, ours: float, bars: tuple[float, ...] = (1.0, 0.5)) -> object:
        row = rows.Row(name, "ours", "a model", None, bars)
        return rows.Result(row, rows.Measured([ours], [1.0]))

    given = [("eager-gpt", 0.51), ("eager-gpt", 0.7), ("adamw-mlp", 3.0), ("lr-mlp", 0.5)]
    found = run.report.missed([result(*x) for x in given])
    assert [line.rpartition(". ")[2] for line in found[3:]] == [
        f"`{name}` {value:.2f} (≤ 1.00, then 0.50)." for name, value in given[:3]
    ]
    assert "torch's loop" in found[4]
    assert found[5].startswith("* Not known.")
    assert run.report.missed([result("lr-mlp", 0.5)]) == []
