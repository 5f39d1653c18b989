"""Every Python example of the README runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
# the blocks use real torch.compile and share names, so they are one test
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


# torch.compile itself warns about its own use of a deprecated module in a fresh process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_readme_examples_run() -> None:
    assert len(BLOCKS) == 6
    names: dict[str, object] = {}
    for i, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, example {i + 1}", "exec"), names)
    assert float(names["loss"]) < 2.0
