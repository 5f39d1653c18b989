"""Trees that are one process's part of a larger one, meshes of two dimensions, and faults."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import pytest
import torch
from helpers import assert_close, assert_same
from helpers import run as by_update
from ranks import needs_gloo, results, whole
from ranks_models import (
    Row,
    alone,
    batches,
    full,
    grouped,
    loss_of,
    new_model,
    part_of,
    train,
    wrapped,
)
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import functional_optim as fo
from functional_optim import adapters

pytestmark = needs_gloo

SHAPES = {"a": (3,), "b": (2, 2), "c": (4,)}
STEPS = 5
OWNERS = {"split": {"a": 0, "b": 0, "c": 1}, "none": dict.fromkeys(SHAPES, 0)}
"""Which process has which leaf; "none": the second one has nothing."""


class Scene(NamedTuple):
    """A recipe of a learning rate. nan: leaf "b" has one in the second step. late: leaf "c" has no
    gradient in the first step."""

    recipe: Callable[[Any], Any]
    nan: bool = False
    late: bool = False


def clip(lr):
    return fo.chain(fo.clip_by_global_norm(0.5), fo.adam(lr))


def parted(lr):
    """Each part has a norm, and numbers that recur, of its own: the second process lacks one."""
    one = fo.chain(fo.clip_by_global_norm(0.3), fo.nadam(lr))
    two = fo.chain(fo.normalize(), fo.monitor({"l1": lambda x: x.abs().sum()}), fo.sgd(lr, 0.9))
    return fo.partition(
        {"one": one, "two": two}, lambda path, p: "one" if p.numel() == 3 else "two"
    )


SCENES = {
    "clip": Scene(clip),
    "finite": Scene(lambda lr: fo.apply_if_finite(clip(lr), 3), nan=True),
    "accumulate": Scene(lambda lr: fo.accumulate(clip(lr), 2, skip_nonfinite=True), nan=True),
    "conditional": Scene(lambda lr: fo.conditionally_mask(clip(lr), lambda step: step % 2 == 1)),
    "partition": Scene(parted),
    "late": Scene(lambda lr: fo.accumulate(clip(lr), 2), late=True),
    "late-parts": Scene(lambda lr: fo.accumulate(parted(lr), 2), late=True),
    "lookahead": Scene(
        lambda lr: fo.chain(fo.clip_by_global_norm(0.5), fo.lookahead(fo.sgd(lr), 3)), late=True
    ),
}
HOWS = ("update", "object", "vmap", "compile", "traced", "traced object")
SOME = {
    "traced": ("clip", "partition"),
    "vmap": ("clip", "finite"),
    "traced object": ("finite", "late-parts"),
}
RUNS = [
    (name, how, owners)
    for how in HOWS
    for name in SOME.get(how, SCENES)
    for owners in (OWNERS if how in ("update", "object", "compile") else ("split",))
]


def tensors(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradients(scene):
    """One process has none in the third step."""
    found = [tensors(i + 1) for i in range(STEPS)]
    found[2] = {"a": found[2]["a"], "b": found[2]["b"], "c": None}
    if scene.late:
        found[0]["c"] = None
    if scene.nan:
        found[1]["b"][0, 0] = torch.nan
    return found


def run(name, how, recipe, keep):
    """The leaves that `keep` names, after all steps."""
    scene = SCENES[name]
    params = {name: x for name, x in tensors(0).items() if name in keep}
    grads = [{n: g for n, g in all_.items() if n in keep} for all_ in gradients(scene)]
    if how in ("object", "traced object"):
        params = {n: torch.nn.Parameter(p) for n, p in params.items()}
        groups = [{"params": list(params.values())}, {"params": []}]
        opt = adapters.Optimizer(groups, recipe, lr=0.1, compile=False)
        step = opt.step if how == "object" else torch.compile(opt.step, backend="eager")
        for g in grads:
            for name, p in params.items():
                p.grad = g[name]
            step()
        return {name: whole(p) for name, p in params.items()}
    if how == "vmap":
        return in_an_ensemble(recipe, params, grads)
    tx = recipe(0.1)
    state = tx.init(params)
    if how == "compile":
        step = fo.compile(tx)
        if name != "finite":  # whose kernels are enough
            step.how = "eager"
        for g in grads:
            params, state = step(g, state, params)
        return params
    update = tx.update
    if how == "traced":
        update = torch.compile(tx.update, fullgraph=True, backend="aot_eager")
    for g in grads:
        updates, state = update(g, state, params)
        params = fo.apply_updates(params, updates)
    return params


def in_an_ensemble(recipe, params, grads):
    """An ensemble of two learning rates; what the second member has in the end."""
    rates = torch.tensor([0.3, 0.1], dtype=torch.float64)
    many = torch.vmap(lambda lr: by_update(recipe(lr), params, grads)[0])(rates)
    return {name: p[1] for name, p in many.items()}


def run_part(name, how, owners):
    keep = [n for n, rank in OWNERS[owners].items() if rank == dist.get_rank()]
    return run(name, how, lambda lr: fo.sharded_over(SCENES[name].recipe(lr)), keep)


def gradient_of_a_norm(mesh):
    """The derivative of a loss that all processes share through a clipping."""

    def loss(g):
        tx = fo.sharded_over(fo.clip_by_global_norm(1.0))
        return tx.update(g, tx.init(g), g)[0].sum()

    x = tensors(0)["a"] if dist.get_rank() == 0 else tensors(0)["c"]
    return torch.func.grad(loss)(x)


# ---------------------------------------------------------------- L-BFGS
def train_lbfgs(search, way=None, mesh=None):
    """Inner products are of the whole model, and all processes take one way. No way: alone."""
    model = new_model() if way is None else wrapped(way, mesh, new_model())
    if search == "ssbroyden":
        opt = adapters.SSBroyden(model.parameters(), max_iter=4)
    else:
        opt = adapters.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    for x in batches(2) if way is None else part_of(way, batches(2)):

        def closure(x=x):
            opt.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            if way == "ddp":  # plain tensors do not tell that there are others
                loss = loss.detach()
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            return loss

        opt.step(closure)
    return full(way, model)


# ---------------------------------------------------------------- meshes of two dimensions
COMPOSED = Row("composed", lambda lr: cases.composed(lr, 0.1, 0.9))


def train_on_two_dimensions(shape):
    """Tensor parallelism along one dimension, FSDP2 along the other: norms of several meshes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = new_model()
    parallelize_module(model[0], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    if shape[0] > 1:
        fully_shard(model, mesh=mesh["dp"])
    opt = adapters.Optimizer(grouped(model), COMPOSED.recipe, lr=0.05, compile=False)
    train(COMPOSED, model, opt, part_of("ddp" if shape[0] > 1 else "tp", batches()))
    return full("tp", model), [str(getattr(p, "placements", None)) for p in model.parameters()]


# ---------------------------------------------------------------- faults
def message(error, *tried):
    """What a call raises; nothing else may come."""
    function, *args = tried
    try:
        function(*args)
    except error as raised:
        return str(raised)
    raise AssertionError("nothing was raised")


def step_faulty(mesh, fault):
    """A step that cannot be; the parameters before and after it, and what it says."""
    other = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "y"))
    start = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    model = torch.nn.ParameterDict({"first": start.clone(), "second": start.clone()})
    opt = adapters.AdamW(model.named_parameters(), lr=0.1)
    for p in model.values():
        p.grad = torch.ones_like(p)
    opt.step()
    before = [whole(p) for p in model.values()]
    p = model["second"]
    if fault == "another mesh":
        p.grad = distribute_tensor(torch.ones(4), other, [Shard(0), Shard(0)])
    elif fault == "plain slot":
        opt.state[p]["exp_avg"] = torch.zeros(2)
    else:
        opt.state[p]["exp_avg"] = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    said = message(ValueError, opt.step)
    counts = [float(opt.state[p]["step"]) for p in model.values()]
    return before, [whole(p) for p in model.values()], said, counts


