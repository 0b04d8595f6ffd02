"""``eaglegbv bench paper``: a paper's comparison on any pair, and whether its directions hold."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.options import (
    Device,
    Drafter,
    Dtype,
    MaxTokens,
    Model,
    QuestionData,
    Questions,
    QuestionsSet,
    load_llm,
    names,
)
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from eaglegbv.eval.papers.base import Bar, Paper, Report
    from eaglegbv.llm import LLM


def paper(
    name: Annotated[str, typer.Argument(help="Name of the paper, such as bv, gbv or spectr-gbv.")],
    questions: Questions = None,
    questions_set: QuestionsSet = "mt-bench",
    data: QuestionData = None,
    max_tokens: MaxTokens = 128,
    places: Annotated[
        int, typer.Option(help="Places per text at which all verifiers judge the same drafts.")
    ] = 5,
    judgements: Annotated[
        int, typer.Option(help="How many times each verifier judges each tree.")
    ] = 4,
    engine_questions: Annotated[
        int,
        typer.Option(help="Questions to answer in the engine, for what one step cannot show."),
    ] = 16,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also measure in the engine what one step can show.")
    ] = False,
    sheets: Annotated[
        str | None,
        typer.Option(
            help="Parts of the comparison, separated by commas, for papers with parts: drafts, "
            "engine and time of bv; grid, lengths and engine of gbv; engine of spectr-gbv.",
            show_default="all, but gbv's engine only with --engine",
        ),
    ] = None,
    so_far: Annotated[
        bool, typer.Option("--so-far", help="Only report what has been measured so far.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of texts, drafts and judgements.")] = 0,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; a run in it is resumed.",
            show_default="runs/paper-NAME",
        ),
    ] = None,
) -> None:
    """Measure what a paper compares, and test the direction of each difference.

    Other models give other figures, but order and trend should agree. A paired bootstrap interval
    of a ratio tests each of them. Measurements are saved as they come: the same command continues
    where an earlier one stopped.
    """
    from eaglegbv.config import EngineConfig, Plan
    from eaglegbv.eval.papers.base import Options, Site
    from eaglegbv.eval.papers.registry import paper_named
    from eaglegbv.eval.questions import load_questions

    chosen = paper_named(name)
    folder = out or Path("runs") / f"paper-{name}"
    if so_far:
        _tell(chosen.title, _report_so_far(chosen, folder), folder)
        return

    def load() -> "LLM":
        # Every setting answers the same prompts, and must read them itself.
        config = EngineConfig(prefix_cache=False)
        return load_llm(model, drafter, Plan(), device, dtype, engine=config)

    site = Site(
        folder,
        load_questions(questions_set, data).first(questions),
        Options(
            seed=seed,
            max_tokens=max_tokens,
            places=places,
            judgements=judgements,
            engine_questions=engine_questions,
            engine=engine,
        ),
        load,
        _progress,
        sheets=names("sheets", sheets) if sheets is not None else (),
    )
    typer.echo(chosen.title)
    _tell(chosen.title, chosen.measure(site), folder)


def _tell(title: str, report: "Report", folder: Path) -> None:
    """Print a report, and write it to ``folder``."""
    import msgspec

    text = report_text(report)
    (folder / "report.txt").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    (folder / "report.json").write_bytes(msgspec.json.encode(report) + b"\n")
    typer.echo("\n" + text)


def _report_so_far(chosen: "Paper", folder: Path) -> "Report":
    """Report the parts found in a folder, and write them as cells."""
    import msgspec

    from eaglegbv.eval.papers.cells import CELLS, measured_so_far
    from eaglegbv.eval.papers.sheets import GridPaper

    if not isinstance(chosen, GridPaper):
        raise InvalidArgument("so-far", True, "nothing, for a paper that is not measured in cells")
    measured = measured_so_far(folder)
    (folder / CELLS).write_bytes(msgspec.json.encode(measured) + b"\n")
    return chosen.report(measured.sheets, measured.run)


def report_text(report: "Report") -> str:
    """Return a report for the terminal: tables, directions, and those that are contradicted."""
    from eaglegbv.eval.papers.base import AGAINST, AGREES, findings_table
    from eaglegbv.eval.report import plain_text

    parts = []
    for table in report.tables:
        notes = "".join(f"\n({note})" for note in table.notes)
        parts.append(f"{table.title}\n{plain_text(table.rows)}{notes}")
    found = report.findings
    if found:
        counts = ", ".join(
            f"{sum(one.verdict == verdict for one in found)} {verdict}"
            for verdict in (AGREES, AGAINST)
        )
        parts.append(plain_text(findings_table(found)))
        parts.append(f"of {len(found)} directions: {counts}, the rest not told apart")
    if report.exceptions:
        exceptions = plain_text(findings_table(report.exceptions))
        parts.append(f"exceptions, with 95% intervals of the ratio\n{exceptions}")
    return "\n\n".join([*parts, *report.notes])


@contextmanager
def _progress(what: str, steps: int) -> "Iterator[Bar]":
    """Show a progress bar on standard error."""
    from tqdm import tqdm

    with tqdm(total=steps, desc=what, unit="text", file=sys.stderr, disable=None) as bar:
        yield bar
