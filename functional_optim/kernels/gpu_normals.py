"""Normal random numbers of a counter, filled into a GPU's memory by a kernel in Triton.

The numbers are those of `core.randomness.normal`, up to the rounding of logarithm, sine and cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_optim.kernels import failures
from functional_optim.kernels.drivers import DRIVERS, Launcher
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.triton_primitives import HEAD, KernelText

BLOCK = 1024
"""Counters of a program."""

ROUNDS = "".join(
    f"    p = x.to(tl.uint64) * 0xD256D193\n"
    f"    x = (p >> 32).to(tl.uint32) ^ (low + {k * 0x9E3779B9 % 2**32}).to(tl.uint32) ^ y\n"
    f"    y = p.to(tl.uint32)\n"
    for k in range(10)
)
"""Philox-2x32-10."""

BODY = f"""
@triton.jit
def normals(first, second, key, count):
    i = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    name = tl.load(key)
    low = name.to(tl.uint32)
    x = i.to(tl.uint32)
    y = (i >> 32).to(tl.uint32) ^ (name >> 32).to(tl.uint32)
{ROUNDS}
    uniform = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt_rn(-2.0 * libdevice.log(uniform))
    angle = y.to(tl.float32) * 1.4629180792671596e-09
    tl.store(first + i, radius * libdevice.cos(angle), mask=i < count)
    tl.store(second + i, radius * libdevice.sin(angle), mask=i < count)
"""

TEXT = KernelText(
    "normals", HEAD + BODY, {"first": "*fp32", "second": "*fp32", "key": "*i64", "count": "i64"}, 4
)


_launchers: dict[torch.device, Launcher | None] = {}


def fill(out: Tensor, key: Tensor) -> bool:
    """Fill both rows of a contiguous float32 tensor, (2, n), of a GPU, with the numbers of the
    counters 0, ..., n − 1; False, and nothing done, if there is no kernel.

    key: the stream's name, 0-dim int64, on the same device: nothing waits for it.
    """
    launch = _launcher(out.device) if key.device == out.device else None
    if launch is None:
        return False
    first, count = out.data_ptr(), out.shape[1]
    launch(-(-count // BLOCK), (first, first + 4 * count, key.data_ptr(), count))
    return True


def _launcher(device: torch.device) -> Launcher | None:
    """The kernel, compiled at its first use, but not in the middle of a capture."""
    driver = DRIVERS.get(device.type)
    if driver is None or driver.missing() is not None:
        return None
    if device not in _launchers:
        if driver.capturing():
            return None
        try:
            _launchers[device] = let_through(driver.load, TEXT, device)
        except Exception as error:
            failures.tell_failed(
                "the kernel of normal numbers fails", error, "; they are drawn eagerly"
            )
            _launchers[device] = None
    return _launchers[device]
