"""Threads that run one at a time, in virtual time: a simulation of blocking code."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Killed(BaseException):
    """Unwinds a thread whose replica was killed. Not an Exception, so that no handler catches
    it."""


class Task:
    """A thread of the simulation.

    doomed: whether it will unwind where it waits.
    waits_for: returns a text, for the error of a run that is stuck.
    """

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.body = body
        self.doomed = False
        self.done = False
        self.waits_for: Callable[[], str] = lambda: "its turn"
        self.lock = threading.Lock()
        self.lock.acquire()
        self.thread: threading.Thread | None = None


class Baton:
    """A queue of events in virtual time, and the threads that some of them resume.

    The task with the baton runs; in `wait` it processes the next events, until one of them names
    the task that gets the baton. So all events have one order, given by their times; of equal
    times, the one that was scheduled first is first.

    Args:
        limit: the virtual time at which a run is aborted.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.now = 0.0
        self.over = False
        self.failure: BaseException | None = None
        self._events: list[tuple[float, int, Callable[[], Task | None]]] = []
        self._number = itertools.count()
        self._tasks: list[Task] = []
        self._left = 0
        self._end = threading.Lock()
        self._end.acquire()

    def at(self, time: float, action: Callable[[], Task | None]) -> None:
        """Schedule an event. If its action returns a task, that task continues."""
        heapq.heappush(self._events, (time, next(self._number), action))

    def spawn(self, name: str, body: Callable[[], None], time: float) -> Task:
        """Start a task at that time."""
        task = Task(name, body)
        self._tasks.append(task)
        self._left += 1
        self.at(time, lambda: task)
        return task

    def wait(self, me: Task, what: Callable[[], str]) -> None:
        """Release the baton until an event names this task.

        Raises:
            Killed: if it is doomed, or the run is over.
        """
        if self.over or me.doomed:
            raise Killed
        me.waits_for = what
        following = self._next()
        if following is not me:
            self._hand(following)
            me.lock.acquire()
        if me.doomed:
            raise Killed

    def run(self) -> None:
        """Run until all tasks are done.

        Raises:
            RuntimeError: if tasks wait, but nothing happens any more.
            TimeoutError: at the limit of virtual time.
            BaseException: what an event or a task has raised.
        """
        try:
            self._hand(self._next())
            self._end.acquire()
        finally:
            self._unwind()
        if self.failure is not None:
            raise self.failure

    def _next(self) -> Task | None:
        """Process events, up to one that names a task. None: the run is over."""
        try:
            while self._left and self.failure is None:
                if not self._events:
                    raise RuntimeError(self._stuck("nothing happens any more"))
                time, _, action = heapq.heappop(self._events)
                if time > self.limit:
                    raise TimeoutError(self._stuck(f"the limit is {self.limit:g} s"))
                self.now = time
                task = action()
                if task is not None and not task.done:
                    return task
        except BaseException as error:
            self.failure = error
        self.over = True
        return None

    def _hand(self, task: Task | None) -> None:
        if task is None:
            self._end.release()
        elif task.thread is None:
            task.thread = threading.Thread(target=self._live, args=(task,), daemon=True)
            task.thread.start()
        else:
            task.lock.release()

    def _live(self, task: Task) -> None:
        try:
            task.body()
        except Killed:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        task.done = True
        self._left -= 1
        if not self.over:
            self._hand(self._next())

    def _unwind(self) -> None:
        """Let every thread end: those of a run that failed raise `Killed` where they wait."""
        self.over = True
        for task in self._tasks:
            if task.thread is not None:
                task.doomed = True
                if task.lock.locked() and not task.done:
                    task.lock.release()
                task.thread.join()

    def _stuck(self, why: str) -> str:
        waiting = [
            f"{task.name} waits for {task.waits_for()}" for task in self._tasks if not task.done
        ]
        return f"the replicas are stuck at {self.now:.4g} s, {why}: {'; '.join(waiting)}."
