"""The comparison of optimizers runs, goes on, counts and judges; who is better, no test says."""

import importlib
import json
import math
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from snippets import ROOT

import functional_optim as fo

FOLDER = ROOT / "benchmarks"
FLAGS = ["--quick", "--task", "quadratic", "--optimizer", "adamw,lbfgs", "--workers", "1"]
ROWS = Path("comparison", "results", "quadratic.jsonl")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:sklearn")


@pytest.fixture(scope="module")
def compare():
    """The main module; its folder is where the processes that it starts look, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("compare")


@pytest.fixture(scope="module")
def tasks(compare):
    return compare.all_tasks()


@pytest.fixture(scope="module")
def contenders(compare):
    return compare.all_contenders()


@pytest.fixture(scope="module")
def first(compare, tmp_path_factory) -> Path:
    """The folder of a quick run of two optimizers on a task, in a process of its own."""
    home = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "QUICK", home)
        assert compare.main(FLAGS) == 0
    return home


@pytest.fixture
def again(compare, first, tmp_path, monkeypatch):
    """A copy of the folder of that run, and the parts that are run there now, in this process."""
    made = []

    def work(task, optimizer, part, effort, winner):
        made.append((optimizer, part))
        return done(task, optimizer, part, effort, winner)

    done = compare.work
    monkeypatch.setattr(compare, "work", work)
    monkeypatch.setattr(compare, "ProcessPoolExecutor", lambda n, *_, **__: ThreadPoolExecutor(n))
    monkeypatch.setattr(compare, "QUICK", tmp_path)
    (tmp_path / ROWS).parent.mkdir(parents=True)
    (tmp_path / ROWS).write_bytes((first / ROWS).read_bytes())
    return tmp_path / ROWS, made


def read(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["optimizer"], row["part"]): row for row in rows}


def test_a_quick_run_writes_the_page_and_its_pictures(compare, first):
    page = (first / "COMPARISON.md").read_text()
    for name in ("quadratic", "profile"):
        picture = first / "comparison" / "pictures" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"](comparison/pictures/{name}.png)" in page
    part = page.partition("begin: task quadratic -->")[2].partition("<!-- end")[0]
    assert part.startswith("\n25 steps; 4 trials; the score is the training loss.\n")
    table = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert {len(row) for row in table} == {9}
    names = {"| [AdamW](../docs/algorithms/adamw.md)"}
    names |= {"| [L-BFGS, strong Wolfe](../docs/algorithms/lbfgs.md)"}
    assert {row[0] for row in table[2:]} == names
    assert "<!-- begin: task gpt -->\nNot run yet.\n<!-- end: task gpt -->" in page
    words = (FOLDER / "COMPARISON.md").read_text()
    assert compare.pages.MARKS.sub(r"\1", page) == compare.pages.MARKS.sub(r"\1", words)


def test_the_winner_of_the_search_is_what_is_reported_with_new_seeds(compare, first):
    rows = read(first / ROWS)
    parts = ("search", "sweep", "final", "default", "time")
    assert rows.keys() == {*[("adamw", x) for x in parts], ("lbfgs", "final"), ("lbfgs", "time")}
    search, sweep, final, default = [rows["adamw", x]["runs"] for x in parts[:4]]
    best = min(search, key=lambda run: run[-1])
    assert [run[3] for run in search] == [0] * 4
    assert [run[:4] for run in final] == [[*best[:3], seed] for seed in (100, 101)]
    assert [run[:4] for run in sweep] == [[best[0] * x, *best[1:3], 0] for x in (0.25, 1.0, 4.0)]
    assert sweep[1][-1] == best[-1]
    assert [run[:4] for run in default] == [[1e-3, 0.0, None, seed] for seed in (100, 101)]
    for run, curve in zip(final, rows["adamw", "final"]["curves"], strict=True):
        assert curve[-1] == [25, compare.store.rounded(run[-1], 4)]
    for name in ("adamw", "lbfgs"):
        time = rows[name, "time"]
        assert min(time["gradient_ms"], time["update_ms"], time["state_bytes"]) > 0


def cut_off(store, rows):
    """The last parameters of AdamW are in the middle of being written."""
    final = store.line(rows.pop(("adamw", "final")))
    return "".join(map(store.line, rows.values())) + final[:90]


def of_another_winner(store, rows):
    for name in ("sweep", "final"):
        for run in rows["adamw", name]["runs"]:
            run[0] *= 1.5
    return "".join(map(store.line, rows.values()))


PARTS = [*[("adamw", x) for x in ("default", "final", "search", "sweep")], ("lbfgs", "final")]


@pytest.mark.parametrize(
    ("change", "flags", "expected"),
    [
        (None, [], []),
        (cut_off, ["--only", "runs"], [("adamw", "final")]),
        (of_another_winner, ["--only", "runs"], [("adamw", "final"), ("adamw", "sweep")]),
        (None, ["--again", "--only", "runs"], PARTS),
    ],
    ids=["all is there", "interrupted", "another winner", "again"],
)
def test_a_second_run_runs_what_is_not_there(compare, again, monkeypatch, change, flags, expected):
    path, made = again
    before = path.read_text()
    if change:
        path.write_text(change(compare.store, read(path)))
    if not flags:
        monkeypatch.setattr(compare.trials, "times", None)
    assert compare.main([*FLAGS, *flags]) == 0
    assert sorted(made) == expected
    assert path.read_text() == before, "another process made other numbers"
    if expected == PARTS:
        assert made.index(("adamw", "search")) < made.index(("adamw", "sweep"))


def test_a_row_behind_one_that_was_cut_off_is_kept(compare, tmp_path, tasks):
    row = {"task": "kinks", "optimizer": "sgd", "part": "final", "steps": 300, "versions": ""}
    (tmp_path / "kinks.jsonl").write_text('{"task":"kinks","opt')
    compare.store.Store(tmp_path).add(row)
    found = compare.store.Store(tmp_path)
    assert found.find(tasks["kinks"], "sgd", "final", None) == row
    found.tidy()
    assert read(tmp_path / "kinks.jsonl") == {("sgd", "final"): row}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--task", "gtp"], "there is no task 'gtp'; there are quadratic, noisy-quadratic, "),
        (["--optimizer", "adamw,x"], "there is no optimizer 'x'; there are adamw, sgd, "),
        (["--workers", "0"], "--workers must be at least 1, but is 0."),
        (["--task", "gpt", "--optimizer", "lbfgs"], "gpt is no task for lbfgs; name another "),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused(compare, tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(compare, "QUICK", tmp_path / "new")
    with pytest.raises(compare.BadInput, match=re.escape(expected)):
        compare.main(["--quick", *flags])
    assert not (tmp_path / "new").exists()


def test_a_wrong_flag_of_the_program_is_one_sentence(compare, monkeypatch):
    path = str(FOLDER / "compare.py")
    monkeypatch.setattr(sys, "argv", [path, "--workers", "0"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(path, run_name="__main__")
    assert stopped.value.code == "compare: --workers must be at least 1, but is 0."


# ------------------------------------------------------------------------------- runs
def test_the_same_runs_give_the_same_bits(compare, tasks, contenders):
    task = replace(tasks["noisy-quadratic"], steps=12)
    runs = [compare.store.Run(contenders["adamw"].default, seed) for seed in (1, 1, 2)]
    a, b = [compare.trials.train(task, contenders["adamw"], runs, curves=True) for _ in range(2)]
    assert a == b
    assert a[0] == a[1] != a[2]
    assert [step for step, _ in a[0].curve] == list(range(1, 13))


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_runs_side_by_side_are_those_of_a_plain_loop(compare, tasks, contenders, name):
    task, own = replace(tasks["autoencoder"], steps=8), contenders[name]
    pairs = ((0.01, 3), (1, 4))
    runs = [compare.store.Run(own.default._replace(lr=lr), seed) for lr, seed in pairs]
    ended = compare.trials.train(task, own, runs, curves=False)
    for run, found in zip(runs, ended, strict=True):
        tx, params = own.transformation(run.numbers, task.steps), task.init(run.seed)
        state, start = tx.init(params), task.score(params)
        for step in range(task.steps):
            grads = torch.func.grad(task.loss)(params, *task.batch(run.seed, step))
            updates, state = tx.update(grads, state, params)
            params = fo.apply_updates(params, updates)
        score = task.score(fo.eval_params(state, params) if own.averages else params)
        assert abs(score - start) > 0.1
        assert found.score == pytest.approx(float(score), rel=1e-3)


def test_a_run_that_diverges_leaves_the_others_alone(compare, tasks, contenders):
    task, own = replace(tasks["quadratic"], steps=20), contenders["sgd"]
    good, bad = [compare.store.Run(own.default._replace(lr=lr), 1) for lr in (0.01, 1e20)]
    with_it = compare.trials.train(task, own, [good, bad, good], curves=True)
    without = compare.trials.train(task, own, [good, good, good], curves=True)
    assert with_it[1].score == math.inf
    assert len(with_it[1].curve) < 20
    assert [with_it[0], with_it[2]] == without[:2]


def test_a_line_search_has_as_many_evaluations_as_others_have_steps(compare, tasks, contenders):
    calls = []

    def loss(params):
        calls.append(params)
        return tasks["quadratic"].loss(params)

    def score(params):  # the other way round: nothing may be chosen by it
        return -tasks["quadratic"].score(params)

    own, long = contenders["lbfgs"], replace(tasks["quadratic"], loss=loss, score=score, steps=40)
    runs = [compare.store.Run(own.default, seed) for seed in (5, 6)]
    whole = compare.trials.train(long, own, runs, curves=True)
    assert 40 <= len(calls) <= 41
    half = compare.trials.train(replace(long, steps=20), own, runs, curves=False)
    for one, other in zip(whole, half, strict=True):
        assert [step for step, _ in one.curve] == list(range(1, 41))
        scores = [x for _, x in one.curve]
        assert scores == sorted(scores)
        assert scores[-1] > 0.05 * scores[0]
        assert dict(one.curve)[20] == other.score


def test_the_time_of_a_step_is_that_of_whole_rounds(compare):
    seconds = [100.0] * 10 + [1.0] * 9 + [21.0] + [1.0] * 9 + [31.0] + [50.0] * 10 + [1000.0]
    assert compare.trials.round_time(seconds) == 4.0


def test_a_line_search_that_ends_early_has_times(compare, tasks, contenders):
    own, bowl = contenders["lbfgs"], replace(tasks["quadratic"], loss=lambda x: x["x"].dot(x["x"]))
    found = compare.trials.times(bowl, own, own.default, 30)
    assert min(found.values()) > 0
    assert found["state_bytes"] >= 4 * 2 * 10 * found["parameters"] == 8000, "ten pairs"


def test_every_optimizer_can_be_made_for_its_tasks_and_steps(compare, tasks, contenders):
    cheap = ("quadratic", "kronecker", "cart", "sparse")
    for name, own in contenders.items():
        fitting = [task for task in tasks.values() if own.fits(task)]
        assert len(fitting) > 6 or own.only, name
        for task in fitting:
            run = compare.store.Run(own.trials(1, task)[0], 0)
            tx, params = own.transformation(run.numbers, task.steps), task.init(0)
            state = None if own.exact else tx.init(params)
            start = {path: x.clone() for path, x in params.items()}
            for step in range(3 * (task.name in cheap and not own.exact)):
                grads = torch.func.grad(task.loss)(params, *task.batch(0, step))
                updates, state = tx.update(grads, state, params)
                params = fo.apply_updates(params, updates)
            if state is not None and task.name in cheap:
                assert all(x.isfinite().all() for x in params.values()), (name, task.name)
                assert any((params[k] != start[k]).any() for k in start), (name, task.name)
    unfit = (("lbfgs", "gpt"), ("muon_adamw", "skip-gram"), ("levenberg_marquardt", "kronecker"))
    assert not any(contenders[name].fits(tasks[task]) for name, task in unfit)
    own, short = contenders["levenberg_marquardt"], replace(tasks["physics"], steps=40)
    runs = [compare.store.Run(own.default, 100)]
    assert compare.trials.train(short, own, runs, curves=False)[0].score < 1.0


def test_trials_cover_their_ranges(tasks, contenders):
    own = contenders["muon_adamw"]
    found = own.trials(24, tasks["gpt"])
    assert found == own.trials(24, tasks["gpt"])
    for values, (low, high) in zip(
        zip(*found, strict=True), (own.lr, own.decay, (1e-4, 1.0)), strict=True
    ):
        assert low <= min(values) < 3 * low
        assert high / 3 < max(values) <= high
    assert {x.decay for x in own.trials(4, tasks["cart"])} == {0.0}
    free, bound = contenders["adamw"], contenders["sgd"]
    assert free.rates(tasks["kinks"]) == (1e-3, 10.0)
    assert bound.rates(tasks["kinks"]) == bound.lr


# ---------------------------------------------------------------- what is read from rows
@pytest.fixture
def made_up(compare, tmp_path, tasks):
    """From optimizers' scores on the task cart, and more of their rows, to a comparison."""
    measures = importlib.import_module("comparison.measures")

    def comparison(scores, **more):
        rows = compare.store.Store(tmp_path)
        for name, own in scores.items():
            versions = more.get("versions", {}).get(name, "")
            always = {"task": "cart", "optimizer": name, "steps": 80, "versions": versions}
            runs = [[more.get("lr", 0.01), 0.0, None, 100 + i, x] for i, x in enumerate(own)]
            final = {"runs": runs, "curves": more.get("curves", [])}
            for part, found in (("final", final), ("sweep", {"runs": more.get("sweep", [])})):
                rows.rows["cart", name, part] = {**always, "part": part, **found}
        return measures.Comparison(rows, [tasks["cart"]])

    return comparison


