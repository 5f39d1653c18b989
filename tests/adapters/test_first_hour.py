"""What people do wrong in their first hour: each gets a sentence that says what to do, or works."""

from __future__ import annotations

import re

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters

PARAMS, GRADS = {"w": torch.ones(3)}, {"w": torch.ones(3)}


def parameter():
    return torch.nn.Parameter(torch.ones(3))


def with_grad():
    p = parameter()
    p.grad = torch.ones(3)
    return p


def consumed():
    parameters = (p for p in [parameter()])
    list(parameters)
    return parameters


def updated(tx, params=PARAMS, grads=GRADS):
    return tx.update(grads, tx.init(params), params)


def scheduler():
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([parameter()], 0.1), lambda k: 1.0)


def in_place(tree):
    return fo.compile(fo.sgd(0.1))(GRADS | {"v": torch.ones(3)}, fo.sgd(0.1).init(tree), tree)


SHARED = torch.ones(3)
LINEAR = fo.schedules.linear(1.0, 0.0, 10)

MISTAKES = {
    "transform not called, in a chain": (
        lambda: fo.chain(fo.adamw, fo.sgd(0.1)),
        "chain takes transformations, but got a function; call the factory",
    ),
    "transform not called, in compile": (lambda: fo.compile(fo.adamw), "call the factory first"),
    "a list of transforms": (lambda: fo.chain([fo.sgd(0.1)]), "chain takes transformations"),
    "torch's optimizer in a chain": (
        lambda: fo.chain(torch.optim.SGD([parameter()], 0.1)),
        "chain takes transformations, but got a SGD",
    ),
    "no parameters": (lambda: adapters.AdamW([]), "got an empty parameter list"),
    "a generator that is used up": (lambda: adapters.AdamW(consumed()), "empty parameter list"),
    "a module": (
        lambda: adapters.AdamW(torch.nn.Linear(2, 2)),
        "AdamW takes parameters, but got a Linear; pass model.parameters()",
    ),
    "a module for a recipe": (
        lambda: adapters.Optimizer(torch.nn.Linear(2, 2), fo.adamw),
        "Optimizer takes parameters, but got a Linear",
    ),
    "a module for init": (lambda: fo.sgd(0.1).init(torch.nn.Linear(2, 2)), "named_parameters()"),
    "a tensor": (lambda: adapters.AdamW(torch.ones(3)), "should be an iterable of Tensors"),
    "parameters that were computed": (lambda: adapters.SGD([parameter() * 2]), "non-leaf Tensor"),
    "integers": (lambda: fo.sgd(0.1).init({"w": torch.ones(3).long()}), "only floating-point"),
    "a string as lr": (
        lambda: fo.adamw("0.1"),
        "adamw takes a number, a 0-dim tensor or a schedule",
    ),
    "a string as lr of an object": (
        lambda: adapters.AdamW([parameter()], lr="0.1"),
        "AdamW takes a number or a 0-dim tensor as lr, but got '0.1'",
    ),
    "a schedule for a drop-in": (
        lambda: adapters.AdamW([parameter()], lr=LINEAR),
        "for a schedule use adapters.Optimizer(params, fo.adamw, lr=schedule)",
    ),
    "a scheduler as lr": (
        lambda: fo.adamw(scheduler()),
        "got a LambdaLR, which functional_optim.schedules.from_torch",
    ),
    "a negative lr": (lambda: fo.adamw(-1.0), "Invalid learning rate: -1.0"),
    "one beta": (lambda: fo.adamw(0.1, betas=0.9), "betas must be a pair of numbers"),
    "the decay in the place of betas": (lambda: fo.adamw(0.1, 0.01), "betas must be a pair"),
    "a misspelled hyperparameter": (
        lambda: adapters.Optimizer([parameter()], fo.adamw, learning_rate=0.1),
        "does not take the hyperparameter learning_rate (it takes: lr, betas",
    ),
    "a transformation as recipe": (
        lambda: adapters.Optimizer([parameter()], fo.adamw(0.1)),
        "recipe must be a function from hyperparameters to a transformation",
    ),
    "a class as recipe": (
        lambda: adapters.Optimizer([parameter()], torch.optim.AdamW),
        "a recipe makes a transformation, but AdamW makes an optimizer object",
    ),
    "a class's name": (
        lambda: fo.AdamW,
        "the optimizer object is functional_optim.adapters.AdamW(params, ...)",
    ),
    "a misspelled class": (lambda: adapters.Adamw, "did you mean 'AdamW'?"),
    "update without parameters": (
        lambda: fo.adamw(0.1).update(GRADS, fo.adamw(0.1).init(PARAMS)),
        "call update(grads, state, params)",
    ),
    "arguments of update in another order": (
        lambda: fo.adamw(0.1).update(fo.adamw(0.1).init(PARAMS), GRADS, PARAMS),
        "got a state of type dict",
    ),
    "a state of another recipe": (
        lambda: fo.adamw(0.1).update(GRADS, fo.sgd(0.1).init(PARAMS), PARAMS),
        "pass the state that this chain's own init returned",
    ),
    "a state of other parameters": (
        lambda: fo.adamw(0.1).update(GRADS, fo.adamw(0.1).init({"w": torch.ones(4)}), PARAMS),
        "differ at 'w': (3,) against (4,)",
    ),
    "all that update returns": (
        lambda: fo.apply_updates(PARAMS, updated(fo.sgd(0.1))),
        "params and updates have different structures",
    ),
    "a list of gradients for a dict": (
        lambda: updated(fo.sgd(0.1), grads=[torch.ones(3)]),
        "Pass one gradient (or None) per parameter",
    ),
    "tied weights in place": (
        lambda: in_place({"w": SHARED, "v": SHARED}),
        "share their memory, so a step in place would change it twice",
    ),
    "a loss that is no scalar": (
        lambda: fo.compile_train_step(lambda p: p["w"], fo.sgd(0.1))(
            PARAMS, fo.sgd(0.1).init(PARAMS)
        ),
        "loss_fn must return a real 0-dim tensor",
    ),
    "a leaf without a label": (
        lambda: fo.partition({"a": fo.sgd(0.1)}, {"x*": "a"}).init(PARAMS),
        "labels has no answer for the leaf 'w'",
    ),
    "L-BFGS without a closure": (
        lambda: adapters.LBFGS([with_grad()]).step(),
        "step needs a closure",
    ),
    "a checkpoint of another model": (
        lambda: adapters.AdamW([parameter()]).load_state_dict(
            adapters.AdamW([parameter(), parameter()]).state_dict()
        ),
        "load a checkpoint of this model",
    ),
    "Muon for a vector": (lambda: adapters.Muon([parameter()]), "Muon only supports 2D parameters"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake):
    make, said = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, AttributeError), match=re.escape(said)):
        make()


def test_a_step_without_gradients_changes_nothing():
    p = parameter()
    adapters.AdamW([p]).step()
    assert torch.equal(p, torch.ones(3))


def test_parameters_may_take_another_dtype_after_a_step():
    model = torch.nn.Linear(2, 2)
    opt = adapters.AdamW(model.parameters(), compile=False)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        opt.zero_grad()
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        opt.step()
    assert all(p.dtype == torch.float64 and p.isfinite().all() for p in model.parameters())


def test_torchs_schedulers_take_a_schedule_as_a_factor():
    opt = adapters.SGD([with_grad()], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, LINEAR)
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.45)


def test_a_nan_is_not_hidden():
    (updates, _) = updated(fo.sgd(0.1), grads={"w": torch.tensor([1.0, float("nan"), 1.0])})
    assert updates["w"].isnan().tolist() == [False, True, False]
