"""The memory that a step must move.

Torch's fused AdamW moves seven words of each element: the gradient, and the parameter and two slots
in and out. A rule with k slots as large as the parameter moves 3 + 2k, and those that take a sum of
all elements before they step read some of them again (`AGAIN`).
"""

from __future__ import annotations

from typing import Any

import optree
import torch

import functional_optim as fo

ADAMW = 7
"""The words of AdamW."""

AGAIN = {
    "adafactor": (3, "the gradient for its means and the update's RMS, the parameter for its own"),
    "adam_mini": (1, "the gradient for its blocks' means"),
    "came": (3, "the gradient for its means and the update's RMS, the momentum for its own"),
    "dadapt_adam": (3, "the gradient, s and the second moment for the estimate"),
    "dog": (1, "the gradient and the parameter for norms; the first parameter is not written"),
    "dowg": (1, "as for `dog`"),
    "fromage": (2, "the gradient and the parameter for their norms"),
    "lamb": (4, "the gradient for its norm, the parameter and the moments for others"),
    "lars": (2, "the gradient and the parameter for their norms"),
    "mars": (2, "the gradient and the last one for the corrected one's norm"),
    "momo": (3, "the gradient, the parameter and the momentum for inner products"),
    "momo_adam": (4, "the gradient, the parameter and both moments for inner products"),
    "noisy_sgd": (2, "nothing, but normal numbers may take the time of two words"),
    "novograd": (1, "the gradient for its norm"),
    "polyak_sgd": (1, "the gradient for its norm"),
    "prodigy": (2, "the gradient and the parameter for inner products"),
    "stable_adamw": (2, "the gradient and the second moment for the RMS"),
}
"""How many words are read twice for a sum, and which. Sums of rows are none of them: a row stays in
the cache."""


def words(name: str) -> int:
    """The words that a step must move of each element of a matrix."""
    p = torch.zeros(64, 64)
    state: Any = getattr(fo, name)().init(p)
    kept: Any = (state.slots, state.carry) if isinstance(state, fo.State) else state
    entries = sum(x.numel() for x in optree.tree_leaves(kept)) / p.numel()
    return 3 + 2 * round(entries) + AGAIN.get(name, (0, ""))[0]
