"""``eaglegbv bench plot``: pictures of a run."""

from pathlib import Path
from typing import Annotated

import typer


def plot(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a results.json.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures.", show_default="RUN/plots")
    ] = None,
) -> None:
    """Draw a run: block efficiency, acceptance by depth, tokens/s and phases, as PNG and SVG.

    Needs matplotlib: pip install 'eaglegbv[bench]'.
    """
    from eaglegbv.eval.plots import draw_all
    from eaglegbv.eval.runner import load_results

    results = load_results(run, "run")
    folder = out or (run if run.is_dir() else run.parent) / "plots"
    typer.echo("\n".join(f"wrote {path}" for path in draw_all(results, folder)), err=True)
