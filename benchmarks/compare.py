"""Compare optimizers on small tasks with equal budgets: `make compare`.

    python benchmarks/compare.py                                 # what is missing, then the pages
    python benchmarks/compare.py --task gpt --optimizer soap     # a row
    python benchmarks/compare.py --quick --task kinks            # a trial of the program itself

Every optimizer has the same number of trials on a task, over its learning rate and weight decay;
the best one is run again with new seeds, and these runs alone are reported. Rows are kept as they
are finished, so that an interrupted comparison goes on. Each run has one thread, so that numbers do
not depend on how many run at once; times are measured last, with nothing else running.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from comparison import pages, store, trials
from comparison.contenders import Contender, all_contenders
from comparison.store import Effort, Store
from comparison.tasks import Task, all_tasks
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
QUICK = HERE.parent / "out"


class BadInput(Exception):
    """A flag that cannot be used."""


def chosen(names: str | None, known: dict[str, Any], what: str) -> list[str]:
    """Those of a list separated by commas; all, if there is none."""
    if names is None:
        return list(known)
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in wanted:
        if name not in known:
            raise BadInput(f"there is no {what} {name!r}; there are {', '.join(known)}.")
    return wanted


def made(name: str, share: float) -> Task:
    """A task, or a shorter one of the same name."""
    task = all_tasks()[name]
    return task if share == 1.0 else replace(task, steps=max(10, round(share * task.steps)))


def work(task: str, optimizer: str, part: str, effort: Effort, winner: Any) -> dict[str, Any]:
    """Make the runs of a part, in a process of the pool."""
    problem, contender = made(task, effort.share), all_contenders()[optimizer]
    runs = store.planned(problem, contender, part, effort, winner)
    ended = trials.train(problem, contender, runs, curves=part == "final")
    return store.row(problem, contender, part, runs, ended)


def one_thread() -> None:
    torch.set_num_threads(1)


class Comparison:
    """What is to be run, in which order. again: whether kept rows are run once more."""

    def __init__(
        self, rows: Store, effort: Effort, cells: Sequence[tuple[Task, Contender]], *, again: bool
    ) -> None:
        self.rows, self.effort, self.cells, self.again = rows, effort, cells, again
        self.fresh: set[tuple[str, str, str]] = set()

    def jobs(self, cell: tuple[Task, Contender]) -> list[tuple[Any, ...]]:
        """Arguments of `work` for the parts that a cell lacks and that can be run now: what needs
        the winner of a search comes after it."""
        task, own = cell
        counts = store.counts(own, self.effort)
        kept = {part: self.kept(task, own, part, counts[part]) for part in counts}
        best = own.default if own.exact else None
        if search := kept.get("search"):
            best = store.winner(search)
        for part in ("sweep", "final"):
            if (found := kept.get(part)) and [*(best or ())] not in [x[:3] for x in found["runs"]]:
                kept[part] = None  # another search had another winner
        can = ("search", "default") if best is None else counts
        missing = [part for part in counts if kept[part] is None and part in can]
        return [(task.name, own.name, part, self.effort, best) for part in missing]

    def kept(
        self, task: Task, contender: Contender, part: str, count: int | None
    ) -> dict[str, Any] | None:
        """The row of a part, if it need not be made."""
        found = self.rows.find(task, contender.name, part, count)
        made = found is not None and (not self.again or store.key(found) in self.fresh)
        return found if made else None

    def run(self, workers: int, progress: Progress) -> None:
        """Run all that is missing, as many at once as there are workers."""
        bar = progress.add_task("", total=None)
        done, queue = 0, [job for cell in self.cells for job in self.jobs(cell)]
        by_name = {(task.name, own.name): (task, own) for task, own in self.cells}
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=one_thread)
        running: dict[Future[dict[str, Any]], None] = {}
        try:
            while queue or running:
                while queue and len(running) < workers:
                    running[pool.submit(work, *queue.pop(0))] = None
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    found = future.result()
                    self.rows.add(found)
                    self.fresh.add(store.key(found))
                    done += 1
                    if found["part"] == "search":
                        cell = by_name[found["task"], found["optimizer"]]
                        queue = [j for j in self.jobs(cell) if j[2] in ("sweep", "final")] + queue
                    what = f"{found['task']}, {found['optimizer']}"
                    progress.update(
                        bar,
                        completed=done,
                        total=done + len(queue) + len(running),
                        description=what,
                    )
        finally:
            pool.shutdown(cancel_futures=True)

    def measure(self, progress: Progress) -> None:
        """Times and bytes, one cell after another in this process."""
        one_thread()
        bar = progress.add_task("times", total=len(self.cells))
        for task, contender in self.cells:
            if not self.kept(task, contender, "time", None):
                times = trials.times(task, contender, contender.default)
                numbers = {name: store.rounded(x, 4) for name, x in times.items()}
                more = {"steps": task.steps, "versions": store.versions(task), **numbers}
                cell = {"task": task.name, "optimizer": contender.name, "part": "time"}
                self.rows.add({**cell, **more})
            progress.advance(bar)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and write the pages."""
    parser = argparse.ArgumentParser(description="Compare optimizers on small tasks.")
    parser.add_argument("--task", help="names, separated by commas (default: all)")
    parser.add_argument("--optimizer", help="names, separated by commas (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="runs at once (default 2)")
    parser.add_argument("--quick", action="store_true", help="few short runs, kept elsewhere")
    parser.add_argument("--again", action="store_true", help="also what is there")
    parser.add_argument("--only", choices=("runs", "times", "pages"), help="this alone")
    flags = parser.parse_args(argv)
    if flags.workers < 1:
        raise BadInput(f"--workers must be at least 1, but is {flags.workers}.")
    effort, home = (store.QUICK, QUICK) if flags.quick else (store.FULL, HERE)
    names = chosen(flags.task, all_tasks(), "task")
    known = all_contenders()
    contenders = [known[name] for name in chosen(flags.optimizer, known, "optimizer")]
    tasks = [made(name, effort.share) for name in names]
    cells = [(task, own) for task in tasks for own in contenders if own.fits(task)]
    if not cells:
        who, where = (", ".join(x.name for x in found) for found in (contenders, tasks))
        raise BadInput(f"{where} is no task for {who}; name another task or another optimizer.")
    rows = Store(home / "comparison" / "results")
    comparison = Comparison(rows, effort, cells, again=flags.again)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        if flags.only in (None, "runs"):
            comparison.run(flags.workers, progress)
        if flags.only in (None, "times"):
            comparison.measure(progress)
    rows.tidy()
    if flags.only in (None, "pages"):
        pages.write(rows, [made(name, effort.share) for name in all_tasks()], home)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as error:
        sys.exit(f"compare: {error}")
    except KeyboardInterrupt:
        sys.exit("\ncompare: stopped; what was finished is kept, and the same command goes on.")
