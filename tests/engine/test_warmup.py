"""Kernels compiled ahead of time: what the command says, and that later processes find them."""

import os
import subprocess
import sys

import pytest
import torch
from compilers import forget

import functional_optim as fo
from functional_optim import warmup
from functional_optim.kernels import newton_schulz

LATER = """
import sys, torch
from functional_optim import adapters
w = torch.nn.Parameter(torch.ones(7))
w.grad = torch.ones(7)
opt = adapters.AdamW([w], lr=0.5, weight_decay=0.3, compile="strict")
opt.step()
print(w[0].item(), [m for m in ("torch._inductor", "torch._dynamo") if m in sys.modules])
"""


def python(*args, **env):
    return subprocess.run(
        [sys.executable, *args], env={**os.environ, **env}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder filled by the command, and what it said."""
    here = str(tmp_path_factory.mktemp("warmup") / "kernels")
    for what in ("built", "found"):
        done = python("-m", "functional_optim.warmup", "adamw", FUNCTIONAL_OPTIM_CACHE=here)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"adamw, float32: 1 {what}\nThe folder of kernels is {here}.\n"
    return here


def test_an_optimizer_in_a_later_process_finds_its_kernel(folder):
    done = python("-c", LATER, FUNCTIONAL_OPTIM_CACHE=folder, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    weight, imported = done.stdout.split(maxsplit=1)
    w = torch.nn.Parameter(torch.ones(7))
    w.grad = torch.ones(7)
    torch.optim.AdamW([w], lr=0.5, weight_decay=0.3).step()
    assert float(weight) == pytest.approx(w[0].item(), rel=1e-6)
    assert imported == "[]\n"


MUON = """
import torch
from functional_optim import adapters
ws = [torch.nn.Parameter(torch.ones(60, 50)), torch.nn.Parameter(torch.ones(40, 900))]
for w in ws:
    w.grad = torch.randn(w.shape)
adapters.Muon(ws, compile="strict").step()
"""


@pytest.mark.skipif(not newton_schulz.serves(), reason="ATen multiplies on this processor")
def test_libraries_of_large_matrices_are_warmed(tmp_path):
    here = {"FUNCTIONAL_OPTIM_CACHE": str(tmp_path / "kernels")}
    done = python("-m", "functional_optim.warmup", "muon", **here)
    assert done.returncode == 0, done.stderr
    done = python("-W", "error", "-c", MUON, **here, PATH="/nowhere")
    assert done.returncode == 0, done.stderr


def test_where_nothing_can_be_kept_it_says_so_and_fails(monkeypatch, capsys):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    assert warmup.main(["sgd"]) == 1
    said = capsys.readouterr().out
    assert "sgd, float32: 1 compiled, but not kept\n" in said
    assert "Nothing can be cached: FUNCTIONAL_OPTIM_CACHE is off" in said


def test_what_cannot_be_compiled_has_no_kernels(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    forget(monkeypatch)
    with pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler"):
        warmup.warm(fo.sgd())
    assert warmup.main(["sgd"]) == 1
    assert "sgd: functional_optim: a strict step must be compiled" in capsys.readouterr().out


def test_what_has_no_rule_for_one_tensor_is_told(capsys):
    assert warmup.main(["lbfgs"]) == 1
    assert "lbfgs: only transformations made of one-tensor rules" in capsys.readouterr().out
    with pytest.raises(TypeError, match="only transformations made of one-tensor rules"):
        warmup.warm(fo.lbfgs())


@pytest.mark.parametrize(
    "tx",
    [
        fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.1)),  # one that measures
        fo.centralize(),  # for vectors, and for matrices
        fo.muon(),  # around a product
    ],
)
def test_every_dtype_and_every_kernel_of_a_recipe_is_warmed_and_kept(tx):
    results = warmup.warm(tx, (torch.float32, torch.bfloat16))
    assert [x.dtype for x in results] == [torch.float32, torch.bfloat16]
    assert [(x.built + x.found, x.unkept) for x in results] == [(2, 0)] * 2


def test_hyperparameters_are_set_by_name():
    tx = warmup._recipe("sgd", ["momentum=0.9", "nesterov=True"])
    assert tx.layout.slots == (("momentum_buffer",), ())
    with pytest.raises(ValueError, match="Adjust learning rate function fast is not supported"):
        warmup._recipe("muon", ["adjust_lr_fn=fast"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["adamx"], "there is no algorithm called 'adamx'; the known ones are acprop, "),
        (["sgd", "--set", "foo=1"], "sgd does not take the hyperparameter foo; it takes lr, "),
        (["sgd", "--set", "momentum"], "set by name=value, but got 'momentum'"),
        (["sgd", "--set", "lr=-1"], "Invalid learning rate: -1"),
        (["sgd", "--dtype", "int8"], "parameters cannot have the dtype 'int8'"),
        (["sgd", "--dtype", "nn"], "parameters cannot have the dtype 'nn'"),
        (["sgd"], "FUNCTIONAL_OPTIM_LEVEL is 'x86-64-v9', which is no level that this machine has"),
    ],
)
def test_a_wrong_name_is_told_with_the_right_ones(capsys, argv, words, monkeypatch):
    if "LEVEL" in words:
        monkeypatch.setenv("FUNCTIONAL_OPTIM_LEVEL", "x86-64-v9")
    with pytest.raises(SystemExit) as stop:
        warmup.main(argv)
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_every_named_algorithm_is_one_of_the_package():
    assert {"adamw", "sgd", "muon", "lbfgs"} <= warmup.known().keys()
    assert all(getattr(fo, name) is factory for name, factory in warmup.known().items())
