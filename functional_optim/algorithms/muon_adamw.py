"""Muon for the matrices of hidden layers, AdamW for all other parameters.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/, and `MuonWithAuxAdam` of
https://github.com/KellerJordan/Muon, of which the defaults are.
"""

from __future__ import annotations

import torch

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, adamw
from functional_optim.algorithms.muon import Accumulator, Nesterov, muon
from functional_optim.combinators.as_matrix import Views, seen_by_path, views_of
from functional_optim.combinators.hidden_matrices import HiddenMatrices
from functional_optim.combinators.partition import partition
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.paths import Mask
from functional_optim.linalg import Coefficients
from functional_optim.transforms.orthogonal import Scale


@factory
def muon_adamw(
    lr: numeric.Hyper = 0.02,
    adamw_lr: numeric.Hyper = 3e-4,
    weight_decay: numeric.Hyper = 0.01,
    adamw_weight_decay: numeric.Hyper = 0.01,
    momentum: numeric.Hyper = 0.95,
    betas: Betas = (0.9, 0.95),
    eps: numeric.Hyper = 1e-10,
    *,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    ns_eps: float = 1e-7,
    ns_steps: int = 5,
    ns_dtype: torch.dtype = torch.bfloat16,
    scale: Scale = "original",
    accumulator: Accumulator = "ema",
    muon: Mask = (),
    adamw: Mask = (),
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """A recipe for a whole network: `muon` for hidden matrices, `adamw` for all other parameters.

    A parameter's name and shape determine its optimizer. AdamW gets biases, gains and all
    parameters with fewer than two dimensions longer than 1; embeddings (names with `embed`, `emb`,
    `wte`, `wpe`, `token`, `position`); tables of biases and tokens; heads (`head`, `lm_head`,
    `*_head`, and `output`, `classifier`, `score` or `fc` at the top of the model). Muon gets the
    rest; kernels of convolutions, with four or five dimensions, are matrices (out, in · height ·
    width). `views` must describe parameters with three dimensions as kernels or stacks of matrices.
    `summary` shows the assignment.

    Args:
        lr: Muon's learning rate, ≥ 0.
        adamw_lr: AdamW's learning rate, ≥ 0. An LR scheduler of torch changes it in
            `adapters.MuonAdamW`, but not in `adapters.Optimizer(params, muon_adamw)`, where it
            changes `lr` only; there, pass a schedule.
        weight_decay: decoupled decay of hidden matrices, ≥ 0.
        adamw_weight_decay: decay of all other parameters, ≥ 0.
        momentum: decay rate μ of Muon's momentum, ≥ 0.
        betas: decay rates of AdamW's averages, each in [0, 1).
        eps: added to the root of AdamW's second moment, ≥ 0.
        nesterov, ns_coefficients, ns_steps, ns_dtype, scale, accumulator: as in `muon`.
        ns_eps: lower bound of the norm in Newton–Schulz; `eps` of `muon`.
        muon: leaves for Muon, independently of their names: a path pattern, patterns, a function of
            path and leaf, or a tree of bools, as in `masked`. For a branch, it selects the leaves
            with two dimensions or more.
        adamw: leaves for AdamW, in the same form.
        views: from path patterns to arguments of `as_matrix`; the first matching pattern counts:
            `{"*.qkv.weight": {"split": 3}, "*.experts.*": {"stack": True}}`. A `torch.nn.Module` is
            converted by `matrix_views`.

        Hyperparameters may also be 0-dim tensors or schedules. Defaults: those of the article's
            repository, with the decay of its example.

    State: `momentum_buffer` of hidden matrices, `exp_avg` and `exp_avg_sq` of all others, like the
    parameters.

    Raises:
        ValueError: for hyperparameters out of range; from init, for a leaf that both `muon` and
            `adamw` match, a pattern without a match, a tree without a leaf for Muon, parameters
            without names, and one with three dimensions that may be a kernel or a stack.
        TypeError: for an invalid view.
        RuntimeError: from init, for a complex matrix.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.muon_adamw(lr=0.1, adamw_lr=0.01, weight_decay=0.0)
        >>> params = {"up": {"weight": torch.eye(2)}, "head": {"weight": torch.eye(2)}}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> state.slots["exp_avg"]["up"]["weight"], state.slots["momentum_buffer"]["head"]["weight"]
        (None, None)
        >>> [float(updates[name]["weight"][0, 0].abs() > 0.05) for name in ("up", "head")]
        [1.0, 0.0]
    """
    labels = ("muon", "adamw")
    tell = HiddenMatrices("muon_adamw", labels, muon, adamw)
    known = views_of(
        "muon_adamw", {} if views is None else views, lambda path, p: tell(path, p) == "muon"
    )
    choice = HiddenMatrices("muon_adamw", labels, muon, adamw, known)
    hidden = _muon(
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_eps, ns_steps,
        scale=scale, accumulator=accumulator, ns_dtype=ns_dtype,
    )  # fmt: skip
    hidden = seen_by_path(hidden, known) if known.ways else hidden
    return partition(
        {"muon": hidden, "adamw": _adamw(adamw_lr, betas, eps, adamw_weight_decay)}, choice
    )


_muon, _adamw = muon, adamw  # whose names are arguments above