def test_holms_levels_rise_from_step_to_step(compare):
    holm = importlib.import_module("comparison.measures").holm
    assert holm({"c": 0.02, "a": 0.01, "b": 0.016, "d": 0.9}) == ["a", "b", "c"]
    assert holm({"a": 0.013, "b": 0.014, "c": 0.015, "d": 0.016}) == []
    assert holm({"a": 0.04}) == ["a"]


def test_verdicts_are_of_pairs_of_seeds(made_up, tasks):
    scores = {
        "adamw": [1.0, 10.0, 0.1, 3.0, 0.5],
        "soap": [0.9, 8.9, 0.091, 2.7, 0.46],  # always a little less: the seeds alone differ
        "lion": [2.0, 21.0, 0.19, 6.0, 1.02],
        "adan": [2.0, 5.0, 0.2, 1.0, 0.5],
        "sgd": [0.001, 0.01, None, 0.003, 0.0005],
        "mars": [1.0, 10.0, 0.1, 3.0, 0.5],
    }
    found = made_up(scores).verdicts(tasks["cart"])
    same = dict.fromkeys(("adan", "mars"), "same")
    assert found == {"soap": "better", "lion": "worse", "sgd": "diverged", **same}
    scores["adamw"][1] = None
    assert made_up(scores).verdicts(tasks["cart"]) == {"sgd": "diverged"}
    del scores["adamw"]
    assert made_up(scores).verdicts(tasks["cart"]) == {}


