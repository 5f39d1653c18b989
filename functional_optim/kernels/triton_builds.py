"""Triton kernels of a graph: compiled for a device, tried before their first use, and kept.

What is kept on disk is the launch configuration that was the fastest, by the digest of the kernels'
text, of Triton's options and version, and of the device: kernels of that name have been tried. The
machine code is in Triton's own cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import disk_cache
from functional_optim.kernels.drivers import DRIVERS, CaptureError, Launcher
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.print_triton import KernelVariant, TritonSource
from functional_optim.kernels.triton_compiler import OPTIONS
from functional_optim.kernels.triton_launch import Gradients, Tables
from functional_optim.kernels.triton_spaces import LaunchConfig

TIMED = 1 << 23
"""Elements of the tensors on which configurations are timed: more than a device's cache holds."""

Leaves = Sequence[Sequence[Tensor]]
"""Of each tensor the gradient, the parameter and the slots."""

Run = Callable[[Leaves, list[list[int]], list[tuple[float, ...]], tuple[float, ...]], Sequence[Any]]
"""Steps leaves, from the sizes of their graph's axes, their constants and the scalars of the step;
returns what they measure."""

_kernels: dict[tuple[str, torch.device], TritonKernel] = {}


class TritonKernel:
    """The kernels of a graph on one device; each variant is compiled when it is first needed."""

    def __init__(self, source: TritonSource, device: torch.device) -> None:
        self.source = source
        self.device = device
        self.driver = DRIVERS[device.type]
        self.known: dict[KernelVariant, list[Launcher]] = {}

    def launchers(self, variant: KernelVariant, check: Callable[[Run], None]) -> list[Launcher]:
        """A kernel for each launch of the graph.

        Args:
            variant: which of them.
            check: raises an exception unless kernels that are new do what the rules do.

        Raises:
            CaptureError: if they would be compiled in the middle of a capture.
            Unsuitable: if they do something else than the rule.
            Exception: whatever goes wrong in Triton.
        """
        if variant not in self.known:
            if self.driver.capturing():
                raise CaptureError(
                    "functional_optim: a step that still has to compile its kernels cannot be "
                    "captured. Make a few steps of the same tensors before, on a side stream, as "
                    "torch.cuda.make_graphed_callables does it."
                )
            self.known[variant] = let_through(self._made, variant, check)
        return self.known[variant]

    def _made(self, variant: KernelVariant, check: Callable[[Run], None]) -> list[Launcher]:
        configs = self.source.configs()
        texts = [x.text for x in self.source.texts(variant, configs[0])]
        options = [repr(OPTIONS), self.driver.name(self.device)]
        name = disk_cache.name_of(*texts, *options, suffix=".config")
        with disk_cache.build_lock(name):
            kept = disk_cache.read(name)
            if kept is not None:
                return self._loaded(variant, LaunchConfig(*json.loads(kept)))
            config = self._fastest(variant, configs) or configs[0]
            found = self._loaded(variant, config)
            check(lambda *given: self._bound(variant, found, *given)())
            disk_cache.keep(name, json.dumps(config).encode())
        return found

    def _loaded(self, variant: KernelVariant, config: LaunchConfig) -> list[Launcher]:
        return [self.driver.load(x, self.device) for x in self.source.texts(variant, config)]

    def _fastest(
        self, variant: KernelVariant, configs: Sequence[LaunchConfig]
    ) -> LaunchConfig | None:
        """The configuration that takes the least time; None where none can be timed. Sums are
        always taken in the same one, as their order is that of its blocks."""
        graph, device, (first, *rest) = self.source.graph, self.device, self.source.kernels
        plain = not rest and not first.outputs and (graph.block or len(graph.sizes) == 1)
        if not (plain and self.driver.timed) or len(configs) == 1:
            return None
        sizes = graph.sizes_of((TIMED,)) if graph.block else [TIMED]
        shapes = [[sizes[axis] for axis in x.axes] for x in graph.inputs]
        try:
            pairs = zip(shapes, graph.inputs, strict=True)
            leaf = [torch.zeros(own, dtype=x.dtype, device=device) for own, x in pairs]
        except torch.OutOfMemoryError:
            return None
        given = ([leaf], [sizes], [(0.5,) * len(graph.places)], (0.5,) * len(variant.sources))
        times: dict[LaunchConfig, float] = {}
        for config in configs:
            run = self._bound(variant, self._loaded(variant, config), *given)
            times[config] = self.driver.seconds(run, device)
        return min(times, key=times.__getitem__)

    def _bound(
        self,
        variant: KernelVariant,
        launchers: list[Launcher],
        leaves: Leaves,
        sizes: list[list[int]],
        constants: list[tuple[float, ...]],
        numbers: tuple[float, ...],
    ) -> Callable[[], Sequence[Any]]:
        """The launches that step leaves on the device."""
        rows = [list(map(Tensor.data_ptr, leaf[1:])) for leaf in leaves]
        tables = Tables(self.source, self.device, sizes, rows, constants)
        addresses = [leaf[0].data_ptr() for leaf in leaves]
        tables.divide(addresses)
        grads = Gradients(self.device, len(leaves))
        wide = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(self.device)
        pairs = zip(numbers, wide.unbind(), variant.sources, strict=True)
        given = [x if source == "value" else there for x, there, source in pairs]
        skip = torch.zeros((), device=self.device) if variant.skips else None
        both = dict.fromkeys((True, False), launchers)
        return lambda: tables.run(both, grads.address(addresses), given, skip)


def trial_shapes(source: TritonSource, p: Tensor) -> list[tuple[int, ...]]:
    """Shapes of parameters of which several programs have a part each. p: one like them."""
    dims = p.dim()
    if p.is_complex() and not dims:
        return [()]
    if source.graph.block or dims < 2:
        return [(source.chunk + source.configs()[0].block + 41,), (5,)]
    between = [3] * (dims - 2)
    return [(1 + 520 // 3 ** (dims - 2), *between, 17), (2, *between, 2100)]


def kernel_of(source: TritonSource, device: torch.device) -> TritonKernel:
    """The kernels of a graph on a device, the same for all graphs of one text."""
    key = (source.text, device)
    if key not in _kernels:
        _kernels[key] = TritonKernel(source, device)
    return _kernels[key]
