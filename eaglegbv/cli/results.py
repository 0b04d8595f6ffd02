"""``eaglegbv bench results``: the page of results, written from measured files."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.errors import InvalidArgument


def results(
    folder: Annotated[Path, typer.Argument(help="Folder of the measured files.")] = Path(
        "docs/results"
    ),
    page: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="the folder's name with .md, beside it"),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATH: first add a measured run or file to the folder in compact form; may "
            "be repeated. The name begins with mt-bench, baselines, grid, set, paper, study, batch "
            "or drafters."
        ),
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Also draw the pictures.")] = True,
) -> None:
    """Write a page of results from measured files: tables, pictures, and which verifier when.

    The files are those that other commands write: bench mt-bench (a run's folder), bench paper (its
    folder), bench study (its folder), bench batch --out, bench drafters --json. Missing files are
    left out and named. The same files give the same page.
    """
    from eaglegbv.eval.plots import check_matplotlib
    from eaglegbv.eval.results import add_evidence, draw, other_files, picture_names, read_evidence
    from eaglegbv.eval.results import page as text_of

    if pictures:
        check_matplotlib()
    for entry in add or ():
        name, equals, path = entry.partition("=")
        if not equals:
            raise InvalidArgument("add", entry, "NAME=PATH")
        typer.echo(f"wrote {add_evidence(folder, name, Path(path))}", err=True)
    if not folder.is_dir():
        raise InvalidArgument("folder", str(folder), "a folder of measured files")
    evidence = read_evidence(folder)
    written = draw(evidence, folder) if pictures else []
    target = page or folder.with_name(folder.name + ".md")
    links = {
        name: [f"{folder.name}/{one}.svg" for one in names]
        for name, names in picture_names(evidence).items()
    }
    others = [path.name for path in other_files(folder)]
    target.write_text(text_of(evidence, links, others), encoding="utf-8")
    typer.echo("\n".join(f"wrote {path}" for path in [*written, target]), err=True)
