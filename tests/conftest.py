"""Shared fixtures. Warnings are errors (pyproject); every exception to that is in this file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


KERNELS = Path(__file__).parent.parent / "build" / "kernels"
"""Where tests keep compiled kernels: every change of the source makes all of them anew."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("FUNCTIONAL_OPTIM_CACHE", str(KERNELS))
    # Inductor's own import decorates a function with it
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    )
    # torch.func.jvp scripts torch's formulas for it when it is first called
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
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


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What two processes found that ran the parts of all distributed tests."""
    from ranks import run_both  # what it imports takes a second, and few tests need it

    return run_both(tmp_path_factory.mktemp("ranks"))
