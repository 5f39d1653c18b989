"""`state_dict` and `load_state_dict`: one format for the functional loop, our objects and torch."""

import copy
from types import MappingProxyType

import cases
import combined
import pytest
import search_cases
import torch
from helpers import (
    assert_close,
    assert_same,
    clone,
    forgetting,
    make_grads,
    make_params,
    run,
    step_object,
    through_file,
)
from torch.distributed.checkpoint import state_dict as sd

import functional_optim as fo
from functional_optim import adapters

FLAT = sd.StateDictOptions(flatten_optimizer_state_dict=True)


def resumed_as_if_never_stopped(make, params, grads, **extra):
    """Save in the middle, load in a new transformation, and end with the same bits."""
    half = len(grads) // 2
    middle, state = run(make(), params, grads[:half])
    saved = through_file(fo.state_dict(state, params))
    fresh = make().init(params)
    loaded = fo.load_state_dict(fresh, saved, params)
    assert_same(forgetting(loaded), forgetting(state))
    assert_same(fresh, make().init(params))
    wanted, _ = run(make(), middle, grads[half:], clone(state))
    found, _ = run(make(), middle, grads[half:], loaded)
    assert_same(found, wanted)
    return saved


# ---------------------------------------------------------------- every state, through a file
@pytest.mark.parametrize("case", cases.able(costly=True))
def test_a_recipe_goes_on_bitwise(case):
    params = case.params()
    saved = resumed_as_if_never_stopped(case.tx, params, make_grads(params, 6))
    assert all(key.startswith("state.") for key in saved)
    assert len([key for key in saved if key.endswith(".step")]) == len(params)


