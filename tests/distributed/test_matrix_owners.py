"""Matrices that several processes share: who computes them, what is sent, and that nothing else
changes."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close
from processes import collect
from ranks import needs_gloo, results
from ranks_owners import OWNERS, PLACED, WAYS, alone, work

import functional_optim as fo
from functional_optim.core.ownership import owners_of

pytestmark = needs_gloo


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def ranks(request, tmp_path_factory):
    return collect(request.param, work, folder=tmp_path_factory.mktemp("owners"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("placed", PLACED)
def test_several_processes_step_as_one(placed, owners, way, ranks):
    for mine in results(ranks, f"owners-{placed}-{owners}-{way}"):
        assert_close(mine, alone(), 1e-10)


@pytest.mark.parametrize("placed", PLACED)
def test_spread_over_n_processes_each_computes_an_nth(placed, ranks):
    """And what is sent: a part of each matrix to its owner, and as much back; or all of a result.

    With 8 matrices of 32 entries and n processes.
    """
    n = len(ranks)
    for exchanged, gathered, products in results(ranks, f"counted-{placed}-spread"):
        assert products == 8 // n
        divided = placed in ("rows", "columns")
        # to each of the others its matrices' parts, and back their parts of one's own matrices
        each_way = (n - 1) * (8 // n) * (32 // n)
        assert exchanged == (2 * each_way if divided else 0)
        assert gathered == (0 if divided else 8 // n * 32)
    for exchanged, gathered, products in results(ranks, f"counted-{placed}-each"):
        assert products == 8
        assert exchanged == 0
        assert gathered == (8 * 32 // n if placed in ("rows", "columns") else 0)


def test_the_dearest_matrices_go_first_each_to_who_has_least():
    shapes = [torch.Size(x) for x in [(2, 2), (8, 8), (4, 4), (4, 4), (4, 4), (2, 2)]]
    assert owners_of(shapes, 2) == [1, 0, 1, 1, 1, 1]
    assert owners_of(shapes[:1], 3) == [0]
    assert owners_of([], 3) == []


def test_wrong_arguments():
    with pytest.raises(ValueError, match="owners 'each' or 'spread', but got 'all'"):
        fo.matrix_owners(fo.muon(), "all")
    with pytest.raises(ValueError, match="without a rule that takes batches"):
        fo.matrix_owners(fo.adam())
    tx, w = fo.matrix_owners(fo.muon()), torch.eye(2)
    with pytest.raises(RuntimeError, match="is not initialized here"):
        tx.update(w, tx.init(w), w)
    with pytest.raises(RuntimeError, match="is not initialized here"):
        fo.compile(tx)(w.clone(), tx.init(w), w)
    assert torch.equal(w, torch.eye(2))
