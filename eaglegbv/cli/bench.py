"""``eaglegbv bench``: benchmarks with a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.batches import batch
from eaglegbv.cli.compare import compare
from eaglegbv.cli.drafters import drafters
from eaglegbv.cli.measuring import progress, report_errors, run_settings
from eaglegbv.cli.options import (
    CompileBackend,
    Device,
    Drafter,
    DraftQuantization,
    DraftWidth,
    Dtype,
    MaxTokens,
    Model,
    QuestionData,
    Questions,
    QuestionsSet,
    draft_samplings,
    integers,
    names,
    numbers,
    quantization,
    verifier_names,
)
from eaglegbv.cli.paper import paper
from eaglegbv.cli.plot import plot
from eaglegbv.cli.results import results
from eaglegbv.cli.served import served
from eaglegbv.cli.solvers import solvers
from eaglegbv.cli.step import step
from eaglegbv.cli.study import study
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.utils import DRAFT_WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eaglegbv.cli.backends import Backend, Models
    from eaglegbv.eval.questions import Question
    from eaglegbv.eval.records import Record, RunSettings
    from eaglegbv.eval.runner import RunFolder

DEFAULT_VERIFIERS = "none,token,block,gbv,otbv"
LOCAL, SGLANG, TRANSFORMERS = "local", "sglang", "transformers"
BACKENDS = (LOCAL, SGLANG, TRANSFORMERS)

app = typer.Typer(no_args_is_help=True, help="Measure block efficiency and speed.")
# These commands have short helps because their first sentences would not fit a line of the list.
app.command(short_help="Compare the solvers of optimal transport.")(solvers)
app.command(short_help="Compare sampled with deterministic trees.")(study)
app.command(short_help="Compare the acceptance length of drafters.")(drafters)
app.command(short_help="Time ways to generate side by side, by batch.")(batch)
app.command(short_help="Time the phases of a step, with random weights.")(step)
app.command(short_help="Compare two runs, or two settings of one.")(compare)
app.command(short_help="Draw a run, as PNG and SVG.")(plot)
app.command(short_help="Write a page of results from measured files.")(results)
app.command(short_help="Measure what a paper compares.")(paper)
app.command(
    short_help="Compare verifiers through a server of SGLang's.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(served)


@app.callback()
def main() -> None:
    """Measure block efficiency and speed."""


@app.command(short_help="Hold conversations of MT-Bench, or of another set.")
def mt_bench(
    questions: Questions = None,
    questions_set: QuestionsSet = "mt-bench",
    data: QuestionData = None,
    verifiers: Annotated[
        str | None,
        typer.Option(
            help="Verifiers to compare, as in generate; 'none' is plain decoding.",
            show_default="none,token,block,gbv,otbv; with --backend transformers, no verifier",
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="What runs the plans: local, sglang, or transformers for none.")
    ] = "local",
    backend_arguments: Annotated[
        str | None, typer.Option(help="More arguments for SGLang's engine, as a JSON object.")
    ] = None,
    baselines: Annotated[
        str | None,
        typer.Option(
            help="Other ways to generate, measured in turn with the rest: transformers for its "
            "plain decoding; lookup:TOKENS, exit:LAYERS:TOKENS or assistant:FOLDER for its "
            "assisted generation.",
            show_default="none; with --backend transformers its plain decoding",
        ),
    ] = None,
    paths: Annotated[str, typer.Option(help="Numbers of drafted paths, K.")] = "3",
    depth: Annotated[str, typer.Option(help="Lengths of a drafted path, L.")] = "4",
    temperature: Annotated[str, typer.Option(help="Sampling temperatures.")] = "1.0",
    draft_sampling: Annotated[
        str,
        typer.Option(help="Draft samplings: own (of each verifier), iid, wor, greedy, hub, fixed."),
    ] = "own",
    draft_width: DraftWidth = DRAFT_WIDTH,
    draft_temperature: Annotated[
        str, typer.Option(help="Temperatures of the drafts, as multiples of the request's.")
    ] = "1.0",
    max_tokens: MaxTokens = 128,
    system: Annotated[str | None, typer.Option(help="System message of every question.")] = None,
    seed: Annotated[int, typer.Option(help="Seed that every request's seed is derived from.")] = 0,
    repeats: Annotated[int, typer.Option(help="How many times to run everything.")] = 3,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    compile_backend: CompileBackend = None,
    draft_quantization: DraftQuantization = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.json and results.md; a run that is in it is resumed.",
            show_default="runs/ and the set's name",
        ),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots", help="Also draw pictures, into plots/ in that folder.")
    ] = False,
) -> None:
    """Hold conversations of MT-Bench, or of another set, in every setting, in turns.

    Questions come from --data, otherwise from the folder named by EAGLEGBV_DATA, the local cache or
    the Hugging Face hub; --questions-set builtin is packaged. To continue an interrupted run, give
    the same command again.
    """
    from eaglegbv.cli.backends import Models
    from eaglegbv.cli.backends import backend_arguments as parse_arguments
    from eaglegbv.config import Plan
    from eaglegbv.eval.grid import grid
    from eaglegbv.eval.plots import check_matplotlib
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import describe_environment
    from eaglegbv.eval.runner import RunFolder

    if plots:
        check_matplotlib()
    chosen = load_questions(questions_set, data).first(questions)
    if backend not in BACKENDS:
        raise InvalidArgument("backend", backend, one_of(BACKENDS, backend))
    wanted = grid(
        _verifiers(backend, verifiers),
        integers("paths", paths),
        integers("depth", depth),
        numbers("temperature", temperature),
        base=Plan(draft_width=draft_width),
        draft_samplings=draft_samplings(draft_sampling),
        draft_temperatures=numbers("draft-temperature", draft_temperature),
        baselines=_baselines(backend, baselines),
    )
    models = Models(
        model, drafter, device, dtype, quantization(draft_quantization), compile_backend
    )
    settings = run_settings(
        chosen,
        models.named,
        wanted.settings,
        max_tokens=max_tokens,
        seed=seed,
        repeats=repeats,
        system=system,
        backend=backend,
        backend_arguments=parse_arguments(backend_arguments),
        compile_backend=compile_backend,
    )
    if wanted.left_out:
        typer.echo(f"left out, not lossless: {', '.join(wanted.left_out)}", err=True)
    serving = _serving(models, settings)
    folder = RunFolder(
        out or Path("runs") / chosen.suite,
        _as_served(settings, serving),
        describe_environment(serving.device, serving.packages),
    )
    _hold(serving, chosen.questions, folder)
    _report(folder, plots=plots)


def _hold(serving: "Backend", questions: "Sequence[Question]", folder: "RunFolder") -> None:
    """Hold all conversations that are not yet in the folder of a run."""
    import msgspec

    from eaglegbv.eval.runner import run

    if folder.records:
        settings = folder.settings
        total = len(settings.question_ids) * len(settings.settings) * settings.repeats
        known = f"{len(folder.records)}/{total} conversations of it are measured"
        typer.echo(f"going on with the run in {folder.path}: {known}", err=True)
    with progress(folder.settings, folder.records) as show:

        def keep(record: "Record") -> None:
            folder.add(record)
            show(record)

        for sitting in serving.sittings:
            if folder.has_all(sitting.settings):
                continue
            with sitting.open() as generate:
                run(
                    generate,
                    questions,
                    msgspec.structs.replace(folder.settings, settings=sitting.settings),
                    baselines=sitting.baselines,
                    done=folder.done,
                    on_record=keep,
                )


def _report(folder: "RunFolder", *, plots: bool) -> None:
    """Write the results into the folder of a run, and print the table."""
    from eaglegbv.eval.plots import draw_all
    from eaglegbv.eval.report import plain_text, table, write_markdown
    from eaglegbv.eval.runner import write_results
    from eaglegbv.eval.statistics import summarise

    found = folder.results()
    summaries = summarise(found)
    written = [
        write_results(folder.path, found, summaries),
        write_markdown(folder.path, found, summaries),
    ]
    if plots:
        written += draw_all(found, folder.path / "plots")
    typer.echo(plain_text(table(summaries)))
    report_errors(summaries)
    typer.echo("\n".join(f"wrote {path}" for path in written), err=True)


def _verifiers(backend: str, text: str | None) -> list[str]:
    if backend == TRANSFORMERS:
        if text is not None:
            raise InvalidArgument("verifiers", text, f"no one with --backend {TRANSFORMERS}")
        return []
    return verifier_names(DEFAULT_VERIFIERS if text is None else text)


def _baselines(backend: str, text: str | None) -> list[str]:
    from eaglegbv.eval.baselines import baseline

    if text is not None:
        found = names("baselines", text)
    else:
        found = [TRANSFORMERS] if backend == TRANSFORMERS else []
    for name in found:
        baseline(name)  # raises an error if there is no baseline with this name
    return found


def _serving(models: "Models", settings: "RunSettings") -> "Backend":
    from eaglegbv.cli import backends
    from eaglegbv.fused_linears import Quantization

    arguments = settings.backend_arguments
    if arguments and settings.backend != SGLANG:
        raise InvalidArgument("backend-arguments", arguments, f"none but with --backend {SGLANG}")
    if models.quantization is Quantization.INT8 and settings.backend != LOCAL:
        expected = f"auto or none: --backend {settings.backend} holds weights its own way"
        raise InvalidArgument("draft-quantization", str(models.quantization), expected)
    if models.compile_backend is not None and settings.backend != LOCAL:
        expected = f"none: --backend {settings.backend} compiles its own way"
        raise InvalidArgument("compile", models.compile_backend, expected)
    if settings.backend == SGLANG:
        return backends.sglang(models, settings.settings, arguments)
    load = backends.transformers if settings.backend == TRANSFORMERS else backends.local
    return load(models, settings.settings)


def _as_served(settings: "RunSettings", serving: "Backend") -> "RunSettings":
    """Return the settings of a run with what is known about its models once they are loaded."""
    import msgspec

    template = serving.tokenizer.chat_template
    if template is None:
        expected = "a model whose tokenizer has a chat template"
        raise InvalidArgument("model", settings.model, expected)
    return msgspec.structs.replace(
        settings,
        template=_template(template),
        dtype=serving.dtype,
        draft_quantization=serving.draft_quantization,
    )


def _template(template: str | dict[str, str]) -> str:
    """Return the chat template that the tokenizer applies; some have several, by name."""
    return template if isinstance(template, str) else template["default"]
