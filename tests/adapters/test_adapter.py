"""The contract of torch.optim.Optimizer, beside torch's own classes."""

import pytest
import torch
from helpers import (
    as_parameters,
    assert_close,
    assert_same,
    copy_of,
    make_grads,
    make_params,
    step_object,
)
from loops import backward, batches, make_model, row
from objects import DROP_INS, GENERAL, every_pair, parameters
from sampling import some
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from voting import SCHEDULERS

import functional_optim as fo
from functional_optim import adapters

EXACT = 1e-12


# ---------------------------------------------------------------- hooks and closures
@every_pair
def test_step_hooks_run_once_and_in_torchs_order(pair):
    logs = []
    ours, _, theirs, _ = pair.make()
    for opt in (ours, theirs):
        logs.append(log := [])
        say = lambda word, log=log: lambda *_: log.append(word)  # noqa: E731
        handles = [
            opt.register_step_pre_hook(say("own pre")),
            opt.register_step_post_hook(say("own post")),
            register_optimizer_step_pre_hook(say("global pre")),
            register_optimizer_step_post_hook(say("global post")),
        ]
        opt.step(say("closure"))
        for handle in handles:
            handle.remove()
        assert opt.step() is opt.step(None) is None
    assert logs[0] == ["global pre", "own pre", "closure", "own post", "global post"]
    assert logs[0] == logs[1]
    ours.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: "theirs"), {}))
    assert ours.step(lambda: "mine") == "theirs"


