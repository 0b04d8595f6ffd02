"""``bench batch`` and ``bench step`` on tiny models: tables, files, and clear errors."""

import pytest

from eaglegbv.eval.observations import Run

QUICK = ("--questions-set", "builtin", "--tokens", "6", "--repeats", "1", "--prompts", "1")
SIZES = "hidden=32,layers=4,heads=2,kv_heads=1,intermediate=48,vocab=64,draft_vocab=32"


def test_ways_stand_side_by_side(cli, pair, tmp_path):
    out = tmp_path / "batch"
    ways = ("--ways", "auto,2x2,none,transformers,lookup:2", "--batches", "1,2")
    result = cli("bench", "batch", *pair, *QUICK, *ways, "--explain", "--out", str(out))
    lines = result.out.splitlines()
    assert lines[0].split()[-4:] == ["batch", "1", "batch", "2"]
    split = lines.index("What auto chose")
    rows = {line.split()[1]: line for line in lines[:split] if line.startswith("T=1, ")}
    choices = [line for line in lines[split:] if line.startswith("T=1, auto ")]
    assert set(rows) == {"auto", "otbv", "none", "transformers", "lookup:2"}
    assert "(1.00)" in rows["none"]
    # Assisted generation takes one prompt at a time.
    assert rows["lookup:2"].split()[-1] == "-"
    assert [line.split()[2] for line in choices] == ["1", "2"]
    assert not any("fixed" in line for line in choices)  # as the plan 2x2 is
    observed = Run.read(out).observations("batch")
    assert len(observed) == 5 + 4
    assert [one.sums["answer_tokens"] for one in observed] == [6] * 5 + [12] * 4


def test_a_missing_file_is_said_before_any_model_is_loaded(cli, monkeypatch, tmp_path):
    monkeypatch.delattr("eaglegbv.cli.options.Models.load")
    result = cli("bench", "batch", "--data", str(tmp_path / "none.jsonl"), status=2)
    assert "data=" in result.err


def test_an_acceptance_length_is_told_to_real_pairs(cli, pair, tmp_path):
    out = tmp_path / "told"
    ways = ("--ways", "auto,2x4", "--batches", "1", "--acceptance-length", "3.5")
    result = cli("bench", "batch", *pair, *QUICK, *ways, "--out", str(out))
    assert result.out.splitlines()[-1] == "The acceptance length, 3.5, is told: texts mean nothing."
    named = [one.setting for one in Run.read(out).observations("batch")]
    assert sorted(named) == ["auto batch 1", "none batch 1", "otbv~3.5 2x4 batch 1"]
    refused = cli("bench", "batch", *pair, *QUICK, *ways[:3], "1", "--efficiency", "6", status=2)
    assert "--acceptance-length=6" in refused.err


@pytest.mark.thorough
def test_a_made_pair_says_what_it_is_and_commits_as_much_as_is_told(cli, tmp_path):
    out = tmp_path / "made"
    made = ("--shape", "tiny", "--efficiency", "3.5", "--ways", "2x4,none", "--device", "cpu")
    cli("bench", "batch", *made, *QUICK, "--batches", "2", "--out", str(out))
    run = Run.read(out)
    setup = run.head.setup
    assert (setup["model"], setup["suite"]) == ("tiny", "random tokens")
    assert (setup["drafter"], setup["acceptance_length"]) == ("random weights", 3.5)
    assert [one.sums["answer_tokens"] for one in run.observations("batch")] == [2 * 6] * 2


def test_many_settings_over_one_pair_lose_nothing(cli, tmp_path):
    out = tmp_path / "steps"
    options = ("--plans", "2x2,token:2x2,none", "--contexts", "8", "--steps", "2", "--batches", "2")
    how = ("--cuda-graphs", "eager", "--dtype", "bfloat16", "--out", str(out))
    result = cli("bench", "step", "--sizes", SIZES, *options, *how, status=1)
    headings, drafted, broken, plain, _, failed = result.out.splitlines()
    assert headings.split()[:3] == ["milliseconds", "draft", "forward"]
    assert drafted.startswith("otbv 2x2 batch 2 prompt 8 ")
    assert broken.startswith("token 2x2 batch 2 prompt 8 ")
    assert plain.startswith("none batch 2")
    assert failed.startswith("token 2x2 batch 2 prompt 8: SamplingMismatch: paths=2")
    run = Run.read(out)
    assert (run.head.setup["sizes"], run.head.setup["dtype"]) == (SIZES, "bfloat16")
    first, second, third = run.observations("step")
    assert first.sums["operations"] > 0
    # Padded and replayed, as on a GPU; nothing is launched on one.
    assert not any(name.startswith("eager.") for name in first.sums)
    assert "launches" not in first.sums
    assert second.error is not None
    assert third.error is None


def test_steps_of_a_real_model(cli, pair):
    options = ("--plans", "block:1x2,none", "--contexts", "8", "--steps", "2")
    result = cli("bench", "step", *pair, *options)
    _, drafted, plain, weights = result.out.splitlines()
    assert drafted.startswith("block 1x2")
    assert plain.startswith("none")
    assert weights.endswith("GB of weights")
