"""Steps on a device that is not the CPU, as a program of its own: `python another_device.py`.

torch's lazy tensors are such a device, on every machine: they stand for operations still to be run,
and each time the host waits for a value is counted. Prints, for each row and each way to step it,
how often that was in each step, and how far the results are from the CPU's.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import cases
import loops
import torch
import torch._lazy.metrics as metrics

import functional_optim as fo

STEPS = 4
READ = "aten::_local_scalar_dense"
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3)}


def watched() -> fo.GradientTransformation:
    """Measurements before, behind and around a clip, a schedule, an average."""
    before = {"norm": fo.measures.global_norm, "size": fo.measures.rms}
    return fo.chain(
        fo.monitor(before),
        fo.monitor({"share": fo.measures.clip_share}, around=fo.clip_by_global_norm(0.5)),
        fo.snapshot("clipped", fo.measures.global_norm),
        fo.monitor(
            fo.measures.diagnostics,
            around=fo.adamw(fo.schedules.linear(0.1, 0.0, 10)),
            per_tensor=True,
        ),
        fo.params_ema(0.9),
    )


def gathered(lr: float) -> fo.GradientTransformation:
    """A gate that the host knows: torch's lazy tensors have no `where` for others."""
    return fo.accumulate(fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr)), every=2)


NAMES = ("sgd-momentum", "adamw", "adafactor", "asgd", "nadam", "composed")
ROWS = [loops.row(name) for name in NAMES]
ROWS += [cases.row("watched", watched), cases.row("gathered", gathered, lr=0.1)]


def ways(case: cases.Case) -> list[str]:
    """How a row can be stepped; loaded: from a state dict after half of the steps."""
    drop_in = [] if case.stock is None else ["drop-in"]
    functional = [] if case.name == "gathered" else ["update", "compile"]
    return ["recipe", "loaded", *drop_in, *functional]


def reads() -> int:
    """How often the host has waited since the last call."""
    found = metrics.counter_value(READ) if READ in metrics.counter_names() else 0
    metrics.reset()
    return found


def train(case: cases.Case, way: str, device: str) -> tuple[Any, list[int]]:
    """The parameters and the state in the end, and how often each step has waited."""
    torch.manual_seed(0)
    shapes = {n: shape for n, shape in SHAPES.items() if case.dim in (None, len(shape))}
    given = [
        {n: torch.randn(shape, dtype=torch.float64).to(device) for n, shape in shapes.items()}
        for _ in range(STEPS + 1)
    ]
    params: Any = given[0]
    waits = []
    if way in ("update", "compile"):
        tx = case.tx()
        state, step = tx.init(params), fo.compile(tx)
        for g in given[1:]:
            reads()
            if way == "compile":
                params, state = step(g, state, params)
            else:
                updates, state = tx.update(g, state, params)
                params = fo.apply_updates(params, updates)
            waits.append(reads())
        return (params, state), waits
    make = loops.drop_in if way == "drop-in" else loops.general
    params = {n: torch.nn.Parameter(p) for n, p in params.items()}
    opt = make(case, params.values())
    for i, g in enumerate(given[1:]):
        if way == "loaded" and i == STEPS // 2:
            saved = copy.deepcopy(opt.state_dict())
            opt = make(case, params.values())
            opt.load_state_dict(saved)
        for name, p in params.items():
            p.grad = g[name]
        reads()
        opt.step()
        waits.append(reads())
    return (params, [opt.state.get(p, {}) for p in params.values()]), waits


def distance(a: Any, b: Any) -> float:
    pairs = zip(fo.tree.leaves(a), fo.tree.leaves(b), strict=True)
    far = [x.to("cpu").double() - y.double() for x, y in pairs if isinstance(x, torch.Tensor)]
    return max(x.abs().max().item() for x in far)


def main() -> None:
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    x = torch.zeros(3).to("lazy").sum()
    reads()
    x.item()
    found: dict[str, Any] = {"control": reads()}
    for case in ROWS:
        for way in ways(case):
            mine, waits = train(case, way, "lazy")
            theirs, _ = train(case, "update" if way == "compile" else way, "cpu")
            found[f"{case.name} {way}"] = {"waits": waits, "far": distance(mine, theirs)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
