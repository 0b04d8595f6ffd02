"""``eaglegbv view``: a run or a trace as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.cli.options import make_app, opt, print_wrote
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.view import view as page_of

app = make_app()


@app.command()
def view(
    path: Annotated[Path, typer.Argument(help="Folder or file of a run, or a trace of generate.")],
    out: Annotated[Path | None, opt("Page to write.", shown="beside it, .html")] = None,
) -> None:
    """Write one HTML page with the charts of a run or a trace; it needs no server or network.

    \b
    Examples:
      eaglegbv view runs/mt-bench
      eaglegbv view trace.json --out trace.html
    """
    text = page_of(path)
    target = out or (path / "view.html" if path.is_dir() else path.with_suffix(".html"))
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("out", str(target), f"a file to write ({error})") from error
    print_wrote(target)
