"""The package is built in layers, imports point one way, and what it loads stays small."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, ADAPTERS = ROOT / "functional_optim", ROOT / "adapters"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

LAYERS = (
    {"fitting", "kernels", "numeric", "sharded", "tree"},
    {"paths", "saved"},
    {"base", "schedules", "linesearch", "linalg", "looks", "measures", "projections", "randomness"},
    {"rules", "quasi_newton", "tapes"},
    {"progress", "layout"},
    {"banks", "bundles", "draws"},
    {"leafwise", "engine", "flat"},
    {"checkpoints", "combine", "forms", "lookup"},
    {"transforms", "commits", "search", "selection", "gates", "wrappers"},
    {"algorithms", "synced"},
    {"compiled"},
    {"estimators", "replicas", "warmup"},
    {"adapters"},
)
"""A module, or a package with all in it, imports only from the layers before its own."""
DEPTH = {name: i for i, layer in enumerate(LAYERS) for name in layer}
SOURCES = [path for folder in (CORE, ADAPTERS) for path in sorted(folder.rglob("*.py"))]
INSIDE = [path for path in SOURCES if path != CORE / "__init__.py"]


def layer_of(path):
    if path.is_relative_to(ADAPTERS):
        return "adapters"
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imported(path):
    """Dotted names of all that a file imports, function bodies and type checking included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(path):
    """Dotted names that a file reads, such as torch._dynamo.config."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_imports_point_one_way(path):
    mine = layer_of(path)
    assert mine in DEPTH, "give the new module a place in LAYERS"
    for name in imported(path):
        first, *rest = name.split(".")
        if first == "functional_optim" and rest[0] != mine:
            assert DEPTH[rest[0]] < DEPTH[mine], f"{mine} imports {rest[0]}"


def test_the_package_does_not_import_its_adapters():
    assert not any("adapters" in name for name in imported(CORE / "__init__.py"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_kernels_know_the_compiler_from_the_inside(path):
    if path.parent.name != "kernels":
        for name in [*imported(path), *used(path)]:
            assert not name.startswith(("torch._inductor", "torch._dynamo"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_runtime_dependencies_are_torch_and_optree(path):
    ours = {"functional_optim", "torch", "optree"}
    for name in imported(path):
        assert name.split(".")[0] in ours | sys.stdlib_module_names


def test_the_declared_dependencies_are_torch_and_optree():
    assert [spec.split(">=")[0] for spec in PROJECT["project"]["dependencies"]] == [
        "torch",
        "optree",
    ]


def test_the_list_of_packages_is_the_folders_on_disk():
    folders = {path.parent for path in SOURCES if path.name == "__init__.py"}
    on_disk = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    mapped = {"adapters" if n == "functional_optim.adapters" else n for n in packages()}
    assert mapped == on_disk


def packages():
    return PROJECT["tool"]["setuptools"]["packages"]


def test_adapters_is_mapped_into_the_package():
    assert PROJECT["tool"]["setuptools"]["package-dir"]["functional_optim.adapters"] == "adapters"


@pytest.mark.parametrize("folder", ["functional_optim", "adapters", "tests", "examples"])
def test_no_file_is_longer_than_500_lines(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path.name


def python(code, where):
    """The output of a fresh interpreter in another folder."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_loads_neither_inductor_nor_dynamo(tmp_path):
    code = (
        "import sys, functional_optim, functional_optim.adapters\n"
        "print([m for m in ('torch._inductor', 'torch._dynamo') if m in sys.modules])"
    )
    assert python(code, tmp_path) == "[]"


def test_adapters_is_no_package_of_its_own(tmp_path):
    code = (
        "import importlib.util as u\n"
        "print(u.find_spec('adapters'), u.find_spec('functional_optim.adapters').name)"
    )
    assert python(code, tmp_path) == "None functional_optim.adapters"
