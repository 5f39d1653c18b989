"""Values that torch's loading has cast are as they were saved."""

from __future__ import annotations

import optree
import pytest
import torch

from functional_optim.checkpoint.conversion import restore_precision

# ---------------------------------------------------------------- what torch's cast has rounded


def test_what_was_only_cast_is_as_it_was_saved():
    wide = torch.tensor([1 / 3, torch.nan, torch.inf], dtype=torch.float64)
    saved = {"a": wide, "b": [wide, (wide, 3)], "c": wide}
    loaded = optree.tree_map(lambda x: x.bfloat16() if isinstance(x, torch.Tensor) else x, saved)
    loaded["c"] = loaded["c"] * 2  # a hook's
    found = restore_precision(loaded, saved)
    for x in (found["a"], found["b"][0], found["b"][1][0]):
        assert x.dtype is torch.float64
        assert torch.equal(x.nan_to_num(), wide.nan_to_num())
        assert x.data_ptr() != wide.data_ptr()
    assert found["c"] is loaded["c"]
    assert restore_precision(loaded["a"], None) is loaded["a"]
    assert restore_precision([1], (1, 2)) == [1]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_a_nan_that_was_cast_is_restored_and_one_that_a_hook_has_replaced_is_not(kind):
    saved = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    found = restore_precision(saved.to(kind), saved)
    assert found.dtype is torch.float64
    assert torch.equal(found.isnan(), saved.isnan())
    mended = torch.tensor([1.0, 0.0]).to(kind)
    assert restore_precision(mended, saved) is mended


def test_what_overflows_is_restored_and_what_a_hook_has_clipped_is_not():
    saved = torch.tensor([1.0, 1e6], dtype=torch.float32)
    assert torch.equal(restore_precision(saved.half(), saved), saved)
    clipped = saved.half().nan_to_num()
    assert restore_precision(clipped, saved) is clipped