WHOLE = {
    "flatten": lambda: fo.flatten(fo.chain(fo.clip_by_global_norm(0.5), fo.adam(0.1))),
    "flatten packed": lambda: fo.flatten(fo.stored(fo.adamw(0.1), "int8", min_size=0)),
    "flatten nothing": lambda: fo.flatten(
        fo.chain(fo.masked(fo.trace(0.9), lambda path, p: p.dim() > 1), fo.scale_by_lr(0.1))
    ),
    "with_schedule": lambda: fo.with_schedule(
        fo.adamw, lr=fo.schedules.linear(0.1, 0.0, 9), betas=(0.8, 0.9)
    ),
    "in parts": lambda: fo.chain(fo.trace(0.9), combined.whole, fo.adamw(0.1)),
    "conditionally": lambda: fo.conditionally_transform(
        fo.chain(combined.whole, fo.sgd(0.1, 0.9)), lambda step: step % 2 == 0
    ),
    "snapshots": lambda: fo.keep_snapshots(fo.nadam(0.1), 2),
    "lookahead": lambda: fo.lookahead(fo.nadam(0.1), 2),
    "accumulate": lambda: fo.accumulate(fo.chain(fo.nadam(0.1), fo.params_ema(0.9)), 2),
    "scale_by_lbfgs": lambda: fo.chain(fo.scale_by_lbfgs(3), fo.scale_by_lr(0.1)),
    "bfloat16 slots": lambda: fo.slot_dtypes(fo.adamw(0.1), exp_avg=torch.bfloat16),
    **{
        kind: lambda kind=kind: fo.stored(fo.adamw(0.1), kind, block_size=16, min_size=0)
        for kind in ("int8", "int4", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    },
    "noise": lambda: fo.chain(fo.add_noise(0.1, 0.5, seed=3), fo.sgd(0.1)),
    "partition": lambda: combined.partitioned(0.1),
    "with norms": lambda: combined.with_norms(0.1),
    "deep": lambda: combined.deep(0.1),
    "local_sgd": lambda: fo.local_sgd(fo.adamw(0.1), every=4),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_state_of_several_parts_goes_on_bitwise(name):
    params = combined.named_params()
    resumed_as_if_never_stopped(WHOLE[name], params, make_grads(params, 6))


@pytest.mark.parametrize("params", [torch.ones(3), [torch.ones(2), {"a": torch.ones(())}]], ids=str)
def test_any_tree_of_parameters_can_be_saved(params):
    grads = [fo.tree.map(torch.ones_like, params)] * 4
    saved = resumed_as_if_never_stopped(lambda: fo.chain(fo.adam(0.1)), params, grads)
    assert ("state.exp_avg" in saved) == isinstance(params, torch.Tensor)


def test_lbfgs_goes_on_bitwise():
    def loss(w):
        return (w["a"] - 1).square().sum() + (w["a"] * w["a"]).square().sum()

    tx = fo.lbfgs(max_iter=2, history_size=3)
    fn = torch.func.grad_and_value(loss)

    def steps(params, state, n):
        for _ in range(n):
            grads, value = fn(params)
            updates, state = tx.update(
                grads, state, params, value=value, value_and_grad=lambda w: fn(w)[::-1]
            )
            params = fo.apply_updates(params, updates)
        return params, state

    params = {"a": torch.tensor([3.0, -2.0], dtype=torch.float64)}
    middle, state = steps(params, tx.init(params), 3)
    loaded = fo.load_state_dict(tx.init(params), through_file(fo.state_dict(state)))
    assert_same(loaded, state)
    assert_same(steps(middle, loaded, 3)[0], steps(middle, state, 3)[0])


def test_estimators_and_replicas_are_saved_by_their_fields():
    params = {"w": torch.ones(2)}
    estimator = fo.spsa(c=0.1)
    _, state = estimator.value_and_grad(lambda w: w["w"].sum())(estimator.init(params, 5), params)
    saved = fo.state_dict(state)
    assert saved.keys() == {"step", "seed", "weights"}
    assert_same(fo.load_state_dict(estimator.init(params, 0), through_file(saved)), state)

    _, inner = run(fo.adamw(0.1), params, [params])
    whole = fo.replicas.ReplicaState(params, inner, {"seed": 3, "seen": torch.tensor(7)})
    saved = fo.state_dict(whole, params)
    assert {"params.w", "state.w.exp_avg", "extra.seed", "extra.seen"} < saved.keys()
    fresh = fo.replicas.ReplicaState(
        {"w": torch.zeros(2)}, fo.adamw(0.1).init(params), {"seed": 0, "seen": torch.tensor(0)}
    )
    loaded = fo.load_state_dict(fresh, through_file(saved), params)
    assert_same(forgetting(loaded), forgetting(whole))


@pytest.mark.parametrize("name", search_cases.CASES)
def test_a_search_goes_on_bitwise(name):
    method, params = search_cases.make(name), search_cases.params()
    state = search_cases.run(method, method.init(params, seed=3), 3)
    loaded = method.init(params, seed=0)
    loaded = fo.load_state_dict(loaded, through_file(fo.state_dict(state, params)), params)
    ends = [forgetting(search_cases.run(method, x, 3)) for x in (loaded, state)]
    assert_same(*ends)


def test_an_ensembles_counts_are_saved_each():
    params = {"w": torch.ones(3, 2)}
    tx = fo.nadam(0.1)
    state = torch.vmap(tx.init)(params)
    update = torch.vmap(tx.update)
    _, state = update(params, state, params)
    loaded = fo.load_state_dict(torch.vmap(tx.init)(params), fo.state_dict(state, params), params)
    assert_same(loaded, state)


def test_a_million_steps_are_kept_exactly():
    params = {"w": torch.ones(2)}
    for count in (2**24, 2**24 + 1, 2**40 + 1):
        state = fo.sgd(0.1).init(params)._replace(step=torch.tensor(count))
        saved = fo.state_dict(state, params)
        assert saved["state.w.step"].dtype is (torch.float32 if count == 2**24 else torch.float64)
        assert fo.load_state_dict(fo.sgd(0.1).init(params), saved, params).step == count


def test_a_loaded_state_shares_no_memory():
    params = {"w": torch.ones(2)}
    _, state = run(fo.adam(0.1), params, [params])
    saved = fo.state_dict(state, params)
    assert saved["state.w.exp_avg"].data_ptr() == state.slots["exp_avg"]["w"].data_ptr()
    loaded = fo.load_state_dict(state, saved, params)
    before = clone(saved)
    fo.compile(fo.adam(0.1), strict=False)(params, loaded, clone(params))
    for x in fo.tree.leaves(loaded):
        x.zero_()
    assert_same(saved, before)


# ---------------------------------------------------------------- across, by names
def module(case):
    return torch.nn.ParameterDict({k: torch.nn.Parameter(p) for k, p in case.filled().items()})


def paths(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def groups(model):
    first, *rest = model.values()
    return [{"params": x} for x in ([first], rest) if x]


MAKERS = {
    "torch": lambda case, model: case.stock(groups(model), **case.hyper),
    "drop-in": lambda case, model: case.drop_in(groups(model), compile=False, **case.hyper),
    "recipe": lambda case, model: adapters.Optimizer(
        groups(model), case.recipe, compile=False, **case.hyper
    ),
}


class Training:
    """Of a module, by an optimizer object or by the functional loop."""

    def __init__(self, form, case, model):
        self.case, self.model = case, model
        self.opt = None if form == "functional" else MAKERS[form](case, model)
        self.state = None if self.opt else case.tx().init(paths(model))

    def go(self, grads):
        if self.opt:
            step_object(self.opt, grads)
            return
        params, self.state = run(self.case.tx(), paths(self.model), grads, self.state)
        for name, p in self.model.items():
            p.data.copy_(params[name])

    def saved(self, options):
        if self.opt:
            return sd.get_optimizer_state_dict(self.model, self.opt, options=options)
        return fo.state_dict(self.state, paths(self.model))

    def load(self, saved, options, step):
        """step: what a functional state is told where the saved one has no counts."""
        if not self.opt:
            self.state = fo.load_state_dict(self.state, saved, paths(self.model), step=step)
            return
        if not any(key.startswith("param_groups") for key in saved):  # of the functional loop
            saved = {**self.saved(FLAT), **saved}
        sd.set_optimizer_state_dict(self.model, self.opt, saved, options=options)


def crossings():
    """Pairs of forms, for one case of each family; between forms for others with one slot, or
    three, too."""
    loops = [pair for form in MAKERS for pair in (("functional", form), (form, "functional"))]
    objects = [("recipe",) * 2, ("drop-in",) * 2, ("torch", "drop-in"), ("drop-in", "torch")]
    for pairs, keep in ((loops, ("sgd-momentum", "adam-amsgrad")), (objects, ())):
        # torch steps with a rate of 0
        for row in cases.able("object", "rest", costly=True, keep=keep):
            case = row.values[0]
            for pair in pairs:
                if case.stock is None and {"torch", "drop-in"} & {*pair}:
                    continue
                for form, options in {"flat": FLAT, "nested": None}.items():
                    if form == "flat" or pair[0] != "functional":
                        name = "-".join((row.id, *pair, form))
                        yield pytest.param(case, *pair, options, marks=row.marks, id=name)


@pytest.mark.parametrize(("case", "first", "second", "options"), [*crossings()])
def test_a_checkpoint_by_names_goes_on(case, first, second, options):
    model = module(case)
    grads = make_grads(dict(model), 6)
    one = Training(first, case, model)
    if one.opt and second != "functional":
        one.opt.param_groups[0]["lr"] = 0.07
    one.go(grads[:3])
    saved = through_file(one.saved(options))
    other = copy.deepcopy(model)
    two = Training(second, case, other)
    for group in two.opt.param_groups if one.opt and two.opt else ():
        group["lr"] = 0.9  # the checkpoint's rates count
    counts = not one.opt or any("step" in mine for mine in one.opt.state.values())
    two.load(saved, options, None if counts else 3)
    if one.opt and not two.opt and options is FLAT and counts:
        for key, x in fo.state_dict(two.state, paths(other)).items():
            assert_same(x, torch.as_tensor(saved[key]).to(x.dtype))
    one.go(grads[3:])
    two.go(grads[3:])
    rounding = max(1e-10, case.rounding) if "torch" in (first, second) else 1e-12
    assert_close(paths(other), paths(model), 0.0 if first == second else rounding)
    if first == second:
        states = [[x.opt.state.get(p) or None for p in x.model.parameters()] for x in (one, two)]
        assert_same(*states)


@pytest.mark.parametrize("name", ["partitioned", "frozen", "accumulated", "selective", "finite"])
def test_recipes_for_some_leaves_cross_both_ways(name):
    recipe, params = getattr(combined, name), combined.named_params()
    model = torch.nn.Module()
    model.body = torch.nn.ParameterDict({k: params[f"body.{k}"].clone() for k in "bw"})
    model.head = torch.nn.Parameter(params["head"].clone())
    assert {*paths(model)} == {*params}
    grads = make_grads(paths(model), 6)
    opt = adapters.Optimizer(model.named_parameters(), recipe, compile=False, lr=0.1)
    step_object(opt, grads[:2])
    saved, middle = (
        through_file(sd.get_optimizer_state_dict(model, opt, options=FLAT)),
        paths(model),
    )
    state = fo.load_state_dict(recipe(0.1).init(middle), saved, middle)
    end, _ = run(recipe(0.1), middle, grads[2:], state)
    step_object(opt, grads[2:])
    assert_close(paths(model), end, 1e-12)
    for path, p in model.named_parameters():
        p.data.copy_(middle[path])
    back = {**saved, **fo.state_dict(state, middle)}
    sd.set_optimizer_state_dict(model, opt, back, options=FLAT)
    step_object(opt, grads[2:])
    assert_close(paths(model), end, 1e-12)


# ---------------------------------------------------------------- what does not fit
def small():
    params = make_params()
    del params["empty"]
    _, state = run(fo.nadam(0.1), params, make_grads(params, 2))
    return params, fo.state_dict(state, params)


def changed(saved, **values):
    return {**saved, **{f"state.matrix.{name}": x for name, x in values.items()}}


def renamed(saved):
    return {key.replace("vector", "vectors"): x for key, x in saved.items()}


BAD = {
    "a list": (lambda s: list(s), ["got a list"]),
    "a module": (lambda s: torch.nn.Linear(1, 1), ["got a Linear"]),
    "nothing": (lambda s: {}, ["missing: state.cube.step"]),
    "a model": (lambda s: {"a.weight": torch.ones(1)}, ["unexpected: a.weight"]),
    "numbered": (lambda s: {"state": {0: {}}}, ["numbers its parameters"]),
    "renamed": (renamed, ["state.vector.exp_avg (near: state.vectors.exp_avg)"]),
    "transposed": (
        lambda s: changed(s, exp_avg=torch.ones(4, 3)),
        ["state.matrix.exp_avg has shape (4, 3), but it needs (3, 4)"],
    ),
    "integers": (
        lambda s: changed(s, exp_avg=torch.ones(3, 4, dtype=torch.int64)),
        ["state.matrix.exp_avg is a tensor of int64", "but it needs a float"],
    ),
    "a string": (lambda s: changed(s, exp_avg="x"), ["state.matrix.exp_avg is a str"]),
    "another count": (
        lambda s: changed(s, step=torch.tensor(7.0)),
        ["state.matrix.step is 7.0, but 2.0 elsewhere"],
    ),
    "NaN count": (lambda s: changed(s, step=torch.nan), ["state.matrix.step is nan"]),
    "half a step": (lambda s: changed(s, step=1.5), ["is 1.5"]),
    "three counts": (lambda s: changed(s, step=torch.ones(3)), ["one real number"]),
    "another product": (
        lambda s: changed(s, mu_product=torch.tensor(0.5)),
        ["state.matrix.mu_product is 0.5, but 0.2"],
    ),
    "two faults": (
        lambda s: renamed(changed(s, exp_avg=torch.ones(2), step=None)),
        ["matrix.exp_avg has", "matrix.step is a NoneType", "missing", "unexpected"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_error_says_all_that_does_not_fit(name):
    spoil, words = BAD[name]
    kind = TypeError if words[0].startswith("got") else ValueError
    params, saved = small()
    fresh = fo.nadam(0.1).init(params)
    before = clone(fresh)
    with pytest.raises(kind) as error:
        fo.load_state_dict(fresh, spoil(saved), params)
    for word in words:
        assert word in str(error.value)
    assert_same(fresh, before)


def test_another_algorithms_state_is_refused_and_a_part_of_it_can_be_taken():
    params, saved = small()
    with pytest.raises(ValueError, match=r"unexpected: state\.cube\.mu_product"):
        fo.load_state_dict(fo.adam(0.1).init(params), saved, params)
    more = fo.chain(fo.nadam(0.1), fo.params_ema(0.9))
    with pytest.raises(ValueError, match=r"missing: state\.cube\.params_ema.*\n.*strict=False"):
        fo.load_state_dict(more.init(params), saved, params)
    state = fo.load_state_dict(more.init(params), saved, params, strict=False)
    assert_same(state.slots["exp_avg"]["cube"], saved["state.cube.exp_avg"])
    assert_same(state.slots["params_ema"], params)
    with pytest.raises(ValueError, match="has shape"):
        fo.load_state_dict(
            more.init(params), changed(saved, exp_avg=torch.ones(2)), params, strict=False
        )


def test_a_checkpoint_without_counts_asks_for_them():
    params, _ = small()
    state = fo.sgd(0.1, momentum=0.9).init(params)
    countless = {
        key: x for key, x in fo.state_dict(state, params).items() if not key.endswith("step")
    }
    with pytest.raises(ValueError, match=r"missing: state\.cube\.step.*\n.*steps as step="):
        fo.load_state_dict(state, countless, params)
    assert fo.load_state_dict(state, countless, params, step=5).step == 5


def test_the_parameters_must_be_the_states():
    params = {"w": torch.ones(2)}
    state = fo.adam().init(params)
    with pytest.raises(ValueError, match="pass the parameters, too"):
        fo.state_dict(state)
    with pytest.raises(ValueError, match="params and the slot 'exp_avg'"):
        fo.state_dict(state, {"other": torch.ones(2)})
    with pytest.raises(TypeError, match=r"extra\.0 is a object"):
        fo.state_dict(fo.replicas.ReplicaState(params, state, [object()]), params)


def test_two_values_of_one_key_are_refused():
    params = {"a": torch.ones(2), "a.fast": torch.ones(2)}
    tx = fo.chain(fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.trace(0.9))))
    state = tx.init(params)
    clash = state._replace(
        slots={**state.slots, "momentum_buffer": state.slots["fast.momentum_buffer"]}
    )
    with pytest.raises(ValueError, match=r"kept under 'state\.a\.fast\.momentum_buffer'"):
        fo.state_dict(clash, params)


# ---------------------------------------------------------------- odd trees, dicts and devices
def test_two_parameters_of_one_path_are_refused():
    params = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    state = fo.sgd(0.1, 0.9).init({"a.b": torch.ones(2)})
    slots = state._replace(slots={"momentum_buffer": params})
    for call in (
        lambda: fo.adam(0.1).init(params),
        lambda: fo.state_dict(slots, params),
        lambda: fo.load_state_dict(slots, {}, params),
        lambda: fo.get(slots, "momentum_buffer", "a.b"),
        lambda: dict(fo.tree.items(params)),
    ):
        with pytest.raises(ValueError, match=r"two leaves .* path 'a\.b', .*rename one"):
            call()


@pytest.mark.parametrize("params", [{}, [], {"a": None}], ids=str)
def test_a_model_without_parameters_keeps_its_count(params):
    tx = fo.adam(0.1)
    _, state = tx.update(params, tx.init(params), params)
    saved = through_file(fo.state_dict(state, params))
    assert saved == {"state.step": torch.tensor(1.0)}
    assert_same(fo.load_state_dict(tx.init(params), saved, params), state)


def test_numbers_that_are_nan_are_kept_and_do_not_differ():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = fo.nadam(0.1).init(params)._replace(carry={"mu_product": torch.tensor(torch.nan)})
    saved = through_file(fo.state_dict(state, params))
    assert fo.load_state_dict(state, saved, params).carry["mu_product"].isnan()


def test_any_mapping_is_read_and_values_take_the_dtype_of_the_state():
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    state = fo.adam(0.1).init(params)
    wide = {k: x.to(torch.float64) for k, x in fo.state_dict(state, params).items()}
    nested = {"w": {key.rsplit(".", 1)[1]: x for key, x in wide.items()}}
    for given in (wide, MappingProxyType(wide), {"state": MappingProxyType(nested)}):
        assert_same(fo.load_state_dict(state, given, params), state)


@pytest.mark.parametrize("known", [3.0, None], ids=str)
def test_the_step_that_is_said_counts(known):
    """A partial load of a checkpoint without counts leaves those of the new state, which are 0."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = fo.sgd(0.1, momentum=0.9).init(params)
    saved = {**fo.state_dict(state, params), "state.a.step": known}
    assert fo.load_state_dict(state, saved, params, step=1000).step == 1000
    for bad in (-1, 0.5, torch.nan, "3", True):
        with pytest.raises(ValueError, match="step is"):
            fo.load_state_dict(state, saved, params, step=bad)
    with pytest.raises(ValueError, match=r"pass the number of finished steps as step=…\.|NoneType"):
        fo.load_state_dict(state, saved, params)
