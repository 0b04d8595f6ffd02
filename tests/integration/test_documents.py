"""Links between pages, and from code to pages; all pages are in the index."""

import re
from pathlib import Path

import pytest
from support.cli import DOCS, PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OUTSIDE = ("http://", "https://", "mailto:")
LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES.values()]
SOURCES = ("eaglegbv", "drafters", "verifiers", "scheduler", "examples", "tools", "tests")
NAMED = re.compile(r"\bdocs/[\w/]+\.\w+")


def links(page: Path) -> list[str]:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [link for link in LINK.findall(text) if not link.startswith(OUTSIDE)]


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it of them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index():
    index = DOCS / "README.md"
    results = DOCS / "results.md"  # the index of the runs' own pages
    linked = {(DOCS / link).resolve() for page in (index, results) for link in links(page)}
    pages = {*PAGES.values()} - {index}
    assert len(pages) == len(list(DOCS.rglob("*.md"))) - 1 >= 20  # no two of a name
    assert pages <= linked


def test_pages_that_code_names_are_there():
    named = {}
    for top in SOURCES:
        for path in (ROOT / top).rglob("*.py"):
            for name in NAMED.findall(path.read_text(encoding="utf-8")):
                named[name] = path
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).exists()] == []
