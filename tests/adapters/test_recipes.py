"""What recipes ask of an optimizer object, and what parameter groups may hold."""

import copy
import functools
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from helpers import as_parameters, assert_same, copy_of, step_object
from torch.optim import lr_scheduler, swa_utils

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.state.recipes import OTHERS


def by_value(lr=0.5):
    """A rule that reads the loss."""
    return fo.leafwise(
        None,
        lambda u, slots, p, x: (x * u, slots),
        lambda t, *, value: (-lr * value,),
        name="value",
    )


def test_a_recipe_that_reads_the_loss_needs_a_closure():
    w = torch.nn.Parameter(torch.tensor([2.0]))
    w.grad = torch.ones(1)
    opt = adapters.Optimizer([w], by_value)
    with pytest.raises(RuntimeError, match=r"call opt\.step\(closure\)"):
        opt.step()
    for loss, said in ((torch.ones(2), r"Tensor of shape \(2,\)"), ((w.sum(), 1), "tuple")):
        with pytest.raises(TypeError, match=rf"return the loss, one real number, .* a {said}"):
            opt.step(lambda loss=loss: loss)
    assert w.item() == 2.0


MADE_FOR_PARAMETERS = {
    "torch's": (lambda p: torch.optim.AdamW(p, lr=0.1), {}),
    "ours": (lambda params: adapters.AdamW(params, lr=0.1), {}),
    "with lr": (lambda params, lr: fo.adamw(lr), {"lr": 0.1}),
    "called": (lambda parameters: fo.adamw(parameters), {"lr": 0.1}),
}


@pytest.mark.parametrize("name", MADE_FOR_PARAMETERS)
def test_a_function_of_the_parameters_is_no_recipe(name):
    recipe, given = MADE_FOR_PARAMETERS[name]
    words = "does not get the parameters: a recipe takes hyperparameters and returns a transformat"
    with pytest.raises(TypeError, match=words):
        adapters.Optimizer([torch.ones(2)], recipe, **given)
    opt = adapters.Optimizer([torch.ones(2)], lambda p, lr: fo.lion(lr, (0.9, p)), p=0.5, lr=0.1)
    assert opt.param_groups[0]["p"] == 0.5  # a hyperparameter of this name
    with pytest.raises(TypeError, match=r"can have neither positional-only ones nor \*args; name"):
        adapters.Optimizer([torch.ones(2)], lambda *args: fo.adamw(*args), lr=0.1)


def _in_a_closure(lr):
    def made():
        return fo.adamw(lr)

    return made()


def _by_locals(lr):
    return fo.adamw(**locals())


def _deliberately(lr):
    del lr
    return fo.adamw(0.1)


READ = {
    "passed": lambda lr: fo.adamw(lr),
    "together": lambda lr, decay=0.9: fo.adamw(lr * decay, (decay, decay)),
    "by a condition": lambda lr: fo.adamw(0.1) if lr else fo.sgd(0.1),
    "in a closure": _in_a_closure,
    "by locals": _by_locals,
    "deliberately": _deliberately,
    "factory": fo.adamw,
    "partial": functools.partial(lambda decay, lr: fo.adamw(lr), 0.9),
    "another argument": lambda lr, weight_decay=0.0: fo.rprop(lr),  # some frameworks pass it
}


@pytest.mark.parametrize("name", READ)
def test_no_warning_for_a_recipe_that_reads_lr(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters.Optimizer([torch.ones(2)], READ[name], lr=0.1)


def test_a_warning_for_a_recipe_that_ignores_lr():
    tx, words = fo.adamw(0.1), "the recipe does not read its argument lr, so neither param_groups"
    made = (
        lambda: adapters.Optimizer([torch.ones(2)], lambda lr: tx, lr=0.1),
        lambda: adapters.GradientFree([torch.ones(2)], fo.mezo(), tx=lambda lr: tx, lr=0.1),
    )
    for make in made:
        with pytest.warns(RuntimeWarning, match=words) as seen:
            make()
        assert [Path(x.filename).name for x in seen] == [Path(__file__).name]


@pytest.mark.parametrize("compile", [True, False])
def test_another_recipe_counts_at_the_next_step(compile):
    def decayed(lr):
        return fo.adamw(lr, weight_decay=0.5)

    def averaged(lr):
        return fo.chain(decayed(lr), fo.params_ema(0.5))

    def run(exchange):
        w = torch.nn.Parameter(torch.ones(2))
        opt = adapters.Optimizer([w], fo.adamw, lr=0.1, compile=compile)
        for recipe in (None, None, decayed, None, averaged, None):
            if recipe is not None:
                opt = exchange(opt, adapters.Optimizer([w], recipe, lr=0.1, compile=compile))
            w.grad = w.detach() + 1.0
            opt.step()
        return w, opt.state_dict()["state"]

    def loaded(old, new):
        new.load_state_dict(old.state_dict())
        return new

    def replaced(old, new):
        old.recipe = new.recipe
        return old

    assert_same(run(replaced), run(loaded))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (fo.adamw, "with the same hyperparameters, but got a function; assign opt.recipe = Opt"),
        (None, "but got a NoneType"),
        (adapters.Optimizer([torch.ones(1)], fo.adamw).recipe, "a parameter group has no betas"),
    ],
    ids=["function", "none", "other"],
)
def test_a_recipe_that_is_not_of_an_optimizer_is_not_taken(recipe, says):
    """A function failed in the step, as if it had been called with parameters."""
    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.Optimizer([w], fo.sgd, lr=0.1, compile=False)
    with pytest.raises(TypeError, match=says):
        opt.recipe = recipe
    w.grad = torch.ones(2)
    opt.step()
    assert torch.equal(w, torch.full((2,), 0.9))


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


