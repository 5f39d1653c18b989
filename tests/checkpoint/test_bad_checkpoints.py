"""Checkpoints that do not fit, sent into everything that loads: one error, and nothing changed."""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import made
import pytest
import torch
from helpers import assert_same, copy_of, step_object
from torch.distributed.checkpoint import state_dict as sd

import functional_optim as fo
from functional_optim import adapters

NAMES = ("body.weight", "body.bias", "head.weight")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(2, 3, dtype=torch.float64)
        self.head = torch.nn.Linear(4, 2, bias=False, dtype=torch.float64)


def smoothed(lr: float) -> Any:
    return fo.flatten(fo.adam(lr))


def fault_tolerant(named: Any) -> Any:
    inner = adapters.NAdam(named, lr=0.05, compile=False)
    return adapters.FaultTolerantOptimizer(fo.replicas.Local(), inner)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda named: adapters.AdamW(named, lr=0.05, compile=False),
    "NAdam": lambda named: adapters.NAdam(named, lr=0.05, compile=False),
    "Optimizer": lambda named: adapters.Optimizer(
        named, lambda lr: fo.chain(fo.nadam(lr), fo.params_ema(0.9)), compile=False, lr=0.05
    ),
    "whole trees": lambda named: adapters.Optimizer(named, smoothed, compile=False, lr=0.05),
    "LBFGS": lambda named: adapters.LBFGS(named, lr=0.05, max_iter=2),
    "GradientFree": lambda named: adapters.GradientFree(
        named, fo.search.snes, population=4, sigma=0.1
    ),
    "FaultTolerant": fault_tolerant,
}
BY_PARAMETER = ("AdamW", "NAdam", "Optimizer", "FaultTolerant")


class Fault(NamedTuple):
    """spoil: from a state dict to what is loaded. words: all in the error. into: which loaders."""

    spoil: Callable[[dict[str, Any]], Any]
    words: tuple[str, ...]
    into: tuple[str, ...] = tuple(LOADERS)
    kind: Any = ValueError


def on_state(change: Callable[[dict[str, Any]], Any], index: int = 2) -> Callable[[Any], Any]:
    """Change the state of one parameter."""

    def spoil(saved: dict[str, Any]) -> dict[str, Any]:
        change(saved["state"][index])
        return saved

    return spoil


def on_groups(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Any], Any]:
    def spoil(saved: dict[str, Any]) -> dict[str, Any]:
        change(saved["param_groups"])
        return saved

    return spoil


def rename(group: dict[str, Any], names: list[str]) -> None:
    group["param_names"] = names


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(copy.deepcopy(values))


def without(name: str) -> Callable[[Any], Any]:
    return lambda saved: {key: x for key, x in saved.items() if key != name}


def of_another(cls: Any, **hyper: Any) -> Callable[[Any], Any]:
    """The checkpoint of another algorithm of torch's over the same model."""

    def spoil(_: Any) -> Any:
        model = Model()
        opt = cls(model.named_parameters(), **hyper)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        return opt.state_dict()

    return spoil


def drop_parameter(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] = groups[0]["params"][:-1]
    groups[0].pop("param_names", None)


INTEGERS = torch.ones(2, 4, dtype=torch.int64)

SLOTS: dict[str, tuple[str, Any, str]] = {
    "transposed": ("exp_avg", torch.zeros(4, 2), "has shape (4, 2), but it needs (2, 4)"),
    "integers": ("exp_avg", INTEGERS, "is a tensor of int64, shape (2, 4), but it needs a float"),
    "a float for a tensor": ("exp_avg", 1.0, ""),
    "a string": ("exp_avg", "x", "is a str"),
    "an array": ("exp_avg", torch.zeros(2, 4).numpy(), "is a numpy array"),
    "a sparse tensor": ("exp_avg", torch.ones(2, 4).to_sparse(), "is a tensor of torch.sparse_coo"),
    "no values": ("exp_avg", torch.empty(2, 4, device="meta"), "is on the meta device"),
    "NaN steps": ("step", torch.tensor(torch.nan), "is nan"),
    "negative steps": ("step", -1.0, "is -1.0"),
    "many steps": ("step", torch.ones(3), "is a"),
    "steps as a word": ("step", "three", "is a str"),
}
"""What stands in the place of a slot or a count, and what is said of it."""


def of_slot(slot: str, value: Any, words: str) -> Fault:
    told = f"{slot} of parameter 'head.weight' {words}"
    return Fault(on_state(put(**{slot: value})), (told,), BY_PARAMETER)


