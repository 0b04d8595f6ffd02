"""``eaglegbv view``: a run or a trace as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.errors import InvalidArgument


def view(
    path: Annotated[
        Path,
        typer.Argument(help="Folder of a run, a results.json, or a trace of generate --trace."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page to write.", show_default="beside it, .html")
    ] = None,
) -> None:
    """Write one HTML page with the charts of a run or a trace; it needs no server or network."""
    from eaglegbv.eval.view import view as page_of

    text = page_of(path)
    page = out or (path / "view.html" if path.is_dir() else path.with_suffix(".html"))
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("out", str(page), f"a file to write ({error})") from error
    typer.echo(f"wrote {page}", err=True)
