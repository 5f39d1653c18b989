"""Recipes of matrices, and the four ways in which they step a tree."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import functional_optim as fo
from functional_optim import adapters

EXACT = torch.float64
NS: dict[str, Any] = {"ns_dtype": EXACT}
OFTEN: dict[str, Any] = {"precondition_frequency": 2}
LOW: dict[str, Any] = {"rank": 2, "update_proj_gap": 3}

MATRICES: dict[str, Any] = {
    "AdaMuon": (fo.adamuon, NS),
    "APOLLO": (fo.apollo, LOW),
    "Dion2": (fo.dion2, NS),
    "GaLore": (fo.galore, LOW),
    "KLSOAP": (fo.kl_soap, {**OFTEN, "normalize_grads": True}),
    "KLShampoo": (fo.kl_shampoo, OFTEN),
    "MuonAdamW": (fo.muon_adamw, NS),
    "NorMuon": (fo.normuon, NS),
    "PSGDKron": (fo.psgd_kron, {"clip_rms": 0.3}),
    "SOAP": (fo.soap, OFTEN),
    "Scion": (fo.scion, NS),
    "Shampoo": (fo.shampoo, {**OFTEN, "grafting": "adam"}),
}
"""Recipes with `views`, by their classes."""
OTHERS: dict[str, Any] = {
    "AdamMini": (fo.adam_mini, {}),
    "Adafactor": (fo.adafactor, {}),
    "CAME": (fo.came, {}),
}
VARIANTS: dict[str, Any] = {
    "SOAP, merged": (fo.soap, {**OFTEN, "merge_dims": True, "max_precond_dim": 9}),
    "SOAP, normalized": (fo.soap, {**OFTEN, "normalize_grads": True}),
    "Shampoo, blocks": (
        fo.shampoo,
        {**OFTEN, "target_parameter_dimensionality": math.inf, "max_preconditioner_dim": 4},
    ),
}
NO_VECTORS = ("AdaMuon", "Dion2", "KLSOAP", "KLShampoo", "NorMuon")


def made(name: str, views: Any = None) -> Any:
    """A recipe of a table, at a rate at which each of them gets down."""
    recipe, hyper = {**MATRICES, **OTHERS, **VARIANTS}[name]
    own = {} if views is None else {"views": views}
    return partial(recipe, 0.01, **hyper, **own)


def step_update(tx: Any, params: Any, grads: Any) -> Any:
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = fo.apply_updates(params, updates)
    return params


def step_compiled(tx: Any, params: Any, grads: Any) -> Any:
    step, state = fo.compile(tx), tx.init(params)
    params = {name: p.clone() for name, p in params.items()}
    for g in grads:
        params, state = step(g, state, params)
    return params


def step_object(tx: Any, params: Any, grads: Any, compile: bool = True) -> Any:
    params = {name: nn.Parameter(p.clone()) for name, p in params.items()}
    opt = adapters.Optimizer(params.items(), lambda: tx, compile=compile)
    for g in grads:
        for name, p in params.items():
            p.grad = g[name].clone()
        opt.step()
    return {name: p.detach() for name, p in params.items()}


WAYS: dict[str, Any] = {
    "update": step_update,
    "compile": step_compiled,
    "object": step_object,
    "eager": partial(step_object, compile=False),
}


def some(shapes: dict[str, tuple[int, ...]], steps: int = 6) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{n: torch.randn(s, dtype=EXACT) for n, s in shapes.items()} for _ in range(1 + steps)]


STACKS = {"experts": (3, 4, 4), "layers": (2, 2, 4, 3)}


def taken_apart(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix of a tree of stacks as a leaf of its own."""
    return {
        f"{name}.{i}": one
        for name, x in tree.items()
        for i, one in enumerate(x.reshape(-1, *x.shape[-2:]))
    }
