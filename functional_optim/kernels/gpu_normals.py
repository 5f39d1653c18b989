"""Normal random numbers of a counter, filled into a GPU's memory by a kernel in Triton.

The numbers are those of `core.randomness.normal`, up to the rounding of logarithm, sine and cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_optim.kernels import failures
from functional_optim.kernels.counters import ROUNDS_IN_TRITON, noise_of_keys
from functional_optim.kernels.drivers import DRIVERS, Launcher
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.triton_primitives import HEAD, KernelText

BLOCK = 1024
"""Counters of a program."""

TYPES = {"out": "*fp32", "keys": "*i64", "count": "i64"}
PLACES = f"tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})"

NORMALS = KernelText(
    "normals",
    f"""{HEAD}
@triton.jit
def normals(out, keys, count):
    i = {PLACES}
    name = tl.load(keys)
    low = name.to(tl.uint32)
    x = i.to(tl.uint32)
    y = (i >> 32).to(tl.uint32) ^ (name >> 32).to(tl.uint32)
{ROUNDS_IN_TRITON}
    uniform = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt_rn(-2.0 * libdevice.log(uniform))
    angle = y.to(tl.float32) * 1.4629180792671596e-09
    tl.store(out + i, radius * libdevice.cos(angle), mask=i < count)
    tl.store(out + count + i, radius * libdevice.sin(angle), mask=i < count)
""",
    TYPES,
    4,
)
"""Both numbers of `count` counters, one after the other. keys: the stream's name."""

LINES = "\n    ".join(noise_of_keys(PLACES))

NOISE = KernelText(
    "noise",
    f"""{HEAD}
@triton.jit
def noise(out, keys, count):
    first = tl.load(keys).to(tl.uint64)
    second = tl.load(keys + 1).to(tl.uint64)
    {LINES}
    tl.store(out + place, noise, mask=place < count)
""",
    TYPES,
    4,
)
"""`core.randomness.noise`."""

_launchers: dict[tuple[str, torch.device], Launcher | None] = {}


def run(text: KernelText, out: Tensor, keys: Tensor, count: int) -> bool:
    """Fill a contiguous float32 tensor of a GPU; False, and nothing done, if there is no kernel.

    keys: int64, on the same device: nothing waits for them.
    """
    launch = _launcher(text, out.device) if keys.device == out.device else None
    if launch is None:
        return False
    launch(-(-count // BLOCK), (out.data_ptr(), keys.data_ptr(), count))
    return True


def _launcher(text: KernelText, device: torch.device) -> Launcher | None:
    """A kernel, compiled at its first use, but not in the middle of a capture."""
    driver = DRIVERS.get(device.type)
    if driver is None or driver.missing() is not None:
        return None
    if (text.name, device) not in _launchers:
        if driver.capturing():
            return None
        try:
            _launchers[text.name, device] = let_through(driver.load, text, device)
        except Exception as error:
            failures.warn_failed(
                "the kernel of normal numbers fails", error, "; they are drawn eagerly"
            )
            _launchers[text.name, device] = None
    return _launchers[text.name, device]
