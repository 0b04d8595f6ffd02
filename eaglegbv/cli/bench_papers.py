"""``bench paper``, ``study``, ``solvers`` and ``drafters``: comparisons on the same questions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import Models, Questions, opt
from eaglegbv.cli.structs import Fields, entries, member
from eaglegbv.config import EngineConfig, Plan, PlanChoices
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval.comparison import DrafterReport, category_table, depth_table, drafter_report
from eaglegbv.eval.paired_comparison import collect
from eaglegbv.eval.papers.cells import Options, Site
from eaglegbv.eval.papers.grids import PAPERS
from eaglegbv.eval.papers.sheets import AGAINST, AGREES, Report, findings_table
from eaglegbv.eval.plots import check_matplotlib, picture_style, save_pictures
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Record, RunSettings, Setting, describe_environment
from eaglegbv.eval.report import plain_text
from eaglegbv.eval.results import DrafterResults
from eaglegbv.eval.runner import Generate, run
from eaglegbv.eval.solvers import STANDARD, settings_of
from eaglegbv.eval.solvers import compare as compare_solvers
from eaglegbv.eval.study import (
    Study,
    StudySettings,
    shape_cells,
    shape_findings,
    shapes_table,
    study_canvas,
    study_cells,
    study_table,
    temperature_findings,
    tree_findings,
)
from eaglegbv.loading import TINY_NAME, default_model
from eaglegbv.sampling import SamplingParams
from eaglegbv.verifiers.global_resolution import Solver

_NAMED = "A drafter, as in generate; 'NAME=DRAFTER' shows it as NAME. May be repeated"


def _by_name(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the displayed name and the drafter of each ``NAME=DRAFTER`` or ``DRAFTER``."""
    parts = [text.partition("=") for text in texts]
    return [(name, where if equals else name) for name, equals, where in parts]


def drafters(
    drafter: Annotated[list[str], opt(f"{_NAMED}; the others are compared with the first.")],
    paths: Annotated[tuple[int, ...], opt("Numbers of drafted paths, K.")] = (1, 3),
    temperature: Annotated[float, opt("Sampling temperature; 0 is greedy.")] = 1.0,
    *,
    tree: Annotated[PlanChoices, Fields(without=("paths", "widths"), verifier="otbv", depth=5)],
    asked: Questions,
    run: Annotated[dict[str, Any], Fields("seed", of=RunSettings, max_tokens=128, seed=0)],
    batch: Annotated[int, opt("Number of conversations held together.")] = 16,
    models: Annotated[Models, Fields("model", "device", "dtype")],
    as_json: opts.AsJson = False,
) -> None:
    """Compare the acceptance length of drafters on the same questions, by depth and category.

    Acceptance length is accepted tokens per target forward, pooled. Its 95% interval, and that of
    the ratio to the first drafter, is a bootstrap over questions. 'd or more' is the share of
    forwards that accept at least d tokens; these shares add up to the length.
    """
    plans = [opts.fitting(replace(tree, paths=count)).plan() for count in paths]
    chosen = asked.load()
    # Refused before anything is loaded.
    SamplingParams(temperature=temperature, **run)
    named = _by_name(drafter)
    reports: list[DrafterReport] = []
    first: dict[Plan, list[Record]] = {}
    model = models.model or default_model(*(where for _, where in named))
    total = len(named) * len(plans) * len(chosen.questions)
    with opts.progress(total, "conversation") as bar:
        for name, where in named:
            pair = replace(models, model=model, drafter=where)
            llm = pair.load(plans[0], opts.UNCACHED)
            for plan in plans:
                setting = Setting(plan=plan, temperature=temperature)
                settings = opts.run_settings(chosen, pair, (setting,), **run)
                held = _converse(llm.generate, chosen.questions, settings, batch, bar)
                drafted = llm.drafter_name or "none"
                reports.append(drafter_report(name, drafted, plan, held, first.get(plan)))
                first.setdefault(plan, held)
    if as_json:
        where_and_when = describe_environment(str(llm.device))
        opts.print_json(
            DrafterResults(
                origin=chosen.origin, environment=where_and_when, drafters=tuple(reports)
            )
        )
        return
    typer.echo("\n\n".join(map(plain_text, (depth_table(reports), category_table(reports)))))
    broken = Counter[str]()
    for report in reports:
        broken[report.name] += report.errors
    opts.print_broken(broken)


