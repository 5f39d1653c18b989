"""The checks for whoever has a GPU, on the device for tests with interpreted kernels."""

from collections.abc import Iterator

import pytest
import torch
from gpu.drivers import on_device
from gpu.platform import FakePlatform
from gpu_check import command, results, steady
from gpu_check.results import Check, Outcome

from functional_optim.adapters import Optimizer

pytestmark = [
    pytest.mark.own_process,
    # the driver names the device whose host memory it asks for
    pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning"),
]

CHECKS = command.chosen(
    command.listed(quick=True), ["waits", "capture", "scaler", "devices", "tensors", "checkpoint"]
)
RECIPES = command.chosen(command.listed(quick=True), ["recipes/adamw", "recipes/clip/float32"])
ABSENT = {"waits/busy", "tensors/huge"}
"""What the device for tests cannot show: it is done with all work at once, and it is small."""


@pytest.fixture(scope="module")
def platform() -> Iterator[FakePlatform]:
    with on_device():
        yield FakePlatform()


def passed(check: Check, platform: FakePlatform) -> Outcome:
    outcome = results.made(check, platform)
    assert outcome.status == "passed", outcome.trace or outcome.told
    return outcome


@pytest.mark.parametrize("check", [x for x in CHECKS if x.name not in ABSENT], ids=lambda x: x.name)
def test_a_check_passes(check, platform):
    passed(check, platform)


@pytest.mark.parametrize("check", RECIPES, ids=lambda x: x.name)
def test_a_recipe_is_stepped_by_its_kernels_as_on_the_cpu(check, platform):
    figures = passed(check, platform).figures
    assert figures["executors"] == ["TritonExecutor"] * 2
    if "adamw" in check.name:
        assert figures["launches, object"] == 2  # one for the tensor that lies between others
    assert figures["error, object"]["the CPU"] < 1e-6


@pytest.mark.parametrize(("name", "kernels"), [
    ("adamw", ["step_kernel"]),
    ("clip", ["measure_kernel", "sum_kernel", "step_kernel"]),
    ("addresses", ["step_kernel"]),
])  # fmt: skip
def test_the_kernels_of_a_step_are_told(name, kernels, platform):
    (check,) = command.chosen(CHECKS, [f"waits/{name}"])
    told = passed(check, platform).figures["kernels"]
    assert [x for x in told if x.endswith("_kernel")] == kernels


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_the_device_cannot_show_is_skipped(name, platform):
    (check,) = command.chosen(CHECKS, [name])
    outcome = results.made(check, platform)
    assert (outcome.status, outcome.told) == ("skipped", "not on this device (fake:0)")


def test_a_step_that_waits_is_found(platform, monkeypatch):
    step = Optimizer._step_in_place

    def waiting(self, loss):
        step(self, loss)
        self.param_groups[0]["params"][0].sum().item()

    monkeypatch.setattr(Optimizer, "_step_in_place", waiting)
    outcome = results.made(command.chosen(CHECKS, ["waits/clip"])[0], platform)
    assert outcome.status == "failed"
    assert "makes the host wait for the device" in outcome.told


def test_a_capture_that_repeats_one_step_is_found(platform):
    def frozen(platform, lr):
        """An optimizer whose count and learning rate are on the CPU."""
        params = steady.parameters(steady.SHAPES, platform.device)
        return steady.Captured(torch.optim.AdamW(params, lr=0.01))

    run = Check("capture/frozen", lambda *given: steady.replays(frozen, *given))
    outcome = results.made(run, platform)
    assert outcome.status == "failed"
    assert "differs after replay 2" in outcome.told
