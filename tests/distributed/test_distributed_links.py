"""Links on DTensors; gradients still to be added up; how often processes ask each other."""

import functools
from typing import Any

import links
import pytest
import torch
from helpers import assert_close
from ranks import needs_gloo, results, whole
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import functional_optim as fo
from functional_optim import adapters

pytestmark = needs_gloo

STEPS = 2
HOWS = ("update", "object", "compile")
CASES = links.LINKS
SOME = ("l1_ball", "normalize", "orthogonalize")
"""Run in every way."""
RUNS = [(case, how) for how in HOWS for case in CASES if how == "update" or case.name in SOME]


def placement(name, x):
    """How a tensor is divided, by its name: three rows and five entries unevenly."""
    if name.startswith("all") or not x.dim():
        return Replicate()
    return Shard(0 if name.startswith("rows") else x.dim() - 1)


def in_all_ways(tree):
    """A tree that has each tensor three times, to be divided by rows, by columns, and not."""
    ways = ("rows", "columns", "all")
    return {
        f"{way} {name}": x.clone() for way in ways for name, x in tree.items() if name != "cube"
    }


def stepper(recipe, how, params, backend="kernels"):
    """A function of gradients, and of the loss if it is read: a step, and the new parameters."""
    if how == "object":
        params = {n: torch.nn.Parameter(p) for n, p in params.items()}
        opt = adapters.Optimizer(params.items(), recipe, lr=0.1, compile=False)

        def step(grads, **extra):
            for n, p in params.items():
                p.grad = grads[n]
            opt.step(*[lambda loss=loss: loss for loss in extra.values()])
            return {n: p.detach() for n, p in params.items()}

        return step
    tx = recipe(0.1)
    compiled, kept = fo.compile(tx, backend=backend), [params, tx.init(params)]

    def by_functions(grads, **extra):
        if how == "compile":
            kept[:] = compiled(grads, kept[1], kept[0], **extra)
        else:
            updates, kept[1] = tx.update(grads, kept[1], kept[0], **extra)
            kept[0] = fo.apply_updates(kept[0], updates)
        return kept[0]

    return by_functions


def run(case, how, divide):
    """The parameters after all steps."""
    given = [in_all_ways(x) for x in (case.params(), *case.grads(case.params(), STEPS))]
    params, *grads = ({n: divide(n, x) for n, x in tree.items()} for tree in given)
    step = stepper(case.recipe, how, params)
    return [step(g, **case.given(i)) for i, g in enumerate(grads)][-1]


RECIPES = {
    "adamw": fo.adamw,
    "clipped": lambda lr: fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr)),
    "watched": lambda lr: fo.chain(
        fo.monitor({"norm": fo.measures.global_norm, "nans": fo.measures.nan_count}),
        fo.sgd(lambda step: lr / (1 + step), 0.9),
    ),
    "finite": lambda lr: fo.apply_if_finite(fo.adamw(lr), 3),
    "noisy": lambda lr: fo.chain(fo.add_noise(0.1, 0.5, seed=3), fo.sgd(lr)),
}
ALL_REDUCES = {"adamw": 0, "clipped": 1, "watched": 1, "finite": 1}
"""How often a step on shards asks the other process."""
WAYS = {"Shard": Shard(0), "Replicate": Replicate()}
SUMS = [
    *[("clipped", how, way) for how in HOWS for way in WAYS],
    *[("noisy", how, "Shard") for how in HOWS],
]
RECIPES |= {
    "by torch": lambda lr: fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr)),
    "sm3": fo.sm3,
    "adafactor": fo.adafactor,
    "came": fo.came,
    "lamb": fo.lamb,
    "adam_mini": fo.adam_mini,
    "novograd": fo.novograd,
    "shampoo": lambda lr: fo.shampoo(lr, views={"cube": {"kernel": "auto"}}),
}
EMPTY = [
    *[(name, "update") for name in RECIPES if name not in ("clipped", "watched", "finite")],
    *[("sm3", how) for how in ("object", "compile")],
    *[(name, "compile") for name in ("noisy", "by torch")],
]
"""Recipes run on tensors of which one of the processes has nothing."""
ONES = {"rows": (1, 4), "columns": (3, 1), "cube": (1, 2, 3)}


def step_of(name, how, params):
    return stepper(RECIPES[name], how, params, "torch" if name == "by torch" else "kernels")


def matrices(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(3, 2, dtype=torch.float64) for name in ("a", "b")}


