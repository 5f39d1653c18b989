"""Other libraries on the same tensors, where they are installed (`pip install .[peers]`)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import fresh
from pairs import Step, race
from recipes import MATRIX, WHOLE
from rows import Effort, Measured, NotHere, Row
from steps import Build, of, ours, packed
from torch import Tensor
from workloads import BIG, GPT, MLP, SQUARES, WORKLOADS, Workload

import functional_optim as fo
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
    """HeavyBall's optimizer object, which compiles its steps internally and keeps the gradients."""
    library = importlib.import_module("heavyball")
    return library.AdamW(params, **OPTIONS, consume_grad=False).step


def heavyball_matrix(name: str, params: list[Tensor]) -> Step:
    """One of HeavyBall's optimizers for matrices, which keeps the gradients."""
    library = importlib.import_module("heavyball")
    return getattr(library, name)(params, consume_grad=False).step


SAME = {"ScalableShampoo": {"preconditioning_compute_steps": 1, "start_preconditioning_step": 1}}
"""Options with which optimizers do the work of ours: roots in each step, not in every 1000th."""


def pytorch_optimizer(name: str, params: list[Tensor]) -> Step:
    """One of pytorch_optimizer's. Muon and its like ask which parameters they get."""
    given: Any = [{"params": params, "use_muon": True}] if name.endswith("Muon") else params
    options = SAME.get(name, {})
    return getattr(importlib.import_module("pytorch_optimizer"), name)(given, **options).step


def eight_bit(library: str, params: list[Tensor]) -> Step:
    """AdamW with slots of 8 bits, of torchao, which compiles its step, or of bitsandbytes."""
    return importlib.import_module(f"{library}.optim").AdamW8bit(params, **OPTIONS).step


class Peer(NamedTuple):
    """A library's step to compare with ours. library: its distribution. needs: what must be
    installed."""

    library: str
    needs: tuple[str, ...]
    what: str
    theirs: Build
    ours: Build
    workloads: tuple[Workload, ...]
    bars: tuple[float, ...] = ()


def adamw(library: str, theirs: Build, *needs: str) -> Peer:
    mine = ours("AdamW", **OPTIONS)
    return Peer(library, (*needs, library), "AdamW", theirs, mine, (MLP, GPT))


def whole(library: str, name: str, theirs: Callable[[str, list[Tensor]], Step], rule: str) -> Peer:
    """An optimizer that sees whole tensors."""
    what, made = WHOLE[rule]
    workload = SQUARES if rule in MATRIX else GPT
    return Peer(library, (library,), what, partial(theirs, name), of(made), (workload,), (0.5,))


def of_name(name: str, params: list[Tensor]) -> Step:
    """The step of one of our algorithms, with its defaults."""
    return adapters.Optimizer(params, getattr(fo, name)).step


def matrices(library: str, theirs: Build, name: str, bar: float) -> dict[str, Peer]:
    """A matrix optimizer to compare with ours of a name."""
    what = f"`{name}`"
    peer = Peer(library, (library,), what, theirs, partial(of_name, name), (SQUARES,), (bar,))
    return {f"{library}-{name}": peer}


def packed_adamw(library: str) -> dict[str, Peer]:
    """AdamW with slots of 8 bits."""
    theirs, mine = (
        partial(eight_bit, library),
        packed("int8", partial(fo.adamw, betas=(0.9, 0.999), weight_decay=1e-2)),
    )
    peer = Peer(library, (library,), "AdamW, slots in 8 bits", theirs, mine, (BIG,), (0.5,))
    return {f"{library}-adamw8bit": peer}


def heavy(name: str) -> Build:
    return partial(heavyball_matrix, name)


def pytorchs(name: str) -> Build:
    return partial(pytorch_optimizer, name)


PEERS: dict[str, Peer] = {
    "optax": adamw("optax", optax, "jax"),
    "torchopt": adamw("torchopt", torchopt),
    "heavyball": adamw("heavyball", heavyball),
    "heavyball-muon": whole("heavyball", "Muon", heavyball_matrix, "muon"),
    "heavyball-soap": whole("heavyball", "SOAP", heavyball_matrix, "soap"),
    "pytorch_optimizer-lamb": whole("pytorch_optimizer", "Lamb", pytorch_optimizer, "lamb"),
    "pytorch_optimizer-adafactor": whole(
        "pytorch_optimizer", "AdaFactor", pytorch_optimizer, "adafactor"
    ),
    "pytorch_optimizer-muon": whole("pytorch_optimizer", "Muon", pytorch_optimizer, "muon"),
    "pytorch_optimizer-soap": whole("pytorch_optimizer", "SOAP", pytorch_optimizer, "soap"),
    **packed_adamw("torchao"),
    **packed_adamw("bitsandbytes"),
    **matrices("heavyball", heavy("SOAP"), "soap", 0.5),
    **matrices("pytorch_optimizer", pytorchs("SOAP"), "soap", 0.5),
    **matrices("heavyball", heavy("PSGDKron"), "psgd_kron", 0.6),
    **matrices("pytorch_optimizer", pytorchs("Kron"), "psgd_kron", 0.6),
    **matrices("pytorch_optimizer", pytorchs("ScalableShampoo"), "shampoo", 0.6),
    **matrices("pytorch_optimizer", pytorchs("NorMuon"), "normuon", 0.6),
    **matrices("pytorch_optimizer", pytorchs("AdaMuon"), "adamuon", 0.6),
    **matrices("heavyball", heavy("Scion"), "scion", 0.6),
    **matrices("pytorch_optimizer", pytorchs("SCION"), "scion", 0.6),
}


def compare(name: str, workload: str, effort: Effort) -> dict[str, Any]:
    """Ours and a peer's step alternately, in this process."""
    make, peer = WORKLOADS[workload].parameters, PEERS[name]
    theirs = peer.theirs(make(quick=effort.quick))
    found = race(peer.ours(make(quick=effort.quick)), {name: theirs}, effort)
    return {"ours": found.ours, "theirs": found.theirs}


def measure(name: str, workload: str, effort: Effort) -> Measured:
    """The comparison in a separate process: some of the libraries change torch's settings."""
    library, needs, *_ = PEERS[name]
    absent = [x for x in needs if importlib.util.find_spec(x) is None]
    if absent:
        raise NotHere(f"{' and '.join(absent)} cannot be imported here.")
    found = fresh.fresh("peer", name=name, workload=workload, effort=asdict(effort))
    return Measured(found["ours"], found["theirs"], f"{name} {version(library)}")


def rows() -> list[Row]:
    """Each peer on each of its workloads."""
    return [
        Row(
            f"peer-{name}-{own.key}",
            peer.what,
            own.words,
            partial(measure, name, own.key),
            peer.bars,
        )
        for name, peer in PEERS.items()
        for own in peer.workloads
    ]
