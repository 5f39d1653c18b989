"""Libraries that are built, several as one file, while something else goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from functional_optim.kernels import building, disk_cache, watch
from functional_optim.kernels.building import Unsuitable, is_usual
from functional_optim.kernels.launches import Native
from functional_optim.kernels.tracing import quiet


class Draft(NamedTuple):
    """A library before it is built.

    name: under which it will be kept, if it can be. symbol: of its function. outputs: how many sums
    it returns. check: raises Unsuitable if it does something else than the rule.
    """

    name: str | None
    symbol: str
    outputs: int
    source: str
    check: Callable[[Native], None]


class CompilerRun:
    """Libraries that the C++ compiler is building, in a process of its own.

    They are one file: the compiler needs three seconds for torch's headers, and less than one for a
    kernel. What a machine needs once is built beside them.

    Raises:
        Exception: whatever goes wrong before the compiler runs.
    """

    def __init__(self, drafts: Sequence[Draft]) -> None:
        with quiet():
            from torch._inductor.cpp_builder import get_cpp_compiler
        self.drafts = drafts
        self.beside = watch.Build()
        self.scratch = watch.Scratch()
        self.process, self.built = building.start(_as_one(drafts), self.scratch)
        self.beside.start(get_cpp_compiler())

    def names(self) -> set[str]:
        """Under which its libraries will be kept."""
        return {draft.name for draft in self.drafts if draft.name is not None}

    def finish(self) -> list[Native | None]:
        """Wait, check each library, and keep it under its name; None for one that fails its check.

        Raises:
            RuntimeError: if the compiler fails.
        """
        try:
            said, _ = self.process.communicate()
            if self.process.returncode:
                raise RuntimeError(f"the C++ compiler failed: {said.strip()[:500]}")
            return list(map(self._finished, self.drafts))
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C waits for nothing
                self.stop()
            raise
        finally:
            self.beside.finish()
            self.scratch.remove()

    def stop(self) -> None:
        """Give it up."""
        self.scratch.remove()
        self.beside.stop()

    def _finished(self, draft: Draft) -> Native | None:
        native = Native(self.built, draft.symbol, draft.outputs, draft.name, found=False)
        try:
            draft.check(native)
        except Unsuitable:
            return None
        if draft.name is not None and is_usual():
            disk_cache.keep(draft.name, self.built.read_bytes())
        return native


def _as_one(drafts: Sequence[Draft]) -> str:
    """The sources of libraries as one, each in a namespace."""
    lines = [line for draft in drafts for line in draft.source.splitlines()]
    found = list(dict.fromkeys([line for line in lines if line.startswith("#include")]))
    for i, draft in enumerate(drafts):
        own = [line for line in draft.source.splitlines() if not line.startswith("#include")]
        found += [f"namespace part{i} {{", *own, "}"]
    return "\n".join(found)
