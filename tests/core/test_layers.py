"""The package is built in layers, imports point one way, and what it loads stays small. A step that
is like the one before passes the files that ARCHITECTURE.md names, and no others."""

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.kernels import private

ROOT = Path(__file__).parents[2]
CORE, ADAPTERS = ROOT / "functional_optim", ROOT / "adapters"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [path for folder in (CORE, ADAPTERS) for path in sorted(folder.rglob("*.py"))]
PURE = {"core", "schedules", "numeric", "tree"}
"""Boxes that know neither kernels nor optimizer objects."""
MOST = 23
"""Entries of functional_optim/: more than that, and a listing no longer shows the architecture."""


def box_of(path):
    """The layer that a file belongs to: its folder, or the file itself at the top."""
    if path.is_relative_to(ADAPTERS):
        return "adapters"
    return path.relative_to(CORE).parts[0].removesuffix(".py")


@functools.cache
def nodes_of(path):
    """All nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path):
    """Dotted names of all that a file imports, function bodies and type checking included."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(path):
    """Dotted names that a file reads, such as torch._dynamo.config."""
    yield from (ast.unparse(x) for x in nodes_of(path) if isinstance(x, ast.Attribute))


def name_of(path):
    return str(path.relative_to(ROOT))


BOXES = {box_of(path) for path in SOURCES if path != CORE / "__init__.py"}


def arrows():
    """For each box the boxes that it imports from."""
    found = {box: set() for box in BOXES}
    for path in SOURCES:
        if path == CORE / "__init__.py":
            continue
        for name in imported(path):
            first, *rest = name.split(".")
            if name == "functional_optim":  # all of it, by those that nothing of it imports
                assert box_of(path) in ("adapters", "warmup"), name_of(path)
            elif first == "functional_optim" and rest[0] != box_of(path):
                assert rest[0] in BOXES, f"{name_of(path)} imports {name}: name its module"
                found[box_of(path)].add(rest[0])
    return found


