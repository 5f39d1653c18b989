"""Finds words in prose that PyTorch's and optax's documentation would not use: `make check`.

Prose is the text of all pages and notebooks, and the docstrings, comments and strings of the
package, its adapters, benchmarks, examples and scripts. Each match is printed with its place and
the word to use; the exit status is 1 if there is one.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "docs/algorithms/*.md", "docs/api/*.rst", "benchmarks/*.md")
CODE = ("functional_optim", "adapters", "benchmarks", "docs", "examples", "notebooks", "release")

WORDS = {
    r"a card|the card": "a GPU",
    r"dear|dearer|dearest": "expensive",
    r"by chance": "stochastically, at random",
    r"to be had": "available",
    r"(?<!if )there (?:is|are) none": "does not exist, or name the thing",
    r"that there (?:is|are) (?:not|none)": "unknown",
    r"which one for whom": "which … to use",
    r"stands? (?:in|at|on|behind|there|last)": "is in, is at",
    r"given to": "passed to",
    r"(?:is|are|was|were|been|be|gets?) told": "pass, warn, or raise an error",
    r"told (?:to|by|of) ": "passed to",
    r"likewise": "in the same way, or nothing",
    r"in turns?": "alternately, one after the other",
    r"of (?:its|their|our|your|his|one's) own": "separate, custom, or nothing",
    r"by (?:itself|themselves|himself)": "automatically, or nothing",
    r"beside(?!:)": "next to, together with, compared with",
    r"put this right": "fix this",
    r"a look at a training": "monitoring",
    r"a training(?= (?:that|which|is|was|from|in|of|to|by|on|has|had)\b|[.,;:)])": "a training run",
    r"seen with torch": "as of torch …",
    r"without a word": "silently",
    r"whoever": "name the reader or the code",
    r"in the place of": "instead of",
    r"entr(?:y|ies) of (?:a|an|the|each|every|its|their|one|all) (?:tensor|matrix|vector|"
    r"parameter|gradient|update|row|column|slot|block|direction)s?(?! groups?)": "elements",
    r"entry by entry": "element by element",
    r"rules? (?:of|over) (?:whole )?(?:matrices|tensors)": "matrix rules, rules with reductions",
    r"(?:of|over) whole trees": "of trees, of all parameters",
    r"(?<!random )numbers of (?:a|an|the|this|each|one|that) (?:step|rule|recipe|group)": "scalars",
    r"carried numbers?": "carried scalars",
    r"shall": "must, or a plain verb",
    r"knows no": "does not support, has no",
    r"anew": "again",
}
"""Patterns of words, and what to write instead."""

SEARCHED = re.compile("|".join(rf"(\b(?:{words})\b)" for words in WORDS), re.IGNORECASE)
WHITE = re.compile(r"[\s#]+")


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file in pieces, each with its line."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            yield 1, "".join(cell["source"])
    elif path.suffix == ".py":
        yield from of_code(text)
    else:
        line = 1
        for part in text.split("\n\n"):
            yield line, part
            line += part.count("\n") + 2


def of_code(text: str) -> Iterator[tuple[int, str]]:
    """Strings, and comments, of which neighbouring lines are one."""
    start, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if line != last + 1:
                yield start, "\n".join(lines)
                start, lines = line, []
            last = line
            lines.append(token.string)
        elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield line, token.string
    yield start, "\n".join(lines)


def found(path: Path) -> Iterator[str]:
    """What a file has of the words, each with its place and the word to use."""
    better = list(WORDS.values())
    for line, text in paragraphs(path):
        for match in SEARCHED.finditer(WHITE.sub(" ", text)):
            assert match.lastindex is not None
            words = match.group()
            place = re.search(r"[\s#]+".join(map(re.escape, words.split())), text)
            skipped = text[: place.start()].count("\n") if place else 0
            at = f"{path.relative_to(ROOT)}:{line + skipped}"
            yield f"{at}: {words!r}; write: {better[match.lastindex - 1]}"


def files() -> list[Path]:
    """All files with prose, but this one."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    code = [
        path
        for folder in CODE
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".ipynb")
    ]
    return sorted({*pages, *code} - {Path(__file__)})


if __name__ == "__main__":
    lines = [line for path in files() for line in found(path)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.exit(bool(lines))
