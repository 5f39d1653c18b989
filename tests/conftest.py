"""Shared fixtures. Warnings are errors (pyproject); every exception to that is in this file."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    # Inductor's own import decorates a function with it
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    )
    # Dynamo's trace log has a record for every step of tracing, which a failing test would print
    logging.getLogger("torch.__trace").addFilter(lambda record: False)


@pytest.fixture(autouse=True)
def seed_and_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors are tiny here; test_engine asks for more


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """All recipes share the code of one `update`: a reset keeps each one's recompiles apart."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
