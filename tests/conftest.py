"""Shared fixtures. Warnings are errors (pyproject); every exception to that is in this file."""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import own_process
import pytest
import torch
from filelock import FileLock

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


KERNELS = Path(__file__).parent.parent / "build" / "kernels"
"""Where tests keep compiled kernels: every change of the source makes all of them anew."""

LONG = (
    "test_nonfinite",
    "test_distributed",
    "test_torchft",
    "test_fake_device",
    "test_whole_steps",
    "test_two_processes",
    "test_trainers",
    "test_lightning",
    "test_links",
    "test_properties",
    "test_kernel_store",
    "test_combinators",
    "test_examples",
    "test_site",
    "test_notebooks",
    "test_compare",
    "test_checkpoints",
    "test_engine",
    "test_commits",
    "test_products",
    "test_triton_kernels",
    "test_one_trace",
    "test_kernel_keys",
    "test_builds",
    "test_search",
    "test_simulation",
    "test_simulation_schedules",
    "test_groups_as_one",
    "test_wrong_tensors",
)
"""The files that take longest, in their order: a long one that started last would run alone."""

OBJECTS = (100_000, 20, 10)
"""Python's limits for collecting garbage. With its own, which are lower, it spends a tenth of the
time on looking at what torch's compiler keeps."""


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background, with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {stem: i for i, stem in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what all tests import stays: no collection looks at it again


def pytest_configure(config: pytest.Config) -> None:
    own_process.register(config)
    gc.set_threshold(*OBJECTS)
    os.environ.setdefault("FUNCTIONAL_OPTIM_CACHE", str(KERNELS))
    # for the programs that tests start: threads of several programs wait for each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Inductor's own import decorates a function with it
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    )
    # torch.func.jvp scripts torch's formulas for it when it is first called
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
    )
    # torch's rpc, which ignite imports, declares an interface with it
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.interface` is deprecated:DeprecationWarning"
    )


@pytest.fixture(autouse=True)
def seed_and_thread() -> Iterator[None]:
    """A test may change these, and the default dtype, and leave them so."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors are tiny here; test_engine asks for more
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    """Accelerate and transformers keep precision and devices in classes and in the environment."""
    before = _settings()
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in _settings().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """All recipes share the code of one `update`: a reset keeps each one's recompiles apart."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def doubles() -> None:
    """Numbers that recur are kept in the default dtype: so that all ways to run round alike."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh of this process alone."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


LIGHTNINGS = (
    (r".*does not have many workers", UserWarning),
    (r".*isinstance.treespec, LeafSpec.", FutureWarning),
    (r".*isinstance.treespec, LeafSpec.", DeprecationWarning),
)
"""What Lightning says of data that is in memory, and torch of how Lightning walks over trees."""


@pytest.fixture
def pl() -> Any:
    """The helpers for Lightning, which imports torch's compiler: so not before a test asks."""
    for message, category in LIGHTNINGS:
        warnings.filterwarnings("ignore", message, category)
    import lightning_runs

    return lightning_runs


@pytest.fixture(scope="session")
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, object]]:
    """What two processes found that ran the parts of the distributed tests that were collected.

    Of several workers the first to ask starts them.
    """
    from ranks import MODULES, run_both  # what it imports takes a second, and few tests need it

    collected = {item.path.stem for item in request.session.items}

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "ranks.lock"):
        return run_both(folder / "ranks", [name for name in MODULES if name in collected])
