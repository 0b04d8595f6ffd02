"""``eaglegbv bench batch`` and ``bench step``: tokens a second by batch, and a step by phase."""

import re
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.generate import messages
from eaglegbv.cli.options import opt
from eaglegbv.config import AUTO, PLAIN, EngineConfig, Plan, plan_name
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.devices import dtype_name, place_of
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval import random_models, step_bench, throughput
from eaglegbv.eval.baselines import EXPECTED, Library, baseline
from eaglegbv.eval.questions import load_questions, make_prompts
from eaglegbv.eval.random_models import PairEngine
from eaglegbv.eval.records import describe_environment
from eaglegbv.eval.report import plain_text
from eaglegbv.eval.results import BatchResults
from eaglegbv.llm import LLM
from eaglegbv.loading import Pair, load_pair

EXPLAINED = (
    "shares of all steps of all answers; best: the most tokens a second by what is known; "
    "learning: too\nlittle is known of such steps; probe: to see whether what is known still holds"
)
MADE_PROMPT = 64  # tokens of a prompt of made models, where none are asked for


def batch(
    batches: Annotated[str, opt("Numbers of prompts at once.")] = "1,2,4,8,16",
    contexts: Annotated[str, opt("Tokens of a prompt; 0: the questions as they are.")] = "0",
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
    prompts: Annotated[int, opt("Least number of prompts of a repeat.")] = 8,
    questions_set: opts.QuestionsSet = "mt-bench",
    data: opts.QuestionData = None,
    seed: opts.Seed = 0,
    model: opts.Model = None,
    drafter: opts.Drafter = None,
    shape: Annotated[str | None, opt("Make a pair of this shape: tiny or llama-3.1-8b.")] = None,
    efficiency: Annotated[float, opt("Block efficiency of the first plan on a made pair.")] = 3.5,
    device: opts.Device = None,
    dtype: opts.Dtype = "auto",
    compile_backend: opts.CompileBackend = None,
    explain: Annotated[bool, opt("Also print what auto chose, and why.", "--explain")] = False,
    out: Annotated[Path | None, opt("JSON file for all timings.")] = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    All answers have the same length. Ratios are computed within each repeat before the median. With
    --shape the weights are made, such that drafts are as good as --efficiency says: the texts mean
    nothing, but they are drafted and verified as any others.
    """
    given = locals()
    grid = opts.made_of(
        given,
        throughput.Grid,
        batches=opts.entries("batches", batches, int),
        contexts=opts.entries("contexts", contexts, int),
        temperatures=opts.entries("temperature", temperature, float),
    )
    # Check before loading models, which may take minutes.
    opts.check_verifier(verifier)
    opts.check_out(out)
    where, precision = place_of(device, dtype)
    names = opts.entries("ways", ways, str)
    most = max(count * grid.calls(count) for count in grid.batches)
    models = opts.made_of(given, opts.Models)
    if shape is None:
        known = load_questions(questions_set, data)
        questions = known.first(min(most, len(known.questions))).questions
        engines = _loaded(models, names, verifier)
        assert isinstance(engines.plain, LLM)
        asked = [messages(question.turns[0]) for question in questions]
        texts = [engines.plain.encode(own) for own in asked]
    else:
        engines = _made(shape, names, verifier, efficiency, grid, models)
        vocab = _shape(shape, None).draft_vocab
        texts = random_models.random_prompts(vocab, most, MADE_PROMPT)
    chosen = [_way(engines, name, verifier) for name in names]
    timings = []
    cells = len(grid.contexts) * len(grid.temperatures) * grid.repeats * len(chosen)
    with opts.progress(cells * sum(map(grid.calls, grid.batches)), "call") as bar:
        for timing in throughput.measure(chosen, partial(make_prompts, texts), grid):
            timings.append(timing)
            rate = f"{timing.way}, batch {timing.batch}: {timing.rate:.0f} tokens/s"
            bar.update(note=rate)
    typer.echo(plain_text(throughput.rate_table(timings)))
    lines = throughput.choice_lines(timings)
    lines += throughput.paired_lines(timings) if lines else []
    if explain and lines:
        typer.echo("\n".join(["", *lines, EXPLAINED]))
    if engines.told:
        typer.echo(engines.told)
    if out is not None:
        results = BatchResults(
            timings=tuple(timings),
            environment=describe_environment(str(where)),
            model=engines.names[0],
            drafter=engines.names[1],
            verifier=verifier,
            suite=questions_set if shape is None else "random tokens",
            compile_backend=compile_backend or "",
            dtype=dtype_name(precision),
        )
        out.write_bytes(msgspec.json.encode(results) + b"\n")
        typer.echo(f"wrote {out}", err=True)


@dataclass(frozen=True)
class _Engines:
    plain: LLM | PairEngine  # decodes plainly, and need not keep anything for a drafter
    drafting: LLM | PairEngine | None  # with a drafter; None where no way drafts
    names: tuple[str, str]  # of target and drafter
    told: str = ""  # what a reader has to know

    @cached_property
    def library(self) -> Library:
        """The target in transformers' own loop."""
        assert isinstance(self.plain, LLM)  # of made models such ways are refused
        llm = self.plain
        return Library(llm.model_name, dtype=llm.dtype, device=llm.device)


def _loaded(models: opts.Models, ways: list[str], verifier: str) -> _Engines:
    """Load the models that are named, once plainly, and with the drafter if a way drafts."""
    drafts = any(name == "auto" or _plan(name, verifier) not in (None, PLAIN) for name in ways)
    models = models.or_lookup(AUTO) if drafts else models
    # Prompts recur in every repeat, and every way must read them.
    config = EngineConfig(prefix_cache=False, kv_slots=65_536, max_batch=256)
    plain, drafting = models.load(PLAIN, config), models.load(AUTO, config) if drafts else None
    names = models.named.name, models.named.drafter_name or ""
    return _Engines(plain, drafting, names)


def _made(
    shape: str,
    ways: list[str],
    verifier: str,
    efficiency: float,
    grid: throughput.Grid,
    models: opts.Models,
) -> _Engines:
    """Make models of a shape, whose first fixed plan reaches a block efficiency."""
    sizes = _shape(shape, None)
    plans = {name: _plan(name, verifier) for name in ways if name != "auto"}
    for name, own in plans.items():
        if own is None:
            raise InvalidArgument("ways", name, "auto, none or PATHSxDEPTH, as models are made")
    plan = next((own for own in plans.values() if own is not None and own.speculative), None)
    if plan is None:
        expected = "a plan, PATHSxDEPTH, that is to reach the block efficiency"
        raise InvalidArgument("ways", ",".join(ways), expected)
    temperature = grid.temperatures[0]
    device, dtype = place_of(models.device, models.dtype)
    length = max(*grid.contexts, MADE_PROMPT) + grid.tokens + MADE_PROMPT
    target, drafter = random_models.random_pair(
        sizes,
        slots=max(*grid.batches, 16) * (length + 256),
        max_context=length,
        dtype=dtype,
        device=device,
        compile_backend=models.compile_backend,
        graphs=GraphMode.AUTO,
        memoryless=True,
    )
    reached = random_models.tune(target, drafter, plan, efficiency, temperature=temperature)
    config = EngineConfig(prefix_cache=False, max_batch=max(grid.batches))
    drafting = Engine(target, drafter, config)
    return _Engines(
        PairEngine(Engine(target, None, config)),
        PairEngine(drafting),
        (shape, f"made for block efficiency {reached:.2f}"),
        f"Made weights of shape {shape}, real drafts and verdicts: {plan_name(plan)} commits "
        f"{reached:.2f} tokens a step at T={temperature:g} (wanted: {efficiency:g}).",
    )


def _shape(name: str, text: str | None) -> random_models.Shape:
    """Return the shape with a name, with other sizes where ``text`` gives them."""
    if name not in random_models.SHAPES:
        raise InvalidArgument("shape", name, one_of(random_models.SHAPES, name))
    known = random_models.SHAPES[name].__struct_fields__
    sizes = {}
    for part in text.split(",") if text else ():
        key, _, size = part.partition("=")
        if key not in known or not size.isdecimal():
            raise InvalidArgument("sizes", part, f"one such as layers=4, of {', '.join(known)}")
        sizes[key] = int(size)
    return msgspec.structs.replace(random_models.SHAPES[name], **sizes)


def _plan(name: str, verifier: str) -> Plan | None:
    """Return the plan with a name, of ``verifier`` if it names none; None if it names no plan."""
    if name == PLAIN.verifier:
        return PLAIN
    judge, _, sizes = name.rpartition(":")
    if re.fullmatch(r"\d+(x\d+)+", sizes) is None:
        return None
    opts.check_verifier(judge or verifier)
    return Plan.parse(f"{judge or verifier} {sizes}")


def _way(engines: _Engines, name: str, verifier: str) -> throughput.Way:
    plan = AUTO if name == "auto" else _plan(name, verifier)
    if plan is not None:
        llm = engines.plain if plan == PLAIN else engines.drafting
        assert llm is not None
        return throughput.Way(name, partial(throughput.run_engine, llm, plan))
    try:
        chosen = baseline(name, argument="ways")
    except InvalidArgument:
        raise InvalidArgument("ways", name, f"auto, none, PATHSxDEPTH, {EXPECTED}") from None
    generation = engines.library.generation(chosen, ends=False)
    return throughput.Way(name, partial(throughput.run_library, generation), chosen.max_batch)


def step(
    shape: Annotated[str, opt("Random models of this shape: tiny or llama-3.1-8b.")] = "tiny",
    sizes: Annotated[
        str | None,
        opt(
            "Other sizes than the shape's, such as hidden=128,layers=4; also heads, kv_heads, "
            "intermediate, vocab, draft_vocab."
        ),
    ] = None,
    model: Annotated[str | None, opt("A target instead of a shape.", shown="none")] = None,
    drafter: opts.Drafter = None,
    plans: Annotated[
        str, opt("Plans, as PATHSxDEPTH or VERIFIER:PATHSxDEPTH; none is plain decoding.")
    ] = "4x6,none",
    verifier: opts.Verifier = "otbv",
    batches: Annotated[str, opt("Numbers of requests.")] = "1",
    contexts: Annotated[str, opt("Tokens of each prompt.")] = "512",
    temperature: opts.Temperatures = "1.0",
    steps: Annotated[int, opt("Number of steps to time.")] = 30,
    device: opts.Device = None,
    dtype: opts.Dtype = "auto",
    compile_backend: opts.CompileBackend = None,
    cuda_graphs: opts.CudaGraphs = "auto",
    out: Annotated[Path | None, opt("File to which JSON lines are added as they come.")] = None,
) -> None:
    """Time the phases of a step, in every setting, for a target and what drafts for it.

    The floor is the time of the products with weights alone. Random weights, and random prompts,
    accept little, but times do not depend on that. A setting that fails is reported, and the others
    are timed. Exit status 1 if any failed.
    """
    made = _shape(shape, sizes)
    opts.check_verifier(verifier)
    opts.check_out(out)
    settings = []
    for count, length, t, name in product(
        opts.entries("batches", batches, int),
        opts.entries("contexts", contexts, int),
        opts.entries("temperature", temperature, float),
        opts.entries("plans", plans, str),
    ):
        plan = _plan(name, verifier)
        if plan is None:
            raise InvalidArgument("plans", name, "none, PATHSxDEPTH or VERIFIER:PATHSxDEPTH")
        settings.append(
            step_bench.StepSetting(
                plan=plan, batch=count, context=length, temperature=t, steps=steps
            )
        )
    where, precision = place_of(device, dtype)
    graphs = opts.member("cuda-graphs", cuda_graphs, GraphMode)
    how: dict[str, Any] = {
        "slots": max(setting.slots for setting in settings),
        "dtype": precision,
        "device": where,
        "compile_backend": compile_backend,
        "graphs": graphs,
    }
    if model is None:
        longest = max(setting.max_context for setting in settings)
        pair = Pair(*random_models.random_pair(made, max_context=longest, **how))
    else:
        named = opts.Models(model=model, drafter=drafter).named
        pair = load_pair(named.target, named.drafter, **how)
    floors = step_bench.Floors(pair)
    _note(
        out,
        {
            "environment": describe_environment(str(where)),
            "model": made if model is None else model,
            "drafter": drafter,
            "dtype": dtype_name(precision),
            "compile": compile_backend,
            "cuda_graphs": graphs,
            "weights": floors.weights,
        },
    )
    typer.echo(step_bench.aligned(step_bench.HEADINGS))
    failed = 0
    for setting in settings:
        try:
            report = step_bench.time_steps(pair, setting, floors)
        except Exception as error:  # noqa: BLE001  whatever it is, other settings are timed
            failed += 1
            _note(out, {"setting": setting, "error": f"{type(error).__name__}: {error}"})
            typer.echo(f"{step_bench.setting_name(setting)}: {type(error).__name__}: {error}")
        else:
            _note(out, {"setting": setting, "report": report})
            typer.echo(step_bench.aligned(step_bench.step_row(setting, report)))
    typer.echo(f"{floors.weights / 1e9:.2f} GB of weights")
    if failed:
        raise typer.Exit(1)


def _note(out: Path | None, facts: object) -> None:
    """Add a line of JSON to a file, where nothing that comes later can lose it."""
    if out is not None:
        with out.open("ab") as lines:
            lines.write(msgspec.json.encode(facts) + b"\n")
