"""The text of an optimizer object for `print`: its parameters, their rules and slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from functional_optim import numeric
from functional_optim.adapters.state.names import named
from functional_optim.core.base import GradientTransformation
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.paths import subtree
from functional_optim.tuning.summary import summary_of

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


def text_of_groups(optimizer: OptimizerBase) -> str:
    """Tables of the memory of a step of this optimizer; or the error that it would raise."""
    try:
        with subtree():  # of a parameter only
            return str(summary_of(_parts(optimizer)))
    except (TypeError, ValueError) as error:
        return f"no summary: {error}"


def _parts(optimizer: OptimizerBase) -> Iterator[tuple[str, GradientTransformation, Any]]:
    """Each group with its transformation, by parameters, since several may have the same name."""
    for k, group in enumerate(optimizer.param_groups):
        tx = numeric.trusting(True, optimizer.checked_transform, group)
        label = str(group.get("name", f"group {k}" if len(optimizer.param_groups) > 1 else ""))
        pairs = named(group)
        if isinstance(tx, Leafwise):
            for path, p in pairs:
                yield label, tx, {path: p}
        else:
            yield label, tx, dict(pairs)
