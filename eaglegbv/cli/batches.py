"""``eaglegbv bench batch``: tokens a second by batch and context, compared with plain decoding."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.options import (
    CompileBackend,
    Device,
    Drafter,
    DraftQuantization,
    Dtype,
    Model,
    QuestionData,
    QuestionsSet,
    check_out,
    check_verifier,
    integers,
    load_llm,
    names,
    numbers,
    quantization,
)
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eaglegbv.config import Planning
    from eaglegbv.eval.baselines import Baseline, Library
    from eaglegbv.eval.questions import PromptSource
    from eaglegbv.eval.results import BatchResults
    from eaglegbv.eval.throughput import Grid, Timing, Way
    from eaglegbv.fused_linears import Quantization
    from eaglegbv.llm import LLM

EXPLAINED = (
    "shares of all steps of all answers; best: the most tokens a second by what is known; "
    "learning: too\nlittle is known of such steps; probe: to see whether what is known still holds"
)


def batch(
    batches: Annotated[str, typer.Option(help="Numbers of prompts at once.")] = "1,2,4,8,16",
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens; 0 for the questions as they are.")
    ] = "0",
    temperature: Annotated[str, typer.Option(help="Sampling temperatures.")] = "1.0",
    ways: Annotated[
        str,
        typer.Option(
            help="What to compare: auto, none, PATHSxDEPTH for a fixed plan of --verifier, "
            "transformers, lookup:TOKENS, exit:LAYERS:TOKENS or assistant:FOLDER for its "
            "assisted generation."
        ),
    ] = "auto,3x4,none,transformers",
    verifier: Annotated[
        str, typer.Option(help="Verifier of the fixed plans, as in generate.")
    ] = "otbv",
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="How many times to run everything.")] = 3,
    prompts: Annotated[
        int,
        typer.Option(
            help="Least number of prompts per repeat, batch after batch, spread over the set."
        ),
    ] = 8,
    questions_set: QuestionsSet = "mt-bench",
    data: QuestionData = None,
    assistant: Annotated[
        str | None,
        typer.Option(help="Folder of a small model, to add assisted generation with it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    compile_backend: CompileBackend = None,
    draft_quantization: DraftQuantization = "auto",
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Also print which plans auto used for each batch size, and why."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for all timings.")] = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    All answers have the same length. Ratios are computed within each repeat before the median.
    """
    from eaglegbv.devices import dtype_name
    from eaglegbv.eval.questions import PromptSource
    from eaglegbv.eval.records import describe_environment
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.results import BatchResults
    from eaglegbv.eval.throughput import Grid, rate_table, summarise
    from eaglegbv.loading import named_models

    grid = Grid(
        batches=integers("batches", batches),
        contexts=integers("contexts", contexts),
        temperatures=numbers("temperature", temperature),
        tokens=tokens,
        repeats=repeats,
        prompts=prompts,
        seed=seed,
    )
    # Check before loading models, which may take minutes.
    check_verifier(verifier)
    check_out(out)
    questions = _questions(questions_set, data, grid)
    held = quantization(draft_quantization)
    fleet = _Fleet(
        model, drafter, device, dtype, verifier, compile_backend=compile_backend, quantization=held
    )
    wanted = names("ways", ways)
    if assistant is not None:
        wanted.append(f"assistant:{assistant}")
    chosen = [fleet.way(name) for name in wanted]
    timings = _measure(chosen, PromptSource.of(fleet.plain, questions), grid)
    typer.echo(plain_text(rate_table(summarise(timings), lengths=any(grid.contexts))))
    if explain:
        _explain(chosen, timings)
    if out is not None:
        models = named_models(model, drafter)
        results = BatchResults(
            timings=tuple(timings),
            environment=describe_environment(str(fleet.plain.device)),
            model=models.name,
            drafter=models.drafter_name or "",
            verifier=verifier,
            suite=questions_set,
            compile_backend=compile_backend or "",
            dtype=dtype_name(fleet.plain.dtype),
            draft_quantization=fleet.draft_quantization,
        )
        _write(out, results)


def _questions(questions_set: str, data: Path | None, grid: "Grid") -> list[str]:
    """Return as many first turns of questions as the largest batch needs, or all if fewer."""
    from eaglegbv.eval.questions import load_questions

    most = max(batch * grid.calls(batch) for batch in grid.batches)
    chosen = load_questions(questions_set, data)
    few = chosen.first(min(most, len(chosen.questions)))
    return [question.turns[0] for question in few.questions]