def faulty_update(mesh):
    p = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    tx = fo.sgd(0.1)
    return {"said": message(ValueError, tx.update, {"w": torch.ones(4)}, tx.init(p), p)}


def refusals(mesh):
    """What parameters of FSDP1 and DTensors are refused for."""
    muon = functools.partial(adapters.Optimizer, recipe=fo.muon)
    clipping = functools.partial(adapters.Optimizer, recipe=clip, lr=0.1)
    marked = functools.partial(
        adapters.Optimizer, recipe=lambda lr: fo.sharded_over(clip(lr)), lr=0.1
    )
    found = {}
    for way in ("fsdp1", "fsdp1-flat"):
        params = list(wrapped(way, mesh, new_model()).named_parameters())
        plain = [p for _, p in params]
        found[way] = {
            "clip": message(ValueError, clipping, params),
            "functional": message(ValueError, clip(0.1).init, dict(params)),
            "adafactor": message(ValueError, adapters.Adafactor, params),
            "muon": message(ValueError, muon, plain),
            "lbfgs": message(ValueError, adapters.LBFGS, plain),
            "sam": message(ValueError, adapters.SAM, plain),
            "residuals": message(ValueError, adapters.LevenbergMarquardt, plain),
        }
    shards = list(wrapped("fsdp2", mesh, new_model()).named_parameters())
    found["fsdp2"] = {"marked": message(ValueError, marked, shards)}
    opt = marked([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
    opt.param_groups[0]["params"][0].grad = torch.ones(2)
    found["recorded"] = message(RuntimeError, make_fx(lambda: opt.step()))
    single = dist.new_group([0])
    if dist.get_rank() == 1:
        tx = fo.sharded_over(fo.clip_by_global_norm(1.0), single)
        w = torch.ones(2)
        found["outside"] = message(RuntimeError, tx.update, w, tx.init(w), w)
    return found


def train_undivided(mesh):
    """FSDP1 that divides nothing: every process measures the whole model by itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    ends = []
    for original in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(
                new_model(),
                device_id=torch.device("cpu"),
                use_orig_params=original,
                sharding_strategy=ShardingStrategy.NO_SHARD,
            )
        groups = [{"params": list(model.named_parameters())}]
        opt = adapters.Optimizer(groups, COMPOSED.recipe, lr=0.05, compile=False)
        train(COMPOSED, model, opt, part_of("ddp", batches()))
        ends.append(full("fsdp1", model))
    return ends


def parts(mesh, folder) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"part-{name}-{how}-{owners}": functools.partial(run_part, name, how, owners)
        for name, how, owners in RUNS
    }
    found["part-gradient"] = lambda: gradient_of_a_norm(mesh)
    for way in ("ddp", "fsdp2", "tp"):
        for search in (None, "strong_wolfe", "ssbroyden"):
            found[f"lbfgs-{way}-{search}"] = functools.partial(train_lbfgs, search, way, mesh)
    for shape in ((1, 2), (2, 1)):
        found[f"mesh-{shape}"] = functools.partial(train_on_two_dimensions, shape)
    for fault in ("another mesh", "plain slot", "short slot"):
        found[fault] = functools.partial(step_faulty, mesh, fault)
    found["faulty update"] = lambda: faulty_update(mesh)
    found["refusals"] = lambda: refusals(mesh)
    found["undivided"] = lambda: train_undivided(mesh)
    return found


# ---------------------------------------------------------------- and in this one
@pytest.mark.parametrize(("name", "how", "owners"), RUNS, ids=lambda x: str(x))
def test_parts_step_as_the_whole(name, how, owners, both):
    """Also where a process has no leaves, no gradient in a step, or a NaN of its own."""
    whole = run(name, how, SCENES[name].recipe, SHAPES)
    ends = results(both, f"part-{name}-{how}-{owners}")
    for rank, end in enumerate(ends):
        assert_close(end, {n: whole[n] for n in end}, 1e-10)
        assert end.keys() == {n for n, owner in OWNERS[owners].items() if owner == rank}


def test_a_gradient_flows_through_the_sum(both):
    """To what each process has, from the sum of all losses."""
    names = ("a", "c")
    whole = {name: tensors(0)[name].requires_grad_() for name in names}
    tx = fo.clip_by_global_norm(1.0)
    sum(u.sum() for u in tx.update(whole, tx.init(whole), whole)[0].values()).backward()
    for name, mine in zip(names, results(both, "part-gradient"), strict=True):
        assert_close(mine, whole[name].grad, 1e-10)


@pytest.mark.parametrize("search", [None, "strong_wolfe", "ssbroyden"])
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_lbfgs_goes_where_one_process_goes(way, search, both):
    for mine in results(both, f"lbfgs-{way}-{search}"):
        assert_close(mine, train_lbfgs(search), 1e-8)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_norms_over_several_meshes_add_up(shape, both):
    end, _ = alone(COMPOSED)
    for mine, placements in results(both, f"mesh-{shape}"):
        assert_close(mine, end, 1e-10)
        assert len(set(placements)) > 1


def test_fsdp1_that_divides_nothing_needs_nothing(both):
    wanted, _ = alone(COMPOSED, one_group=True)
    for ends in results(both, "undivided"):
        assert_close(ends, [wanted] * 2, 1e-10)


FAULTS = {
    "another mesh": ("the gradient of parameter 'second' is a DTensor of shape (4,) on", "(4,)"),
    "plain slot": ("the slot 'exp_avg' of parameter 'second' is a plain tensor of", "(2,)"),
    "short slot": ("the slot 'exp_avg' of parameter 'second' is a DTensor of", "(3,)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_parameter_and_changes_nothing(fault, both):
    for before, after, said, counts in results(both, fault):
        assert_same(after, before)
        assert counts == [1.0, 1.0]
        for words in FAULTS[fault]:
            assert words in said


def test_a_plain_gradient_of_a_shard_is_named(both):
    for mine in results(both, "faulty update"):
        assert "the gradient of parameter 'w' is a plain tensor of shape (4,)" in mine["said"]
        assert "distribute_tensor" in mine["said"]


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1-flat"])
def test_what_fsdp1_has_flattened_is_not_taken_for_the_model(way, both):
    name = {"fsdp1": "_fsdp_wrapped_module.0.", "fsdp1-flat": "_flat_param"}[way]
    for mine in results(both, "refusals"):
        said = mine[way]
        for key in ("clip", "functional"):
            assert "clip_by_global_norm measures the whole model" in said[key]
            assert "fo.sharded_over" in said[key]
            assert name in said[key]
        assert "scale_by_adafactor looks at whole tensors" in said["adafactor"]
        assert "fully_shard" in said["muon"]
        for key in ("lbfgs", "sam", "residuals"):
            assert "inner products over the whole model" in said[key]


def test_marks_are_refused_where_they_would_count_twice_and_outside_of_the_group(both):
    first, second = results(both, "refusals")
    for mine in (first, second):
        assert "leave sharded_over out" in mine["fsdp2"]["marked"]
        assert "parameter '1' has no gradient" in mine["recorded"]
    assert "outside" not in first
    assert "not in the process group" in second["outside"]
    tx, w = fo.sharded_over(fo.clip_by_global_norm(1.0)), torch.ones(2)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        tx.update(w, tx.init(w), w)


@pytest.mark.parametrize("inner", [fo.scale_by_lbfgs(), fo.flatten(fo.adam())])
def test_what_measures_by_itself_is_refused(inner):
    with pytest.raises(TypeError, match="consist of one-tensor rules"):
        fo.sharded_over(inner)
    with pytest.raises(TypeError, match="consist of one-tensor rules"):
        fo.sharded_over(fo.chain(fo.scale_by_adam(), inner))
