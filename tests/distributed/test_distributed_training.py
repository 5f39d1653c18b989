"""DDP, FSDP2, tensor parallelism, ZeRO and FSDP1: two processes train as one."""

from __future__ import annotations

import pytest
from helpers import assert_close
from ranks import needs_gloo, results
from ranks_models import PAIRS, alone

pytestmark = needs_gloo


@pytest.mark.parametrize(
    ("row", "way"), [pytest.param(row, way, id=f"{way}-{row.name}") for row, way in PAIRS]
)
def test_two_processes_train_as_one(row, way, both):
    """To 1e-10, with groups, a scheduler and a clipping that acts."""
    end, norms = alone(row, one_group=way == "fsdp1-flat")
    for mine in results(both, f"{way}-{row.name}"):
        assert_close(mine["end"], end, row.rounding)
        if mine["norms"]:
            assert_close(mine["norms"], norms, 1e-6)
