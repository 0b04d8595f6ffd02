"""``eaglegbv demo``: an answer, and what speculation gains for the model that gave it."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from msgspec.structs import replace

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import answer, messages, print_text
from eaglegbv.cli.options import opt
from eaglegbv.cli.structs import Fields
from eaglegbv.config import AUTO, PLAIN
from eaglegbv.eval.baselines import PLAIN as TRANSFORMERS
from eaglegbv.eval.baselines import Library, baseline
from eaglegbv.eval.questions import load_questions, make_prompts
from eaglegbv.eval.report import plain_text, with_interval
from eaglegbv.eval.statistics import Estimate
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

TEMPERATURES = (0.2, 1.0)
SILENT = SamplingParams(temperature=0.2, top_p=0.9)
"""Settings for a model whose generation_config says nothing: those that SmolLM2's authors use."""

WAYS = {
    BASELINE: "plain decoding",
    TRANSFORMERS: "transformers' generate",
    AUTOMATIC: "the default plan",
}


@app.command()
def demo(
    prompt: Annotated[str, opt("The prompt to answer first.")] = "Why is the sky blue?",
    *,
    models: Annotated[opts.Models, Fields("model")],
    questions: Annotated[int, opt("Questions in the table, 1 to 16.")] = 6,
    max_tokens: Annotated[int, opt("Tokens of an answer in the table; twice that first.")] = 48,
    seed: opts.Seed = 0,
) -> None:
    """Answer a prompt with a small model, then compare its speed with and without drafts."""
    chosen = load_questions("builtin").first(questions)
    grid = Grid(
        batches=(1,),
        contexts=(0,),
        temperature=TEMPERATURES,
        tokens=max_tokens,
        repeats=1,
        prompts=questions,
        seed=seed,
    )
    llm = models.load(AUTO, opts.UNCACHED)
    params = llm.sampling_defaults
    if params == SamplingParams():
        params = SILENT
    typer.echo(f"> {prompt}")
    params = replace(params, max_tokens=2 * max_tokens, seed=seed)
    answer(llm, messages(prompt), params, print_text)
    typer.echo(
        f"\n{models.named.name}, {questions} questions one at a time, {max_tokens} tokens each:"
    )
    prompts = [llm.encode(messages(question.turns[0])) for question in chosen.questions]
    timings: list[Timing] = []
    with opts.progress(len(TEMPERATURES) * len(WAYS) * questions, "answer") as bar:
        for timing in measure(_ways(llm), partial(make_prompts, prompts), grid):
            timings.append(timing)
            bar.update()
    typer.echo(plain_text(demo_table(timings)))
    typer.echo(conclusion(timings))


def _ways(llm: LLM) -> list[Way]:
    library = Library(llm.model_name, dtype=llm.dtype, device=llm.device)
    generation = library.generation(baseline(TRANSFORMERS), ends=False)
    return [
        Way(BASELINE, partial(run_engine, llm, PLAIN)),
        Way(TRANSFORMERS, partial(run_library, generation)),
        Way(AUTOMATIC, partial(run_engine, llm, AUTO)),
    ]


def demo_table(timings: Sequence[Timing]) -> list[list[str]]:
    """Return the table's rows, headings first: each way at each temperature, prompts included."""
    rows = [["", "tokens/s", "over plain decoding", "tokens a forward"]]
    for cell, calls in grouped(timings, lambda t: t.cell).items():
        for way, timings_of_way in grouped(calls, lambda t: t.way).items():
            tokens = sum(t.tokens for t in timings_of_way)
            rate = tokens / sum(t.seconds for t in timings_of_way)
            forwards = sum(sum(t.plans.values()) for t in timings_of_way)
            # The first token of an answer comes with the prompt, and of no decoding forward.
            decoded = tokens - len(timings_of_way)
            each = f"{decoded / forwards:.2f}" if forwards else "1.00"
            ratio: Estimate | None = Estimate.exactly(1.0)
            if way != BASELINE:
                ratio = paired_ratio(calls, way, BASELINE)
            name = f"T = {cell.temperature:g}, {WAYS[way]}"
            rows.append([name, f"{rate:.1f}", with_interval(ratio), each])
    return rows


def conclusion(timings: Sequence[Timing]) -> str:
    """Return in words what the default plan gained over plain decoding."""
    parts = []
    for cell, calls in grouped(timings, lambda t: t.cell).items():
        ratio = paired_ratio(calls, AUTOMATIC, BASELINE)
        heat = f"at T = {cell.temperature:g}"
        if ratio is None:
            parts.append(f"{heat} one question is too few to tell")
        else:
            faster = ratio.told("faster than", "slower than", "not told apart from")
            parts.append(f"{heat} {ratio.value:.2f} times as fast ({faster} plain decoding)")
    return f"Gained by the default plan, for text of the same distribution: {'; '.join(parts)}."
