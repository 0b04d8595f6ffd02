"""What is made of measured files: ``bench compare``, ``plot`` and ``results``, and ``view``."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.cli.options import make_app, opt, print_wrote
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import comparison
from eaglegbv.eval.plots import check_matplotlib, draw_all
from eaglegbv.eval.records import pretty
from eaglegbv.eval.report import plain_text
from eaglegbv.eval.results import add_evidence, draw, page, read_evidence
from eaglegbv.eval.runner import load_results
from eaglegbv.eval.view import view as page_of

view_app = make_app()

Run = Annotated[Path, typer.Argument(help="Folder of a run, or a results.json.")]
SettingName = Annotated[str | None, opt("Name of a setting, such as 'otbv K3 L4'.", shown=False)]


def compare(
    a: Run,
    b: Annotated[
        Path | None, typer.Argument(help="Another one to compare.", show_default="A itself")
    ] = None,
    setting_a: SettingName = None,
    setting_b: SettingName = None,
    out: Annotated[Path | None, opt("JSON file for the figures.")] = None,
) -> None:
    """Compare B with A: ratios of all figures, with paired bootstrap intervals over questions.

    Two runs are compared in the settings that both have, or in --setting-a of A and --setting-b of
    B; two settings of one run need both options. Speeds of two runs were measured at different
    times, which no interval covers: compare speeds within a run if they matter.
    """
    if b is None and (setting_a is None or setting_b is None):
        raise InvalidArgument("b", None, "another run, or --setting-a and --setting-b of this one")
    base = load_results(a, "a")
    other = base if b is None else load_results(b, "b")
    if setting_a is None and setting_b is None:
        comparisons = comparison.compare_runs(base, other)
    else:
        sides = (
            comparison.side(base, setting_a or setting_b or ""),
            comparison.side(other, setting_b or setting_a or ""),
        )
        comparisons = [comparison.compare(*sides)]
    for one in comparisons:
        questions = one.differences[0].questions
        typer.echo(f"A: {one.a}   B: {one.b}   questions: {questions}")
        typer.echo(plain_text(comparison.table(one)) + "\n")
    notes = comparison.unlike(base, other)
    if notes:
        typer.echo("the runs also differ in:\n" + "\n".join(f"  {note}" for note in notes))
    if b is not None:
        typer.echo("speeds were measured in two sittings; the intervals do not cover that")
    if out is not None:
        out.write_bytes(pretty(comparisons))
        print_wrote(out)


def plot(
    run: Run, out: Annotated[Path | None, opt("Folder for the pictures.", shown="RUN/plots")] = None
) -> None:
    """Draw a run: block efficiency, acceptance by depth, tokens/s and phases, as PNG and SVG.

    Needs matplotlib: pip install -e '.[bench]' in a checkout.
    """
    loaded = load_results(run, "run")
    folder = out or (run if run.is_dir() else run.parent) / "plots"
    print_wrote(*draw_all(loaded, folder))


def results(
    folder: Annotated[Path, typer.Argument(help="Folder of the measured files.")] = Path(
        "docs/results"
    ),
    to: Annotated[Path | None, opt("File to write.", "--page", shown="the folder's, .md")] = None,
    add: Annotated[
        list[str] | None,
        opt(
            "NAME=PATH: first add a measured run or file to the folder in compact form; may be "
            "repeated. The name begins with mt-bench, baselines, grid, set, paper, study, batch "
            "or drafters."
        ),
    ] = None,
) -> None:
    """Write a page of results from measured files: tables, pictures, and which verifier when.

    The files are those that other commands write: bench mt-bench (a run's folder), bench paper (its
    folder), bench study (its folder), bench batch --out, bench drafters --json. Missing files are
    left out and named. The same files give the same page.
    """
    check_matplotlib()
    for entry in add or ():
        name, equals, path = entry.partition("=")
        if not equals:
            raise InvalidArgument("add", entry, "NAME=PATH")
        print_wrote(add_evidence(folder, name, Path(path)))
    if not folder.is_dir():
        raise InvalidArgument("folder", str(folder), "a folder of measured files")
    evidence = read_evidence(folder)
    written = draw(evidence, folder)
    target = to or folder.with_name(folder.name + ".md")
    target.write_text(page(evidence, folder=folder.name), encoding="utf-8")
    print_wrote(*written, target)


@view_app.command()
def view(
    path: Annotated[
        Path, typer.Argument(help="Folder of a run, a results.json, or a trace of generate.")
    ],
    out: Annotated[Path | None, opt("Page to write.", shown="beside it, .html")] = None,
) -> None:
    """Write one HTML page with the charts of a run or a trace; it needs no server or network."""
    text = page_of(path)
    target = out or (path / "view.html" if path.is_dir() else path.with_suffix(".html"))
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("out", str(target), f"a file to write ({error})") from error
    print_wrote(target)
