"""Tensors that one kernel serves: how their gradients, their memory and their numbers reach it.

Results are written into the old buffers inside the kernel: allocating new ones costs page faults
and memory at every step.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from functional_optim import base, kernels
from functional_optim.looks import PLAIN
from functional_optim.rules import (
    Leaf,
    Link,
    Numbers,
    Slots,
    at_once,
    compute_dtype,
    laid_out_like,
    measure,
    present,
    run_all_stored,
    with_holes,
)

GRAIN = 1 << 15
"""Elements from which threads share the work: torch's own grain size for CPU loops."""

CHUNK = 16
"""Tensors that one launch steps on a device where launches are dear."""

WITHOUT_MEMORY = ("lazy", "xla")
"""Devices whose tensors stand for operations still to be run: a view cannot be made over them."""


class Pack:
    """Links and their numbers in a step, in the form each kind of kernel reads.

    shut: what is known of the links behind gates; None: nothing, or there are none.
    """

    def __init__(
        self, links: tuple[Link, ...], numbers: list[Numbers], shut: tuple[bool, ...] | None
    ) -> None:
        self.links = links
        self.numbers = numbers
        self.shut = shut
        self.made: dict[Any, Tensor] = {}

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """For a kernel that is called with tensors."""
        found = self.made.get((dtype, device))
        if found is None:
            flat = list(chain(*self.numbers))
            if any(isinstance(x, Tensor) for x in flat):
                wide = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in flat]
                found = torch.stack([x.detach().reshape(()) for x in wide]).to(dtype)
            else:
                found = torch.tensor(flat, dtype=dtype, device=device)
            self.made[dtype, device] = found
        return found


class Bank:
    """Tensors with the same dtypes, slots and device, stepped or measured by one kernel.

    members: their places among the tensors of the cohort. grads: gradients like those to come.
    flat: elementwise rules see a tensor as 1-D; otherwise all tensors of a bank have one shape and
    stride. strict: raise where a kernel cannot be compiled.
    """

    def __init__(
        self,
        members: list[int],
        params: list[Tensor],
        slots: list[list[Slots]],
        grads: list[Tensor],
        *,
        flat: bool,
        strict: bool,
    ) -> None:
        self.strict = strict
        self.members = members
        self.whole = members == list(range(len(params)))
        self.params = [params[i] for i in members]
        self.slots = [slots[i] for i in members]
        self.flat = flat
        first = self.params[0]
        self.compute = compute_dtype(first)
        self.device = first.device
        self.dtypes = [grads[members[0]].dtype, first.dtype]
        self.dtypes += [x.dtype for x in present(self.slots[0])]
        self.holes = [tuple([slot is None for slot in own]) for own in self.slots[0]]
        # the memory of a conjugate or negative view is not what it says; one of a single element
        # can have the parameter's strides
        self.lazy = first.is_complex() or any(p.numel() == 1 for p in self.params)
        self.apart = any(grads[i].stride() != params[i].stride() for i in members)
        self.kernels: dict[Any, Any] = {}

    def step(self, grads: list[Tensor], pack: Pack) -> None:
        """Step every tensor and its slots, in place."""
        self._run(grads, pack, (0, pack.shut))

    def prepare(self, pack: Pack) -> None:
        """Have the kernel of `step` ready."""
        if (0, pack.shut) not in self.kernels:
            self.kernels[0, pack.shut] = self._kernel(pack, measuring=False)

    def measure(self, grads: list[Tensor], pack: Pack) -> Sequence[Any]:
        """What the last of the links measures, summed over the bank."""
        return self._run(grads, pack, (len(pack.links), pack.shut))

    def _run(self, grads: list[Tensor], pack: Pack, which: tuple[int, Any]) -> Sequence[Any]:
        mine = grads if self.whole else [grads[i] for i in self.members]
        if self.lazy:
            mine = [g.resolve_conj().resolve_neg() for g in mine]
        if self.apart:
            mine = list(map(laid_out_like, mine, self.params))
        kernel = self.kernels.get(which)
        if kernel is None:
            kernel = self.kernels[which] = self._kernel(pack, measuring=which[0] > 0)
        if isinstance(kernel, kernels.Sweep):
            return kernel(mine, pack.numbers, self.compute)
        return self._call(kernel, mine, pack.tensor(self.compute, self.device))

    def _sweep(self, native: kernels.Native) -> kernels.Sweep:
        sizes = [kernel_size(p) for p in self.params]
        rows = array.array("q")
        for p, mine in zip(self.params, self.slots, strict=True):
            rows.extend(map(Tensor.data_ptr, (p, *present(mine))))
        threads = torch.get_num_threads() if sum(sizes) >= GRAIN else 1
        return native.sweep(kernels.cut(sizes), rows, len(sizes), threads)

    def _kernel(self, pack: Pack, *, measuring: bool) -> Any:
        counts = tuple(map(len, pack.numbers))
        rule = Rule(pack.links, self.holes, counts, measuring)
        dtypes = tuple(map(_real, self.dtypes))
        numbers = (sum(counts), self.compute)
        if self.flat:
            signature = kernels.Signature((dtypes,), None, numbers, self.device, 1)
            native = kernels.sweep(
                rule.key(),
                rule.functions(),
                rule.one,
                signature,
                rule.outputs(self.params[0]),
                strict=self.strict,
            )
            if native is not None:
                return self._sweep(native)
        return self._callable(rule, dtypes, numbers)

    def _callable(
        self, rule: Rule, dtypes: tuple[torch.dtype, ...], numbers: tuple[int, torch.dtype]
    ) -> list[tuple[kernels.Kernel, list[int]]]:
        """Kernels that are called with tensors, and which tensors each gets."""
        size = 1 if self.device.type == "cpu" else CHUNK
        if rule.stacks():
            size = at_once(self.params[0].numel())
        key, count, parts = rule.key(), len(self.params), []
        for cut in [range(at, min(at + size, count)) for at in range(0, count, size)]:
            shapes = None
            if not self.flat:
                views = [
                    [_plain(x) for x in (self.params[i], self.params[i], *present(self.slots[i]))]
                    for i in cut
                ]
                shapes = tuple(
                    [tuple([(tuple(x.shape), x.stride()) for x in leaf]) for leaf in views]
                )
            large = max(kernel_size(self.params[i]) for i in cut) >= GRAIN
            threads = torch.get_num_threads() if large and self.device.type == "cpu" else 1
            signature = kernels.Signature(
                (dtypes,) * len(cut), shapes, numbers, self.device, threads
            )
            kernel = kernels.build(key, rule.many, signature, strict=self.strict)
            parts.append((kernel, list(cut)))
        return parts

    def _call(self, parts: Any, grads: list[Tensor], numbers: Tensor) -> Sequence[Any]:
        sums = []
        for kernel, members in parts:
            args: list[Any] = [kernel_size(self.params[i]) for i in members] if self.flat else []
            for i in members:
                args += map(_plain, (grads[i], self.params[i], *present(self.slots[i])))
            sums.append(kernel([*args, numbers]))
        return [torch.stack(list(column)).sum() for column in zip(*sums, strict=True)]


