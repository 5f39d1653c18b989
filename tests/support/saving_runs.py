"""Trainings that save and load distributed checkpoints, in one process or in several."""

from __future__ import annotations

from typing import Any

import cases
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functional_optim as fo
from functional_optim import adapters

STEPS = 3


def parted(lr: float) -> Any:
    parts = {"matrix": fo.adamw(lr, weight_decay=0.1), "rest": fo.sgd(lr, momentum=0.9)}
    return fo.partition(parts, {"*weight": "matrix", "*": "rest"})


def accumulated(lr: float) -> Any:
    """After three steps it is in the middle of an accumulation."""
    return fo.accumulate(fo.chain(fo.clip_by_global_norm(0.5), fo.nadam(lr)), 2)


def composed(lr: float) -> Any:
    return cases.composed(lr, 0.5, 0.9)


def ahead(lr: float) -> Any:
    return fo.lookahead(fo.adamw(lr), 2)


RECIPES = {
    "composed": composed,
    "partition": parted,
    "accumulate": accumulated,
    "nadam": fo.nadam,
    "asgd": fo.asgd,
    "adafactor": fo.adafactor,
    "lookahead": ahead,
}
STOCK = {
    "AdamW": (adapters.AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "NAdam": (adapters.NAdam, torch.optim.NAdam, {}),
    "SGD": (adapters.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
}
FORMS = ("nested", "flat", "stateful")


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator)


def make_model(shard: bool) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
    model = torch.nn.Sequential(*layers).to(torch.float64)
    return fully_shard(model) if shard else model


def make_optimizer(name: str, model: Any, ours: bool = True) -> torch.optim.Optimizer:
    if name in STOCK:
        mine, theirs, hyper = STOCK[name]
        if ours:
            return mine(model.parameters(), lr=0.05, compile=False, **hyper)
        return theirs(model.parameters(), lr=0.05, **hyper)
    return adapters.Optimizer(model.named_parameters(), RECIPES[name], compile=False, lr=0.05)


def train(model: Any, opt: torch.optim.Optimizer, first: int, last: int) -> None:
    """Everybody sees the same data, so that any number of processes goes one way."""
    for i in range(first, last):
        opt.zero_grad()
        model(data(i)).square().mean().backward()
        opt.step()


class AppState:
    """Model and optimizer as torch's recipe for distributed checkpoints has them."""

    def __init__(self, model: Any, opt: torch.optim.Optimizer) -> None:
        self.model, self.opt = model, opt

    def state_dict(self) -> dict[str, Any]:
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.opt,
            model_state_dict=saved["model"],
            optim_state_dict=saved["opt"],
        )


def held(form: str, model: Any, opt: torch.optim.Optimizer) -> dict[str, Any]:
    if form == "stateful":
        return {"app": AppState(model, opt)}
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    return {
        "model": model.state_dict(),
        "opt": get_optimizer_state_dict(model, opt, options=options),
    }


def save(form: str, model: Any, opt: torch.optim.Optimizer, path: str) -> None:
    dcp.save(held(form, model, opt), checkpoint_id=path)


def load(form: str, model: Any, opt: torch.optim.Optimizer, path: str) -> None:
    found = held(form, model, opt)
    dcp.load(found, checkpoint_id=path)
    if form != "stateful":
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        model.load_state_dict(found["model"])
        set_optimizer_state_dict(model, opt, found["opt"], options=options)


def write(name: str, form: str, path: str, *, shard: bool, ours: bool = True) -> Any:
    """Train, save, and go on: where an uninterrupted run ends."""
    if form == "functional":
        return write_functional(name, path, shard=shard)
    model = make_model(shard)
    opt = make_optimizer(name, model, ours)
    train(model, opt, 0, STEPS)
    save(form, model, opt, path)
    train(model, opt, STEPS, 2 * STEPS)
    return whole(dict(model.named_parameters()))


def read(name: str, form: str, path: str, *, shard: bool, ours: bool = True) -> Any:
    """Load what was saved into a new run, and go on."""
    if form == "functional":
        return read_functional(name, path, shard=shard)
    model = make_model(shard)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    opt = make_optimizer(name, model, ours)
    load(form, model, opt, path)
    train(model, opt, STEPS, 2 * STEPS)
    return whole(dict(model.named_parameters()))


def whole(tree: Any) -> Any:
    """Plain copies of all tensors, gathered."""
    if isinstance(tree, dict):
        return {key: whole(x) for key, x in tree.items()}
    if isinstance(tree, Tensor):
        tree = tree.full_tensor() if isinstance(tree, DTensor) else tree
        return tree.detach().clone()
    return tree


# ---------------------------------------------------------------- the functional loop


