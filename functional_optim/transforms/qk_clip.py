"""QK-Clip: scales down projections of queries and keys whose logits are too large."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_optim import numeric


def qk_clip(
    w_q: Tensor,
    w_k: Tensor,
    max_logits: Tensor,
    tau: float | Tensor = 100.0,
    alpha: float | Tensor = 0.5,
    *,
    key_heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Scale the heads of two projections so that the largest logit of each head is at most tau.

    For use after a step, with the largest logits of the forward pass before it. With γ =
    min(1, tau / max logit) of a head, its queries are multiplied by γ^alpha and its keys by
    γ^(1 − alpha). If several heads of queries share a head of keys, the keys use the smallest γ of
    them.

    Args:
        w_q: weights of the queries' projection, (heads · size, inputs), head after head; or their
            bias, (heads · size,). A bias must be clipped along with its weights.
        w_k: the same of the keys, (key heads · size, inputs).
        max_logits: of each head of queries, (heads,), of all tokens of a step and of all processes:
            q · k, scaled as in the softmax. A head whose logit is not finite stays unchanged.
        tau: largest logit, > 0. Default 100, the paper's.
        alpha: share of the queries, in [0, 1]. Default 0.5, the paper's. 1 does not change the
            keys: use it for the rotary queries of multi-head latent attention, whose keys are
            shared by all heads.
        key_heads: the number of heads of keys; heads of queries that share one are neighbours.
            Default: one for each head of queries.

    Returns:
        Both projections, in their dtypes. The arguments are unchanged.

    Raises:
        ValueError: if tau or alpha is out of range, or the rows are not those of so many heads of
            one size.
        TypeError: for weights or logits that are no tensor.

    Paper: Kimi Team, "Kimi K2: Open Agentic Intelligence", https://arxiv.org/abs/2507.20534,
    section 2.1 and Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> w_q, w_k = torch.ones(4, 3), torch.ones(4, 3)
        >>> w_q, w_k = fo.qk_clip(w_q, w_k, max_logits=torch.tensor([50.0, 400.0]))
        >>> w_q[:, 0]
        tensor([1.0000, 1.0000, 0.5000, 0.5000])
    """
    numeric.check_range("qk_clip", "positive", tau=tau)
    numeric.check_range("qk_clip", "in [0, 1]", alpha=alpha)
    for name, x in {"w_q": w_q, "w_k": w_k, "max_logits": max_logits}.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"qk_clip needs a tensor for {name}, but got a {type(x).__name__}.")
    if max_logits.dim() != 1 or len(max_logits) == 0:
        raise ValueError(
            "qk_clip needs the largest logit of each head, a vector, but got a tensor of shape "
            f"{tuple(max_logits.shape)}."
        )
    heads = len(max_logits)
    key_heads = heads if key_heads is None else key_heads
    numeric.check_count("qk_clip", 1, key_heads=key_heads)
    size = w_q.shape[0] // heads
    fits = w_q.shape[0] == heads * size and w_k.shape[0] == key_heads * size
    if heads % key_heads or not fits:
        raise ValueError(
            f"qk_clip got {heads} heads of queries and {key_heads} of keys, for projections "
            f"to {w_q.shape[0]} and {w_k.shape[0]} outputs; heads of keys must divide those of "
            "queries, and outputs be of one size in all of them."
        )
    most = max_logits.float() if max_logits.dtype.itemsize < 4 else max_logits
    over = most.isfinite() & (most > tau)
    gamma = torch.where(over, tau / torch.where(over, most, 1.0), 1.0)
    shared = gamma.reshape(key_heads, -1).amin(1)
    of_queries, of_keys = _of_rows(gamma**alpha, w_q), _of_rows(shared ** (1 - alpha), w_k)
    return (w_q * of_queries).to(w_q.dtype), (w_k * of_keys).to(w_k.dtype)


@torch.no_grad()
def qk_clip_(
    w_q: Tensor,
    w_k: Tensor,
    max_logits: Tensor,
    tau: float | Tensor = 100.0,
    alpha: float | Tensor = 0.5,
    *,
    key_heads: int | None = None,
) -> None:
    """`qk_clip` in place, for the parameters of a module.

    Args:
        w_q: weights or bias of the queries' projection; may be a part of a fused projection, such
            as `module.in_proj_weight[:size]`.
        w_k: the same of the keys.
        max_logits: of each head of queries, see `qk_clip`.
        tau: largest logit, > 0.
        alpha: share of the queries, in [0, 1].
        key_heads: the number of heads of keys.

    Raises:
        ValueError: if tau or alpha is out of range, or the rows are not those of so many heads of
            one size.
        TypeError: for weights or logits that are no tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import Muon
        >>> q, k = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
        >>> opt = Muon([q.weight, k.weight])
        >>> def heads(y):
        ...     return y.reshape(5, 2, 2).transpose(0, 1)
        >>> logits = heads(q(1e3 * torch.eye(5, 3))) @ heads(k(1e3 * torch.eye(5, 3))).mT / 2**0.5
        >>> logits.softmax(-1).square().mean().backward()
        >>> most, before = logits.detach().amax((1, 2)), q.weight.norm().item()
        >>> opt.step()
        >>> fo.qk_clip_(q.weight, k.weight, most)
        >>> fo.qk_clip_(q.bias, k.bias, most)
        >>> most.max().item() > 100 and q.weight.norm().item() < before
        True
    """
    found = qk_clip(w_q, w_k, max_logits, tau, alpha, key_heads=key_heads)
    for w, new in zip((w_q, w_k), found, strict=True):
        w.copy_(new)


def _of_rows(of_heads: Tensor, w: Tensor) -> Tensor:
    """The factors of the rows of a projection, from those of its heads."""
    of_rows = of_heads.repeat_interleave(w.shape[0] // len(of_heads))
    return of_rows.to(w.device).reshape(-1, *[1] * (w.dim() - 1))
