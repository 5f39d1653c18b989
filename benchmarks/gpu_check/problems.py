"""Solvers for many problems, and optimizers that evaluate the loss, next to the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import problems
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from gpu_check.platform import Platform
from gpu_check.results import Check, Figures, expect
from gpu_check.training import strict

CPU = torch.device("cpu")
COUNT = 200
FAR = 1e-6
"""How far a solution may be from the CPU's: sums are rounded in another order there."""

STEPS = 4
"""After more, the line searches have turned differences of rounding into other steps."""

Solve = Callable[..., Any]


def checks(quick: bool) -> list[Check]:
    squares = {"lm": {}, "trf": {"bounds": (0.0, 2.5)}, "dogleg": {}}
    minima = ("l-bfgs-b", "bfgs", "ssbfgs", "ssbroyden", "newton-cg")
    found = [
        Check(f"solvers/{name}", partial(solved, fo.least_squares, DECAYS, {"method": name, **how}))
        for name, how in squares.items()
    ]
    found += [
        Check(f"solvers/root-{name}", partial(solved, fo.root, SYSTEMS, {"method": name}))
        for name in ("newton", "lm", "broyden")
    ]
    for name in minima[: 1 if quick else None]:
        how = {"method": name, "bounds": (-1.5, 0.8)}
        found.append(Check(f"solvers/{name}", partial(solved, fo.minimize, VALLEYS, how)))
    found += [Check(f"closures/{name}", partial(stepped, name)) for name in CLOSURES]
    for name, (solve, make, how) in BATCHES.items():
        for count in (1000,) if quick else (1000, 100_000):
            run = partial(timed, solve, make, how, count, 2 if quick else 6)
            found.append(Check(f"batches/{name}-{count}", run))
    return found


DECAYS = partial(problems.decays, COUNT)
SYSTEMS = partial(problems.tridiagonals, COUNT, n=5)
VALLEYS = partial(problems.valleys, COUNT, n=4)

BATCHES: dict[str, tuple[Solve, Callable[[int], problems.Many], dict[str, Any]]] = {
    "fits": (fo.least_squares, problems.decays, {}),
    "roots": (fo.root, partial(problems.tridiagonals, n=5), {}),
    "bounded": (fo.minimize, partial(problems.valleys, n=16), {"bounds": (-1.5, 0.8)}),
}


def on_device(many: problems.Many, device: torch.device) -> tuple[Solve, Tensor, Tensor]:
    """The function of a problem, starting points and data on a device."""
    x0, data = (x.to(device) for x in many.tensors())
    times = torch.from_numpy(problems.TIMES).to(device)

    def decay(p: Tensor, y: Tensor) -> Tensor:
        return p[0] * torch.exp(-p[1] * times) + p[2] - y

    return (decay if x0.shape[1] == 3 else many.fun), x0, data


def solved(
    solve: Solve,
    make: Callable[[], problems.Many],
    how: dict[str, Any],
    platform: Platform,
    figures: Figures,
) -> None:
    """Problems in a batch end where they end on the CPU, and a gradient by its data agrees; also
    with compile=True, except where that calls torch.compile."""
    both = (False, True) if how.get("method") != "newton-cg" else (False,)
    ends: list[Any] = []
    for device, compiled in ((CPU, False), *[(platform.device, x) for x in both]):
        fun, x0, data = on_device(make(), device)
        data.requires_grad_()
        with strict():
            found = solve(fun, x0, (data,), batched=True, compile=compiled, **how)
        expect(found.x.device.type == device.type, f"x is on {found.x.device}.")
        (slope,) = torch.autograd.grad(found.x.sum(), data)
        ends.append((int((found.status > 0).sum()), found.x.detach().cpu(), slope.cpu()))
    (_, there, expected), *others = ends
    for name, (converged, here, slope) in zip(("eager", "compiled"), others, strict=False):
        apart = (here - there).abs().amax(1)
        same = apart <= FAR
        elsewhere = int((~same).sum())
        gap = float((slope - expected)[same].abs().max() / expected[same].abs().max())
        figures |= {f"{name}, converged": converged, f"{name}, elsewhere": elsewhere}
        figures |= {f"{name}, distance": float(apart.median()), f"{name}, gradient": gap}
        expect(converged >= 0.98 * COUNT, f"{name}, only {converged} of {COUNT} converge.")
        expect(elsewhere <= 0.02 * COUNT, f"{name}, {elsewhere} end elsewhere.")
        expect(gap < 1e-3, f"{name}, the gradient by the data is {gap:.1e} off.")


