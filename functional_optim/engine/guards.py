"""Properties of the tensors of a step, to decide whether its plan is valid for the next."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from itertools import chain
from operator import is_
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels, tree
from functional_optim.core import modes
from functional_optim.core.memory import Written, has_address, is_there, reach, same_looks
from functional_optim.core.sharding import unwaited_shard
from functional_optim.kernels import private


class TensorGuard:
    """Properties of gradients, addresses of tensors, and other inputs of a plan.

    `trees` or `gradients` checks whether a plan may be reused. Dispatch modes and other
    interceptors of operations must not be active. A gradient without memory, or in that of the
    parameters and slots, never passes: the caller has to check and copy it.

    Args:
        given: gradients, or None.
        params, slots: the tensors that a step writes, whose addresses are checked. A slot that is a
            vector with the same address is assumed to have the same stride.
        objects: objects that must be identical: a tuple for `trees`; for `gradients` a tuple of
            tuples, the parameters of each group. states, values: for `gradients`, the values of the
            optimizer's state, and the values of each of these.
        numbers: for `gradients`, the tensors of its scalars, which must not have been written since
            `settle` was called.
    """

    def __init__(
        self,
        given: Sequence[Tensor | None],
        params: Sequence[Tensor],
        slots: Sequence[Tensor],
        objects: tuple[Any, ...],
        states: tuple[Any, ...] = (),
        values: tuple[Any, ...] = (),
        numbers: tuple[Tensor, ...] = (),
    ) -> None:
        self.kinds = tuple(map(type, given))
        grads = [g for g in given if g is not None]
        self.dense = all(g.layout is torch.strided for g in grads)
        tensors = [*params, *slots]
        self.compared = (*params, *[x for x in slots if x.dim() > 1])
        self.check = same_looks([*grads, *self.compared])
        self.reaches = [reach(x) if has_address(x) else 0 for x in grads]
        self.written = Written(map(unwaited_shard, tensors))
        self.addressed = tuple([x for x in tensors if has_address(x)])
        self.addresses = list(map(Tensor.data_ptr, self.addressed))
        self.others = [x for x in tensors if not has_address(x)]
        self.places = list(map(_place, self.others))
        self.meshes = _meshes(grads)
        self.clear: list[int | None] = []
        self.simple = not (self.others or self.meshes)
        self.objects, self.states, self.values = objects, states, values
        self.driven = any(x.device.type in kernels.DRIVERS for x in tensors)
        """Whether a step may be captured for replay on the device of some tensor."""
        self.numbers = numbers
        self.spans = [reach(x) if x.is_cpu and has_address(x) else 0 for x in numbers]
        self.seen = self._look()
        self.native: Any = None

    def apart(self, g: Tensor) -> Tensor:
        """A gradient, copied if a step would write into it before it is read."""
        return g.clone() if self.written.meets(unwaited_shard(g)) else g

    def trees(self, structure: Any, outline: Any, grads: Any, *rest: Any) -> list[Tensor] | None:
        """The gradients in a tree, if their properties and the leaves of the others are the same.

        structure, outline: of all of these trees.
        """
        if self.native is not None and outline is not None:
            found = self.native.trees(outline, grads, *rest)
            return found if self.simple or found is None or self._others_stay(found) else None
        if modes.intercepted():
            return None
        try:
            given, *columns = tree.places(structure, grads, *rest)
        except (ValueError, TypeError):  # another structure
            return None
        return self._fit(given) if _same_objects(list(chain(*columns)), self.objects) else None

    def gradients(
        self, groups: list[dict[str, Any]], state: Any, entries: Sequence[dict[str, Any] | None]
    ) -> tuple[list[Tensor], list[int]] | None:
        """The gradients of an optimizer's parameters, if all of its objects are the same; and the
        indices of groups with other entries. A None entry counts as another one."""
        if self.native is not None:
            found = self.native.gradients(groups, state, entries)
            return found if self.simple or found is None or self._others_stay(found[0]) else None
        if modes.intercepted():
            return None
        lists = [group["params"] for group in groups]
        unchanged = (
            len(lists) == len(self.objects)
            and all(map(_same_objects, lists, self.objects))
            and _same_objects(state.values(), self.states)
            and all(
                _same_objects(mine.values(), known)
                for mine, known in zip(self.states, self.values, strict=True)
                if isinstance(mine, dict)
            )
            and self._look() == self.seen
        )
        grads = self._fit([p.grad for params in lists for p in params]) if unchanged else None
        if grads is None:
            return None
        pairs = enumerate(zip(groups, entries, strict=True))
        return grads, [k for k, (group, own) in pairs if own is None or not _same(group, own)]

    def is_beside(self, other: TensorGuard) -> bool:
        """Whether both check for the same objects, but for other gradients."""
        mine, its = [(x.objects, x.states, x.values) for x in (self, other)]
        return self.kinds != other.kinds and _same_parts(mine, its)

    def settle(self) -> None:
        """Record the versions of the scalars, after a step has written them."""
        if self.native is not None:
            self.native.settle()
        else:
            self.seen = self._look()

    def _look(self) -> list[Any]:
        """What tells whether somebody has written to a number: its bytes in the host's memory,
        which collectives, `x.data` and other processes write without raising torch's version; on a
        device that version."""
        return [
            ctypes.string_at(x.data_ptr(), size) if size and is_there(x) else version_of(x)
            for x, size in zip(self.numbers, self.spans, strict=True)
        ]

    def _fit(self, given: Sequence[Tensor | None]) -> list[Tensor] | None:
        """The gradients, if their properties are the same and no tensor has moved.

        The next call compares all of this in C, if the library for it is available.
        """
        if tuple(map(type, given)) != self.kinds:
            return None
        grads = [g for g in given if g is not None]
        if (
            any(g.is_nested for g in grads)  # torch's guards would crash the process
            or not self.check(*grads, *self.compared)
            or not self._are_there(grads)
            or list(map(Tensor.data_ptr, self.addressed)) != self.addresses
            or not self._others_stay(grads)
        ):
            return None
        library = kernels.watcher()
        if library is not None and isinstance(self.check, BuiltinFunctionType):
            self.native = library.Guard(
                kinds=self.kinds,
                check=self.check,
                compared=self.compared,
                tensors=self.addressed,
                places=array.array("q", self.addresses),
                reaches=array.array("q", self.reaches),
                starts=array.array("q", self.written.starts),
                stops=array.array("q", self.written.stops),
                read=kernels.READER,
                params=self.objects,
                states=self.states,
                values=self.values,
                numbers=self.numbers,
                spans=array.array("q", self.spans),
                quiet=(private.dispatch_modes, private.transform, private.early_dispatch_modes),
            )
        return grads

    def _others_stay(self, grads: list[Tensor]) -> bool:
        """Whether shards are where they were, and the step writes none of their gradients."""
        if self.others and list(map(_place, self.others)) != self.places:
            return False
        if not self.meshes:
            return True
        if _meshes(grads) != self.meshes:
            return False
        places = list(map(_place, grads))
        if places == self.clear:
            return True
        self.clear = [] if any(map(self.written.meets, map(unwaited_shard, grads))) else places
        return bool(self.clear)

    def _are_there(self, grads: list[Tensor]) -> bool:
        """Whether gradients have memory that the step does not write."""
        read = [(x, size) for x, size in zip(grads, self.reaches, strict=True) if size]
        return not any(
            not is_there(x) or self.written.holds(x.data_ptr(), size) for x, size in read
        )


def version_of(x: Tensor) -> Any:
    """The version counter of a tensor.

    An inference tensor has none: its version is unequal to all others.
    """
    return object() if x.is_inference() else x._version


def _meshes(grads: list[Tensor]) -> list[Any]:
    """The processes that share gradients."""
    return [mesh for g in grads if (mesh := getattr(g, "device_mesh", None)) is not None]


def _place(x: Tensor) -> int | None:
    try:
        return unwaited_shard(x).data_ptr()
    except RuntimeError:  # of a layout, or inside of a transform, that has no storage
        return None


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two dicts have identical keys and values, in the same order."""
    return _same_objects(a, b) and all(map(is_, a.values(), b.values()))


def _same_parts(a: Any, b: Any) -> bool:
    """Whether two nested tuples have the same objects."""
    both = type(a) is tuple and type(b) is tuple
    return a is b or (both and len(a) == len(b) and all(map(_same_parts, a, b)))


def _same_objects(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))
