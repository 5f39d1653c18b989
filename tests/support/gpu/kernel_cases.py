"""The Triton kernels that a recipe's steps ask for, and their rules as graphs, without a card."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

import functional_optim as fo
from functional_optim import kernels
from functional_optim.engine import group
from functional_optim.engine.gpu import TritonExecutor
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.kernels import drivers, triton_launch
from functional_optim.kernels.drivers import Launcher
from functional_optim.kernels.tracing import Body, Signature, trace
from functional_optim.kernels.triton_builds import CONFIGS, KernelVariant, TritonKernel
from functional_optim.kernels.triton_source import rule_source
from gpu.memory import FIRST, Memory
from gpu.ptx import Program

HERE = torch.device("cpu")


class Host:
    """A driver for the CPU's memory."""

    def missing(self) -> str | None:
        return None

    def name(self, device: torch.device) -> str:
        return "host"

    def capturing(self, device: torch.device | None = None) -> bool:
        return False

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    def seconds(self, run: Any, device: torch.device) -> float | None:
        return None


class Traced(TritonKernel):
    """A kernel that does nothing when a step launches it. graph: of its rule."""

    def __init__(self, body: Body, signature: Signature, outputs: int) -> None:
        traced = trace(body, signature)
        super().__init__(rule_source(traced, signature, outputs), body, signature, HERE, None)
        self.graph = traced.graph
        self.chosen = CONFIGS[0]

    def launcher(self, variant: KernelVariant) -> Launcher:
        return lambda programs, arguments: None


def adder_of_ones(device: torch.device) -> Launcher:
    """In the place of what adds up the sums of programs: all sums are 1."""

    def launch(programs: int, arguments: Sequence[Any]) -> None:
        *_, totals, outputs, stride = arguments
        for i in range(programs):
            at = totals + 8 * (i // outputs * stride + i % outputs)
            ctypes.c_double.from_address(at).value = 1.0

    return launch


@contextmanager
def on_host(driver: Any) -> Iterator[None]:
    """Inside, element-wise rules on the CPU go through the driver, and all others tensor by
    tensor."""
    executors = [TritonExecutor, PerTensorExecutor]
    with (
        mock.patch.dict(drivers.DRIVERS, {"cpu": driver}),
        mock.patch.object(group, "EXECUTORS", executors),
    ):
        yield


def asked(tx: Any, params: dict[str, Tensor]) -> list[Traced]:
    """The kernels that the first steps of a transform ask for."""
    found: dict[Any, Traced] = {}

    def record(wanted: kernels.Request, device: torch.device, *, strict: bool = False) -> Any:
        key = (wanted.key, wanted.signature)
        if key not in found:
            found[key] = Traced(wanted.body, wanted.signature, wanted.outputs)
        return found[key]

    step, state = fo.compile(tx), tx.init(params)
    with (
        on_host(Host()),
        mock.patch.object(kernels, "table_kernel", record),
        mock.patch.object(triton_launch, "adder", adder_of_ones),
    ):
        for _ in range(2):
            grads = {name: torch.randn_like(p) for name, p in params.items()}
            params, state = step(grads, state, params)
    return list(found.values())


class Simulated(Host):
    """A driver that simulates kernels on the CPU's memory. names: of those that were loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.memory = Memory()
        self.memory.allow(FIRST, 1 << 48)

    def target(self, device: torch.device) -> Any:
        return GPUTarget("cuda", 90, 32)

    def loaded(self, compiled: Any, device: torch.device) -> Launcher:
        self.names.append(compiled.name)
        program = Program(compiled.asm["ptx"])
        return lambda programs, arguments: program.run(programs, list(arguments), self.memory)
