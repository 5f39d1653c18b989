"""How often the C++ compiler is called, and by whom."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import clone

import functional_optim as fo
from functional_optim import adapters, kernels
from functional_optim.kernels import building, cpu, disk_cache


@pytest.fixture
def built(monkeypatch: Any, tmp_path: Any) -> list[int]:
    """How many kernels each call of the compiler has had, in a process that has built nothing."""
    found: list[int] = []
    real = building.start

    def count(source: str, scratch: Any) -> Any:
        found.append(source.count("namespace part"))
        return real(source, scratch)

    monkeypatch.setattr(building, "start", count)
    monkeypatch.setattr(kernels, "_built", {})
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path / "kernels"))
    disk_cache._checked.cache_clear()
    return found


def stepped(recipe: Any, compile: Any) -> list[torch.Tensor]:
    """Parameters after two steps of an optimizer object."""
    shapes = [(4, 3), (5,), (2, 2)]
    params = [
        torch.nn.Parameter(torch.linspace(0.1, 1, torch.Size(x).numel()).reshape(x)) for x in shapes
    ]
    opt = adapters.Optimizer(params, recipe, compile=compile)
    for _ in range(2):
        for p in params:
            p.grad = p.detach() ** 2 - 0.3
        opt.step()
    return clone(params)


def clipped() -> Any:
    return fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(1e-2))


def check(recipe: Any) -> None:
    for x, y in zip(stepped(recipe, "strict"), stepped(recipe, False), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "recipe",
    [
        clipped,
        lambda: fo.chain(fo.scale_by_adam(), fo.scale_by_trust_ratio(), fo.scale_by_lr(0.1)),
        lambda: fo.adafactor(0.1),
    ],
    ids=["a norm of all, then the step", "a norm of each, then the step", "vectors and matrices"],
)
def test_all_kernels_of_a_recipe_are_one_call_of_the_compiler(recipe, built, monkeypatch):
    check(recipe)
    assert built == [2]
    monkeypatch.setattr(kernels, "_built", {})
    check(recipe)  # both are kept, each under its own name
    assert built == [2]


def test_one_kernel_that_is_not_right_leaves_the_others_as_they_are(built, monkeypatch):
    real = cpu._try

    def refuse(native: Any, body: Any, signature: Any) -> None:
        if native.outputs:
            raise building.Unsuitable("for a test")
        real(native, body, signature)

    monkeypatch.setattr(cpu, "_try", refuse)
    check(clipped)
    assert built == [2]
    natives = [x for x in kernels._built.values() if isinstance(x, kernels.Native)]
    assert [x.outputs for x in natives] == [0]


def test_what_another_process_is_building_is_left_to_it(built, monkeypatch):
    """The kernel for the norm is locked, until it is asked for by itself."""
    names, real = [], disk_cache.turn

    def turn(name: Any, *, wait: bool = True) -> Any:
        names.append((name, wait))
        return real("taken.so" if len(names) == 1 else name, wait=wait)

    monkeypatch.setattr(disk_cache, "turn", turn)
    with real("taken.so"):
        check(clipped)
    (first, _), (second, _), (again, waits) = names
    assert (first, waits) == (again, True)
    assert second != first
    assert built == [1, 1]


MUON = """
import sys, torch
from functional_optim import adapters
p = torch.nn.Parameter(torch.ones(3, 4))
p.grad = torch.ones(3, 4)
adapters.Muon([p]).step()
print([name for name in ("torch._inductor", "torch._dynamo") if name in sys.modules])
"""


def test_products_import_no_compiler_where_their_kernels_are_kept(built):
    for expected in (["torch._inductor", "torch._dynamo"], []):
        done = subprocess.run([sys.executable, "-c", MUON], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(expected)
