"""Each private name of torch may be missing: steps are the same, and only slower."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from functional_optim.kernels.private import NAMES

STEPS = """
import builtins, json, os, sys, warnings
import torch, torch._dynamo
from torch.fx.experimental.proxy_tensor import make_fx

def without(name):
    \"\"\"Load the module of private names where torch lacks one.\"\"\"
    *above, last = name.split(".")
    home = torch
    for part in above[1:]:
        home = getattr(home, part)
    kept = getattr(home, last)
    delattr(home, last)
    import functional_optim.kernels.private
    setattr(home, last, kept)

def refused(name, globals=None, *rest, **more):
    if (globals or {}).get("__name__") == "functional_optim.kernels.private":
        raise ImportError
    return imported(name, globals, *rest, **more)

def steps(missing):
    global imported
    imported = builtins.__import__
    if missing == "torch._dynamo.symbolic_convert":
        from functional_optim.kernels import private
        builtins.__import__ = refused
    elif missing == "_dynamo_marked_constant":
        from functional_optim.core.state_keys import known_layout
        from functional_optim.kernels.private import keep_numbers_open
        for fn in (keep_numbers_open, known_layout):
            del vars(fn)[missing]
    elif missing:
        without(missing)
    import functional_optim as fo
    from functional_optim.adapters import Optimizer
    from functional_optim.kernels import private
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shapes = {"a": (3, 4), "b": (5,), "c": ()}
    start = {k: torch.linspace(-1, 1, 12).reshape(3, 4) if k == "a" else torch.full(s, 0.5)
             for k, s in shapes.items()}
    grads = {k: 0.3 * p.cos() for k, p in start.items()}
    found = {}
    def recipe(lr=0.1):
        norm = fo.leafwise(None, lambda u, slots, p: (u / (u.norm() + 1), slots), name="norm")
        return fo.chain(fo.clip_by_global_norm(1.0), fo.scale_by_adam(), norm, fo.scale_by_lr(lr))
    def copies():
        return {k: p.clone() for k, p in start.items()}
    def note(name, tree):
        found[name] = [x.flatten().tolist() for x in fo.tree.leaves(tree)]
    tx, params = recipe(), copies()
    step, state = fo.compile(tx), tx.init(params)
    for k in range(3):
        fresh = {n: g + k for n, g in grads.items()}
        params, state = step(grads if k < 2 else fresh, state, params)
    note("functional", params)
    for compile in (True, False):
        named = [(k, torch.nn.Parameter(p)) for k, p in copies().items()]
        opt = Optimizer(named, recipe, compile=compile)
        for k in range(3):
            for (n, p) in named:
                p.grad = grads[n].clone() if k else grads[n]
            opt.step()
        note(f"object {compile}", [p.detach() for _, p in named])
    both = torch.stack([start["b"], 2 * start["b"]])
    sgd = fo.sgd(0.5, momentum=0.9)
    mapped = fo.compile(sgd, donate=False)
    note("vmap", torch.vmap(lambda p: mapped(p, sgd.init(p), p)[0])(both))
    graph = make_fx(lambda g: mapped(g, sgd.init(start["b"]), start["b"])[0])(grads["b"])
    note("make_fx", graph(grads["b"]))
    slope = torch.func.grad(lambda g: mapped(g, sgd.init(g), start["b"])[0].sum())
    note("gradient", slope(grads["b"]))
    if missing in ("", "torch._dynamo.symbolic_convert", "_dynamo_marked_constant"):
        traced = torch.compile(tx.update, backend="eager", fullgraph=True)
        state, seen = tx.init(start), copies()
        for _ in range(2):
            updates, state = traced(grads, state, seen)
            seen = fo.apply_updates(seen, updates)
        note("traced", seen)
    lacks = (private.TensorGuards, private.data_reader, private.DispatchMode)
    kept = [bool(x) for x, name in zip(lacks, LACKS) if name == missing]
    assert kept in ([], [False])
    return found

LACKS = (
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    "torch.utils._python_dispatch.TorchDispatchMode",
)

for missing in sys.argv[1:]:
    if not os.fork():
        try:
            print(json.dumps(steps(missing)), flush=True)
        except BaseException as error:
            print(json.dumps(f"{type(error).__name__}: {error}"[:300]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the steps come to without each name, and with all of them."""
    names = ["", *NAMES]
    command = [sys.executable, "-c", STEPS, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process for each name is a fork")
@pytest.mark.parametrize("name", NAMES)
def test_steps_without_one_of_torchs_private_names_are_the_same(name, found):
    assert isinstance(found[name], dict), found[name]
    for key, own in found[name].items():
        for x, y in zip(own, found[""][key], strict=True):
            assert x == pytest.approx(y, rel=1e-5), key
