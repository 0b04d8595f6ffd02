"""``eaglegbv bench batch``, ``step`` and ``endpoint``: speeds by batch, by phase, by clients."""

import re
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import messages
from eaglegbv.cli.options import Models, Questions, opt
from eaglegbv.cli.structs import Fields, entries
from eaglegbv.config import AUTO, PLAIN, EngineConfig, GraphMode, Plan, plan_name
from eaglegbv.devices import dtype_name, place_of
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval import random_models, step_bench, throughput
from eaglegbv.eval.baselines import EXPECTED, Library, baseline
from eaglegbv.eval.endpoint import Load
from eaglegbv.eval.endpoint import measure as measure_endpoint
from eaglegbv.eval.questions import make_prompts
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
    grid: Annotated[throughput.Grid, Fields(prompts=8)],
    ways: Annotated[
        str,
        opt(
            "What to compare: auto, none, PATHSxDEPTH for a fixed plan of --verifier, "
            "transformers, lookup:TOKENS, exit:LAYERS:TOKENS or assistant:FOLDER for its "
            "assisted generation."
        ),
    ] = "auto,3x4,none,transformers",
    verifier: opts.Verifier = "otbv",
    *,
    asked: Annotated[Questions, Fields("questions_set", "data")],
    models: Annotated[Models, Fields(without=("trust_remote_code", "generation_config"))],
    shape: Annotated[str | None, opt("Make a pair of this shape: tiny or llama-3.1-8b.")] = None,
    efficiency: Annotated[float, opt("Block efficiency of the first plan on a made pair.")] = 3.5,
    explain: Annotated[bool, opt("Also print what auto chose, and why.", "--explain")] = False,
    out: Annotated[Path | None, opt("JSON file for all timings.")] = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    All answers have the same length. Ratios are computed within each repeat before the median. With
    --shape the weights are made, such that drafts are as good as --efficiency says: the texts mean
    nothing, but they are drafted and verified as any others.
    """
    # Check before loading models, which may take minutes.
    opts.check_verifier(verifier)
    opts.check_out(out)
    where, precision = place_of(models.device, models.dtype)
    names = entries("ways", ways, str)
    most = max(count * grid.calls(count) for count in grid.batches)
    if shape is None:
        known = asked.load()
        questions = known.first(min(most, len(known.questions))).questions
        engines = _loaded(models, names, verifier)
        assert isinstance(engines.plain, LLM)
        texts = [engines.plain.encode(messages(question.turns[0])) for question in questions]
    else:
        engines = _made(shape, names, verifier, efficiency, grid, models)
        vocab = _shape(shape, None).draft_vocab
        texts = random_models.random_prompts(vocab, most, MADE_PROMPT)
    chosen = [_way(engines, name, verifier) for name in names]
    timings = []
    cells = len(grid.contexts) * len(grid.temperature) * grid.repeats * len(chosen)
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
    if engines.note:
        typer.echo(engines.note)
    if out is not None:
        results = BatchResults(
            timings=tuple(timings),
            environment=describe_environment(str(where)),
            model=engines.names[0],
            drafter=engines.names[1],
            verifier=verifier,
            suite=asked.questions_set if shape is None else "random tokens",
            compile_backend=models.compile_backend or "",
            dtype=dtype_name(precision),
        )
        out.write_bytes(msgspec.json.encode(results) + b"\n")
        opts.print_wrote(out)


@dataclass(frozen=True)
class _Engines:
    plain: LLM | PairEngine  # decodes plainly, and need not keep anything for a drafter
    drafting: LLM | PairEngine | None  # with a drafter; None where no way drafts
    names: tuple[str, str]  # of target and drafter
    note: str = ""  # what a reader has to know

    @cached_property
    def library(self) -> Library:
        """The target in transformers' own loop."""
        assert isinstance(self.plain, LLM)  # of made models such ways are refused
        llm = self.plain
        return Library(llm.model_name, dtype=llm.dtype, device=llm.device)


