"""Deliberate faults, each of which some test must catch: make mutants

Each fault replaces a text in one file of the package, in a copy of this checkout, where the tests
that its row names are then run. A fault that none of them catches is printed, and the exit status
is 1. The tests are run without any fault first, so that a fault is not taken for caught by a test
that fails anyway.

Usage: run.py [--list] [--jobs N] [words…]: only faults whose file or title has one of the words.
"""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

LIMIT = 1200
"""Seconds that the tests of a row may take; a fault that makes them hang is caught."""


class Mutant(NamedTuple):
    """A fault: in a file, a text that stands there once, and what replaces it.

    title: what goes wrong. tests: what is handed to pytest, and must fail.
    """

    title: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str | None:
        """Why the fault cannot be put into a checkout; None if it can."""
        path = root / self.file
        if not path.exists():
            return f"{self.file} is not there"
        found = path.read_text().count(self.old)
        if found != 1 or self.old == self.new:
            return f"its text stands in {self.file} {found} times"
        missing = [x for x in self.tests if not (root / x.split("::")[0].split(" ")[0]).exists()]
        return f"{missing[0]} is not there" if missing else None


def read(text: str) -> list[Mutant]:
    """Faults as a text. = the file of the faults below; a title; - what stands there; + what
    replaces it, or ~ both in one line, with ⟦old → new⟧ where they differ, all without the first
    two characters; ? the tests, in tests/, of this fault and of those below that name none, with *
    for the name of the file."""
    braces, change = re.compile(r"(\S*)\{(.*)\}(\S*)"), re.compile("⟦(.*) → (.*)⟧")

    def expanded(names: re.Match[str]) -> str:
        return " ".join(f"{names[1]}{x}{names[3]}" for x in names[2].split(","))

    found: list[tuple[str, str, dict[str, list[str]], str]] = []
    file = tests = ""
    for line in text.strip("\n").split("\n"):
        sign, rest = line[:1], line[2:]
        if sign == "=":
            file = rest
        elif sign == "?":
            tests = re.sub(r"(?<!\S)(?!tests/)(\w+/)", r"tests/\1", braces.sub(expanded, rest))
            found[-1] = (*found[-1][:3], tests)
        elif sign in "-+":
            found[-1][2][sign].append(rest)
        elif sign == "~":
            for which, key in enumerate("-+", 1):
                found[-1][2][key].append(change.sub(lambda both, i=which: both[i], rest))
        else:
            found.append((line, file, {"-": [], "+": []}, tests))
    return [
        Mutant(title, own, *map("\n".join, texts.values()), (tests.replace("*", Path(own).stem),))
        for title, own, texts, tests in found
    ]


def every() -> list[Mutant]:
    """The faults of all tables beside this file."""
    sys.path.insert(0, str(HERE.parent))
    names = sorted(x.stem for x in HERE.glob("*.py") if x.stem not in ("run", "__init__"))
    return [one for name in names for one in importlib.import_module(f"mutants.{name}").MUTANTS]


def copied(to: Path) -> Path:
    """A copy of the files of this checkout that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    # an editable install finds functional_optim.adapters in the checkout, but for this
    (to / "functional_optim" / "adapters").symlink_to(to / "adapters")
    return to


def fails(root: Path, tests: Sequence[str]) -> bool:
    """Whether tests fail in a checkout, or never end."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [word for one in tests for word in shlex.split(one)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, timeout=LIMIT, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode == 5:
        raise SystemExit(f"no test is selected by {' '.join(tests)}")
    return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Deliberate faults, each of which some test must catch."
    )
    parser.add_argument("words", nargs="*", help="only faults whose file or title has one of these")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    given = parser.parse_args()
    chosen = [
        x
        for x in every()
        if not given.words or any(word in x.file or word in x.title for word in given.words)
    ]
    wrong = [f"{x.title}: {why}" for x in chosen if (why := x.problem(ROOT))]
    if wrong:
        print("\n".join(wrong))
        return 1
    if given.list:
        print("\n".join(f"{x.file}: {x.title}" for x in chosen))
        print(f"{len(chosen)} faults")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run(chosen, Path(folder), given.jobs)


def run(chosen: Sequence[Mutant], folder: Path, jobs: int) -> int:
    """Try faults in copies of this checkout; 1 if one is not caught."""
    free: Queue[Path] = Queue()
    for i in range(jobs):
        free.put(copied(folder / str(i)))
    selections = list(dict.fromkeys(x.tests for x in chosen))

    def sound(tests: Sequence[str]) -> bool:
        root = free.get()
        failed = fails(root, tests)
        free.put(root)
        return not failed

    def caught(one: Mutant) -> bool:
        root, path = free.get(), Path(one.file)
        kept = root / "build" / "kernels"  # of the checkout without faults
        saved = root.with_name(f"{root.name}.kernels")
        if kept.exists():
            shutil.copytree(kept, saved)
        text, start = (root / path).read_text(), time.monotonic()
        (root / path).write_text(text.replace(one.old, one.new))
        found = fails(root, one.tests)
        (root / path).write_text(text)
        shutil.rmtree(kept, ignore_errors=True)
        if saved.exists():
            saved.rename(kept)
        free.put(root)
        outcome = "caught" if found else "SURVIVED"
        print(f"{outcome:9}{time.monotonic() - start:5.0f} s  {one.file}: {one.title}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        pairs = zip(selections, pool.map(sound, selections), strict=True)
        red = [tests for tests, good in pairs if not good]
        for tests in red:
            print(f"fails without any fault: {' '.join(tests)}")
        left = [x for x in chosen if x.tests not in red]
        found = list(pool.map(caught, left))
    print(f"{sum(found)} of {len(chosen)} faults caught")
    return int(not all(found) or bool(red))


if __name__ == "__main__":
    raise SystemExit(main())
