"""The wheels: what is in them, and that they work where nothing else of the project is."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from forks import forks

import functional_optim as fo
from functional_optim.kernels import isa_levels, toolchain

ROOT = Path(__file__).parents[2]

RECIPES = """
import torch, functional_optim as fo
from functional_optim.warmup import warm
found = warm(fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(momentum=0.9)))
assert found == [(torch.float32, 2, 0, 0)], found
"""

STEP = """
import sys, warnings
import torch, functional_optim as fo
warnings.filterwarnings("error", category=RuntimeWarning)
assert fo.__file__.startswith(sys.argv[1]), fo.__file__
tx = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.5, momentum=0.9))
params = {"w": torch.ones(6, 7), "b": torch.zeros(3)}
grads = {"w": torch.full((6, 7), 2.0), "b": torch.ones(3)}
step, state = fo.compile(tx, strict=sys.argv[2] == "strict"), tx.init(params)
updates, after = tx.update(grads, state, params)
wanted = fo.apply_updates(params, updates)
try:
    got, state = step(grads, state, params)
except RuntimeError as error:
    print(error)
else:
    assert all([torch.allclose(got[k], wanted[k]) for k in wanted])
    print("stepped")
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the wheels, made from a copy of the project."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "project"
    for name in ("functional_optim", "adapters", "release"):
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    (folder / "recipes.py").write_text(RECIPES)
    here = [level.name for level in isa_levels.fitting()][-1:]
    options = ["--out", str(folder), "--recipes", str(folder / "recipes.py"), "--levels", *here]
    command = [sys.executable, str(source / "release" / "wheel.py"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def unpacked(dist: Path, ending: str, to: Path) -> Path:
    (wheel,) = dist.glob(f"functional_optim-*{ending}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
    return to


@pytest.fixture(scope="module")
def run():
    """What a process says that finds the package in a folder, and no compiler."""
    with forks() as forked:

        def say(root: Path, *words: str, program: str = STEP, **environment: str) -> str:
            (root / "empty").mkdir(exist_ok=True)
            base = {name: x for name, x in os.environ.items() if name != "CXX"}
            told = {"PATH": str(root / "empty"), "FUNCTIONAL_OPTIM_CACHE": str(root / "kernels")}
            return forked(program, root, [str(root), *words], {**base, **told, **environment})

        yield say


def test_the_version_stands_in_one_place():
    assert metadata.version("functional_optim") == fo.__version__
    first = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first
    assert first.group(1) == fo.__version__


def test_a_wheel_has_every_file_of_the_package_and_no_other(dist, tmp_path):
    root = unpacked(dist, "py3-none-any", tmp_path)
    ours = {
        (Path("functional_optim") / at / path.relative_to(ROOT / folder)).as_posix()
        for folder, at in (("functional_optim", "."), ("adapters", "adapters"))
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".cpp", ".h", ".md") or path.name == "py.typed"
    }
    told = f"functional_optim-{fo.__version__}.dist-info"
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith(told)} == ours
    assert f"{told}/licenses/LICENSE" in found


def test_a_wheel_works_where_nothing_else_is(dist, tmp_path, run):
    root = unpacked(dist, "py3-none-any", tmp_path)
    program = "import functional_optim.adapters as a, functional_optim as fo; print(fo.__version__)"
    assert run(root, program=program) == fo.__version__
    assert run(root, "strict").startswith("functional_optim: a strict step must be compiled")


needs_a_level = pytest.mark.skipif(
    not isa_levels.fitting(), reason="kernels are shipped for x86-64-v3 and better"
)


INSIDE = "functional_optim/prebuilt"


@needs_a_level
@pytest.mark.parametrize(
    ("place", "environment", "says"),
    [
        (INSIDE, {}, "stepped"),
        ("kernels", {}, "stepped"),  # the folder that keeps them
        (INSIDE, {"PATH": os.environ["PATH"]}, "stepped"),  # has a compiler
        (INSIDE, {"FUNCTIONAL_OPTIM_CACHE": "off"}, "there is no C++ compiler"),
    ],
)
def test_kernels_of_the_package_need_no_compiler(dist, tmp_path, place, environment, says, run):
    root = unpacked(dist, "_x86_64", tmp_path)
    if place == "kernels":
        (root / "functional_optim" / "prebuilt").rename(root / "kernels")
        for path in (root / "kernels").iterdir():
            path.chmod(0o600)
    assert says in run(root, "strict", **environment)
    assert place == "kernels" or not list((root / "kernels").glob("*.so"))


@needs_a_level
def test_a_damaged_kernel_is_not_loaded(dist, tmp_path, run):
    root = unpacked(dist, "_x86_64", tmp_path)
    for path in (root / "functional_optim" / "prebuilt").glob("*.so"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert "there is no C++ compiler" in run(root, "strict")


@pytest.mark.parametrize("name", ["x86-64-v9", "avx2"])
def test_a_level_that_does_not_exist_is_told(monkeypatch, name):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_LEVEL", name)
    words = rf"FUNCTIONAL_OPTIM_LEVEL is '{name}', which is no level.* are x86-64-v4, x86-64-v3"
    with pytest.raises(ValueError, match=words):
        isa_levels.chosen()


def test_a_kernel_for_a_level_has_one_name_on_all_its_processors(monkeypatch):
    best, other = isa_levels.LEVELS
    monkeypatch.delenv("FUNCTIONAL_OPTIM_LEVEL", raising=False)
    monkeypatch.setattr(isa_levels, "features", lambda: best.features | {"amx"})
    own, *found = toolchain.names_of("text")
    assert len({own.partition("-")[0], *found}) == 3
    monkeypatch.setattr(isa_levels, "features", lambda: best.features)
    assert toolchain.names_of("text")[1:] == found
    assert toolchain.names_of("text")[0] != own
    monkeypatch.setattr(isa_levels, "features", lambda: other.features)
    assert toolchain.names_of("text")[1:] == found[1:]
    monkeypatch.setenv("FUNCTIONAL_OPTIM_LEVEL", other.name)  # as the process that compiles it
    (name,) = toolchain.names_of("text")
    assert name.partition("-")[0] == found[1].partition("-")[0]


@pytest.mark.parametrize(
    ("lacking", "left"),
    [("", ["x86-64-v4", "x86-64-v3"]), ("avx512bw", ["x86-64-v3"]), ("movbe", [])],
)
def test_a_level_needs_all_its_instructions(monkeypatch, lacking, left):
    monkeypatch.setattr(isa_levels, "features", lambda: isa_levels.LEVELS[0].features - {lacking})
    assert [level.name for level in isa_levels.fitting()] == left
