"""Element-wise rules on the CPU: one call of a native library goes over all tensors of a kind.

Results are written into the old tensors inside the kernel: new ones would cost page faults and
memory at every step.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.memory import WITHOUT_MEMORY, has_address
from functional_optim.core.rule import (
    Keyed,
    Numbers,
    Placement,
    flat_numbers,
    form_of,
    master_of,
)
from functional_optim.core.storage import Slots, compute_dtype, laid_out_like, present
from functional_optim.core.turns import takes_turns
from functional_optim.engine import unpacked
from functional_optim.engine.executor import BoundScalars, Executor, How, Write
from functional_optim.engine.kernel_body import KernelBody
from functional_optim.engine.staged import KernelPart, StagedLaunch, can_be_cut, measuring, parts_of

GRAIN = 1 << 15
"""Elements from which threads share the work: torch's own grain size for CPU loops."""


class KernelExecutor(Executor):
    """Tensors with the same dtypes, slots and device, which share a kernel for each task."""

    through_memory = True

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        first = self.params[0]
        self.compute = compute_dtype(first)
        self.device = first.device
        self.entries = [self.seen(own) for own in self.slots]
        pairs = zip(self.params, self.slots, strict=True)
        self.weights = [self.seen_weight(p, own) for p, own in pairs]
        own = unpacked.dtypes([(self.weights[0],), *self.entries[0]])
        dtypes = [grads[members[0]].dtype, *own]
        self.dtypes = tuple(map(_real, dtypes))
        self.holes = [tuple([slot is None for slot in own]) for own in self.entries[0]]
        # the memory of a conjugate or negative view is not what it says; one of a single element
        # can have the parameter's strides
        self.lazy = first.is_complex() or any(p.numel() == 1 for p in self.params)
        self.apart = any(grads[i].stride() != group.params[i].stride() for i in members)
        self.kernels: dict[Any, Any] = {}

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Plain tensors of one layout; of one shape, too, where a rule looks at shapes."""
        flat, mine = elementwise(placements), present(slots)
        if not p.is_contiguous() and any(x.rule.seed is not None for x in placements):
            return None  # random numbers go by the place in the tensor, not in memory
        if how not in ("compiled", "strict") or not in_memory(g, [p, *mine], flat):
            return None
        return (*kind_of(g, p, slots), None if flat else (tuple(p.shape), p.stride()))

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> bool:
        """Compile the kernel of a task; there is none for tensors that take different variants."""
        if takes_turns(scalars.placements):
            return False
        kernel = self.build(self.body(scalars))
        if kernel is None:
            return False
        self.kernels[scalars.task] = kernel
        return True

    def seen(self, slots: list[Slots]) -> list[Slots]:
        """The slots of a tensor as the kernel gets them."""
        return slots

    def seen_weight(self, p: Tensor, slots: list[Slots]) -> Any:
        """A parameter as the kernel gets it."""
        return p

    def body(self, scalars: BoundScalars) -> KernelBody:
        """What the kernel of a task does."""
        forms = tuple(map(form_of, scalars.numbers))
        return KernelBody(scalars.placements, self.holes, forms, scalars.goal)

    def build(self, body: KernelBody) -> Any:
        """The kernel of a body; None if there can be none."""
        raise NotImplementedError

    def call(
        self, kernel: Any, grads: list[Tensor], scalars: BoundScalars
    ) -> Callable[[], Sequence[Any]]:
        """A call of a kernel, which returns what it measures, summed over all tensors."""
        raise NotImplementedError

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Any]]:
        """What the last of the rules measures, in one part."""
        return [self.call(self.kernels[scalars.task], self._readable(grads), scalars)()]

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> list[Write]:
        """One write: the call of the kernel."""
        return [self.call(self.kernels[scalars.task], self._readable(grads), scalars)]

    def libraries(self) -> list[Any]:
        """The native libraries that it calls; None for each kernel that is not in one."""
        found: list[Any] = []
        for kernel in self.kernels.values():
            if isinstance(kernel, StagedLaunch):
                found += dict.fromkeys([launch.native for launch in kernel.stages.launches])
            else:
                found.append(kernel.native if isinstance(kernel, kernels.Launch) else None)
        return found

    def _readable(self, grads: list[Tensor]) -> list[Tensor]:
        """Gradients whose memory is what they say, laid out as their parameters are."""
        mine = grads if self.every else self.mine(grads)
        if self.lazy:
            mine = [g.resolve_conj().resolve_neg() for g in mine]
        if self.apart:
            mine = list(map(laid_out_like, mine, self.params))
        return mine


class UnpackingExecutor(KernelExecutor):
    """Element-wise rules on tensors of any size, whose packed slots a kernel unpacks."""

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Plain tensors under element-wise rules; contiguous ones, where slots are packed."""
        if how not in ("compiled", "strict") or not elementwise(placements):
            return None
        weight = unpacked.unpacked_weight(placements, p, slots)
        entries = [(weight,), *unpacked.unpacked(placements, slots)]
        if not unpacked.is_packed(entries):
            return super().accepts(placements, g, p, slots, how)
        whole = [x for own in entries[1:] for x in own if isinstance(x, Tensor)]
        stored = unpacked.tensors(entries)
        if p.is_complex() or compute_dtype(p) is not torch.float32 or not in_memory(g, [p, *whole]):
            return None
        plain = all(x.is_contiguous() and has_address(x) and x.device == p.device for x in stored)
        kinds = [getattr(x, "codec", x is None) for own in entries for x in own]
        return (*kind_of(g, p, slots), tuple(kinds)) if plain else None

    def seen(self, slots: list[Slots]) -> list[Slots]:
        """The slots of a tensor, packed ones as what they are to the rule."""
        return unpacked.unpacked(self.group.placements, slots)

    def seen_weight(self, p: Tensor, slots: list[Slots]) -> Any:
        """A parameter, or how it is stored with a slot."""
        return unpacked.unpacked_weight(self.group.placements, p, slots)

    def body(self, scalars: BoundScalars) -> KernelBody:
        """What the kernel of a task does to slots that are not packed."""
        forms = tuple(map(form_of, scalars.numbers))
        placements = unpacked.without_codecs(scalars.placements)
        return KernelBody(placements, self.holes, forms, scalars.goal)

    def request(
        self, body: KernelBody, entries: list[Slots], device: torch.device
    ) -> kernels.Request:
        """The kernel of a body. entries: the slots that it sees of the first parameter. device: on
        which it is traced."""
        dtypes = (*self.dtypes[:2], *map(_real, unpacked.dtypes(entries)))
        master = master_of(self.group.placements, self.params[0])
        packed = unpacked.packed_slots(body, self.weights[0], entries, master)
        numbers = (body.count, self.compute)
        signature = kernels.Signature((dtypes,), None, numbers, device, 1, packed)
        outputs = len(body.probe(self.params[0]))
        functions = (*body.functions(), *[x.codec for x in packed])
        return kernels.Request(body.key(), functions, body.one, signature, outputs)


