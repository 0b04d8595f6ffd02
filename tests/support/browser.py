"""Pages in a real browser: pictures of them, and what can be measured in them."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.cli import process

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FRAME = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0 }}
iframe {{ border: 0; width: {width}px; height: {height}px }} pre {{ display: none }}</style>
<iframe id="page"></iframe><pre id="report"></pre><script>
const page = document.getElementById("page");
page.onload = () => {{
  const report = ({measure})(page.contentDocument);
  document.getElementById("report").textContent = JSON.stringify(report);
}};
page.srcdoc = {source};
</script>"""
MEASURE = """page => {
  const boxOf = element => {
    const { left, right, top, bottom, height } = element.getBoundingClientRect();
    return { left, right, top, bottom, height };
  };
  const charts = [...page.querySelectorAll(".chart")].map(section => ({
    title: section.querySelector("h2").textContent,
    box: boxOf(section.querySelector("svg")),
    texts: [...section.querySelectorAll(":scope > svg text")].map(text =>
      ({ text: text.firstChild.textContent, box: boxOf(text) })),
  }));
  const tree = page.querySelector(".tree");
  if (tree) tree.scrollLeft = 1e6;
  return {
    width: page.documentElement.scrollWidth,
    charts,
    tree: tree && { seen: tree.clientWidth, whole: tree.scrollWidth, scrolled: tree.scrollLeft },
    where: page.getElementById("where")?.textContent ?? null,
  };
}"""


def look_at(text: str, folder: Path, *, width: int, height: int = 2600) -> dict[str, Any]:
    """Open a page ``width`` pixels wide, write ``WIDTH.png``, and return what was measured.

    It is shown in a frame of that width, as windows of a browser may not be so narrow.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium, which is not installed")
    source = json.dumps(text).replace("</", "<\\/")
    frame = folder / f"{width}.html"
    filled = FRAME.format(width=width, height=height, measure=MEASURE, source=source)
    frame.write_text(filled, encoding="utf-8")
    usual = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    usual += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},{height}"]
    usual.append("--virtual-time-budget=3000")
    process(*usual, f"--screenshot={folder / f'{width}.png'}", frame.as_uri())
    dumped = process(*usual, "--dump-dom", frame.as_uri()).stdout
    found = re.search(r'<pre id="report">(.+?)</pre>', dumped, re.DOTALL)
    assert found is not None, dumped[:1000]
    report: dict[str, Any] = json.loads(html.unescape(found[1]))
    return report