def _converse(
    generate: Generate,
    questions: Sequence[Question],
    settings: RunSettings,
    at_once: int,
    bar: opts.Progress,
) -> list[Record]:
    """Hold a conversation for each question, and return their records in the questions' order.

    Seeds follow from that of ``settings``, so they are the same for all drafters.
    """
    held: list[Record] = []

    def keep(record: Record) -> None:
        held.append(record)
        bar.update()

    run(generate, questions, settings, at_once=at_once, on_record=keep)
    return sorted(held, key=lambda record: settings.question_ids.index(record.question_id))


def study(
    drafter: Annotated[
        list[str] | None,
        opt(f"{_NAMED}.", shown="eagle3 and eagle1; of another --model than tiny, its own"),
    ] = None,
    *,
    settings: Annotated[StudySettings, Fields(without=("beam", "draft_width"))],
    asked: Questions,
    models: Annotated[Models, Fields("model", "device", "dtype")],
    out: Annotated[Path, opt("Folder of the results.")] = Path("runs/study"),
) -> None:
    """Compare sampled with deterministic trees of as many nodes, at every draft temperature.

    Sampled trees (K paths, otbv) are compared with mixtures of two best-first fixed trees
    (target_only) of the same mean number of nodes, at places of plainly decoded texts. Writes
    study.json and a picture (matplotlib comes with '.[bench]') into --out, after every
    temperature. With --shapes there is no picture.
    """
    if not settings.shapes:
        check_matplotlib()
    chosen = asked.load()
    # Texts are read once each, and all drafters share them.
    engine = EngineConfig(prefix_cache=False, max_batch=max(1, len(chosen.questions)))
    named: list[tuple[str, str | None]] = [*_by_name(drafter or ("eagle3", "eagle1"))]
    model = models.model or default_model(*(where for _, where in named))
    if drafter is None and model != TINY_NAME:
        named = [(model, None)]
    llms = {
        name: replace(models, model=model, drafter=where).load(Plan(), engine)
        for name, where in named
    }
    first = next(iter(llms.values()))
    result = Study(
        model=model,
        drafters=tuple(llms),
        questions=tuple(question.id for question in chosen.questions),
        suite=chosen.suite,
        settings=settings,
        environment=describe_environment(str(first.device)),
        sampled=(),
        fixed=(),
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "study.json"
    total = len(settings.temperatures) * len(llms) * len(chosen.questions)
    with opts.progress(total, "text") as bar:
        for heat in settings.temperatures:
            texts = collect(
                first,
                chosen.questions,
                temperature=heat,
                max_tokens=settings.max_tokens,
                seed=settings.seed,
            )
            for name, llm in llms.items():
                if settings.shapes:
                    cells = shape_cells(name, llm.pair, texts, heat, settings, on_texts=bar.update)
                    result = msgspec.structs.replace(result, shapes=(*result.shapes, *cells))
                    continue
                sampled, fixed = study_cells(
                    name, llm.pair, texts, heat, settings, on_texts=bar.update
                )
                result = msgspec.structs.replace(
                    result, sampled=(*result.sampled, *sampled), fixed=(*result.fixed, *fixed)
                )
            path.write_bytes(msgspec.json.encode(result) + b"\n")
    table = shapes_table(result) if settings.shapes else study_table(result)
    findings = [*tree_findings(result), *temperature_findings(result), *shape_findings(result)]
    typer.echo(plain_text(table) + "\n" + "\n".join(f"- {finding}" for finding in findings))
    if settings.shapes:
        opts.print_wrote(path)
        return
    with picture_style():
        pictures = save_pictures(study_canvas(result), out, "study")
    opts.print_wrote(*pictures, path)


def paper(
    name: Annotated[str, typer.Argument(help="Name of the paper, such as bv, gbv or spectr-gbv.")],
    asked: Questions,
    options: Options,
    models: Annotated[Models, Fields("model", "drafter", "device", "dtype")],
    out: Annotated[
        Path | None, opt("Folder; a run in it is resumed.", shown="runs/paper-NAME")
    ] = None,
) -> None:
    """Measure what a paper compares, and test the direction of each difference.

    Other models give other figures, but order and trend should agree. A paired bootstrap interval
    of a ratio tests each of them. Measurements are saved as they come: the same command continues
    where an earlier one stopped.
    """
    if name not in PAPERS:
        raise InvalidArgument("name", name, one_of(sorted(PAPERS), name))
    chosen = PAPERS[name]
    folder = out or Path("runs") / f"paper-{name}"
    questions = asked.load()
    llm = models.load(Plan(), opts.UNCACHED)
    site = Site(
        folder, questions, options, llm, lambda what, steps: opts.progress(steps, "text", what)
    )
    typer.echo(chosen.title)
    measured = chosen.measure(site)
    text = report_text(measured.report)
    (folder / "report.txt").write_text(f"{chosen.title}\n\n{text}\n", encoding="utf-8")
    (folder / "report.json").write_bytes(msgspec.json.encode(measured) + b"\n")
    typer.echo("\n" + text)


def report_text(report: Report) -> str:
    """Return a report for the terminal: tables, directions, and those that are contradicted."""
    parts = []
    for table in report.tables:
        notes = "".join(f"\n({note})" for note in table.notes)
        parts.append(f"{table.title}\n{plain_text(table.rows)}{notes}")
    findings = report.findings
    if findings:
        counts = ", ".join(
            f"{sum(one.verdict == verdict for one in findings)} {verdict}"
            for verdict in (AGREES, AGAINST)
        )
        parts.append(plain_text(findings_table(findings)))
        parts.append(f"of {len(findings)} directions: {counts}, the rest not told apart")
    if report.exceptions:
        exceptions = plain_text(findings_table(report.exceptions))
        parts.append(f"exceptions, with 95% intervals of the ratio\n{exceptions}")
    return "\n\n".join([*parts, *report.notes])


def solvers(
    vocab: Annotated[
        tuple[int, ...] | None, opt("Vocabulary sizes.", shown="the standard table")
    ] = None,
    drafts: Annotated[
        tuple[int, ...] | None, opt("Numbers of drafts, n.", shown="the standard table")
    ] = None,
    width: Annotated[str, opt("Tokens that draft distributions keep, or 'all'.")] = "all,64",
    solver: Annotated[str, opt("Solvers to compare.")] = "exact,convex,max_flow,lp",
    instances: Annotated[int, opt("Number of random nodes of each size.")] = 10,
    time_limit: Annotated[float, opt("Milliseconds after which a solver fails.")] = 1000.0,
    seed: opts.Seed = 0,
    as_json: opts.AsJson = False,
) -> None:
    """Compare the solvers of optimal transport for independent drafts at one node.

    Times are medians of processor time to the selected draft. A solver succeeds if it is in time
    and its bound on the lost acceptance is within 1e-3; docs/inside/solvers.md has the columns.
    By default the standard sizes are measured; with --vocab and --drafts, all pairs of theirs.
    """
    if (vocab is None) != (drafts is None):
        raise InvalidArgument("drafts", drafts, "given with --vocab, and neither without the other")
    sizes = list(STANDARD)
    if vocab is not None and drafts is not None:
        sizes = list(product(vocab, drafts))
    widths = [
        None if kept == "all" else entries("width", kept, int)[0]
        for kept in entries("width", width, str)
    ]
    settings = settings_of(sizes, widths)
    chosen = [member("solver", name, Solver) for name in entries("solver", solver, str)]
    with opts.progress(len(settings) * len(chosen), "row") as bar:
        report = compare_solvers(
            settings,
            chosen,
            instances=instances,
            seed=seed,
            time_limit=time_limit / 1e3,
            on_row=lambda row: bar.update(note=f"V {row.vocab}, n {row.drafts}: {row.solver}"),
        )
    opts.print_results([report], SOLVER_COLUMNS, as_json=as_json, rows=report.rows)


SOLVER_COLUMNS = {
    "V": ("vocab", "d"),
    "width": ("width", "d"),
    "n": ("drafts", "d"),
    "solver": ("solver", ""),
    "ms/token": ("median_ms", ".2f"),
    "success": ("success", ".0%"),
    "too large": ("refused", "d"),
    "fall-backs": ("fallbacks", "d"),
    "late": ("late", "d"),
    "L1 deviation": ("deviation", ".1e"),
    "acceptance": ("acceptance", ".4f"),
    "optimum": ("optimum", ".4f"),
    "bound": ("shortfall", ".1e"),
}
"""What the table of solvers shows of a row, by heading, and how."""
