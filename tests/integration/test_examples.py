"""The examples and the README's Python run as they are."""

import io
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cli import PAGES, process
from support.cli import run as cli
from support.drafting import random_table
from support.g_test import g_test, joint_probs
from support.tiny_pair import example
from torch import Tensor
from typer.main import get_command

from eaglegbv.cli.train import app
from eaglegbv.rng import RequestRng

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("quickstart.py", "", {r"-- \d+ tokens in \d+ target forwards": 2}),
        ("compare_verifiers.py", "", {r"(?m)^.* path.*$": 4}),
        ("chat_stream.py", "Hello\nAnd you?\n\nnot read\n", {"you> ": 3}),
        # When the context is full.
        ("chat_stream.py", "a" * 400 + "\nHello\n", {"you> ": 3, "starting over": 1}),
    ],
)
def test_an_example_prints_what_it_says(name, text, found, saved_pair, capsys, monkeypatch):
    target, head = map(str, saved_pair)
    arguments = ["--model", target, "--drafter", head, "--max-tokens", "8"]
    monkeypatch.setattr("sys.argv", [name, *arguments])
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out = capsys.readouterr().out
    assert {pattern: len(re.findall(pattern, out)) for pattern in found} == found


def test_my_verifier(capsys):
    module = ROOT / "examples" / "my_verifier.py"
    result = cli(capsys, "audit", "--module", str(module), "--all", "--instances", "3")
    rows = [line.split() for line in result.out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["first_path", "iid"], ["first_path", "wor"]]
    assert {row[-1] for row in rows} == {"lossless"}
    page = PAGES["add_a_verifier.md"].read_text("utf-8")
    assert module.read_text("utf-8") in page


def test_train_tiny_pair():
    """Its target is trained in tests/unit/drafters/training/test_target_training.py."""
    name, *arguments = example.HEAD.format(data="data", out="out").split()
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)  # raises on an option that is not there


def test_my_drafter():
    # In a process of its own: it registers its drafter.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = process(sys.executable, ROOT / "examples" / "my_drafter.py", env=environment)
    assert float(out.stdout.splitlines()[-1].split()[1]) > 1
    page = PAGES["add_a_drafter.md"].read_text("utf-8")
    assert (ROOT / "examples" / "my_drafter.py").read_text("utf-8") in page


def test_one_screen(saved_pair, capsys, monkeypatch):
    target, _ = saved_pair
    arguments = ["--model", str(target), "--layers", "1", "--steps", "3"]
    monkeypatch.setattr("sys.argv", ["one_screen.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "one_screen.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"-- \d\.\d\d tokens a target forward", last)


class Bigrams:
    """A model of transformers as far as the loop looks at one: logits by the last token."""

    def __init__(self, seed: int) -> None:
        self.table = random_table(3, seed=seed)

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[tokens])


@pytest.mark.parametrize("drafter", [Bigrams(2), Bigrams(1)], ids=["another", "the target"])
def test_the_loop_on_one_screen_follows_the_target(drafter):
    """Of three tokens; at least one step each, so that corrections and bonus tokens both occur."""
    step = runpy.run_path(str(ROOT / "examples" / "one_screen.py"))["step"]
    target, prompt = Bigrams(1), [2, 0]
    cells: list[int] = []
    for seed in range(1_500):
        sequence, number = torch.tensor(prompt), 0
        while len(sequence) < len(prompt) + 3:
            sequence = step(target, drafter, sequence, RequestRng(seed), number)
            number += 1
        first, second, third = sequence[len(prompt) : len(prompt) + 3].tolist()
        cells.append(9 * first + 3 * second + third)

    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        logits = torch.stack([target.table[prefix[-1]] for prefix in prefixes])
        return logits.double().softmax(dim=1).numpy()

    assert g_test(cells, joint_probs(next_probs, prompt, 3)).p_value > 1e-4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_tested(path):
    """train_bigram.py is tested in tests/unit/drafters/training."""
    lengths = {"one_screen.py": 75, "train_tiny_pair.py": 220, "train_bigram.py": 130}
    longest = lengths.get(path.name, 40)
    assert len(path.read_text(encoding="utf-8").splitlines()) < longest
    assert path.name in Path(__file__).read_text(encoding="utf-8")


def test_python_of_the_readme(capsys):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    exec(code, {})
    assert capsys.readouterr().out.strip()
