"""Random numbers of a counter for kernels: constants, and functions in C++ and in Triton.

`core.randomness` has the same functions as operations of torch, and the papers.
"""

from __future__ import annotations

from functional_optim.kernels.cpp import text_of

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10
"""Of Philox-2x32."""

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64."""

LANES = 16
"""Half of the elements of a group of `core.randomness.noise`, which shares its random numbers: they
are 16 words of 32 bits for the radii, and 16 for the angles."""

WORD = 24
"""Bits of a word of a step count, so that float32 holds it exactly."""

NAMES = {
    "MULTIPLIER": f"{MULTIPLIER:#x}u",
    "WEYL": f"{WEYL:#x}u",
    "ROUNDS": str(ROUNDS),
    "GOLDEN": f"{GOLDEN:#x}u",
    "FIRST": f"{FIRST:#x}u",
    "SECOND": f"{SECOND:#x}u",
    "GROUP": str(2 * LANES),
    "LANES": str(LANES),
    "WORD": str(WORD),
}


DEFINED = "".join([f"#define {name} {number}\n" for name, number in NAMES.items()])
NOISE = DEFINED + text_of("noise.h")
"""`noise` of many elements, and `noise_at` of one: the same numbers, in C++."""

ROUNDS_IN_TRITON = "".join(
    f"    p = x.to(tl.uint64) * {MULTIPLIER:#x}\n"
    f"    x = (p >> 32).to(tl.uint32) ^ (low + {k * WEYL % 2**32}).to(tl.uint32) ^ y\n"
    f"    y = p.to(tl.uint32)\n"
    for k in range(ROUNDS)
)
"""Philox."""


def _mixed(z: str, key: str) -> list[str]:
    return [
        f"{z} = ({z} ^ ({z} >> 30)) * {FIRST:#x}",
        f"{z} = ({z} ^ ({z} >> 27){key}) * {SECOND:#x}",
        f"{z} = {z} ^ ({z} >> 31)",
    ]


def noise_lines(key: str, low: str, high: str, place: str) -> list[str]:
    """The lines in Triton that make `noise`, float32, of an element.

    key: int64. low, high: the words of the step count. place: of the element, int64.
    """
    return [
        f"step = 2 * ({low}.to(tl.uint64) + ({high}.to(tl.uint64) << {WORD}))",
        f"first = {key}.to(tl.uint64) + (step + 1) * {GOLDEN:#x}",
        *_mixed("first", ""),
        f"second = {key}.to(tl.uint64) + (step + 2) * {GOLDEN:#x}",
        *_mixed("second", ""),
        *noise_of_keys(place),
    ]


def noise_of_keys(place: str) -> list[str]:
    """The same for the keys of the step, `first` and `second`."""
    return [
        f"place = {place}",
        f"lane = place % {LANES}",
        f"i = (place // {2 * LANES} * {LANES} + lane // 2).to(tl.uint64)",
        "x = first + i * (second | 1)",
        *_mixed("x", " ^ second"),
        f"y = first + (i + {LANES // 2}) * (second | 1)",
        *_mixed("y", " ^ second"),
        "shift = (lane % 2 * 32).to(tl.uint64)",
        "x = (x >> shift).to(tl.uint32)",
        "y = (y >> shift).to(tl.uint32)",
        "radius = tl.sqrt_rn(-2.0 * libdevice.log(tl.fma(x.to(tl.float32), 2.0**-32, 2.0**-33)))",
        "rest = (y << 3).to(tl.int32, bitcast=True).to(tl.float32) * 3.6572951981678e-10",
        "sine = radius * libdevice.sin(rest)",
        "cosine = radius * libdevice.cos(rest)",
        "other = (place & LANES) != 0".replace("LANES", str(LANES)),
        "noise = tl.where(((y >> 31) != 0) != other, sine, cosine)",
        "noise = tl.where((tl.where(other, y << 2, y << 1) >> 31) != 0, -noise, noise)",
    ]
