"""What a train step refuses to cut or to move: tensors of other samples, and frozen leaves."""

from collections import UserDict

import numpy as np
import pytest
import torch

import functional_optim as fo

X, Y = torch.randn(8, 4), torch.randn(8, 4)
WEIGHTS = torch.tensor([1.0, 10.0, 100.0, 1000.0])


def loss_fn(p, *batch):
    x, y = (batch[0]["x"], batch[0]["y"]) if len(batch) == 1 else batch[:2]
    return ((x @ p["w"] - y) ** 2 * (WEIGHTS if len(batch) < 3 else batch[2])).mean()


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((X, Y, WEIGHTS), "tensors with 4 and 8 elements along it; close over"),
        ((UserDict(x=X, y=Y),), "those in a UserDict; pass a dict of tensors"),
        ((UserDict(x=X.numpy(), y=1.0), Y), "those in a UserDict; pass a dict of tensors"),
        ((UserDict(x=UserDict(x=[X])), Y), "those in a UserDict; pass a dict of tensors"),
        ((X, Y, WEIGHTS.numpy()), "those in a ndarray; pass a dict of tensors"),
        (({"x": X, "y": Y, "scale": WEIGHTS[0]},), r"'0.scale' of the batch .* \(\); pass a num"),
        ((X[:6], Y[:6]), r"'0' of the batch has shape \(6, 4\); pass batches .* multiple of 4"),
    ],
    ids=[
        *("a weight for each output", "a mapping", "its array", "one in another", "an array"),
        *("a number", "another size"),
    ],
)
def test_a_batch_that_micro_batches_would_not_share_is_refused(batch, says):
    """Weights of outputs were cut with the samples, and an unknown mapping was in each part."""
    p, tx = {"w": torch.zeros(4, 4)}, fo.sgd(1e-3)
    with pytest.raises(ValueError, match=says):
        fo.compile_train_step(loss_fn, tx, accumulate=4, compile=False)(p, tx.init(p), *batch)


def test_mappings_and_arrays_without_tensors_are_in_each_part():
    p, tx = {"w": torch.zeros(4, 4)}, fo.sgd(1e-3)
    step = fo.compile_train_step(loss_fn, tx, accumulate=4, compile=False)
    batch = (X, Y, 1.0, UserDict(scale=2.0), np.float32(1.0), np.ones(()))
    assert step(p, tx.init(p), *batch)[0]["w"].any()


def test_what_belongs_to_all_samples_is_closed_over():
    moved = []
    for parts in (1, 4):
        p, tx = {"w": torch.zeros(4, 4)}, fo.sgd(1e-3)
        step = fo.compile_train_step(loss_fn, tx, accumulate=parts, compile=False)
        moved.append(step(p, tx.init(p), {"x": X, "y": Y})[0]["w"])
    torch.testing.assert_close(*moved)


def test_leaves_that_a_module_has_frozen_must_be_frozen_in_the_recipe():
    """As the base of a LoRA model: a step of trees moves what it is passed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    p = dict(model.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(model, p, (x,)).square().mean()

    tx = fo.sgd(0.1)
    with pytest.raises(ValueError, match=r"such as '0\.bias', do not.*freeze\('0\.bias'\)"):
        fo.compile_train_step(loss, tx, compile=False)(p, tx.init(p), X)
    frozen = fo.chain(fo.freeze("0.*"), fo.sgd(0.1))
    whole = fo.chain(fo.freeze("0.*"), fo.flatten(fo.sgd(0.1)))
    for tx in (frozen, whole, fo.sam(frozen)):
        before = {name: x.clone() for name, x in p.items()}
        p, *_ = fo.compile_train_step(loss, tx, compile=False)(p, tx.init(p), X)
        assert [torch.equal(p[name], x) for name, x in before.items()] == [True, True, False, False]
