"""Triton kernels of a rule: written, compiled for a device, tried on random tensors, and kept.

What is kept on disk is what was read off the graph (`RuleSource`), so that a later process neither
traces nor imports Dynamo, and the launch configuration that was the fastest on a model of card. The
machine code is in Triton's own cache.
"""

from __future__ import annotations

import array
import itertools
import json
import linecache
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels import disk_cache
from functional_optim.kernels.drivers import DRIVERS, Launcher, uploaded
from functional_optim.kernels.launches import WHOLE_NUMBER, compare, compare_packed, opened
from functional_optim.kernels.tracing import Body, Signature, quiet, trace
from functional_optim.kernels.triton_packing import PackedText
from functional_optim.kernels.triton_source import (
    KernelText,
    LaunchConfig,
    RuleSource,
    Source,
    kernel_text,
    rule_source,
)

CONFIGS = (LaunchConfig(1024, 8, 8), LaunchConfig(1024, 4, 8), LaunchConfig(2048, 8, 4))
"""What is timed on a card; the first where nothing can be timed. A thread has 4 entries, or 8: it
then reads 16 bytes of a tensor in 2 bytes at once, too, but needs more than 64 registers."""

TIMED = 1 << 23
"""Entries of the tensors on which configurations are timed: more than a card's cache holds."""

REPEATED = 4096
"""Entries after which random tensors repeat: a multiple of every codec's block."""

OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Of Triton: a fused product and sum would be rounded once, where torch rounds twice; and
libdevice takes small numbers for zeros unless it is told not to."""

_numbered = itertools.count()


class CaptureError(RuntimeError):
    """What cannot be done while a CUDA graph is captured."""


class KernelVariant(NamedTuple):
    """What kernels of one rule differ in: see `kernel_text`."""

    sources: tuple[Source, ...]
    aligned: bool
    skips: bool = False


class TritonKernel:
    """The kernels of a rule on one device; each variant is compiled when it is first needed.

    rule: what they do to a block. body, signature: the rule, with which they are compared. name:
    under which it is kept; None if it cannot be.
    """

    def __init__(
        self,
        rule: RuleSource,
        body: Body,
        signature: Signature,
        device: torch.device,
        name: str | None,
    ) -> None:
        self.rule = rule
        self.body = body
        self.signature = signature
        self.device = device
        self.name = name
        self.driver = DRIVERS[device.type]
        self.launchers: dict[KernelVariant, Launcher] = {}
        self.chosen: LaunchConfig | None = None

    @property
    def outputs(self) -> int:
        """How many sums it leaves for each program."""
        return len(self.rule.sums)

    @property
    def config(self) -> LaunchConfig:
        """How the work is divided: as was the fastest here, once that was measured."""
        if self.chosen is None:
            self.chosen = self._kept_config() or self._fastest() or self.configs[0]
        return self.chosen

    @property
    def configs(self) -> list[LaunchConfig]:
        """Those that suit the codecs of its slots."""
        largest = max([x.block for x in self.rule.packed], default=1)
        return list(dict.fromkeys([config.holding(largest) for config in CONFIGS]))

    def launcher(self, variant: KernelVariant) -> Launcher:
        """A kernel, compiled, and tried on random tensors when it is new.

        Raises:
            CaptureError: if that would be in the middle of a capture.
            Unsuitable: if it does something else than the rule.
            Exception: whatever goes wrong in Triton.
        """
        found = self.launchers.get(variant)
        if found is None:
            if self.driver.capturing():
                raise CaptureError(
                    "functional_optim: a step that still has to compile its kernels cannot be "
                    "captured. Make a few steps of the same tensors before, on a side stream, as "
                    "torch.cuda.make_graphed_callables does it."
                )
            found = self._compiled(variant, self.config)
            self._try(found, variant, self.config)
            self.launchers[variant] = found
        return found

    def _compiled(self, variant: KernelVariant, config: LaunchConfig) -> Launcher:
        name = "step" if not self.outputs else "measure"
        text = kernel_text(
            self.rule,
            variant.sources,
            config,
            aligned=variant.aligned,
            skips=variant.skips,
            name=f"{name}_kernel",
        )
        return self.driver.loaded(
            compiled(text, f"{name}_kernel", self.driver.target(self.device), config.warps),
            self.device,
        )

    def _kept_as(self) -> str | None:
        """Under which the configuration is kept that was the fastest on this model of card."""
        if self.name is None:
            return None
        return disk_cache.name_of(self.name, self.driver.name(self.device), suffix=".config")

    def _kept_config(self) -> LaunchConfig | None:
        name = self._kept_as()
        body = None if name is None else disk_cache.read(name)
        return None if body is None else LaunchConfig(*json.loads(body))

    def _fastest(self) -> LaunchConfig | None:
        """The configuration that takes the least time; None where none can be timed."""
        variant = KernelVariant(("value",) * self.rule.numbers[0], True)
        times: dict[LaunchConfig, float] = {}
        for config in self.configs:
            try:
                case = RandomCase(self, [TIMED], config)
            except torch.OutOfMemoryError:
                return None
            launch = self._compiled(variant, config)
            taken = self.driver.seconds(lambda: case.run(launch, variant), self.device)  # noqa: B023
            if taken is None:
                return None
            times[config] = taken
        best = min(times, key=times.__getitem__)
        name = self._kept_as()
        if name is not None:
            disk_cache.keep(name, json.dumps(best).encode())
        return best

    def _try(self, launch: Launcher, variant: KernelVariant, config: LaunchConfig) -> None:
        """Raise Unsuitable unless a kernel does to tensors what the rule does."""
        case = RandomCase(self, [config.chunk + config.block + 37, 5], config)
        expected = [case.seen(leaf) for leaf in case.leaves]
        with torch.no_grad():
            sums = [self.body([leaf], case.vector) for leaf in expected]
        case.run(launch, variant)
        pairs = [
            (parts[0], x)
            for leaf, own in zip(case.leaves, expected, strict=True)
            for i, (parts, x) in enumerate(zip(leaf, own, strict=True))
            if i not in case.packed
        ]
        if self.outputs:
            each = [torch.stack(list(own)).double() for own in sums]
            wanted = torch.stack(each).sum(0)
            pairs.append((case.partials.sum(0), wanted))
        compare(*zip(*pairs, strict=True))
        for i, slot in case.packed.items():
            key = None if slot.key is None else case.numbers[slot.key]
            stored, own = [leaf[i] for leaf in case.leaves], [leaf[i] for leaf in expected]
            compare_packed(slot.codec, stored, own, key)


class RandomCase:
    """Random tensors on a device, as a kernel goes over them.

    leaves: of each tensor of each leaf what it is stored in. packed: the slots that are packed, by
    their indices in a leaf.
    """

    def __init__(self, kernel: TritonKernel, sizes: Sequence[int], config: LaunchConfig) -> None:
        random = torch.Generator(device="cpu").manual_seed(0)
        device = kernel.device
        (dtypes,) = kernel.signature.leaves
        self.packed = {x.at: x for x in kernel.signature.packed}

        def few(size: int) -> Tensor:
            return torch.rand(min(size, REPEATED), generator=random, device="cpu").add_(0.1)

        def drawn(size: int, i: int, dtype: torch.dtype) -> list[Tensor]:
            slot, own = self.packed.get(i), few(size)
            if slot is None:
                return [_repeated(own, size).to(device, dtype)]
            count = size if slot.codec.entrywise else slot.codec.blocks(size)
            return [_repeated(x, count).to(device) for x in slot.codec.encode(own)]

        self.leaves = [[drawn(size, i, x) for i, x in enumerate(dtypes)] for size in sizes]
        count, wide = kernel.signature.numbers
        self.vector = few(count).to(device, wide)
        for slot in self.packed.values():
            if slot.key is not None:
                self.vector[slot.key] = WHOLE_NUMBER
        self.numbers = self.vector.tolist()
        self.wide = self.vector.double()
        rows = [
            [leaf[0][0].numel(), *[x.data_ptr() for parts in leaf[1:] for x in parts]]
            for leaf in self.leaves
        ]
        chunks = chunks_of(sizes, config.chunk)
        tables = (chunks, *[array.array("q", own) for own in (
            itertools.chain(*rows), [leaf[0][0].data_ptr() for leaf in self.leaves]
        )])  # fmt: skip
        pinned = kernel.driver.pinned
        self.kept = [uploaded(pinned(len(table)), table, device) for table in tables]
        self.tables = list(map(Tensor.data_ptr, self.kept))
        self.programs = len(chunks)
        self.nothing = torch.zeros((), device=device)
        shape = (len(chunks), kernel.outputs)
        self.partials = torch.zeros(shape, dtype=torch.float64, device=device)

    def seen(self, leaf: list[list[Tensor]]) -> list[Tensor]:
        """Copies of a leaf's tensors, as a rule sees them."""
        found: list[Tensor] = []
        for i, parts in enumerate(leaf):
            slot = self.packed.get(i)
            found.append(
                parts[0].clone() if slot is None else opened(slot.codec, parts, leaf[0][0])
            )
        return found

    def run(self, launch: Launcher, variant: KernelVariant) -> None:
        """Launch a kernel on them."""
        arguments: list[Any] = list(self.tables)
        if "row" in variant.sources:
            arguments += [self.wide.data_ptr(), 0]
        for i, source in enumerate(variant.sources):
            if source == "value":
                arguments.append(self.numbers[i])
            elif source == "tensor":
                arguments.append(self.wide.data_ptr() + 8 * i)
        if self.partials.shape[1]:
            arguments.append(self.partials.data_ptr())
        if variant.skips:
            arguments.append(self.nothing.data_ptr())
        launch(self.programs, arguments)


