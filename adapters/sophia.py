"""The optimizer object of Sophia, which also takes estimates of the Hessian's diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim import numeric
from functional_optim.adapters.ready_made import ReadyMade
from functional_optim.adapters.state.storage import Stored
from functional_optim.core.codecs import rounding_key
from functional_optim.core.storage import closed, opened, wide_dtype
from functional_optim.engine.group import Compile
from functional_optim.estimators.diagonals import by_parts, with_estimate


class SophiaG(ReadyMade):
    """`functional_optim.sophia` as an optimizer object.

    A step does not change the average of the Hessian's diagonal. Every ten steps or so, call
    `update_hessian`: after a backward pass of the loss with labels that were drawn from the model's
    predictions, or with your estimates::

        opt.zero_grad()
        logits = model(x)
        labels = torch.distributions.Categorical(logits=logits.detach()).sample()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        opt.update_hessian(batch_size=len(labels))
        opt.zero_grad()

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
        compile: True (the default) runs compiled kernels, and falls back to the eager rule with a
            warning; False runs eagerly; "strict" raises a RuntimeError at a step that cannot be
            compiled.
        stored: storage format of slots, as in :class:`Optimizer`; None (the default): full
            precision.

        The other arguments are those of :func:`functional_optim.sophia`, with its defaults.

    State of each parameter: `step`, `exp_avg` and `hessian`.

    Raises:
        TypeError, ValueError: for invalid arguments and gradients.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import SophiaG
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = SophiaG([w], lr=0.5, betas=(0.0, 0.0), rho=1.0, weight_decay=0.0, compile=False)
        >>> for _ in range(2):
        ...     w.grad = torch.tensor([100.0, 1.0]) * w.detach()
        ...     opt.step()
        ...     opt.update_hessian([torch.tensor([100.0, 1.0])])
        >>> w.detach()
        tensor([0.2500, 0.2500])
    """

    algorithm = "sophia"

    def __init__(
        self, params: ParamsT, lr: numeric.Hyper = 1e-4,
        betas: tuple[numeric.Hyper, numeric.Hyper] = (0.965, 0.99), rho: numeric.Hyper = 0.04,
        weight_decay: numeric.Hyper = 0.1, eps: numeric.Hyper = 1e-15, *, maximize: bool = False,
        compile: Compile = True, stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    @torch.no_grad()
    def update_hessian(
        self, hessian: Sequence[Tensor | None] | None = None, *, batch_size: float | None = None
    ) -> None:
        """Update the average with an estimate of the Hessian's diagonal.

        Args:
            hessian: estimates in the order of the parameters, None for those without one.
            batch_size: without estimates, the number of predictions in the mean loss whose
                gradients the parameters have, in a language model the number of tokens: the
                estimate is then batch_size · grad², that of Gauss, Newton and Bartlett.

        Raises:
            TypeError: unless exactly one of the two is passed.
            ValueError: if the number of estimates differs from the number of parameters, for an
                estimate of another shape, and for a batch size that is not positive.
            RuntimeError: for a parameter that has not been stepped yet, so it has no state.

        A call that raises an error changes nothing.
        """
        if (hessian is None) == (batch_size is None):
            raise TypeError(
                "update_hessian takes either estimates of the diagonal, or batch_size= for the "
                "gradients of a loss with sampled labels."
            )
        writes = []
        for p, group, found in self._estimates(hessian, batch_size):
            state = self.state.get(p) or {}
            if "step" not in state:
                raise RuntimeError(
                    f"update_hessian got an estimate for a parameter of shape {tuple(p.shape)} "
                    "that has not been stepped; call step first."
                )
            weight = 1 - numeric.at(group["betas"][1], float(state["step"]))
            writes += self._averaged(p, group, state, found, weight)
        for slot, value in writes:
            slot.copy_(value)

    def _averaged(
        self, p: Tensor, group: dict[str, Any], state: dict[str, Any], estimate: Tensor, weight: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """The stored tensors of a parameter's average, with their new values."""
        placements = self.checked_transform(group, in_step=True).placements
        rule = next(x.rule for x in placements if "hessian" in x.rule.storage.fields)
        if not rule.storage.codecs:
            return [(state["hessian"], with_estimate(state["hessian"], estimate, weight))]
        stored = tuple([state.get(key) for key in rule.keys])
        slots = opened(rule, stored, p)
        slots = slots._replace(hessian=with_estimate(slots.hessian, estimate, weight))
        seed = rule.storage.seed
        key = None if seed is None else rounding_key(seed, float(state["step"]))
        new = closed(rule, slots, stored, p, key)
        rows = zip(rule.keys, stored, new, strict=True)
        return [(old, x) for name, old, x in rows if name.startswith("hessian") and old is not None]

    def _estimates(
        self, hessian: Sequence[Tensor | None] | None, batch_size: float | None
    ) -> list[tuple[Tensor, dict[str, Any], Tensor]]:
        """Each parameter with its group and its estimate, if it has one."""
        known = [(p, group) for group in self.param_groups for p in group["params"]]
        if hessian is None:
            if batch_size is None or not batch_size > 0:
                raise ValueError(f"batch_size must be above 0, but got {batch_size!r}.")
            grads = [p.grad for p, _ in known]
            wide = [None if g is None else g.to(wide_dtype(g)) for g in grads]  # g² may underflow
            hessian = [None if g is None else batch_size * by_parts(g, g) for g in wide]
        if len(hessian) != len(known):
            raise ValueError(
                f"update_hessian got {len(hessian)} estimates for {len(known)} parameters; pass "
                "one for each, or None for those without."
            )
        rows = zip(known, hessian, strict=True)
        found = [(p, group, x) for (p, group), x in rows if x is not None]
        for p, _, x in found:
            if x.shape != p.shape:
                raise ValueError(
                    f"update_hessian got an estimate of shape {tuple(x.shape)} for a parameter of "
                    f"shape {tuple(p.shape)}."
                )
        return found
