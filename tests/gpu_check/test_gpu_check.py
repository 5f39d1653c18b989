"""The checks for whoever has a card: the command as a dry run, its table, its report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_check import accuracy, command, recipes, results
from gpu_check.platform import Platform
from gpu_check.results import Outcome

import functional_optim as fo
from functional_optim import warmup

ROOT = Path(__file__).parents[2]
CPU = Platform(torch.device("cpu"))


def test_a_dry_run_passes_and_writes_what_it_found(tmp_path):
    file = tmp_path / "found.json"
    arguments = f"--device cpu --quick --output {file}"
    run = ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS={arguments}"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["kind"] == "cpu"
    outcomes = {x["name"]: x for x in found["results"]}
    assert list(outcomes) == [check.name for check in command.listed(quick=True)]
    skipped = {x["told"] for x in outcomes.values() if x["status"] == "skipped"}
    assert skipped == {"not on this device (cpu)", "there is one device, cpu"}
    adamw = outcomes["recipes/adamw/float32"]
    assert adamw["status"] == "passed"
    assert set(adamw["figures"]["executors"]) == {"NativeExecutor"}
    assert 0 < adamw["figures"]["error"] < 1e-4
    for name in outcomes:
        if not name.startswith("recipes/"):
            assert f"\n{name} " in done.stdout
    assert "recipes mixed: 3 passed" in done.stdout
    assert "0 failed" in done.stdout


def test_each_public_algorithm_is_checked_or_has_a_reason():
    made = {recipes.name_of(x.make) for x in recipes.known()}
    missing = {name for name, make in warmup.known().items() if recipes.name_of(make) not in made}
    assert missing == set(recipes.WITHOUT)


def test_a_new_algorithm_is_checked_with_its_defaults(monkeypatch):
    def brand_new(lr: float = 0.5):
        return fo.sgd(lr)

    algorithms = {**warmup.known(), "brand_new": brand_new}
    monkeypatch.setattr(warmup, "known", lambda: algorithms)
    monkeypatch.setattr(fo, "brand_new", brand_new, raising=False)
    assert recipes.known()[-1] == recipes.CheckedRecipe("brand_new", brand_new, {})


def wrong_sgd(lr: float):
    """A rule that is another one in float32."""

    def update(u, slots, p):
        return -lr * u * (1.01 if u.dtype == torch.float32 else 1.0), slots

    return fo.leafwise(None, update)


def test_a_wrong_result_is_found():
    recipe = recipes.CheckedRecipe("wrong", wrong_sgd, {"lr": 0.1})
    outcome = made(lambda platform, figures: accuracy.compare(recipe, FLOAT32, platform, figures))
    assert outcome.status == "failed"
    assert "all tensors are 1.0" in outcome.told
    assert outcome.figures["error"] == pytest.approx(0.01, rel=0.01)


FLOAT32 = accuracy.KINDS["float32"]


def made(run, platform=CPU):
    return results.made(results.Check("some/check", run), platform)


def test_a_fallback_without_a_warning_is_found(monkeypatch):
    from functional_optim.engine import group
    from functional_optim.engine.per_tensor import PerTensorExecutor

    monkeypatch.setattr(group, "EXECUTORS", [PerTensorExecutor])
    recipe = recipes.CheckedRecipe("sgd", fo.sgd, {"lr": 0.1})
    outcome = made(lambda platform, figures: accuracy.compare(recipe, FLOAT32, platform, figures))
    assert outcome.status == "failed"
    assert "stepped by PerTensorExecutor, not NativeExecutor" in outcome.told


def test_a_bar_holds_on_cards_only_and_a_failure_keeps_figures():
    figures = {}
    results.at_least(figures, "share", 0.1, 0.9, holds=False)
    assert figures["share, bar"] == "≥ 0.9, not applied here"
    outcome = made(lambda _, figures: results.at_most(figures, "ratio", 2.0, 1.0, holds=True))
    assert (outcome.status, outcome.figures["ratio"]) == ("failed", 2.0)
    assert outcome.told == "AssertionError: ratio is 2, and must be at most 1."
    assert "test_gpu_check.py" in outcome.trace


def test_the_file_of_results_is_json_whatever_was_found():
    found = [Outcome("a/b", "failed", figures={"error": float("inf"), "each": [float("nan"), 1.5]})]
    report = json.dumps(command.described(CPU, found, quick=True), allow_nan=False)
    assert json.loads(report)["results"][0]["figures"] == {"error": "inf", "each": ["nan", 1.5]}


def test_a_device_that_answers_no_more_ends_the_process_behind_the_check():
    class Broken(Platform):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    checks = [results.Check(f"a/{i}", lambda platform, figures: None) for i in range(2)]
    (outcome,) = command.make_all(checks, Broken(torch.device("cpu")), lambda outcome: None)
    assert (outcome.name, outcome.status) == ("a/0", "failed")
    assert "illegal memory access" in outcome.told


DYING = """
import os, sys
from gpu_check import command, results
def passes(platform, figures): figures["process"] = os.getpid()
def dies(platform, figures): os.write(2, b"the end"); os._exit(7)
command.listed = lambda quick: [
    results.Check("a/first", passes), results.Check("a/dies", dies), results.Check("a/last", passes)
]
sys.exit(command.main())
"""


def test_a_process_that_dies_fails_its_check_alone(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(DYING)
    monkeypatch.setattr(command, "PROGRAM", [str(program)])
    names = ["a/first", "a/dies", "a/last"]
    outcomes = command.make_apart(names, ["--device", "cpu"])
    assert [x.name for x in outcomes] == names
    assert [x.status for x in outcomes] == ["passed", "failed", "passed"]
    assert outcomes[1].told == "the process ended with status 7"
    assert outcomes[1].trace == "the end"
    assert outcomes[0].figures["process"] != outcomes[2].figures["process"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "there is no check called 'nothing'; the sections are waits, "),
        (["--device", "cuda:0"], "torch sees no CUDA device"),
        (["--device", "nowhere"], "'nowhere' names no device of torch"),
    ],
)
def test_what_cannot_be_checked_is_said(arguments, said, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_checks_are_chosen_by_name_and_by_section():
    every = command.listed(quick=False)
    names = [x.name for x in command.chosen(every, ["waits", "recipes/sgd"])]
    assert names[0] == "waits/adamw"
    assert names[-3:] == ["recipes/sgd/float32", "recipes/sgd/bfloat16", "recipes/sgd/mixed"]
    assert not any(name.startswith("recipes/sgd-") for name in names)
