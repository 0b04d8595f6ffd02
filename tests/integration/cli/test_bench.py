import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.cli import process

from eaglegbv.eval import pictures as picture
from eaglegbv.eval.figures import ACCEPTANCE, SPEED, Sums
from eaglegbv.eval.observations import Run

QUICK = ["--questions-set", "builtin", "--questions", "2", "--max-tokens", "6", "--repeats", "1"]


def bench(cli, pair, *arguments: str, **ends: int):
    return cli("bench", "mt-bench", *pair, *arguments, **ends)


def test_conversations_too_long_are_reported(cli, pair, tmp_path):
    question = {"id": "long", "category": "math", "turns": ["a" * 200, "b" * 200], "source": "test"}
    short = {"id": "short", "category": "math", "turns": ["a", "b"], "source": "test"}
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(q) for q in (short, question)), encoding="utf-8")
    arguments = ["--data", str(data), "--verifiers", "none", "--max-tokens", "4"]
    arguments += ["--repeats", "3"]
    result = bench(cli, pair, *arguments, "--out", str(tmp_path / "out"))
    assert "broke off, counted in no figure: none: 3" in result.err
    assert "long, repeat 2" in (tmp_path / "out" / "results.md").read_text(encoding="utf-8")


def test_a_run_is_reported_drawn_and_compared(cli, pair, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    verifiers = ["--verifiers", "none,token,otbv", "--paths", "1,2", "--depth", "2"]
    result = bench(cli, pair, *QUICK, *verifiers, "--plots", "--out", str(out))
    measured = ["none", "token 1x2", "otbv 1x2", "otbv 2x2"]
    observed = Run.read(out).observations("conversations")
    sums = Sums(observed)
    assert sums.settings == measured
    assert len(observed) == 2 * len(measured)
    assert all(len(one.texts) == 2 and one.error is None for one in observed)
    assert sums.value(ACCEPTANCE, "none") == 1 <= sums.value(ACCEPTANCE, "otbv 2x2")
    assert sums.names("offered.", "otbv 2x2") == ["1", "2"]
    assert sums.value(SPEED, "otbv 2x2") > 0
    report = (out / "results.md").read_text(encoding="utf-8")
    assert all(name in report and name in result.out for name in measured)
    assert "\r" not in result.err  # a bar is for a terminal
    pictures = {path.name for path in (out / "plots").iterdir()}
    assert {"acceptance_by_paths.png", "tokens_per_second.svg"} <= pictures
    cli("bench", "plot", str(out), "--out", str(tmp_path / "plots"))
    assert {path.name for path in (tmp_path / "plots").iterdir()} == pictures

    cli("bench", "results", str(tmp_path / "kept"), "--add", f"mt-bench={out}")
    page = (tmp_path / "kept.md").read_text(encoding="utf-8")
    assert "](kept/mt-bench_tokens_per_second.svg)" in page
    assert (tmp_path / "kept" / "mt-bench_tokens_per_second.svg").is_file()

    filled = tmp_path / "page.md"
    filled.write_text(
        "Above\n\n<!-- run mt-bench -->\nold\n<!-- end -->\n\nbelow\n", encoding="utf-8"
    )
    for _ in range(2):
        cli("bench", "results", str(tmp_path / "kept"), "--fill", str(filled))
    text = filled.read_text(encoding="utf-8")
    assert "| otbv 2x2 |" in text
    assert "old" not in text
    assert text.startswith("Above\n\n<!-- run mt-bench -->\n\n- Models: ")
    assert text.endswith("\n\n<!-- end -->\n\nbelow\n")
    missing = cli("bench", "results", "--fill", str(tmp_path / "none.md"), status=2)
    assert "--fill" in missing.err

    both = cli("bench", "compare", str(out), str(out), "--out", str(tmp_path / "c.json"))
    assert "A: otbv 2x2   B: otbv 2x2   questions: 2" in both.out
    assert "two sittings" in both.out
    content = json.loads((tmp_path / "c.json").read_bytes())
    assert len(content) == 4
    assert all(
        d["ratio"] is None or (d["ratio"]["low"], d["ratio"]["high"]) == (1, 1)
        for comparison in content
        for d in comparison["differences"]
    )

    names = ["--setting-a", "otbv 1x2", "--setting-b", "otbv 2x2"]
    within = cli("bench", "compare", str(out), *names)
    assert "A: otbv 1x2   B: otbv 2x2" in within.out
    assert "two sittings" not in within.out
    for arguments, message in (
        ([str(out)], "b=None"),
        ([str(out), "--setting-a", "otbv 1x2"], "b=None"),
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
        ("bench", "paper", "synthetic"),
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
        "from eaglegbv.eval import pictures\n"
        "with pictures.picture_style():\n"
        "    line = pictures.Line('a', [(1.0, pictures.Estimate(1.0, 1.0, 1.0))])\n"
        "    canvas = pictures.draw_panels([pictures.Panel(lines=[line], x='x')], 'y')\n"
        "    written = pictures.save_pictures(canvas, pathlib.Path(sys.argv[1]), 'drawn')\n"
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
    run = Run.read(folder)
    setup = run.head.setup
    assert (setup["suite"], setup["origin"]) == ("gsm8k", str(data))
    assert (setup["model"], setup["drafter"]) == (pair[1], pair[3])
    assert (setup["system"], setup["max_tokens"], setup["dtype"]) == ("Be brief.", 4, "float32")
    assert setup["template"] == (Path(pair[1]) / "chat_template.jinja").read_text(encoding="utf-8")
    assert len(setup["questions_sha256"]) == 64
    [one] = run.observations("conversations")
    assert len(one.texts) == 1
    report = (folder / "results.md").read_text(encoding="utf-8")
    for expected in ("system Be brief.", "(float32)", "- Chat template: "):
        assert expected in report
    assert "prefill is not counted" in report
    assert "are counted" in report

    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"prompt": "Hello?"}), encoding="utf-8")
    result = bench(cli, pair, *options, "--questions-set", str(mine))
    assert Run.read(tmp_path / "runs/mine").head.setup["origin"] == str(mine)
    # The same folder does not go on with other questions under the same ids.
    mine.write_text(json.dumps({"prompt": "Good-bye?"}), encoding="utf-8")
    result = bench(cli, pair, *options, "--questions-set", str(mine), status=2)
    assert "(other questions_sha256)" in result.err


