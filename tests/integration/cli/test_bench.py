import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from support.cli import process

from eaglegbv.eval import plots as picture
from eaglegbv.eval.runner import read_results
from eaglegbv.eval.statistics import Summary
from eaglegbv.eval.study import Study

QUICK = ["--questions-set", "builtin", "--questions", "2", "--max-tokens", "6", "--repeats", "1"]


def bench(cli, pair, *arguments: str, **ends: int):
    return cli("bench", "mt-bench", *pair, *arguments, **ends)


def test_conversations_too_long_are_reported(cli, pair, tmp_path):
    question = {"id": "long", "category": "math", "turns": ["a" * 200, "b" * 200], "source": "test"}
    short = {"id": "short", "category": "math", "turns": ["a", "b"], "source": "test"}
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(q) for q in (short, question)), encoding="utf-8")
    arguments = ["--data", str(data), "--verifiers", "none", "--max-tokens", "4"]
    result = bench(cli, pair, *arguments, "--out", str(tmp_path / "out"))
    assert "broke off, counted in no figure: none: 3" in result.err
    assert "long, repeat 2" in (tmp_path / "out" / "results.md").read_text(encoding="utf-8")


def test_a_run_is_reported_drawn_and_compared(cli, pair, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    verifiers = ["--verifiers", "none,token,otbv", "--paths", "1,2", "--depth", "2"]
    result = bench(cli, pair, *QUICK, *verifiers, "--plots", "--out", str(out))
    content = json.loads((out / "results.json").read_bytes())
    measured = ["none", "token K1 L2", "otbv K1 L2", "otbv K2 L2"]
    assert [s["setting"] for s in content["summary"]] == measured
    results = read_results(out / "results.json")
    assert len(results.records) == 2 * len(measured)
    assert all(len(one.turns) == 2 and one.error is None for one in results.records)
    none, *_, otbv = msgspec.convert(content["summary"], list[Summary])
    assert none.block_efficiency.value == none.speedup.value == 1 <= otbv.block_efficiency.value
    assert len(otbv.acceptance_by_depth) == 2
    assert otbv.tokens_per_second.value > 0
    report = (out / "results.md").read_text(encoding="utf-8")
    assert all(name in report and name in result.out for name in measured)
    assert "\r" not in result.err  # a bar is for a terminal
    pictures = {path.name for path in (out / "plots").iterdir()}
    assert {"block_efficiency_by_paths.png", "tokens_per_second.svg"} <= pictures
    cli("bench", "plot", str(out / "results.json"), "--out", str(tmp_path / "plots"))
    assert {path.name for path in (tmp_path / "plots").iterdir()} == pictures

    cli("bench", "results", str(tmp_path / "kept"), "--add", f"mt-bench={out}")
    page = (tmp_path / "kept.md").read_text(encoding="utf-8")
    assert "](kept/mt-bench_tokens_per_second.svg)" in page
    assert (tmp_path / "kept" / "mt-bench_tokens_per_second.svg").is_file()

    both = cli("bench", "compare", str(out), str(out), "--out", str(tmp_path / "c.json"))
    assert "A: otbv K2 L2   B: otbv K2 L2   questions: 2" in both.out
    assert "two sittings" in both.out
    content = json.loads((tmp_path / "c.json").read_bytes())
    assert len(content) == 4
    assert all(
        d["ratio"] is None or d["ratio"] == {"value": 1, "low": 1, "high": 1}
        for comparison in content
        for d in comparison["differences"]
    )

    names = ["--setting-a", "otbv K1 L2", "--setting-b", "otbv K2 L2"]
    within = cli("bench", "compare", str(out), *names)
    assert "A: otbv K1 L2   B: otbv K2 L2" in within.out
    assert "two sittings" not in within.out
    for arguments, message in (
        ([str(out)], "b=None"),
        ([str(out), "--setting-a", "otbv K1 L2"], "b=None"),
        ([str(out), *names[:2], "--setting-b", "nope"], "setting='nope'"),
        ([str(tmp_path / "nowhere"), str(out)], "a="),
        ([str(out), str(tmp_path / "nowhere")], "b="),
    ):
        refused = cli("bench", "compare", *arguments, status=2)
        assert message in refused.err


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "mt-bench", *QUICK, "--plots"),
        ("bench", "study"),
        ("bench", "results"),
        ("audit", "picture"),
    ],
    ids=" ".join,
)
def test_pictures_without_matplotlib_are_refused_before_anything_runs(
    cli, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    result = cli(
        *command, *([] if "results" in command else ["--out", str(tmp_path / "run")]), status=2
    )
    assert (
        result.err
        == "eaglegbv: matplotlib is not installed: pip install -e '.[bench]' in a checkout\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "backend", ["module://no_such_notebook.backend_inline", "nonsense", "tkagg"]
)
def test_pictures_are_drawn_whatever_backend_is_named(backend, tmp_path):
    """In a process of its own: a backend is read once, when matplotlib is imported."""
    pytest.importorskip("matplotlib")
    code = (
        "import os, sys, pathlib\n"
        "from eaglegbv.eval import plots\n"
        "with plots.picture_style():\n"
        "    line = plots.Line('a', [(1.0, plots.Estimate(1.0, 1.0, 1.0))])\n"
        "    canvas = plots.draw_panels([plots.Panel(lines=[line], x='x')], 'y')\n"
        "    written = plots.save_pictures(canvas, pathlib.Path(sys.argv[1]), 'drawn')\n"
        "print([path.stat().st_size > 0 for path in written], os.environ['MPLBACKEND'])\n"
    )
    done = process(sys.executable, "-c", code, tmp_path, env=os.environ | {"MPLBACKEND": backend})
    assert done.stdout.strip() == f"[True, True] {backend}"


def test_any_set_runs_and_what_determines_it_is_recorded(cli, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data" / "prompts" / "gsm8k_test.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text(json.dumps({"question": "How many?", "answer": "#### 3"}), encoding="utf-8")
    monkeypatch.setenv("EAGLEGBV_DATA", str(tmp_path / "data"))
    options = ["--verifiers", "none", "--max-tokens", "4", "--repeats", "1"]
    options += ["--system", "Be brief."]
    result = bench(cli, pair, *options, "--questions-set", "gsm8k")
    folder = tmp_path / "runs" / "gsm8k"
    results = read_results(folder / "results.json")
    settings = results.settings
    assert (settings.suite, settings.origin) == ("gsm8k", str(data))
    assert (settings.model, settings.drafter) == (pair[1], pair[3])
    assert (settings.system, settings.max_tokens, settings.dtype) == ("Be brief.", 4, "float32")
    assert settings.template == (Path(pair[1]) / "chat_template.jinja").read_text(encoding="utf-8")
    assert len(settings.questions_sha256) == 64
    [record] = results.records
    assert len(record.turns) == 1
    report = (folder / "results.md").read_text(encoding="utf-8")
    for expected in ("# gsm8k", "- System prompt: Be brief.", "(float32)", "- Chat template: "):
        assert expected in report
    definitions = json.loads((folder / "results.json").read_bytes())["definitions"]
    assert "prefill is not counted" in definitions["tokens/s"]
    assert "are counted" in definitions["tokens/s with prefill"]

    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"prompt": "Hello?"}), encoding="utf-8")
    result = bench(cli, pair, *options, "--questions-set", str(mine))
    assert read_results(tmp_path / "runs/mine/results.json").settings.origin == str(mine)
    # The same folder does not go on with other questions under the same ids.
    mine.write_text(json.dumps({"prompt": "Good-bye?"}), encoding="utf-8")
    result = bench(cli, pair, *options, "--questions-set", str(mine), status=2)
    assert "(other questions_sha256)" in result.err