def _measure(ways: "list[Way]", source: "PromptSource", grid: "Grid") -> "list[Timing]":
    """Time the ways while showing a progress bar."""
    from tqdm import tqdm

    from eaglegbv.eval.throughput import WatchedWay, measure

    watched = [way for way in ways if isinstance(way, WatchedWay)]
    timings = []
    cells = len(grid.contexts) * len(grid.temperatures) * grid.repeats * len(ways)
    calls = cells * sum(map(grid.calls, grid.batches))
    with tqdm(total=calls, unit="call", disable=None) as bar:
        for timing in measure(ways, source.take, grid):
            timings.append(timing)
            for way in watched:
                way.note(timing)
            bar.set_postfix_str(
                f"{timing.way}, batch {timing.batch}: {timing.rate:.0f} tokens/s", refresh=False
            )
            bar.update()
    return timings


def _explain(ways: "Sequence[Way]", timings: "Sequence[Timing]") -> None:
    """Print which plans the engine chose, and why, and how they compare with the best way."""
    from eaglegbv.eval.throughput import WatchedWay, choice_lines, paired_lines

    lines = [line for way in ways if isinstance(way, WatchedWay) for line in choice_lines(way)]
    lines += paired_lines(timings) if lines else []
    if lines:
        typer.echo("\n".join(["", *lines, EXPLAINED]))


def _write(out: Path, results: "BatchResults") -> None:
    import msgspec

    out.write_bytes(msgspec.json.encode(results))
    typer.echo(f"wrote {out}", err=True)


class _Fleet:
    """The models of the ways, each loaded once and only when it is needed."""

    def __init__(
        self,
        model: str | None,
        drafter: str | None,
        device: str | None,
        dtype: str | None,
        verifier: str,
        *,
        compile_backend: str | None,
        quantization: "Quantization",
    ) -> None:
        from eaglegbv.config import PLAIN

        self._names = model, drafter, device, dtype
        self._verifier = verifier
        self._compile_backend = compile_backend
        self._quantization = quantization
        # Plain decoding has a separate engine, which need not keep anything for a drafter.
        self.plain = self._load(PLAIN)
        self._drafting: LLM | None = None
        self._library: Library | None = None

    def way(self, name: str) -> "Way":
        """Return the way with a name."""
        from eaglegbv.config import AUTO, PLAIN, Plan
        from eaglegbv.eval.throughput import EngineWay, TransformersWay, WatchedWay

        if name == "none":
            return EngineWay(name, self.plain, PLAIN)
        if name == "auto":
            return WatchedWay(EngineWay(name, self.drafting, AUTO))
        if found := re.fullmatch(r"(\d+)x(\d+)", name):
            paths, depth = map(int, found.groups())
            plan = Plan(verifier=self._verifier, paths=paths, depth=depth)
            return EngineWay(name, self.drafting, plan)
        return TransformersWay(name, self.library.generation(_baseline(name), ends=False))

    @property
    def drafting(self) -> "LLM":
        """The engine with a drafter."""
        from eaglegbv.config import AUTO

        if self._drafting is None:
            self._drafting = self._load(AUTO)
        return self._drafting

    @property
    def draft_quantization(self) -> str:
        """How the drafter's weights are held; empty if nothing was drafted."""
        return "" if self._drafting is None else self._drafting.draft_quantization

    def _load(self, plan: "Planning") -> "LLM":
        from eaglegbv.config import EngineConfig

        model, drafter, device, dtype = self._names
        # Prompts recur in every repeat, and every way must read them.
        config = EngineConfig(
            prefix_cache=False,
            kv_slots=65_536,
            max_batch=256,
            draft_quantization=self._quantization,
        )
        return load_llm(
            model,
            drafter,
            plan,
            device,
            dtype,
            engine=config,
            compile_backend=self._compile_backend,
        )

    @property
    def library(self) -> "Library":
        """The target in transformers' own loop."""
        from eaglegbv.eval.baselines import Library

        if self._library is None:
            name, dtype, device = self.plain.model_name, self.plain.dtype, self.plain.device
            self._library = Library(name, dtype=dtype, device=device)
        return self._library


def _baseline(name: str) -> "Baseline":
    from eaglegbv.eval.baselines import EXPECTED, baseline

    try:
        return baseline(name, argument="ways")
    except InvalidArgument:
        expected = f"auto, none, PATHSxDEPTH, {EXPECTED}"
        raise InvalidArgument("ways", name, expected) from None
