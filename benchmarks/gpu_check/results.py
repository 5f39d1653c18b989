"""Checks, their results, and the text of these."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gpu_check.platform import NotHere, Platform

Figures = dict[str, Any]
"""What a check has found, by name: filled in as it goes, so that a failure leaves what there is."""


class Check(NamedTuple):
    """A check. name: its section, and what in it, with slashes between."""

    name: str
    run: Callable[[Platform, Figures], None]

    @property
    def section(self) -> str:
        return self.name.partition("/")[0]


@dataclass
class Outcome:
    """What became of a check. status: "passed", "failed" or "skipped". told: the error's first line
    or the reason why it was skipped. trace: where it failed."""

    name: str
    status: str
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    told: str = ""
    trace: str = ""

    def data(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", {})}


def finite(value: Any) -> Any:
    """A value for a file: JSON has no infinity, so that is a text there."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def expect(condition: bool, text: str) -> None:
    """Fail, with a sentence, unless a condition holds."""
    if not condition:
        raise AssertionError(text)


def at_most(figures: Figures, name: str, value: float, bar: float, *, holds: bool) -> None:
    """Note a figure with its bar. holds: whether a figure above it fails the check."""
    figures[name] = value
    figures[f"{name}, bar"] = f"≤ {bar:g}" if holds else f"≤ {bar:g}, not applied here"
    expect(not holds or value <= bar, f"{name} is {value:.3g}, and must be at most {bar:g}.")


def at_least(figures: Figures, name: str, value: float, bar: float, *, holds: bool) -> None:
    """The same for a figure that must not be lower."""
    figures[name] = value
    figures[f"{name}, bar"] = f"≥ {bar:g}" if holds else f"≥ {bar:g}, not applied here"
    expect(not holds or value >= bar, f"{name} is {value:.3g}, and must be at least {bar:g}.")


def made(check: Check, platform: Platform) -> Outcome:
    """Make a check, whatever happens in it."""
    figures: Figures = {}
    begin = time.perf_counter()
    status, told, trace = "passed", "", ""
    try:
        check.run(platform, figures)
        platform.synchronize()
    except NotHere as reason:
        status, told = "skipped", str(reason)
    except Exception as error:
        status, told, trace = "failed", first_line(error), traceback.format_exc()
    return Outcome(check.name, status, time.perf_counter() - begin, figures, told, trace)


def first_line(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]


FOLDED = ("recipes",)
"""Sections of so many checks that the page has a line for all of a kind, and one for each
failure."""


def page(outcomes: Sequence[Outcome], head: Iterable[str]) -> str:
    """All results on one page."""
    lines = [*head, ""]
    for kind in dict.fromkeys([x.name.rpartition("/")[2] for x in outcomes if _is_folded(x)]):
        lines.append(_of_many(kind, [x for x in outcomes if _is_kind(x, kind)]))
    lines += [_line(x) for x in outcomes if not _is_folded(x) or x.status == "failed"]
    counts = {status: sum([x.status == status for x in outcomes]) for status in STATUSES}
    total = ", ".join([f"{count} {status}" for status, count in counts.items()])
    return "\n".join([*lines, "", f"{total}; {sum([x.seconds for x in outcomes]):.0f} seconds"])


STATUSES = ("passed", "failed", "skipped")


def _is_folded(x: Outcome) -> bool:
    return x.name.partition("/")[0] in FOLDED


def _is_kind(x: Outcome, kind: str) -> bool:
    return _is_folded(x) and x.name.rpartition("/")[2] == kind


def _line(x: Outcome) -> str:
    said = x.told or ", ".join([f"{key} {_figure(value)}" for key, value in x.figures.items()])
    return f"{x.name:<26} {x.status:<8} {x.seconds:6.1f} s  {said[:150]}".rstrip()


def _of_many(kind: str, some: Sequence[Outcome]) -> str:
    """A line for all checks of a kind, with the largest error and the executors."""
    counts = [
        f"{n} {status}" for status in STATUSES if (n := sum([x.status == status for x in some]))
    ]
    errors = {x.name: x.figures["error"] for x in some if "error" in x.figures}
    worst = max(errors, key=lambda name: errors[name], default=None)
    used = [name for x in some for name in dict.fromkeys(x.figures.get("executors", ()))]
    tally = [f"{name} {used.count(name)}" for name in dict.fromkeys(used)]
    said = [", ".join(counts)]
    if worst is not None:
        said.append(f"largest error {errors[worst]:.1e} ({worst.split('/')[1]})")
    said.append(f"executors: {', '.join(tally)}" if tally else "no executors")
    return f"{some[0].name.partition('/')[0]} {kind}: {'; '.join(said)}"


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, dict.fromkeys(value)))
    return str(value)
