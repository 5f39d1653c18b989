"""Short imports: names that are imported on demand, without garbage collection meanwhile."""

from __future__ import annotations

import gc
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector while modules are imported.

    Imported objects are permanent, and a full collection visits all objects of torch: 0.08 s, twice
    the time of importing this package, and 0.9 s while the compiler is imported.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _InClone:
    """Finds the adapters of a package in a clone: next to the package."""

    def __init__(self, package: str, folder: Path) -> None:
        self.name = f"{package}.{folder.name}"
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The adapters; other finders find their modules."""
        if name != self.name:
            return None
        inside = [str(self.folder)]
        where = self.folder / "__init__.py"
        return spec_from_file_location(name, where, submodule_search_locations=inside)


def as_installed(package: str) -> None:
    """Import `adapters/` of a clone as a part of the package, like an installed one.

    This finder precedes others, since an editable install of another clone has adapters, too.
    """
    home = Path(str(sys.modules[package].__file__)).parent
    beside = home.parent / "adapters"
    if not (home / "adapters").exists() and (beside / "__init__.py").exists():
        # before the finder of an editable install, which has the adapters of another clone
        sys.meta_path.insert(0, _InClone(package, beside))


IMPORT = re.compile(r"^from ([\w.]+) import \(?\s*(\w+) as \w+", re.MULTILINE)


def homes_of(package: str) -> dict[str, str]:
    """The names of a package, each with its module, from its __init__.pyi."""
    here: Any = sys.modules[package]
    stub = Path(here.__file__).with_suffix(".pyi")
    text = here.__spec__.loader.get_data(str(stub)).decode()  # from an archive, too
    return {name: home for home, name in IMPORT.findall(text)}


def on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names are imported when first read.

    Its __init__.pyi has the module of each.
    """
    here, homes, refuse = sys.modules[package], homes_of(package), unknown(package)

    def read(name: str) -> Any:
        if homes.get(name) == package:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            refuse(name)
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(here, name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(here), *homes})

    return read, listed, [name for name in listed() if not name.startswith("_")]


def _meant(package: str, name: str, listed: Sequence[str]) -> str:
    """A suggestion for an unknown name of a package."""
    from functional_optim.core.other_names import hint_for

    if package == "functional_optim" and name in optimizer_objects(name):
        return f"; the optimizer object is functional_optim.adapters.{name}(params, ...)"
    same = [x for x in listed if x.lower() == name.lower()]
    if same:
        return f"; did you mean {same[0]!r}?"
    here = hint_for(name)
    return f"; {here}" if here else ""


def unknown(package: str) -> Callable[[str], Any]:
    """`__getattr__` of a package whose names are all imported: an error with a suggestion."""

    def read(name: str) -> Any:
        here: Any = sys.modules[package]
        meant = "" if name.startswith("_") else _meant(package, name, dir(here))
        text = f"module {package!r} has no attribute {name!r}{meant}"
        raise AttributeError(text, name=name, obj=here)

    return read


def optimizer_objects(name: str) -> list[str]:
    """The optimizer objects of a name, ignoring case and underscores."""
    adapters: Any = importlib.import_module("functional_optim.adapters")
    plain = name.replace("_", "").lower()
    return [
        x for x in dir(adapters) if x.lower() == plain and isinstance(getattr(adapters, x), type)
    ]
