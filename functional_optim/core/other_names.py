"""Names in other libraries, for hints in errors, and for docs/from_optax.md.

Imported only after an unknown name was used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

TABLE = (files("functional_optim.core") / "other_names.md").read_text("utf-8")
"""The tables of names in the documentation: first the names in the other library, then ours."""

ROW = re.compile(r"^\| (`[^|]*?) \| ([^|]*)", re.MULTILINE)


SCIPY = {
    **dict.fromkeys(("curve_fit", "leastsq", "lsq_linear"), "fo.least_squares, of residuals"),
    **dict.fromkeys(("fsolve", "fixed_point"), "fo.root"),
    **dict.fromkeys(("basinhopping", "shgo"), "fo.minimize with batched=True, from many starts"),
    "differential_evolution": "fo.search.differential_evolution",
    "dual_annealing": "fo.search.annealing",
    **dict.fromkeys(("root_scalar", "minimize_scalar", "linprog", "milp"), "nothing: use scipy"),
}
"""Functions of scipy.optimize."""


TORCH = {
    "clip_grad_norm_": "fo.clip_by_global_norm",
    "clip_grad_value_": "fo.clip_by_value",
    "AveragedModel": "fo.params_ema",
    "GradScaler": "fo.apply_if_finite; torch.amp.GradScaler takes these optimizers, too",
    "StepLR": "fo.schedules.exponential_decay(..., staircase=True)",
    "MultiStepLR": "fo.schedules.piecewise_constant",
    "ConstantLR": "fo.schedules.warmup",
    "LinearLR": "fo.schedules.linear",
    "ExponentialLR": "fo.schedules.exponential_decay",
    "PolynomialLR": "fo.schedules.polynomial",
    "CosineAnnealingLR": "fo.schedules.cosine_decay",
    "CosineAnnealingWarmRestarts": "fo.schedules.sgdr",
    "OneCycleLR": "fo.schedules.cosine_onecycle",
    "SequentialLR": "fo.schedules.join",
    "CyclicLR": "fo.schedules.from_torch",
    "LambdaLR": "nothing: a schedule is a function of the number of finished steps",
    "ReduceLROnPlateau": "fo.reduce_on_plateau",
}
"""Functions and classes around torch's optimizers."""


def hint_for(name: str) -> str:
    """A clause with our name for a name of torch, optax or scipy; "" if unknown."""
    for library, names in (("scipy", SCIPY), ("torch", TORCH)):
        if name in names:
            return f"for {library}'s {name} there is {_full(names[name])}"
    here = _name_for(name)
    return f"for optax's {name} there is {here}" if here else ""


def _name_for(name: str) -> str:
    names, _, _ = TABLE.partition("### Arguments")
    for theirs, ours in _rows(names):
        if name in [x.rpartition(".")[2] for x in theirs]:
            here = _in_marks(ours)
            if len(theirs) == len(here) > 1:
                pairs = zip(theirs, here, strict=True)
                ours = next(y for x, y in pairs if x.rpartition(".")[2] == name)
            return _full(ours.strip())
    return ""


def hint_for_argument(name: str, known: Sequence[str]) -> str:
    """Our name for an argument of a function with the `known` arguments, as the end of a sentence;
    "" if there is none."""
    _, _, arguments = TABLE.partition("### Arguments")
    for theirs, ours in _rows(arguments):
        named = re.findall(r"`(\w+)", ours)
        if name in theirs and (not named or "fo" in named or {*named} & {*known}):
            return _full(ours.strip())
    return ""


def _rows(text: str) -> Iterator[tuple[list[str], str]]:
    for theirs, ours in ROW.findall(text):
        yield _in_marks(theirs), ours


def _in_marks(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _full(text: str) -> str:
    return re.sub(r"\bfo\.", "functional_optim.", text.replace("`", ""))
