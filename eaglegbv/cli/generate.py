"""``eaglegbv generate``: answer one prompt."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import (
    INTERRUPTED,
    Messages,
    answer,
    messages,
    print_nothing,
    print_text,
    request_params,
)
from eaglegbv.cli.options import Models
from eaglegbv.cli.structs import Fields
from eaglegbv.cli.terminal import print_note
from eaglegbv.config import EngineConfig, Plan, PlanChoices
from eaglegbv.errors import InvalidArgument
from eaglegbv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from eaglegbv.llm import LLM
    from eaglegbv.text import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be answered.

    Attributes:
        prompt: The prompt.
        prompt_file: File with it; '-' reads standard input.
        system: System message before the prompt.
        raw: Continue the prompt as it is, without a chat template.
    """

    prompt: str | None = None
    prompt_file: Path | None = None
    system: str | None = None
    raw: bool = False

    def joined(self, prompt: str | None) -> "Prompt":
        """Return it with a prompt that was given without an option, if one was."""
        if prompt is not None and self.prompt is not None:
            raise InvalidArgument("prompt", self.prompt, "no second prompt")
        return self if prompt is None else replace(self, prompt=prompt)

    def read(self) -> str | Messages:
        """Return it as an LLM takes it.

        Raises:
            InvalidArgument: There is none or more than one, or its file cannot be read.
        """
        text = self.prompt
        if self.prompt is None and self.prompt_file is None:
            raise InvalidArgument("prompt", text, "PROMPT, --prompt TEXT or --prompt-file FILE")
        if self.prompt_file is not None:
            text = self._read_file(self.prompt_file)
        if not text or not text.strip():
            raise InvalidArgument("prompt", text, "a text that is not empty")
        if self.raw and self.system is not None:
            expected = "none with --raw, which has no chat template"
            raise InvalidArgument("system", self.system, expected)
        return text if self.raw else messages(text, self.system)

    def _read_file(self, path: Path) -> str:
        if self.prompt is not None:
            expected = "--prompt or --prompt-file, not both"
            raise InvalidArgument("prompt-file", str(path), expected)
        try:
            stdin = str(path) == "-"
            content = typer.get_binary_stream("stdin").read() if stdin else path.read_bytes()
            return content.decode("utf-8-sig")  # without a byte-order mark
        except (OSError, UnicodeDecodeError) as error:
            expected = f"a readable file ({error})"
            raise InvalidArgument("prompt-file", str(path), expected) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is written of an answer.

    Attributes:
        stream: Print the text as it comes.
        json: Print one JSON object: text, tokens, metrics.
        trace: File for a timeline of the engine's steps, a Chrome trace (Perfetto).
        trace_trees: Add every draft tree to the trace; 'eaglegbv view' draws them.
        quiet: Print the answer alone: no lines on loading, no footer.
    """

    stream: bool = True
    json: bool = False
    trace: Path | None = None
    trace_trees: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Raise InvalidArgument if there is no file for the trace, or none that can be written."""
        if self.trace_trees and self.trace is None:
            raise InvalidArgument("trace-trees", True, "--trace FILE to write them to")
        opts.check_out(self.trace, "trace")

    @contextmanager
    def tracing(self, llm: "LLM") -> Iterator[None]:
        """Write the trace, if one is wanted, within this context."""
        if self.trace is None:
            yield
            return
        from eaglegbv.trace import Tracer

        with Tracer(self.trace, decode=llm.decode if self.trace_trees else None) as tracer:
            llm.observe(tracer, trees=self.trace_trees)
            yield
        opts.print_wrote(self.trace)


Sampling = Annotated[
    dict[str, Any],
    Fields(
        of=SamplingParams,
        without=("n", "logit_bias", "bad_words", "prompt_logprobs", "logprobs_mode"),
        shown="the model's own, or {}",
    ),
]


def generate(
    words: Annotated[
        str | None, typer.Argument(help="The prompt.", metavar="[PROMPT]", show_default=False)
    ] = None,
    *,
    prompt: Prompt,
    models: Models,
    plan: PlanChoices,
    sampling: Sampling,
    engine: Annotated[EngineConfig, Fields("cuda_graphs")],
    output: Output,
) -> None:
    """Answer a prompt; the text follows the target's distribution, whatever drafts and verifies.

    Ctrl-C ends the answer: the text so far stays, with its figures. A seed reproduces a text.
    Where --verifier, --paths, --depth, --widths or --draft-sampling is given, the seed of a text
    without one is printed.

    \b
    Examples:
      eaglegbv generate "Why is the sky blue?"
      eaglegbv generate "Name three fruits." -m MODEL --drafter HEAD -t 0.7 -n 64
    """
    request = prompt.joined(words).read()
    output.check()
    SamplingParams(**sampling)  # what is wrong is found before minutes go by with loading
    planning = opts.planning_of(plan)
    with opts.quietly(output.quiet):
        llm = models.load(planning, engine)
    params = request_params(llm, sampling)
    seeded = isinstance(planning, Plan) and params.seed is None
    if seeded:
        from eaglegbv.rng import request_seed

        # The seed that the engine would derive, so that it can be printed.
        params = msgspec.structs.replace(params, seed=request_seed(engine.seed, 0))
    with output.tracing(llm):
        start = time.perf_counter()
        streamed = output.stream and not output.json
        shown = answer(llm, request, params, print_text if streamed else print_nothing)
        completion = shown.completion
        if output.json:
            opts.print_json(_facts(llm, completion, time.perf_counter() - start))
        elif not output.stream:
            typer.echo(completion.text)
        if not (output.json or output.quiet):
            repeats = f", --seed {params.seed} repeats it" if seeded and not params.greedy else ""
            print_note(f"[{shown.footer(planning)}{repeats}]")
    if completion.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _facts(llm: "LLM", completion: "Completion", seconds: float) -> dict[str, object]:
    facts, metrics = completion.to_dict(), completion.metrics
    for name in ("block_efficiency", "acceptance_length", "acceptance_by_depth", "decode_seconds"):
        facts["metrics"][name] = getattr(metrics, name)
    return {**facts, "plan": llm.plan, "seconds": seconds}
