"""``eaglegbv bench batch`` and ``bench step``: tokens a second by batch, and a step by phase."""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import (
    Models,
    check_out,
    check_verifier,
    entries,
    member,
    opt,
    progress,
    write_json,
)
from eaglegbv.config import AUTO, PLAIN, EngineConfig, Plan, Planning
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.devices import dtype_name, place_of
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval.baselines import EXPECTED, Library, baseline
from eaglegbv.eval.questions import PromptSource, load_questions
from eaglegbv.eval.random_models import SHAPES, StepSetting, build_rig
from eaglegbv.eval.records import describe_environment
from eaglegbv.eval.report import plain_text
from eaglegbv.eval.results import BatchResults
from eaglegbv.eval.step_bench import measure_machine, step_table, time_steps
from eaglegbv.eval.throughput import (
    EngineWay,
    Grid,
    TransformersWay,
    WatchedWay,
    Way,
    choice_lines,
    measure,
    paired_lines,
    rate_table,
)
from eaglegbv.fused_linears import Quantization
from eaglegbv.llm import LLM

EXPLAINED = (
    "shares of all steps of all answers; best: the most tokens a second by what is known; "
    "learning: too\nlittle is known of such steps; probe: to see whether what is known still holds"
)


def batch(
    batches: Annotated[str, opt("Numbers of prompts at once.")] = "1,2,4,8,16",
    contexts: Annotated[
        str, opt("Prompt lengths in tokens; 0 for the questions as they are.")
    ] = "0",
    temperature: opts.Temperatures = "1.0",
    ways: Annotated[
        str,
        opt(
            "What to compare: auto, none, PATHSxDEPTH for a fixed plan of --verifier, "
            "transformers, lookup:TOKENS, exit:LAYERS:TOKENS or assistant:FOLDER for its "
            "assisted generation."
        ),
    ] = "auto,3x4,none,transformers",
    verifier: opts.Verifier = "otbv",
    tokens: Annotated[int, opt("Tokens of an answer.")] = 64,
    repeats: opts.Repeats = 3,
    prompts: Annotated[
        int, opt("Least number of prompts per repeat, batch after batch, spread over the set.")
    ] = 8,
    questions_set: opts.QuestionsSet = "mt-bench",
    data: opts.QuestionData = None,
    assistant: Annotated[
        str | None, opt("Folder of a small model, to add assisted generation with it.")
    ] = None,
    seed: opts.Seed = 0,
    model: opts.Model = None,
    drafter: opts.Drafter = None,
    device: opts.Device = None,
    dtype: opts.Dtype = None,
    compile_backend: opts.CompileBackend = None,
    draft_quantization: opts.DraftQuantization = "auto",
    explain: Annotated[
        bool, opt("Also print which plans auto used for each batch size, and why.", "--explain")
    ] = False,
    out: Annotated[Path | None, opt("JSON file for all timings.")] = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    All answers have the same length. Ratios are computed within each repeat before the median.
    """
    grid = Grid(
        batches=entries("batches", batches, int),
        contexts=entries("contexts", contexts, int),
        temperatures=entries("temperature", temperature, float),
        tokens=tokens,
        repeats=repeats,
        prompts=prompts,
        seed=seed,
    )
    # Check before loading models, which may take minutes.
    check_verifier(verifier)
    check_out(out)
    known = load_questions(questions_set, data)
    most = max(count * grid.calls(count) for count in grid.batches)
    questions = known.first(min(most, len(known.questions))).questions
    models = Models(
        model=model,
        drafter=drafter,
        device=device,
        dtype=dtype,
        compile_backend=compile_backend,
        draft_quantization=member("draft-quantization", draft_quantization, Quantization),
    )
    named = entries("ways", ways, str) + ([] if assistant is None else [f"assistant:{assistant}"])
    if any(name == "auto" or _FIXED.fullmatch(name) for name in named):
        models = models.or_lookup(AUTO)
    engines = _Engines(models)
    chosen = [_way(engines, name, verifier) for name in named]
    source = PromptSource.of(engines.plain, [question.turns[0] for question in questions])
    watched = [way for way in chosen if isinstance(way, WatchedWay)]
    timings = []
    cells = len(grid.contexts) * len(grid.temperatures) * grid.repeats * len(chosen)
    with progress(cells * sum(map(grid.calls, grid.batches)), "call") as bar:
        for timing in measure(chosen, source.take, grid):
            timings.append(timing)
            for way in watched:
                way.note(timing)
            rate = f"{timing.way}, batch {timing.batch}: {timing.rate:.0f} tokens/s"
            bar.update(note=rate)
    typer.echo(plain_text(rate_table(timings)))
    lines = [line for way in watched for line in choice_lines(way)]
    lines += paired_lines(timings) if lines else []
    if explain and lines:
        typer.echo("\n".join(["", *lines, EXPLAINED]))
    if out is not None:
        pair = models.named
        results = BatchResults(
            timings=tuple(timings),
            environment=describe_environment(str(engines.plain.device)),
            model=pair.name,
            drafter=pair.drafter_name or "",
            verifier=verifier,
            suite=questions_set,
            compile_backend=compile_backend or "",
            dtype=dtype_name(engines.plain.dtype),
            draft_quantization=engines.draft_quantization,
        )
        write_json(out, results)


class _Engines:
    """What the ways run on, each loaded once and only when it is needed."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @cached_property
    def plain(self) -> LLM:
        """The engine of plain decoding, which need not keep anything for a drafter."""
        return self._load(PLAIN)

    @cached_property
    def drafting(self) -> LLM:
        """The engine with a drafter."""
        return self._load(AUTO)

    @cached_property
    def library(self) -> Library:
        """The target in transformers' own loop."""
        llm = self.plain
        return Library(llm.model_name, dtype=llm.dtype, device=llm.device)

    @property
    def draft_quantization(self) -> str:
        """How the drafter's weights are held; empty if nothing was drafted."""
        return self.drafting.draft_quantization if "drafting" in vars(self) else ""

    def _load(self, plan: Planning) -> LLM:
        # Prompts recur in every repeat, and every way must read them.
        engine = EngineConfig(prefix_cache=False, kv_slots=65_536, max_batch=256)
        return self._models.load(plan, engine)


_FIXED = re.compile(r"(\d+)x(\d+)")
"""A fixed plan by its paths and depth."""


def _way(engines: _Engines, name: str, verifier: str) -> Way:
    """Return the way with a name; a fixed plan has this verifier."""
    if name == "none":
        return EngineWay(name, engines.plain, PLAIN)
    if name == "auto":
        return WatchedWay(EngineWay(name, engines.drafting, AUTO))
    if found := _FIXED.fullmatch(name):
        plan = Plan(verifier=verifier, paths=int(found[1]), depth=int(found[2]))
        return EngineWay(name, engines.drafting, plan)
    try:
        chosen = baseline(name, argument="ways")
    except InvalidArgument:
        expected = f"auto, none, PATHSxDEPTH, {EXPECTED}"
        raise InvalidArgument("ways", name, expected) from None
    return TransformersWay(name, engines.library.generation(chosen, ends=False))


def step(
    shape: Annotated[
        str, opt("tiny or llama-3.1-8b; the sizes below replace those of the shape.")
    ] = "tiny",
    hidden: Annotated[int | None, opt("Width of a hidden state.")] = None,
    layers: Annotated[int | None, opt("Number of decoder layers.")] = None,
    heads: Annotated[int | None, opt("Number of query heads.")] = None,
    kv_heads: Annotated[int | None, opt("Number of key and value heads.")] = None,
    intermediate: Annotated[int | None, opt("Width of feed-forward layers.")] = None,
    vocab: Annotated[int | None, opt("Number of tokens.")] = None,
    draft_vocab: Annotated[int | None, opt("Tokens that the head can draft.")] = None,
    verifier: opts.Verifier = "otbv",
    paths: Annotated[int, opt("Drafted paths, K.")] = 4,
    depth: opts.Depth = 6,
    batch: Annotated[int, opt("Number of requests.")] = 1,
    context: Annotated[int, opt("Tokens of each prompt.")] = 512,
    temperature: opts.Temperature = 1.0,
    steps: Annotated[int, opt("Number of steps to time.")] = 30,
    device: opts.Device = None,
    dtype: opts.Dtype = None,
    compile_backend: opts.CompileBackend = None,
    cuda_graphs: opts.CudaGraphs = "auto",
    out: Annotated[Path | None, opt("JSON file for the figures.")] = None,
) -> None:
    """Time the phases of a step with random weights, for a target and an EAGLE-3 head.

    The floor is the time to read weights, keys and values once, or to multiply, at the bandwidth
    and the rate measured on this machine. Random weights accept little, but times do not depend on
    that.
    """
    if shape not in SHAPES:
        raise InvalidArgument("shape", shape, one_of(SHAPES, shape))
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "intermediate": intermediate,
        "vocab": vocab,
        "draft_vocab": draft_vocab,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    model = msgspec.structs.replace(SHAPES[shape], **given)
    check_verifier(verifier)
    check_out(out)
    plan = Plan(verifier=verifier, paths=paths, depth=depth)
    setting = StepSetting(
        plan=plan, batch=batch, context=context, temperature=temperature, steps=steps
    )
    where, precision = place_of(device, dtype)
    rig = build_rig(
        model,
        setting,
        dtype=precision,
        device=where,
        compile_backend=compile_backend,
        graphs=member("cuda-graphs", cuda_graphs, GraphMode),
    )
    report = time_steps(rig, setting, measure_machine(precision, where))
    machine = report.machine
    typer.echo(plain_text(step_table(report)))
    launched = "" if report.launches is None else f", {report.launches} launches"
    typer.echo(
        f"{report.operations} operations a step{launched}; "
        f"{report.weights / 1e9:.2f} GB of weights; "
        f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.flops / 1e12:.2f} TFLOP/s measured; "
        f"{report.block_efficiency:.2f} tokens a step and request"
    )
    if out is not None:
        write_json(out, {"shape": model, "setting": setting, "report": report})
