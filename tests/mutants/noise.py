"""Faults in the noise of rules."""

from __future__ import annotations

from mutants.run import Mutant

PACKAGE = "functional_optim"
NOISE = "tests/transforms/test_noise_of_rules.py -k "


def noise(title: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(title, file, old, new, (tests,))


MUTANTS = [
    noise(
        "each piece of a block gets the noise of the first one",
        f"{PACKAGE}/kernels/cpp_loops.py",
        'f"noise({name}, {name}k, start, length);"',
        'f"noise({name}, {name}k, start / 4096 * 4096, length);"',
        f"{NOISE}every_way",
    ),
    noise(
        "a kernel gives both numbers of a pair the same place",
        f"{PACKAGE}/kernels/counters.py",
        "return place & LANES ? b : a;",
        "return a;",
        f"{NOISE}several_axes",
    ),
    noise(
        "the step of a kernel has 24 bits",
        f"{PACKAGE}/kernels/counters.py",
        "((uint64_t)low + ((uint64_t)high << WORD))",
        "(uint64_t)low",
        f"{NOISE}repeats",
    ),
    noise(
        "the step of an eager rule has 24 bits",
        f"{PACKAGE}/core/noise.py",
        "low.to(torch.int64) + (high.to(torch.int64) << WORD)",
        "low.to(torch.int64)",
        f"{NOISE}repeats",
    ),
    noise(
        "the second key does not change the step of the counter",
        f"{PACKAGE}/core/randomness.py",
        "z = first + i * (second | 1)",
        "z = first + i",
        f"{NOISE}splitmix",
    ),
    noise(
        "an angle is cut off to a quarter of its bits",
        f"{PACKAGE}/kernels/counters.py",
        "deviates(a, b, x, (int32_t)(y << 3),",
        "deviates(a, b, x, (int32_t)(y & 0xff000000u),",
        f"{NOISE}'library or tails'",
    ),
    noise(
        "a sparse gradient gets noise in its own rows",
        f"{PACKAGE}/core/sparse.py",
        "return g.to_dense() if sparse and any(x.rule.draws for x in placements) else g",
        "return g",
        f"{NOISE}sparse",
    ),
    noise(
        "groups without names get the same noise",
        "adapters/stepping/leaves.py",
        "alone = k > 0 and name not in own",
        "alone = False",
        "tests/adapters/test_groups_as_one.py -k independent_noise",
    ),
    noise(
        "all leaves get the same noise",
        f"{PACKAGE}/core/storage.py",
        "init(p, path) if rule.draws",
        "init(p) if rule.draws",
        "tests/transforms/test_noise.py -k independent",
    ),
    noise(
        "members of an ensemble get the same noise",
        f"{PACKAGE}/core/noise.py",
        "if all(dim is None for dim in dims[:3]):",
        "if True:",
        "tests/transforms/test_noise.py -k ensemble",
    ),
]
