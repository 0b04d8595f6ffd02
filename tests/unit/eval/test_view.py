import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.cli import process
from support.runs import NONE, OTBV, head, observation, observations, run_of
from support.tree_traces import LONG, NASTY, PROMPT, TWICE, bush, decode, step, write_trace

from eaglegbv.eval.observations import Run
from eaglegbv.eval.questions import load_questions
from eaglegbv.eval.view import page, results_content, view
from eaglegbv.trace import Tracer

DOM = Path(__file__).parents[2] / "support" / "page_dom.js"


def a_run() -> Run:
    told = observation(OTBV, "q0", forwards=4, committed=10, decode_seconds=4.0, texts=(NASTY,))
    other = observation(OTBV, "q1", forwards=4, committed=6, decode_seconds=2.0, texts=("",))
    plain = observation(NONE, "q0", forwards=8, committed=8, decode_seconds=8.0, texts=("plain",))
    return run_of([plain, told, other])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    with Tracer(tmp_path / "trace.json") as tracer:
        for number, committed in enumerate((3, 1, 4)):
            tracer.on_step(step(number, committed=committed))
    return tmp_path / "trace.json"


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trees.json")


class Page(HTMLParser):
    """Tags with their attributes, and the texts in each kind of tag."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str | None, list[str]] = defaultdict(list)
        self.inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        self.texts[self.inside].append(data)


def parsed(text: str) -> tuple[Page, dict]:
    found = Page(text)
    data, script = found.texts["script"]
    assert script.lstrip().startswith('"use strict"')
    assert "@@" not in script
    return found, json.loads(data)


def test_a_page_refers_to_nothing_outside_itself(trace: Path, trees: Path) -> None:
    for text in (page(results_content(a_run())), view(trace), view(trees)):
        found, _ = parsed(text)
        for _, attributes in found.tags:
            assert not set(attributes) & {"src", "href", "action", "onerror", "onclick"}
        assert not [tag for tag, _ in found.tags if tag in {"link", "img", "iframe", "base"}]
        policy = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
        assert policy.startswith("default-src 'none'")
        script = found.texts["script"][-1]
        for word in ("fetch", "XMLHttpRequest", "import ", "innerHTML", "document.write", "eval("):
            assert word not in script
        # What the script looks for is there, or made by itself.
        wanted = set(re.findall(r'byId\("(\w+)"\)', script))
        assert wanted == {a["id"] for _, a in found.tags if "id" in a}
        assert set(re.findall(r"https?:[^\"'` ]*", text)) == {"http://www.w3.org/2000/svg"}


def test_nothing_in_an_answer_ends_the_script() -> None:
    run = a_run()
    text = page(results_content(run))
    found, data = parsed(text)
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    answers = [turn for c in data["conversations"] for turn in c["turns"]]
    assert NASTY in answers
    content = results_content(run) | {"title": NASTY}
    assert "".join(parsed(page(content))[0].texts["title"]) == NASTY


def test_a_run_is_shown_with_its_own_figures(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(a_run().compact())
    found, data = parsed(view(path))
    assert data["kind"] == "results"
    assert found.texts["title"] == ["test: target"]
    none, otbv = data["settings"]
    assert (none["name"], none["acceptance_length"]["value"]) == ("none", 1.0)
    assert otbv["acceptance_length"]["value"] == 2.0
    assert otbv["acceptance_by_position"] == [0.75, 0.5, 0.25]
    assert otbv["milliseconds_by_phase"]["prefill"] == pytest.approx(2000 / 18)
    assert otbv["speedup"]["value"] == pytest.approx(2.5)
    assert "prefill is not counted" in data["definitions"]["tokens/s"]
    assert [c["question"] for c in data["conversations"]] == ["q0", "q0", "q1"]


def test_a_run_asked_from_a_file_shows_its_questions_while_the_file_is_as_it_was(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"question_id": f"q{n}", "category": "c", "turns": [f"why {n}?"]} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = load_questions(str(file)).first(2)
    ids = [question.id for question in asked.questions]
    setup = {"suite": asked.suite, "origin": asked.origin, "question_ids": ids}
    of = head(**setup, questions_sha256=asked.sha256)
    told = [observation(OTBV, name, forwards=4, committed=10, decode_seconds=1.0) for name in ids]
    shown = results_content(run_of(told, of))["questions"]
    assert shown == {
        name: question.turns for name, question in zip(ids, asked.questions, strict=True)
    }
    file.write_text(file.read_text().replace("why 0", "how 0"))
    assert results_content(run_of(told, of))["questions"] == {}
    file.write_text("no JSON")
    assert results_content(run_of(told, of))["questions"] == {}


def test_a_trace_is_shown_step_by_step(trace: Path) -> None:
    _, data = parsed(view(trace))
    assert data["kind"] == "trace"
    assert ["Committed tokens", "8"] in data["facts"]
    assert [s["args"]["committed"] for s in data["steps"]] == [3, 1, 4]
    assert data["phases"] == pytest.approx({"draft": 12, "forward": 15})
    assert data["requests"] == data["by_depth"] == []
    assert "--trace-trees" in data["notes"][0]
    for number, one in enumerate(data["steps"]):
        assert one["start"] == pytest.approx(1000 * number)
        assert one["milliseconds"] == pytest.approx(10)
        assert one["phases"] == pytest.approx({"draft": 4, "forward": 5})


def test_trees_are_shown_request_by_request(trees: Path) -> None:
    _, data = parsed(view(trees))
    assert data["notes"] == []
    assert ["Draft trees", "3"] in data["facts"]
    assert ["Acceptance length", "2.67 tokens a tree"] in data["facts"]
    first, second = data["requests"]
    assert (first["number"], second["number"]) == (0, 1)
    assert first["prompt"] == "<s> the"
    assert second["prompt"] == "…"  # recorded from its middle on
    assert [tree["step"] for tree in first["trees"]] == [0, 1, 2]
    twice = first["trees"][1]
    assert twice["p"] == [None, 0.5, 0.25, 0.125, 1e-7]
    assert twice["figures"]["w"] == [None, 1.0, None, 0.25, None]
    assert twice["texts"][2] == NASTY
    assert all("trees" not in one["args"] for one in data["steps"])
    assert data["by_depth"] == [
        {"plan": "otbv 3x2", "shares": [1.0, 0.0]},
        {"plan": "otbv fixed", "shares": [1.0, 1.0]},
        {"plan": "token 1x2", "shares": [1.0, 1.0]},
    ]


def test_a_trace_too_large_for_a_page_is_cut_and_says_so(tmp_path, monkeypatch) -> None:
    path = write_trace(tmp_path / "trees.json", [(bush(20),)] * 9)
    monkeypatch.setattr("eaglegbv.eval.view.MOST_NODES", 70)
    _, data = parsed(view(path))
    assert [len(request["trees"]) for request in data["requests"]] == [3]
    assert data["notes"] == ["The last 6 draft trees are left out; the charts have all."]
    monkeypatch.setattr("eaglegbv.eval.view.MOST_STEPS", 2)
    _, data = parsed(view(path))
    assert len(data["steps"]) == 2
    assert data["notes"] == ["The first 2 of 9 steps are shown."]
    assert ["Draft trees", "9"] in data["facts"]


def test_a_run_too_large_for_a_page_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert results_content(a_run())["notes"] == []
    monkeypatch.setattr("eaglegbv.eval.view.MOST_LETTERS", len(NASTY) - 1)
    content = results_content(a_run())
    assert content["notes"] == ["The first 1 of 3 conversations are shown; the charts have all."]
    assert len(content["conversations"]) == 1


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
    return json.loads(process(node, DOM, file, *changes).stdout)


def test_the_script_draws_every_chart_of_a_run(tmp_path: Path) -> None:
    run = a_run()
    shown = drawn(page(results_content(run)), tmp_path)
    assert shown["title"]["text"] == "test: target"
    sections = [n for n in nodes(shown["charts"]) if n["attributes"].get("class") == "chart"]
    titles = [section["children"][0]["text"] for section in sections]
    assert titles == [
        "Acceptance length",
        "Tokens per second",
        "Speed-up over plain decoding",
        "Acceptance by position",
        "Milliseconds per token of the answers, by phase",
    ]
    bars = [n for n in nodes(sections[0]) if n["name"] == "rect"]
    assert [bar["text"] for bar in bars] == ["none: 1.00", "otbv 2x3: 2.00"]
    # Bars are in proportion to their figures.
    assert float(bars[1]["attributes"]["width"]) == pytest.approx(
        2 * float(bars[0]["attributes"]["width"])
    )
    circles = [n["text"] for n in nodes(sections[3]) if n["name"] == "circle"]
    assert circles == [
        f"otbv 2x3, {d}: {share:.3f}" for d, share in ((1, 0.75), (2, 0.5), (3, 0.25))
    ]
    answers = [n for n in nodes(shown["browser"]) if n["attributes"].get("class") == "answer"]
    assert len(answers) == 2  # of the first question
    assert NASTY in answers[1]["text"]
    other = drawn(page(results_content(run)), tmp_path, "question=q1")
    answers = [n for n in nodes(other["browser"]) if n["attributes"].get("class") == "answer"]
    assert len(answers) == 1


def found(tree: dict, wanted: str) -> dict:
    [one] = [n for n in nodes(tree) if n["attributes"].get("id") == wanted]
    return one


def pairs(tree: dict) -> dict[str, str]:
    cells = [child["text"] for child in tree["children"]]
    return dict(zip(cells[::2], cells[1::2], strict=True))


def classes(shown: dict) -> list[str]:
    """Classes of the nodes drawn, in order."""
    groups = [
        n for n in nodes(shown["browser"]) if n["attributes"].get("id", "").startswith("node")
    ]
    return [group["attributes"]["class"].removeprefix("node ") for group in groups]


def test_a_tree_is_drawn_with_what_became_of_its_nodes(trees: Path, tmp_path: Path) -> None:
    shown = drawn(view(trees), tmp_path, "step=1", "node3!pointerenter")
    assert classes(shown) == [
        "root", "accepted duplicate", "rejected", "rejected duplicate", "rejected", "next"
    ]  # fmt: skip
    badges = [n["text"] for n in nodes(shown["browser"]) if n["attributes"].get("class") == "badge"]
    assert badges == ["\u00d72", "\u00d72"]
    labels = [found(shown["browser"], f"node{n}")["children"][1]["text"] for n in range(6)]
    assert labels[1] == "·sat"
    assert labels[2] == "</script><scr…"
    assert labels[3] == "supercalif…"
    assert labels[4] == "⏎"
    assert labels[5] == "日本語日本語…"
    edges = [n["attributes"]["class"] for n in nodes(shown["browser"]) if n["name"] == "path"]
    assert edges == [
        "edge accepted chosen", "edge rejected", "edge rejected chosen", "edge rejected",
        "edge next",
    ]  # fmt: skip
    assert not shown["tip"]["hidden"]
    title, details = shown["tip"]["children"]
    assert LONG in title["text"]
    assert pairs(details) == {
        "state": "rejected",
        "p, target": "0.125",
        "q, draft": "0.0625",
        "p / q": "2",
        "b, chance to be selected": "0.5",
        "w, weight of the prefix": "0.25",
        "h, chance of its test": "0.25",
        "depth": "2",
        "draft sampling": "iid",
        "paths": "drawn by 2 of 3",
    }
    assert drawn(view(trees), tmp_path)["tip"]["hidden"]
    gone = drawn(view(trees), tmp_path, "node0!focus", "node0!blur")
    assert gone["tip"]["hidden"]


def charts_of(shown: dict) -> dict[str, dict]:
    sections = [n for n in nodes(shown["charts"]) if n["attributes"].get("class") == "chart"]
    return {section["children"][0]["text"]: section for section in sections}


def test_counts_of_a_step_agree_in_text_charts_and_facts(tmp_path: Path) -> None:
    # As the engine has it: a step that only reads a prompt decodes nothing, and commits a token.
    with Tracer(tmp_path / "t.json", decode=decode) as tracer:
        for number, tree in enumerate((PROMPT, TWICE)):
            counted = 0 if tree is PROMPT else len(tree.committed)
            tracer.on_step(replace(step(number + 7, [tree]), committed=counted))
    _, data = parsed(view(tmp_path / "t.json"))
    number = len(TWICE.committed) + 1
    assert ["Committed tokens", str(number)] in data["facts"]
    shown = drawn(view(tmp_path / "t.json"), tmp_path)
    circles = [n for n in nodes(charts_of(shown)["Tokens of each step"]) if n["name"] == "circle"]
    committed = [n["text"] for n in circles if n["text"].startswith("committed")]
    assert committed == ["committed, 1: 1.000", f"committed, 2: {number - 1}.000"]
    detail = pairs(found(shown["browser"], "detail"))
    assert detail["step of the run"].startswith("2: ")
    assert detail["committed"].startswith(f"{number - 1} token")
    assert found(shown["browser"], "where")["text"] == "step 2 of 2"


def test_ticks_are_round_and_coinciding_lines_are_not_alike(tmp_path: Path) -> None:
    same = [0.9, 0.45, 0.3]
    content = results_content(a_run())
    names = ("one", "two", "three")
    base = content["settings"][1]
    content["settings"] = [base | {"name": n, "acceptance_by_position": same} for n in names]
    chart = charts_of(drawn(page(content), tmp_path))["Acceptance by position"]
    ends = [n["text"] for n in nodes(chart) if n["attributes"].get("text-anchor") == "end"]
    assert ends == ["0", "0.25", "0.5", "0.75", "1"]
    lines = [n["attributes"] for n in nodes(chart) if n["name"] == "polyline"]
    assert len({line["points"] for line in lines}) == 1
    for kind in ("stroke-width", "stroke-dasharray", "stroke"):
        styles = [dict(entry.split(":") for entry in line["style"].split(";")) for line in lines]
        assert len({style[kind] for style in styles}) == 3


def test_a_single_question_has_no_interval(tmp_path: Path) -> None:
    run = run_of(observations(OTBV, (4, 10, 4.0)))
    chart = charts_of(drawn(page(results_content(run)), tmp_path))["Acceptance length"]
    assert not [n for n in nodes(chart) if n["attributes"].get("class") == "whisker"]
    assert [n["text"] for n in nodes(chart) if n["name"] == "text"][1] == "2.50"


def test_buttons_keys_and_slider_lead_to_the_same_steps(trees: Path, tmp_path: Path) -> None:
    def where(*actions: str) -> str:
        browser = drawn(view(trees), tmp_path, *actions)["browser"]
        ends = tuple(found(browser, name)["disabled"] for name in ("first", "back", "on", "last"))
        text = found(browser, "where")["text"]
        assert ends == ((True, True, False, False) if text == "step 1 of 3" else
                        (False, False, True, True) if text == "step 3 of 3" else
                        (False,) * 4)  # fmt: skip
        return text

    # It opens on the second step: the first read the prompt, and drafted nothing.
    for actions in ((), ("key:Home", "key:ArrowRight"), ("first!click", "on!click"), ("step=1",),
                    ("key:End", "back!click"), ("last!click", "key:ArrowLeft"),
                    ("key:ArrowLeft", "on!click")):  # fmt: skip
        assert where(*actions) == "step 2 of 3"
    assert where("key:End", "key:Home") == where("last!click", "first!click") == "step 1 of 3"
    assert where("key:End", "key:ArrowRight") == "step 3 of 3"