class NativeExecutor(UnpackingExecutor):
    """Element-wise rules on CPU tensors, whatever their sizes."""

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Tensors of the CPU."""
        on_cpu = p.device.type == "cpu"
        return super().accepts(placements, g, p, slots, how) if on_cpu else None

    def wanted(self, grads: list[Tensor], scalars: BoundScalars) -> list[kernels.Request]:
        """The library of a task, and those that measure each tensor before it."""
        if not measuring(scalars):
            return [self.request(self.body(scalars), self.entries[0], self.device)]
        parts = parts_of(scalars, self.holes, self.params[0], cut=can_be_cut(scalars))
        return [self._wanted_part(part) for part in parts]

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> bool:
        """Compile the kernel of a task, and those that measure each tensor before it."""
        if not measuring(scalars):
            return super().prepare(grads, scalars)
        ways = (True, False) if can_be_cut(scalars) else (False,)
        for cut in ways:
            parts: list[tuple[KernelPart, kernels.Native]] = []
            for part in parts_of(scalars, self.holes, self.params[0], cut=cut):
                native = kernels.sweep(self._wanted_part(part), strict=self.group.strict)
                if native is None:
                    break
                parts.append((part, native))
            else:
                self.kernels[scalars.task] = self._staged(parts, scalars, cut=cut)
                return True
        return False

    def build(self, body: KernelBody) -> Any:
        """The library, ready to go over these tensors; None if the rule is no loop for one."""
        wanted = self.request(body, self.entries[0], self.device)
        native = kernels.sweep(wanted, strict=self.group.strict)
        if native is None:
            return None
        sizes = [kernel_size(p) for p in self.params]
        rows = array.array("q")
        for p, mine in zip(self.weights, self.entries, strict=True):
            rows.extend(unpacked.addresses([(p,), *mine]))
        return kernels.MultiTensorLaunch(native, sizes, rows, self._threads(sizes), self.compute)

    def _wanted_part(self, part: KernelPart) -> kernels.Request:
        update = torch.empty(0, dtype=self.compute)
        return self.request(part.body, part.entries(self.entries[0], update), self.device)

    def _staged(
        self, parts: list[tuple[KernelPart, kernels.Native]], scalars: BoundScalars, *, cut: bool
    ) -> StagedLaunch:
        sizes = [kernel_size(p) for p in self.params]
        count = len(flat_numbers(scalars.numbers))
        threads = self._threads(sizes)
        return StagedLaunch(
            parts, self.weights, sizes, self.entries, count, self.compute, threads, cut=cut
        )

    def _threads(self, sizes: list[int]) -> int:
        return torch.get_num_threads() if sum(sizes) >= GRAIN else 1

    def call(
        self, kernel: Any, grads: list[Tensor], scalars: BoundScalars
    ) -> Callable[[], Sequence[Any]]:
        """One call of the library, in C; where rules measure their tensors, some of several."""
        if type(kernel) is StagedLaunch:
            return kernel.ready(grads, scalars.tensor(self.compute, self.device))
        return kernel.ready(grads, list(map(plain, scalars.numbers)))


def plain(own: Numbers) -> Numbers:
    """The numbers of a rule in one tuple."""
    return (own.key, *own.numbers) if type(own) is Keyed else own


def elementwise(placements: tuple[Placement, ...]) -> bool:
    """Whether all rules may see a tensor as 1-D."""
    return all(placement.rule.elementwise for placement in placements)


def by_entry(placements: tuple[Placement, ...]) -> bool:
    """Whether all rules may see any part of a tensor, as its other entries change nothing."""
    return all(
        placement.rule.elementwise and placement.rule.measure is None for placement in placements
    )


def kind_of(g: Tensor, p: Tensor, slots: list[Slots]) -> tuple[Any, ...]:
    """What tensors that are stepped together have in common: dtypes, missing slots and device."""
    dtypes = tuple([x.dtype for x in (g, p, *present(slots))])
    return (dtypes, tuple([tuple([slot is None for slot in own]) for own in slots]), p.device)


def in_memory(g: Tensor, tensors: list[Tensor], flat: bool = True) -> bool:
    """Whether a kernel can see these tensors through their memory alone.

    g: a gradient, which may have other strides. tensors: of one leaf, the parameter first. flat:
    whether they are seen as 1-D.
    """
    first = tensors[0]
    if first.device.type in WITHOUT_MEMORY or not has_address(first):
        return False
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    readable = has_address(g) and g.device == first.device and g.shape == first.shape
    readable = readable and not g.is_neg()
    return (
        dense
        and readable
        and all(
            has_address(x)
            and x.device == first.device
            and x.is_complex() == first.is_complex()
            and not x.is_conj()
            and not x.is_neg()
            and (not flat or (x.shape == first.shape and x.stride() == first.stride()))
            for x in tensors
        )
    )


def kernel_size(p: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return p.numel() * 2 if p.is_complex() else p.numel()


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
