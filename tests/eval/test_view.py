import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.runs import ENVIRONMENT, NONE, OTBV, record, run_settings

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Results
from eaglegbv.eval.store import write_results
from eaglegbv.eval.summary import summarise
from eaglegbv.eval.view import content_of, page, results_content, view
from eaglegbv.metrics import Phase, Span, StepRecord
from eaglegbv.trace import Tracer

NASTY = "</script><script>alert(1)</script> <!-- \u2028 &amp; 'quoted' \"twice\" <b>"
DOM = Path(__file__).parents[1] / "support" / "page_dom.js"


def a_run() -> Results:
    records = [
        record(NONE, "q0", 0, forwards=8, committed=8, decode_seconds=8.0),
        record(OTBV, "q0", 0, forwards=4, committed=10, decode_seconds=4.0),
        record(OTBV, "q1", 0, forwards=4, committed=6, decode_seconds=2.0),
    ]
    records[1].turns[0].text = NASTY
    return Results(settings=run_settings(), environment=ENVIRONMENT, records=records)


def step(number: int, *, committed: int) -> StepRecord:
    return StepRecord(
        number=number,
        started=100.0 + number,
        seconds=0.010,
        spans=(Span(Phase.DRAFT, 0.0, 0.004), Span(Phase.FORWARD, 0.004, 0.005)),
        requests=1,
        prefilling=0,
        waiting=0,
        nodes=6,
        accepted=committed - 1,
        committed=committed,
        plans={"otbv 2x3": 1},
        reasons={"fixed": 1},
        kv_used=3,
        kv_slots=9,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    with Tracer(tmp_path / "trace.json") as tracer:
        for number, committed in enumerate((3, 1, 4)):
            tracer.on_step(step(number, committed=committed))
    return tmp_path / "trace.json"


class Page(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        if self.inside == "title":
            self.title += data


def parsed(text: str) -> tuple[Page, dict]:
    found = Page(text)
    data, script = found.scripts
    assert script.lstrip().startswith('"use strict"')
    return found, json.loads(data)


def test_a_page_refers_to_nothing_outside_itself(trace: Path) -> None:
    for text in (page(results_content(a_run())), view(trace)):
        found, _ = parsed(text)
        for _, attributes in found.tags:
            assert not set(attributes) & {"src", "href", "action", "onerror", "onclick"}
        assert not [tag for tag, _ in found.tags if tag in {"link", "img", "iframe", "base"}]
        policy = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
        assert policy.startswith("default-src 'none'")
        script = found.scripts[-1]
        for word in ("fetch", "XMLHttpRequest", "import ", "innerHTML", "document.write", "eval("):
            assert word not in script
        # What the script looks for is there, or made by itself.
        wanted = set(re.findall(r'getElementById\("(\w+)"\)', script))
        assert wanted == {a["id"] for _, a in found.tags if "id" in a}


def test_nothing_in_an_answer_ends_the_script() -> None:
    run = a_run()
    text = page(results_content(run))
    found, data = parsed(text)
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    answers = [turn["text"] for c in data["conversations"] for turn in c["turns"]]
    assert NASTY in answers
    content = results_content(run) | {"title": NASTY}
    assert parsed(page(content))[0].title == NASTY


def test_a_run_is_shown_with_its_own_figures(tmp_path: Path) -> None:
    run = a_run()
    path = write_results(tmp_path, run, summarise(run))
    for source in (tmp_path, path):
        found, data = parsed(view(source))
        assert data["kind"] == "results"
        assert found.title == "test: target"
        shown = {one["name"]: one for one in data["settings"]}
        for summary in summarise(run):
            one = shown[summary.setting]
            assert one["block_efficiency"]["value"] == summary.block_efficiency.value
            assert one["acceptance_by_depth"] == summary.acceptance_by_depth
            assert one["milliseconds_by_phase"] == pytest.approx(summary.milliseconds_by_phase)
        assert ["Most tokens an answer", "8"] in data["facts"]
        assert "prefill is not counted" in data["definitions"]["tokens/s"]
        assert [c["question"] for c in data["conversations"]] == ["q0", "q0", "q1"]


def test_a_trace_is_shown_step_by_step(trace: Path) -> None:
    _, data = parsed(view(trace))
    assert data["kind"] == "trace"
    assert ["Committed tokens", "8"] in data["facts"]
    assert [s["args"]["committed"] for s in data["steps"]] == [3, 1, 4]
    for number, one in enumerate(data["steps"]):
        assert one["start"] == pytest.approx(1000 * number)
        assert one["milliseconds"] == pytest.approx(10)
        assert one["phases"] == pytest.approx({"draft": 4, "forward": 5})


def test_a_trace_that_was_cut_is_shown_as_far_as_it_goes(trace: Path) -> None:
    text = trace.read_text(encoding="utf-8")
    last = text.rindex('{"pid": 1, "name": "step"')
    trace.write_text(text[: last + 30], encoding="utf-8")
    assert len(content_of(trace)["steps"]) == 2


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    for name, text in {"a.json": "{}", "b.json": "[]", "c.json": "[1]", "d.txt": "x"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidArgument, match=name):
            view(tmp_path / name)
    with pytest.raises(InvalidArgument, match=r"nowhere.*Chrome trace"):
        view(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="results="):
        view(tmp_path)


def nodes(tree: dict) -> Iterator[dict]:
    yield tree
    for child in tree["children"]:
        yield from nodes(child)


def drawn(text: str, folder: Path, *changes: str) -> dict[str, dict]:
    """What the page's own script makes of it."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [node, str(DOM), str(file), *changes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_draws_every_chart_of_a_run(tmp_path: Path) -> None:
    run = a_run()
    shown = drawn(page(results_content(run)), tmp_path)
    assert shown["title"]["text"] == "test: target"
    sections = [n for n in nodes(shown["charts"]) if n["attributes"].get("class") == "chart"]
    titles = [section["children"][0]["text"] for section in sections]
    assert titles == [
        "Block efficiency",
        "Tokens per second",
        "Speed-up over plain decoding",
        "Acceptance by depth",
        "Milliseconds per token of the answers, by phase",
    ]
    bars = [n for n in nodes(sections[0]) if n["name"] == "rect"]
    assert [bar["text"] for bar in bars] == ["none: 1.00", "otbv K2 L3: 2.00"]
    # Bars are in proportion to their figures.
    assert float(bars[1]["attributes"]["width"]) == pytest.approx(
        2 * float(bars[0]["attributes"]["width"])
    )
    circles = [n["text"] for n in nodes(sections[3]) if n["name"] == "circle"]
    by_depth = summarise(run)[1].acceptance_by_depth
    assert circles == [f"otbv K2 L3, {d + 1}: {share:.3f}" for d, share in enumerate(by_depth)]
    answers = [n for n in nodes(shown["browser"]) if n["attributes"].get("class") == "answer"]
    assert len(answers) == 2  # of the first question
    assert NASTY in answers[1]["text"]
    other = drawn(page(results_content(run)), tmp_path, "question=q1")
    answers = [n for n in nodes(other["browser"]) if n["attributes"].get("class") == "answer"]
    assert len(answers) == 1


def test_the_script_steps_through_a_trace(trace: Path, tmp_path: Path) -> None:
    shown = drawn(view(trace), tmp_path, "step=2")
    details = next(n for n in nodes(shown["browser"]) if n["attributes"].get("id") == "detail")
    cells = [child["text"] for child in details["children"]]
    facts = dict(zip(cells[::2], cells[1::2], strict=True))
    assert facts["committed"] == "4"
    assert facts["start"] == "2000.00 ms"
    assert facts["forward"] == "5.00 ms"
    assert json.loads(facts["plans"]) == {"otbv 2x3": 1}
    points = [n["text"] for n in nodes(shown["charts"]) if n["name"] == "circle"]
    assert points[:3] == ["committed, 1: 3.000", "committed, 2: 1.000", "committed, 3: 4.000"]
