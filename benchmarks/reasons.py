"""Why a row misses its target, as far as it was measured: `RESULTS.md` begins with these."""

from __future__ import annotations

from rows import Result

NOISE = 1.05
"""Two runs of one row differ by this factor on a quiet machine."""

SUMS = (
    "It steps after a sum over a whole tensor. Fused AdamW's four reads hide its three writes, so "
    "time follows the words read, not those moved."
)
UNSUMMED = "It reads two words, AdamW four; reads hide writes."
GLOO = "Its steps need sums over processes, and each takes gloo 0.3 to 0.6 ms."
AGAIN = (
    "While the processes add sums, the shards leave the cache: each pass reads them from memory. "
    "The rest is waiting for these sums."
)
PRODUCTS = (
    "The products of Newton–Schulz take three quarters of the step, at the rate of large matrix "
    "products; on a processor with matrix units they are ATen's in bfloat16, as theirs are."
)
CALLS = "Each operation of each iteration is a call of torch; with compile=True it meets the bar."

REASONS = {
    "algorithm-madgrad": "A cube root of each element: instructions, not memory, take the time.",
    "algorithm-noisy_sgd": (
        "A normal number for each element: instructions take the time, not memory, above all with "
        "vectors of eight numbers."
    ),
    "algorithm-sgd": UNSUMMED,
    "algorithm-sign_sgd": UNSUMMED,
    "algorithm-signum": UNSUMMED,
    "algorithm-lion": UNSUMMED,
    "algorithm-sm3": "Maxima of rows and of columns, by two passes over blocks that fit the cache.",
    **{
        f"algorithm-{name}": SUMS
        for name in (
            "stable_adamw", "adafactor", "adam_mini", "came", "dadapt_adam", "dog", "dowg",
            "fromage", "lamb", "lars", "mars", "momo", "novograd", "polyak_sgd", "prodigy",
        )
    },
    "stored_int8-big": (
        "About 88 vector instructions for a vector of elements, stochastic rounding included: they "
        "take the time, not memory, above all with vectors of eight numbers."
    ),
    "muon-squares": PRODUCTS,
    **{f"peer-pytorch_optimizer-{name}-squares": PRODUCTS for name in ("muon", "normuon", "scion")},
    "eager-gpt": "Thirteen calls of torch for each piece; torch's loop has eight, in place.",
    "compile-depth": "A plan of four times as many tensors, in Python.",
    "compile-": "It builds two or three kernels, AdamW one.",
    "train-graph-compile": "Inductor compiles the loss and the step as one graph.",
    "train-compile": "It builds a kernel once for a machine: with kernels kept, the bar is met.",
    "muon_adamw-": (
        "Products in bfloat16 take four fifths of torch's time, on a processor with instructions "
        "for them."
    ),
    "es-": "The evaluation of all candidates takes half of it, noise and ranks the rest.",
    "stack-": "Single matrices are stepped in batches, too: a stack of experts saves nothing.",
    "sharded-muon": "Matrices go to their owners, and their shards back, through gloo.",
    "sharded-lamb": AGAIN,
    "sharded-adafactor": AGAIN,
    "sharded-": GLOO,
    "adafactor-gpt": SUMS,
    "adamw-big": "Both move the same seven words.",
    "functional-": "A tree is flattened and compared in each step; the object keeps a list.",
    "solver-decays-scipy-eager": CALLS,
    "solver-roots-roots-eager": CALLS,
    "solver-bounded-numpy-eager": CALLS,
}  # fmt: skip
"""By the beginning of a row's name."""


def reason(result: Result) -> str:
    """Why a row misses its last bar."""
    value = result.value()
    if value is not None and value <= NOISE * result.row.bars[-1]:
        return "Within 5 % of the bar, by which two runs differ."
    found = [text for name, text in REASONS.items() if result.row.name.startswith(name)]
    return found[0] if found else "Not known."
