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


def of(recipe, **hyper):
    return adapters.Optimizer([parameter()], recipe, compile=False, **hyper)


LINEAR = fo.schedules.linear(1.0, 0.0, 10)

MISTAKES = {
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
    "a number as recipe": (lambda: of(0.1), "recipe must be a function from hyperparameters to"),
    "a transformation as recipe": (lambda: of(fo.adamw(1e-3)), "but got a Leafwise"),
    "a recipe of a number": (lambda: of(lambda lr: lr, lr=0.1), "recipe returned a float; it must"),
    "a recipe of a class": (
        lambda: of(lambda lr: torch.optim.SGD, lr=0.1),
        "it must return a transformation",
    ),
    "a recipe by position": (
        lambda: of(lambda lr, /: fo.sgd(lr), lr=0.1),
        "takes its hyperparameters by name",
    ),
    "an argument without a value": (lambda: of(lambda lr: fo.sgd(lr)), "pass lr=… to"),
    "a misspelled hyperparameter": (
        lambda: of(fo.adamw, learning_rate=0.1),
        "does not take the hyperparameter learning_rate (it takes: lr, betas",
    ),
    "a negative lr": (lambda: of(fo.adamw, lr=-1.0), "Invalid learning rate: -1.0"),
    "L-BFGS as recipe": (lambda: of(fo.lbfgs), "use adapters.LBFGS"),
    "a mask of trees": (
        lambda: fo.masked(fo.adam(), lambda params: params),
        "called for each leaf",
    ),
    "a list of parts": (lambda: fo.partition([fo.adam()], {"*": "a"}), "a dict from labels"),
    "none as lr": (lambda: fo.sgd(None), "a schedule as lr, but got None"),
    "a class as recipe": (
        lambda: adapters.Optimizer([parameter()], torch.optim.AdamW),
        "a recipe makes a transformation, but AdamW makes an optimizer object",
    ),
    "a misspelled class": (lambda: adapters.Adamw, "did you mean 'AdamW'?"),
    "update without parameters": (
        lambda: fo.adamw(0.1).update(GRADS, fo.adamw(0.1).init(PARAMS)),
        "call update(grads, state, params)",
    ),
    "a state of another recipe": (
        lambda: fo.adamw(0.1).update(GRADS, fo.sgd(0.1).init(PARAMS), PARAMS),
        "pass the state that this chain's own init returned",
    ),
    "a loss that is no scalar": (
        lambda: fo.compile_train_step(lambda p: p["w"], fo.sgd(0.1))(
            PARAMS, fo.sgd(0.1).init(PARAMS)
        ),
        "loss_fn must return a real 0-dim tensor",
    ),
    "a checkpoint of another model": (
        lambda: adapters.AdamW([parameter()]).load_state_dict(
            adapters.AdamW([parameter(), parameter()]).state_dict()
        ),
        "load a checkpoint of this model",
    ),
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


def test_torchs_schedulers_take_a_schedule_as_a_factor():
    opt = adapters.SGD([with_grad()], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, LINEAR)
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.45)
