import json
from pathlib import Path

import pytest
from support.runs import OTBV, head, observations

from eaglegbv.config import Plan
from eaglegbv.eval.observations import Run
from eaglegbv.llm import LLM
from eaglegbv.sampling import SamplingParams
from eaglegbv.trace import Tracer


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    run = Run.open(tmp_path / "run", head())
    run.part("conversations", "q0", lambda: observations(OTBV, (4, 8, 2.0)))
    return tmp_path / "run"


def test_writes_a_page_where_it_is_told_or_beside(cli, run_folder, tmp_path):
    cli("view", str(run_folder))
    text = (run_folder / "view.html").read_text(encoding="utf-8")
    assert "otbv 2x3" in text
    out = tmp_path / "page.html"
    result = cli("view", str(run_folder), "--out", str(out))
    assert f"wrote {out}" in result.err
    assert out.read_text(encoding="utf-8") == text


def test_a_trace_of_a_process_that_was_killed_shows_what_was_there(cli, pair, tmp_path):
    llm = LLM(pair[1], pair[3], plan=Plan(verifier="none"), device="cpu")
    trace, left = tmp_path / "trace.json", tmp_path / "left.json"
    with Tracer(trace) as tracer:
        llm.observe(tracer)
        pieces = llm.stream("hello", SamplingParams(max_tokens=8, ignore_eos=True))
        for _ in zip(range(4), pieces, strict=False):
            pass
        whole = trace.read_bytes()
        pieces.close()
    steps = whole.count(b'"name": "step"')  # the engine may be ahead of who reads
    assert steps >= 3
    for cut in (len(whole), len(whole) - 7):  # between two writes, and within one
        left.write_bytes(whole[:cut])
        cli("view", str(left))
        page = (tmp_path / "left.html").read_text(encoding="utf-8")
        assert f'["Steps", "{steps}"]' in page
    for nothing in (b"", b"[\n", b"[]"):
        left.write_bytes(nothing)
        refused = cli("view", str(left), status=2)
        assert refused.err.count("\n") == 1


def test_the_trees_of_generate_are_shown(cli, pair, tmp_path):
    trace, plain = tmp_path / "trace.json", tmp_path / "plain.json"
    same = ("generate", *pair, "--prompt", "hello", "--max-tokens", "6", "--seed", "2", "--json")
    same = (*same, "--verifier", "otbv", "--paths", "2", "--depth", "3", "--ignore-eos")
    recorded = json.loads(cli(*same, "--trace", str(trace), "--trace-trees").out)
    alone = json.loads(cli(*same, "--trace", str(plain)).out)
    assert recorded["token_ids"] == alone["token_ids"]
    steps = [e["args"] for e in json.loads(trace.read_text()) if e["name"] == "step"]
    trees = [tree for step in steps for tree in step["trees"]]
    assert [token for tree in trees for token in tree["committed"]] == recorded["token_ids"]
    assert "hello" in trees[0]["prompt_text"]
    for tree in trees[1:]:
        assert all(0 < x <= 1 for x in tree["q"][1:])
        assert all(0 <= x <= 1 for x in tree["p"][1:])
        assert {"b", "w", "h"} == set(tree["figures"])
    assert '"trees"' not in plain.read_text()
    cli("view", str(trace))
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert page.count('"multiplicity":') == len(trees)


def test_errors_are_one_line(cli, run_folder, tmp_path):
    other = tmp_path / "g.json"
    other.write_text("{}")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "path="),
        ([str(other)], f"path='{other}': expected a run's folder or file ("),
        ([str(tmp_path / "empty")], "a run's folder"),
        ([str(run_folder), "--out", str(tmp_path / "no" / "page.html")], "out="),
    ):
        result = cli("view", *arguments, status=2)
        assert message in result.err
        assert result.err.count("\n") == 1
