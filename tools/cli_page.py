"""The page on the command line, made of every command's help.

python tools/cli_page.py          # write docs/use/cli.md
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from eaglegbv.cli import audit, audit_served, bench, demo, main, train, view
from eaglegbv.cli.structs import heading_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "use" / "cli.md"
TOP = """# Command line

Written by `python tools/cli_page.py` from `--help`. Without an option `-m` a command takes SmolLM2
if it is installed, or else the packaged tiny pair. Results go to standard output, all else to
standard error; exit status 2 is bad input.
"""
GROUPS = {"demo": demo, "bench": bench, "audit": audit, "view": view, "train": train}


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its words, those of ``eaglegbv --help`` in their order."""
    top = typer.main.get_command(main.app)
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        if name not in GROUPS:
            yield name, command
            continue
        group = typer.main.get_command(GROUPS[name].app)
        if getattr(group, "invoke_without_command", True):
            yield name, group
        for sub, one in getattr(group, "commands", {}).items():
            if sub == "served" and name == "audit":
                one = typer.main.get_command(audit_served.app)
            if not one.hidden:
                yield f"{name} {sub}", one


def section(words: str, command: Any) -> str:
    """Return what help says of a command, as Markdown."""
    context = typer.Context(command, info_name=f"eaglegbv {words}")
    text, _, examples = (command.help or "").partition("\b\nExamples:\n")
    arguments = [p.name for p in command.params if p.param_type_name == "argument"]
    parts = [f"## {' '.join([words, *arguments])}", text.strip()]
    if examples:
        parts.append(
            "```sh\n" + "\n".join(line.strip() for line in examples.splitlines()) + "\n```"
        )
    rows: dict[str, list[str]] = {}
    for param in command.params:
        record = param.get_help_record(context)
        if record is not None:
            name, said = (" ".join(part.split()).replace("|", "\\|") for part in record)
            rows.setdefault(heading_of(command, param), []).append(f"| `{name}` | {said} |")
    for heading, lines in rows.items():
        parts += [f"| {heading} | |\n|---|---|\n" + "\n".join(lines)]
    return "\n\n".join(parts)


def page() -> str:
    """Return the page."""
    return "\n\n".join([TOP.strip(), *(section(*each) for each in commands())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
