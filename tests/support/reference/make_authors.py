"""Writes authors.json: where the authors' own optimizers go. test_authors.py reads it.

    pip install lion-pytorch adabelief-pytorch madgrad torch-adopt pytorch_optimizer
    python tests/support/reference/make_authors.py

A row here and a row of the same name there are one comparison. A row is a function from parameters
to an optimizer: the authors', or, where they have published no package, a port that does as they
do.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from reference import waves

FILE = Path(__file__).with_name("authors.json")
PACKAGES = (
    "lion-pytorch",
    "adabelief-pytorch",
    "madgrad",
    "torch-adopt",
    "pytorch_optimizer",
)
LR = 0.05
ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3}


def lion(params):
    from lion_pytorch import Lion

    return Lion(params, LR, betas=(0.8, 0.95), weight_decay=0.1)


def adabelief(params, *, rectify=True):
    from adabelief_pytorch import AdaBelief

    return AdaBelief(params, LR, **ADAM, weight_decay=0.1, rectify=rectify, print_change_log=False)


def adabelief_plain(params):
    return adabelief(params, rectify=False)


def madgrad(params):
    from madgrad import MADGRAD

    return MADGRAD(params, LR, momentum=0.8, weight_decay=0.1, eps=1e-3)


def adopt(params, *, decouple=False):
    from adopt import ADOPT

    return ADOPT(params, LR, **ADAM, weight_decay=0.1, decouple=decouple)


def adopt_decoupled(params):
    return adopt(params, decouple=True)


def adan(params):
    from pytorch_optimizer import Adan

    return Adan(params, LR, betas=(0.9, 0.8, 0.95), eps=1e-3, weight_decay=0.1)


def ademamix(params):
    from pytorch_optimizer import AdEMAMix

    return AdEMAMix(params, LR, betas=(0.8, 0.95, 0.99), alpha=2.0, eps=1e-3)


def yogi(params):
    from pytorch_optimizer import Yogi

    return Yogi(params, LR, **ADAM, weight_decay=0.1)


ROWS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adabelief": adabelief,
    "adabelief-plain": adabelief_plain,
    "adan": adan,
    "ademamix": ademamix,
    "adopt": adopt,
    "adopt-decoupled": adopt_decoupled,
    "lion": lion,
    "madgrad": madgrad,
    "yogi": yogi,
}


def leaves(tree):
    return [tree["body"]["b"], tree["body"]["w"], tree["head"]]


def trajectory(make):
    """The parameters after some steps, in the order of their names."""
    params = [torch.nn.Parameter(torch.as_tensor(x)) for x in leaves(waves.params())]
    with contextlib.redirect_stdout(io.StringIO()):  # some packages print when they are used
        optimizer = make(params)
    found = {}
    for step in range(1, waves.STEPS + 1):
        for p, g in zip(params, leaves(waves.grads(step)), strict=True):
            p.grad = torch.as_tensor(g)
        optimizer.step()
        if step in waves.KEPT:
            found[str(step)] = [p.tolist() for p in params]
    return found


def main():
    """Write every row whose package is there; the others stay as they are."""
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}, "rows": {}}
    rows, versions = kept["rows"], kept["versions"]
    for name, make in ROWS.items():
        try:
            rows[name] = trajectory(make)
        except ModuleNotFoundError as missing:
            sys.stderr.write(f"{name} stays as it is: {missing}\n")
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    versions["torch"] = torch.__version__
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
    body = ",\n".join(lines)
    FILE.write_text(f'{{"versions": {json.dumps(versions)},\n"rows": {{\n{body}\n}}}}\n')


if __name__ == "__main__":
    main()
