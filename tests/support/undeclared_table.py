"""The table of rules without flags: what a rule and a row are, and how rows are added.

The rows themselves are in the modules beside this one, and `undeclared.py` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

import functional_optim as fo

PRODUCTS = 1e-4
"""The tolerance of rules with products or factorisations of matrices."""


class Part(NamedTuple):
    """A rule and what `fo.leafwise` takes with it. known: the library's rule of the same formula.

    where: the tensors on which it acts.
    """

    name: str
    update: Callable[..., Any]
    init: Callable[[Tensor], Any] | None = None
    scalars: Callable[..., Any] | None = None
    reduce: Callable[..., Any] | None = None
    hyper: Mapping[str, Any] | None = None
    carry: Any = None
    known: Callable[[], Any] | None = None
    where: Callable[[str, Tensor], bool] = lambda path, p: True

    def tx(self) -> Any:
        """The transformation, without any flag."""
        if self.known is not None:
            return self.known()
        return fo.leafwise(
            self.init,
            self.update,
            self.scalars,
            reduce=self.reduce,
            hyper=self.hyper,
            carry=self.carry,
            name=self.name,
        )

    def on(self, where: Callable[[str, Tensor], bool]) -> Part:
        """The same for some of the tensors."""
        return self._replace(where=where)


class Row(NamedTuple):
    """A recipe: how it is built, and its rules, in their order, for the naive loop.

    without: the sets of tensors that it does not take. tolerance: relative to the largest element.
    """

    name: str
    build: Callable[[], Any]
    parts: tuple[Part, ...]
    without: frozenset[str] = frozenset()
    tolerance: float = 1e-5


ROWS: dict[str, Row] = {}


def add(row: Row) -> None:
    """Add a row to the table."""
    assert row.name not in ROWS
    ROWS[row.name] = row


def rule(
    *, without: Sequence[str] = (), tolerance: float = 1e-5, **more: Any
) -> Callable[[Callable[..., Any]], Part]:
    """Add a rule to the table, under the name of its `update`."""

    def added(update: Callable[..., Any]) -> Part:
        part = Part(update.__name__, update, **more)
        add(Row(part.name, part.tx, (part,), frozenset(without), tolerance))
        return part

    return added
