"""``eaglegbv demo``: an answer, then the figures of several verifiers on a few questions."""

from typing import Annotated

import typer

from eaglegbv.cli.generate import messages, print_answer
from eaglegbv.cli.measuring import progress, report_errors, run_settings
from eaglegbv.cli.options import MaxTokens, load_llm

VERIFIERS = ("none", "token", "block", "gbv", "otbv")


def demo(
    prompt: Annotated[
        str, typer.Option(help="The prompt to answer first.")
    ] = "Give three tips for a good night's sleep.",
    questions: Annotated[int, typer.Option(help="Questions in the table, 1 to 16.")] = 4,
    max_tokens: MaxTokens = 64,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
) -> None:
    """Answer a prompt with the packaged tiny model, then compare verifiers on a few questions."""
    from eaglegbv.config import Plan
    from eaglegbv.eval.grid import grid
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import Record, Results, describe_environment
    from eaglegbv.eval.report import plain_text, table
    from eaglegbv.eval.runner import run
    from eaglegbv.eval.statistics import summarise
    from eaglegbv.loading import named_models
    from eaglegbv.sampling import SamplingParams

    plan = Plan()
    chosen = load_questions("builtin").first(questions)
    settings = run_settings(
        chosen,
        named_models(None, None),
        grid(VERIFIERS, [plan.paths], [plan.depth], [1.0], base=plan).settings,
        max_tokens=max_tokens,
        seed=seed,
    )
    llm = load_llm(None, None, plan, None, None)
    typer.echo(f"> {prompt}")
    params = SamplingParams(temperature=0.7, max_tokens=2 * max_tokens, seed=seed)
    print_answer(llm, messages(prompt), params, stream=True)

    typer.echo(
        f"\nThe same tiny model on {questions} two-turn questions, temperature 1, one at a time:"
    )
    records: list[Record] = []
    with progress(settings) as show:

        def keep(record: Record) -> None:
            records.append(record)
            show(record)

        run(llm.generate, chosen.questions, settings, on_record=keep)
    environment = describe_environment(str(llm.device))
    summaries = summarise(Results(settings=settings, environment=environment, records=records))
    typer.echo(plain_text(table(summaries, intervals=False)))
    report_errors(summaries)
    typer.echo(
        "none: plain decoding; K paths of L drafted tokens; block efficiency: tokens per forward "
        "of\nthe model; with prefill: the speed-up of everything, prompts included. Every setting "
        "draws\nfrom the same distribution; only speed differs. A short run is a noisy one: see `bench`."
    )
