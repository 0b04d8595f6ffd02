"""``eaglegbv inspect``: a head's configuration, assumptions about it, and other engines' views."""

from typing import Annotated

import typer

from eaglegbv.cli.heads import open_head


def inspect(
    drafter: Annotated[
        str,
        typer.Argument(
            help="Folder or hub name of an EAGLE head; 'eagle1' or 'eagle3' of the tiny model."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of the target; 'tiny' for the packaged one."),
    ] = None,
) -> None:
    """Print what a head's files contain, check them, and warn where engines disagree about them."""
    from eaglegbv.drafters.checkpoint import fit, inspect_head
    from eaglegbv.loading import TINY_TARGET, check_model
    from eaglegbv.models.hf import load_config

    checkpoint = open_head(drafter)
    fitted = None
    if target is not None:
        name = str(TINY_TARGET) if target == "tiny" else target
        check_model(name, "target")
        fitted = fit(checkpoint, load_config(name))
    typer.echo(inspect_head(checkpoint, fitted))