def test_what_the_engine_is_compiled_by_is_recorded(cli, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)  # it takes a minute
    options = ["--questions", "1", "--repeats", "1", "--max-tokens", "4", "--out", str(tmp_path)]
    options += ["--verifiers", "none,otbv", "--questions-set", "builtin"]
    bench(cli, pair, *options, "--compile", "eager")
    assert Run.read(tmp_path).head.setup["compile_backend"] == "eager"
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
    assert "left out, not lossless: block 1x1 fixed at 2 T0.5" in result.err
    sums = Sums(Run.read(tmp_path).observations("conversations"))
    settings = sums.settings
    # At each temperature: none, block with one path of one distribution, otbv with one and two of
    # both.
    assert len(settings) == len(set(settings)) == 2 * (1 + 1 + 2 * 2)
    assert "otbv 2x1 fixed at 2 T0.5" in settings
    assert not any(sums.errors.values())


def test_a_paper_s_table_stands_beside_ours(cli, pair, tmp_path):
    short = ["--questions-set", "builtin", "--questions", "2", "--max-tokens", "4"]
    short += ["--places", "1", "--judgements", "1", "--engine-questions", "1"]
    command = ["bench", "paper", "bv", "--table", "4,figure3", *pair, *short]
    result = cli(*command, "--out", str(tmp_path))
    assert result.out.startswith("Block verification")
    rows = [line for line in result.out.splitlines() if line.startswith("GSM8K")]
    assert re.fullmatch(r"GSM8K +\S+ \(3.81\) +\S+ \(4.15\) +\S+ \(3.96\)", rows[0])
    assert "fewer than 8 questions" in result.out
    assert " same" not in result.out
    assert "deviations" not in result.out
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert len(report["tables"]) == 2
    assert (tmp_path / "results.md").read_text().startswith("# Block verification")
    assert cli(*command, "--out", str(tmp_path)).out == result.out
    unknown = cli("bench", "paper", "nope", *pair, status=2)
    assert "name='nope': expected one of " in unknown.err
    other = cli("bench", "paper", "bv", "--table", "x", status=2)
    assert "table='x': expected one of " in other.err


def test_papers_list_their_tables_without_a_model(cli):
    listed = cli("bench", "paper", "gbv", "--list").out.splitlines()
    assert len(listed) == 2 + 7
    tables = json.loads(cli("bench", "paper", "gbv", "--list", "--json").out)["tables"]
    assert tables[0]["cells"][0][0] == 3.294
    exact = cli("bench", "paper", "bv", "--table", "figure3").out
    assert exact.splitlines()[2].split() == [
        *("TokenV", "0.667", "0.444", "0.296", "0.198", "0.132"),
        *("0.088", "0.059", "0.039", "0.026", "0.017"),
    ]


