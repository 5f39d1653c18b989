"""Places in the scratch memory of a program: values that are not needed at once share them."""

from __future__ import annotations

import re
from collections.abc import Sequence

ROOM = re.compile(r"\broom(\d+)\b")
NAMED = re.compile(r"\w+\* const (\w+) = .*\broom(\d+)\b")
WORD = re.compile(r"\w+")


def placed(lines: Sequence[str], sizes: Sequence[int]) -> tuple[list[str], int]:
    """The lines of a function with numbers for the names of its rooms, and how many bytes it needs.

    A room is needed from the line that names it to the last one with the pointer to it. No line
    within loops names one, so all lines before have run by then.

    sizes: bytes of each room.
    """
    pointers = {m[1]: int(m[2]) for m in map(NAMED.match, lines) if m}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, line in enumerate(lines):
        for word in set(WORD.findall(line)):
            found = ROOM.fullmatch(word)
            which = int(found[1]) if found else pointers.get(word)
            if which is not None:
                first.setdefault(which, i)
                last[which] = i
    at: dict[int, int] = {}
    total = 0
    for which in sorted(first, key=lambda k: first[k]):
        size, place = sizes[which], 0
        taken = sorted([(at[k], at[k] + sizes[k]) for k in at if last[k] >= first[which]])
        for begin, end in taken:
            if begin - place >= size:
                break
            place = max(place, end)
        at[which] = place
        total = max(total, place + size)
    return [ROOM.sub(lambda m: str(at[int(m[1])]), line) for line in lines], total
