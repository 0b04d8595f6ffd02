"""Pages in a real browser: opened from disk, they draw, follow the reader, and load nothing.

Needs Chromium with its driver, and selenium (``pip install -e '.[browser]'``).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import ENVIRONMENT, NONE, OTBV, record, run_settings
from support.tree_traces import LONG, NASTY, STEPS, bush, write_trace

from eaglegbv.eval.records import Results
from eaglegbv.eval.view import page, results_content, view

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver  # noqa: E402
from selenium.webdriver import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1000,1200",
)  # fmt: skip
QUIET = {"file", "data", "about"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("Chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_page_load_timeout(120)
    yield chrome
    chrome.quit()


Open = Callable[[str], webdriver.Chrome]


@pytest.fixture
def opened(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Open]:
    """Opens a page, and checks at the end what went over the wire and to the console."""

    def open_page(text: str) -> webdriver.Chrome:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        browser.get("about:blank")
        logs(browser)
        browser.get(file.as_uri())
        return browser

    yield open_page
    console, requests = logs(browser)
    assert console == []
    assert [url.partition(":")[0] for url in requests].count("file") == 1
    assert {url.partition(":")[0] for url in requests} <= QUIET


def logs(browser: webdriver.Chrome) -> tuple[list[dict[str, Any]], list[str]]:
    """What came to the console, and the addresses asked for, since the last call."""
    told = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in told
                if m["method"] == "Network.requestWillBeSent"]  # fmt: skip
    return browser.get_log("browser"), requests


def one(browser: webdriver.Chrome, name: str) -> WebElement:
    return browser.find_element(By.ID, name)


def style(element: WebElement, name: str) -> str:
    return element.value_of_css_property(name)


def box(element: WebElement) -> WebElement:
    return element.find_element(By.TAG_NAME, "rect")


def test_a_generation_is_stepped_through(opened: Open, tmp_path: Path) -> None:
    browser = opened(view(write_trace(tmp_path / "trace.json")))
    assert browser.title == "Trace: trace.json"
    assert one(browser, "where").text == "step 1 of 3"
    assert one(browser, "text").text == "<s> the cat"
    one(browser, "on").click()
    assert one(browser, "where").text == "step 2 of 3"
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.ARROW_RIGHT)
    assert one(browser, "where").text == "step 3 of 3"
    assert not one(browser, "on").is_enabled()
    body.send_keys(Keys.ARROW_LEFT)
    assert one(browser, "where").text == "step 2 of 3"
    marks = browser.find_elements(By.TAG_NAME, "mark")
    assert [mark.get_attribute("class") for mark in marks] == ["accepted", "next"]
    slider = one(browser, "step")
    slider.send_keys(Keys.ARROW_RIGHT)  # its own key moves it once, not twice
    assert one(browser, "where").text == "step 3 of 3"
    slider.send_keys(Keys.HOME)
    assert one(browser, "where").text == "step 1 of 3"


def test_nodes_are_coloured_and_explained(opened: Open, tmp_path: Path) -> None:
    browser = opened(view(write_trace(tmp_path / "trace.json")))
    one(browser, "on").click()
    nodes = [one(browser, f"node{n}") for n in range(6)]
    assert [node.get_attribute("class") for node in nodes] == [
        "node root", "node accepted duplicate", "node rejected", "node rejected duplicate",
        "node rejected", "node next",
    ]  # fmt: skip
    fills = [style(box(node), "fill") for node in nodes]
    assert fills[2] == fills[3] == fills[4]
    assert len({*fills[:3], fills[5]}) == 4
    strokes = [style(box(node), "stroke") for node in nodes]
    assert strokes[1] == strokes[3] != strokes[2]  # a duplicate by its border
    tip = one(browser, "tip")
    assert not tip.is_displayed()
    ActionChains(browser).move_to_element(nodes[1]).perform()
    assert tip.is_displayed()
    lines = tip.text.splitlines()
    assert lines[0] == '" sat" #8'
    told = dict(zip(lines[1::2], lines[2::2], strict=True))
    assert told["state"] == "accepted"
    assert told["p, target"] == "0.5"
    assert told["q, draft"] == "0.25"
    assert told["b, chance to be selected"] == "0.4375"
    assert told["w, weight of the prefix"] == "1"
    assert told["paths"] == "drawn by 2 of 3"
    ActionChains(browser).move_to_element(nodes[3]).perform()
    assert LONG in tip.text
    for node in nodes:  # wherever a node stands, its tooltip is on the screen
        ActionChains(browser).move_to_element(node).perform()
        place = tip.rect
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 1000
    ActionChains(browser).move_to_element(one(browser, "title")).perform()
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus()", nodes[2])  # the keyboard's way
    assert tip.is_displayed()
    assert NASTY.partition("\u2028")[0].replace('"', '\\"') in tip.text


def test_a_large_tree_has_room(opened: Open, tmp_path: Path) -> None:
    browser = opened(view(write_trace(tmp_path / "trace.json", [(bush(240),), *STEPS])))
    one(browser, "request").send_keys(Keys.END)
    assert one(browser, "where").text == "step 1 of 2"
    picture = browser.find_element(By.CSS_SELECTOR, ".tree")
    assert len(picture.find_elements(By.CSS_SELECTOR, ".node")) == 242
    assert picture.size["height"] < 700
    drawn = picture.find_element(By.TAG_NAME, "svg").size
    assert drawn["height"] > 100 * 22
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= 1000  # the tree scrolls in its box, not the page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(opened: Open, tmp_path: Path, scheme: str) -> None:
    browser = opened(view(write_trace(tmp_path / "trace.json")))
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    one(browser, "on").click()
    paper = style(browser.find_element(By.TAG_NAME, "body"), "background-color")
    assert (brightness(paper) > 0.5) == (scheme == "light")
    for name in ("title", "where", "detail", "facts"):
        assert contrast(style(one(browser, name), "color"), paper) > 4.5
    for number in range(6):
        node = one(browser, f"node{number}")
        text = style(node.find_element(By.TAG_NAME, "text"), "fill")
        assert contrast(text, style(box(node), "fill")) > 4.5
        assert contrast(style(box(node), "stroke"), paper) > 3
    for mark in browser.find_elements(By.TAG_NAME, "mark"):
        assert contrast(style(mark, "color"), style(mark, "background-color")) > 4.5
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def brightness(colour: str) -> float:
    parts = [float(x) / 255 for x in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_run_is_shown(opened: Open) -> None:
    records = [
        record(NONE, "q0", 0, forwards=8, committed=8, decode_seconds=8.0),
        record(OTBV, "q0", 0, forwards=4, committed=10, decode_seconds=4.0),
        record(OTBV, "q1", 0, forwards=4, committed=6, decode_seconds=2.0),
    ]
    records[2].turns[0].text = NASTY
    run = Results(settings=run_settings(), environment=ENVIRONMENT, records=records)
    browser = opened(page(results_content(run)))
    charts = browser.find_elements(By.CSS_SELECTOR, ".chart svg")
    assert len(charts) == 5
    assert charts[-1].location["y"] < one(browser, "question").location["y"]
    bars = charts[0].find_elements(By.TAG_NAME, "rect")
    assert bars[1].size["width"] == pytest.approx(2 * bars[0].size["width"], abs=2)
    assert style(bars[0], "fill") != style(bars[1], "fill")
    one(browser, "question").send_keys(Keys.END)
    assert NASTY.partition("\u2028")[0] in one(browser, "answers").text
