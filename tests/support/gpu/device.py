"""A device for tests that is not the CPU: its memory is the host's, and all it is asked is counted.

`load()` makes the device "fake" known to torch, with two indices, "fake:0" and "fake:1". Operations
run as the CPU's on the same memory: results are the CPU's bit for bit, and an interpreted kernel
may read a tensor at its `data_ptr()`. As on CUDA:

* Tensors of two indices, or of the device and the CPU, are refused in one operation. A CPU tensor
  of no dimensions is a number.
* Fresh and freed memory is full of NaN. The block that was freed last is handed out first.
* `capture` records operations without any effect, and a replay runs them on the same memory. What
  was allocated in between is kept by the graph, and what was allocated before is not.
* The host waits in every copy to and from the device but those with `non_blocking`, out of or into
  pinned memory, of the same dtype and shape. It waits in `item`, in `nonzero` and its like, and
  when it synchronizes with the device or a stream.
* Pinned memory that is written before the host has waited for the copy out of it is an error, which
  is raised when the host waits next.

torch has one such device in a process, and takes it for the accelerator from then on: models and
loaders of other tests would go there. It must be loaded before the process's first backward pass,
which starts a thread for each device. So tests with it run in a process of their own:
`pytestmark = pytest.mark.own_process`.
"""

import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from filelock import FileLock

DEVICE = "fake"
FOLDER = Path(__file__).parent
SOURCE = FOLDER / "device.cpp"


class Counters(NamedTuple):
    """What the device was asked since the last `reset`."""

    reads: int
    """How often the host waited for the device."""
    uploads: int
    """Copies to the device that the host waited for."""
    pinned: int
    """Copies out of pinned memory that nobody waited for."""
    downloads: int
    """Copies into pinned memory that nobody waited for."""
    operations: int
    """Launches; views and allocations are none."""


class Graph:
    """Operations that run again on the same memory."""

    def __init__(self) -> None:
        self._recorded: Any = None

    @property
    def names(self) -> list[str]:
        """The operations, in their order."""
        return self._recorded.names

    def replay(self) -> None:
        self._recorded.replay()


def counters() -> Counters:
    return Counters(*load().counts())


def reset() -> None:
    """Let all counters begin at zero."""
    load().reset_counts()


@contextmanager
def raising() -> Iterator[None]:
    """Inside, an operation that makes the host wait raises a RuntimeError that names it."""
    before = load().set_raising(True)
    try:
        yield
    finally:
        load().set_raising(before)


@contextmanager
def logged() -> Iterator[list[str]]:
    """The names of all that is counted, complete when the block ends."""
    names: list[str] = []
    before = load().set_logging(True)
    load().take_log()
    try:
        yield names
    finally:
        names += load().take_log()
        load().set_logging(before)


@contextmanager
def capture() -> Iterator[Graph]:
    """Record the operations of the block. As on CUDA, they have changed nothing when it ends."""
    graph = Graph()
    load().begin_capture()
    try:
        yield graph
    finally:
        graph._recorded = load().end_capture()


def record(name: str, step: Callable[[], None]) -> None:
    """Launch a kernel of one's own: run it, or only record it while a graph is captured."""
    load().record(name, step)


def owner(address: int) -> str | None:
    """Where an address lies: "fake:0", "fake:1", "pinned"; None: elsewhere, or in freed memory."""
    index = load().owner(address)
    if index is None:
        return None
    return "pinned" if index < 0 else f"{DEVICE}:{index}"


@functools.cache
def load() -> ModuleType:
    """Make the device known to torch; the first process on a machine compiles it."""
    library = _library()
    loader = ExtensionFileLoader("fake_device", str(library))
    spec = spec_from_loader("fake_device", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module(module))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _library() -> Path:
    """The compiled device, under a name that changes with its source and with torch."""
    headers = sorted(FOLDER.glob("*.h"))
    text = "".join(path.read_text() for path in [SOURCE, *headers])
    key = hashlib.sha256(f"{text}{torch.__version__}{sys.version}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"functional_optim-fake_device-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    with FileLock(folder / f"{key}.lock"):
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include"]
    includes.append(Path(sysconfig.get_paths()["include"]))
    unfinished = library.with_suffix(".part")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(SOURCE)]
    command += [f"-I{path}" for path in includes]
    command += ["-o", str(unfinished), f"-L{root / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The device for tests does not compile:\n{done.stderr[-4000:]}")
    unfinished.rename(library)


def _device_module(module: ModuleType) -> ModuleType:
    """What torch looks for in `torch.fake`."""
    made = ModuleType(f"torch.{DEVICE}")
    made.is_available = lambda: True
    made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made._lazy_init = lambda: None  # torch 2.11 waits for no device that has none
    made.device_count = module.device_count
    made.current_device = module.current_device
    made.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    made.is_current_stream_capturing = module.is_capturing
    made.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made.manual_seed_all = lambda seed: None  # nothing is drawn on the device
    made.device = _current
    return made


@contextmanager
def _current(device: Any) -> Iterator[None]:
    """The current device inside a block, as torch.cuda.device."""
    before = load().exchange_device(torch.device(device).index or 0)
    try:
        yield
    finally:
        load().exchange_device(before)
