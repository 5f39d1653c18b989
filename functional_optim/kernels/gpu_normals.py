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

BODY = f"""
@triton.jit
def normals(first, second, key, count):
    i = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    name = tl.load(key)
    low = name.to(tl.uint32)
    x = i.to(tl.uint32)
    y = (i >> 32).to(tl.uint32) ^ (name >> 32).to(tl.uint32)
{ROUNDS_IN_TRITON}
    uniform = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt_rn(-2.0 * libdevice.log(uniform))
    angle = y.to(tl.float32) * 1.4629180792671596e-09
    tl.store(first + i, radius * libdevice.cos(angle), mask=i < count)
    tl.store(second + i, radius * libdevice.sin(angle), mask=i < count)
"""

TEXT = KernelText(
    "normals", HEAD + BODY, {"first": "*fp32", "second": "*fp32", "key": "*i64", "count": "i64"}, 4
)

LINES = "\n    ".join(
    noise_of_keys(f"tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})")
)

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
    {"out": "*fp32", "keys": "*i64", "count": "i64"},
    4,
)


_launchers: dict[tuple[str, torch.device], Launcher | None] = {}


def fill(out: Tensor, key: Tensor) -> bool:
    """Fill both rows of a contiguous float32 tensor, (2, n), of a GPU, with the numbers of the
    counters 0, ..., n − 1; False, and nothing done, if there is no kernel.

    key: the stream's name, 0-dim int64, on the same device: nothing waits for it.
    """
    launch = _launcher(TEXT, out.device) if key.device == out.device else None
    if launch is None:
        return False
    first, count = out.data_ptr(), out.shape[1]
    launch(-(-count // BLOCK), (first, first + 4 * count, key.data_ptr(), count))
    return True


def fill_noise(out: Tensor, keys: Tensor) -> bool:
    """The same for a contiguous float32 tensor of a GPU, with `core.randomness.noise`.

    keys: both of its keys, (2,) int64, on the same device.
    """
    launch = _launcher(NOISE, out.device) if keys.device == out.device else None
    if launch is None:
        return False
    count = out.numel()
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
