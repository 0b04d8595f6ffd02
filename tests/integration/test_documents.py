"""Links between pages, and from code to pages; what is generated is fresh; numbers stand in blocks.

All pages are in the index, and no page grows without bounds.
"""

import re
import runpy
from pathlib import Path
from typing import Any

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
    linked = {(DOCS / link).resolve() for link in links(index)}
    runs = {*(DOCS / "results").glob("*.md")}  # each is linked from the page of results
    pages = {*PAGES.values()} - {index} - runs
    assert len(pages) == len(list(DOCS.rglob("*.md"))) - len(runs) - 1 >= 20  # no two of a name
    assert pages <= linked
    assert runs <= {(DOCS / link).resolve() for link in links(DOCS / "results.md")}


def test_pages_that_code_names_are_there():
    named = {}
    for top in SOURCES:
        for path in (ROOT / top).rglob("*.py"):
            for name in NAMED.findall(path.read_text(encoding="utf-8")):
                named[name] = path
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).exists()] == []


GENERATED = re.compile(r"<!-- generated: ([\w./-]+) -->.*?<!-- end of \1 -->", re.DOTALL)
# Whole pages that commands write or fill, or a folder of them.
WRITTEN = {"cli.md", "openai.md", "results.md", "gbv_questions.md", "results"}
FIGURE = re.compile(
    r"\d \[\d"  # an interval
    r"|\d (?:times|tokens/s\b|tokens (?:a|per) (?:second|forward|step|verification))",
)


def prose(page: Path) -> str:
    """The text of a page outside blocks that a command writes, and outside code."""
    return FENCED.sub("", GENERATED.sub("", page.read_text(encoding="utf-8")))


def by_hand(page: Path) -> bool:
    inside = page.relative_to(ROOT).parts
    return not WRITTEN & {inside[-1], inside[1] if len(inside) > 2 else ""}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_measured_figures_stand_in_generated_blocks(page):
    if by_hand(page):
        assert FIGURE.findall(prose(page)) == []


@pytest.mark.parametrize(
    "text", ["1.6 [1.5, 1.7]", "30 tokens/s", "1.74 tokens a forward", "1.3 times as fast"]
)
def test_a_figure_by_hand_would_be_seen(text):
    assert FIGURE.search(f"It is {text}.")


def tool(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))


def test_blocks_are_fresh_and_every_table_stands_somewhere():
    blocks = tool("blocks")
    tables = blocks["read_tables"]()
    pages = list(blocks["pages"]())
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert [blocks["filled"](text, tables) for text in texts] == texts
    named = [name for text in texts for name in GENERATED.findall(text)]
    assert sorted(name for name in named if "/" not in name) == sorted(tables)  # each once
    assert len(named) >= 20


def test_a_cell_is_copied_without_its_interval():
    blocks = tool("blocks")
    tables = {"a": {"headings": ["", "x"], "rows": [["one", "1.5 [1.4, 1.6]"]]}}
    tables["b"] = {"headings": ["y"], "rows": [["{a|one|x} tokens"]]}
    page = "<!-- generated: b -->\nold\n<!-- end of b -->\n"
    assert "| 1.5 tokens |" in blocks["filled"](page, tables)


def test_pictures_are_fresh():
    pictures = tool("pictures")["drawn"]()
    assert len(pictures) == 5
    assert {path: path.read_text(encoding="utf-8") for path in pictures} == pictures


def test_the_page_of_the_command_line_is_fresh():
    assert (DOCS / "use" / "cli.md").read_text(encoding="utf-8") == tool("cli_page")["page"]()


def test_pages_say_things_once():
    """README is a page, and all other pages together are at most 25,000 words."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    assert len(readme.splitlines()) <= 120
    pages = [page for page in DOCS.rglob("*.md") if by_hand(page)]
    words = {page: len(GENERATED.sub("", page.read_text("utf-8")).split()) for page in pages}
    assert len(words) >= 25
    assert sum(words.values()) <= 25_000
