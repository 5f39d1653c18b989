"""Writes checkpoints/: what this version saves, for the versions after it to load.

Run `python tests/support/reference/make_checkpoints.py FOLDER` with the version to be kept, and
commit the files. Each holds the state after three steps, the gradients of three more, and the
parameters after those. Those in checkpoints/ are of commit 51bc3e8.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters

STEPS = 3
SHAPES = {"body.weight": (3, 4), "body.bias": (4,), "head.weight": (2, 3)}
LBFGS: dict[str, Any] = {"lr": 0.5, "max_iter": 3, "history_size": 4}
ADAM: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
DROP_INS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {**ADAM, "amsgrad": True},
    "AdamW": ADAM,
    "Adamax": ADAM,
    "NAdam": ADAM,
    "RAdam": ADAM,
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.02},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01},
    "Adadelta": {"lr": 0.5},
    "ASGD": {"lr": 0.1, "t0": 1.0},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
    "SparseAdam": {"lr": 0.02},
}


def recipe(lr: float) -> fo.GradientTransformation:
    """Two kinds of leaves, behind a gate, between two links that see all of them."""
    decayed = fo.adamw(lr, weight_decay=0.1)
    parts = fo.partition({"decay": decayed, "plain": fo.adam(lr)}, {"*bias": "plain", "*": "decay"})
    behind = fo.chain(fo.clip_by_global_norm(1.0), parts, fo.params_ema(0.9))
    return fo.accumulate(behind, every=2)


def functional() -> fo.GradientTransformation:
    """A functional recipe with carried numbers and a schedule."""
    rate = fo.schedules.linear(0.05, 0.01, 10)
    return fo.chain(fo.clip_by_global_norm(1.0), fo.nadam(rate), fo.params_ema(0.9))


def optimizers() -> dict[str, Callable[[list[tuple[str, Tensor]]], Any]]:
    """By the names of their files, how the optimizer objects are made."""

    def drop_in(name: str) -> Callable[[list[tuple[str, Tensor]]], Any]:
        return lambda params: getattr(adapters, name)(params, **DROP_INS[name])

    made = {name: drop_in(name) for name in DROP_INS}
    made["recipe"] = lambda params: adapters.Optimizer(params, recipe, lr=0.02)
    made["LBFGS"] = lambda params: adapters.LBFGS(params, **LBFGS)
    return made


def leaves(name: str) -> dict[str, Tensor]:
    """Parameters that an optimizer takes: for Muon and SparseAdam matrices only."""
    random = torch.Generator().manual_seed(1)
    matrices = name in ("Muon", "SparseAdam")
    shapes = {path: s for path, s in SHAPES.items() if len(s) == 2 or not matrices}
    return {path: torch.randn(shape, generator=random) for path, shape in shapes.items()}


def gradients(name: str, steps: int, seed: int) -> list[dict[str, Tensor]]:
    """Gradients like these parameters."""
    random = torch.Generator().manual_seed(seed)
    like = leaves(name)
    return [
        {path: torch.randn(p.shape, generator=random) for path, p in like.items()}
        for _ in range(steps)
    ]


def go(opt: Any, named: list[tuple[str, Tensor]], grads: list[dict[str, Tensor]]) -> None:
    """Step an optimizer object; L-BFGS goes towards the gradients, as if they were a target."""
    for tree in grads:

        def closure(tree: dict[str, Tensor] = tree) -> Tensor:
            for _, p in named:
                p.grad = None
            loss = sum(((p - tree[path]) ** 2).sum() for path, p in named)
            loss.backward()
            return loss

        if isinstance(opt, torch.optim.LBFGS):
            opt.step(closure)
            continue
        for path, p in named:
            g = tree[path]
            p.grad = g.to_sparse(1) if isinstance(opt, torch.optim.SparseAdam) else g.clone()
        opt.step()


def functional_run(tx: Any, params: Any, state: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Some functional steps."""
    for tree in grads:
        updates, state = tx.update(tree, state, params)
        params = fo.apply_updates(params, updates)
    return params, state


def main(folder: Path) -> None:
    """Write one file for each optimizer object, and one for the functional state."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in optimizers().items():
        named = [(path, torch.nn.Parameter(p)) for path, p in leaves(name).items()]
        opt = make(named)
        go(opt, named, gradients(name, STEPS, seed=2))
        saved = {
            "params": {path: p.detach().clone() for path, p in named},
            "state_dict": opt.state_dict(),
            "grads": gradients(name, STEPS, seed=3),
        }
        torch.save(saved, folder / f"{name}.pt")
        go(opt, named, saved["grads"])
        saved["after"] = {path: p.detach().clone() for path, p in named}
        params, state = saved["params"], torch.load(folder / f"{name}.pt")["state_dict"]
        torch.save({**saved, "params": params, "state_dict": state}, folder / f"{name}.pt")
    tx, params = functional(), leaves("functional")
    params, state = functional_run(tx, params, tx.init(params), gradients("", STEPS, seed=2))
    grads = gradients("", STEPS, seed=3)
    saved = {"params": params, "state_dict": fo.state_dict(state, params), "grads": grads}
    saved["after"], _ = functional_run(tx, params, state, grads)
    torch.save(saved, folder / "functional.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
