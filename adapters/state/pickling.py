"""The states of parameters in a pickle of an optimizer object."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch import Tensor


def without_views(states: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """The states of all parameters with copies of views: pickle would store the whole tensor
    behind each.

    torch sends the tensors of a pickle to a process that starts by spawn or forkserver as open
    files. A tensor that is freed closes its file, so that process keeps the copies.
    """
    apart = defaultdict(dict, {p: _without_views(mine) for p, mine in states.items()})
    starting = get_spawning_popen()
    if starting is not None:
        vars(starting).setdefault("_sent_states", []).append(apart)
    return apart


def _without_views(mine: Any) -> Any:
    if not isinstance(mine, dict):
        return mine
    return {
        key: x.clone() if isinstance(x, Tensor) and x._base is not None else x
        for key, x in mine.items()
    }