def gradients(model: Any, params: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """Those of a model that may be sharded, at given parameters."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params[name])
    model.zero_grad()
    model(data(i)).square().mean().backward()
    return {name: p.grad.detach() for name, p in model.named_parameters()}


def loop(tx: Any, model: Any, params: Any, state: Any, first: int, last: int) -> Any:
    for i in range(first, last):
        updates, state = tx.update(gradients(model, params, i), state, params)
        params = fo.apply_updates(params, updates)
    return params, state


def copies(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def write_functional(name: str, path: str, *, shard: bool) -> Any:
    model, tx = make_model(shard), RECIPES[name](0.05)
    params = copies(model)
    params, state = loop(tx, model, params, tx.init(params), 0, STEPS)
    dcp.save({"model": params, "opt": fo.state_dict(state, params)}, checkpoint_id=path)
    params, _ = loop(tx, model, params, state, STEPS, 2 * STEPS)
    return whole(params)


def read_functional(name: str, path: str, *, shard: bool) -> Any:
    model, tx = make_model(shard), RECIPES[name](0.05)
    params = copies(model)
    state = tx.init(params)
    found = {"model": params, "opt": fo.state_dict(state, params)}
    dcp.load(found, checkpoint_id=path)
    params = found["model"]
    state = fo.load_state_dict(state, found["opt"], params)
    params, _ = loop(tx, model, params, state, STEPS, 2 * STEPS)
    return whole(params)


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
    found["functional-of-torch"] = read_adamw(f"{folder}/torch-AdamW")
    found["functional-of-meta"] = through_meta()
    found["refused"] = [refused(shard) for shard in (True, False)]
    found["async"] = save_meanwhile(f"{folder}/async")
    dist.barrier()
    return found


def through_meta() -> list[Any]:
    """A state, and what becomes of one on the meta device that takes its values."""
    params = copies(make_model(shard=True))
    tx = composed(0.05)
    _, state = tx.update(params, tx.init(params), params)
    hollow = tx.init({name: p.to("meta") for name, p in params.items()})
    loaded = fo.load_state_dict(hollow, fo.state_dict(state, params), params)
    assert [type(x) for x in fo.tree.leaves(loaded.slots)] == [
        type(x) for x in fo.tree.leaves(state.slots)
    ]
    return [whole(loaded.slots), whole(state.slots)]


def refused(shard: bool) -> dict[str, Any]:
    """What is said where the state of an undivided model meets a divided one, or the other way."""
    model, twin, other = make_model(shard), make_model(shard), make_model(not shard)
    opt, same, source = (make_optimizer("nadam", each) for each in (model, twin, other))
    for each, its in ((model, opt), (twin, same), (other, source)):
        train(each, its, 0, 1)
    said = "nothing"
    try:
        opt.load_state_dict(source.state_dict())
    except ValueError as error:
        said = str(error)
    train(model, opt, 1, 2)
    train(twin, same, 1, 2)
    return {"said": said, "ends": [whole(dict(each.named_parameters())) for each in (model, twin)]}


def rows() -> list[tuple[str, str]]:
    """Recipes and forms: the others than nested and functional for one of each kind of state."""
    every = [(name, "nested") for name in (*RECIPES, *STOCK)]
    every += [(name, "functional") for name in RECIPES]
    some = [(name, form) for name in ("composed", "nadam", "adafactor") for form in FORMS[1:]]
    return [*every, *some, *[(name, "flat") for name in STOCK]]


def read_adamw(path: str) -> Any:
    """torch.optim.AdamW's checkpoint, straight into a functional state."""
    model = make_model(shard=True)
    tx = fo.adamw(0.05, weight_decay=0.1, amsgrad=True)
    params = copies(model)
    state = tx.init(params)
    found = {"model": params, "opt": fo.state_dict(state, params)}
    dcp.load(found, checkpoint_id=path)
    state = fo.load_state_dict(state, found["opt"], params)
    params, _ = loop(tx, model, found["model"], state, STEPS, 2 * STEPS)
    return whole(params)


def save_meanwhile(path: str) -> Any:
    """Save asynchronously and train on at once: the file has what was there at the call.

    The thread that saves has a group of its own: gloo's do not serve two threads at once.
    """
    group = dist.new_group(backend="gloo")
    model = make_model(shard=True)
    opt = make_optimizer("composed", model)
    train(model, opt, 0, STEPS)
    saving = dcp.async_save(held("flat", model, opt), checkpoint_id=path, process_group=group)
    train(model, opt, STEPS, 2 * STEPS)
    saving.result()
    return {
        "wanted": whole(dict(model.named_parameters())),
        "again": read("composed", "flat", path, shard=True),
    }
