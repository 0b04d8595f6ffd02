"""The ``eaglegbv`` command."""

import codecs
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated

import typer

import eaglegbv
from eaglegbv.cli import chat, generate, heads, serve
from eaglegbv.cli.options import PASSED_ON, make_app
from eaglegbv.errors import EagleGBVError

USAGE_ERROR = 2
ESCAPES = "eaglegbv.escapes"  # name of a way to encode, for Python's codecs
# Modules whose log is printed too, on standard error.
LOGS = ("cli.options", "devices", "gguf", "loading", "server", "server_metrics")

app = make_app("Lossless tree speculation for large language models.")
# Commands with a long first sentence have a short help, or the list would cut the sentence off.
app.command(short_help="Answer a prompt.")(generate.generate)
app.command(short_help="Talk with a model.")(chat.chat)
app.command(short_help="Print what a head's files say, and check them.")(heads.inspect)
app.command()(heads.export)
app.command(short_help="Write the model in a GGUF file as a transformers folder.")(heads.convert)
app.command(cls=serve.Serve, short_help="Serve a model over HTTP.", context_settings=PASSED_ON)(
    serve.serve
)


def _add(name: str, place: str, text: str) -> None:
    """Add a command of a module that imports torch, for which the other commands need not wait."""

    @app.command(name, help=text, add_help_option=False, context_settings=PASSED_ON)
    def command(context: typer.Context) -> None:
        module, _, attribute = place.partition(":")
        group = getattr(import_module(f"eaglegbv.cli.{module}"), attribute)
        group(context.args, prog_name=f"eaglegbv {name}")


_add("demo", "demo:app", "Answer a prompt, and show what speculation gains.")
_add("bench", "bench:app", "Measure block efficiency and speed.")
_add("audit", "audit:app", "Check that verifiers are lossless.")
_add("view", "view:app", "Write an HTML page with the charts of a run or a trace.")
_add("train", "train:app", "Train an EAGLE head.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eaglegbv {eaglegbv.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Handle the options that come before a command."""


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return how JSON escapes characters that a console lacks: JSON that has them stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return json.dumps(lacking)[1:-1], error.end


def _escape_what_the_console_lacks() -> None:
    """Have characters that standard output cannot encode printed as ``\\uXXXX``, not refused."""
    codecs.register_error(ESCAPES, _escaped)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=ESCAPES)


@contextmanager
def _logging_shown() -> Iterator[None]:
    """Print, within this context, what was chosen and what is being done first."""
    handler = logging.StreamHandler()
    logs = [logging.getLogger(f"eaglegbv.{name}") for name in LOGS]
    for log in logs:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for log in logs:
            log.removeHandler(handler)
            log.setLevel(logging.NOTSET)


def _command(words: list[str]) -> tuple[typer.Typer, list[str]]:
    """Return the application of a command line, and its arguments."""
    if words[:2] == ["audit", "served"]:  # it needs no model, so not torch either
        return import_module("eaglegbv.cli.audit_served").app, words[2:]
    return app, words


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of the package or of files is one line, and status 2."""
    _escape_what_the_console_lacks()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command, words = _command(words)
        with _logging_shown():
            command(words)
    except (EagleGBVError, OSError) as error:
        typer.echo(f"eaglegbv: {error}", err=True)
        raise SystemExit(USAGE_ERROR) from None
