"""The deliberate faults of `make mutants` can be put into the package as it is."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.run import every  # noqa: E402


def test_each_fault_fits_the_text_that_it_changes():
    assert not [f"{x.title}: {why}" for x in every() if (why := x.problem(ROOT))]
