"""``bench batch`` and ``bench step`` on tiny models: tables, files, and clear errors."""

import json
import re

import pytest

QUICK = ("--questions-set", "builtin", "--tokens", "6", "--repeats", "1", "--prompts", "1")
SIZES = "hidden=32,layers=4,heads=2,kv_heads=1,intermediate=48,vocab=64,draft_vocab=32"


def test_ways_stand_side_by_side(cli, pair, tmp_path):
    out = tmp_path / "batch.json"
    ways = ("--ways", "auto,2x2,none,transformers,lookup:2", "--batches", "1,2")
    result = cli("bench", "batch", *pair, *QUICK, *ways, "--explain", "--out", str(out))
    lines = result.out.splitlines()
    assert lines[0].split()[-4:] == ["batch", "1", "batch", "2"]
    rows = {line.split()[1]: line for line in lines if line.startswith("T=1, ")}
    choices = [line for line in lines if line.startswith("T=1, auto, batch ")]
    rows.pop("auto,")
    assert set(rows) == {"auto", "2x2", "none", "transformers", "lookup:2"}
    assert "(1.00)" in rows["none"]
    # Assisted generation takes one prompt at a time.
    assert rows["lookup:2"].split()[-1] == "-"
    assert [line.split(":")[0].split()[-1] for line in choices] == ["1", "2"]
    assert not any("fixed" in line for line in choices)  # as the plan 2x2 is
    timings = json.loads(out.read_text())["timings"]
    assert len(timings) == 5 + 4
    assert all(timing["tokens"] == 6 * timing["batch"] for timing in timings)


def test_a_missing_file_is_said_before_any_model_is_loaded(cli, monkeypatch, tmp_path):
    monkeypatch.delattr("eaglegbv.cli.options.Models.load")
    result = cli("bench", "batch", "--data", str(tmp_path / "none.jsonl"), status=2)
    assert "data=" in result.err


@pytest.mark.thorough
def test_a_made_pair_says_what_it_is_and_drafts_as_well_as_asked(cli, tmp_path):
    out = tmp_path / "made.json"
    made = ("--shape", "tiny", "--efficiency", "3.5", "--ways", "2x4,none", "--device", "cpu")
    result = cli("bench", "batch", *made, *QUICK, "--batches", "2", "--out", str(out))
    told = re.search(r"Made weights .* otbv 2x4 commits (\S+) tokens a step", result.out)
    assert told
    assert float(told[1]) == pytest.approx(3.5, rel=0.05)
    facts = json.loads(out.read_text())
    assert (facts["model"], facts["suite"]) == ("tiny", "random tokens")
    assert facts["drafter"] == f"made for block efficiency {told[1]}"
    assert [timing["tokens"] for timing in facts["timings"]] == [2 * 6] * 2


def test_many_settings_over_one_pair_lose_nothing(cli, tmp_path):
    out = tmp_path / "step.jsonl"
    out.write_text('{"an": "earlier run"}\n')
    options = ("--plans", "2x2,token:2x2,none", "--contexts", "8", "--steps", "2", "--batches", "2")
    how = ("--cuda-graphs", "eager", "--dtype", "bfloat16", "--out", str(out))
    result = cli("bench", "step", "--sizes", SIZES, *options, *how, status=1)
    headings, *rows = result.out.splitlines()
    assert headings.split()[:3] == ["milliseconds", "draft", "forward"]
    assert rows[0].startswith("otbv 2x2, batch 2, 8, T=1 ")
    assert rows[1].startswith("token 2x2, batch 2, 8, T=1: SamplingMismatch: paths=2")
    assert rows[2].startswith("none, batch 2")
    earlier, facts, *settings = map(json.loads, out.read_text().splitlines())
    assert earlier == {"an": "earlier run"}
    assert (facts["model"]["hidden"], facts["dtype"]) == (32, "bfloat16")
    assert [set(setting) for setting in settings] == [
        {"setting", "report"},
        {"setting", "error"},
        {"setting", "report"},
    ]
    assert settings[0]["report"]["operations"] > 0
    assert settings[0]["report"]["eager"] == {}  # padded and replayed, as on a GPU
    assert settings[0]["report"]["launches"] is None


def test_steps_of_a_real_model(cli, pair):
    options = ("--plans", "block:1x2,none", "--contexts", "8", "--steps", "2")
    result = cli("bench", "step", *pair, *options)
    _, drafted, plain, weights = result.out.splitlines()
    assert drafted.startswith("block 1x2")
    assert plain.startswith("none")
    assert weights.endswith("GB of weights")
