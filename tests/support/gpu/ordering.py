"""Code in an order in which only loops go back.

Compilers put the rest of a loop before the slow path that joins it. A simulator that lets those run
first that are behind needs each join after all that leads to it.
"""

from __future__ import annotations

from itertools import pairwise

from gpu.parsing import Function, Instruction


def put_in_order(function: Function) -> None:
    """Change the order of a function's code, not what it does; what is never reached goes."""
    code, labels = function.code, function.labels
    after = {i + 1 for i, one in enumerate(code) if one.head in ("bra", "ret")}
    starts = sorted({0, *labels.values(), *after} - {len(code)})
    ends = dict(pairwise([*starts, len(code)]))
    order = _order({start: _next(code, labels, start, end) for start, end in ends.items()})
    places: dict[int, int] = {}
    new: list[Instruction] = []
    for start, following in pairwise([*order, len(code)]):
        places[start] = len(new)
        own = code[start : ends[start]]
        new += own
        falls = own[-1].head not in ("bra", "ret") or own[-1].predicate is not None
        if falls and ends[start] != following:
            name = f"$at{ends[start]}"
            labels[name] = ends[start]
            new.append(Instruction(("bra",), (name,)))
    places[len(code)] = len(new)
    function.code = new
    function.labels = {name: places[at] for name, at in labels.items() if at in places}


def _next(code: list[Instruction], labels: dict[str, int], start: int, end: int) -> list[int]:
    """Where a block of code goes on."""
    last = code[end - 1]
    found = [labels[last.operands[0]]] if last.head == "bra" else []
    if last.head not in ("bra", "ret") or last.predicate:
        found.append(end)
    return found


def _order(follows: dict[int, list[int]]) -> list[int]:
    """Blocks such that each comes after all that lead to it, but for loops, which stay together."""
    done: list[int] = []
    seen = {0}
    path = [(0, sorted(follows[0]))]
    while path:
        start, rest = path[-1]
        if not rest:
            done.append(start)
            path.pop()
            continue
        follower = rest.pop()  # what is farthest is done first, and comes last
        if follower in follows and follower not in seen:
            seen.add(follower)
            path.append((follower, sorted(follows[follower])))
    return done[::-1]
