"""The library besides the kernels: checking an optimizer's objects, and calling a kernel.

Comparing by identity costs Python 60 µs for 148 tensors, and a call through ctypes 1.5 µs. Nobody
has to have this library: where it cannot be built, the same is done in Python.
"""

from __future__ import annotations

import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from functional_optim.kernels import disk_cache, toolchain

SOURCE = Path(__file__).with_name("watch.cpp")
MODULE = "functional_optim_watch"

INCLUDE = Path(sysconfig.get_paths()["include"])
"""The headers of this Python."""

module: Any = None
"""The module of `watch.cpp`, once it is there."""

tried = False
"""Whether this process need not look for it again: it is there, or cannot be built."""


def name() -> str:
    """The library's name in the folder of kernels: its text, and what binary modules of Python
    depend on."""
    return disk_cache.name_of(
        SOURCE.read_text(), str(sysconfig.get_config_var("SOABI")), suffix=".watch"
    )


def missing() -> toolchain.Job | None:
    """The build of the library, if it must be built and can be; otherwise None. A library that was
    kept, or came with the package, is taken."""
    global tried
    if tried:
        return None
    path = disk_cache.find(name())
    if path is not None:
        take(path)
    if module is not None or not (INCLUDE / "Python.h").exists() or not toolchain.command():
        tried = True
        return None
    flags = (*toolchain.SHARED, "-O1", "-std=c++11", f"-I{INCLUDE}")
    return toolchain.Job(SOURCE.read_text(), flags)


def take(path: Path, *, keep: bool = False) -> None:
    """Load the library. keep: it was just built."""
    global module
    loader = ExtensionFileLoader(MODULE, str(path))
    spec = spec_from_loader(MODULE, loader)
    assert spec is not None
    try:
        found = module_from_spec(spec)
    except ImportError:
        return
    loader.exec_module(found)
    if keep:
        disk_cache.keep(name(), path.read_bytes())
    module = found
