"""From docstrings that are read as plain text to what Sphinx reads.

They are Google's style, with five liberties: |x| is a size, not a substitution; `*args` and a
trailing underscore mean no markup; a paragraph under `Args:` that names no argument is a remark on
all of them; `State: …` is a heading and its text in one line; and lines `name: …` are the fields of
a record.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import TypeAliasForwardRef

ARGUMENTS = re.compile(r"^\s*Args:\s*$")
ARGUMENT = re.compile(r"^\*{0,2}\w+( \([^)]*\))?(, \*{0,2}\w+)*:(\s|$)")
SECTION = re.compile(r"^(State|Papers?|Sources?|Returns|Raises): (?=\S)")
ALIAS = re.compile(r"^Alias for field number \d+$")
FIELD = re.compile(r"^([a-z_]\w*(?:\([^)]*\))?(?:, [a-z_]\w*)*): (?=\S)")
REFERENCE = re.compile(r"TypeAliasForwardRef\('([\w.]+)'\)")
MARKS = re.compile(r"(?<=\w)_(?!\w)|\||(?<![\w*])(\*[^\s*](?:[^*]*[^\s*])?\*)(?![\w*])|\*")
"""Signs that could be markup; the group is text *like this*, which is."""


def indent(line: str) -> int:
    """How many spaces a line begins with."""
    return len(line) - len(line.lstrip())


def escaped(lines: list[str]) -> list[str]:
    """Bars, stars and trailing underscores escaped, but in code and in literal blocks."""
    result: list[str] = []
    literal: int | None = None
    for line in lines:
        if literal is not None and line.strip() and indent(line) <= literal:
            literal = None
        if literal is None:
            parts = line.split("`")
            parts[::2] = [
                MARKS.sub(lambda m: m[0] if m[1] else "\\" + m[0], part) for part in parts[::2]
            ]
            result.append(re.sub(r"^(\s*)\\\* ", r"\1* ", "`".join(parts)))  # bullets stay
            if line.rstrip().endswith("::"):
                literal = indent(line)
        else:
            result.append(line)
    return result


def remarks_apart(lines: list[str]) -> list[str]:
    """Paragraphs among the arguments that name none, moved out to the left."""
    result: list[str] = []
    level: int | None = None  # of the arguments of the section that we are in
    apart = False
    for line in lines:
        if ARGUMENTS.match(line):
            level, apart = indent(line) + 4, False
        elif level is not None and line.strip():
            if indent(line) < level:
                level = None
            elif indent(line) == level:
                apart = apart or not ARGUMENT.match(line.strip())
        if level is not None and apart:
            result.append(line[4:])
        else:
            result.append(line)
    return result


def listed(lines: list[str]) -> list[str]:
    """Paragraphs of nothing but `name: text`, as lists."""
    result: list[str] = []
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
            continue
        heads = [part for part in block if indent(part) == 0]
        if heads and all(FIELD.match(part) for part in heads):
            block = [
                FIELD.sub(r"* `\1`: ", part) if indent(part) == 0 else "  " + part.lstrip()
                for part in block
            ]
        result += [*block, line]
        block = []
    return result


def headed(lines: list[str]) -> list[str]:
    """`State: x` as a paragraph that begins with a bold word."""
    return [SECTION.sub(r"**\1.** ", line) for line in lines]


def mend(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event: `lines` are changed where they are."""
    if lines and ALIAS.match(lines[0]):  # a field without a docstring
        lines.clear()
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # where a first line "x: y" would be read as a type and a text
    lines[:] = listed(remarks_apart(headed(escaped(lines))))


def plain(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, args: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Sphinx's event: names of types in a signature as in the source."""
    return (args and REFERENCE.sub(r"\1", args), result and REFERENCE.sub(r"\1", result))


def setup(app: Sphinx) -> dict[str, bool]:
    TypeAliasForwardRef.__repr__ = lambda self: self.name  # within Callable[…] it is printed so
    app.connect("autodoc-process-docstring", mend, priority=400)  # napoleon comes after it
    app.connect("autodoc-process-signature", plain)
    return {"parallel_read_safe": True}
