"""The library beside the kernels: looking over an optimizer's objects, and calling a kernel.

Comparing by identity costs Python 60 µs for 148 tensors, and a call through ctypes 1.5 µs. Nobody
has to have this library: where it cannot be built, the same is done in Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import weakref
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from functional_optim.kernels import disk_cache

SOURCE = Path(__file__).with_name("watch.cpp")
MODULE = "functional_optim_watch"

SUFFIX = ".watch"
"""The ending of the library's name among those of kernels."""

module: Any = None
"""The module of `watch.cpp`, once it is there."""


class Scratch:
    """A folder for a compiler. Both go when it is removed, at the latest when this process ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="functional_optim-"))
        self.processes: list[subprocess.Popen[Any]] = []
        self.remove = weakref.finalize(self, _clear, self.path, self.processes, os.getpid())

    def run(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """A compiler, which keeps its own files there, and is a group with all that it starts."""
        environment = {**os.environ, "TMPDIR": str(self.path)}
        process = subprocess.Popen(
            command, cwd=self.path, env=environment, start_new_session=True, **options
        )
        self.processes.append(process)
        return process


def _clear(folder: Path, processes: list[subprocess.Popen[Any]], owner: int) -> None:
    if os.getpid() != owner:  # a fork, in which neither is its own
        return
    for process in processes:
        if process.poll() is None:
            if hasattr(os, "killpg"):  # the compiler proper is a process of its driver's
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class Build:
    """A build that runs beside another one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.scratch: Scratch | None = None

    def start(self, compiler: str) -> None:
        """Begin, if there is anything to build."""
        if load():
            return
        self.scratch = Scratch()
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(SOURCE)]
        self.process = self.scratch.run(
            [*command, "-o", str(self.output())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def output(self) -> Path:
        """Where the library will be."""
        assert self.scratch is not None
        return self.scratch.path / "watch.so"

    def stop(self) -> None:
        """Give up what is being built."""
        if self.scratch is not None:
            self.scratch.remove()

    def finish(self) -> None:
        """Wait, load the library and keep it; nothing happens if there is none."""
        if self.process is None or self.scratch is None:
            return
        try:
            if self.process.wait() == 0:
                disk_cache.keep(name(), self.output().read_bytes())
                _take(self.output())
        finally:
            self.scratch.remove()


def name() -> str:
    """The library's name in the folder of kernels."""
    return disk_cache.name_of(*_parts(), suffix=SUFFIX)


def load() -> bool:
    """Take the library that an earlier process kept, or that came with the package; False if there
    is none."""
    if module is None:
        names = disk_cache.names_of(*_parts(), suffix=SUFFIX)
        kept = next(filter(None, map(disk_cache.find, names)), None)
        if kept is not None:
            _take(kept)
    return module is not None


def _parts() -> tuple[str, str]:
    """What its name tells: of Python only what binary modules depend on."""
    return SOURCE.read_text(), str(sysconfig.get_config_var("SOABI"))


def _take(path: Path) -> None:
    global module
    loader = ExtensionFileLoader(MODULE, str(path))
    spec = spec_from_loader(MODULE, loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
    except ImportError:
        return
    loader.exec_module(module)