class Rule:
    """What a kernel does to a leaf: the links, run on it in place or measured on it.

    holes: which slots a leaf lacks, link by link. counts: how many numbers each link reads.
    """

    def __init__(
        self,
        links: Sequence[Link],
        holes: list[tuple[bool, ...]],
        counts: tuple[int, ...],
        measuring: bool,
    ) -> None:
        self.links = links
        self.holes = holes
        self.counts = counts
        self.measuring = measuring

    def key(self) -> Any:
        """Stands for the rule in this process."""
        code = tuple([(kernels.static_key(self._code(x)), *self._place(x)) for x in self.links])
        globals_read = kernels.fingerprint(self.functions())
        return (code, globals_read, self.measuring, self.counts, tuple(self.holes))

    def functions(self) -> tuple[Any, ...]:
        """All that the rule depends on."""
        code = [(*self._code(link), *self._place(link)) for link in self.links]
        return (code, self.measuring, self.counts, self.holes)

    def _code(self, link: Link) -> tuple[Any, ...]:
        return (link.update, link.slots, link.reduce if self.measuring else None)

    def _place(self, link: Link) -> tuple[Any, ...]:
        return (link.tail, link.gate, link.back)

    def outputs(self, p: Tensor) -> int:
        """How many numbers it measures on a leaf like p."""
        if not self.measuring:
            return 0
        leaf = torch.zeros(1, dtype=compute_dtype(p))
        given = [leaf, leaf, *[leaf for own in self.holes for gap in own if not gap]]
        with torch.no_grad():
            return len(self.one([given], torch.ones(sum(self.counts), dtype=leaf.dtype)))

    def stacks(self) -> bool:
        """Does it gain from several leaves in one call?"""
        return not self.measuring and any(link.stack for link in self.links)

    def one(self, leaves: list[list[Tensor]], vector: Tensor) -> tuple[Tensor, ...]:
        """The body of a kernel for one leaf."""
        (leaf,) = self._leaves(leaves, vector)
        if self.measuring:
            return tuple(measure(self.links, *leaf))
        self._step([leaf])
        return ()

    def many(self, leaves: list[list[Tensor]], vector: Tensor) -> tuple[Tensor, ...]:
        """The body of a kernel for several leaves: sums over all of them."""
        given = self._leaves(leaves, vector)
        if self.measuring:
            sums = [measure(self.links, *leaf) for leaf in given]
            return tuple([torch.stack(column).sum() for column in zip(*sums, strict=True)])
        self._step(given)
        return ()

    def _leaves(self, leaves: list[list[Tensor]], vector: Tensor) -> list[Leaf]:
        supply = iter(vector.unbind())
        numbers = [tuple([next(supply) for _ in range(n)]) for n in self.counts]
        found = []
        for g, p, *rest in leaves:
            found.append(Leaf(g, p, with_holes(rest, self.holes), numbers))
        return found

    def _step(self, leaves: list[Leaf]) -> None:
        results = run_all_stored(self.links, leaves)
        for (_, p, slots, _), (u, new) in zip(leaves, results, strict=True):
            write(p, base.add(p, u), slots, new)


def write(p: Tensor, new_p: Tensor, old: Sequence[Slots], new: Sequence[Slots]) -> None:
    """Put the results of a step into the old buffers."""
    p.copy_(new_p)
    for mine, fresh in zip(old, new, strict=True):
        for slot, value in zip(mine, fresh, strict=True):
            if slot is not None and value is not slot:
                slot.copy_(value)


def kernel_size(p: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return p.numel() * 2 if p.is_complex() else p.numel()


def fits(tensors: list[Tensor], flat: bool) -> bool:
    """Can a kernel see these tensors, all of one leaf, through their memory alone?"""
    first = tensors[0]
    if first.device.type in WITHOUT_MEMORY:
        return False
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    return dense and all(
        type(x) in PLAIN
        and x.layout == torch.strided
        and x.device == first.device
        and x.is_complex() == first.is_complex()
        and not x.is_conj()
        and not x.is_neg()
        and (not flat or (x.shape == first.shape and x.stride() == first.stride()))
        for x in tensors
    )


def _plain(x: Tensor) -> Tensor:
    """A tensor as a kernel sees it: complex numbers as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
