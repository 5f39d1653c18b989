"""Where a kernel cannot be had: eager steps and one warning, or the error of a strict step."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import forget, source
from helpers import assert_same, clone, run

import functional_optim as fo
from functional_optim import adapters, kernels
from functional_optim.kernels import libraries, print_cpp, toolchain
from functional_optim.kernels.points import POINT

posix = pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")

NONE = r"a strict step must be compiled, but there is no C\+\+ compiler"
ELSE = "a kernel for 'tried' does something else than the rules do"


@pytest.fixture
def no_compiler(monkeypatch):
    """Nothing is kept, and nothing can be compiled."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    monkeypatch.setenv("CXX", "/nowhere/g++")


# ---------------------------------------------------------------- strict steps
def of_function(tx: Any) -> Any:
    params = {"w": torch.eye(3)}
    state, step = tx.init(params), fo.compile(tx, strict=True)
    return lambda: step({"w": torch.ones(3, 3)}, state, params), lambda: (params, state)


def of_object(make: Any) -> Any:
    w = torch.nn.Parameter(torch.ones(5))
    w.grad = torch.ones(5)
    opt = make([w])
    return opt.step, lambda: (w.detach(), dict(opt.state))


OBJECTS = {"drop-in": lambda ps: adapters.AdamW(ps, compile="strict")}
OBJECTS |= {"object": lambda ps: adapters.Optimizer(ps, fo.adamw, compile="strict")}
STRICT = {
    "function": lambda: of_function(fo.adamw()),
    "matrices": lambda: of_function(fo.muon()),
    **{name: lambda make=make: of_object(make) for name, make in OBJECTS.items()},
}


@pytest.mark.parametrize("way", STRICT)
def test_a_strict_step_that_cannot_be_compiled_raises_and_writes_nothing(way, request, monkeypatch):
    """Tried again at the next step: what was missing may be there by then."""
    request.getfixturevalue("no_compiler")
    step, read = STRICT[way]()
    before = clone(read())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=NONE) as error:
            step()
        assert isinstance(error.value.__cause__, kernels.NoCompiler)
    assert_same(read(), before)
    monkeypatch.delenv("CXX")
    step()


@pytest.mark.usefixtures("no_compiler")
def test_nothing_is_written_if_the_second_kind_of_tensor_cannot_be_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    tx, step = fo.sgd(0.1), fo.compile(fo.sgd(0.1), strict=True)
    with monkeypatch.context() as patch:
        patch.delenv("CXX")
        single = {"a": torch.ones(3)}
        step({"a": torch.ones(3)}, tx.init(single), single)
    params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64)}
    before = clone(params)
    with pytest.raises(RuntimeError, match=NONE):
        step(clone(params), tx.init(params), params)
    assert_same(params, before)


@pytest.mark.usefixtures("no_compiler")
def test_a_failure_that_was_passed_over_before_is_none_to_a_strict_step(monkeypatch):
    tx, params = fo.sgd(0.1), {"w": torch.ones(3)}
    with pytest.warns(RuntimeWarning, match="no C"):
        fo.compile(tx)(clone(params), tx.init(params), clone(params))
    with pytest.raises(RuntimeError, match=NONE):
        fo.compile(tx, strict=True)(clone(params), tx.init(params), params)
    monkeypatch.delenv("CXX")
    got = fo.compile(tx, strict=True)(clone(params), tx.init(params), clone(params))
    assert_same(got, run(tx, params, [params]))


@pytest.mark.parametrize("bad", ["fast", None, 2, "Strict"])
def test_another_word_for_compile_raises_at_once(bad):
    params = [torch.nn.Parameter(torch.ones(5))]
    for make in (adapters.AdamW, lambda ps, **more: adapters.Optimizer(ps, fo.adamw, **more)):
        with pytest.raises(ValueError, match=r'compile must be True, False, or "strict"'):
            make(params, compile=bad)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [("strict", RuntimeError, NONE), ("fast", ValueError, "compile must be True")],
)
def test_another_word_for_compile_counts_from_the_next_step(changed, error, words):
    w = torch.nn.Parameter(torch.ones(5))
    w.grad = torch.ones(5)
    opt = adapters.AdamW([w], compile=False)
    opt.step()
    before, opt.compile = w.detach().clone(), changed
    with pytest.raises(error, match=words):
        opt.step()
    assert_same(w.detach(), before)


