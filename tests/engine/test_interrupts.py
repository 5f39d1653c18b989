"""Ctrl-C during a step: the step ends, or it has never been."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from compilers import Compiler, forget, gone
from helpers import clone
from interrupted import check_every_place, flags, interrupt
from sampling import some

import functional_optim as fo
from functional_optim import adapters
from functional_optim.kernels import interrupts

pytestmark = pytest.mark.usefixtures("pythons_own_handler")


def parameters():
    params = [torch.nn.Parameter(torch.linspace(1, 2, n)) for n in (3, 5)]
    for i, p in enumerate(params):
        p.grad = torch.linspace(0.1, 1, len(p)) * (i + 1)
    return params


def of_object(opt, params, closure=None):
    """A step, and what it writes."""

    def read():
        known = [opt.state.get(p) or {} for p in params]
        return [p.detach() for p in params], [dict(sorted(x.items())) for x in known]

    return (lambda: opt.step(closure) if closure else opt.step()), read


def recipe(lr=0.1):
    schedule = fo.schedules.linear(lr, 0.0, 9)
    return fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(schedule, momentum=0.9, dampening=0.5))


OBJECTS = {
    "compiled": lambda ps: adapters.AdamW(ps),
    "strict": lambda ps: adapters.Optimizer(ps, recipe, compile="strict"),
    "eager": lambda ps: adapters.AdamW(ps, compile=False),
    "without a count": lambda ps: adapters.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "carried numbers": lambda ps: adapters.NAdam(ps),
    "differentiable": lambda ps: adapters.AdamW(ps, differentiable=True),
    "whole trees": lambda ps: adapters.Optimizer(ps, lambda lr: fo.flatten(fo.adam(lr)), lr=0.1),
    "two groups": lambda ps: adapters.Adam([{"params": [p]} for p in ps], lr=0.1),
}


STRIDES = {"differentiable": 13, "whole trees": 11}
"""Optimizers whose steps take many calls: only every 13th or 11th call is interrupted."""


@pytest.mark.parametrize("warm", some([2, 0]), ids=["later", "first step"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_an_optimizer_steps_whole_or_not_at_all(kind, warm):
    def make():
        params = parameters()
        opt = OBJECTS[kind](params)
        if kind == "differentiable":
            for p in params:
                p.requires_grad_(False)
        for _ in range(warm):
            opt.step()
        return of_object(opt, params)

    check_every_place(make, STRIDES.get(kind, 3) if warm else 37)


@pytest.mark.parametrize("recorded", [False, True], ids=["in place", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_that_a_scaler_leaves_scaled_are_divided_once(dtype, recorded):
    def make():
        params = [p.detach().to(dtype) for p in parameters()]
        for p in params:
            p.grad = torch.full_like(p, 512.0)
        opt = adapters.SGD(params, lr=0.25, fused=True)
        opt.defaults["differentiable"] = recorded
        step, read = of_object(opt, params)

        def scaled():
            opt.grad_scale, opt.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            step()

        return scaled, lambda: (read(), [p.grad for p in params])

    check_every_place(make, 17)


def test_the_count_of_a_parameter_that_was_late():
    """Such as is written where the parameter that has been in all steps has no gradient."""

    def make():
        params = parameters()
        late, params[1].grad = params[1].grad, None
        opt = adapters.Optimizer(params, lambda lr: fo.accumulate(fo.sgd(lr), every=2), lr=0.1)
        for _ in range(2):
            opt.step()
        params[0].grad, params[1].grad = None, late
        return of_object(opt, params)

    check_every_place(make, 37)


def test_a_failed_step_is_undone_whole_if_an_interrupt_comes_too():
    def reached(at):
        params = parameters()
        params[1].data, params[1].grad = params[0].data, params[0].grad  # which it refuses
        opt = OBJECTS["without a count"](params)

        def step():
            with suppress(ValueError):
                opt.step()

        _, was = interrupt(step, at)
        assert not any(opt.state.values())
        return was

    last = 1
    while reached(last):
        last += 50
    for at in range(last - 100, last):
        reached(at)


def test_sparse_gradients():
    def make():
        p = torch.nn.Parameter(torch.ones(4, 2))
        p.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (4, 2), check_invariants=True)
        return of_object(adapters.SparseAdam([p]), [p])

    check_every_place(make, 17)


METHODS = {
    "lbfgs": (lambda ps: adapters.LBFGS(ps, max_iter=2), {"stride": 97}),
    "search": (
        lambda ps: adapters.GradientFree(ps, fo.search.snes, population=4, sigma=0.5),
        {"stride": 97},
    ),
    "estimator": (
        lambda ps: adapters.GradientFree(ps, fo.estimators.mezo, tx=fo.sgd, lr=0.1, eps=1e-2),
        {"stride": 97},
    ),
    "SAM": (lambda ps: adapters.SAM(ps, fo.sgd, lr=0.1, compile=False), {"name": "copy_"}),
    "SSBFGS": (lambda ps: adapters.SSBFGS(ps, max_iter=2), {"name": "copy_"}),
    "LevenbergMarquardt": (adapters.LevenbergMarquardt, {"name": "copy_"}),
}


@pytest.mark.parametrize("kind", METHODS)
def test_methods_that_try_parameters_out_leave_no_trial_point(kind):
    create, places = METHODS[kind]

    def make():
        params = [torch.nn.Parameter(torch.tensor(x)) for x in ([3.0, -2.0], [0.5])]
        opt = create(params)

        def closure():
            r = torch.cat([params[0] * params[0][0] - 1, params[1] + params[0][1]])
            if kind == "LevenbergMarquardt":
                return r
            loss = r.square().sum()
            if kind not in ("search", "estimator"):
                opt.zero_grad()
                loss.backward()
            return loss.detach()

        return of_object(opt, params, closure)

    check_every_place(make, **places)


def test_a_committed_step_of_a_group():
    """What was voted on is done: nothing is taken back, and no peer has to heal it."""
    for at in range(1, 20_000, 151):
        params = parameters()
        votes = fo.replicas.Scripted([True] * 9)
        opt = adapters.FaultTolerantOptimizer(votes, adapters.AdamW(params))
        before = clone([p.detach() for p in params])
        opt.zero_grad(set_to_none=False)
        for p in params:
            p.grad = torch.ones_like(p)
        raised, reached = interrupt(opt.step, at)
        assert raised == reached
        moved = not torch.equal(params[0], before[0])
        assert moved == (opt.decision is not None and opt.decision.committed)
        assert moved == (opt._member.schedules.commits == 1)
        assert moved == all(opt.optim.state[p].get("step") == 1 for p in params)
        if not reached:
            return
    raise AssertionError("more places than that")


@pytest.mark.parametrize("warm", some([2, 0]), ids=["later", "first step"])
@pytest.mark.parametrize("kind", ["strict", "carried", "odd", "synced"])
def test_a_compiled_step_is_written_whole(kind, warm):
    """Parameters, slots, carried numbers, hyperparameters and the count."""
    tx = {
        "strict": recipe(),
        "carried": fo.accumulate(fo.adam(fo.schedules.linear(0.1, 0.0, 9)), every=2),
        "odd": fo.adam(0.1),
        "synced": fo.local_sgd(fo.sgd(0.1), every=3),
    }[kind]

    def make():
        params = {"a": torch.ones(3), "b": torch.ones(2, 3).t()}
        grads = {name: torch.linspace(0, 1, p.numel()).view(p.shape) for name, p in params.items()}
        if kind == "odd":
            params["c"], grads["c"] = torch.ones(2, 3)[:, ::2], torch.ones(2, 2)
        state = tx.init(params)
        step = fo.compile(tx, strict=kind == "strict")
        for _ in range(warm):
            params, state = step(grads, state, params)
        return (lambda: step(grads, state, params)), (lambda: (params, state))

    check_every_place(make, 3 if warm else 37)


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")
@pytest.mark.parametrize("inside", [False, True])
def test_a_build_is_interrupted_at_once(monkeypatch, tmp_path, inside):
    """Also inside of what is held back otherwise; the next step builds it anew."""

    def rule(lr=0.1):
        def update(u, slots, p, lr):
            return u * lr * lr * lr * lr, slots

        return fo.leafwise(None, update, lambda t: (lr,))

    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    params = parameters()
    before, usual = clone([p.detach() for p in params]), flags()
    opt = adapters.Optimizer(params, rule)
    compiler = Compiler(tmp_path, "kill -INT $PPID; sleep 300")
    begun = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(compiler.path))
        with pytest.raises(KeyboardInterrupt):
            interrupts.held(opt.step) if inside else opt.step()
    assert time.monotonic() - begun < 60
    assert gone(compiler.wait())
    assert flags() == usual
    assert not opt.state
    assert all(map(torch.equal, params, before))
    opt.step()
    assert not torch.equal(params[0], before[0])


def test_the_handler_of_the_user_is_called_once_and_comes_back():
    calls = []

    def handler(*given):
        calls.append(given)

    before = signal.signal(signal.SIGINT, handler)
    try:
        for at in range(1, 30):
            del calls[:]
            raised, reached = interrupt(lambda: interrupts.held(len, "abc"), at)
            assert (raised, len(calls)) == (False, int(reached))
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_and_an_ignored_signal_hold_nothing_back():
    found = []
    thread = threading.Thread(target=lambda: found.append(interrupts.held(len, "abc")))
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found.append(interrupts.held(len, "abc"))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [3, 3]


IMPORTING = """
import os, signal, sys
import torch
from functional_optim import kernels

class Presses:
    \"\"\"Ctrl-C in the middle of the import of torch's compiler.\"\"\"

    def find_spec(self, name, *rest):
        if name == "torch._dynamo.symbolic_convert":
            os.kill(os.getpid(), signal.SIGINT)

assert "torch._dynamo" not in sys.modules
sys.meta_path.insert(0, Presses())
try:
    kernels.require_compiler(torch.device("cpu"))
except KeyboardInterrupt:
    print("interrupted")
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""


def test_the_import_of_torchs_compiler_is_not_left_half_way():
    command = [sys.executable, "-c", IMPORTING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["interrupted", "2.0"], done.stderr
