"""Build the package: a wheel for every machine, and one for this kind with compiled kernels.

    python release/wheel.py --out dist                        # make wheel
    python release/wheel.py --out dist --levels x86-64-v3

The second wheel has the kernels of usual recipes (`release/recipes.py`) for each level of
processors, so that a first step needs no compiler, with any version of Python and of torch. The
library that looks over objects is for this version of Python. pip prefers the second wheel where
both are offered.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from functional_optim.kernels import isa_levels

HERE = Path(__file__).parent
PACKAGE = "functional_optim"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheels of the package.")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheels")
    parser.add_argument(
        "--levels",
        nargs="*",
        default=["x86-64-v3", "x86-64-v4"],
        help="processors that kernels are compiled for, each of which this one can run",
    )
    parser.add_argument(
        "--recipes", type=Path, default=HERE / "recipes.py", help="a script that compiles kernels"
    )
    given = parser.parse_args()
    here = [level.name for level in isa_levels.fitting()]
    if wrong := set(given.levels) - set(here):
        parser.error(f"this machine cannot try kernels for {', '.join(wrong)}; it has {here}.")
    if not given.recipes.is_file():
        parser.error(f"there is no file {given.recipes}.")
    out = given.out.absolute()
    run("-m", "build", "--no-isolation", str(HERE.parent), "--outdir", str(out))
    plain = max(out.glob(f"{PACKAGE}-*-py3-none-any.whl"), key=lambda path: path.stat().st_mtime)
    if given.levels:
        with tempfile.TemporaryDirectory() as scratch:
            made = with_kernels(plain, given.levels, given.recipes, Path(scratch), out)
        print(f"{made.name} has {made.stat().st_size / 1e6:.1f} MB")
    print(f"{plain.name} has {plain.stat().st_size / 1e6:.1f} MB")


def with_kernels(plain: Path, names: list[str], recipes: Path, scratch: Path, out: Path) -> Path:
    """The wheel again, with the kernels that its own source makes."""
    run("-m", "wheel", "unpack", str(plain), "--dest", str(scratch / "unpacked"))
    (root,) = (scratch / "unpacked").iterdir()
    kernels = root / PACKAGE / "prebuilt"
    for level in names:
        made = scratch / level
        compile_for(level, recipes, root, made)
        for path in made.iterdir():
            kernels.mkdir(exist_ok=True)
            shutil.copyfile(path, kernels / path.name)
    run("-m", "wheel", "pack", str(root), "--dest-dir", str(scratch))
    (packed,) = scratch.glob("*.whl")
    run("-m", "wheel", "tags", "--platform-tag", platform_tag(), str(packed))
    (tagged,) = scratch.glob(f"*{platform_tag()}.whl")
    return Path(shutil.copy(tagged, out))


def compile_for(level: str, recipes: Path, root: Path, made: Path) -> None:
    """Compile the kernels of recipes, in a process that sees the unpacked wheel alone."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "FUNCTIONAL_OPTIM_LEVEL": level,
        "FUNCTIONAL_OPTIM_CACHE": str(made),
    }
    command = [sys.executable, "-P", str(recipes.absolute()), str(root)]
    subprocess.run(command, env=environment, cwd=root, check=True)


def platform_tag() -> str:
    """Of machines that can load what is compiled here: with this C library, or a newer one."""
    name, version = platform.libc_ver()
    if name != "glibc":
        raise SystemExit("kernels are put into wheels for Linux with glibc alone; pass --levels.")
    major, minor = version.split(".")[:2]
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
