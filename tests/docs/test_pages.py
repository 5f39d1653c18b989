"""Pages of the docs say what the code and the measurements say, and their pictures are drawn."""

import collections
import html
import importlib
import importlib.metadata
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_check import command
from snippets import ROOT
from torch import Tensor

import functional_optim as fo
from functional_optim import schedules, search, tree

DOCS = ROOT / "docs"


# ---------------------------------------------------------------- choosing
def test_what_the_picture_of_choosing_names_exists():
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))
    answers = [name for _, name, _ in drawn["QUESTIONS"]] + [drawn["OTHERWISE"][0]]
    named = re.findall(r"(?:fo\.)?(search\.)?([a-z]\w+)", ", ".join(answers).replace("fo.", ""))
    for searched, name in named:
        home = search if searched or hasattr(search, name) else fo
        assert hasattr(home, name) or name in ("tx", "int8"), name
    page = (DOCS / "choosing.md").read_text()
    assert "![Decision tree for choosing an optimizer](choosing.svg)" in page


PICTURES = ("choosing.svg", "overview.svg", "speed.svg")


def described(path: Path) -> str:
    """What a picture says of itself, in words."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)
    assert found, path
    return html.unescape(found[1])


def test_the_script_draws_the_pictures_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diagrams.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "diagrams.py"), run_name="__main__")
    for name in PICTURES:
        assert described(tmp_path / name) == described(DOCS / name), "run python docs/diagrams.py"
        drawn, kept = (tmp_path / name).stat().st_size, (DOCS / name).stat().st_size
        assert abs(drawn - kept) < 0.1 * kept, "run python docs/diagrams.py"
    for name in ("overview.svg", "speed.svg"):
        assert f"](docs/{name})" in (ROOT / "README.md").read_text()


def test_the_bars_of_speed_are_rows_of_the_measurements():
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))
    rows, texts = drawn["measured"](), described(DOCS / "speed.svg").splitlines()
    assert len(rows) == 6 == len(texts) - 3
    pages = [(ROOT / "benchmarks" / "RESULTS.md").read_text(), DEVICES]
    for row, text in zip(rows, texts[1:], strict=False):
        assert text.startswith(f"{row.what} ({row.where}): {row.ours} / {row.theirs}")
        number, unit = row.ours.split()
        every = [line for page in pages for line in page.splitlines()]
        found = [line for line in every if f"| {number} {unit}" in line]
        assert any(f"| {row.ratio:.2f} |" in line for line in found), row
        ours, theirs = (float(x.split()[0]) for x in (row.ours, row.theirs))
        assert ours / theirs == pytest.approx(row.ratio, abs=0.02)


def test_a_row_of_speed_that_is_gone_is_an_error(tmp_path, monkeypatch):
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))
    speed = sys.modules["speed"]
    empty = tmp_path / "devices.md"
    empty.write_text("| AdamW, 1 B | 9.6 ms | 10.8 ms, fused | 0.90 |\n")
    monkeypatch.setattr(speed, "DEVICES", empty)
    with pytest.raises(ValueError, match="have 5 of the 6 rows of the speed table"):
        drawn["measured"]()


def test_the_rule_in_the_picture_is_lions():
    drawn, names = runpy.run_path(str(DOCS / "diagrams.py")), dict[str, Any]()
    names["LionSlots"] = collections.namedtuple("LionSlots", "exp_avg")
    exec(drawn["RULE"], names)
    g, p, m = torch.randn(3, 5)
    direction, slots = names["update"](g, names["LionSlots"](m), p, 0.1, 0.01)
    assert torch.equal(direction, (0.9 * m + 0.1 * g).sign())
    assert torch.allclose(slots.exp_avg, 0.99 * m + 0.01 * g)


NETWORKS = {"gpt", "autoencoder", "physics"}
BETTER = {
    "muon_adamw": NETWORKS | {"kronecker"},
    "soap": {"gpt", "autoencoder", "kronecker"},
    "psgd_kron": NETWORKS | {"kronecker", "addition"},
    "shampoo": {"gpt", "autoencoder", "kronecker"},
    "lbfgs": {"quadratic", "kronecker"},
    "adafactor": {"gpt", "skip-gram"},
    "schedule_free_adamw": {"gpt"},
    "cautious": {"gpt"},
    "nadam": {"gpt", "skip-gram"},
}
WORSE = {"soap": {"skip-gram"}, "psgd_kron": {"skip-gram"}, "shampoo": {"skip-gram"}}
WORSE |= {"lbfgs": {"addition"}, "prodigy": {"autoencoder", "skip-gram"}}
"""The claims of the page about optimizers, compared with AdamW."""


@pytest.fixture(scope="module")
def comparison():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        pages = importlib.import_module("comparison.pages")
        yield pages.published()


@pytest.mark.parametrize(("claims", "verdict"), [(BETTER, "better"), (WORSE, "worse")])
def test_the_rows_say_what_the_page_says(comparison, claims, verdict):
    found = {task.name: comparison.verdicts(task) for task in comparison.tasks}
    for name, tasks in claims.items():
        assert {task for task in tasks if found[task][name] == verdict} == tasks, name


def test_ademamix_is_worse_on_most_tasks_and_lion_on_seven_of_eleven(comparison):
    tasks = [task for task in comparison.tasks if task.passes is None]
    found = [comparison.verdicts(task) for task in tasks]
    worse = {name: [x[name] for x in found].count("worse") for name in ("ademamix", "lion")}
    assert worse["ademamix"] > len(tasks) / 2
    assert (worse["lion"], len(tasks)) == (7, 11)


def test_the_defaults_of_prodigy_are_nearest_to_its_best(comparison):
    rates = importlib.import_module("comparison.rates")
    tuned = [own.name for own in comparison.contenders if not own.exact]
    behind = {name: float(rates.behind(rates.networks(comparison, name))) for name in tuned}
    assert min(behind, key=lambda name: behind[name]) == "prodigy"


def test_the_default_rate_of_adamw_is_below_most_of_the_best(comparison):
    cells = [cell for cell in comparison.by("adamw") if cell.task.reach == 1.0]
    higher = [cell.numbers.lr > cell.contender.default.lr for cell in cells]
    assert sum(higher) > 0.8 * len(higher)


# ---------------------------------------------------------------- schedules
SCHEDULES = re.findall(
    r"^\| `(\w+)`.*?\| .*? \| `(.*?)` \|", (DOCS / "schedules.md").read_text(), re.MULTILINE
)
"""Name and call."""


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(DOCS / "plots.py"))


def test_every_schedule_has_a_row_and_a_panel(plots):
    names = [name for name in vars(schedules) if not name.startswith("_")]
    public = {x.__name__ for x in map(vars(schedules).get, names) if callable(x)}
    assert {name for name, _ in SCHEDULES} == plots["SCHEDULES"].keys() == public


def test_the_table_has_the_calls_of_the_picture(plots):
    assert dict(SCHEDULES) == {name: calls[0] for name, calls in plots["SCHEDULES"].items()}
    for name, calls in plots["SCHEDULES"].items():
        for call in calls:
            assert call.startswith(f"{name}(")
            assert isinstance(plots["build"](call)(5), float)


def test_the_script_draws_the_picture(tmp_path, monkeypatch):
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "plots.py"), run_name="__main__")
    drawn = image.imread(tmp_path / "schedules.png")
    assert drawn.shape == image.imread(DOCS / "schedules.png").shape
    assert drawn[..., :3].std() > 0.05


# ---------------------------------------------------------------- devices
DEVICES = (DOCS / "devices.md").read_text()
SOURCES = [ROOT / "functional_optim" / name for name in ("engine", "kernels")]


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins with these names of columns."""
    _, _, rest = DEVICES.partition(f"| {head} |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_all_sections_of_the_check_are_named():
    named = [name for first, _ in rows("section | checks that") for name in first.split(", ")]
    sections = dict.fromkeys(check.section for check in command.listed(quick=True))
    assert sorted(named) == sorted(f"`{name}`" for name in sections)


def test_each_warning_is_one_of_the_code():
    text = "".join(path.read_text() for folder in SOURCES for path in sorted(folder.glob("*.py")))
    warnings = [cell for _, cell in rows("reason | the warning begins")]
    assert len(warnings) == 6
    for warning in warnings:
        begin, _, inside = re.fullmatch(r"`(.*?)( \((.*)\)| …)?`", warning).groups()
        assert begin in text
        assert inside in (None, "…") or f'"{inside}"' in text


def test_the_page_says_which_gpu_was_used_and_when():
    """To be changed, with the figures, by whoever has run the check on another one."""
    run = {cells[0]: cells[-1] for cells in rows(COLUMNS)}
    assert [name for name, text in run.items() if text.startswith("yes")] == ["CPU", "CUDA"]
    assert "an H100, 2026-" in run["CUDA"]
    assert "an H200, 2026-" in run["CUDA"]
    assert "NVIDIA H100 80GB HBM3, driver" in DEVICES


def test_the_times_of_the_quick_start_are_those_of_the_page():
    text = (DOCS / "gpu_quick_start.md").read_text()
    _, _, rest = text.partition("| step | ours | torch's | ratio | on an H200 |\n")
    copied = rest.partition("\n\n")[0].splitlines()[1:]
    assert len(copied) == 5
    assert [line for line in copied if line not in DEVICES] == []


COLUMNS = (
    "device | element-wise rules | rules with matrix products | all other rules | tested on "
    "hardware"
)


# ---------------------------------------------------------------- frameworks
FRAMEWORK_PAGE = (DOCS / "frameworks.md").read_text()
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
FRAMEWORKS = re.findall(r"^\| ([^|]+) \| `([\w-]+)` \| ([^|]+) \|", FRAMEWORK_PAGE, re.MULTILINE)
ASKED = ["plain loops", "AMP", "torch.compile", "DDP", "FSDP2", "tensor parallel", "ZeRO", "FSDP1"]
ASKED += ["distributed checkpoint", "Lightning", "Accelerate", "transformers", "ignite", "torchft"]


def test_every_framework_has_a_row():
    assert set(ASKED) <= {name for name, *_ in FRAMEWORKS}
    assert len(FRAMEWORKS) == sum(line.startswith("| ") for line in FRAMEWORK_PAGE.splitlines()) - 2


@pytest.mark.parametrize(("name", "package", "version"), FRAMEWORKS)
def test_a_row_names_the_version_that_is_tested(name, package, version):
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = version
    if package == "torch" and installed.split("+")[0] != version:
        pytest.skip("the page names the torch that a release is tested with, and here is another")
    assert CONSTRAINTS[package] == version
    assert installed.split("+")[0] == version


# ---------------------------------------------------------------- memory
MEMORY = (ROOT / "docs" / "memory.md").read_text()
RECIPES = re.findall(
    r"^\| .*? \| `(fo\..*)` \| (\d) \+ (\d) \+ (.*) = (.*) \|$", MEMORY, re.MULTILINE
)
"""A recipe, and the bytes of weight, gradient, state and all."""

BARS = {'fo.stored(fo.adamw(), "int8")': 2.1, 'fo.stored(fo.adamw(), "bfloat16")': 4.001}
BARS |= {'fo.stored(fo.adamw(), "int4")': 1.2, 'fo.stored(fo.lion(), "int8")': 1.05}
"""The most bytes of state that these may take."""


def state_bytes(tx: fo.GradientTransformation, dtype: torch.dtype) -> float:
    w = torch.empty(2048, 2048, dtype=dtype, device="meta")
    state = tree.leaves(tx.init({"layers.0.weight": w}))
    return sum([x.nbytes for x in state if isinstance(x, Tensor)]) / w.numel()


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: row[0])
def test_a_recipe_takes_the_bytes_of_its_row(row):
    call, weight, gradient, state, total = row
    dtype = {"2": torch.bfloat16, "4": torch.float32}[weight]
    found = state_bytes(eval(call, {"fo": fo}), dtype)
    assert (gradient, state) == (weight, f"{found:.2f}")
    assert total == f"{2 * int(weight) + found:.2f}"
    assert found <= BARS.get(call, found)


