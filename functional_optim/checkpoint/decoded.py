"""`decoded` and `encoded`: the state of a recipe without `stored`, and back."""

from __future__ import annotations

from typing import Any

from functional_optim.checkpoint.state_dict import load_state_dict, state_dict
from functional_optim.core import base
from functional_optim.core.base import GradientTransformation
from functional_optim.core.leafwise import Leafwise, made_of_rules
from functional_optim.core.lift import State

ADVICE = "apply it to the states of its parts"


def decoded(tx: GradientTransformation, state: Any, params: Any) -> State:
    """The state that a transformation would have without `stored`: each slot whole.

    `fo.state_dict` makes of it a checkpoint under torch's own keys. It goes on in the same recipe
    without `stored`; `encoded` is the way back.

    Args:
        tx: the transformation of the state, made of one-tensor rules.
        state: its state. It is not changed.
        params: the parameters, as in `init`.

    Raises:
        TypeError: if tx works on whole trees.
        ValueError: if the state is not that of tx and the parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"hidden": torch.ones(64, 64)}
        >>> tx = fo.stored(fo.adamw(), "int8")
        >>> state = tx.init(params)
        >>> sorted(state.slots)[:3], sorted(fo.decoded(tx, state, params).slots)
        (['exp_avg', 'exp_avg.int8', 'exp_avg.scale'], ['exp_avg', 'exp_avg_sq'])
    """
    placements = made_of_rules("decoded", tx, ADVICE).placements
    whole = Leafwise(tuple([x._replace(rule=x.rule.without_codecs()) for x in placements]))
    return _as_in(whole, state, params)


def encoded(tx: GradientTransformation, state: Any, params: Any) -> State:
    """A state as a transformation keeps it: slots packed in the way of its `stored`.

    Rounding is to the nearest. Of a state that is packed already, in any way that `stored` knows,
    slots that are not in tx's form are decoded first.

    Args:
        tx: a transformation made of one-tensor rules, with `stored` or without.
        state: of the same rules. It is not changed.
        params: the parameters, as in `init`.

    Raises:
        TypeError: if tx works on whole trees.
        ValueError: if the state is not one of these rules and parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"hidden": torch.ones(64, 64)}
        >>> state = fo.adamw().init(params)
        >>> small = fo.encoded(fo.stored(fo.adamw(), "int8"), state, params)
        >>> small.slots["exp_avg_sq.uint8"]["hidden"].shape
        torch.Size([16, 256])
    """
    return _as_in(made_of_rules("encoded", tx, ADVICE), state, params)


def _as_in(tx: Leafwise, state: Any, params: Any) -> State:
    if not isinstance(state, State):
        raise TypeError(f"a chain's state is needed, but got a {type(state).__name__}.")
    like = base.unrecorded(tx.init, params)
    new = load_state_dict(like, state_dict(state, params), params)
    return state._replace(slots=new.slots)
