"""QK-Clip against attention itself."""

import pytest
import torch
from helpers import assert_close, assert_same

import functional_optim as fo

EXACT = torch.float64


def logits(w_q, w_k, x, heads, key_heads, bias=(0.0, 0.0)):
    """Of each head of queries: (heads, tokens, tokens)."""
    q = (x @ w_q.T + bias[0]).reshape(len(x), heads, -1).transpose(0, 1)
    k = (x @ w_k.T + bias[1]).reshape(len(x), key_heads, -1).transpose(0, 1)
    return q @ k.repeat_interleave(heads // key_heads, 0).mT / q.shape[-1] ** 0.5


def projections(key_heads=4):
    torch.manual_seed(0)
    w_q, w_k, x = torch.randn(8, 5), torch.randn(2 * key_heads, 5), torch.randn(6, 5)
    w_q[2:4] *= 40.0
    return w_q.to(EXACT), w_k.to(EXACT), x.to(EXACT)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_largest_logit_becomes_tau_where_it_was_more(alpha):
    w_q, w_k, x = projections()
    before = logits(w_q, w_k, x, 4, 4)
    most = before.amax((1, 2))
    assert (most > 60.0).tolist() == [False, True, False, False]
    after = logits(*fo.qk_clip(w_q, w_k, most, 60.0, alpha), x, 4, 4)
    assert_close(after[1], before[1] * 60.0 / most[1], 1e-12)
    assert_same(after[[0, 2, 3]], before[[0, 2, 3]])


def test_heads_that_share_keys_share_the_least_factor_for_these():
    w_q, w_k, x = projections(key_heads=2)
    most = logits(w_q, w_k, x, 4, 2).amax((1, 2))
    q, k = fo.qk_clip(w_q, w_k, most, 60.0, key_heads=2)
    gamma = (60.0 / most[1]).sqrt()
    assert_close(k[:2], gamma * w_k[:2], 1e-12)
    assert_close(q[2:4], gamma * w_q[2:4], 1e-12)
    assert_same((q[:2], q[4:], k[2:]), (w_q[:2], w_q[4:], w_k[2:]))
    assert logits(q, k, x, 4, 2).amax() <= 60.0 + 1e-9


def test_in_place_it_does_the_same_to_a_module_with_biases():
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, dtype=EXACT)
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    torch.nn.init.normal_(bias)
    most, before = torch.tensor([900.0, 1.0]), weight.detach().clone()
    version = weight._version
    for whole in (weight, bias):
        fo.qk_clip_(whole[:8], whole[8:16], most)
    q, k = fo.qk_clip(before[:8], before[8:16], most)
    assert_same(weight.detach(), torch.cat([q, k, before[16:]]))
    assert weight._version > version
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_what_is_small_or_not_finite_changes_nothing():
    w_q, w_k, _ = projections()
    bad = torch.tensor([torch.nan, torch.inf, -300.0, 0.0])
    assert_same(fo.qk_clip(w_q, w_k, bad), (w_q, w_k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_are_not_rounded_to_the_dtype_of_the_weights(dtype):
    w = torch.ones(2, 3, dtype=dtype)
    q, k = fo.qk_clip(w, w, torch.tensor([101.0, 3.0], dtype=dtype), alpha=1.0)
    exact = 100.0 / float(torch.tensor(101.0, dtype=dtype))
    assert_same(q, torch.tensor([[exact], [1.0]]).expand(2, 3).to(dtype))
    assert_same(k, w)


def test_it_is_a_function_that_is_differentiated_and_mapped():
    w_q, w_k, _ = projections()
    most = torch.tensor([30.0, 400.0, 1.0, 160.0], dtype=EXACT)
    tau = torch.tensor(100.0, dtype=EXACT, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: fo.qk_clip(w_q, w_k, most, t), (tau,))
    pairs = torch.vmap(lambda m: fo.qk_clip(w_q, w_k, m))(torch.stack([most, most / 10]))
    assert_same(pairs[0][1], w_q)
    assert_same(pairs[1][0], fo.qk_clip(w_q, w_k, most)[1])
