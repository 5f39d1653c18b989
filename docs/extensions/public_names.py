"""Every public name has a docstring and a place on a page: what has none is a warning of the build,
and so fails it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

PACKAGE = "functional_optim"
PACKAGES = ("", ".adapters", ".estimators", ".replicas", ".schedules", ".search")
"""Whose names are imported from elsewhere in the package."""
MODULES = (".linalg", ".measures", ".numeric", ".projections", ".tree", ".warmup")
"""Whose names are their own."""

logger = logging.getLogger(__name__)


def modules() -> list[ModuleType]:
    """All that a user imports."""
    return [importlib.import_module(PACKAGE + name) for name in (*PACKAGES, *MODULES)]


def belongs(thing: Any, module: ModuleType) -> bool:
    """Is a value of a module one of its public names, and not something that it uses?"""
    if inspect.isfunction(thing) or inspect.isclass(thing):
        home = thing.__module__
        own = module.__name__.removeprefix(PACKAGE) in MODULES
        return home == module.__name__ if own else home.startswith(PACKAGE)
    return type(thing).__module__.startswith(PACKAGE)


def public(among: list[ModuleType] | None = None) -> dict[str, Any]:
    """The public functions, classes and values, by full name; a module's `__all__` has the say."""
    return {
        f"{module.__name__}.{name}": thing
        for module in (modules() if among is None else among)
        for name in dir(module)  # with those that are imported on demand
        if name in getattr(module, "__all__", [name]) and not name.startswith("_")
        if not inspect.ismodule(thing := getattr(module, name)) and belongs(thing, module)
    }


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that this package gives a class, with their names."""
    for name in dir(cls):
        if name.startswith("_"):
            continue
        for base in cls.__mro__:
            if name in vars(base):
                member = vars(base)[name]
                own = getattr(member, "__qualname__", "").startswith(base.__name__ + ".")
                if base.__module__.startswith(PACKAGE) and (own or isinstance(member, property)):
                    yield name, member
                break


def has_docstring(name: str, thing: Any) -> bool:
    """Does it say what it is? For a value, the string below it counts."""
    if inspect.isfunction(thing) or inspect.isclass(thing):
        return bool(thing.__doc__)
    module, _, last = name.rpartition(".")
    return ("", last) in ModuleAnalyzer.for_module(module).find_attr_docs()


def undocumented(things: dict[str, Any]) -> list[str]:
    """Names without a docstring. A method that overrides may have that of what it overrides."""
    found = [name for name, thing in things.items() if not has_docstring(name, thing)]
    for name, thing in things.items():
        if inspect.isclass(thing):
            for method, _ in methods(thing):
                if not inspect.getdoc(getattr(thing, method)):
                    found.append(f"{name}.{method}")
    return found


def look_up(name: str) -> Any:
    """What stands under a full name, unbound and unread; None if nothing does."""
    first, *rest = name.split(".")
    thing: Any = importlib.import_module(first)
    for part in rest:
        if inspect.isclass(thing):
            thing = inspect.getattr_static(thing, part, None)
        else:
            thing = getattr(thing, part, None)
    return thing


def left_out(things: dict[str, Any], on_pages: Collection[str]) -> list[str]:
    """Names that are on no page, under this or another public name.

    A method counts as there if a base has it, or if it only fills in one that a base describes.
    """
    shown = {id(look_up(name)) for name in on_pages if name.startswith(PACKAGE)}
    found = [name for name, thing in things.items() if id(thing) not in shown]
    for name, thing in things.items():
        if inspect.isclass(thing):
            for method, member in methods(thing):
                if id(member) not in shown and member.__doc__:
                    found.append(f"{name}.{method}")
    return found


def check_docstrings(app: Sphinx) -> None:
    for name in undocumented(public()):
        logger.warning("the public name %s has no docstring", name)


def check_pages(app: Sphinx, env: BuildEnvironment) -> None:
    for name in left_out(public(), env.domains.python_domain.objects):
        logger.warning("the public name %s is on no page: add it to one of docs/api/", name)


@functools.cache
def public_by_home() -> dict[str, str]:
    """Where a public class or function is defined → under which name it is on a page."""
    return {
        f"{thing.__module__}.{thing.__qualname__}": name
        for name, thing in reversed(public().items())
        if inspect.isfunction(thing) or inspect.isclass(thing)
    }


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contents: nodes.Element
) -> nodes.Element | None:
    """A reference to where a thing is defined leads to where it is documented."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    name = public_by_home().get(target, f"{PACKAGE}.{target}")
    entry = env.domains.python_domain.objects.get(name)
    if entry is None:
        return None
    uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    return nodes.reference("", "", contents, internal=True, refuri=f"{uri}#{entry.node_id}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", check_docstrings)
    app.connect("env-check-consistency", check_pages)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
