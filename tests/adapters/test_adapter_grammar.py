"""What the grammar asks of an optimizer object: losses for links, parameters by name."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same

import functional_optim as fo
from functional_optim import adapters


def by_value(lr=0.5):
    """A rule that reads the loss."""
    return fo.leafwise(
        None,
        lambda u, slots, p, x: (x * u, slots),
        lambda t, *, value: (-lr * value,),
        name="value",
    )


@pytest.mark.parametrize("compile", [True, False])
def test_a_closures_loss_reaches_the_links_that_ask_for_it(compile):
    w = torch.nn.Parameter(torch.tensor([2.0]))
    opt = adapters.Optimizer([w], by_value, compile=compile)

    def closure():
        opt.zero_grad()
        loss = 3 * w.sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 6.0
    assert w.item() == 2.0 - 0.5 * 6.0 * 3.0


def test_a_recipe_that_reads_the_loss_needs_a_closure():
    w = torch.nn.Parameter(torch.tensor([2.0]))
    w.grad = torch.ones(1)
    opt = adapters.Optimizer([w], by_value)
    with pytest.raises(RuntimeError, match=r"call opt\.step\(closure\)"):
        opt.step()
    assert w.item() == 2.0


def trained(head_only):
    """A recipe whose hyperparameter says which leaves move."""
    return fo.selective_transform(fo.sgd(1.0), freeze_mask="body" if head_only else [])


def test_a_hyperparameter_that_chooses_leaves_counts_at_the_next_step():
    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("body", "head")}
    opt = adapters.Optimizer(params.items(), trained, head_only=True)
    for p in params.values():
        p.grad = torch.ones(1)
    opt.step()
    assert [p.item() for p in params.values()] == [0.0, -1.0]
    opt.param_groups[0]["head_only"] = False
    opt.step()
    assert [p.item() for p in params.values()] == [-1.0, -2.0]


def test_a_new_learning_rate_of_a_partition_builds_no_plan():
    def recipe(lr):
        parts = {"slow": fo.sgd(lr), "fast": fo.chain(fo.sgd(lr), fo.scale(10.0))}
        return fo.partition(parts, lambda path, p: "slow" if path == "body" else "fast")

    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("body", "head")}
    opt = adapters.Optimizer(params.items(), recipe, lr=1.0)
    for p in params.values():
        p.grad = torch.ones(1)
    opt.step()
    plan = opt._plan
    opt.param_groups[0]["lr"] = 0.5
    opt.step()
    assert opt._plan is plan
    assert [p.item() for p in params.values()] == [-1.5, -15.0]


def test_a_parameter_without_a_label_is_told_when_the_object_is_made():
    def recipe(lr=0.1):
        return fo.partition({"a": fo.sgd(lr)}, {"body": "a"})

    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("body", "head")}
    with pytest.raises(ValueError, match="no answer for the leaf 'head'"):
        adapters.Optimizer(params.items(), recipe)
    with pytest.raises(ValueError, match=r"the leaf '0'; .* pass model.named_parameters\(\)"):
        adapters.Optimizer(params.values(), recipe)


def test_a_group_without_names_beside_groups_with_names_is_told_what_to_pass():
    """As finetuning callbacks add one."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    opt = adapters.AdamW(first.named_parameters())
    with pytest.raises(ValueError, match=r"cannot add param group without names .*; pass pairs of"):
        opt.add_param_group({"params": second.parameters()})
    assert len(opt.param_groups) == 1


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def by_path(lr):
    return fo.chain(fo.freeze("0.*"), fo.sgd(lr, momentum=0.9))


def as_one(lr):
    """The same as a transformation of whole trees, whose state is kept by paths."""
    tx = by_path(lr)
    return fo.GradientTransformation(tx.init, tx.update)


@pytest.mark.parametrize("recipe", [by_path, as_one])
def test_names_are_those_of_the_model_even_if_it_is_compiled(recipe, fresh_dynamo):
    """torch.compile puts `_orig_mod.` in front of the names that its module gives."""
    ends = []
    for compiled in (False, True):
        model = layers()
        start = model[0].weight.detach().clone()
        called = torch.compile(model, backend="eager") if compiled else model
        opt = adapters.Optimizer(called.named_parameters(), recipe, compile=False, lr=0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        assert torch.equal(model[0].weight, start)
        ends.append((list(model.parameters()), list(opt.state_dict()["state"].items())))
        if compiled:
            plain = adapters.Optimizer(layers().named_parameters(), recipe, compile=False, lr=0.1)
            plain.load_state_dict(opt.state_dict())
    assert_same(*ends)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fo.masked(fo.adam(), lambda params: params), "called for each leaf"),
        (lambda: fo.partition([fo.adam()], {"*": "a"}), "a dict from labels"),
        (lambda: fo.adam("1e-3"), "a number, a 0-dim tensor or a schedule as lr, but got '1e-3'"),
        (lambda: fo.sgd(None), "a number, a 0-dim tensor or a schedule as lr, but got None"),
    ],
)
def test_what_a_user_of_optax_may_try_gets_a_sentence(make, says):
    with pytest.raises(TypeError, match=says):
        make()
