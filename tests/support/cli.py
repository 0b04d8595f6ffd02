"""The command line, run in this process or others, and the code of documents."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eaglegbv.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.name: path for path in sorted(DOCS.rglob("*.md"))}
"""Every page of docs/ and its folders, by its file's name."""


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    """Run ``eaglegbv`` with these arguments."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    captured = capsys.readouterr()
    code = exit_.value.code
    return Result(code if isinstance(code, int) else 0, captured.out, captured.err)


def process(*command: object, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own, which must end well; return what it printed."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def documented(page: str, language: str) -> list[str]:
    """Return the blocks of code in a language, of a page in docs/."""
    text = PAGES[page].read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def documented_commands(page: str, **places: object) -> list[list[str]]:
    """Return the words of the shell commands of a page, some of them replaced."""
    lines = "".join(documented(page, "sh")).replace("\\\n", " ").splitlines()
    return [[str(places.get(word, word)) for word in shlex.split(line)] for line in lines]