# ---------------------------------------------------------------- kernels that are wrong
def added(monkeypatch):
    """Kernels add where they are to multiply."""
    monkeypatch.setitem(POINT, "mul.Tensor", lambda b, n, x, y: b.add(x, y))


def put_together_wrongly(monkeypatch):
    """What the chunks leave, which only tensors of several chunks show."""
    wrong = print_cpp.HEAD.replace("return a + b", "return a")
    assert wrong != print_cpp.HEAD
    monkeypatch.setattr(print_cpp, "HEAD", wrong)


WRONG = {
    "elements": (added, lambda u: u * u),
    "small ones": (added, lambda u: 1e-6 * (u * u)),
    "sums": (put_together_wrongly, lambda u: u / u.sum(0, keepdim=True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_does_something_else_than_its_rule_is_not_used(name, monkeypatch):
    """It is tried on small tensors."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    fault, rule = WRONG[name]
    tx = fo.leafwise(None, lambda u, slots, p: (rule(u), slots), name="tried")
    params = {"w": torch.ones(3, 4), "b": torch.ones(5, 4)}
    grads = fo.tree.map(lambda p: torch.full_like(p, 3.0), params)
    wanted, _ = run(tx, params, [grads])
    state = tx.init(params)
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(RuntimeError, match=ELSE):
            fo.compile(tx, strict=True)(grads, state, clone(params))
        with pytest.warns(RuntimeWarning, match=ELSE) as caught:
            found, _ = fo.compile(tx)(grads, state, clone(params))
    assert len(caught) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)
    forget(monkeypatch)
    found, _ = fo.compile(tx, strict=True)(grads, state, clone(params))
    torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------- what is said, in a process
STEPS = """
import sys, warnings
import torch
import functional_optim as fo
from functional_optim.adapters import AdamW, Optimizer

fused = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(1e-2), fo.params_ema(0.9))
whole = fo.flatten(fo.chain(fo.clip_by_global_norm(1.0), fo.add_noise(1.0, 0.5, seed=1)))
recipes = {"fused": fused, "rows": fo.adafactor(1e-2), "matrices": fo.muon(1e-2), "whole": whole}
params = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, 4)}
grads = {name: torch.full_like(p, 0.5) for name, p in params.items()}

def trained(step, tx):
    p, state = {k: x.clone() for k, x in params.items()}, tx.init(params)
    for _ in range(2):
        p, state = step(grads, state, p)
    return p

def pure(tx):
    def step(grads, state, p):
        updates, state = tx.update(grads, state, p)
        return fo.apply_updates(p, updates), state
    return step

def same(a, b):
    assert all([torch.allclose(a[k], b[k]) for k in a])

with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for tx in recipes.values():
        same(trained(fo.compile(tx), tx), trained(pure(tx), tx))
    for make in (AdamW, lambda ps, lr: Optimizer(ps, fo.adamw, lr=lr)):
        p = torch.nn.Parameter(torch.ones(3))
        q = torch.nn.Parameter(torch.ones(3))
        p.grad, q.grad = torch.ones(3), torch.ones(3)
        make([p], lr=0.1).step()
        torch.optim.AdamW([q], lr=0.1).step()
        assert torch.allclose(p, q)
    train = fo.compile_train_step(lambda p: (p["a"] ** 2).sum() + p["b"].sum(), fused)
    p, state, loss = train(params, fused.init(params))
    assert loss.item() == 506.0 + 16.0
    rates = fo.find_lr(lambda p: (p["a"] ** 2).sum(), fo.sgd, params, [()], values=[0.1, 0.2])
for w in heard:
    if "functional_optim" in str(w.message):
        print(w.category.__name__, w.message)
