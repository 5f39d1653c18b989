"""Selection of leaves of a tree: by patterns of their paths, by a predicate, or by a tree of
labels.

A path is the keys joined by dots, as in `dict(model.named_parameters())`: `blocks.0.weight`. Keys
of lists and tuples are indices from 0; keys of NamedTuples are field names. The path of a single
tensor is empty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from functional_optim import tree
from functional_optim.core import base
from functional_optim.core.calls import takes
from functional_optim.kernels.callers import warn_once

Predicate: TypeAlias = "Callable[[str, Any], Any]"
"""From a leaf's path and the leaf to a label or bool."""

Mask: TypeAlias = "str | Collection[str] | Predicate | Any"
"""A selection of leaves: a pattern, patterns (any may match), a predicate, or a tree of bools."""

Labels: TypeAlias = "dict[str, str] | Predicate | Any"
"""A label for each leaf: a dict from patterns to labels (the first that matches), a function from
path and leaf to a label, or a tree of labels."""


class Answers:
    """The label of each leaf.

    known: the valid labels. other: the label of a leaf without a match; None: an error. free:
    patterns that may match no leaf.

    Example::

        >>> from functional_optim.core.paths import Answers
        >>> answers = Answers({"*.bias": "slow", "*": "fast"}, ("slow", "fast"), "labels")
        >>> answers("head.bias", None), answers("head.weight", None)
        ('slow', 'fast')
    """

    def __init__(
        self,
        given: Any,
        known: Iterable[Any],
        what: str,
        other: Any = None,
        free: Collection[str] = ("*",),
    ) -> None:
        self.known = tuple(known)
        self.free = tuple(sorted(free))  # two calls of a recipe are compared, see adapters.state
        self.what = what
        self.other = other
        self.predicate = _checked(given, what) if callable(given) else None
        self.patterns: list[tuple[str, Any]] = []
        if self.predicate is None:
            self.patterns = _patterns(given)
            for pattern, answer in self.patterns:
                self._check(answer, f"the pattern {pattern!r}")

    def __call__(self, path: str, leaf: Any) -> Any:
        if self.predicate is not None:
            answer = self._asked(self.predicate, path, leaf)
            self._check(answer, f"the leaf {path!r}")
            return answer
        for pattern, answer in self.patterns:
            if fits(pattern, path):
                return answer
        if self.other is not None:
            return self.other
        unnamed = path.isdecimal()
        hint = (
            " Parameters without names are numbered: pass model.named_parameters()."
            if unnamed
            else ""
        )
        has = ", ".join([repr(pattern) for pattern, _ in self.patterns]) or "no pattern at all"
        raise ValueError(
            f"{self.what} has no answer for the leaf {path!r}; add a pattern that fits it, such as "
            f"'*' at the end for all others (it has: {has}).{hint}"
        )

    def _asked(self, predicate: Predicate, path: str, leaf: Any) -> Any:
        if torch.compiler.is_compiling():  # which cannot trace a note
            return predicate(path, leaf)
        try:
            return predicate(path, leaf)
        except Exception as error:
            note = f"functional_optim: {self.what} was called with the path {path!r} and the "
            error.add_note(f"{note}parameter, in this order.")
            raise

    @classmethod
    def check_leaves(cls, parts: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Warn, once each, of patterns that match no leaf, which are misspelt or of another model,
        and of those that never decide, because another one always comes first.

        Free patterns may match nothing. A pattern of several objects must match in one of them.

        parts: objects of this class, each with its leaves, by path.
        """
        paths = list(dict.fromkeys([path for _, leaves in parts for path in leaves]))
        for what, pattern in unfit(parts):
            message = (
                f"the pattern {pattern!r} of the {what} matches no leaf; there are {some_of(paths)}"
            )
            warn_once(message, UserWarning)
        for what, pattern, before in _hidden(parts):
            message = (
                f"the pattern {pattern!r} of the {what} decides for no leaf, because {before!r}, "
                f"which stands before it, fits the same leaves; put {pattern!r} first"
            )
            warn_once(message, UserWarning)

    def _check(self, answer: Any, where: str) -> None:
        several = isinstance(answer, torch.Tensor) and answer.numel() != 1
        if several or answer not in self.known:
            raise ValueError(
                f"{self.what} gives {answer!r} for {where}; it must be one of "
                f"{', '.join(map(repr, self.known))}."
            )


def unfit(parts: Sequence[tuple[Answers, Iterable[str]]]) -> list[tuple[str, str]]:
    """Patterns that match no leaf, each once, with their purpose, except for free ones.

    parts: labels, each with the paths of its leaves; a pattern of several must match in one of
    them.
    """
    paths = dict.fromkeys([path for _, leaves in parts for path in leaves])
    known = [(own.what, x) for own, _ in parts for x, _ in own.patterns if x not in own.free]
    return [
        (what, pattern)
        for what, pattern in dict.fromkeys(known)
        if not any(fits(pattern, path) for path in paths)
    ]


def _hidden(parts: Sequence[tuple[Answers, Iterable[str]]]) -> list[tuple[str, str, str]]:
    """Patterns that match leaves but decide for none, with their purpose, and a pattern before
    them that has another answer for one of these leaves."""
    deciding: set[tuple[str, str]] = set()
    others: dict[tuple[str, str], str] = {}
    for own, leaves in parts:
        for path in leaves:
            fitting = [(x, answer) for x, answer in own.patterns if fits(x, path)]
            for pattern, answer in fitting:
                first, chosen = fitting[0]
                if pattern == first:
                    deciding.add((own.what, pattern))
                elif answer != chosen and pattern not in own.free:
                    others.setdefault((own.what, pattern), first)
    return [(*key, first) for key, first in others.items() if key not in deciding]


class Choice(NamedTuple):
    """The leaves with a label."""

    answers: Answers
    answer: Any


_local = threading.local()


@contextmanager
def subtree() -> Iterator[None]:
    """Inside, trees are parts of a tree, so that patterns may match nothing."""
    before, _local.partial = getattr(_local, "partial", False), True
    try:
        yield
    finally:
        _local.partial = before


def check_choices(*groups: tuple[Iterable[Choice], Mapping[str, Any]]) -> None:
    """Check all labels on all leaves, see `Answers.check_leaves`.

    groups: choices with their leaves, by path; for an optimizer object one such pair for each
    parameter group.
    """
    if torch.compiler.is_compiling() or getattr(_local, "partial", False):
        return
    found: dict[type[Answers], dict[tuple[int, int], tuple[Answers, Mapping[str, Any]]]] = {}
    for i, (choices, leaves) in enumerate(groups):
        for answers, _ in choices:
            found.setdefault(type(answers), {})[i, id(answers)] = answers, leaves
    for kind, parts in found.items():
        if any(leaves for _, leaves in parts.values()):
            kind.check_leaves([*parts.values()])


def _checked(predicate: Any, what: str) -> Any:
    """A function of a path and a leaf; TypeError for another function."""
    if not takes(predicate, "", None):
        raise TypeError(
            f"{what} is a function, but not one of a leaf's path and the leaf: it is called for "
            "each leaf, e.g. lambda path, p: p.ndim > 1."
        )
    return predicate


def _no_transformation(what: str, given: Any, example: str) -> None:
    """Raise TypeError for a transformation, which is a NamedTuple, as a tree of answers."""
    if isinstance(given, base.GradientTransformation):
        raise TypeError(
            f"{what} must not be a transformation, but got a {type(given).__name__}; pass e.g. "
            f"{example}."
        )


def masked_by(mask: Mask) -> Choice:
    """The leaves that a mask selects."""
    _no_transformation("a mask", mask, "'*.weight'")
    if mask is None:
        raise TypeError("a mask must not be None; pass '*' to select all leaves.")
    if isinstance(mask, (int, float)) and not isinstance(mask, bool):
        raise TypeError(
            f"a mask is a path pattern, several, a function of path and leaf, or a tree of bools, "
            f"but got {mask!r}."
        )
    if isinstance(mask, str):
        mask = (mask,)
    if isinstance(mask, (list, tuple, set, frozenset)) and all(isinstance(x, str) for x in mask):
        mask = dict.fromkeys(mask, True)
    return Choice(Answers(mask, (True, False), "mask", other=False), True)


def labelled_by(labels: Labels, known: Iterable[str]) -> Answers:
    """A label for each leaf."""
    _no_transformation("labels", labels, "{'*.bias': 'plain', '*': 'decay'}")
    if labels is None:
        raise TypeError(
            "labels must not be None; pass a dict from path patterns to labels, such as {'*.bias': "
            "'plain', '*': 'decay'}."
        )
    return labels if isinstance(labels, Answers) else Answers(labels, known, "labels")


def some_of(paths: Sequence[str], most: int = 4) -> str:
    """The first of some paths, for an error."""
    return ", ".join(map(repr, paths[:most])) + (", …" if len(paths) > most else "")


def chosen(choices: tuple[Choice, ...], path: str, leaf: Any) -> bool:
    """Whether all of these choices select a leaf."""
    return all(answers(path, leaf) == answer for answers, answer in choices)


def fits(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path or a path above it. `*` matches any characters.

    It uses plain string operations, which torch.compile can trace.

    Example::

        >>> from functional_optim.core.paths import fits
        >>> fits("blocks.*.bias", "blocks.0.bias"), fits("blocks.0", "blocks.0.bias")
        (True, True)
    """
    return _fits(pattern, path) or _fits(f"{pattern}.*", path)


def _fits(pattern: str, path: str) -> bool:
    first, *others = pattern.split("*")
    if not others:
        return path == pattern
    last = others[-1]
    if not path.startswith(first) or len(path) < len(first) + len(last):
        return False
    end = len(path) - len(last)
    if path[end:] != last:
        return False
    at = len(first)
    for part in others[:-1]:
        found = path.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _patterns(given: Any) -> list[tuple[str, Any]]:
    flat = isinstance(given, dict) and all(isinstance(key, str) for key in given)
    if flat and not any(isinstance(x, (dict, list, tuple)) for x in given.values()):
        return list(given.items())
    # a label instead of a tree applies to all of it
    return [(path or "*", answer) for path, answer in tree.items(given)]


class _InBfloat16(Answers):
    """Leaves for which `master_weights` stores more bits: at least one is expected."""

    @classmethod
    def check_leaves(cls, parts: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Warn, once, if there is none."""
        leaves = [p for _, own in parts for p in own.values()]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in leaves})
        if not {"bfloat16", "float16"} & {*dtypes}:  # the latter is refused
            warn_once(
                "master_weights keeps more bits of parameters in bfloat16, but these are in "
                f"{' and '.join(dtypes)}, which are stepped as without it",
                UserWarning,
            )


BFLOAT16 = Choice(_InBfloat16({"*": True}, (True,), "master weights"), True)
