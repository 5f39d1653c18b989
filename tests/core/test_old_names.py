"""What was public in version 0.2.0 still works, under its name and with its arguments."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[1] / "support" / "reference" / "names_0_2.json"
NAMES: dict[str, dict[str, list[str]]] = json.loads(RECORDED.read_text())
"""The functions and classes of each module, and their arguments."""


@pytest.mark.parametrize("module", NAMES)
def test_names_and_arguments_are_still_there(module):
    now, missing = importlib.import_module(module), []
    for name, arguments in NAMES[module].items():
        thing = getattr(now, name, None)
        if thing is None:
            missing.append(name)
            continue
        own = inspect.signature(thing).parameters
        if not any(x.kind is x.VAR_KEYWORD for x in own.values()):
            missing += [f"{name}({x}=...)" for x in arguments if x not in own]
    assert missing == []