# ---------------------------------------------------------------- keys of groups
def only_lr(lr):
    return fo.adamw(lr)


def two():
    return as_parameters({"a": torch.ones(2), "b": torch.ones(2)})


def stepped(opt, known):
    for p in known:
        p.grad = torch.ones_like(p)
    opt.step()
    return [p.detach().clone() for p in known]


@pytest.mark.parametrize("compile", [True, False])
def test_a_group_with_a_hyperparameter_that_the_recipe_does_not_take_is_refused(compile):
    a, b = two()
    groups = [{"params": [a], "weight_decay": 0.5}, {"params": [b], "weight_decay": 0.0}]
    words = r"has weight_decay, which the recipe does not take \(it takes: lr\).*param_groups"
    with pytest.raises(TypeError, match=words):
        adapters.Optimizer(groups, only_lr, lr=0.1, compile=compile)
    opt = adapters.Optimizer([a], only_lr, lr=0.1, compile=compile)
    with pytest.raises(TypeError, match=words):
        opt.add_param_group(groups[1])
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("key", sorted(OTHERS - {"params", "param_names", "stored"}))
def test_what_schedulers_and_frameworks_write_is_let_pass(key):
    adapters.Optimizer([{"params": two(), key: 0.5}], only_lr, lr=0.1)


def test_all_that_torchs_schedulers_write_may_be_given_again():
    opt = adapters.Optimizer(two(), fo.sgd, lr=0.1, momentum=0.9)
    lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=4)
    lr_scheduler.CyclicLR(opt, 0.1, 0.2)
    swa_utils.SWALR(opt, swa_lr=0.05)
    adapters.Optimizer([dict(group) for group in opt.param_groups], fo.sgd, lr=0.1)


def test_an_entry_assigned_afterwards_stays():
    known = two()
    opt = adapters.Optimizer(known, only_lr, lr=0.1)
    opt.param_groups[0]["mine"] = "x"
    stepped(opt, known)
    other = adapters.Optimizer(two(), only_lr, lr=0.1)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["mine"] == "x"
    assert copy.deepcopy(opt).param_groups[0]["mine"] == "x"


def test_a_copy_keeps_its_counts_on_the_device():
    opt = adapters.Optimizer(two(), fo.adamw, lr=0.1, capturable=True)
    assert copy.deepcopy(opt).capturable
    assert pickle.loads(pickle.dumps(opt)).capturable
    opt.load_state_dict(adapters.Optimizer(two(), fo.adamw, lr=0.1).state_dict())
    assert opt.capturable


def test_a_recipe_that_takes_anything_gets_what_the_group_has():
    a, b = known = two()
    groups = [{"params": [a], "weight_decay": 0.5}, {"params": [b]}]
    recipe = lambda lr, **others: fo.adamw(lr, **others)  # noqa: E731
    found = stepped(adapters.Optimizer(groups, recipe, lr=0.1), known)
    expected = []
    for decay, p in zip((0.5, 0.01), two(), strict=True):
        opt = adapters.Optimizer([p], fo.adamw, lr=0.1, weight_decay=decay)
        expected += stepped(opt, [p])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_drop_ins_ignore_other_keys_as_torch_does():
    for optimizer in (adapters.SGD, torch.optim.SGD):
        optimizer([{"params": two(), "mine": 3}], lr=0.1)


def test_gradient_free_refuses_them_too():
    with pytest.raises(TypeError, match=r"has sigam, which the recipe does not take.*sigma"):
        adapters.GradientFree(
            [{"params": two(), "sigam": 0.5}], fo.search.snes, population=4, sigma=0.5
        )
    opt = adapters.GradientFree([{"params": two(), "name": "all"}], fo.mezo, tx=fo.sgd, lr=0.1)
    assert opt.param_groups[0]["name"] == "all"