def _repeated(x: Tensor, count: int) -> Tensor:
    """The first entries of x, again and again."""
    times = -(-count // max(len(x), 1))
    return x.repeat(times, *[1] * (x.dim() - 1))[:count].contiguous()


def chunks_of(sizes: Sequence[int], chunk: int) -> array.array[int]:
    """The programs that cover tensors of these sizes: the index of a tensor, and of a chunk."""
    return array.array("q", [x for i, size in enumerate(sizes) for x in chunks_at(i, size, chunk)])


def chunks_at(i: int, size: int, chunk: int) -> range:
    """The programs that cover the tensor of this index."""
    return range(i << 32, (i << 32) + -(-size // chunk))


def build(
    body: Body, signature: Signature, outputs: int, device: torch.device, name: str | None
) -> TritonKernel:
    """The kernels of a rule, from what an earlier process kept or from the rule's graph.

    signature: of the rule on the CPU, where it is traced. name: under which it is kept.

    Raises:
        Unsuitable: if the rule is no loop over the entries of a tensor.
        Exception: whatever goes wrong while it is traced.
    """
    kept = None if name is None else disk_cache.read(name)
    if kept is not None:
        return TritonKernel(_read(kept), body, signature, device, name)
    rule = rule_source(trace(body, signature), signature, outputs)
    if name is not None:
        disk_cache.keep(name, json.dumps(rule).encode())
    return TritonKernel(rule, body, signature, device, name)


def _read(kept: bytes) -> RuleSource:
    lines, read, stored, sums, dtypes, (count, wide), packed = json.loads(kept)
    pairs, texts = [(i, own) for i, own in stored], [PackedText(*own) for own in packed]
    return RuleSource(lines, read, pairs, sums, dtypes, (count, wide), texts)


def compiled(text: KernelText, name: str, target: Any, warps: int) -> Any:
    """The kernel of a text, compiled by Triton for a target."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(function_of(text.text, name), text.arguments, {}, {})
    with quiet():
        return triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS})


def function_of(text: str, name: str) -> Any:
    """The function of this name in a source text, which Triton can read again."""
    path = f"<functional_optim kernel {next(_numbered)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict[str, Any] = {"__name__": path}
    exec(compile(text, path, "exec"), space)
    return space[name]