FAULTS: dict[str, Fault] = {
    "a list": Fault(lambda s: [s], ("got a list",), kind=TypeError),
    "a module": Fault(lambda s: Model(), ("got a Model",), kind=TypeError),
    "nothing": Fault(lambda s: None, ("got a NoneType",), kind=TypeError),
    "an empty dict": Fault(lambda s: {}, ("has no 'param_groups'", "it has nothing")),
    "a model's state": Fault(
        lambda s: Model().state_dict(), ("has no 'param_groups'", "body.weight")
    ),
    "flattened": Fault(
        lambda s: {"state.a.step": 1, "param_groups.a.lr": 0.1},
        ("is flattened", "set_optimizer_state_dict, without broadcast_from_rank0"),
    ),
    "no state": Fault(without("state"), ("has no 'state'",)),
    "state as a list": Fault(lambda s: {**s, "state": [1]}, ("'state'", "must be a dict")),
    "state of tensors": Fault(
        lambda s: {**s, "state": {0: torch.ones(1)}}, ("'state'", "dict for each parameter")
    ),
    "keys as strings": Fault(
        lambda s: {**s, "state": {str(k): x for k, x in s["state"].items()}},
        ("entries for '0'", "which no group lists", "(0, 1, 2)", "JSON makes strings"),
    ),
    "other indices": Fault(
        lambda s: {**s, "state": {k + 3: x for k, x in s["state"].items()}},
        ("entries for 3", "which no group lists"),
    ),
    "groups as a dict": Fault(
        lambda s: {**s, "param_groups": {"lr": 1}}, ("'param_groups'", "list of dicts")
    ),
    "a group without parameters": Fault(
        on_groups(lambda g: g[0].pop("params")), ("'param_groups'", "have 'params'")
    ),
    "two groups": Fault(
        on_groups(lambda g: g.append(copy.deepcopy(g[0]))),
        ("different number of parameter groups: 2", "has 1"),
    ),
    "fewer parameters": Fault(
        on_groups(drop_parameter), ("group 0 has 2 parameters", "optimizer's has 3")
    ),
    "renamed": Fault(
        on_groups(lambda g: rename(g[0], ["body.weight", "body.bias", "heads.weight"])),
        ("no state is saved for head.weight (near: heads.weight)", "is called heads.weight"),
    ),
    "another model's names": Fault(
        on_groups(lambda g: rename(g[0], ["a", "b", "c"])),
        (
            "saved for body.weight, body.bias, head.weight",
            "called a, b, c",
            "register_load_state_dict_pre_hook",
        ),
    ),
    "reordered": Fault(
        on_groups(lambda g: rename(g[0], ["body.bias", "body.weight", "head.weight"])),
        ("another order", "body.bias was saved instead of body.weight"),
    ),
    "numbers for names": Fault(
        on_groups(lambda g: g[0].update(param_names=[1, 2, 3])), ("must be strings", "1, 2, 3")
    ),
    "of SGD": Fault(
        of_another(torch.optim.SGD, lr=0.1, momentum=0.9), (), ("NAdam", "LBFGS", "GradientFree")
    ),
    "of RMSprop": Fault(
        of_another(torch.optim.RMSprop), ("same kind of optimizer.",), ("AdamW", "Optimizer")
    ),
    "of NAdam": Fault(
        of_another(torch.optim.NAdam), ("'body.weight' has the slots", "mu_product"), ("AdamW",)
    ),
    **{name: of_slot(*row) for name, row in SLOTS.items()},
    "two faults": Fault(
        on_state(put(exp_avg=INTEGERS, exp_avg_sq=torch.zeros(3))),
        ("exp_avg of parameter 'head.weight'", "exp_avg_sq of parameter 'head.weight'"),
        BY_PARAMETER,
    ),
    "a carried tensor": Fault(
        on_state(put(mu_product=torch.ones(2))),
        ("mu_product of parameter 'head.weight'", "one real number"),
        ("NAdam", "Optimizer", "FaultTolerant"),
    ),
    "a vector of another length": Fault(
        on_state(put(**{"slots.exp_avg": torch.zeros(3)}), 0),
        ("slots.exp_avg", "'body.weight'", "has shape (3,), but it needs (17,)"),
        ("whole trees",),
    ),
    "a whole tree's integers": Fault(
        on_state(put(**{"slots.exp_avg": torch.zeros(17, dtype=torch.int64)}), 0),
        ("slots.exp_avg", "'body.weight'", "int64"),
        ("whole trees",),
    ),
    "of AdamW": Fault(of_another(torch.optim.AdamW), (), ("whole trees", "LBFGS", "GradientFree")),
    "a longer direction": Fault(
        on_state(put(d=torch.zeros(9)), 0), ("d has 9 elements", "have 17"), ("LBFGS",)
    ),
    "a number for a direction": Fault(
        on_state(put(d=2.5), 0), ("d is a float, but it needs a tensor",), ("LBFGS",)
    ),
    "a lost count": Fault(
        on_state(lambda s: s.pop("step")), ("'head.weight' has slots, but no step",), ("Optimizer",)
    ),
    "a lost pair": Fault(on_state(lambda s: s["ro"].pop(), 0), ("differ in length",), ("LBFGS",)),
    "a vector for a count": Fault(
        on_state(put(step=torch.ones(3)), 0), ("step",), ("GradientFree",)
    ),
}
ROWS = [
    pytest.param(name, fault, loader, id=f"{loader}-{name}")
    for name, fault in FAULTS.items()
    for loader in fault.into
]