"""


@posix
def test_without_a_compiler_steps_are_eager_and_one_warning_says_what_to_do(tmp_path):
    (tmp_path / "bin").mkdir()
    told = {"PATH": str(tmp_path / "bin"), "FUNCTIONAL_OPTIM_CACHE": str(tmp_path / "kernels")}
    base = {name: x for name, x in os.environ.items() if name != "CXX"}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env={**base, **told}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first = "RuntimeWarning functional_optim: steps without a kept kernel run eagerly"
    assert done.stdout.startswith(first)
    reason = "there is no C++ compiler (looked for g++, clang++, c++); install g++"
    assert reason in done.stdout
    assert done.stdout.count("\n") == 1


# ---------------------------------------------------------------- what is said, here
EMPTY = 'while [ "$1" != -o ]; do shift; done; : > "$2"'
NO_CC1 = "echo \"cc: error: cannot execute 'cc1plus': compilation terminated\"; exit 1"


def named(name: str) -> Any:
    """The name of the compiler."""
    return lambda patch, folder: patch.setenv("CXX", name)


def broken(does: str, program: str = "/bin/sh") -> Any:
    """A compiler that does something else."""

    def prepare(patch: Any, folder: Path) -> None:
        path = folder / "broken++"
        path.write_text(f"#!{program}\n{does}\n")
        path.chmod(0o700)
        patch.setenv("CXX", str(path))

    return prepare


def full_disk(patch: Any, folder: Path) -> None:
    def write(path: Path, text: str) -> None:
        with Path("/dev/full").open("w") as out:
            out.write(text)

    patch.setattr(Path, "write_text", write)


def no_folder(patch: Any, folder: Path) -> None:
    patch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])


FULL = "final link failed: No space left on device"
TOLD = {
    "an empty name": (named(""), "there is no C++ compiler (CXX is empty); install g++"),
    "another name": (named("/nowhere/clang++"), "(looked for /nowhere/clang++); install g++"),
    "no program": (broken("", "/nowhere/sh"), "does not work here ([Errno 2]"),
    "an empty file": (broken(EMPTY), "does not work here (what it builds is no library)"),
    "no text": (broken("printf 'error: \\377\\376 no'; exit 1"), "here (error: \ufffd\ufffd no)."),
    "gcc without g++": (broken(NO_CC1), "(cc: error: cannot execute 'cc1plus'"),
    "a full disk of the linker": (
        broken(f"echo '/usr/bin/ld: {FULL}'; echo 'collect2: error: ld returned 1'; exit 1"),
        f"(/usr/bin/ld: {FULL}).",
    ),
    "nothing": (broken(":"), "does not work here (what it builds is no library)"),
    "no reason": (broken("exit 3"), "does not work here (exit 3)"),
    "a full disk": (full_disk, "files cannot be written ([Errno 28] No space left on device"),
    "no temporary folder": (no_folder, "cannot be written ([Errno 2] No usable temporary"),
}


@posix
@pytest.mark.parametrize("name", TOLD)
def test_what_keeps_two_kernels_from_being_built_is_told_once(name, tmp_path, monkeypatch):
    if name == "a full disk" and not Path("/dev/full").exists():
        pytest.skip("no device is always full here")
    prepare, words = TOLD[name]
    with monkeypatch.context() as patch:
        forget(patch)
        patch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
        prepare(patch, tmp_path)
        patch.setattr(tempfile, "tempdir", None)  # where it was found before
        with pytest.warns(RuntimeWarning) as heard:
            found = [libraries.library(source(n)) for n in (1, 2)]
    assert found == [None, None]
    assert [words in str(one.message) for one in heard] == [True]


def test_a_kernel_that_does_not_compile_is_told_as_what_it_is(monkeypatch):
    """The compiler works: it is tried with another text."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    wanted = source(1)._replace(text="no C++;")
    with pytest.warns(RuntimeWarning, match="no kernel can be built here .*'no' does not name"):
        assert libraries.library(wanted) is None
    toolchain.require()
    with pytest.raises(RuntimeError, match="a strict step must be compiled, but no kernel can"):
        libraries.library(wanted, strict=True)


@posix
def test_what_needs_a_compiler_asks_for_one_that_works(monkeypatch, tmp_path):
    forget(monkeypatch)
    kernels.require_compiler(torch.device("cpu"))
    broken(EMPTY)(monkeypatch, tmp_path)
    with pytest.raises(kernels.NoCompiler, match="what it builds is no library"):
        kernels.require_compiler(torch.device("cpu"))
    kernels.require_compiler(torch.device("meta"))
