"""A step that is like the one before passes the files that ARCHITECTURE.md names, and no others."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters

PAGE = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
PACKAGE, ADAPTERS = Path(fo.__file__).parent, Path(adapters.__file__).parent


def passed(step: Callable[[], object]) -> set[str]:
    """The files of the package whose functions run in a step."""
    found: set[Path] = set()

    def note(frame, event, arg):
        if event == "call":
            found.add(Path(frame.f_code.co_filename))

    for _ in range(3):
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    inside = {str(x.relative_to(PACKAGE)) for x in found if PACKAGE in x.parents}
    beside = {f"adapters/{x.relative_to(ADAPTERS)}" for x in found if ADAPTERS in x.parents}
    return {x for x in inside if not x.startswith("adapters/")} | beside


def named(row: str) -> list[str]:
    """The files that a row of the page lists."""
    (line,) = [x for x in PAGE.splitlines() if x.startswith(f"| `{row}` | `")]
    return re.findall(r"`([\w/]+\.py)`", line.split("|")[2])


def parameters() -> list[Tensor]:
    made = [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def test_a_step_of_an_optimizer_object():
    assert passed(adapters.AdamW(parameters(), lr=1e-3).step) == {*named("opt.step()")}


def test_a_compiled_step():
    tx, params = fo.adamw(lr=1e-3), [p.detach() for p in parameters()]
    state, grads, step = tx.init(params), list(map(torch.randn_like, params)), fo.compile(tx)
    (above,) = [x for x in PAGE.splitlines() if x.startswith("| `fo.compile` | `")]
    rest = named("opt.step()")
    start = rest.index(named("fo.compile")[-1])
    assert "as above from `engine/guards.py`" in above
    expected = {*named("fo.compile"), *rest[start:]}
    assert passed(lambda: step(grads, state, params)) == expected