def trained(loader: str, named: bool = True) -> tuple[Any, Model, Any]:
    """An optimizer in mid-run, its model, and a function that goes on for a step."""
    model = Model()
    opt = LOADERS[loader](model.named_parameters() if named else model.parameters())
    go = stepper(loader, opt, model)
    for _ in range(3):
        go()
    return opt, model, go


def stepper(loader: str, opt: Any, model: Model) -> Callable[[], None]:
    def loss() -> Any:
        return sum((p - 1).square().square().sum() for p in model.parameters())

    def closure() -> Any:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    def go() -> None:
        if loader == "GradientFree":
            opt.step(loss)
        elif loader == "LBFGS":
            opt.step(closure)
        else:
            closure()
            opt.step()

    return go


def check_untouched(loader: str, load: Callable[[Any, Model, Any], Any], fault: Fault) -> None:
    opt, model, go = trained(loader)
    _, twin, go_twin = trained(loader)
    before = copy.deepcopy(opt.state_dict())
    state, groups, group = opt.state, opt.param_groups, opt.param_groups[0]
    with pytest.raises(fault.kind) as error:
        load(opt, model, fault.spoil(copy.deepcopy(before)))
    for word in fault.words:
        assert word in str(error.value)
    assert len(str(error.value)) > 20
    assert opt.state is state
    assert opt.param_groups is groups
    assert opt.param_groups[0] is group
    after = opt.state_dict()
    assert_same(after["state"], before["state"])
    assert after["param_groups"] == before["param_groups"]
    for _ in range(2):
        go()
        go_twin()
    assert_same(copy_of(list(model.parameters())), copy_of(list(twin.parameters())))


@pytest.mark.parametrize(("name", "fault", "loader"), ROWS)
def test_a_bad_checkpoint_is_one_error_and_changes_nothing(name, fault, loader):
    check_untouched(loader, lambda opt, model, bad: opt.load_state_dict(bad), fault)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", ["transposed", "integers", "NaN steps", "a string"])
def test_a_bad_checkpoint_by_names_changes_nothing(name, flat):
    """The same through torch.distributed.checkpoint's functions."""
    options = sd.StateDictOptions(flatten_optimizer_state_dict=flat)

    def load(opt: Any, model: Model, bad: Any) -> None:
        if not flat:
            saved = sd.get_optimizer_state_dict(model, opt, options=options)
            state = dict(zip(NAMES, bad["state"].values(), strict=True))
            sd.set_optimizer_state_dict(model, opt, {**saved, "state": state}, options=options)
            return
        saved = sd.get_optimizer_state_dict(model, opt, options=options)
        for key, x in bad["state"][2].items():
            saved[f"state.head.weight.{key}"] = x
        sd.set_optimizer_state_dict(model, opt, saved, options=options)

    check_untouched("AdamW", load, FAULTS[name])


@pytest.mark.parametrize("loader", LOADERS)
def test_a_truncated_file_changes_nothing(loader):
    file = io.BytesIO()
    torch.save(trained(loader)[0].state_dict(), file)

    def load(opt: Any, model: Model, bad: Any) -> None:
        opt.load_state_dict(torch.load(io.BytesIO(file.getvalue()[:-200]), weights_only=True))

    check_untouched(loader, load, Fault(lambda s: s, (), kind=(RuntimeError, ValueError)))


def test_the_place_is_named_where_there_are_no_names():
    opt, *_ = trained("AdamW", named=False)
    bad = FAULTS["transposed"].spoil(copy.deepcopy(opt.state_dict()))
    with pytest.raises(ValueError, match="exp_avg of parameter 2 of group 0 has shape"):
        opt.load_state_dict(bad)


