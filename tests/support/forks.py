"""Programs in forks of a process that has imported torch and nothing else.

An interpreter that imports torch takes two seconds to start.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SERVER = """
import json, os, sys, torch
sys.dont_write_bytecode = True
for line in sys.stdin:
    folder, program, words, environment = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            with open(os.path.join(folder, name), "wb") as file:
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv[1:] = words
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def forks() -> Iterator[Callable[..., str]]:
    """A function that runs a program in a folder, and returns what the program prints."""
    command = [sys.executable, "-P", "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as server:

        def run(
            program: str,
            folder: Path,
            words: Sequence[str] = (),
            environment: Mapping[str, str] = os.environ,
        ) -> str:
            given = (str(folder), program, words, dict(environment))
            print(json.dumps(given), file=server.stdin, flush=True)
            assert server.stdout.readline() == "0\n", (folder / "err").read_text()
            return (folder / "out").read_text().strip()

        yield run
