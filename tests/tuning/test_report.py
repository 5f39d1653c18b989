"""Reports name what is wrong with trainings that were spoiled on purpose, and nothing else."""

import builtins
import math

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters

STEPS = 60
WORDS = {
    "nan": "NaN or infinity was first recorded at step 20, in loss",
    "rising": "The loss rose",
    "dead": "The gradient was exactly 0",
    "high": "update/weight has a median above 1e-02",
    "low": "update/weight has a median below 1e-04",
    "clipped": "of the steps were clipped",
    "uphill": "lead uphill",
}


def watched(lr, clip):
    clipping = fo.clip_by_global_norm(clip)
    share = fo.monitor({"clip_share": fo.measures.clip_share}, around=clipping, per_tensor=True)
    tx = fo.chain(share, fo.sgd(lr))
    return fo.monitor(fo.measures.diagnostics, around=tx, per_tensor=True)


def trained(lr=0.03, clip=100.0, spoil=0, unused=False):
    """The records of two layers that learn a sum.

    spoil: the step in which the loss is NaN. unused: with a third layer, whose output is not used.
    """
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    layers = [torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 1, bias=False)]
    layers += [torch.nn.Linear(8, 1, bias=False)] * unused
    model = torch.nn.ModuleList(layers)
    opt = adapters.Optimizer(model.named_parameters(), watched, lr=lr, clip=clip, compile=False)
    history = []
    for step in range(1, STEPS + 1):
        y = layers[1](layers[0](x).relu()) + sum([0.0 * layer(x) for layer in layers[2:]])
        loss = (y - x.sum(1, keepdim=True)).square().mean()
        loss = loss * math.nan if step == spoil else loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append({"loss": loss.detach(), **opt.numbers()})
    return history


def found(history):
    """The kinds of sentences in a report."""
    sentences = fo.report(history).findings
    kinds = [kind for x in sentences for kind, words in WORDS.items() if words in x]
    assert len(kinds) == len(sentences)
    return kinds


def test_nothing_stands_out_in_a_good_training():
    history = trained()
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert found(history) == []
    assert "Nothing stands out in 1 record." in str(fo.report([{"loss": 1.0}]))
    assert f"Nothing stands out in {STEPS} records." in str(fo.report(history))


def test_a_rate_too_high_or_too_low():
    assert found(trained(lr=0.2)) == ["high"]
    assert found(trained(lr=0.5)) == ["rising", "high", "clipped"]
    assert found(trained(lr=1e-6)) == ["low"]


def test_steps_that_are_always_clipped():
    history = trained(clip=0.1)
    assert found(history) == ["clipped"]
    (sentence,) = fo.report(history).findings
    norm = fo.report(history)._history.whole["grad_norm"].median()
    assert sentence.startswith("100 % of the steps were clipped")
    assert f"(here {norm:.2g})" in sentence


def test_a_nan():
    history = trained(spoil=20)
    assert found(history) == ["nan"]
    (sentence,) = fo.report(history).findings
    assert "in loss, grad_norm of 0.weight, grad_norm of 1.weight and " in sentence


def test_a_dead_layer():
    history = trained(unused=True)
    assert found(history) == ["dead"]
    assert "in 1 of 3 parameters: 2.weight." in fo.report(history).findings[0]
    history[-1]["grad_norm/2.weight"] = 1e-3
    assert found(history) == []
    decayed = {"grad_norm/w": 0.0, "update_ratio/w": 1e-6}  # which is not told to be slow as well
    assert found([{**decayed, "grad_norm/v": 1.0, "update_ratio/v": 1e-3}] * 2) == ["dead"]


def test_steps_uphill():
    """Momentum that overshoots."""
    tx = fo.monitor(fo.measures.diagnostics, around=fo.sgd(1.9, momentum=0.9))
    w, history = torch.ones(2), []
    state = tx.init(w)
    for _ in range(40):
        u, state = tx.update(w, state, w)
        history.append(fo.numbers(state))
        w = fo.apply_updates(w, u)
    for record in history:
        record["cosine"] = -abs(record["cosine"])
    assert found(history) == ["high", "uphill"]
    assert "below 0) in the model (-" in fo.report(history).findings[1]


def test_many_parameters_are_named_in_part():
    record = {f"update_ratio/p{i:02}": 1e-3 * (40 if i < 5 else 1) for i in range(50)}
    text = " ".join(str(fo.report([record, record])).split())
    assert "in 5 of 50 parameters: p00 (4.0e-02), p01" in text
    assert "and 2 more" in text
    assert "30 of 50 parameters" in text
    assert "p04" in text
    assert "p49" not in text


def test_the_text_has_the_numbers_of_each_parameter():
    ratios = (1e-3, 3e-3, 2e-3)
    more = {"cosine/w": 0.5, "grad_norm/w": 3.0, "grad_norm/b": 4.0, "lr": 0.1, "beta": 0.9}
    history = [{"update_ratio/w": x, **more} for x in ratios]
    report = fo.report(history)
    (row,) = [line for line in str(report).splitlines() if " w " in f" {line.strip('│ ')} "]
    for cell in ("2.0e-03", "1.0e-03", "3.0e-03", "0.50", "3.0e+00"):
        assert cell in row
    (row,) = [line for line in str(report).splitlines() if "grad_norm" in line]
    assert row.count("5") == 5  # first, last, median, least, most of √(3² + 4²)
    assert "beta" not in str(report)
    assert repr(report) == "<Report of 3 records, 0 findings>"