def test_a_chance_counts_less_among_many(made_up, tasks):
    adamw, lion = [1.0, 1.0, 1.0, 1.0, 1.0], [1.5, 1.1, 1.3, 1.2, 1.02]
    alone = made_up({"adamw": adamw, "lion": lion})
    assert alone.verdicts(tasks["cart"]) == {"lion": "worse"}
    same = dict.fromkeys(("soap", "mars", "adan", "sgd"), adamw)
    many = made_up({"adamw": adamw, "lion": lion, **same})
    assert many.verdicts(tasks["cart"])["lion"] == "same"


def test_the_median_of_runs_that_diverge(compare):
    median = importlib.import_module("comparison.measures").median
    assert median([3.0, None, 1.0]) == 3.0
    assert median([3.0, None, None]) is None
    assert median([3.0, None]) is None


def test_steps_to_a_score_are_the_median_of_the_first_ones(made_up, tasks):
    curves = [[[20, 0.5], [40, 0.1235], [80, 0.2]], [[20, 0.1], [40, 0.3], [80, 0.4]]]
    curves += [[[20, 0.9], [40, None], [80, 0.2]]]
    comparison = made_up({"adamw": [0.123456, 0.1, 0.2]}, curves=curves)
    cell = comparison.cells["cart", "adamw"]
    assert comparison.target(tasks["cart"]) == 0.123456
    assert cell.steps_to(0.123456) == 40, "rounded curves must reach their own last score"
    assert cell.steps_to(0.2) == 40
    assert cell.steps_to(0.5) == 20
    assert cell.steps_to(0.11) is None
    assert cell.steps_to(None) is None


