"""The site builds without a warning, and has a place for everything that is public."""

import functools
import inspect
import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from algorithm_pages import ALGORITHMS, CLASSES
from snippets import ROOT

import functional_optim as fo
from functional_optim import search

pytest.importorskip("sphinx")
pytest.importorskip("furo")
pytest.importorskip("myst_nb")
pytest.importorskip("sklearn")
sys.path.append(str(ROOT / "docs" / "extensions"))

import curve_store
import docstrings
import guides
import loss_curves
import pages

STORED = curve_store.kept()
"""Before a build here stores what it trains."""
RECIPE = re.search(r"^docs: .*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.M)


def sphinx(*arguments: str | Path, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", *map(str, arguments)]
    return subprocess.run(command, cwd=where, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """What `make docs` makes, in a folder of its own."""
    assert RECIPE
    out = tmp_path_factory.mktemp("site")
    words = shlex.split(RECIPE[1].replace("$(ARGS)", ""))
    assert words[:2] == ["-m", "sphinx"]
    assert {"--fail-on-warning", "--keep-going"} <= set(words)
    moved = {"out/docs": out / "html", "build/doctrees": out / "doctrees"}
    built = sphinx(*[moved.get(word, word) for word in words[2:]])
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return out / "html"


def test_no_page_needs_the_network(site):
    """Formulas, search and copying are scripts of the site's own."""
    scripts = [
        (path, source)
        for path in site.rglob("*.html")
        for source in re.findall(r'<script[^>]*\bsrc="([^"]*)"', path.read_text())
    ]
    assert any("mathjax" in source for _, source in scripts)
    assert [found for found in scripts if "//" in found[1]] == []
    for path, source in scripts:
        assert (path.parent / source.partition("?")[0]).exists(), (path, source)
    for path in site.rglob("*.html"):
        assert not re.search(r'<link rel="stylesheet"[^>]*href="https?:', path.read_text()), path


def test_no_curve_had_to_be_trained():
    assert STORED.keys() == loss_curves.CURVES.keys()
    late = [name for name, own in STORED.items() if own["digest"] != loss_curves.known(name)]
    assert late == [], "run make docs, and commit docs/curves.json"


def test_what_a_curve_is_known_by_are_the_files_of_its_algorithm(monkeypatch):
    """Not those of the decorator that every algorithm has; docstrings count for nothing."""
    files: dict[str, set[str]] = {}
    for name in ("adam", "lion", "cma_es"):
        monkeypatch.setattr(
            curve_store, "digest", lambda needs, *says, name=name: files.setdefault(name, needs)
        )
        loss_curves.known(name)
    found = {name: {path.stem for path in paths} for name, paths in files.items()}
    assert {"adam", "trainings"} <= found["adam"]
    assert "sign" in found["lion"]
    assert {"cma", "searches"} <= found["cma_es"]
    text = '"""A."""\nx = 1\n"""Of x."""\ndef f():\n    """B\n    C"""\n    return x'
    assert curve_store._code(text) == "x = 1\ndef f():\n    return x"


def test_a_curve_is_trained_again_when_its_algorithm_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(curve_store, "STORE", tmp_path / "curves.json")
    calls = []

    def train():
        calls.append(len(calls))
        return {"lr=1": ([0, 4], [2.0, 1 / (1 + len(calls))])}

    first = curve_store.recall("new", "a", train)
    assert first == {"lr=1": ([0, 4], [2.0, 0.5])} == curve_store.recall("new", "a", train)
    assert curve_store.recall("new", "b", train) == {"lr=1": ([0, 4], [2.0, 0.3333])}
    assert calls == [0, 1]
    sources = curve_store.sources(ROOT / "functional_optim" / "algorithms" / "adam.py")
    inside = {path.relative_to(ROOT / "functional_optim").as_posix() for path in sources}
    assert {"algorithms/adam.py", "numeric.py", "transforms/weight_decay.py"} <= inside
    assert not any(path.startswith(("core/", "kernels/")) for path in inside)


class Page(HTMLParser):
    """What a page links to, its anchors, its pictures, and the links of its sidebar."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.anchors, self.pictures = [], {""}, []
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img":
            self.pictures.append(given)


@functools.cache
def page(path: Path) -> Page:
    return Page(path.read_text())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_a_page_with_steps_a_picture_and_its_docstrings(site, name):
    found = page(site / "docs" / "algorithms" / f"{name}.html")
    assert found.text.count("algorithm admonition") == 1
    (picture,) = [p for p in found.pictures if f"{name}.svg" in p["src"]]
    assert picture["alt"]
    drawn = (site / "docs" / "algorithms" / picture["src"]).read_text()
    assert drawn.count("<path") > 4
    wanted = {f"functional_optim.{name}"}
    if name in CLASSES:
        wanted.add(f"functional_optim.adapters.{CLASSES[name]}")
    assert wanted <= found.anchors


def test_a_search_method_has_a_picture_and_a_box(site):
    found = page(site / "docs" / "algorithms" / "search.html")
    methods = {
        name
        for name, thing in vars(search).items()
        if inspect.isfunction(thing) and inspect.signature(thing).return_annotation == "Search"
    }
    assert len(methods) == 10
    for name in methods:
        assert any(f"{name}.svg" in picture["src"] for picture in found.pictures)
    assert found.text.count("algorithm admonition") == 10


def test_every_link_leads_somewhere(site):
    broken = []
    for path in site.rglob("*.html"):
        for link in page(path).links:
            if re.match(r"[a-z]+:", link) or link == "#":
                continue
            file, _, anchor = link.partition("#")
            there = (path.parent / file) if file else path
            known = there.is_file() and (not anchor or anchor in page(there).anchors)
            if not known:
                broken.append((path.relative_to(site).as_posix(), link))
    assert broken == []


def test_every_page_is_in_the_sidebar(site):
    home = site / "docs" / "index.html"
    links = {(home.parent / link.partition("#")[0]).resolve() for link in page(home).links}
    extra = {site / name for name in ("index.html", "genindex.html", "search.html")}
    extra |= {site / "py-modindex.html"}
    pages = {path.resolve() for path in site.rglob("*.html")} - extra - {home}
    assert pages - links == set()
    sources = {p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md")}
    sources |= {p.relative_to(ROOT) for p in ROOT.glob("notebooks/*.ipynb")}
    assert {
        source for source in sources if not (site / source.with_suffix(".html")).exists()
    } == set()


def test_the_sidebar_has_groups_and_the_version(site):
    text = (site / "docs" / "index.html").read_text()
    groups = re.findall(r'<p class="caption"[^>]*><span class="caption-text">(.*?)</span>', text)
    wanted = ["Start", "Migrate", "Choose", "Train", "Scale", "Fit", "Research"]
    assert groups[:9] == [*wanted, "Reference", "Development"]
    assert f'<span class="sidebar-brand-text">functional_optim {fo.__version__}</span>' in text
    developed = text.partition(">Development</span>")[2].partition("</ul>")[0]
    for name in ("ARCHITECTURE", "CONTRIBUTING", "benchmarks/SEARCH"):
        assert f"{name}.html" in developed


def test_the_front_page_has_a_picture_a_table_and_four_cards(site):
    found = page(site / "docs" / "index.html")
    assert [picture["src"].rpartition("/")[2] for picture in found.pictures] == ["overview.svg"]
    assert found.text.count('<div class="card docutils container">') == 4
    table = found.text.partition('id="speed"')[2].partition("</table>")[0]
    assert table.count("<tr") == 1 + 6


def test_the_index_of_algorithms_shows_all_in_their_groups(site):
    found = page(site / "docs" / "algorithms" / "index.html")
    _, *parts = re.split(r"<h2>(?=[^<]*<a class=.headerlink)", found.text)
    groups = {part.partition("<")[0]: part for part in parts}
    assert list(groups) == [*pages.GROUPS, "Without gradients"]
    for name, own in pages.pages().items():
        image = f'<img alt="" src="../../_images/{name}-small.svg"'
        assert f'href="{name}.html"><span class="name">{image}' in groups[own["group"]], name
    assert 'href="search.html"' in groups["Without gradients"]


LOOKED_UP = {
    "gradient clipping": "docs/api/transforms",
    "EMA": "docs/api/transforms",
    "stochastic rounding": "docs/memory",
    "layer-wise lr": "docs/from_torch",
    "mixture of experts": "docs/kernels_and_stacks",
    "least squares": "docs/fits_and_physics",
}
"""What people look for, and the page to be found first."""


def test_the_search_finds_the_right_page_first(site):
    """An entry of the index that is the query scores 100; titles and text score 15 at most."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(");"))
    for query, wanted in LOOKED_UP.items():
        ((number, section, main),) = index["indexentries"][query.lower()]
        assert (index["docnames"][number], main) == (wanted, True), query
        anchors = page((site / wanted).with_suffix(".html")).anchors
        assert section in anchors


def test_an_entry_of_the_api_leads_to_its_guide(site):
    for path in sorted((site / "docs" / "api").glob("*.html")):
        if path.stem == "index":
            continue
        text = path.read_text()
        entries = len(re.findall(r'<dl class="py (?:function|class|data)">', text))
        assert entries
        assert text.count("<strong>Guide.</strong> <a") == entries, path.stem
    assert (site / "docs" / f"{guides.guide_to('stored', 'core')}.html").exists()


def test_the_names_with_a_guide_are_on_pages_of_the_api():
    folder = ROOT / "docs" / "api"
    text = "".join(path.read_text() for path in folder.glob("*.rst"))
    entries = re.findall(r"auto(?:function|class|data):: (?:\S+\.)?(\w+)", text)
    assert {name for names in guides.GUIDES.values() for name in names.split()} <= set(entries)
    assert guides.OTHERWISE.keys() == {path.stem for path in folder.glob("*.rst")} - {"index"}
    for guide in {*guides.GUIDES, *guides.OTHERWISE.values()}:
        assert (ROOT / "docs" / f"{guide}.md").exists(), guide


def test_the_first_page_leads_on(site):
    assert "docs/index.html" in (site / "index.html").read_text()


def test_a_name_without_docstring_or_page_fails_a_build(tmp_path):
    extensions = ROOT / "docs" / "extensions"
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.append({str(extensions)!r})\n"
        "from functional_optim import search\n"
        "search.new = lambda x: x\n"
        "search.new.__module__ = search.__name__\n"
        "extensions = ['public_names']\n"
    )
    (tmp_path / "index.rst").write_text(
        "Empty\n=====\n\n.. py:function:: functional_optim.chain()\n"
    )
    built = sphinx("-q", "-W", "--keep-going", ".", "out", where=tmp_path)
    assert built.returncode != 0
    assert "functional_optim.search.new has no docstring" in built.stderr
    assert "functional_optim.named_chain is on no page" in built.stderr
    assert "functional_optim.chain is on no page" not in built.stderr


@pytest.mark.parametrize(
    ("plain", "mended"),
    [
        ("|g| of `|x|` and *this*", r"\|g\| of `|x|` and *this*"),
        ("* a bullet of *args", r"* a bullet of \*args"),
        ("mezo_step_ moves", r"mezo_step\_ moves"),
        ("State: `ax`.", "**State.** `ax`."),
        ("step: a\n    count.\nseed: b", "* `step`: a\n  count.\n* `seed`: b"),
        ("Args:\n    x: one.\n\n    A remark.", "Args:\n    x: one.\n\nA remark."),
        ("Example::\n\n    |a|\n\n|b|", "Example::\n\n    |a|\n\n\\|b\\|"),
    ],
)
def test_docstrings_become_what_sphinx_reads(plain, mended):
    lines = plain.split("\n")
    docstrings.mend(None, "function", "f", None, None, lines)
    assert "\n".join(lines).rstrip() == mended