def test_steps_are_those_of_the_records():
    history = [{"step": 10 * i, "loss": math.inf if i > 3 else 1.0} for i in range(1, 6)]
    assert "at step 40, in loss." in fo.report(history).findings[0]
    for record in history:
        del record["step"]
    assert "at step 4, in loss." in fo.report(history).findings[0]


def test_two_monitors_of_one_name_stay_apart():
    history = [{"low.cosine/w": -0.5, "high.cosine/w": 0.5}] * 2
    assert "in 1 of 2 parameters: w (low) (-0.50)." in fo.report(history).findings[0]


def test_a_step_that_was_recorded_twice_has_two_norms():
    """By a resumed run; records of two optimizers in one step make up one norm."""
    resumed = [{"step": step, "grad_norm/w": 3.0, "grad_norm/b": 4.0} for step in (1, 2, 3, 2, 3)]
    assert fo.report(resumed)._history.whole["grad_norm"] == ((1, 2, 3, 2, 3), (5.0,) * 5)
    two = [{"step": i // 2, f"grad_norm/{'wb'[i % 2]}": 3.0 + i % 2} for i in range(4)]
    assert fo.report(two)._history.whole["grad_norm"] == ((0, 1), (5.0, 5.0))


def test_norms_of_two_monitors_are_added_only_if_their_parameters_differ():
    parts = [{"a.grad_norm/w": 3.0, "b.grad_norm/b": 4.0}]
    assert fo.report(parts)._history.whole == {"grad_norm": ((1,), (5.0,))}
    around = [{"a.grad_norm/w": math.inf, "b.grad_norm/w": 1.0, "b.grad_norm/b": 0.0}]
    report = fo.report(around)
    found = {"a.grad_norm": ((1,), (math.inf,)), "b.grad_norm": ((1,), (1.0,))}
    assert report._history.whole == found
    assert "at step 1, in grad_norm of w (a). Look" in report.findings[0]
    assert "b.grad_norm" in str(report)


# ---------------------------------------------------------------- the picture
def lines_of(figure):
    return {
        axes.get_title().split(",")[0]: [line.get_ydata() for line in axes.get_lines()]
        for axes in figure.axes
    }


def test_the_picture_has_what_was_recorded(tmp_path):
    history = trained(spoil=20)
    figure = fo.report(history).plot()
    lines = lines_of(figure)
    assert list(lines) == [
        "loss",
        "norms of the model",
        "update/weight",
        "cosine of −update and gradient",
        "share of clipped steps",
        "learning rate",
    ]
    losses = [float(x["loss"]) for x in history[:19]]
    assert list(lines["loss"][0]) == losses
    ratios = [x["update_ratio/1.weight"] for x in history[:19]]
    assert any(list(line) == ratios for line in lines["update/weight"])
    (mark,) = [x for x in figure.axes[0].get_lines() if x.get_linestyle() == ":"]
    assert list(mark.get_xdata()) == [20.0, 20.0]
    figure.savefig(tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_the_picture_leaves_out_what_was_not_recorded():
    assert list(lines_of(fo.report([{"loss": 1.0}]).plot())) == ["loss"]
    with pytest.raises(ValueError, match="nothing to plot"):
        fo.report([{"beta": 1.0}]).plot()


def test_without_matplotlib_an_error_says_what_to_do(monkeypatch):
    known = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return known(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        fo.report([{"loss": 1.0}]).plot()


@pytest.mark.parametrize(
    ("history", "error", "match"),
    [
        ([], ValueError, "empty history; append a dict"),
        ({"loss": 1.0}, TypeError, "takes a list of dicts, but got a dict"),
        ([{"loss": 1.0}, 2.0], TypeError, r"history\[1\] is a float"),
        ([{1: 2.0}], TypeError, r"history\[0\] has the key 1, which is not a name; append"),
        ([{"loss": "low"}], TypeError, r"history\[0\]\['loss'\] is a str"),
        ([{"loss": torch.ones(2)}], TypeError, r"history\[0\]\['loss'\] is a Tensor"),
    ],
)
def test_bad_input_raises_at_once(history, error, match):
    with pytest.raises(error, match=match):
        fo.report(history)


@pytest.mark.parametrize(
    ("tx", "name"), [(fo.lbfgs(), "d"), (fo.levenberg_marquardt(), "step")], ids=["d", "step"]
)
def test_tensors_with_the_name_of_a_parameter_are_not_its_state(tx, name):
    """The vectors of L-BFGS and step counts belong to all parameters."""
    tables = [fo.summary(tx, {key: torch.ones(3), "w": torch.ones(10)}) for key in (name, "c")]
    assert [row.bytes for row in tables[0].rows] == [0, 0]
    assert tables[0].shared == tables[1].shared > 0
