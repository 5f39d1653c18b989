"""Recipes of matrices, and the four ways in which they step a tree."""

import math
from functools import partial
from typing import Any

import torch
from helpers import clone
from torch import Tensor
from ways import by_function, by_object, by_update

import functional_optim as fo

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
OTHERS: dict[str, Any] = {"AdamMini": (fo.adam_mini, {}), "Adafactor": (fo.adafactor, {})}
OTHERS |= {"CAME": (fo.came, {})}
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


def ended(way: Any, **options: Any) -> Any:
    """Where the parameters end in one of the ways, which writes into copies of them."""
    return lambda tx, params, grads: way(tx, clone(params), clone(grads), **options)[0]


step_update = ended(by_update)
WAYS: dict[str, Any] = {
    **{"update": step_update, "compile": ended(by_function)},
    **{"object": ended(by_object), "eager": ended(by_object, compile=False)},
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