def test_torchs_schedulers_take_a_schedule_as_a_factor(tmp_path):
    """Their checkpoints hold nothing of it, as of any function: a new one stays."""

    def scheduled(end):
        opt = adapters.SGD(two(), lr=0.5)
        return opt, lr_scheduler.LambdaLR(opt, fo.schedules.linear(1.0, end, 10))

    opt, scheduler = scheduled(0.0)
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.45)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    opt, scheduler = scheduled(0.5)
    scheduler.load_state_dict(torch.load(tmp_path / "scheduler.pt"))
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.45)  # the second of 10 steps to 0.5


# ---------------------------------------------------------------- the order of a group's parameters
def momentum():
    """One transformation of trees, with a momentum for each parameter."""

    def init(params):
        return {"buf": fo.tree.map(torch.zeros_like, params)}

    def update(grads, state, params=None):
        new = fo.tree.map(lambda g, m: m if g is None else 0.9 * m + g, grads, state["buf"])
        return fo.tree.map(lambda m: -0.1 * m, new), {"buf": new}

    return fo.GradientTransformation(init, update)


def with_momenta(names=None, copied=None):
    """Three parameters that step with momentum, and their optimizer after one step."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    given = params if names is None else list(zip(names, params, strict=True))
    opt = adapters.Optimizer(given, momentum)
    step_object(opt, [[torch.full((2,), x) for x in (1.0, 2.0, 3.0)]])
    if copied is not None:
        opt = copied(opt)
    return opt.param_groups[0], opt


def again(opt):
    """A step with gradients of zero: what the momenta do, by the size of the first gradient."""
    params = opt.param_groups[0]["params"]
    before = copy_of(params)
    for p in params:
        p.grad = torch.zeros(2)
    opt.step()
    moved = [a - b.detach() for a, b in zip(before, params, strict=True)]
    return [round(x[0].item() / 0.09, 4) for x in moved]


CHANGES = {
    "removed": lambda params: params.pop(1),
    "first removed": lambda params: params.pop(0),
    "reversed": lambda params: params.reverse(),
    "exchanged": lambda params: params.insert(1, params.pop()),
    "replaced": lambda params: params.__setitem__(1, torch.nn.Parameter(torch.zeros(2))),
}
COPIES = {
    "plain": lambda opt: opt,
    "deepcopy": copy.deepcopy,
    "pickle": lambda opt: pickle.loads(pickle.dumps(opt)),
    "loaded": lambda opt: opt.load_state_dict(copy.deepcopy(opt.state_dict())) or opt,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("change", CHANGES)
def test_no_parameter_takes_the_place_of_another_in_the_state_of_a_tree(change, how):
    """Their momenta go by index."""
    group, opt = with_momenta(copied=COPIES[how])
    order = list(group["params"])
    CHANGES[change](group["params"])
    before = copy_of(order)
    for p in group["params"]:
        p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"parameter '\d' was .* in an earlier step"):
        opt.step()
    assert_same(copy_of(order), before)
    group["params"][:] = order
    assert again(opt) == [1.0, 2.0, 3.0]
    CHANGES[change](group["params"])
    opt.state.clear()
    assert again(opt) == [0.0] * len(group["params"])


@pytest.mark.parametrize("change", [x for x in CHANGES if x != "replaced"])
def test_with_names_parameters_of_a_tree_are_removed_and_moved_with_their_state(change):
    group, opt = with_momenta(names=("a", "b", "c"))
    sizes = {"a": 1.0, "b": 2.0, "c": 3.0}
    CHANGES[change](group["params"])
    CHANGES[change](group["param_names"])
    for factor in (1.0, 0.9):
        expected = [round(factor * sizes[name], 4) for name in group["param_names"]]
        assert again(opt) == expected
    assert list(opt.state) == [group["params"][0]]
    _, other = with_momenta(names=("a", "b", "c"))
    CHANGES[change](other.param_groups[0]["params"])
    CHANGES[change](other.param_groups[0]["param_names"])
    other.load_state_dict(opt.state_dict())
    assert again(other) == [round(0.81 * sizes[name], 4) for name in group["param_names"]]


def test_a_tree_may_lose_its_last_parameter_and_get_it_back_or_a_new_one_behind_it():
    group, opt = with_momenta()
    last = group["params"].pop()
    assert again(opt) == [1.0, 2.0]
    group["params"].append(last)
    assert again(opt) == [0.9, 1.8, 3.0]
    group["params"].append(torch.nn.Parameter(torch.zeros(2)))
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    group["params"][0].data = torch.ones(2)
    assert again(opt) == [0.81, 1.62, 2.7, 0.0]
    group["params"].pop()
    group["params"].append(torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"parameter '3' was another tensor"):
        again(opt)


def test_a_load_that_fails_keeps_the_places():
    group, opt = with_momenta()
    saved = opt.state_dict()
    wrong = {key: torch.zeros(5) for key in saved["state"][0]}
    with pytest.raises(ValueError, match="of parameter 0 of group 0"):
        opt.load_state_dict({**saved, "state": {0: wrong}})
    group["params"].reverse()
    with pytest.raises(ValueError, match=r"in an earlier step"):
        again(opt)
