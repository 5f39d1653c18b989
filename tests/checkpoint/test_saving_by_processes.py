"""Distributed checkpoints: saved by two processes and loaded by one, and the other way round.

Models are divided by FSDP2. Every process sees the same data, so all end where one process ends.
"""

import functools
from typing import Any

import cases
import processes
import pytest
import torch
from helpers import assert_close, assert_same, forgetting, run
from ranks import needs_gloo
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functional_optim as fo
from functional_optim import adapters

pytestmark = [
    needs_gloo,
    # of a process without a group, which is what this one is
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit"),
]

STEPS = 3


def composed(lr: float) -> Any:
    return cases.composed(lr, 0.5, 0.9)


RECIPES = {
    "composed": composed,
    "partition": lambda lr: fo.partition(
        {"matrix": fo.adamw(lr, weight_decay=0.1), "rest": fo.sgd(lr, momentum=0.9)},
        {"*weight": "matrix", "*": "rest"},
    ),
    # after three steps it is in the middle of an accumulation
    "accumulate": lambda lr: fo.accumulate(fo.chain(fo.clip_by_global_norm(0.5), fo.nadam(lr)), 2),
    "nadam": fo.nadam,
    "asgd": fo.asgd,
    "adafactor": fo.adafactor,
    "lookahead": lambda lr: fo.lookahead(fo.adamw(lr), 2),
}
STOCK = {
    "AdamW": (adapters.AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "NAdam": (adapters.NAdam, torch.optim.NAdam, {}),
    "SGD": (adapters.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
}
LOOPS = {**RECIPES, "AdamW": lambda lr: fo.adamw(lr, weight_decay=0.1, amsgrad=True)}


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator)


def make_model(shard: bool) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
    model = torch.nn.Sequential(*layers).to(torch.float64)
    return fully_shard(model) if shard else model


def whole(tree: Any) -> Any:
    """Plain copies of all tensors, gathered."""
    if isinstance(tree, dict):
        return {key: whole(x) for key, x in tree.items()}
    if isinstance(tree, Tensor):
        tree = tree.full_tensor() if isinstance(tree, DTensor) else tree
        return tree.detach().clone()
    return tree


class Training:
    """Everybody sees the same data, so that any number of processes goes one way.

    form: of the optimizer's checkpoint; "functional" for a loop without one. ours: whether the
    optimizer is ours, or torch's.
    """

    def __init__(self, name: str, form: str, *, shard: bool, ours: bool = True) -> None:
        self.form, self.model = form, make_model(shard)
        params = self.model.parameters()
        self.tx: Any = None
        if form == "functional":
            self.tx = LOOPS[name](0.05)
            self.state = self.tx.init(self.params())
        elif name in RECIPES:
            named = self.model.named_parameters()
            self.opt = adapters.Optimizer(named, RECIPES[name], compile=False, lr=0.05)
        else:
            mine, theirs, hyper = STOCK[name]
            make = functools.partial(mine, compile=False) if ours else theirs
            self.opt = make(params, lr=0.05, **hyper)

    def params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def go(self, first: int, last: int) -> Any:
        for i in range(first, last):
            self.model.zero_grad()
            self.model(data(i)).square().mean().backward()
            if not self.tx:
                self.opt.step()
                continue
            params = self.params()
            grads = {name: p.grad.detach() for name, p in self.model.named_parameters()}
            updates, self.state = self.tx.update(grads, self.state, params)
            for name, p in fo.apply_updates(params, updates).items():
                params[name].copy_(p)
        return self

    def held(self) -> dict[str, Any]:
        if self.tx:
            return {"model": self.params(), "opt": fo.state_dict(self.state, self.params())}
        options = sd.StateDictOptions(flatten_optimizer_state_dict=self.form == "flat")
        opt = sd.get_optimizer_state_dict(self.model, self.opt, options=options)
        return {"model": self.model.state_dict(), "opt": opt}

    def load(self, path: str) -> Any:
        for p in self.params().values():
            p.zero_()
        found = self.held()
        dcp.load(found, checkpoint_id=path)
        self.model.load_state_dict(found["model"])
        if self.tx:
            self.state = fo.load_state_dict(self.state, found["opt"], self.params())
        else:
            options = sd.StateDictOptions(flatten_optimizer_state_dict=self.form == "flat")
            sd.set_optimizer_state_dict(self.model, self.opt, found["opt"], options=options)
        return self

    def end(self) -> dict[str, Tensor]:
        return whole(self.params())


def write(name: str, form: str, path: str, **options: Any) -> Any:
    """Train, save, and go on: where an uninterrupted run ends."""
    run = Training(name, form, **options).go(0, STEPS)
    dcp.save(run.held(), checkpoint_id=path)
    return run.go(STEPS, 2 * STEPS).end()


def read(name: str, form: str, path: str, **options: Any) -> Any:
    """Load what was saved into a new run, and go on."""
    return Training(name, form, **options).load(path).go(STEPS, 2 * STEPS).end()


# ---------------------------------------------------------------- what two processes do
def both_ways(rank: int, folder: str, made: str) -> dict[str, Any]:
    """Write everything, and read it again; read what one process has written, in `made`."""
    found: dict[str, Any] = {}
    for name, form in rows():
        path = f"{folder}/{name}-{form}"
        found[f"{name}-{form}"] = {
            "wanted": write(name, form, path, shard=True),
            "again": read(name, form, path, shard=True),
            "of one": read(name, form, f"{made}/{name}-{form}", shard=True),
        }
    for name in STOCK:
        path = f"{folder}/torch-{name}"
        found[f"torch-{name}"] = {
            "wanted": write(name, "flat", path, shard=True, ours=False),
            "ours": read(name, "flat", path, shard=True),
            "theirs": read(name, "flat", f"{folder}/{name}-flat", shard=True, ours=False),
        }
    torchs = f"{folder}/torch-AdamW"
    found["functional-of-torch"] = read("AdamW", "functional", torchs, shard=True)
    found["functional-of-meta"] = through_meta()
    found["refused"] = [refused(shard) for shard in (True, False)]
    dist.barrier()
    return found


def through_meta() -> list[Any]:
    """A state, and what becomes of one on the meta device that takes its values."""
    params, tx = Training("composed", "functional", shard=True).params(), composed(0.05)
    _, state = tx.update(params, tx.init(params), params)
    hollow = tx.init({name: p.to("meta") for name, p in params.items()})
    loaded = fo.load_state_dict(hollow, fo.state_dict(state, params), params)
    assert [type(x) for x in fo.tree.leaves(loaded.slots)] == [
        type(x) for x in fo.tree.leaves(state.slots)
    ]
    return [whole(loaded.slots), whole(state.slots)]


def refused(shard: bool) -> dict[str, Any]:
    """What is said where the state of an undivided model meets a divided one, or the other way."""
    runs = [Training("nadam", "nested", shard=x).go(0, 1) for x in (shard, shard, not shard)]
    said = "nothing"
    try:
        runs[0].opt.load_state_dict(runs[2].opt.state_dict())
    except ValueError as error:
        said = str(error)
    return {"said": said, "ends": [run.go(1, 2).end() for run in runs[:2]]}


def rows() -> list[tuple[str, str]]:
    """Recipes and forms: flat for one of each kind of state."""
    every = [(name, "nested") for name in (*RECIPES, *STOCK)]
    every += [(name, "functional") for name in RECIPES]
    return [*every, *[(name, "flat") for name in ("composed", "nadam", "adafactor", *STOCK)]]


# ---------------------------------------------------------------- and in this one
EXACT = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(folder):
    """Where one process ends, by row; its checkpoints lie in one/."""
    torch.set_num_threads(1)
    return {
        f"{name}-{form}": write(name, form, f"{folder}/one/{name}-{form}", shard=False)
        for name, form in rows()
    }


@pytest.fixture(scope="module")
def two(folder, alone):
    """What two processes found; their checkpoints lie in two/."""
    return processes.collect(
        2, both_ways, f"{folder}/two", f"{folder}/one", folder=folder / "ranks"
    )


@pytest.mark.parametrize("row", [f"{name}-{form}" for name, form in rows()])
def test_what_one_or_two_saved_two_and_one_resume(row, two, folder, alone):
    """Two what two have saved bit for bit."""
    for mine in two:
        assert_same(mine[row]["again"], mine[row]["wanted"])
        assert_close(mine[row]["of one"], alone[row], EXACT)
    name, form = row.rsplit("-", 1)
    found = read(name, form, f"{folder}/two/{row}", shard=False)
    assert_close(found, two[0][row]["wanted"], EXACT)
    assert_close(found, alone[row], EXACT)


@pytest.mark.parametrize("name", STOCK)
def test_a_sharded_checkpoint_of_torchs_is_ours_and_back(name, two, folder):
    for mine in two:
        found = mine[f"torch-{name}"]
        assert_close(found["ours"], found["wanted"], 1e-10)
        assert_close(found["theirs"], found["wanted"], 1e-10)
    end = read(name, "flat", f"{folder}/two/torch-{name}", shard=False)
    assert_close(end, two[0][f"torch-{name}"]["wanted"], 1e-10)


@pytest.mark.parametrize("name", RECIPES)
def test_the_functional_loop_goes_where_the_object_goes(name, alone):
    assert_close(alone[f"{name}-functional"], alone[f"{name}-nested"], EXACT)


def test_a_sharded_checkpoint_of_torchs_loads_into_a_functional_state(two):
    for mine in two:
        assert_close(mine["functional-of-torch"], mine["torch-AdamW"]["wanted"], 1e-10)


def test_a_divided_state_on_the_meta_device_is_filled(two):
    for mine in two:
        assert_same(*mine["functional-of-meta"])


def test_divided_state_beside_a_whole_parameter_is_refused_by_name(two):
    """And the other way round. The optimizer goes on."""
    for mine in two:
        for row, (kind, own) in zip(
            mine["refused"], [("plain tensor", "DTensor"), ("DTensor", "plain tensor")], strict=True
        ):
            assert f"exp_avg of parameter '0.weight' is a {kind} of shape (7, 4)" in row["said"]
            assert f"but the parameter is a {own}" in row["said"]
            assert "torch.distributed.checkpoint" in row["said"]
            assert_same(*row["ends"])


def test_the_model_moves():
    """Or all of the above would be equal for no reason."""
    run = Training("composed", "nested", shard=False)
    start, moved = run.end(), run.go(0, STEPS).end()
    assert all(not torch.allclose(moved[name], start[name], rtol=1e-4) for name in start)


# ---------------------------------------------------------------- states on the meta device
def on_meta(tree):
    return fo.tree.map(lambda x: x.to("meta"), tree)


def test_a_state_on_the_meta_device_takes_the_values_where_they_are():
    params = {"w": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    tx = fo.chain(fo.nadam(0.1), fo.params_ema(0.9))
    middle, state = run(tx, params, [params] * 2)
    loaded = fo.load_state_dict(tx.init(on_meta(params)), fo.state_dict(state, params), params)
    assert_same(forgetting(loaded), forgetting(state))
    wanted, found = (run(tx, middle, [params], s)[0] for s in (state, loaded))
    assert_same(found, wanted)


def test_what_is_on_the_meta_device_has_no_values():
    params = {"w": torch.ones(2)}
    tx = fo.adam(0.1)
    hollow = tx.init(on_meta(params))
    with pytest.raises(ValueError, match=r"state\.w\.step is on the meta device.*real parameters"):
        fo.state_dict(hollow, params)
    saved = fo.state_dict(tx.init(params), params)
    bad = {**saved, "state.w.exp_avg": saved["state.w.exp_avg"].to("meta")}
    with pytest.raises(ValueError, match=r"state\.w\.exp_avg is on the meta device"):
        fo.load_state_dict(tx.init(params), bad, params)
    bad.pop("state.w.exp_avg")
    with pytest.raises(ValueError, match=r"exp_avg is on the meta device.*none was saved"):
        fo.load_state_dict(hollow, bad, params, strict=False)
