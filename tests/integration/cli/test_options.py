"""Commands and options of ``bench`` and ``audit`` that people have in their scripts."""

from pathlib import Path

import pytest
import typer

from eaglegbv.cli import audit, bench

LISTED = Path(__file__).with_name("options.txt").read_text("utf-8").splitlines()
GROUPS = {"bench": bench.app, "audit": audit.app}


@pytest.mark.parametrize("line", LISTED, ids=[line.partition(":")[0] for line in LISTED])
def test_commands_keep_their_options(line: str) -> None:
    words, _, options = line.partition(": ")
    group, *names = words.split()
    command = typer.main.get_command(GROUPS[group])
    for name in names:
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(options.split()) <= known
