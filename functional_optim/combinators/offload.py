"""`offload`: slots in host memory, or in files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import sharding
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, made_of_rules
from functional_optim.core.memory import has_address


class HostMemory(NamedTuple):
    """Stores slots in host memory. min_size: only slots with at least this many elements."""

    min_size: int

    def keep(self, x: Tensor) -> Tensor:
        """A new slot in its memory."""
        here = x.device.type in ("cpu", "meta") or x.numel() < self.min_size
        return x if here else x.cpu()


class Files(NamedTuple):
    """Stores slots of the CPU in unnamed files of a folder, which are removed with the tensors.

    min_size: as for `HostMemory`.
    """

    folder: str
    min_size: int

    def keep(self, x: Tensor) -> Tensor:
        """A new slot in its memory; of a DTensor, the shard of this process."""
        if sharding.is_sharded(x):
            own = sharding.shard(x)
            kept = self.keep(own)
            return x if kept is own else sharding.from_part(kept, x)
        if not has_address(x) or x.numel() < max(self.min_size, 1) or x.device.type != "cpu":
            return x
        handle, name = tempfile.mkstemp(dir=self.folder)
        size = x.numel() * x.element_size()
        try:
            if hasattr(os, "posix_fallocate"):  # else a full disk ends the process at a write
                os.posix_fallocate(handle, 0, size)
            os.ftruncate(handle, size)
            found = torch.from_file(name, shared=True, size=x.numel(), dtype=x.dtype)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: offload needs {size} bytes in {self.folder}; make room there, "
                "or pass a larger min_size",
            ) from None
        finally:
            os.close(handle)
            Path(name).unlink()
        return found.as_strided(x.shape, torch.empty_like(x).stride()).copy_(x)


@factory
def offload(
    tx: GradientTransformation, to: str | os.PathLike[str], *, min_size: int = 4096
) -> Leafwise:
    """Store the slots of a transformation in host memory or in files.

    * `to="cpu"`: in host memory, for parameters on another device. A step moves the slots of one
      parameter to the device, and the new slots back, before the next parameter's.
    * `to` is a folder: in memory-mapped files, for parameters on the CPU and state that is larger
      than memory. Kernels read and write them like all tensors; the operating system moves pages
      from and to the disk. The files have no names, so nothing remains when the process ends. Save
      a state dict to keep a state.

    `fo.compile` and optimizer objects step such slots in place. The pure `update` returns new
    slots: in host memory, or, for files, as ordinary tensors. So does a deep copy. A forked process
    shares the files, and must not step.

    Args:
        tx: a transformation that consists of one-tensor rules.
        to: "cpu", or an existing folder on a fast local disk.
        min_size: slots with fewer elements are not moved, ≥ 0.

    Raises:
        TypeError: if tx does not consist of one-tensor rules, or `to` is not a string or path.
        ValueError: if the folder does not exist, or is not writable.
        OSError: from `init`, or the first step of an object, if the disk is full.

    Example::

        >>> import tempfile, torch, functional_optim as fo
        >>> tx = fo.offload(fo.adamw(1e-3), tempfile.gettempdir())
        >>> params = {"w": torch.ones(64, 64)}
        >>> step, state = fo.compile(tx), tx.init(params)
        >>> params, state = step({"w": torch.ones(64, 64)}, state, params)
        >>> round(state.slots["exp_avg"]["w"][0, 0].item(), 3)
        0.1
    """
    tx = made_of_rules("offload", tx)
    numeric.check_count("offload", 0, min_size=min_size)
    home = _home(to, min_size)
    kept = [x._replace(rule=x.rule.stored_by(home=home)) for x in tx.placements]
    return Leafwise(tuple(kept))


def _home(to: Any, min_size: int) -> HostMemory | Files:
    if not isinstance(to, (str, os.PathLike)):
        raise TypeError(f'offload takes "cpu" or a folder, but got a {type(to).__name__}.')
    if to == "cpu":
        return HostMemory(min_size)
    folder = Path(to).resolve()
    if not os.fspath(to) or not folder.is_dir():
        raise ValueError(f'offload takes "cpu" or a folder that exists, but got {to!r}.')
    try:
        handle, name = tempfile.mkstemp(dir=folder)
    except OSError as error:
        raise ValueError(
            f"offload cannot write files into {to!r} ({error.strerror}); pass another folder."
        ) from None
    os.close(handle)
    Path(name).unlink()
    return Files(str(folder), min_size)