def test_synthetic_trees_are_a_paper_of_their_own(cli, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--vocab", "8", "--trees", "60", "--out", str(tmp_path)]
    result = cli("bench", "paper", "synthetic", *sizes)
    assert "K = 4" in result.out
    assert (tmp_path / "plots" / "by_paths.svg").is_file()


SIZES = ["--vocab", "10,100", "--drafts", "2", "--width", "all,8", "--instances", "2"]


def test_solvers_as_one_json_object_and_as_a_table(cli, tmp_path):
    out = ["--out", str(tmp_path)]
    result = cli("bench", "solvers", *SIZES, "--seed", "3", "--time-limit", "60000", *out, "--json")
    [table] = json.loads(result.out)["tables"]
    headings, *rows = table["rows"]
    assert headings[:4] == ["V", "width", "n", "solver"]
    assert len(rows) == 4 * 5
    for row in rows:
        found = dict(zip(headings, row, strict=True))
        if found["solver"] in ("exact", "max_flow", "lp"):
            large = found["solver"] == "lp" and found["width"] == 100
            assert (found["too large"], found["success, %"]) == ((2, 0) if large else (0, 100))
    assert Run.read(tmp_path).head.setup["seed"] == 3
    lines = cli("bench", "solvers", *SIZES, "--solver", "exact,lp").out.splitlines()
    assert len(lines) == 1 + 4 * 2


def test_the_study_resumes_and_draws(cli, tmp_path):
    pytest.importorskip("matplotlib")
    command = (
        *("bench", "study", "--questions-set", "builtin", "--questions", "2", "--places", "1"),
        *("--judgements", "1", "--temperatures", "0,1", "--draft-temperatures", "1,2"),
        *("--paths", "2", "--depth", "2", "--sizes", "2,4", "--max-tokens", "4"),
        *("--drafter", "small=eagle1", "--out", str(tmp_path)),
    )
    result = cli(*command)
    assert "small, K = 2: sampled at the target's own temperature against fixed" in result.out
    run = Run.read(tmp_path)
    assert run.head.setup["seed"] == 0
    assert run.head.environment.versions["torch"]
    assert "<svg" in (tmp_path / "plots" / "trees.svg").read_text()
    again = cli(*command)
    assert (again.out, "going on with the run" in again.err) == (result.out, True)


def test_study_of_shapes(cli, tmp_path):
    result = cli(
        *("bench", "study", "--questions-set", "builtin", "--questions", "2", "--places", "1"),
        *("--judgements", "1", "--temperatures", "0.5", "--shapes", "2x2,eagle1"),
        *("--depth", "2", "--max-tokens", "4", "--drafter", "eagle1", "--out", str(tmp_path)),
    )
    assert "eagle1, 2x2: against fixed, as many nodes" in result.out
    assert not (tmp_path / "plots").exists()


def test_drafters_stand_side_by_side(cli, pair, tmp_path):
    target, head = pair[1], pair[3]
    command = ["bench", "drafters", "--model", target, "--questions-set", "builtin"]
    command += ["--questions", "2", "--max-tokens", "4", "--paths", "1,2", "--depth", "3"]
    command += ["--drafter", f"head={head}", "--drafter", f"same={target}", "--out", str(tmp_path)]
    lines = cli(*command).out.splitlines()
    assert lines[0].split()[:3] == ["drafter", "verifier", "K"]
    named = [line.split()[:3] for line in lines[1:5]]
    assert named == [[name, "otbv", k] for name in ("head", "same") for k in ("1", "2")]
    # The target itself drafts best: nearly every token is accepted.
    sums = Sums(Run.read(tmp_path).observations("conversations"))
    for k in (1, 2):
        assert sums.value(ACCEPTANCE, f"same otbv {k}x3") >= 3
    shown = json.loads(cli(*command, "--json").out)
    assert len(shown["tables"]) == 2


def test_what_an_older_version_measured_is_refused_by_every_command(cli, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    for command in (
        ["bench", "plot"],
        ["bench", "compare", "--setting-a", "a", "--setting-b", "b"],
    ):
        assert "version 0.1 reads this" in cli(*command, str(tmp_path), status=2).err
    assert "version 0.1 reads this" in cli("view", str(tmp_path), status=2).err
