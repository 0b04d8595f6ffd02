"""Data and runs of the training tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eaglegbv.cli.train import app
from eaglegbv.drafters.training.loop import CHECKPOINT

ANIMALS = ("cat", "dog", "bird", "fish", "horse")
Run = Callable[[list[str]], str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads; runs to be compared use one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.fixture
def train() -> Run:
    """Run ``eaglegbv train`` in this process and return what it printed."""

    def run(arguments: list[str]) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


@pytest.fixture
def kill_midway() -> Callable[[list[str], Path], None]:
    """Run ``eaglegbv train`` in its own process and kill it after its first checkpoint."""

    def run(arguments: list[str], out: Path) -> None:
        command = [sys.executable, "-m", "eaglegbv.cli.train", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not (out / CHECKPOINT).exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors

    return run