def test_all_recipes_with_a_bar_have_a_row():
    assert len(RECIPES) > 20
    assert BARS.keys() <= {call for call, *_ in RECIPES}


def sizes_of_steps(storage, scale: Tensor) -> tuple[float, float]:
    """The root mean square of Adam's steps on random gradients, and the largest one."""
    tx = fo.scale_by_adam(betas=(0.9, 0.99))
    tx = tx if storage is None else fo.stored(tx, storage)
    w, g = {"layers.0.weight": torch.zeros(scale.shape)}, torch.Generator().manual_seed(0)
    state, squares, largest = tx.init(w), [], 0.0
    for _ in range(100):
        grads = {"layers.0.weight": scale * torch.randn(scale.shape, generator=g)}
        u, state = tx.update(grads, state, w)
        squares.append(u["layers.0.weight"].square().mean().item())
        largest = max(largest, u["layers.0.weight"].abs().max().item())
    return (sum(squares[50:]) / 50) ** 0.5, largest


def test_steps_with_int4_are_as_the_page_says():
    even = torch.ones(64, 256)
    ratio = sizes_of_steps("int4", even)[0] / sizes_of_steps(None, even)[0]
    assert 1.1 < ratio < 1.3
    uneven = (1.5 * torch.randn(64, 256, generator=torch.Generator().manual_seed(1))).exp()
    (whole, _), (small, most) = (sizes_of_steps(x, uneven) for x in (None, "int4"))
    assert small < 0.8 * whole
    mixed = sizes_of_steps({"exp_avg": "int4", "exp_avg_sq": "int8"}, uneven)[1]
    assert mixed > 5 > 1.5 * most


