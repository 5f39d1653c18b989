"""Measures the two backends of docs/training_loops.md: python benchmarks/backends.py

Prints their table: the first step of a new process with nothing cached, and the steps after it,
alternating between backends.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from fresh import fresh, processes
from rows import Effort, Measured, Row
from workloads import GPT, Workload

TWELVE = Workload("twelve", "12 tensors of 8", [(8,)] * 12, [(8,)] * 3)
WORKLOADS = {own.key: own for own in (TWELVE, GPT)}
EFFORT = Effort(seconds=10.0)


def steps_of(workload: str, backend: Any, quick: bool) -> Any:
    """A step of AdamW over new trees, to be called without arguments."""
    import functional_optim as fo

    found = WORKLOADS[workload].parameters(quick=quick)
    params = {str(i): p.detach() for i, p in enumerate(found)}
    grads = {str(i): p.grad for i, p in enumerate(found)}
    tx = fo.adamw(1e-3)
    step, state = fo.compile(tx, backend=backend), tx.init(params)
    return lambda: step(grads, state, params)


def first(workload: str, backend: str, quick: bool) -> dict[str, Any]:
    """Seconds of the first step, in a process that has imported torch and the package."""
    step = steps_of(workload, backend, quick)
    start = time.perf_counter()
    step()
    return {"seconds": time.perf_counter() - start}


def steady(workload: str, effort: dict[str, Any]) -> dict[str, Any]:
    """The samples of steps of both, alternately."""
    from pairs import race

    sides = [steps_of(workload, backend, effort["quick"]) for backend in ("torch", "kernels")]
    for step in sides:
        for _ in range(3):
            step()
    found = race(sides[0], {"kernels": sides[1]}, Effort(**effort))
    return {"ours": found.ours, "theirs": found.theirs}


def first_steps(workload: str, effort: Effort) -> Measured:
    """The first steps of both; ours is torch.compile's."""
    both = [
        [
            fresh("backend_first", workload=workload, backend=backend, quick=effort.quick)
            for _ in processes(effort)
        ]
        for backend in ("torch", "kernels")
    ]
    ours, theirs = [[x["seconds"] for x in side] for side in both]
    return Measured(ours, theirs, "our kernels")


def steady_steps(workload: str, effort: Effort) -> Measured:
    found = fresh("backend_steady", workload=workload, effort=asdict(effort))
    return Measured(found["ours"], found["theirs"], "our kernels")


def rows() -> list[Row]:
    """The times of `fo.compile(tx, backend="torch")`, compared with the default."""
    what = 'fo.compile(adamw, backend="torch")'
    return [
        row
        for key, own in WORKLOADS.items()
        for row in (
            Row(
                f"backend-first-{key}",
                f"First step of {what}",
                own.words,
                partial(first_steps, key),
            ),
            Row(f"backend-{key}", f"Steps of {what}", own.words, partial(steady_steps, key)),
        )
    ]


def main() -> None:
    """Measure and print."""
    print("| AdamW, float32 | backend | first step | every other step |")
    print("| --- | --- | --- | --- |")
    for key, own in WORKLOADS.items():
        begun = first_steps(key, Effort(processes=2))
        after = steady_steps(key, EFFORT)
        for name, start, some in (
            ("kernels", begun.theirs, after.theirs),
            ("torch", begun.ours, after.ours),
        ):
            milliseconds = 1e3 * min(some)
            print(f'| {own.words} | `"{name}"` | {min(start):.1f} s | {milliseconds:.3f} ms |')


if __name__ == "__main__":
    main()
