"""Choosing leaves of a tree: by patterns of their paths, by a predicate, or by a tree of answers.

A path is the keys joined by dots, as in `dict(model.named_parameters())`: `blocks.0.weight`. What
lists and tuples hold is numbered from 0; what NamedTuples hold is called as their fields. The path
of a lone tensor is empty.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from functional_optim import tree
from functional_optim.kernels.callers import tell_once

Predicate: TypeAlias = "Callable[[str, Any], Any]"
"""From a leaf's path and the leaf to an answer."""

Mask: TypeAlias = "str | Collection[str] | Predicate | Any"
"""A selection of leaves: a pattern, patterns (any may match), a predicate, or a tree of bools."""

Labels: TypeAlias = "dict[str, str] | Predicate | Any"
"""A label for each leaf: a dict from patterns to labels (the first that fits), a function from path
and leaf to a label, or a tree of labels."""


class Answers:
    """What is said of each leaf.

    known: the answers that may be given. other: what is said of a leaf that nothing fits; None: an
    error. free: patterns that may fit no leaf.

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
            answer = self.predicate(path, leaf)
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

    @classmethod
    def check_leaves(cls, parts: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Warn, once each, of patterns that fit no leaf: a misspelling, or another model's names.

        Those that are free may fit nothing. A pattern of several answers must fit in one of them.

        parts: answers of this class, each with the leaves that it is asked about, by path.
        """
        paths = list(dict.fromkeys([path for _, leaves in parts for path in leaves]))
        for what, pattern in unfit(parts):
            message = (
                f"functional_optim: the pattern {pattern!r} of the {what} matches no leaf; there "
                f"are {some_of(paths)}."
            )
            tell_once(message, UserWarning)

    def _check(self, answer: Any, where: str) -> None:
        if answer not in self.known:
            raise ValueError(
                f"{self.what} gives {answer!r} for {where}; it must be one of "
                f"{', '.join(map(repr, self.known))}."
            )


def unfit(parts: Sequence[tuple[Answers, Iterable[str]]]) -> list[tuple[str, str]]:
    """Patterns that fit no leaf, each once, after what they are for, but for those that are free.

    parts: answers, each with the paths of the leaves that it is asked about; a pattern of several
    must fit in one of them.
    """
    paths = dict.fromkeys([path for _, leaves in parts for path in leaves])
    known = [(own.what, x) for own, _ in parts for x, _ in own.patterns if x not in own.free]
    return [
        (what, pattern)
        for what, pattern in dict.fromkeys(known)
        if not any(fits(pattern, path) for path in paths)
    ]


class Choice(NamedTuple):
    """Leaves of which `answers` says `answer`."""

    answers: Answers
    answer: Any


_local = threading.local()


@contextmanager
def partial() -> Iterator[None]:
    """Inside, a tree is known to be a part of one, so that patterns may well fit nothing in it."""
    before, _local.partial = getattr(_local, "partial", False), True
    try:
        yield
    finally:
        _local.partial = before


def check_choices(*groups: tuple[Iterable[Choice], Mapping[str, Any]]) -> None:
    """Let all answers look at all leaves, see `Answers.check_leaves`.

    groups: choices with the leaves that they are asked about, by path; of an optimizer object one
    such pair for each parameter group.
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
    """A function of a path and a leaf, or a TypeError that says so."""
    if not torch.compiler.is_compiling():
        try:
            inspect.signature(predicate).bind("", None)
        except TypeError:
            raise TypeError(
                f"{what} is a function, but not one of a leaf's path and the leaf: it is called "
                "for each leaf, e.g. lambda path, p: p.ndim > 1."
            ) from None
        except ValueError:  # a builtin that does not tell
            pass
    return predicate


def masked_by(mask: Mask) -> Choice:
    """The leaves that a mask selects."""
    if mask is None:
        raise TypeError("a mask must not be None; pass '*' to select all leaves.")
    if isinstance(mask, str):
        mask = (mask,)
    if isinstance(mask, (list, tuple, set, frozenset)) and all(isinstance(x, str) for x in mask):
        mask = dict.fromkeys(mask, True)
    return Choice(Answers(mask, (True, False), "mask", other=False), True)


def labelled_by(labels: Labels, known: Iterable[str]) -> Answers:
    """A label for each leaf."""
    return labels if isinstance(labels, Answers) else Answers(labels, known, "labels")


def some_of(paths: Sequence[str], most: int = 4) -> str:
    """The first of some paths, for an error."""
    return ", ".join(map(repr, paths[:most])) + (", …" if len(paths) > most else "")


def exclusive(a: tuple[Choice, ...], b: tuple[Choice, ...]) -> bool:
    """Can no leaf be chosen by both?"""
    return any(x.answers is y.answers and x.answer != y.answer for x in a for y in b)


def chosen(choices: tuple[Choice, ...], path: str, leaf: Any) -> bool:
    """Whether all of these choices select a leaf."""
    return all(answers(path, leaf) == answer for answers, answer in choices)


def fits(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path or a path above it. `*` matches any characters.

    Plain string operations, so that torch.compile can go through.

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
    # an answer instead of the whole tree is one for all of it
    return [(path or "*", answer) for path, answer in tree.items(given)]


class _InBfloat16(Answers):
    """Leaves of which `master_weights` keeps more bits: there must be one."""

    @classmethod
    def check_leaves(cls, parts: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Warn, once, if there is none."""
        leaves = [p for _, own in parts for p in own.values()]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in leaves})
        if "bfloat16" not in dtypes:
            tell_once(
                "functional_optim: master_weights keeps more bits of parameters in bfloat16, but "
                f"these are in {' and '.join(dtypes)}, which are stepped as without it.",
                UserWarning,
            )


BFLOAT16 = Choice(_InBfloat16({"*": True}, (True,), "master weights"), True)
