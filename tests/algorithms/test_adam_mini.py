"""Adam-mini: what a block is, and how blocks are given."""

import pytest
import torch
from helpers import assert_close, assert_same, make_grads, make_params, run

import functional_optim as fo
from functional_optim import adapters

ADAM = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3}
SHAPES = {"heads": (6, 4), "rows": (3, 5), "kernel": (4, 2, 3, 3), "whole": (7,), "b.bias": (4,)}


def test_parts_of_a_projection_are_tensors_of_their_own():
    params = {"a": torch.randn(4, 3), "b": torch.randn(2, 3)}
    joined = {"ab": torch.cat([params["a"][:2], params["a"][2:], params["b"]])}
    grads = make_grads(params)
    together = [{"ab": torch.cat([g["a"], g["b"]])} for g in grads]
    alone = {"x": params["a"][:2], "y": params["a"][2:], "z": params["b"]}
    cut = [{"x": g["a"][:2], "y": g["a"][2:], "z": g["b"]} for g in grads]
    end, state = run(fo.adam_mini(**ADAM, blocks={"ab": 3}), joined, together)
    wanted, one = run(fo.adam_mini(**ADAM, blocks={"*": "tensor"}), alone, cut)
    assert_close(end["ab"], torch.cat(list(wanted.values())), 1e-6)
    found = state.slots["exp_avg_sq"]["ab"].flatten()
    assert_close(found, torch.stack(list(one.slots["exp_avg_sq"].values())), 1e-6)


def test_a_pattern_of_blocks_that_fits_nothing_is_told():
    params = {"q_proj": {"weight": torch.ones(4, 3)}}
    with pytest.warns(UserWarning, match=r"'\*\.query' of the blocks matches no leaf; .*'q_proj"):
        fo.adam_mini(blocks={"*.query": 2, "*": "tensor"}).init(params)


def test_rows_that_cannot_be_divided_are_refused_by_name():
    with pytest.raises(ValueError, match=r"3 parts of the parameter 'q.weight', .* \(4, 2\); pass"):
        fo.adam_mini(blocks={"q": 3}).init({"q": {"weight": torch.ones(4, 2)}})
    with pytest.raises(ValueError, match="3 parts of the parameter '0'"):
        adapters.AdamMini([torch.nn.Parameter(torch.ones(4, 3))], blocks={"*": 3})


def test_blocks_of_elements_are_adam():
    params = make_params()
    grads = make_grads(params)
    mini = fo.adam_mini(**ADAM, weight_decay=0.1, blocks={"*": "element"})
    with pytest.warns(DeprecationWarning, match="now called 'element'"):
        old = fo.adam_mini(**ADAM, weight_decay=0.1, blocks={"*": "entry"})
    assert_same(run(mini, params, grads)[0], run(old, params, grads)[0])
    assert_same(
        run(mini, params, grads)[0], run(fo.adamw(**ADAM, weight_decay=0.1), params, grads)[0]
    )


def test_the_first_pattern_counts_and_all_else_goes_by_its_shape():
    params = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    tx = fo.adam_mini(blocks={"he*": 2, "heads": 3})
    found = {name: tuple(v.shape) for name, v in tx.init(params).slots["exp_avg_sq"].items()}
    assert found == {
        **{"heads": (2, 1), "rows": (3, 1), "kernel": (4, 1, 1, 1), "whole": (), "b.bias": (4,)}
    }
