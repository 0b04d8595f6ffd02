"""``eaglegbv export``: write a head in the format of another engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.heads import open_head, read_embedding

if TYPE_CHECKING:
    from eaglegbv.drafters.checkpoint import Checkpoint, ExportTarget


def export(
    drafter: Annotated[
        str,
        typer.Argument(
            help="Folder or hub name of an EAGLE head; 'eagle1' or 'eagle3' of the tiny model."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="Folder to write, empty or not existing yet.")],
    format_: Annotated[str, typer.Option("--format", help="One of eagle, sglang, speculators.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of the target, 'tiny' for the packaged one. The head is "
            "checked against it, and the speculators format takes its embedding."
        ),
    ] = None,
) -> None:
    """Write a head in another format, with all weights unchanged."""
    from eaglegbv.drafters.checkpoint import export_head

    checkpoint = open_head(drafter)
    export_head(checkpoint, format_, directory, _target(checkpoint, target))
    typer.echo(f"{checkpoint.config.arch} head in format {format_}: {directory}")


def _target(checkpoint: "Checkpoint", target: str | None) -> "ExportTarget | None":
    if target is None:
        return None
    from eaglegbv.drafters.checkpoint import ExportTarget, fit
    from eaglegbv.loading import TINY_TARGET, check_model
    from eaglegbv.models.hf import load_config

    name = str(TINY_TARGET) if target == "tiny" else target
    check_model(name, "target")
    config = load_config(name)
    fit(checkpoint, config)
    return ExportTarget(
        name=name,
        architectures=tuple(config.architectures or ()),
        num_layers=config.get_text_config(decoder=True).num_hidden_layers,
        read_embedding=lambda: read_embedding(name),
    )
