"""``eaglegbv demo``: an answer with its drafts, and what speculation gains for this model."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import typer
from msgspec.structs import replace

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import INTERRUPTED, answer, messages
from eaglegbv.cli.chat import DraftColours, legend
from eaglegbv.cli.options import opt
from eaglegbv.cli.structs import Fields
from eaglegbv.config import AUTO, PLAIN
from eaglegbv.eval.baselines import PLAIN as TRANSFORMERS
from eaglegbv.eval.baselines import Library, baseline
from eaglegbv.eval.questions import load_questions, make_prompts
from eaglegbv.eval.report import plain_text
from eaglegbv.eval.throughput import (
    AUTOMATIC,
    BASELINE,
    Grid,
    Timing,
    Way,
    measure,
    paired_ratio,
    run_engine,
    run_library,
)
from eaglegbv.llm import LLM
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import grouped

app = opts.make_app()

SILENT = SamplingParams(temperature=0.2, top_p=0.9)
"""Settings for a model whose generation_config says nothing: those that SmolLM2's authors use."""
LONGEST = 300  # tokens of the first answer, which ends by itself before
SECONDS = 100.0  # after so many no further question is asked
WAYS = {
    TRANSFORMERS: "transformers' generate",
    BASELINE: "eaglegbv, plain decoding",
    AUTOMATIC: "eaglegbv, the default plan",
}
NEXT = """
Go on with:
  eaglegbv chat{model} --show-drafts
  eaglegbv bench mt-bench{named} --questions-set builtin --questions 8
  eaglegbv serve {served} --backend local"""


@app.command()
def demo(
    prompt: Annotated[str, opt("The prompt to answer first.", "--prompt", "-p")] = (
        "Why is the sky blue? Answer in two sentences."
    ),
    *,
    models: Annotated[opts.Models, Fields("model")],
    questions: Annotated[int, opt("Questions in the table, 1 to 16.")] = 6,
    max_tokens: Annotated[int, opt("Tokens of an answer in the table.", "--max-tokens", "-n")] = 48,
    seed: opts.Seed = 0,
) -> None:
    """Answer a prompt with a small model, then time it beside transformers and plain decoding.

    Ctrl-C ends it with what was measured so far. The default plan is timed after its first answer,
    when the engine knows what steps cost.
    """
    chosen = load_questions("builtin").first(questions)
    llm = models.load(AUTO, opts.UNCACHED)
    params = llm.sampling_defaults
    if params == SamplingParams():
        params = SILENT
    typer.echo(f"> {prompt}")
    params = replace(params, max_tokens=LONGEST, seed=seed)
    _show(llm, prompt, params)
    name = models.named.name
    typer.echo(f"\n{name}, {questions} questions one at a time, {max_tokens} tokens each:")
    grid = Grid(
        batches=(1,),
        temperature=(params.temperature,),
        tokens=max_tokens,
        repeats=1,
        prompts=questions,
        seed=seed,
    )
    prompts = [llm.encode(messages(question.turns[0])) for question in chosen.questions]
    timings: list[Timing] = []
    start = time.perf_counter()
    try:
        with opts.progress(len(WAYS) * questions, "answer") as bar:
            for timing in measure(_ways(llm), partial(make_prompts, prompts), grid):
                timings.append(timing)
                bar.update()
                every_way = len(timings) % len(WAYS) == 0
                if every_way and time.perf_counter() - start > SECONDS:
                    typer.echo(f"(asked {len(timings) // len(WAYS)}, as time was up)", err=True)
                    break
    except KeyboardInterrupt:
        _report(timings)
        raise typer.Exit(INTERRUPTED) from None
    _report(timings)
    given = "" if models.model is None else f" {name}"
    named = given and f" --model{given}"
    typer.echo(NEXT.format(model=given, named=named, served=name))


def _show(llm: LLM, prompt: str, params: SamplingParams) -> None:
    colours = DraftColours(llm)
    if opts.has_colours():
        typer.echo(f"({legend()})")
    llm.observe(colours, trees=True)
    shown = answer(llm, messages(prompt), params, colours.show)
    llm.unobserve(colours)
    opts.print_note(f"[{shown.footer(llm.plan)}]")
    if shown.completion.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _ways(llm: LLM) -> list[Way]:
    library = Library(llm.model_name, dtype=llm.dtype, device=llm.device)
    generation = library.generation(baseline(TRANSFORMERS), ends=False)
    return [
        Way(TRANSFORMERS, partial(run_library, generation)),
        Way(BASELINE, partial(run_engine, llm, PLAIN)),
        Way(AUTOMATIC, partial(run_engine, llm, AUTO)),
    ]


def _report(timings: Sequence[Timing]) -> None:
    if timings:
        typer.echo(plain_text(demo_table(timings)))
        typer.echo(opts.styled(conclusion(timings), bold=True))


def demo_table(timings: Sequence[Timing]) -> list[list[str]]:
    """Return the table's rows, headings first: each way, prompts included."""
    rows = [["", "tokens/s", "tokens a forward"]]
    for way, calls in grouped(timings, lambda t: t.way).items():
        tokens = sum(t.tokens for t in calls)
        seconds = sum(t.seconds for t in calls)
        forwards = sum(sum(t.plans.values()) for t in calls)
        # The first token of an answer comes with the prompt, and of no decoding forward.
        decoded = tokens - len(calls)
        each = f"{decoded / forwards:.2f}" if forwards else "1.00"
        rows.append([WAYS[way], f"{tokens / seconds:.1f}", each])
    return rows


def conclusion(timings: Sequence[Timing]) -> str:
    """Return in words what the default plan gained over transformers and over plain decoding."""
    gains = "; ".join(_gains(timings))
    return f"The default plan, for text of the same distribution: {gains}."


def _gains(timings: Sequence[Timing]) -> Iterator[str]:
    for way in (TRANSFORMERS, BASELINE):
        ratio = paired_ratio(timings, AUTOMATIC, way)
        if ratio is None:
            yield f"too few questions to compare it with {WAYS[way]}"
            continue
        told = ratio.told("", "", ", which is not told apart")
        yield f"{ratio.value:.2f} times as fast as {WAYS[way]}{told}"