@every_pair
def test_each_step_hook_runs_alone(pair):
    ours, *_ = pair.make()
    for register in (
        ours.register_step_pre_hook,
        ours.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        log = []
        handle = register(lambda *_, log=log: log.append(1))
        ours.step()
        handle.remove()
        ours.step()
        assert log == [1]


@pytest.mark.parametrize("cls", [adapters.AdamW, adapters.Lion, adapters.ScheduleFreeAdamW])
def test_the_hooks_of_a_subclass_with_a_step_of_its_own_run_once(cls):
    """torch wraps that step, and so calls the hooks before and after it."""

    class Own(cls):
        def step(self, closure=None):
            return super().step(closure)

    log = []
    opt = Own(as_parameters(make_params()), compile=False)
    opt.register_step_pre_hook(lambda *_: log.append("pre"))
    opt.register_step_post_hook(lambda *_: log.append("post"))
    opt.step(lambda: log.append("closure"))
    assert log == ["pre", "closure", "post"]


@every_pair
def test_state_dict_hooks_run_once_and_in_order(pair):
    ours, *_ = pair.make()
    log = []
    say = lambda word: lambda *_: log.append(word)  # noqa: E731
    ours.register_state_dict_pre_hook(say("save 2"))
    ours.register_state_dict_pre_hook(say("save 1"), prepend=True)
    ours.register_state_dict_post_hook(say("saved 2"))
    ours.register_state_dict_post_hook(say("saved 1"), prepend=True)
    ours.register_load_state_dict_pre_hook(say("load 2"))
    ours.register_load_state_dict_pre_hook(say("load 1"), prepend=True)
    ours.register_load_state_dict_post_hook(say("loaded 2"))
    ours.register_load_state_dict_post_hook(say("loaded 1"), prepend=True)
    ours.load_state_dict(ours.state_dict())
    assert log == [f"{do} {i}" for do in ("save", "saved", "load", "loaded") for i in (1, 2)]


def test_hooks_of_a_load_may_remove_themselves_and_are_there_again_if_it_fails():
    opt = adapters.AdamW([torch.nn.Parameter(torch.ones(2))])
    log, handles = [], {}

    def once(name, result):
        log.append(name)
        handles[name].remove()
        return result

    gives = {"first": {}, "second": {}}
    for name in gives:
        handles[name] = opt.register_load_state_dict_pre_hook(lambda *_, x=name: once(x, gives[x]))
    handles["last"] = opt.register_load_state_dict_post_hook(lambda _: once("last", None))
    with pytest.raises(ValueError, match="no 'param_groups'"):
        opt.load_state_dict(opt.state_dict())
    gives["second"] = opt.state_dict()
    opt.load_state_dict({})
    opt.load_state_dict(opt.state_dict())
    assert log == ["first", "second", "first", "second", "last"]


@every_pair
def test_a_step_leaves_gradients_and_identities_alone(pair):
    ours, mine, *_ = pair.make()
    (grads,) = make_grads(make_params(), 1)
    step_object(ours, [grads])
    pointers, held = [p.data_ptr() for p in mine], [p.grad for p in mine]
    ours.step()
    assert [p.data_ptr() for p in mine] == pointers
    assert all(p.grad is g for p, g in zip(mine, held, strict=True))
    assert_same([p.grad for p in mine], list(grads.values()))


# ---------------------------------------------------------------- parameters come and go
@every_pair
def test_a_group_added_mid_run_has_its_own_hyperparameters(pair):
    params = make_params()
    ours, mine, theirs, other = pair.make(params)
    grads = make_grads(params, 6)
    step_object(ours, grads[:3])
    step_object(theirs, grads[:3])
    extra = torch.randn(3, dtype=torch.float64)
    for opt, known in ((ours, mine), (theirs, other)):
        known += as_parameters({"extra": extra})
        opt.add_param_group({"params": known[-1:], "lr": 0.5, "weight_decay": 0.3})
    longer = [[*g.values(), torch.randn(3, dtype=torch.float64)] for g in grads[3:]]
    step_object(ours, longer)
    step_object(theirs, longer)
    assert_close(copy_of(mine), copy_of(other), EXACT)


@every_pair
def test_the_parameters_of_a_group_may_be_exchanged(pair):
    """As FSDP, Accelerate and fine-tuning callbacks do, which write to param_groups."""
    params = make_params()
    ours, mine, theirs, other = pair.make(params)
    grads = make_grads(params, 5)
    for opt, known in ((ours, mine), (theirs, other)):
        step_object(opt, grads[:2])
        known[1] = torch.nn.Parameter(known[1].detach() + 1)
        opt.param_groups[0]["params"] = list(known)
        step_object(opt, grads[2:3])
        opt.param_groups[0]["params"].reverse()
        step_object(opt, [list(g.values())[::-1] for g in grads[3:]])
    assert_close(copy_of(mine), copy_of(other), EXACT)


# ---------------------------------------------------------------- learning rates
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
@every_pair
def test_torchs_schedulers_drive_the_learning_rate(pair, name, as_tensor):
    if name in ("OneCycleLR", "CyclicLR") and pair.name == "SGD":
        pair = pair._replace(hyper={"lr": 0.05, "momentum": 0.9})  # they cycle it, too
    lr = torch.tensor(0.06, dtype=torch.float64) if as_tensor else 0.06
    params = make_params()
    ours, mine, theirs, other = pair.make(params, lr=lr)
    given = ours.param_groups[0]["lr"]
    a, b = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    rates = set()
    for g in make_grads(params, 6):
        for opt, scheduler in ((ours, a), (theirs, b)):
            step_object(opt, [g])
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates.add(float(ours.param_groups[0]["lr"]))
        assert float(ours.param_groups[0]["lr"]) == float(theirs.param_groups[0]["lr"])
        assert_close(copy_of(mine), copy_of(other), 1e-10)
    assert len(rates) > 1
    if as_tensor:
        assert ours.param_groups[0]["lr"] is given


@every_pair
def test_hyperparameters_edited_in_a_group_count_from_the_next_step(pair):
    params = make_params()
    ours, mine, theirs, other = pair.make(params)
    edits = [{"lr": 0.01}, {"weight_decay": 0.5}, {"weight_decay": 0}, {"maximize": True}]
    edits += [{"betas": (0.5, 0.6)}, {"eps": 0.1}, {"betas": [0.8, 0.9]}, {"inside betas": 0.5}]
    edits += [{"momentum": 0.5}, {"momentum": 0}, {"momentum": 0.7}, {"dampening": 0.2}]
    for g, edit in zip(make_grads(params, len(edits)), edits, strict=True):
        for opt in (ours, theirs):
            group = opt.param_groups[0]
            if set(edit) <= set(group):
                group.update(edit)
            elif "inside betas" in edit and "betas" in group:
                group["betas"][0] = edit["inside betas"]  # a list, as one that came through JSON
            step_object(opt, [g])
        assert_close(copy_of(mine), copy_of(other), EXACT)


# ---------------------------------------------------------------- inside torch.compile and autograd
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("pair", some(parameters([*GENERAL[::-1], *DROP_INS])))
def test_step_compiles_into_a_full_graph(pair):
    lr = torch.tensor(0.05, dtype=torch.float64)
    # no 0-dim tensor: torch 2.13 loses writes to these here, its own SGD's as well
    params = {name: p for name, p in make_params().items() if name in ("matrix", "transposed")}
    ours, mine, theirs, other = pair.make(params, lr=lr)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(ours.step, fullgraph=True, backend=counter)
    frames = []
    for i, g in enumerate(make_grads(params, 5)):
        for opt, known in ((ours, mine), (theirs, other)):
            opt.param_groups[0]["lr"].fill_(0.05 / (i + 1))
            for p, x in zip(known, g.values(), strict=True):
                p.grad = x.clone()
        step()
        theirs.step()
        assert_close(copy_of(mine), copy_of(other), 1e-10)
        frames.append(counter.frame_count)
    # the first step makes the state; from the second on there is one graph
    assert frames[1:] == [frames[1]] * 4


# ---------------------------------------------------------------- the recipe
def test_hyperparameters_are_the_recipes_with_its_defaults():
    def recipe(lr, decay=0.5):
        return fo.chain(fo.sgd(lr), fo.params_ema(decay))

    opt = adapters.Optimizer(as_parameters(make_params()), recipe, lr=0.1)
    assert opt.defaults.items() >= {"lr": 0.1, "decay": 0.5}.items()
    group = {k: v for k, v in opt.param_groups[0].items() if k != "params"}
    assert group == {"lr": 0.1, "decay": 0.5}


@every_pair
def test_integer_parameters_raise(pair):
    with pytest.raises(
        TypeError, match=r"parameter '1' has dtype torch.int64; only floating-point"
    ):
        pair.ours([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], **pair.hyper)


@every_pair
def test_a_refused_group_leaves_the_optimizer_as_it_was(pair):
    ours, mine, *_ = pair.make()
    step_object(ours, make_grads(make_params(), 1))
    new = torch.nn.Parameter(torch.zeros(2))
    for group, words in (
        ({"params": [new], "lr": -1.0}, "learning rate"),
        ({"params": [torch.zeros(2, dtype=torch.int64)]}, "int64"),
        ({"params": [mine[0]]}, "more than one parameter group"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            ours.add_param_group(group)
        assert len(ours.param_groups) == 1
    step_object(ours, make_grads(make_params(), 1))
    ours.add_param_group({"params": [new]})
    assert len(ours.param_groups) == 2


def test_named_parameters_keep_their_names():
    model = torch.nn.Linear(2, 1)
    opt = adapters.Optimizer(model.named_parameters(), fo.adamw, compile=False, lr=0.1)
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    model(torch.ones(2)).sum().backward()
    before = copy_of(list(model.parameters()))
    opt.step()
    assert not torch.equal(before[0], model.weight)
    with pytest.raises(TypeError, match="parameter 'index' has dtype"):
        adapters.Optimizer([("index", torch.zeros(1, dtype=torch.int32))], fo.adamw)


@pytest.mark.parametrize("compile", [True, False])
def test_new_names_select_parameters_from_the_next_step_on(compile):
    """Whether the list of names is another one, or was edited."""

    def recipe(lr):
        rates = {"slow": fo.sgd(lr), "fast": fo.sgd(10 * lr)}
        return fo.partition(rates, {"a": "slow", "*": "fast"})

    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    opt = adapters.Optimizer([("a", a), ("b", b)], recipe, compile=compile, lr=1.0)

    def moves():
        before = copy_of([a, b])
        for _ in range(2):
            a.grad, b.grad = torch.ones(2), torch.ones(2)
            opt.step()
        return [(old - p)[0].item() / 2 for p, old in zip((a, b), before, strict=True)]

    assert moves() == [1.0, 10.0]
    opt.param_groups[0]["param_names"] = ["b", "a"]
    assert moves() == [10.0, 1.0]
    opt.param_groups[0]["param_names"][:] = ["a", "b"]
    assert moves() == [1.0, 10.0]


def test_parameters_of_one_name_are_refused_where_a_group_is_one_tree():
    """The tree would have only the last of them, and the others would not move."""
    pairs = [("w", torch.nn.Parameter(torch.ones(2))) for _ in range(2)]
    with pytest.raises(ValueError, match="several parameters of a group are called w, but"):
        adapters.Optimizer(pairs, lambda: fo.keep_snapshots(fo.sgd()))
    adapters.Optimizer(pairs, fo.sgd)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_a_transformation_keeps_stays_as_it_was(set_to_none):
    """Whether the next gradients are new tensors, or are written into the old ones."""

    def init(params):
        return fo.tree.map(torch.zeros_like, params)

    def update(grads, state, params=None):
        return fo.tree.map(lambda g, last: last - g, grads, state), grads

    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.Optimizer([w], lambda: fo.GradientTransformation(init, update))
    for scale in (1.0, 2.0):
        opt.zero_grad(set_to_none)
        (scale * w.sum()).backward()
        opt.step()
    assert_close(w.detach(), -torch.ones(2), 1e-6)


# ---------------------------------------------------------------- inference mode
def looking_ahead(lr):
    return fo.accumulate(fo.lookahead(fo.adamw(lr), 2, 0.5), every=2)


def keeping(lr):
    return fo.keep_snapshots(fo.adamw(lr))


@pytest.mark.parametrize("inside", [{0}, {2}, {3}, {4}, {1, 2, 3, 4}], ids=str)
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("recipe", [fo.adamw, looking_ahead, keeping])
def test_steps_and_loads_in_inference_mode_are_like_others(recipe, compile, inside):
    ends = []
    for modes in (set(), inside):
        params = as_parameters(make_params())
        opt = adapters.Optimizer(params, recipe, compile=compile, lr=0.1)
        for i, grads in enumerate(make_grads(make_params(), 7)):
            late = [None if i == 3 and k == 1 else g for k, g in enumerate(grads.values())]
            with torch.inference_mode(i in modes):
                if i == 4:
                    opt.load_state_dict(opt.state_dict())
                step_object(opt, [late])
        ends.append(copy_of(params))
    assert_same(*ends)


@pytest.mark.parametrize("what", ["parameter '1'", "slot 'exp_avg' of parameter '1'"])
def test_a_tensor_of_inference_mode_is_named_before_anything_moves(what):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    with torch.inference_mode():
        fixed = torch.ones(3)
    if what.startswith("parameter"):
        params[1] = fixed
    opt = adapters.AdamW(params, lr=0.1, compile=False)
    params[0].grad = torch.ones(3)
    opt.step()
    if what.startswith("slot"):
        step_object(opt, [[torch.ones(3)] * 2])
        opt.state[params[1]]["exp_avg"] = fixed
    with torch.inference_mode(not params[1].requires_grad):
        params[1].grad = torch.ones(3)
    before, count = copy_of(params), opt.state[params[0]]["step"].clone()
    with pytest.raises(RuntimeError, match=rf"{what} was made in torch.inference_mode"):
        opt.step()
    assert_same(copy_of(params), before)
    assert_same(opt.state[params[0]]["step"], count)


def test_a_count_that_was_put_in_in_inference_mode_goes_on():
    p = torch.nn.Parameter(torch.ones(3))
    opt = adapters.Optimizer([p], fo.adamw, compile=False, lr=0.1)
    step_object(opt, [[torch.ones(3)]])
    with torch.inference_mode():
        opt.state[p]["step"] = torch.tensor(5.0)
    step_object(opt, [[torch.ones(3)]] * 2)
    assert opt.state[p]["step"].item() == 7


# ---------------------------------------------------------------- numbers of the host
def test_numbers_of_the_cpu_stay_in_their_tensors():
    model = make_model(row("nadam"))
    opt = adapters.NAdam(model.parameters(), lr=0.1, compile=False)
    for x in batches(2):
        backward(model, opt, x)
        opt.step()
    before = [opt.state[p]["mu_product"] for p in model.parameters()]
    backward(model, opt, batches(1)[0])
    opt.step()
    now = [opt.state[p]["mu_product"] for p in model.parameters()]
    assert all(a is b for a, b in zip(now, before, strict=True))
    assert_same(now, [now[0]] * len(now))
