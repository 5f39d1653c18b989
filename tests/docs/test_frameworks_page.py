"""The table of frameworks names the versions that are installed for the tests."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
import snippets

PAGE = (snippets.ROOT / "docs" / "frameworks.md").read_text()
CONSTRAINTS = dict(
    line.split("==")
    for line in (snippets.ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line
)
ROWS = re.findall(r"^\| ([^|]+) \| `([\w-]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
ASKED = ["plain loops", "AMP", "torch.compile", "DDP", "FSDP2", "tensor parallel", "ZeRO", "FSDP1"]
ASKED += ["distributed checkpoint", "Lightning", "Accelerate", "transformers", "ignite", "torchft"]


def test_every_framework_has_a_row():
    assert set(ASKED) <= {name for name, *_ in ROWS}
    assert len(ROWS) == sum(line.startswith("| ") for line in PAGE.splitlines()) - 2


@pytest.mark.parametrize(("name", "package", "version"), ROWS)
def test_a_row_names_the_version_that_is_tested(name, package, version):
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = version
    if package == "torch" and installed.split("+")[0] != version:
        pytest.skip("the page names the torch that a release is tested with, and here is another")
    assert CONSTRAINTS[package] == version
    assert installed.split("+")[0] == version