def test_good_rates_have_no_gap_and_ends_are_named(made_up):
    scores = {0.08: None, 0.01: 1.0, 0.005: 5.0, 0.0025: 1.1, 0.02: 1.15, 0.04: 1.3}
    sweep = [[lr, 0.0, None, 0, x] for lr, x in scores.items()]
    cell = made_up({"adamw": [1.0]}, sweep=sweep).cells["cart", "adamw"]
    assert [lr for lr, _ in cell.sweep] == sorted(scores)
    assert cell.good_rates == (0.01, 0.02)
    assert not cell.at_edge
    assert made_up({"adamw": [1.0]}, lr=0.8).cells["cart", "adamw"].at_edge
    assert made_up({"adamw": [1.0]}).cells["cart", "adamw"].good_rates is None
    lost = made_up({"adamw": [1.0]}, sweep=[[0.1, 0.0, None, 0, None]])
    assert lost.cells["cart", "adamw"].good_rates is None


def test_rows_of_another_length_or_other_data_do_not_count(compare, made_up, tmp_path, tasks):
    rows, task = compare.store.Store(tmp_path), tasks["gpt"]
    right = {"task": "gpt", "optimizer": "sgd", "part": "search", "runs": [[], []]}
    right |= {"steps": task.steps, "versions": compare.store.versions(task)}
    for change, count, found in (
        ({}, 2, True), ({}, None, True), ({}, 24, False), ({"steps": 15}, 2, False),
        ({"versions": "torch 2, data 0123"}, 2, False), ({"versions": "torch 2"}, 2, False),
    ):  # fmt: skip
        rows.rows["gpt", "sgd", "search"] = {**right, **change}
        assert (rows.find(task, "sgd", "search", count) is not None) == found, change
    shown = made_up({"adamw": [1.0], "soap": [0.1]}, versions={"adamw": "torch 2, data 0123"})
    assert [name for _, name in shown.cells] == ["adamw"], "others had other data"


