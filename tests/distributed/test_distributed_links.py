"""Every link on DTensors; gradients still to be added up; how often processes ask each other."""

from __future__ import annotations

import pytest
from helpers import assert_close
from ranks import needs_gloo, results
from ranks_links import (
    ALL_REDUCES,
    EMPTY,
    HOWS,
    RUNS,
    SUMS,
    alone,
    summed_alone,
    with_empty_parts,
)

pytestmark = needs_gloo
every_how = pytest.mark.parametrize("how", HOWS)


@pytest.mark.parametrize(
    ("case", "how"), [pytest.param(case, how, id=f"{case.name}-{how}") for case, how in RUNS]
)
def test_a_link_steps_shards_as_whole_tensors(case, how, both):
    for mine in results(both, f"link-{case.name}-{how}"):
        assert_close(mine, alone(case), case.rounding)


@pytest.mark.parametrize(("name", "how"), EMPTY)
def test_a_process_that_has_nothing_of_a_tensor_steps_with_the_others(name, how, both):
    expected = with_empty_parts(name, "update", lambda _, x: x)
    for mine in results(both, f"empty-{name}-{how}"):
        assert_close(mine, expected, 1e-9)


@pytest.mark.parametrize(("name", "how", "way"), SUMS)
def test_a_gradient_is_added_up_once(name, how, way, both):
    """One collective for each of two tensors, and one for what is measured of shards."""
    for mine, asked in results(both, f"sums-{name}-{how}-{way}"):
        assert_close(mine, {n: p.detach() for n, p in summed_alone(name).items()}, 1e-12)
        assert asked == 2 + (ALL_REDUCES.get(name, 0) if way == "Shard" else 0)


@every_how
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_step_on_shards_asks_once_for_each_link_that_measures(name, how, both):
    for asked in results(both, f"count-{name}-{how}"):
        assert asked == ["allreduce_"] * ALL_REDUCES[name]


@pytest.mark.parametrize("to_shards", [False, True])
def test_a_state_dict_of_other_processes_is_refused_at_once(to_shards, both):
    """Before anything of the optimizer has changed."""
    for mine in results(both, f"load-{to_shards}"):
        assert mine["kept"]
        for name in ("a", "b"):
            assert f"exp_avg of parameter '{name}' is a" in mine["said"]
        assert "torch.distributed.checkpoint" in mine["said"]