def test_a_long_list_of_faults_is_cut():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(40)]
    opt = adapters.AdamW(params, compile=False)
    step_object(opt, [[torch.ones(2)] * 40])
    bad = copy.deepcopy(opt.state_dict())
    for state in bad["state"].values():
        state["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"(?s)parameter 11 of group 0.*… 28 more") as error:
        opt.load_state_dict(bad)
    assert len(str(error.value).splitlines()) == 15


def test_a_hook_may_translate_a_checkpoint_before_it_is_checked():
    opt, *_ = trained("AdamW")
    foreign = {"optimizer": copy.deepcopy(opt.state_dict())}
    opt.register_load_state_dict_pre_hook(lambda opt, given: given["optimizer"])
    opt.load_state_dict(foreign)
    assert len(opt._optimizer_load_state_dict_pre_hooks) == 1
    with pytest.raises(ValueError, match="different number"):
        opt.load_state_dict({"optimizer": {"state": {}, "param_groups": []}})
    assert len(opt._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize(
    ("loader", "key", "vectors"),
    [("NAdam", "mu_product", False), ("NAdam", "mu_product", True), ("whole trees", "step", False)],
)
def test_counts_as_plain_numbers_or_vectors_of_one_element_are_taken(loader, key, vectors):
    """Numbers as torch.optim.SparseAdam, and torch before 1.12, keep them. Vectors beside counts
    without dimensions, as torch's optimizers take them."""
    opt, model, go = trained(loader)
    saved = copy.deepcopy(opt.state_dict())
    for state in [*saved["state"].values()][: 1 if vectors else None]:
        for name in {key, "step"} & state.keys():
            kind = int if name == "step" else float
            state[name] = state[name].reshape(1) if vectors else kind(state[name])
    opt.load_state_dict(saved)
    other, twin, go_twin = trained(loader)
    go()
    go_twin()
    assert_same(copy_of(list(model.parameters())), copy_of(list(twin.parameters())))
    assert_same([*opt.state.values()], [*other.state.values()])


# ---------------------------------------------------------------- names
def test_names_that_differ_by_a_prefix_only_are_compared():
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    saved = adapters.AdamW([("module.w", a), ("w", b)]).state_dict()
    adapters.AdamW([("module.w", a), ("w", b)]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"another order: module\.w was saved instead of w"):
        adapters.AdamW([("w", b), ("module.w", a)]).load_state_dict(saved)


def test_wrappers_are_ignored_before_and_inside_names():
    """A checkpoint of a model, or of a part of it, that is compiled, recomputed, in DDP or FSDP."""
    opt, *_ = trained("AdamW")
    before = ("_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.")
    inside = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    every = [[prefix + name for name in NAMES] for prefix in before]
    every += [[name.replace(".", f".{part}.") for name in NAMES] for part in inside]
    for names in every:
        saved = copy.deepcopy(opt.state_dict())
        saved["param_groups"][0]["param_names"] = names
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["param_names"] == list(NAMES)
        saved["param_groups"][0]["param_names"] = names[::-1]
        with pytest.raises(ValueError, match="another order"):
            opt.load_state_dict(saved)


def test_names_in_the_place_of_parameters_are_compared():
    """As get_optimizer_state_dict and FSDP.optim_state_dict write them."""
    opt, model, _ = trained("AdamW")
    saved = sd.get_optimizer_state_dict(model, opt)
    saved["param_groups"][0].pop("param_names")
    opt.load_state_dict(saved)
    saved["param_groups"][0]["params"].reverse()
    with pytest.raises(ValueError, match=r"another order: head\.weight was saved instead of"):
        opt.load_state_dict(saved)


def test_an_optimizer_of_a_part_is_loaded_by_the_names_in_the_whole():
    """Its own names are shorter. torch has found each parameter's state before it loads."""
    model = Model()
    unnamed = adapters.AdamW(model.body.parameters(), compile=False)
    named = adapters.AdamW(model.body.named_parameters(), compile=False)
    sd.set_optimizer_state_dict(model, named, sd.get_optimizer_state_dict(model, unnamed))
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


def test_missing_hyperparameters_are_named():
    w = torch.nn.Parameter(torch.ones(2))
    for name, other, missing in (
        ("LevenbergMarquardt", "AdamW", "'damping', 'geodesic', 'linear_solver', 'scaling'"),
        ("GaussNewton", "LevenbergMarquardt", "'lr'"),
    ):
        saved = getattr(adapters, other)([w]).state_dict()
        with pytest.raises(ValueError, match=f"groups have no {missing}, which {name} needs; "):
            getattr(adapters, name)([w]).load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:functional_optim. master_weights")
def test_states_of_different_classes_have_different_keys():
    """So loading tells them apart. Chains may read each other's slots, and under the names of 0.2.0
    `cem` and `snes` both have the mean and the deviation of a distribution, `mezo` and `spsa` the
    weights of directions, which each measurement replaces."""
    classes: dict[tuple[str, ...], set[str]] = {}
    params = {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}
    for tx in made.examples().values():
        if not hasattr(tx, "init"):
            continue
        state = tx.init(params)
        kind = type(state).__name__
        if kind not in ("State", "tuple"):
            keys = tuple(sorted(fo.state_dict(state, params)))
            classes.setdefault(keys, set()).add(kind)
    assert len(classes) > 20
    shared = {frozenset(kinds) for kinds in classes.values() if len(kinds) > 1}
    assert shared == {
        frozenset({"CEMState", "SNESState"}),
        frozenset({"EstimatorState", "SignsState"}),
    }
