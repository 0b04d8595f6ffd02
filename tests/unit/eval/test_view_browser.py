"""The pages in a real browser, as narrow as a telephone and as wide as a screen.

``pytest tests/unit/eval/test_view_browser.py --basetemp=shots`` leaves the pictures in ``shots``.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.browser import look_at
from support.runs import NONE, OTBV, observations, run_of
from support.tree_traces import bush, write_trace

from eaglegbv.eval.observations import Run
from eaglegbv.eval.view import page, results_content, view

WIDTHS = (390, 1200)
TELEPHONE, SCREEN = WIDTHS
LEAST_HEIGHT = 11  # of a line of text, in pixels


def a_run() -> Run:
    return run_of(
        [*observations(NONE, (8, 8, 8.0)), *observations(OTBV, (4, 10, 4.0), (4, 6, 2.0))]
    )


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    beside = one["right"] <= other["left"] or other["right"] <= one["left"]
    above = one["bottom"] <= other["top"] + 2 or other["bottom"] <= one["top"] + 2
    return not beside and not above


def check_readable(charts: Sequence[dict[str, Any]]) -> None:
    """Every text of a chart is large enough, inside the chart, and over no other."""
    assert charts
    for chart in charts:
        inside, texts = chart["box"], chart["texts"]
        assert texts
        for text in texts:
            box, what = text["box"], (chart["title"], text)
            assert box["height"] >= LEAST_HEIGHT, what
            assert inside["left"] - 1 <= box["left"], what
            assert box["right"] <= inside["right"] + 1, what
            assert inside["top"] - 1 <= box["top"], what
            assert box["bottom"] <= inside["bottom"] + 1, what
        for one, other in combinations(texts, 2):
            assert not overlap(one["box"], other["box"]), (chart["title"], one, other)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_charts_of_a_run_can_be_read(width: int, tmp_path: Path) -> None:
    seen = look_at(page(results_content(a_run())), tmp_path, width=width)
    assert seen["width"] <= width
    assert len(seen["charts"]) == 5
    check_readable(seen["charts"])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_trace_can_be_read_and_its_tree_scrolls(width: int, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json")
    seen = look_at(view(path), tmp_path, width=width)
    assert seen["width"] <= width
    check_readable(seen["charts"])
    assert seen["where"] == "step 2 of 3"  # the first one only read the prompt
    tree = seen["tree"]
    hidden = tree["whole"] - tree["seen"]
    assert tree["scrolled"] == hidden
    assert (hidden > 0) == (width == TELEPHONE)


def test_many_steps_keep_their_ticks_apart(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [(bush(4),)] * 1200)
    check_readable(look_at(view(path), tmp_path, width=TELEPHONE)["charts"])