def _loaded(models: Models, ways: list[str], verifier: str) -> _Engines:
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
    grid: Annotated[throughput.Grid, Fields(prompts=8)],
    models: Models,
) -> _Engines:
    """Make models of a shape, whose first fixed plan reaches a block efficiency."""
    sizes = _shape(shape, None)
    plans = {name: _plan(name, verifier) for name in ways if name != "auto"}
    for name, plan in plans.items():
        if plan is None:
            raise InvalidArgument("ways", name, "auto, none or PATHSxDEPTH, as models are made")
    speculative = (plan for plan in plans.values() if plan is not None and plan.speculative)
    plan = next(speculative, None)
    if plan is None:
        expected = "a plan, PATHSxDEPTH, that is to reach the block efficiency"
        raise InvalidArgument("ways", ",".join(ways), expected)
    temperature = grid.temperature[0]
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
    plans: Annotated[
        str, opt("Plans, as PATHSxDEPTH or VERIFIER:PATHSxDEPTH; none is plain decoding.")
    ] = "4x6,none",
    verifier: opts.Verifier = "otbv",
    batches: Annotated[tuple[int, ...], opt("Numbers of requests.")] = (1,),
    contexts: Annotated[tuple[int, ...], opt("Tokens of each prompt.")] = (512,),
    temperature: opts.Temperatures = (1.0,),
    steps: Annotated[int, opt("Number of steps to time.")] = 30,
    *,
    models: Annotated[Models, Fields("drafter", "device", "dtype", "compile_backend")],
    engine: Annotated[EngineConfig, Fields("cuda_graphs")],
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
    named_plans = entries("plans", plans, str)
    for count, length, heat, name in product(batches, contexts, temperature, named_plans):
        plan = _plan(name, verifier)
        if plan is None:
            raise InvalidArgument("plans", name, "none, PATHSxDEPTH or VERIFIER:PATHSxDEPTH")
        settings.append(
            step_bench.StepSetting(
                plan=plan, batch=count, context=length, temperature=heat, steps=steps
            )
        )
    where, precision = place_of(models.device, models.dtype)
    how: dict[str, Any] = {
        "slots": max(setting.slots for setting in settings),
        "dtype": precision,
        "device": where,
        "compile_backend": models.compile_backend,
        "graphs": engine.cuda_graphs,
    }
    if model is None:
        longest = max(setting.max_context for setting in settings)
        pair = Pair(*random_models.random_pair(made, max_context=longest, **how))
    else:
        named = Models(model=model, drafter=models.drafter).named
        pair = load_pair(named.target, named.drafter, **how)
    floors = step_bench.Floors(pair)
    _note(
        out,
        {
            "environment": describe_environment(str(where)),
            "model": made if model is None else model,
            "drafter": models.drafter,
            "dtype": dtype_name(precision),
            "compile": models.compile_backend,
            "cuda_graphs": engine.cuda_graphs,
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


LOAD_COLUMNS = {
    "clients": ("clients", "d"),
    "answers": ("answers", "d"),
    "first token, s": ("first_token", ".3f"),
    "95 of 100": ("first_token_95", ".3f"),
    "between tokens, s": ("between_tokens", ".4f"),
    "tokens/s": ("tokens_per_second", ".1f"),
    "tokens a forward": ("tokens_per_forward", ".2f"),
}
"""What the table of an endpoint's load shows of a row, by heading, and how."""


def endpoint(
    url: Annotated[str, typer.Argument(help="Address of the server, without /v1.")],
    load: Load,
    asked: Annotated[Questions, Fields(questions_set="builtin")],
    api_key: Annotated[
        str, typer.Option(help="The server's key.", envvar="EAGLEGBV_API_KEY")
    ] = "none",
    as_json: opts.AsJson = False,
) -> None:
    """Measure time to first token and tokens a second of a server with OpenAI's endpoints.

    With each number of clients, every client asks one question that is not counted and then
    --each that are, one after another.
    """
    conversations = [messages(question.turns[0]) for question in asked.load().questions]
    total = sum(load.clients) * (1 + load.each)
    with opts.progress(total, "answer") as bar:
        rows = list(measure_endpoint(url, api_key, conversations, load, bar.update))
    opts.print_results([rows], LOAD_COLUMNS, as_json=as_json, rows=rows)


def _note(out: Path | None, facts: object) -> None:
    """Add a line of JSON to a file, where nothing that comes later can lose it."""
    if out is not None:
        with out.open("ab") as lines:
            lines.write(msgspec.json.encode(facts) + b"\n")