def test_what_the_engine_is_compiled_by_is_recorded(cli, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)  # it takes a minute
    options = ["--questions", "1", "--repeats", "1", "--max-tokens", "4", "--out", str(tmp_path)]
    options += ["--verifiers", "none,otbv", "--questions-set", "builtin"]
    bench(cli, pair, *options, "--compile", "eager")
    assert read_results(tmp_path / "results.json").settings.compile_backend == "eager"
    assert "- Backend: local (compiled by eager)" in (tmp_path / "results.md").read_text()
    again = bench(cli, pair, *options, status=2)
    assert "(--compile eager, now none)" in again.err


def test_a_model_without_a_chat_template_is_refused(cli, pair, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(pair[1], target)
    (target / "chat_template.jinja").unlink()
    named = ["--model", str(target), *pair[2:]]
    result = cli("bench", "mt-bench", *named, *QUICK, "--out", str(tmp_path / "out"), status=2)
    assert "tokenizer has a chat template" in result.err
    assert not (tmp_path / "out").exists()


def test_a_grid_of_everything_runs_at_once(cli, pair, tmp_path):
    lists = ["--verifiers", "none,block,otbv", "--paths", "1,2", "--depth", "1"]
    lists += ["--temperature", "0.5,1", "--draft-sampling", "iid,fixed", "--draft-temperature", "2"]
    short = ["--questions-set", "builtin", "--questions", "1", "--repeats", "1"]
    result = bench(cli, pair, *short, "--max-tokens", "3", *lists, "--out", str(tmp_path))
    assert "left out, not lossless: block K1 L1 fixed D2 T0.5" in result.err
    content = json.loads((tmp_path / "results.json").read_bytes())
    settings = [s["setting"] for s in content["summary"]]
    # At each temperature: none, block with one path of one distribution, otbv with one and two of
    # both.
    assert len(settings) == len(set(settings)) == 2 * (1 + 1 + 2 * 2)
    assert "otbv K2 L1 fixed D2 T0.5" in settings
    assert all(s["errors"] == 0 and s["speedup"] is not None for s in content["summary"])


def test_a_paper_s_comparison_says_what_should_agree(cli, pair, tmp_path):
    short = ["--questions-set", "builtin", "--questions", "2", "--max-tokens", "4"]
    short += ["--places", "1", "--judgements", "1", "--engine-questions", "1"]
    result = cli("bench", "paper", "bv", *pair, *short, "--out", str(tmp_path))
    assert "Block verification" in result.out
    assert "block K1 L8 at least token K1 L8" in result.out
    assert "block K1 L6 at least greedy_block K1 L6" in result.out
    # Five temperatures: an order at three lengths, two trends, a lead; then the engine's, and time.
    assert f"of {5 * (3 + 2 + 1) + 2 * 3 + 1} directions: " in result.out
    assert "the paper's figure of each cell is not at hand" in result.out
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert len(report["report"]["findings"]) == 37
    assert report["environment"]["versions"]["torch"]
    assert (tmp_path / "report.txt").read_text().startswith("Block verification")
    again = cli("bench", "paper", "bv", *pair, *short, "--out", str(tmp_path))
    assert again.out == result.out
    unknown = cli("bench", "paper", "nope", *pair, status=2)
    assert "name='nope': expected one of " in unknown.err


SIZES = ["--vocab", "10,100", "--drafts", "2", "--width", "all,8", "--instances", "2"]


def test_solvers_as_one_json_object_and_as_a_table(cli):
    result = cli("bench", "solvers", *SIZES, "--seed", "3", "--time-limit", "60000", "--json")
    report = json.loads(result.out)
    assert report.keys() == {"seed", "time_limit_ms", "tolerance", "rows"}
    assert (report["seed"], report["time_limit_ms"]) == (3, 60_000)
    rows = {(r["vocab"], r["width"], r["solver"]): r for r in report["rows"]}
    assert len(rows) == len(report["rows"]) == 4 * 4
    for (vocab, width, solver), row in rows.items():
        refused = 2 if solver in ("max_flow", "lp") and (vocab, width) == (100, 100) else 0
        assert (row["refused"], row["success"]) == (refused, 0 if refused else 1)
    headings, *lines = cli("bench", "solvers", *SIZES, "--solver", "exact,lp").out.splitlines()
    assert headings.split()[:4] == ["V", "width", "n", "solver"]
    assert len(lines) == 4 * 2


def test_study_writes_json_and_a_picture(cli, tmp_path):
    pytest.importorskip("matplotlib")
    result = cli(
        *("bench", "study", "--questions-set", "builtin", "--questions", "2", "--places", "1"),
        *("--judgements", "1", "--temperatures", "0,1", "--draft-temperatures", "1,2"),
        *("--paths", "2", "--depth", "2", "--sizes", "2,4", "--max-tokens", "4"),
        *("--drafter", "small=eagle1", "--out", str(tmp_path)),
    )
    assert "small, K = 2: sampled at the target's own temperature against fixed" in result.out
    study = msgspec.json.decode((tmp_path / "study.json").read_bytes(), type=Study)
    assert {(c.temperature, c.draft_temperature) for c in study.sampled} == {(0, 1), (1, 1), (1, 2)}
    facts = json.loads((tmp_path / "study.json").read_text())
    assert facts["settings"]["seed"] == 0
    assert facts["environment"]["versions"]["torch"]
    assert (tmp_path / "study.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "study.svg").read_text()


def test_study_of_shapes(cli, tmp_path):
    result = cli(
        *("bench", "study", "--questions-set", "builtin", "--questions", "2", "--places", "1"),
        *("--judgements", "1", "--temperatures", "0.5", "--shapes", "2x2,eagle1"),
        *("--depth", "2", "--max-tokens", "4", "--drafter", "eagle1", "--out", str(tmp_path)),
    )
    assert "eagle1, 2x2: against fixed, as many nodes" in result.out
    study = msgspec.json.decode((tmp_path / "study.json").read_bytes(), type=Study)
    assert [cell.tree for cell in study.shapes] == ["2x2", "eagle1"]
    assert not study.sampled
    assert not (tmp_path / "study.svg").exists()
