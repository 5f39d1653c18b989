"""The optimizer object of Muon and AdamW, which assigns the parameters to groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import functional_optim as fo
from functional_optim.adapters.optimizer import Optimizer
from functional_optim.adapters.state.names import named
from functional_optim.adapters.state.recipes import of_model, with_kernels
from functional_optim.adapters.state.transaction import transaction
from functional_optim.adapters.summary import text_of_groups
from functional_optim.combinators.as_matrix import views_of
from functional_optim.combinators.hidden_matrices import HiddenMatrices
from functional_optim.core.paths import subtree
from functional_optim.tuning.summary import folded, summary

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from functional_optim import numeric
    from functional_optim.adapters.state.storage import Stored
    from functional_optim.algorithms.adam import Betas
    from functional_optim.algorithms.muon import Accumulator, Nesterov
    from functional_optim.combinators.as_matrix import Views
    from functional_optim.core.paths import Mask
    from functional_optim.engine.group import Compile
    from functional_optim.linalg import Coefficients
    from functional_optim.transforms.orthogonal import Scale


def of_one_group(lr: Any, weight_decay: Any, **hyper: Any) -> fo.GradientTransformation:
    """`muon_adamw` for the parameters of a group, which Muon or AdamW trains."""
    return fo.muon_adamw(lr, lr, weight_decay, weight_decay, **hyper)


class MuonAdamW(Optimizer):
    """`functional_optim.muon_adamw` as an optimizer object.

    The parameters become two groups, with `name` `muon` and `adamw` and separate learning rates
    `lr`. torch's schedulers multiply the `lr` of each group, so they change both. `print(opt)`
    shows the parameters of each group, and the size of their state.

    Args:
        params: the model, or its named parameters, such as `model.named_parameters()`, or dicts of
            groups with such. Each group is split in two. Its `lr` and `weight_decay` are those of
            its hidden matrices, `adamw_lr` and `adamw_weight_decay` those of its other parameters;
            in a group without hidden matrices, `lr` and `weight_decay` are AdamW's.
        compile: True (the default) runs compiled kernels, and falls back to the eager rule with a
            warning; False runs eagerly; "strict" raises a RuntimeError at a step that cannot be
            compiled.
        stored: storage format of slots, as in :class:`Optimizer`; None (the default): full
            precision.

        The other arguments are those of :func:`functional_optim.muon_adamw`, with its defaults. All
            except `adamw_lr` and `adamw_weight_decay` become entries of the groups.

    State of each parameter: `step`, and `momentum_buffer`, or `exp_avg` and `exp_avg_sq`.

    Raises:
        TypeError: for parameters without names, and other invalid arguments.
        ValueError: as :func:`functional_optim.muon_adamw`, and for hyperparameters out of range.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import MuonAdamW
        >>> up, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        >>> model = torch.nn.ModuleDict({"up": up, "head": head})
        >>> opt = MuonAdamW(model.named_parameters(), lr=0.02, adamw_lr=1e-3)
        >>> opt
        MuonAdamW (
        muon: 1 parameter, 32 elements, lr=0.02, weight_decay=0.01
            up.weight (8, 4)
        adamw: 3 parameters, 26 elements, lr=0.001, weight_decay=0.01
            up.bias (8,)
            head.weight (2, 8)
            head.bias (2,)
        )
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)
        >>> scheduler.get_last_lr()
        [0.01, 0.0005]
    """

    adamw: dict[str, Any]
    """The hyperparameters of AdamW's groups that differ from those of Muon's."""

    def __init__(
        self, params: ParamsT | torch.nn.Module, lr: numeric.Hyper = 0.02,
        adamw_lr: numeric.Hyper = 3e-4, weight_decay: numeric.Hyper = 0.01,
        adamw_weight_decay: numeric.Hyper = 0.01, momentum: numeric.Hyper = 0.95,
        betas: Betas = (0.9, 0.95), eps: numeric.Hyper = 1e-10, *, nesterov: Nesterov = True,
        ns_coefficients: Coefficients = "jordan", ns_eps: float = 1e-7,
        ns_steps: int = 5, ns_dtype: torch.dtype = torch.bfloat16, scale: Scale = "original",
        accumulator: Accumulator = "ema", muon: Mask = (), adamw: Mask = (),
        views: Views | torch.nn.Module | None = None, compile: Compile = True,
        stored: Stored | None = None,
    ) -> None:  # fmt: skip
        own = ("self", "params", "__class__")
        hyper = {key: x for key, x in locals().items() if key not in ("own", *own)}
        self.adamw = {key: hyper.pop(f"adamw_{key}") for key in ("lr", "weight_decay")}
        tell = HiddenMatrices("MuonAdamW", ("muon", "adamw"), muon, adamw)
        params, hyper = of_model(
            "MuonAdamW", params, of_one_group, hyper, lambda path, p: tell(path, p) == "muon"
        )
        super().__init__(params, of_one_group, **hyper)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group: one of its hidden matrices, and one of its other parameters.

        Args:
            param_group: `params`, with names, and values that differ from the defaults.

        Raises:
            TypeError, ValueError: for parameters or hyperparameters that cannot be used. The
                optimizer is then as it was.
        """
        transaction(self, self._add_parts, with_kernels(param_group))

    def _add_parts(self, group: Any) -> None:
        if not isinstance(group, dict) or isinstance(group.get("params"), set):
            return super().add_param_group(group)  # which raises torch's errors
        pairs = _pairs(group)
        rest = {k: x for k, x in group.items() if k not in ("params", "param_names")}
        own = {name: rest.pop(f"adamw_{name}") for name in self.adamw if f"adamw_{name}" in rest}
        given = {**self.defaults, **rest}
        views = views_of("MuonAdamW", given["views"] or {})
        labels = ("muon", "adamw")
        tell = HiddenMatrices("MuonAdamW", labels, given["muon"], given["adamw"], views)
        paths = named({"params": [p for _, p in pairs], "param_names": [name for name, _ in pairs]})
        found = [tell(path, p) for path, p in paths]
        of_adamw = {**self.adamw, **({} if "muon" in found else rest), **own}
        for label in labels:
            mine = [pair for pair, x in zip(pairs, found, strict=True) if x == label]
            more = of_adamw if label == "adamw" else {}
            name = self._free(f"{rest['name']}.{label}" if "name" in rest else label)
            if mine:
                super().add_param_group({**rest, **more, "params": mine, "name": name})
        return None

    def _free(self, name: str) -> str:
        """A unique name for a group: some loggers use them as keys."""
        taken = {group["name"] for group in self.param_groups}
        each = (name if i == 0 else f"{name}.{i}" for i in range(len(taken) + 1))
        return next(x for x in each if x not in taken)

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            params = named(group)  # several may have the same name
            tx = self.checked_transform(group, in_step=True)
            with subtree():
                rows = [row for path, p in params for row in summary(tx, {path: p}).rows]
            lines.append(self._head(group))
            for row in folded(rows):
                one = row.rows[0]
                lines.append(f"    {row.label} {one.shape}" + (f", {one.view}" if one.view else ""))
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    def __str__(self) -> str:
        heads = [self._head(group) for group in self.param_groups]
        return "\n".join([f"{type(self).__name__} (", *heads, ")", text_of_groups(self)])

    def _head(self, group: dict[str, Any]) -> str:
        """A group in a line: its name, size and rates."""
        params = group["params"]
        count = f"{len(params)} parameter{'s' if len(params) > 1 else ''}"
        elements = f"{sum([p.numel() for p in params]):,} elements"
        rates = ", ".join([f"{key}={_short(group[key])}" for key in self.adamw])
        return f"{group['name']}: {count}, {elements}, {rates}"

    def __getstate__(self) -> dict[str, Any]:
        return {"adamw": self.adamw, **super().__getstate__()}


def _pairs(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names and parameters of a group that a user passes."""
    given = group["params"]
    params: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    if "param_names" in group and len(group["param_names"]) == len(params):
        params = list(zip(group["param_names"], params, strict=True))
    if not all(isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str) for x in params):
        raise TypeError(
            "MuonAdamW assigns parameters by name; pass "
            "model.named_parameters(), or pairs of names and parameters."
        )
    for _, p in params:
        if not isinstance(p, torch.Tensor):
            raise TypeError(
                f"optimizer can only optimize Tensors, but one of the params is {torch.typename(p)}"
            )
    return params


def _short(x: Any) -> str:
    """A hyperparameter in a line: a number, or its type."""
    return f"{float(x):g}" if isinstance(x, (float, int, torch.Tensor)) else repr(x)