# --------------------------------------------------------------------------------- pages
def test_pictures_show_every_optimizer_once(compare, contenders):
    pictures = compare.pages.pictures
    names = [pictures.REFERENCE, *[x for family in pictures.FAMILIES.values() for x in family]]
    assert sorted(names) == sorted(contenders)
    assert max(map(len, pictures.FAMILIES.values())) <= len(pictures.COLOURS)


def test_the_page_says_what_the_rows_say(compare):
    page = (FOLDER / "COMPARISON.md").read_text()
    comparison = compare.pages.published()
    assert page == compare.pages.filled(page, comparison), "run make compare"
    for picture in re.findall(r"\]\((comparison/pictures/.*?)\)", page):
        assert (FOLDER / picture).exists(), f"{picture} is missing: run make compare"


def test_every_task_has_a_place_on_the_page(compare, tasks):
    page = (FOLDER / "COMPARISON.md").read_text()
    blocks = [found[2] for found in compare.pages.MARKS.finditer(page)]
    shown = [f"task {task.name}" for task in tasks.values() if task.passes is None]
    assert sorted(blocks) == sorted(["versions", "summary", "profile", "valleys", *shown])
    for name in shown:
        assert re.search(rf"^## [^\n]*\n+[^#]*<!-- begin: {name} -->", page, re.M), name
    assert page.count("<!-- begin: ") == len(blocks)


