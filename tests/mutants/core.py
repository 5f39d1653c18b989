"""Faults in the numbers of a step, in trees, and in what composes rules."""

from __future__ import annotations

from mutants.run import Mutant

MUTANTS = [
    Mutant(
        "an update does not give back the old slots behind a shut gate",
        "functional_optim/core/scalars.py",
        "self.carried.append(self.carry[i])",
        "self.carried.append(())",
        ("tests/combinators/test_combinators.py",),
    ),
]