def residuals(x: Tensor, target: Tensor, model: torch.nn.Module) -> Tensor:
    return (model(x) - target).flatten()


Step = Callable[[], Any]


def of_loss(make: Callable[..., Any]) -> Callable[..., Step]:
    """Steps with a closure of the loss."""

    def build(model: torch.nn.Module, errors: Callable[[], Tensor]) -> Step:
        opt = make(model.parameters())

        def closure() -> Tensor:
            opt.zero_grad()
            loss = errors().square().mean()
            loss.backward()
            return loss

        return lambda: opt.step(closure)

    return build


def of_residuals(make: Callable[..., Any]) -> Callable[..., Step]:
    """Steps with a closure of the residuals."""

    def build(model: torch.nn.Module, errors: Callable[[], Tensor]) -> Step:
        opt = make(model.named_parameters())
        return lambda: opt.step(errors)

    return build


CLOSURES: dict[str, Callable[..., Step]] = {
    "lbfgs": of_loss(lambda params: adapters.LBFGS(params, line_search_fn="strong_wolfe")),
    "ssbfgs": of_loss(adapters.SSBFGS),
    "ssbroyden": of_loss(adapters.SSBroyden),
    "sam": of_loss(partial(adapters.SAM, lr=0.05)),
    "momo": of_loss(adapters.Momo),
    "momo_adam": of_loss(adapters.MomoAdam),
    "levenberg_marquardt": of_residuals(adapters.LevenbergMarquardt),
    "dogleg": of_residuals(adapters.Dogleg),
    "gauss_newton": of_residuals(partial(adapters.GaussNewton, damping=0.1)),
}


@torch.no_grad()
def loss_of(errors: Callable[[], Tensor]) -> float:
    return float(errors().square().mean())


def stepped(name: str, platform: Platform, figures: Figures) -> None:
    """A network's steps, in float64, lead to the CPU's loss."""
    losses: list[float] = []
    for device in (platform.device, CPU):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        ).double()
        x = torch.rand(64, 2, dtype=torch.float64)
        target = torch.sin(3 * x).sum(1, keepdim=True).to(device)
        errors = partial(residuals, x.to(device), target, model.to(device))
        step = CLOSURES[name](model, errors)
        begin = loss_of(errors)
        for _ in range(STEPS):
            step()
        losses.append(loss_of(errors))
    figures |= {"before": begin, "loss": losses[0], "the CPU's": losses[1]}
    expect(losses[0] < begin, "the loss has not decreased.")
    gap = abs(losses[0] - losses[1]) / losses[1]
    expect(gap < 0.05, f"the loss is {gap:.1e} off.")


def timed(
    solve: Solve,
    make: Callable[[int], problems.Many],
    how: dict[str, Any],
    count: int,
    rounds: int,
    platform: Platform,
    figures: Figures,
) -> None:
    """Seconds of a batch: on the device, eagerly and compiled, and on its host's CPU.

    The first of the rounds is a separate figure; of the others the least is reported.
    """
    many = make(count)
    for name, device, compiled in (
        ("compiled", platform.device, True),
        ("eager", platform.device, False),
        ("CPU, compiled", CPU, True),
    ):
        fun, x0, data = on_device(many, device)
        own: dict[str, Any] = {"batched": True, "compile": compiled, "implicit": False, **how}
        run = partial(solve, fun, x0, (data,), **own)
        with strict():
            first, *taken = [platform.seconds(run) for _ in range(rounds if compiled else 2)]
        figures[f"{name}, ms"] = 1000 * min(taken)
        figures[f"{name}, first s"] = first
