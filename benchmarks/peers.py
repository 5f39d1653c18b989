"""Other libraries' AdamW on the same tensors, where they are installed (`pip install .[peers]`)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import fresh
from pairs import Step, race
from rows import Effort, Measured, NotHere, Row
from torch import Tensor
from workloads import GPT, MLP, WORKLOADS

from functional_optim import adapters

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def optax(params: list[Tensor]) -> Step:
    """optax's update and its application in one jax.jit, which may write into the old buffers."""
    jax, library = importlib.import_module("jax"), importlib.import_module("optax")
    tx = library.adamw(1e-3, weight_decay=1e-2)

    def step(arrays: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, arrays)
        return library.apply_updates(arrays, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    grads = [jax.numpy.array(p.grad.numpy()) for p in params if p.grad is not None]
    arrays = [jax.numpy.array(p.detach().numpy()) for p in params]
    state = tx.init(arrays)

    def run() -> None:
        nonlocal arrays, state
        arrays, state = jax.block_until_ready(compiled(arrays, state, grads))

    return run


def torchopt(params: list[Tensor]) -> Step:
    """TorchOpt's optimizer object, with its own C++ operations."""
    library = importlib.import_module("torchopt")
    return library.AdamW(params, **OPTIONS, use_accelerated_op=True).step


def heavyball(params: list[Tensor]) -> Step:
    """HeavyBall's optimizer object, which compiles its steps by itself and keeps the gradients."""
    library = importlib.import_module("heavyball")
    return library.AdamW(params, **OPTIONS, consume_grad=False).step


PEERS: dict[str, tuple[Callable[[list[Tensor]], Step], tuple[str, ...]]] = {
    "optax": (optax, ("jax", "optax")),
    "torchopt": (torchopt, ("torchopt",)),
    "heavyball": (heavyball, ("heavyball",)),
}
"""Each library's step, and what must be installed for it."""


def compare(name: str, workload: str, effort: Effort) -> dict[str, Any]:
    """Ours and a peer's step in turns, in this process."""
    make = WORKLOADS[workload].parameters
    theirs = PEERS[name][0](make(quick=effort.quick))
    mine = adapters.AdamW(make(quick=effort.quick), **OPTIONS).step
    found = race(mine, {name: theirs}, effort)
    return {"ours": found.ours, "theirs": found.theirs}


def measure(name: str, workload: str, effort: Effort) -> Measured:
    """The comparison in a process of its own: some of the libraries change torch's settings."""
    absent = [library for library in PEERS[name][1] if importlib.util.find_spec(library) is None]
    if absent:
        raise NotHere(f"{' and '.join(absent)} cannot be imported here.")
    found = fresh.fresh("peer", name=name, workload=workload, effort=asdict(effort))
    return Measured(found["ours"], found["theirs"], f"{name} {version(name)}")


def rows() -> list[Row]:
    """Each peer on each workload."""
    return [
        Row(f"peer-{name}-{own.key}", "AdamW", own.words, partial(measure, name, own.key))
        for own in (MLP, GPT)
        for name in PEERS
    ]
