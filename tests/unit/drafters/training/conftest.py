import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_models import random_llama
from support.tiny_pair import example
from typer.testing import CliRunner

from eaglegbv.cli.train import app

TOKENS = ("bos", "eos", "pad")
ANIMALS = ("cat", "dog", "bird", "fish", "horse")
Run = Callable[[list[str]], str]


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few hundred simple chats and texts."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {n} for the {animal}."},
                {"role": "assistant", "content": " ".join(map(str, range(1, n + 1)))},
            ]
        }
        for n in range(1, 41)
        for animal in ANIMALS
    ]
    (folder / "counting.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "The quick brown fox jumps over the lazy dog. " * 20
    (folder / "prose.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return folder


@pytest.fixture(scope="session")
def train() -> Run:
    """Run ``eaglegbv train`` in this process and return what it printed."""

    def run(arguments: list[str]) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose logits are spread out, so that there is a distribution to learn."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = example.train_tokenizer(["count the animals 1 2 3"] * 9, vocab_size=280, context=64)
    tokenizer.save_pretrained(folder)
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in TOKENS}
    sizes = {"num_hidden_layers": 6, "initializer_range": 0.2, "max_position_embeddings": 2048}
    random_llama(len(tokenizer), seed=0, **sizes, **tokens).save_pretrained(folder)
    return folder


@pytest.fixture
def kill_after() -> Callable[..., None]:
    """Run ``eaglegbv train`` in its own process and kill it, some time after it is seen at work."""

    def run(arguments: list[str], out: Path, seconds: float) -> None:
        command = [sys.executable, "-m", "eaglegbv.cli.train", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        # Imports take longer than the run: the clock starts at its first trace.
        while process.poll() is None and not out.exists():
            time.sleep(0.01)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        _, errors = process.communicate()
        # It may have been over by then.
        assert process.returncode in {-signal.SIGKILL, 0}, errors

    return run