def check_order(below, what):
    """That what imports one another can be put into an order."""
    try:
        return list(graphlib.TopologicalSorter(below).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(f"a circle of {what}: {' ← '.join(error.args[1])}") from None


def module_of(path):
    """The dotted name of a file."""
    above = ("functional_optim", "adapters") if path.is_relative_to(ADAPTERS) else (CORE.name,)
    base = ADAPTERS if path.is_relative_to(ADAPTERS) else CORE
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join([*above, *[x for x in parts if x != "__init__"]])


def test_imports_between_layers_and_between_files_form_no_circle():
    """Those inside of functions, too; what only type checkers read is left out between files."""
    assert set(check_order(arrows(), "layers")) == BOXES
    modules = {module_of(path): path for path in SOURCES}
    below = {}
    for name, path in modules.items():
        blocks = [x for x in nodes_of(path) if isinstance(x, ast.If)]
        typed = [x for x in blocks if ast.unparse(x.test) == "TYPE_CHECKING"]
        left_out = {id(x) for block in typed for x in ast.walk(block)}
        nodes = [x for x in nodes_of(path) if id(x) not in left_out]
        froms = [x for x in nodes if isinstance(x, ast.ImportFrom)]
        found = [f"{x.module}.{y.name}" for x in froms for y in x.names]
        found += [y.name for x in nodes if isinstance(x, ast.Import) for y in x.names]
        known = {x if x in modules else x.rpartition(".")[0] for x in found}
        below[name] = {x for x in known if x in modules} - {name}
    check_order(below, "files")


def test_nothing_of_the_package_imports_the_adapters():
    assert [box for box, below in arrows().items() if "adapters" in below] == []
    assert not any("adapters" in name for name in imported(CORE / "__init__.py"))


GRAPHS = {"asked", "callers", "graph", "keys", "node", "ops", "private", "record", "counters"}
GRAPHS |= {"normals"}
"""What the core knows of kernels: graphs of rules, private names of torch, whom to warn, and what
draws many random numbers."""


@pytest.mark.parametrize("box", sorted(PURE))
def test_the_core_is_pure(box):
    assert arrows()[box] <= (PURE | {"kernels"} if box == "core" else PURE)
    for path in (CORE / "core").glob("*.py"):
        below = [name.split(".")[1:] for name in imported(path) if name.startswith(CORE.name)]
        assert {rest[1] for rest in below if rest[0] == "kernels"} <= GRAPHS, name_of(path)


HIDDEN = re.compile(r"torch(\.\w+)*\._(?!_)|torch\.fx\.experimental|make_fx")
"""Names of torch that may go with any version."""


def test_only_one_file_has_private_names_of_torch():
    found = {}
    for path in SOURCES:
        names = {name for name in [*imported(path), *used(path)] if HIDDEN.match(name)}
        if path == CORE / "kernels" / "private.py":
            names = {x for x in names if not x.startswith(("torch._dynamo", *private.NAMES))}
        found[name_of(path)] = names
    assert {name: names for name, names in found.items() if names} == {}
    assert len(private.NAMES) <= 10


def test_runtime_dependencies_are_torch_and_optree():
    for path in SOURCES:
        ours = {"functional_optim", "torch", "optree"}
        if path == ADAPTERS / "lightning.py":  # which nothing imports but Lightning's users
            ours.add("lightning")
        if path == CORE / "tuning" / "tables.py":  # if installed
            ours.add("rich")
        if path.parent == CORE / "tuning" and path.stem in ("lr_sweep", "report"):  # if installed
            ours.add("matplotlib")
        if path.parent.name == "kernels":  # on a GPU
            ours.add("triton")
        known = {name.split(".")[0] for name in imported(path)}
        assert known <= ours | sys.stdlib_module_names, name_of(path)


def test_the_project_says_what_it_is_made_of():
    """Its dependencies, and its packages, which are the folders on disk."""
    said = PROJECT["project"]["dependencies"]
    assert [spec.split(">=")[0] for spec in said] == ["torch", "optree"]
    folders = {path.parent for path in SOURCES if path.name == "__init__.py"}
    on_disk = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    outside = [name for name in listed if name.startswith("functional_optim.adapters")]
    shown = {name: name.removeprefix("functional_optim.") for name in outside}
    assert {shown.get(name, name) for name in listed} == on_disk
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    assert {name: mapped[name].replace("/", ".") for name in outside} == shown


def test_a_listing_shows_the_architecture_and_no_file_is_long():
    assert len([x for x in CORE.iterdir() if x.name != "__pycache__"]) <= MOST
    for folder in ("functional_optim", "adapters", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path.name


def test_no_two_classes_of_the_package_and_no_two_test_files_have_one_name():
    bodies = [node for path in SOURCES for node in nodes_of(path)[0].body]
    classes = [node.name for node in bodies if isinstance(node, ast.ClassDef)]
    tests = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py"]
    for names in (classes, tests):
        assert sorted({name for name in names if names.count(name) > 1}) == []


# ---------------------------------------------------------------- the road of a step
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE, BESIDE = Path(fo.__file__).parent, Path(adapters.__file__).parent


def passed(step: Callable[[], object]) -> set[str]:
    """The files of the package whose functions run in a step."""
    found: set[Path] = set()

    def note(frame, event, arg):
        if event == "call":
            found.add(Path(frame.f_code.co_filename))

    for _ in range(3):
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    inside = {str(x.relative_to(PACKAGE)) for x in found if PACKAGE in x.parents}
    beside = {f"adapters/{x.relative_to(BESIDE)}" for x in found if BESIDE in x.parents}
    return {x for x in inside if not x.startswith("adapters/")} | beside


def listed(row: str) -> list[str]:
    """The files that a row of the page lists."""
    (line,) = [x for x in PAGE.splitlines() if x.startswith(f"| `{row}` | `")]
    return re.findall(r"`([\w/]+\.py)`", line.split("|")[2])


def parameters() -> list[Tensor]:
    made = [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def test_a_step_of_an_optimizer_object():
    assert passed(adapters.AdamW(parameters(), lr=1e-3).step) == {*listed("opt.step()")}


def test_a_compiled_step():
    tx, params = fo.adamw(lr=1e-3), [p.detach() for p in parameters()]
    state, grads, step = tx.init(params), list(map(torch.randn_like, params)), fo.compile(tx)
    (above,) = [x for x in PAGE.splitlines() if x.startswith("| `fo.compile` | `")]
    rest = listed("opt.step()")
    start = rest.index(listed("fo.compile")[-1])
    assert "as above from `engine/guards.py`" in above
    expected = {*listed("fo.compile"), *rest[start:]}
    assert passed(lambda: step(grads, state, params)) == expected


def test_a_step_of_trees():
    """A state like the last one; the checks of what rules return are for rules of others."""
    tx, params = fo.adamw(lr=1e-3), [p.detach() for p in parameters()]
    state, grads = tx.init(params), list(map(torch.randn_like, params))
    assert passed(lambda: tx.update(grads, state, params)) == {*listed("tx.update(…)")}
