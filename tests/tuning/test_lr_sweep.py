"""What a sweep says: the final losses, a choice, a table and a curve."""

import math
import sys

import pytest
import torch

import functional_optim as fo

NAN, INF = math.nan, math.inf


def sweep(finals, start=4.0, steps=2, name="lr"):
    """Values 1, 2, … whose losses are these from the second step on."""
    losses = torch.tensor(finals, dtype=torch.float64)[:, None].repeat(1, steps)
    losses[:, 0] = start
    return fo.LRSweep(name, tuple(float(i + 1) for i in range(len(finals))), losses)


@pytest.mark.parametrize(("steps", "last"), [(1, 1), (10, 1), (11, 2), (30, 3), (100, 10)])
def test_the_final_loss_is_the_median_of_the_last_tenth(steps, last):
    losses = torch.rand(3, steps, dtype=torch.float64)
    found = fo.LRSweep("lr", (1.0, 2.0, 3.0), losses)
    expected = [sorted(row[-last:].tolist()) for row in losses]
    middle = [(row[(last - 1) // 2] + row[last // 2]) / 2 for row in expected]
    assert found.last == last
    assert found.final.tolist() == pytest.approx(middle)


def test_what_is_not_finite_at_the_end_has_diverged():
    losses = torch.ones(4, 20)
    losses[0, 5] = NAN  # and was refused, by apply_if_finite
    losses[1, 18] = NAN
    losses[2, 19] = INF
    found = fo.LRSweep("lr", (1.0, 2.0, 3.0, 4.0), losses)
    assert found.diverged.tolist() == [False, True, True, False]
    assert found.final.tolist() == [1, INF, INF, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_types_are_ranked(dtype):
    losses = torch.tensor([[4.0, 3.0], [4.0, 1.0], [4.0, NAN]]).repeat_interleave(12, 1).to(dtype)
    found = fo.LRSweep("lr", (1.0, 2.0, 3.0), losses)
    assert found.final.tolist() == [3, 1, INF]
    assert (found.start, found.best) == (4, 2)
    assert "diverged" in str(found)


@pytest.mark.parametrize(
    ("finals", "best", "suggestion"),
    [
        ([3.0, 1.05, 1.0, 2.0], 3, 2),  # 1.06 is as good as 1
        ([3.0, 1.07, 1.0, 2.0], 3, 3),
        ([1.05, 1.07, 1.0, NAN], 3, 3),  # the first is behind one that is not as good
        ([1.05, 1.05, 1.0, 1.05], 3, 1),
        ([-1.0, -0.8, NAN], 1, 1),
        ([-0.95, -1.0, NAN], 2, 1),
        ([5.0, 4.5, 6.0], 2, 2),  # no progress
        ([4.5], 1, 1),
    ],
)
def test_the_suggestion_is_the_smallest_about_as_good_as_the_best(finals, best, suggestion):
    found = sweep(finals)
    assert (found.best, found.suggestion) == (best, suggestion)
    back = torch.arange(len(finals) - 1, -1, -1)
    turned = fo.LRSweep("lr", found.values[::-1], found.losses[back])
    assert (turned.best, turned.suggestion) == (best, suggestion)
    assert repr(turned) == repr(found)


@pytest.mark.parametrize(
    "losses",
    [torch.ones(3, 2), torch.ones(2), torch.ones(2, 0), torch.ones(2, 3).int(), [[1.0]] * 2],
)
def test_losses_of_another_form_are_refused(losses):
    with pytest.raises(ValueError, match="a row for each of its 2 values and a column for each"):
        fo.LRSweep("lr", (0.1, 0.2), losses)


def test_if_all_have_diverged_there_is_no_best():
    found = sweep([NAN, INF], name="peak")
    for read in ("best", "suggestion"):
        with pytest.raises(ValueError, match="all runs have diverged, at every peak from 1 to 2"):
            getattr(found, read)
    assert [line.split()[-1] for line in repr(found).splitlines()[1:3]] == ["diverged"] * 2


def test_the_table_has_a_line_for_each_value():
    *lines, note = repr(sweep([3.0, 1.05, 1.0, NAN], steps=20, name="peak")).splitlines()
    assert note == "The first loss is 4; the final loss is the median of the last 2 of 20 losses."
    assert [line.split() for line in lines] == [
        ["peak", "final", "loss"],
        ["1", "3"],
        ["2", "1.05", "suggestion"],
        ["3", "1", "best"],
        ["4", "inf", "diverged"],
        [],
    ]
    assert "│    2 │       1.05 │ suggestion │" in str(sweep([3.0, 1.05, 1.0], name="peak"))


@pytest.mark.parametrize(
    ("finals", "note"),
    [
        ([3.0, 2.0, 1.0], "The best value is the largest of all; try larger ones, too."),
        ([1.0, 2.0, 3.0], "The best value is the smallest of all; try smaller ones, too."),
        ([5.0, 4.0, 5.0], "No value has lowered the loss."),
        ([2.0, 1.0, 2.0], None),
    ],
)
def test_a_choice_that_is_not_to_be_trusted_is_noted(finals, note):
    notes = repr(sweep(finals)).split("\n\n")[1:]
    assert notes[1:] == ([note] if note else [])


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_the_curve_has_all_values(axes):
    found = sweep([3.0, 1.05, 1.0, 90.0, NAN], name="peak")
    assert found.plot(axes) is axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert [x for x in lines["_child0"] if not math.isnan(x[1])] == [[1, 3], [2, 1.05], [3, 1]]
    assert [x for x, _ in lines["diverged, or far above the first loss"]] == [4, 5]
    assert lines["best: 3"] == [[3, 1]]
    assert lines["suggestion: 2"] == [[2, 1.05]]
    assert (axes.get_xlabel(), axes.get_xscale(), axes.get_yscale()) == ("peak", "linear", "linear")


def test_wide_ranges_have_a_logarithmic_axis(axes):
    losses = torch.tensor([[4.0, 3.0], [4.0, 0.1]])
    fo.LRSweep("lr", (0.01, 0.1), losses).plot(axes)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.parametrize("finals", [[NAN, INF], [4.0, 4.0], [-1.0, -2.0], [1.0]])
def test_every_sweep_can_be_drawn(axes, finals):
    sweep(finals).plot(axes)
    sweep(finals, start=NAN).plot(axes)
    axes.figure.canvas.draw()


def test_without_axes_a_figure_is_made():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = sweep([3.0, 1.0]).plot()
    assert axes.get_xlabel() == "lr"
    pyplot.close(axes.figure)


def test_without_matplotlib_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        sweep([3.0, 1.0]).plot()
