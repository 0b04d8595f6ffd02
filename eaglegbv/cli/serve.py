"""``eaglegbv serve``: SGLang's OpenAI-compatible server with our drafts and verifiers."""

import os
import sys
from typing import Annotated

import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import opt
from eaglegbv.utils import DRAFT_WIDTH


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    drafter: Annotated[
        str | None, opt("Folder or hub name of an EAGLE head.", shown="none: plain decoding")
    ] = None,
    verifier: Annotated[str, opt("Verifier of independently drawn paths, such as gbv.")] = "otbv",
    paths: Annotated[int, opt("Drafted paths, K.")] = 3,
    depth: opts.Depth = 4,
    draft_width: opts.DraftWidth = DRAFT_WIDTH,
    draft_temperature: opts.DraftTemperature = 1.0,
    seed: Annotated[int, opt("Seed from which requests without a seed derive theirs.")] = 0,
    dry_run: Annotated[bool, opt("Print the command and stop.", "--dry-run")] = False,
) -> None:
    """Serve MODEL with SGLang; other options (--port, --tp, ...) are passed on to SGLang."""
    from eaglegbv.backends.sglang.launch import check_ready, launch
    from eaglegbv.backends.sglang.settings import Settings

    if not dry_run:
        check_ready(context.args)
    settings = Settings(
        verifier=verifier, draft_width=draft_width, draft_temperature=draft_temperature, seed=seed
    )
    start = launch(model, drafter, paths=paths, depth=depth, settings=settings, others=context.args)
    if dry_run:
        variables = (f"{name}='{value}'" for name, value in start.environment.items())
        typer.echo(" ".join([*variables, *start.command]))
        return
    sys.stdout.flush()
    os.execve(start.command[0], start.command, os.environ | start.environment)
