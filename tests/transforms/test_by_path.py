"""Factors by path, and the functions that make them; decay where the step agrees."""

import pytest
import torch
from helpers import assert_close, clone, run

import functional_optim as fo

EXACT = 1e-12


def test_the_first_pattern_that_fits_gives_the_factor():
    params = {"a": torch.ones(1), "ab": torch.ones(1), "c": {"b": torch.ones(1)}}
    tx = fo.scale_by_path({"a": 2.0, "a*": 3.0, "c": lambda count: 5.0 + count})
    u, state = tx.update(params, tx.init(params), params)
    assert [x.item() for x in fo.tree.leaves(u)] == [2.0, 3.0, 5.0]
    u, _ = tx.update(params, state, params)
    assert u["c"]["b"].item() == 6.0
    only = fo.scale_by_path({"ab": 2.0, "*": 0.0})
    u, _ = only.update(params, only.init(params), params)
    assert [x.item() for x in fo.tree.leaves(u)] == [0.0, 2.0, 0.0]


def test_a_factor_may_be_a_tensor_whose_value_changes():
    params, factor = {"a": torch.ones(1), "b": torch.ones(1)}, torch.tensor(2.0)
    tx = fo.scale_by_path({"a": factor})
    for value in (2.0, 0.5):
        factor.fill_(value)
        u, _ = tx.update(params, tx.init(params), params)
        assert [x.item() for x in fo.tree.leaves(u)] == [value, 1.0]
    with pytest.raises(TypeError, match="scale_by_path makes a transformation"):
        fo.scale_by_path(params)


def test_equal_factors_are_one_rule():
    tx = fo.scale_by_path({f"layer.{i}": 0.5 ** (i % 2) for i in range(6)})
    assert len(tx.placements) == 1  # those with the factor 1 have none


def test_a_factor_before_the_decay_leaves_the_decay_alone():
    names = ["embed.weight", *[f"blocks.{i}.weight" for i in range(3)], "head.weight"]
    params = {name: torch.ones(4, dtype=torch.float64) for name in names}
    zeros = fo.tree.map(torch.zeros_like, params)
    factors = fo.layerwise_decay(params, 0.5)
    tx = fo.chain(fo.scale_by_path(factors), fo.add_decayed_weights(0.1), fo.scale_by_lr(1.0))
    u, _ = tx.update(zeros, tx.init(params), params)
    assert_close(u, {name: torch.full_like(p, -0.1) for name, p in params.items()}, EXACT)
    tx = fo.chain(fo.scale_by_path(factors), fo.scale_by_lr(1.0))
    u, _ = tx.update(params, tx.init(params), params)
    found = [u[name][0].item() for name in params]
    assert found == [-(0.5**4), -(0.5**3), -(0.5**2), -0.5, -1.0]


def test_only_blocks_with_parameters_are_layers():
    linear = lambda: torch.nn.Linear(1, 1, bias=False)  # noqa: E731
    net = torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(), *[torch.nn.ReLU()] * 8, linear())
    found = fo.layerwise_decay(dict(net.named_parameters()), 0.5)
    assert found == {"0.weight": 0.25, "2.weight": 0.5, "11.weight": 1.0}


def test_layers_by_patterns():
    params = {"b": {"w": torch.ones(1)}, "a": [torch.ones(1), torch.ones(1)]}
    found = fo.layerwise_decay(params, 0.1, ["a.0", ["a.1"], ["x", "b.*"]])
    assert found == pytest.approx({"a.0": 0.01, "a.1": 0.1, "b.w": 1.0})
    with pytest.raises(TypeError, match=r"takes a list of layers, .* but got the string 'a\*'"):
        fo.layerwise_decay({"a.b": torch.ones(1)}, 0.1, "a*")


# ---------------------------------------------------------------- widths
def network(width, hidden=None):
    """Input, two hidden layers, output and a gain, as torch stores them."""
    hidden = hidden or width
    shapes = {"in.weight": (width, 7), "in.bias": (width,), "hidden.weight": (hidden, width)}
    shapes |= {"out.weight": (3, hidden), "out.bias": (3,), "scale": ()}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_mup_is_table_8():
    adam = fo.mup(network(64), network(16))
    assert adam.lr == {
        "in.weight": 1, "in.bias": 1, "hidden.weight": 1 / 4, "out.weight": 1, "out.bias": 1,
        "scale": 1,
    }  # fmt: skip
    assert all(adam.weight_decay[name] * x == 1 for name, x in adam.lr.items())
    sgd = fo.mup(network(64, 32), network(16), rule="sgd")
    assert sgd.lr == {
        "in.weight": 4, "in.bias": 4, "hidden.weight": 2 / 4, "out.weight": 2, "out.bias": 1,
        "scale": 1,
    }  # fmt: skip


def test_mup_knows_widths_that_are_equal_by_chance_from_a_third_model():
    wide = network(64, 16)
    assert fo.mup(wide, network(16)).lr["hidden.weight"] == 1
    assert fo.mup(wide, network(16), network(8)).lr["hidden.weight"] == 1 / 4


def test_mup_is_of_tensors_not_of_modules():
    net = torch.nn.Linear(2, 2)
    for wrong, kind in ((net, "Linear"), (net.parameters(), "generator"), ({"w": 3}, "int")):
        for given in ((wrong, network(4)), (network(4), wrong), (network(4), network(2), wrong)):
            with pytest.raises(TypeError, match=f"takes trees of tensors, but got a {kind}; pass"):
                fo.mup(*given)


# ---------------------------------------------------------------- cautious decay
@pytest.mark.parametrize("independent", [False, True])
def test_cautious_weight_decay_acts_where_step_and_decay_agree(independent):
    torch.manual_seed(0)
    params = {"a": torch.randn(50, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    grads = [{name: torch.randn_like(p) for name, p in params.items()} for _ in range(5)]
    grads[0]["b"][0] = 0.0
    decay = fo.cautious_weight_decay(0.2, independent=independent, mask="a")
    lr = 0.1
    links = [fo.scale_by_lr(lr), decay] if independent else [decay, fo.scale_by_lr(lr)]
    moved, _ = run(fo.chain(*links), clone(params), grads)
    a, b = params["a"], params["b"]
    share = 0.2 if independent else lr * 0.2
    for g in grads:
        a = a - lr * g["a"] - share * a * (g["a"] * a >= 0)
        b = b - lr * g["b"]
    assert_close(moved, {"a": a, "b": b}, EXACT)
    zero = {"a": torch.zeros(1)}
    tx = fo.chain(fo.cautious_weight_decay(0.5), fo.scale_by_lr(1.0))
    u, _ = tx.update(zero, tx.init(zero), {"a": torch.ones(1)})
    assert u["a"].item() == -0.5
    assert len(fo.cautious_weight_decay(0.0).placements) == 0
