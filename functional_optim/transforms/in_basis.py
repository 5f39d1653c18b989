"""Element-wise rules in another basis, which adapts to the gradients.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", https://arxiv.org/abs/2409.11321,
Algorithm 3, with any rules instead of Adam.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.numbers import Own, as_args, record_of
from functional_optim.core.rule import Placement, Rule, Runs, Update
from functional_optim.core.storage import Storage
from functional_optim.core.traits import is_elementwise
from functional_optim.core.views import TENSORS, slot_shapes
from functional_optim.transforms.bases import Basis, check_frequency
from functional_optim.transforms.sides import ORDINALS, behind, each_behind, others, turned


@factory
def in_basis(basis: Basis, inner: base.GradientTransformation) -> Leafwise:
    """Run element-wise rules in a basis that adapts to the gradients.

    A step rotates the gradient into the basis, runs the rules there and rotates their update back;
    then the basis processes the gradient, and is renewed when it is due. The slots of the rules are
    converted to the new basis: slots that are linear in the gradients are rotated; others, such as
    second moments, are reordered like the columns of the basis. With Adam inside, and
    `shampoo_basis`, this is SOAP.

    The first gradient of a matrix initializes its basis, and the update of that step is zero. The
    rules count the steps of the transformation, from the second on.

    Args:
        basis: `shampoo_basis()`, `kl_basis()`, or a custom `Basis`.
        inner: element-wise rules such as `scale_by_adam()`, `scale_by_lion()`, or a chain of them.
            They receive no parameters, so put weight decay after `in_basis`.

    Each dimension of the kernel of a convolution is rotated by a separate basis. Use `as_matrix` to
    describe stacks of matrices and fused projections.

    State: the slots of the rules, rotated, and those of the basis.

    Raises:
        TypeError: if basis or inner has another type.
        ValueError: for rules that are not element-wise, measure, carry scalars, or act on some
            leaves or steps only; if two rules, or a rule and the basis, have a slot or
            hyperparameter of the same name; from a step, for rules that read the parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.in_basis(fo.shampoo_basis(), fo.scale_by_lion())
        >>> w, g = torch.zeros(2, 2), torch.diag(torch.tensor([100.0, 1.0]))
        >>> u, state = tx.update(g, tx.init(w), w)
        >>> torch.allclose(u, torch.zeros(2, 2))
        True
        >>> u, state = tx.update(g, state, w)
        >>> torch.allclose(u, torch.eye(2))
        True
    """
    if not isinstance(basis, Basis):
        raise TypeError(
            f"in_basis takes a basis first, but got a {type(basis).__name__}; pass "
            "shampoo_basis(), kl_basis() or a custom Basis."
        )
    base.check_transformation("in_basis", inner, "in_basis(shampoo_basis(), scale_by_adam())")
    placements = inner.placements
    if not isinstance(inner, Leafwise) or any(not _fits(x) for x in placements):
        unfit = [x.name or "a rule" for x in placements if not _fits(x)]
        raise ValueError(
            f"in_basis takes element-wise rules that depend on the gradient and the step only, "
            f"which {', '.join(unfit) or 'the transformation'} does not; put it before or after "
            "in_basis."
        )
    rules = [placement.rule for placement in placements]
    fields = _once([*[key for rule in rules for key in rule.keys], *basis.slots], "slots")
    kept = [key for key in fields if key not in basis.slots or not _is_further(key)]
    hyper = {key: x for rule in rules for key, x in rule.hyper} | basis.hyper
    _once([*[key for rule in rules for key, _ in rule.hyper], *basis.hyper], "hyperparameters")
    record, whole = [record_of("InBasisSlots", tuple(x)) for x in (kept, fields)]
    parts = tuple([_Inner(rule.updates[0], rule.storage.slots, rule.keys) for rule in rules])
    sizes = [key for rule in rules for key in rule.storage.nonnegative]
    linear = [key for rule in rules for key in rule.keys if key not in sizes]
    first, observe = basis.first, basis.observe
    renew, weigh = basis.renew, basis.weigh

    def init(p: Tensor) -> Any:
        seen = p.contiguous()  # slots in a basis do not have p's strides
        own = [x for rule in rules if rule.init is not None for x in rule.init(seen)]
        return put(whole(*own, *basis.init(p)))

    def put(x: Any, lead: int = 0) -> Any:
        """The slots as the state keeps them."""
        return record(
            *[
                behind([getattr(x, name, None) for name in _of_all(key)], lead)
                if key.startswith("right_")
                else getattr(x, key)
                for key in kept
            ]
        )

    def taken(x: Any, G: Tensor) -> Any:
        """The slots, with separate slots for each dimension."""
        if len(kept) == len(fields):
            return x
        known = {key: getattr(x, key) for key in kept}
        if G.dim() <= 3:
            return whole(**known, **dict.fromkeys([key for key in fields if key not in known]))
        (made,) = slot_shapes(TENSORS, basis.init, G.shape[1:], G.dtype)
        shapes = dict(zip(basis.slots, made, strict=True))
        for key in [key for key in kept if key.startswith("right_")]:
            names = _of_all(key)[1:]
            own = each_behind(getattr(x, key), [shapes[name] for name in names])
            known |= zip(names, own, strict=True)
        return whole(**known)

    def scalars(t, **given):
        def of(function: Any, names: Any, t: Any) -> Any:
            return function(t, **{name: given[name] for name in names})

        n = numeric.maximum(t - 1, 1.0)
        own = [of(r.scalars, dict(r.reads.hyper), n) if r.scalars else () for r in rules]
        return Own((), (), (of(basis.scalars, basis.hyper, t), *own))

    def begin(G: Tensor, x: Any, p: Any, s: Any, *own: Any) -> tuple[Tensor, Any]:
        return torch.zeros_like(G), put(first(G, taken(x, G), s), 1)

    def sides(x: Any) -> list[tuple[int, Tensor]]:
        return [(i, Q) for i, Q in enumerate(basis.sides(x)) if Q is not None]

    def step(G: Tensor, x: Any, p: Any, s: Any, *own: Any) -> tuple[Tensor, Any]:
        u, x = stepped(G, taken(x, G), s, *own)
        return u, put(x, 1)

    def stepped(G: Tensor, x: Any, s: Any, *own: Any) -> tuple[Tensor, Any]:
        known = sides(x)
        half = seen = G
        for i, Q in known:
            seen = turned(seen, i, Q)
            half = seen if i == 0 else half
        u, changed = _run(parts, seen, x, own)
        u = weigh(u, x, s)
        for i, Q in known:
            u = turned(u, i, Q, back=True)
        return u, observe(G, half, seen, x._replace(**changed), s)

    def turn(G: Tensor, x: Any, p: Any, s: Any, *own: Any) -> tuple[Tensor, Any]:
        u, x = stepped(G, taken(x, G), s, *own)
        old = sides(x)
        x, orders = renew(x, s)
        moved = {key: getattr(x, key) for key in (*linear, *sizes)}
        for (i, Q), (_, new) in zip(old, sides(x), strict=True):
            moved |= {key: _moved(moved[key], i, Q, new) for key in linear}
        known = [(i, order) for i, order in enumerate(orders) if order is not None]
        for i, order in known:
            moved |= {key: _reordered(moved[key], i, order) for key in sizes}
        return u, put(x._replace(**moved), 1)

    def choose(t, *, precondition_frequency, turn=0):
        check_frequency(basis.name, precondition_frequency)  # of a schedule, or set in a group
        due = (t - 1) % precondition_frequency == turn
        return numeric.where(t == 1, 0, numeric.where(due, 2, 1))

    eigenvalues = [key for key in kept if key.endswith("eigenvalues")]
    started = tuple([key for key in basis.made_first if key in kept])
    return leafwise(
        init,
        [begin, step, turn],
        scalars,
        hyper=hyper,
        runs=Runs(
            choose=choose,
            turns=basis.turns,
            start=(begin, started) if started else None,
            batched=True,
        ),
        storage=Storage(nonnegative=[*sizes, *eigenvalues], view=basis.view),
        name="in_basis",
    )


def _is_further(key: str) -> bool:
    """Whether a slot belongs to the third or a later dimension."""
    return key.partition("_")[0] in ORDINALS[2:]


def _of_all(key: str) -> list[str]:
    """The name of a slot of the second dimension, without the dimension."""
    what = key.partition("_")[2]
    return [f"{x}_{what}" for x in ORDINALS]


class _Inner(NamedTuple):
    """A rule that runs in the basis: without its hyperparameters, which may be tensors."""

    update: Update
    slots: type | None
    keys: tuple[str, ...]


class _NoParameters:
    """Replaces the parameter if a rule runs in another basis; reading it raises an error."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._refuse()

    @classmethod
    def _refuse(cls, *args: Any) -> Any:
        raise ValueError(
            "a rule inside in_basis reads the parameters, which are not in its basis; put that "
            "rule after in_basis."
        )

    __getattr__ = __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __abs__ = _refuse


