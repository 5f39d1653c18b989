"""What `fresh.py` runs in a new process: `python benchmarks/child.py PROGRAM '{"some": "json"}'`.

Prints what was measured as JSON in the last line. The clock starts before anything is imported.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402


def import_torch() -> dict[str, Any]:
    """Seconds of `import torch` alone."""
    import torch  # noqa: F401

    return {"seconds": time.perf_counter() - START}


def import_both() -> dict[str, Any]:
    """Seconds of `import torch`, and of importing the package with its adapters after it."""
    import torch  # noqa: F401

    theirs = time.perf_counter()
    import functional_optim
    import functional_optim.adapters  # noqa: F401

    return {"ours": time.perf_counter() - theirs, "theirs": theirs - START}


def first_step(kind: str = "adamw") -> dict[str, Any]:
    """Seconds from the first import to the end of the first step. kind: torch's AdamW, or ours, or
    a recipe's."""
    from workloads import MLP

    params = MLP.parameters()
    if kind == "torch":
        import torch

        torch.optim.AdamW(params).step()
    elif kind == "adamw":
        from functional_optim.adapters import AdamW

        AdamW(params).step()
    else:
        from recipes import FIRST

        from functional_optim.adapters import Optimizer

        Optimizer([(f"layer.{i}", p) for i, p in enumerate(params)], FIRST[kind][1]).step()
    return {"seconds": time.perf_counter() - START}


def cold_compile(layers: int, quick: bool, rule: str = "adamw") -> dict[str, Any]:
    """Seconds of a rule's first step over a GPT, and the kernels that it builds for a second model.

    The GPT is narrow: at its full width SOAP's eigenvectors take a minute.
    """
    from recipes import MATRIX, WHOLE
    from workloads import MLP, gpt_shapes, parameters

    import functional_optim as fo
    from functional_optim.adapters import Optimizer
    from functional_optim.kernels import count

    def optimizer(shapes: list[tuple[int, ...]]) -> Optimizer:
        used = [x for x in shapes if len(x) == 2] if rule in MATRIX else shapes
        return Optimizer(parameters(used), fo.adamw if rule == "adamw" else WHOLE[rule][1])

    opt = optimizer(gpt_shapes(layers, 8, 16) if quick else gpt_shapes(layers, 64, 256))
    start = time.perf_counter()
    opt.step()
    seconds, before = time.perf_counter() - start, count()
    optimizer(MLP.shapes).step()
    return {"seconds": seconds, "model": count() - before}


def kernels(steps: int, quick: bool) -> dict[str, Any]:
    """Kernels built after the first step: by a schedule's numbers, then by a second model."""
    import torch
    from workloads import GPT, MLP

    from functional_optim import adapters
    from functional_optim.kernels import count

    opt = adapters.AdamW(MLP.parameters(quick=quick))
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=steps + 1)
    opt.step()
    before, seen = count(), set()
    for _ in range(steps):
        schedule.step()
        opt.step()
        group = opt.param_groups[0]
        seen.add((group["lr"], group["betas"]))
    by_numbers = count() - before
    adapters.AdamW(GPT.parameters(quick=quick)).step()
    return {
        "numbers": by_numbers,
        "model": count() - before - by_numbers,
        "different": len(seen),
        "first": before,
    }


def memory(side: str, quick: bool) -> dict[str, Any]:
    """Megabytes that this process had at most, after some steps over 60 million parameters."""
    import torch
    from machine import peak
    from workloads import parameters

    from functional_optim import adapters

    params = parameters([(10, 10)] if quick else [(2000, 2000)] * 15)
    ours = side == "ours"
    opt = adapters.AdamW(params) if ours else torch.optim.AdamW(params, fused=True)
    for _ in range(4):
        opt.step()
    return {"megabytes": peak()}


def growth(kind: str, quick: bool, saved: str = "") -> dict[str, Any]:
    """Megabytes by which this process grows with an optimizer and three of its steps."""
    from memory import growth

    return {"megabytes": growth(kind, quick, saved)}


def train_compile(side: str, quick: bool, layers: int | None = None) -> dict[str, Any]:
    """Seconds of the first train step, in a process that has compiled something before."""
    import torch
    from train import SIDES, batch, model_of

    torch.compile(lambda x: x + 1)(torch.ones(4))
    step = SIDES[side](model_of(quick, layers))
    x, y = batch(quick)
    start = time.perf_counter()
    step(x, y)
    return {"seconds": time.perf_counter() - start}


def train_steps(side: str, effort: dict[str, Any]) -> dict[str, Any]:
    """The samples of a train step and torch's, alternately."""
    from pairs import race
    from rows import Effort
    from train import SIDES, batch, model_of

    quick = effort["quick"]
    x, y = batch(quick)
    mine, other = [SIDES[name](model_of(quick)) for name in (side, "theirs")]
    found = race(lambda: mine(x, y), {"torch": lambda: other(x, y)}, Effort(**effort))
    return {"ours": found.ours, "theirs": found.theirs}


def train_memory(side: str, quick: bool) -> dict[str, Any]:
    """Megabytes that this process had at most, with a train step compiled by another one."""
    from machine import peak
    from train import SIDES, batch, model_of

    step = SIDES[side](model_of(quick))
    for _ in range(4):
        step(*batch(quick))
    return {"megabytes": peak()}


def peer(name: str, workload: str, effort: dict[str, Any]) -> dict[str, Any]:
    """The samples of our step and another library's, alternately."""
    from peers import compare
    from rows import Effort

    return compare(name, workload, Effort(**effort))


def gpu(name: str, effort: dict[str, Any]) -> dict[str, Any]:
    """The samples of a row that needs a CUDA device."""
    from gpu_rows import PROGRAMS
    from rows import Effort

    return PROGRAMS[name](Effort(**effort))


def backend_first(**arguments: Any) -> dict[str, Any]:
    """Seconds of the first step of a compiled AdamW."""
    from backends import first

    return first(**arguments)


def backend_steady(**arguments: Any) -> dict[str, Any]:
    """The samples of compiled steps of both backends, alternately."""
    from backends import steady

    return steady(**arguments)


def solve(**arguments: Any) -> dict[str, Any]:
    """The samples of a solver of ours and of another, alternately, with one thread."""
    from solvers import turns

    return turns(**arguments)


def least(**arguments: Any) -> dict[str, Any]:
    """The lowest loss that a solver finds in some seconds."""
    from poisson import least

    return {"loss": least(**arguments)}


def sharded(**arguments: Any) -> dict[str, Any]:
    """The samples of one of several processes that step their shards alternately."""
    from sharded import turns

    return turns(**arguments)


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    program.__name__: program
    for program in (
        import_torch,
        import_both,
        first_step,
        cold_compile,
        kernels,
        memory,
        growth,
        train_compile,
        train_steps,
        train_memory,
        peer,
        gpu,
        sharded,
        solve,
        least,
        backend_first,
        backend_steady,
    )
}


if __name__ == "__main__":
    result = PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(result))
