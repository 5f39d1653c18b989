"""NorMuon, AdaMuon, Dion2 and Scion: what each does to a matrix."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, run

import functional_optim as fo
from functional_optim import adapters

EXACT = torch.float64
MATRICES = [fo.normuon, fo.adamuon, fo.dion2, fo.scion]


def test_normuon_brings_rows_to_one_length_and_keeps_the_norm():
    torch.manual_seed(0)
    w, g = torch.zeros(8, 3, dtype=EXACT), torch.randn(8, 3, dtype=EXACT)
    u, _ = run_once(fo.scale_by_normuon(scale=None, ns_dtype=EXACT), w, g)
    plain, _ = run_once(fo.scale_by_muon(scale=None, ns_dtype=EXACT), w, g)
    assert plain.norm(dim=1).std() > 0.1
    assert_close(u.norm(dim=1), (plain.norm() / 8**0.5).expand(8), 1e-8)


def test_adamuon_sees_signs_only():
    torch.manual_seed(0)
    w, g = torch.zeros(4, 3, dtype=EXACT), torch.randn(4, 3, dtype=EXACT)
    tx = fo.scale_by_adamuon(ns_dtype=EXACT)
    assert_close(run_once(tx, w, g)[0], run_once(tx, w, g.sign())[0], 1e-12)
    assert_close(run_once(tx, w, g)[0].square().mean().sqrt(), torch.tensor(0.2, dtype=EXACT), 1e-6)


def run_once(tx, w, g):
    return tx.update(g, tx.init(w), w)


@pytest.mark.parametrize(("shape", "moving"), [((4, 6), [1, 2]), ((6, 4), [1, 2])])
def test_dion2_moves_the_largest_and_keeps_what_it_has_not_moved(shape, moving):
    g = torch.ones(4, 6, dtype=EXACT) + torch.eye(4, 6, dtype=EXACT)
    g[moving] *= 3
    g, rest = g if shape == (4, 6) else g.mT.contiguous(), [0, 3]
    w = torch.zeros(shape, dtype=EXACT)
    u, state = run_once(fo.scale_by_dion2(0.5, 0.25, ns_dtype=EXACT), w, g)
    m = state.slots["momentum_buffer"]
    if shape == (6, 4):
        u, m, g = u.mT, m.mT, g.mT
    assert (u[moving] != 0).all()
    assert not u[rest].any()
    assert_close(m[moving], 0.25 * g[moving], 1e-12)
    assert_close(m[rest], g[rest], 0.0)


def test_scion_stays_in_its_ball():
    torch.manual_seed(0)
    w = {"w": torch.full((2, 5), 0.3, dtype=EXACT)}
    grads = [{"w": torch.ones(2, 5, dtype=EXACT)}] * 60
    for free, farthest in ((False, 0.4), (True, 2.1)):
        tx = fo.scion(0.1, norm="sign", radius=2.0, unconstrained=free)
        end = run(tx, w, grads)[0]["w"]
        assert_close(end.abs().max().float(), torch.tensor(farthest), 5e-3)


def test_groups_of_an_object_have_norms_and_radii_of_their_own():
    body, head = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    groups = [{"params": [body], "norm": "row"}, {"params": [head], "norm": "sign", "radius": 8.0}]
    opt = adapters.Scion(groups, lr=0.5, compile=False)
    body.grad, head.grad = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.ones(2, 2)
    opt.step()
    half = 0.5 / 2**0.5
    assert_close(body.detach(), -half * torch.tensor([[0.6, 0.8], [0.0, 1.0]]), 1e-6)
    assert_close(head.detach(), torch.full((2, 2), -2.0), 1e-6)


def test_a_column_of_scion_is_a_row_of_what_is_stored_the_other_way():
    torch.manual_seed(0)
    w, g = torch.zeros(4, 3, dtype=EXACT), torch.randn(4, 3, dtype=EXACT)
    across = fo.as_matrix(fo.scale_by_scion("col"), orientation="in_out")
    found = run_once(across, w, g)[0]
    assert_close(found.mT, run_once(fo.scale_by_scion("col"), w.mT, g.mT)[0], 1e-12)


@pytest.mark.parametrize("recipe", MATRICES)
def test_heads_and_kernels_are_matrices_of_their_own(recipe):
    torch.manual_seed(0)
    qkv, g = torch.zeros(6, 4, dtype=EXACT), torch.randn(6, 4, dtype=EXACT)
    tx = fo.as_matrix(recipe(0.1, ns_dtype=EXACT), split=3)
    u, state = run_once(tx, qkv, g)
    for k in range(3):
        part = slice(2 * k, 2 * k + 2)
        alone, _ = run_once(recipe(0.1, ns_dtype=EXACT), qkv[part], g[part])
        assert_close(u[part], alone, 1e-12)
    if recipe is fo.normuon:
        assert state.slots["second_momentum_buffer"].shape == (3, 2, 1)
