"""``eaglegbv bench``: benchmarks with a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.batches import batch
from eaglegbv.cli.compare import compare
from eaglegbv.cli.drafters import drafters
from eaglegbv.cli.measuring import progress, report_errors
from eaglegbv.cli.options import (
    Device,
    Drafter,
    DraftWidth,
    Dtype,
    Model,
    integers,
    laws,
    load_llm,
    names,
    numbers,
)
from eaglegbv.cli.paper import paper
from eaglegbv.cli.plot import plot
from eaglegbv.cli.solvers import solvers
from eaglegbv.cli.step import step
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from eaglegbv.eval.records import Record

app = typer.Typer(no_args_is_help=True, help="Measure block efficiency and speed.")
app.command()(solvers)
app.command()(drafters)
app.command()(batch)
app.command()(step)
app.command()(compare)
app.command()(plot)
app.command()(paper)


@app.callback()
def main() -> None:
    """Measure block efficiency and speed."""


@app.command()
def mt_bench(
    questions: Annotated[
        int | None,
        typer.Option(help="Number of questions, spread evenly over the file.", show_default="all"),
    ] = None,
    questions_set: Annotated[
        str,
        typer.Option(
            help="mt-bench, spec-bench, gsm8k, humaneval, math-500, mgsm, mbpp, eagle-gsm8k, "
            "eagle-humaneval, builtin, or a file of JSON lines."
        ),
    ] = "mt-bench",
    data: Annotated[
        Path | None, typer.Option(help="File or folder to read them from; see below for others.")
    ] = None,
    verifiers: Annotated[
        str, typer.Option(help="Verifiers to compare; 'none' is plain decoding.")
    ] = "none,token,block,gbv,otbv",
    paths: Annotated[str, typer.Option(help="Numbers of drafted paths, K.")] = "3",
    depth: Annotated[str, typer.Option(help="Lengths of a drafted path, L.")] = "4",
    temperature: Annotated[str, typer.Option(help="Sampling temperatures.")] = "1.0",
    law: Annotated[
        str,
        typer.Option(help="Draft laws: own (of each verifier), iid, wor, greedy, hub, fixed."),
    ] = "own",
    draft_width: DraftWidth = 256,
    draft_temperature: Annotated[
        str, typer.Option(help="Draft temperatures as multiples of the request's; lossless.")
    ] = "1.0",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 128,
    system: Annotated[str | None, typer.Option(help="System message of every question.")] = None,
    seed: Annotated[int, typer.Option(help="Every request's seed derives from it.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 3,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.json and results.md; resumes its own run.",
            show_default="runs/ and the set's name",
        ),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots", help="Draw pictures too, in the folder's plots/.")
    ] = False,
) -> None:
    """Hold conversations of MT-Bench, or of another set, in every setting, in turns.

    Questions come from --data, else the folder named by EAGLEGBV_DATA, else the local cache, else
    the Hugging Face hub; --questions-set builtin is packaged. A run that was interrupted goes on
    where it stopped when the same command is given again.
    """
    import msgspec

    from eaglegbv.config import EngineConfig, Plan
    from eaglegbv.eval.audit_picture import check_matplotlib
    from eaglegbv.eval.grid import grid
    from eaglegbv.eval.plots import draw_all
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import RunSettings, describe_environment
    from eaglegbv.eval.report import plain_text, table, write_markdown
    from eaglegbv.eval.runner import run
    from eaglegbv.eval.store import RunFolder, write_results
    from eaglegbv.eval.summary import summarise

    if plots:
        check_matplotlib()
    chosen = load_questions(questions_set, data).first(questions)
    wanted = grid(
        names("verifiers", verifiers),
        integers("paths", paths),
        integers("depth", depth),
        numbers("temperature", temperature),
        base=Plan(draft_width=draft_width),
        laws=laws(law),
        draft_temperatures=numbers("draft-temperature", draft_temperature),
    )
    settings = RunSettings(
        suite=chosen.suite,
        origin=chosen.origin,
        question_ids=tuple(question.id for question in chosen.questions),
        model=model or "tiny",
        drafter=drafter or "eagle3" if model is None else drafter,
        system=system,
        settings=wanted.settings,
        max_tokens=max_tokens,
        seed=seed,
        repeats=repeats,
        questions_sha256=chosen.sha256,
    )
    if wanted.left_out:
        typer.echo(f"left out, not lossless: {', '.join(wanted.left_out)}", err=True)
    out = out or Path("runs") / chosen.suite
    plans = [setting.plan for setting in settings.settings]
    widest = next((plan for plan in plans if plan.speculative), plans[0])
    # Every setting and repeat answers the same prompts, and reads them itself.
    engine = EngineConfig(prefix_cache=False)
    llm = load_llm(model, drafter, widest, device, dtype, engine=engine)
    if llm.tokenizer.chat_template is None:
        raise InvalidArgument(
            "model", settings.model, "a model whose tokenizer has a chat template"
        )
    settings = msgspec.structs.replace(
        settings,
        template=_template(llm.tokenizer.chat_template),
        dtype=str(llm.dtype).removeprefix("torch."),
    )
    folder = RunFolder(out, settings, describe_environment(str(llm.device)))
    with progress(settings, len(folder.records)) as show:

        def keep(record: "Record") -> None:
            folder.add(record)
            show(record)

        run(
            llm.generate,
            chosen.questions,
            settings,
            done=[record.key for record in folder.records],
            on_record=keep,
        )
    results = folder.results()
    summaries = summarise(results)
    written = [write_results(out, results, summaries), write_markdown(out, results, summaries)]
    if plots:
        written += draw_all(results, out / "plots")
    typer.echo(plain_text(table(summaries)))
    report_errors(summaries)
    typer.echo("\n".join(f"wrote {path}" for path in written), err=True)


def _template(template: str | dict[str, str]) -> str:
    """Return a chat template as the tokenizer applies it; some have several, by name."""
    return template if isinstance(template, str) else template["default"]