def test_bases_of_soap_in_bfloat16_take_half():
    whole, moments = (state_bytes(tx, torch.float32) for tx in (fo.soap(), fo.adamw()))
    packed = state_bytes(fo.stored(fo.soap(), {"*_basis": "bfloat16"}), torch.float32)
    factors = bases = (whole - moments) / 2
    assert packed == pytest.approx(moments + factors + bases / 2, abs=1e-3)


@pytest.fixture
def memory(monkeypatch):
    """The script that measures, imported as its folder's scripts import each other."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("memory")


@pytest.fixture
def kept():
    return json.loads((ROOT / "benchmarks" / "memory.json").read_text())


def test_the_tables_are_those_that_were_measured(memory, kept):
    lines = memory.tables(kept).splitlines()
    assert len(lines) >= len(memory.CHOICES) + 2
    assert [line for line in lines if line not in MEMORY.splitlines()] == []


def test_the_picture_is_drawn_from_what_was_measured(memory, kept, tmp_path, monkeypatch):
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr(memory, "PICTURE", tmp_path / "memory.png")
    memory.draw(kept)
    drawn = image.imread(tmp_path / "memory.png")
    assert drawn.shape == image.imread(ROOT / "docs" / "memory.png").shape
    assert drawn[..., :3].std() > 0.05


def test_the_exact_split_trained_as_float32_did(kept):
    assert kept["exact"] == [True] * len(kept["losses"]["float32"])


def eager(tx):
    """The step of `fo.compile`, with nothing compiled."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    return step


def test_a_training_run_is_that_of_float32_with_the_exact_split(memory, monkeypatch):
    """Two steps of a model of one layer."""
    training = importlib.import_module("memory_training")
    monkeypatch.setattr(training, "SHAPE", training.Shape(layers=1, heads=2, width=16, context=8))
    text = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(0)).byte()
    given = training.corpus.Corpus(text, text, (1, 1))
    monkeypatch.setattr(fo, "compile", eager)
    float32, exact, nearest = (
        training.train(training.CHOICES[name], given, 0, 2)
        for name in ("float32", "exact", "nearest")
    )
    assert float32 == exact != nearest
