"""The ``eaglegbv`` command."""

from collections.abc import Sequence
from typing import Annotated

import typer

import eaglegbv
from eaglegbv.cli import audit, bench, convert, demo, export, generate, inspect, serve, view
from eaglegbv.errors import EagleGBVError

USAGE_ERROR = 2

app = typer.Typer(
    name="eaglegbv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would take brackets, as in eaglegbv[bench], for markup
    help="Lossless tree speculation for large language models.",
)
# Commands with a long first sentence have a short help, or the list would cut the sentence off.
app.command(short_help="Answer a prompt.")(generate.generate)
app.command(short_help="Answer a prompt, and compare verifiers on a few questions.")(demo.demo)
app.command(short_help="Print what a head's files say, and check them.")(inspect.inspect)
app.command()(export.export)
app.command(short_help="Write the model in a GGUF file as a transformers folder.")(convert.convert)
app.command(short_help="Write one HTML page with the charts of a run or a trace.")(view.view)
app.command(
    short_help="Serve a model by SGLang, with our drafts and verifiers.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve.serve)
app.add_typer(bench.app, name="bench")
app.add_typer(audit.app, name="audit")


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


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(context: typer.Context) -> None:
    """Train a target, an EAGLE head or a bigram table."""
    # Its options are in modules that import torch, so they are read only when it is called.
    from eaglegbv.cli.train import app as train_app

    train_app(context.args, prog_name="eaglegbv train")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; for a deliberate error of the package, print a line and exit with 2."""
    try:
        app(arguments)
    except EagleGBVError as error:
        typer.echo(f"eaglegbv: {error}", err=True)
        raise SystemExit(USAGE_ERROR) from None