def ones(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in ONES.items()}


def with_empty_parts(name, how, divide):
    """The parameters after three steps."""
    params, *grads = ({n: divide(n, x) for n, x in ones(i).items()} for i in range(4))
    step = step_of(name, how, params)
    return {n: whole(p) for n, p in [step(g) for g in grads][-1].items()}


# ---------------------------------------------------------------- in the two processes
def run_divided(case, how, mesh) -> dict[str, Any]:
    end = run(case, how, lambda name, x: distribute_tensor(x, mesh, [placement(name, x)]))
    assert all(p.placements == (placement(name, p),) for name, p in end.items())
    return {name: whole(p) for name, p in end.items()}


def collectives(function, *args):
    """What a call asks of the other process, and its result.

    CommDebugMode is a mode of dispatch, under which steps are made of plain operations.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = function(*args)
    names = [event.name.partition("::") for event in seen.events()]
    return [op for library, _, op in names if library == "c10d"], result


def step_sums(name, how, way, mesh):
    """Gradients that are the parts of a sum; the end, and the collectives of the last step."""
    divide = functools.partial(distribute_tensor, device_mesh=mesh, placements=[WAYS[way]])
    step = step_of(name, how, {n: divide(x) for n, x in matrices(0).items()})
    for i in (1, 2, 3):
        torch.manual_seed(10 + i)
        sign = 1 - 2 * mesh.get_rank()
        grads = {
            n: DTensor.from_local(x / 2 + sign * torch.randn(()), mesh, [Partial()])
            for n, x in matrices(i).items()
        }
        asked, params = collectives(step, grads)
    return {n: whole(p) for n, p in params.items()}, len(asked)


def count(name, how, mesh):
    """The collectives of a step on shards."""
    divide = functools.partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    step = step_of(name, how, {n: divide(x) for n, x in matrices(0).items()})
    for i in (1, 2):
        grads = {n: divide(x) for n, x in matrices(i).items()}
        asked, _ = collectives(step, grads)
    return asked


def divided_by_ones(mesh, name, x):
    return distribute_tensor(x, mesh, [Shard(x.shape.index(1))])


def parts(mesh, folder):
    found = {
        f"link-{case.name}-{how}": functools.partial(run_divided, case, how, mesh)
        for case, how in RUNS
    }
    divide = functools.partial(divided_by_ones, mesh)
    for name, how in EMPTY:
        found[f"empty-{name}-{how}"] = functools.partial(with_empty_parts, name, how, divide)
    for name, how, way in SUMS:
        found[f"sums-{name}-{how}-{way}"] = functools.partial(step_sums, name, how, way, mesh)
    for how in HOWS:
        for name in ALL_REDUCES:
            found[f"count-{name}-{how}"] = functools.partial(count, name, how, mesh)
    return found


# ---------------------------------------------------------------- and in this one
every_how = pytest.mark.parametrize("how", HOWS)


@pytest.mark.parametrize(
    ("case", "how"), [pytest.param(case, how, id=f"{case.name}-{how}") for case, how in RUNS]
)
def test_a_link_steps_shards_as_whole_tensors(case, how, both):
    for mine in results(both, f"link-{case.name}-{how}"):
        assert_close(mine, run(case, "update", lambda name, x: x.clone()), case.rounding)


@pytest.mark.parametrize(("name", "how"), EMPTY)
def test_a_process_that_has_nothing_of_a_tensor_steps_with_the_others(name, how, both):
    expected = with_empty_parts(name, "update", lambda _, x: x)
    for mine in results(both, f"empty-{name}-{how}"):
        assert_close(mine, expected, 1e-9)


@pytest.mark.parametrize(("name", "how", "way"), SUMS)
def test_a_gradient_is_added_up_once(name, how, way, both):
    """One collective for each of two tensors, and one for what is measured of shards."""
    step = step_of(name, "update", matrices(0))
    end = [step(matrices(i)) for i in (1, 2, 3)][-1]
    for mine, asked in results(both, f"sums-{name}-{how}-{way}"):
        assert_close(mine, {n: p.detach() for n, p in end.items()}, 1e-12)
        assert asked == 2 + (ALL_REDUCES.get(name, 0) if way == "Shard" else 0)


@every_how
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_step_on_shards_asks_once_for_each_link_that_measures(name, how, both):
    for asked in results(both, f"count-{name}-{how}"):
        assert asked == ["allreduce_"] * ALL_REDUCES[name]
