import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_pair import example
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from eaglegbv.cli.train import app
from eaglegbv.drafters.training import train as loop
from eaglegbv.drafters.training.train import Schedule
from eaglegbv.errors import InvalidArgument

STEPS = 30


def train(data: Path, out: Path, *, seed: int = 0, resume: bool = False) -> None:
    sizes = {"vocab": 300, "layers": 2, "hidden": 32, "heads": 2, "intermediate": 48}
    schedule = Schedule(
        steps=STEPS,
        learning_rate=1e-2,
        evaluate_every=12,
        checkpoint_every=7,
        seed=seed,
        bf16=False,
    )
    shape = example.Sizes(**sizes, window=64, batch=8)
    example.train_target(data, out, shape, schedule, resume=resume)


class Killed(Exception):
    pass


def losses(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / loop.LOG).read_text().splitlines()]
    return [(line["step"], line.get("loss", line.get("score"))) for line in lines]


@pytest.fixture(scope="module")
def finished(chats, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    train(chats, out)
    return out


def test_it_learns(finished: Path) -> None:
    held_out = [s for step, s in losses(finished) if step % 10]
    assert held_out[-1] < held_out[0] - 0.2
    report = json.loads((finished / "training_report.json").read_text())
    assert report["steps"] == STEPS
    assert report["tokens"] == STEPS * 8 * 64
    assert set(report["data"]) == {"counting", "prose"}
    assert report["held_out"]["perplexity of assistant tokens"] < 150
    assert f"{report['parameters']:,} weights" in (finished / "TRAINING.md").read_text()


def test_it_loads_in_transformers(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to 5 for the cat."}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert output.shape[1] > prompt["input_ids"].shape[1]


def test_a_killed_run_ends_as_an_undisturbed_one(chats, finished, tmp_path, capsys, monkeypatch):
    out, save = tmp_path / "out", loop._save

    def save_and_die(*what: Any) -> None:
        save(*what)
        raise Killed

    monkeypatch.setattr(loop, "_save", save_and_die)
    with pytest.raises(Killed):
        train(chats, out)
    monkeypatch.setattr(loop, "_save", save)
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_LINES", -1.0)
    train(chats, out, resume=True)
    printed = capsys.readouterr().err
    # Where there is no terminal, progress is told in lines.
    assert re.search(r"^step \d+ of about \d+, loss \S+, 0 min left$", printed, re.MULTILINE)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    assert losses(out) == losses(finished)


def test_a_checkpoint_of_another_run_is_refused(chats, finished) -> None:
    with pytest.raises(InvalidArgument, match=r"^resume="):
        train(chats, finished, seed=1, resume=True)


def test_the_command_says_where_it_went() -> None:
    result = CliRunner().invoke(app, ["target", "--data", "x", "--layers", "2"])
    assert result.exit_code != 0
    assert "examples/train_tiny_pair.py trains a target" in str(result.exception) + result.output
