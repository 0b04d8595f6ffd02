"""``bench batch`` and ``bench step`` on tiny models: tables, files, and clear errors."""

import json
from pathlib import Path

import pytest

QUICK = ("--questions-set", "builtin", "--tokens", "6", "--repeats", "1", "--prompts", "1")
SMALL = ("--hidden", "32", "--layers", "4", "--heads", "2", "--kv-heads", "1")
SIZES = (*SMALL, "--intermediate", "48", "--vocab", "64", "--draft-vocab", "32")


def test_ways_stand_side_by_side(cli, pair, tmp_path: Path) -> None:
    out = tmp_path / "batch.json"
    ways = ("--ways", "auto,2x2,none,transformers,lookup:2", "--batches", "1,2")
    result = cli("bench", "batch", *pair, *QUICK, *ways, "--explain", "--out", str(out))
    assert result.status == 0, result.err
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


@pytest.mark.parametrize("way", ["fast", "3x", "lookup", "exit:3", "0x2"])
def test_a_way_that_is_none_is_named(cli, pair, way: str) -> None:
    result = cli("bench", "batch", *pair, *QUICK, "--ways", way)
    assert result.status == 2
    assert ("paths=0" if way == "0x2" else f"ways='{way}'") in result.err


def test_prompts_beyond_the_context_are_named(cli, pair) -> None:
    result = cli("bench", "batch", *pair, *QUICK, "--ways", "none", "--contexts", "100000")
    assert result.status == 2
    assert "prompt='100000 tokens'" in result.err
    assert "Traceback" not in result.err


def test_a_missing_file_is_said_before_any_model_is_loaded(
    cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("eaglegbv.cli.options.Models.load", load)
    result = cli("bench", "batch", "--data", str(tmp_path / "none.jsonl"))
    assert result.status == 2
    assert "data=" in result.err


def test_phases_of_a_step(cli, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    options = ("--paths", "2", "--depth", "2", "--context", "8", "--steps", "2", "--batch", "2")
    result = cli("bench", "step", *SIZES, *options, "--out", str(out))
    assert result.status == 0, result.err
    names = [line.split()[0] for line in result.out.splitlines()]
    assert names[:6] == ["phase", "draft", "forward", "verify", "commit", "step"]
    assert "operations a step" in result.out
    facts = json.loads(out.read_text())
    assert facts["shape"]["hidden"] == 32
    assert facts["report"]["operations"] > 0


def test_the_shape_of_an_8b_model_scaled_down(cli, tmp_path: Path) -> None:
    """What a GPU runs at full size: bfloat16, a draft vocabulary of its own, padded steps."""
    out = tmp_path / "step.json"
    sizes = ("--shape", "llama-3.1-8b", "--hidden", "128", "--layers", "4", "--intermediate", "96")
    vocab = ("--heads", "4", "--kv-heads", "1", "--vocab", "512", "--draft-vocab", "128")
    options = ("--paths", "4", "--depth", "6", "--context", "8", "--steps", "2")
    how = ("--dtype", "bfloat16", "--cuda-graphs", "eager", "--out", str(out))
    result = cli("bench", "step", *sizes, *vocab, *options, *how)
    assert result.status == 0, result.err
    facts = json.loads(out.read_text())
    assert (facts["shape"]["hidden"], facts["shape"]["draft_vocab"]) == (128, 128)
    # Five decoding steps at least, and the two that are counted; none on a GPU's profiler here.
    assert facts["report"]["replayed"] >= 6
    assert facts["report"]["launches"] is None
    assert cli("bench", "step", *sizes, *vocab, "--cuda-graphs", "fast").status == 2
    refused = cli("bench", "step", *sizes, *vocab, "--cuda-graphs", "on")
    assert refused.status == 2
    assert "--cuda-graphs='on'" in refused.err


def test_an_unknown_shape_is_named(cli) -> None:
    result = cli("bench", "step", "--shape", "huge")
    assert result.status == 2
    assert "shape='huge'" in result.err
