"""The page on memory: its bytes are those of the states, its losses and picture those measured."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import tree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "memory.md").read_text()
ROWS = re.findall(r"^\| .*? \| `(fo\..*)` \| (\d) \+ (\d) \+ (.*) = (.*) \|$", PAGE, re.MULTILINE)
"""A recipe, and the bytes of weight, gradient, state and all."""

BARS = {
    'fo.stored(fo.adamw(), "int8")': 2.1,
    'fo.stored(fo.adamw(), "bfloat16")': 4.001,
    'fo.stored(fo.adamw(), "int4")': 1.2,
    'fo.stored(fo.lion(), "int8")': 1.05,
}
"""The most bytes of state that these may take."""


def state_bytes(tx: fo.GradientTransformation, dtype: torch.dtype) -> float:
    w = torch.empty(2048, 2048, dtype=dtype, device="meta")
    state = tree.leaves(tx.init({"layers.0.weight": w}))
    return sum([x.nbytes for x in state if isinstance(x, Tensor)]) / w.numel()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_recipe_takes_the_bytes_of_its_row(row):
    call, weight, gradient, state, total = row
    dtype = {"2": torch.bfloat16, "4": torch.float32}[weight]
    found = state_bytes(eval(call, {"fo": fo}), dtype)
    assert (gradient, state) == (weight, f"{found:.2f}")
    assert total == f"{2 * int(weight) + found:.2f}"
    assert found <= BARS.get(call, found)


def test_all_recipes_with_a_bar_have_a_row():
    assert len(ROWS) > 20
    assert BARS.keys() <= {call for call, *_ in ROWS}


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
    assert [line for line in lines if line not in PAGE.splitlines()] == []


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