_NO_PARAMETERS = _NoParameters()


def _fits(placement: Placement) -> bool:
    """Whether a rule is element-wise and needs only gradient, slots and scalars.

    A rule that reads the parameter raises an error when it runs (`_NO_PARAMETERS`).
    """
    rule: Rule = placement.rule
    runs = rule.runs
    uses = rule.reduce or rule.before or runs.choose or runs.absent or rule.reads.extra
    kind = runs.after == "step" or runs.shared or rule.carry is not None or rule.storage.codecs
    placed = placement.where or placement.gate or placement.lookback is not None
    if len(rule.updates) > 1 or uses or kind or placed:
        return False
    return is_elementwise(placement, torch.empty((2, 2), device="cpu"))


def _once(names: list[str], what: str) -> list[str]:
    """The names, checked.

    Raises:
        ValueError: if a name occurs twice.
    """
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"in_basis has two {what} called {name}, in its rules or its basis; leave out one "
                "of the rules."
            )
    return names


def _run(
    parts: tuple[_Inner, ...], u: Tensor, x: Any, numbers: tuple[Any, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The update of rules, one after the other, and their new slots by name."""
    changed: dict[str, Tensor] = {}
    for part, own in zip(parts, numbers, strict=True):
        slots = () if part.slots is None else part.slots(*[getattr(x, key) for key in part.keys])
        u, new = part.update(u, slots, _NO_PARAMETERS, *as_args(own))
        changed.update(zip(part.keys, new, strict=True))
    return u, changed


def _moved(m: Tensor, i: int, old: Tensor, new: Tensor) -> Tensor:
    """The i-th dimension, converted from the old basis to the new one."""
    if old.shape[-1] > others(m, i, old):  # the cheaper order
        return turned(turned(m, i, old, back=True), i, new)
    return turned(m, i, old.mT @ new)


def _reordered(v: Tensor, i: int, order: Tensor) -> Tensor:
    """The elements along the i-th dimension, in this order."""
    lead = order.dim() - 1
    index = [slice(None) if k == lead + i else None for k in range(lead, v.dim())]
    return v.gather(lead + i, order[(..., *index)].expand(v.shape))