def test_pages_of_the_docs_say_what_the_rows_say(compare, contenders):
    comparison, measured = compare.pages.published(), set()
    for path in compare.pages.pages_of_docs():
        page = path.read_text()
        assert page == compare.pages.filled(page, comparison), f"{path.name}: run make compare"
        if "## Benchmark\n" in page:
            measured.add(path.stem)
            assert f"\n```{{measured-rates}} {path.stem}\n```\n" in page
            assert f"\n<!-- begin: measured {path.stem} -->\n" in page
    assert measured == {x.name for x in contenders.values() if not x.only} - {"cautious"}


def test_a_page_of_an_algorithm_names_the_best_rates(compare, made_up):
    sweep = [[lr, 0.0, None, 0, x] for lr, x in ((0.01, 1.0), (0.02, 1.1), (0.04, 1.1))]
    scores = {"adamw": [1.0, 1.1, 1.2], "soap": [0.1, 0.11, 0.12]}
    comparison = made_up(scores, sweep=sweep)
    pages = compare.pages
    assert " ".join(pages.measured(comparison, "soap").split()) == (
        "Its best learning rate was 0.01 on 1 network. Rates up to a factor of 4 apart gave "
        "scores of at most 1.2 times the best (median). With equal tuning, it was better than "
        "AdamW on cart, and worse on no task."
    )
    assert "AdamW" not in pages.measured(comparison, "adamw")
    assert pages.measured(comparison, "lion") == ""
    searched = made_up({"adamw": [1.0, 1.1, 1.2], "lbfgs": [1.0, 1.1, 1.2]})
    says = "It was better than AdamW on no task, and worse on no task.\n"
    assert pages.measured(searched, "lbfgs") == says
    one = made_up(scores, sweep=[[0.01, 0.0, None, 0, 1.0], [0.02, 0.0, None, 0, 1.5]])
    assert "Twice or half the best rate gave a score of more than 1.2 times the best" in (
        pages.measured(one, "adamw").replace("\n", " ")
    )


def test_pages_of_the_docs_are_only_written_beside_the_page(compare, tasks, tmp_path, monkeypatch):
    pages, rows = compare.pages, compare.store.Store(tmp_path / "no rows")
    text = "a\n<!-- begin: measured soap -->\n{}<!-- end: measured soap -->\nb\n"
    page, home = tmp_path / "soap.md", tmp_path / "home"
    page.write_text(text.format("old\n"))
    monkeypatch.setattr(pages, "pages_of_docs", lambda: [page])
    pages.write(rows, [*tasks.values()], home)
    assert page.read_text() == text.format("old\n")
    assert "<!-- begin: task gpt -->\nNot run yet.\n" in (home / "COMPARISON.md").read_text()
    monkeypatch.setattr(pages, "HOME", home)
    pages.write(rows, [*tasks.values()], home)
    assert page.read_text() == text.format("")


def test_the_picture_of_an_optimizer_is_drawn_beside_adamw(compare, made_up, tmp_path):
    sweep = [[lr, 0.0, None, 0, x] for lr, x in ((0.01, 1.0), (0.02, 1.1), (0.04, None))]
    comparison = made_up({"adamw": [1.0, 1.1], "soap": [None, None]}, sweep=sweep)
    path = tmp_path / "soap.svg"
    with compare.pages.pictures.mpl.rc_context({"svg.fonttype": "none"}):
        compare.pages.pictures.single(comparison, "soap", comparison.tasks, path)
    for words in (">SOAP<", ">AdamW<", ">cart<"):
        assert words in path.read_text()
    alone = made_up({"soap": [0.1, 0.2]}, sweep=sweep)
    compare.pages.pictures.sensitivity(alone, alone.tasks[0], tmp_path / "alone.png")
    assert (tmp_path / "alone.png").stat().st_size > 5000
