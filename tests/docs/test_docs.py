"""Every Python example of the README and of the pages in docs/ runs, and every name is there."""

import functools
import importlib
import re
from pathlib import Path

import pytest
import snippets
import torch

import functional_optim as fo
from functional_optim import adapters

PAGES = {
    path.relative_to(snippets.ROOT).as_posix(): path.read_text()
    for path in [snippets.ROOT / "README.md", *sorted((snippets.ROOT / "docs").rglob("*.md"))]
}
NAMES = {"fo": fo, "adapters": adapters, "torch": torch}
NAMED = re.compile(r"`((?:fo|adapters|torch)\.[A-Za-z_][\w.]*)")


# torch.compile itself warns about its own use of a deprecated module in a fresh process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in PAGES if snippets.blocks(PAGES[name])])
def test_the_examples_of_a_page_run(name: str, request: pytest.FixtureRequest) -> None:
    if "import lightning" in PAGES[name]:
        request.getfixturevalue("pl")  # which ignores Lightning's own warnings
    names = snippets.run_page(name, PAGES[name])
    if name == "README.md":
        assert float(names["loss"]) < 2.0
        tx, w = names["tx"], torch.full((4,), 2.0)  # the last one has steps of length lr
        moved, _ = fo.compile(tx, donate=False, strict=True)(w, tx.init(w), w)
        assert float((moved - w).norm()) == pytest.approx(1e-3, rel=1e-3)
    if name == "docs/schedules.md":
        assert names["slope"] > 9


def test_there_are_examples_to_run() -> None:
    counts = {name: len(snippets.blocks(page)) for name, page in PAGES.items()}
    assert counts["README.md"] == 9
    for page in ("from_optax", "from_torch", "gotchas", "schedules"):
        assert counts[f"docs/{page}.md"] >= 5


def exists(name: str) -> bool:
    """Is there something under a dotted name, or a file?"""
    if "/" in name:
        return (snippets.ROOT / name).exists()
    first, *rest = name.split(".")
    try:
        functools.reduce(getattr, rest, NAMES[first])
    except AttributeError:
        try:
            importlib.import_module(name)
        except ImportError:
            return False
    return True


@pytest.mark.parametrize("name", PAGES)
def test_every_name_on_a_page_is_there(name: str) -> None:
    found = set(NAMED.findall(snippets.prose(PAGES[name])))
    assert {name for name in found if not exists(name)} == set()


def test_names_of_optax_are_optaxs() -> None:
    optax = pytest.importorskip("optax")
    page, _, _ = PAGES["docs/from_optax.md"].partition("### Arguments")
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    found = re.findall(r"`([\w.]+)`", " ".join(rows))  # not `argument=`
    assert len(found) > 80
    for name in found:
        functools.reduce(getattr, name.split("."), optax)


@pytest.mark.parametrize("name", PAGES)
def test_links_between_pages_lead_somewhere(name: str) -> None:
    folder = (snippets.ROOT / name).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", snippets.prose(PAGES[name]))
    assert [link for link in links if not Path(folder, link).exists()] == []


@pytest.mark.parametrize(
    "wrong", ["1 + 1  # → 3", "int('x')  # → ValueError: y", "[\n1,  # → 1\n]"]
)
def test_a_page_with_a_wrong_output_fails(wrong: str) -> None:
    page = f"text\n```python\n{wrong}\n```\n"
    with pytest.raises(AssertionError):
        snippets.run_page("page.md", page)


def test_a_block_for_another_library_does_not_run() -> None:
    page = "```python optax\n1 / 0\n```\n\n```python\nx = 1 / 2  # a half\nx  # → 0.…\n```\n"
    assert snippets.run_page("page.md", page)["x"] == 0.5
    assert snippets.blocks(page) == ["\n\n\n\n\nx = 1 / 2  # a half\nx  # → 0.…\n"]
