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
from eaglegbv.cli.terminal import has_colours, print_note, progress, styled
from eaglegbv.config import AUTO, PLAIN
from eaglegbv.eval.baselines import PLAIN as TRANSFORMERS
from eaglegbv.eval.baselines import Library, baseline
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.questions import load_questions, make_prompts
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import plain_text
from eaglegbv.eval.ways.calls import (
    AUTOMATIC,
    Caller,
    Calls,
    Grid,
    Prompts,
    engine_caller,
    faster,
    run_library,
)
from eaglegbv.llm import LLM
from eaglegbv.sampling import SamplingParams

app = opts.make_app()

SILENT = SamplingParams(temperature=0.2, top_p=0.9)
"""Settings for a model whose generation_config says nothing: those that SmolLM2's authors use."""
LONGEST = 300  # tokens of the first answer, which ends by itself before
SECONDS = 100.0  # after so many no further question is asked
WAYS = {
    TRANSFORMERS: "transformers' generate",
    "": "eaglegbv, plain decoding",
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
    questions: Annotated[int, opt("Questions in the table, 1 to 16.")] = 8,
    max_tokens: Annotated[int, opt("Tokens of an answer in the table.", "--max-tokens", "-n")] = 48,
    seed: opts.Seed = 0,
) -> None:
    """Answer a prompt with a small model, then time it beside transformers and plain decoding.

    Ctrl-C ends it with what was measured so far. The default plan is timed after its first answer,
    when the engine knows what steps cost.

    \b
    Examples:
      eaglegbv demo
      eaglegbv demo --model MODEL --questions 16
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
    observed: list[Observation] = []
    start = time.perf_counter()
    try:
        with progress(len(WAYS) * questions, "answer") as bar:
            for one in measure(llm, prompts, grid):
                observed.append(one)
                bar.update()
                every_way = len(observed) % len(WAYS) == 0
                if every_way and time.perf_counter() - start > SECONDS:
                    typer.echo(f"(asked {len(observed) // len(WAYS)}, as time was up)", err=True)
                    break
    except KeyboardInterrupt:
        _report(observed)
        raise typer.Exit(INTERRUPTED) from None
    _report(observed)
    given = "" if models.model is None else f" {name}"
    named = given and f" --model{given}"
    typer.echo(NEXT.format(model=given, named=named, served=name))


def _show(llm: LLM, prompt: str, params: SamplingParams) -> None:
    colours = DraftColours(llm)
    if has_colours():
        typer.echo(f"({legend()})")
    llm.observe(colours, trees=True)
    shown = answer(llm, messages(prompt), params, colours.show)
    llm.unobserve(colours)
    print_note(f"[{shown.footer(llm.plan)}]")
    if shown.completion.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def measure(llm: LLM, prompts: Prompts, grid: Grid) -> Iterator[Observation]:
    """Yield the calls of every way, which take turns."""
    library = Library(llm.model_name, dtype=llm.dtype, device=llm.device)
    generation = library.generation(baseline(TRANSFORMERS), ends=False)
    callers = [
        Caller(Setting(who=TRANSFORMERS), partial(run_library, generation)),
        engine_caller(llm, PLAIN),
        engine_caller(llm, AUTO),
    ]
    way = Calls(callers, partial(make_prompts, prompts), grid)
    for part in way(grid.settings(callers)):
        yield from part.measure()


def _report(observed: Sequence[Observation]) -> None:
    if observed:
        typer.echo(plain_text(demo_table(observed)))
        typer.echo(styled(conclusion(observed), bold=True))


def demo_table(observed: Sequence[Observation]) -> list[list[str]]:
    """Return the table's rows, headings first: each way, prompts included."""
    sums = Sums(observed)
    rows = [["", "tokens/s", "tokens a forward"]]
    for name in sums.settings:
        tokens, seconds = (sums.total(name, part) for part in ("answer_tokens", "wall_seconds"))
        forwards = sum(sums.total(name, f"plans.{plan}") for plan in sums.names("plans.", name))
        # The first token of an answer comes with the prompt, and of no decoding forward.
        decoded = tokens - sums.count(name)
        each = f"{decoded / forwards:.2f}" if forwards else "1.00"
        rows.append([_way(name), f"{tokens / seconds:.1f}", each])
    return rows


def _way(name: str) -> str:
    return WAYS.get(name.split()[0], WAYS[""])


def conclusion(observed: Sequence[Observation]) -> str:
    """Return in words what the default plan gained over transformers and over plain decoding."""
    gains = "; ".join(_gains(Sums(observed)))
    return f"The default plan, for text of the same distribution: {gains}."


def _gains(sums: Sums) -> Iterator[str]:
    names = {_way(name): name for name in sums.settings}
    for way in (WAYS[TRANSFORMERS], WAYS[""]):
        ratio = None
        if {way, WAYS[AUTOMATIC]} <= names.keys():
            ratio = faster(sums, names[WAYS[AUTOMATIC]], names[way])
        if ratio is None:
            yield f"too few questions to compare it with {way}"
            continue
        told = ratio.told("", "", ", which is not told apart")
        yield f"{ratio.value:.2f} times as fast as {way}{told}"
