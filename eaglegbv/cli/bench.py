"""``eaglegbv bench``: each command turns options into an experiment, measures and prints it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import messages
from eaglegbv.cli.options import Models, Questions, opt
from eaglegbv.cli.structs import Fields, entries, member
from eaglegbv.config import (
    AUTO,
    PLAIN,
    DraftSampling,
    EngineConfig,
    GraphMode,
    Plan,
    PlanChoices,
    Planning,
    plan_name,
)
from eaglegbv.devices import AUTO_DTYPE, dtype_name, place_of
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval import benches, page, papers, pictures, random_models
from eaglegbv.eval.baselines import EXPECTED, Library, baseline, chat, streamed
from eaglegbv.eval.compare import compared_runs, unlike
from eaglegbv.eval.experiment import Experiment, Part, Way, measure, open_run, report
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Environment, Run, describe_environment, pretty
from eaglegbv.eval.questions import QuestionSet, make_prompts
from eaglegbv.eval.settings import Setting, lossless
from eaglegbv.eval.simulated import simulated
from eaglegbv.eval.study import StudySettings
from eaglegbv.eval.tables import Table
from eaglegbv.eval.ways import calls, steps
from eaglegbv.eval.ways.clients import Clients, Load
from eaglegbv.eval.ways.conversations import SHEET, Conversations, Generate, Sitting
from eaglegbv.eval.ways.nodes import node_acceptance
from eaglegbv.eval.ways.places import AtPlaces, same_drafts
from eaglegbv.eval.ways.solvers import (
    STANDARD,
    RandomNodes,
    Solver,
    random_settings,
    timed_solvers,
)
from eaglegbv.eval.ways.synthetic import SyntheticSettings, SyntheticTrees
from eaglegbv.llm import LLM, load_tokenizer
from eaglegbv.loading import TINY_NAME, Pair, check_model, default_model, load_pair
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import decode_json, grouped, require_integer
from eaglegbv.verifiers.registry import chosen_plan

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.launch import Launch

Scalar = str | int | float | bool | None

app = opts.make_app("Measure acceptance and speed.")
MADE_PROMPT = 64  # tokens of a prompt of made models, where none are asked for
MADE_LENGTH = 3.5  # acceptance length of made models, where none is told
AT_ONCE = 16  # first answers of papers' engine sheets that are given together
_NAMED = "A drafter, as in generate; 'NAME=DRAFTER' shows it as NAME. May be repeated"


class BackendName(StrEnum):
    """What answers in a benchmark."""

    LOCAL = "local"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"


# What commands share: from an experiment and its ways to a run and what is printed.


def _measured(
    experiment: Experiment,
    ways: Mapping[str, Way],
    setup: Mapping[str, Any],
    environment: Environment,
    out: Path | None = None,
) -> Run:
    """Measure what the run in a folder lacks; say so if it has something."""
    run = open_run(experiment, setup, environment, out)
    known = sum(len(run.observations(sheet)) for sheet in run.sheets)
    if known:
        text = f"going on with the run in {out}: {known} observations of it are measured"
        typer.echo(text, err=True)
    measure(experiment, run, ways, lambda what, total: opts.progress(total, what))
    return run


def _print(
    experiment: Experiment,
    run: Run,
    *,
    plots: bool = False,
    tables: int | None = 1,
    as_json: bool = False,
) -> None:
    """Print the first tables of a run, and write its page, and pictures, into its folder."""
    came = report(experiment, run)
    if as_json:
        opts.print_json(came.content)
    else:
        typer.echo(page.report_text(came, tables))
    sums = Sums(one for sheet in run.sheets for one in run.observations(sheet))
    opts.print_broken(sums.errors)
    if run.folder is None:
        return
    written = [run.folder / "results.md", run.folder / "report.json"]
    written[0].write_text(page.run_page(run, came), encoding="utf-8")
    written[1].write_bytes(pretty(came.content))
    if plots:
        drawn = page.Kept(run.folder.name, run, experiment, came).pictures()
        written += pictures.draw_all(drawn, run.folder / "plots", page.caption(run))
    if not as_json:
        opts.print_wrote(*written)


def _by_name(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the displayed name and the drafter of each ``NAME=DRAFTER`` or ``DRAFTER``."""
    parts = [text.partition("=") for text in texts]
    return [(name, where if equals else name) for name, equals, where in parts]


# Conversations.


@app.command(short_help="Hold conversations of MT-Bench, or of another set.")
def mt_bench(
    asked: Questions,
    verifiers: Annotated[
        str | None,
        opt(
            "Verifiers to compare, as in generate; 'none' is plain decoding.",
            shown="none,token,block,gbv,otbv; of lookups, which are not drawn, none,otbv; "
            "with --backend transformers, no verifier",
        ),
    ] = None,
    backend: Annotated[
        BackendName, opt("What runs the plans: local, sglang, or transformers for none.")
    ] = BackendName.LOCAL,
    backend_arguments: Annotated[str | None, opt("SGLang's arguments, as a JSON object.")] = None,
    baselines: Annotated[
        str | None,
        opt(
            "Other ways to generate, measured in turn with the rest: transformers for its plain "
            "decoding; lookup:TOKENS, exit:LAYERS:TOKENS or assistant:FOLDER for its assisted "
            "generation.",
            shown="none; with --backend transformers its plain decoding",
        ),
    ] = None,
    paths: Annotated[tuple[int, ...], opt("Numbers of drafted paths, K.")] = (3,),
    depth: Annotated[tuple[int, ...], opt("Lengths of a drafted path, L.")] = (4,),
    temperature: opts.Temperatures = (1.0,),
    draft_sampling: Annotated[
        str, opt("Draft samplings: own (of each verifier), iid, wor, greedy, hub, fixed.")
    ] = "own",
    draft_temperature: Annotated[
        tuple[float, ...], opt("Draft temperatures, times the request's.")
    ] = (1.0,),
    *,
    base: Annotated[PlanChoices, Fields("draft_width")],
    system: Annotated[str | None, opt("System message before every conversation.")] = None,
    max_tokens: opts.MaxTokens = 128,
    seed: opts.Seed = 0,
    repeats: Annotated[int, opt("How many times to run everything.")] = 3,
    models: Annotated[Models, Fields(without=("trust_remote_code", "generation_config"))],
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="runs/SET")] = None,
    plots: Annotated[bool, opt("Also draw pictures, into plots/ of it.", "--plots")] = False,
) -> None:
    """Hold conversations of MT-Bench, or of another set, in every setting, in turns.

    Questions come from --data, otherwise from the folder named by EAGLEGBV_DATA, the local cache or
    the Hugging Face hub; --questions-set builtin is packaged. To continue an interrupted run, give
    the same command again.
    """
    if plots:
        pictures.check_matplotlib()
    chosen = asked.load()
    require_integer("repeats", repeats, 1)
    SamplingParams(max_tokens=max_tokens, seed=seed)
    if backend is BackendName.LOCAL and verifiers != PLAIN.verifier:
        models = models.or_lookup(AUTO)
    samplings = [
        None if name == "own" else member("draft_sampling", name, DraftSampling)
        for name in entries("draft_sampling", draft_sampling, str)
    ]
    names = _verifiers(backend, verifiers, models)
    settings = [Setting(temperature=heat) for heat in temperature if names]
    for heat, name, sampling, hotter, k, length in product(
        temperature, names, samplings, draft_temperature, paths, depth
    ):
        if name != PLAIN.verifier:
            plan = Plan(
                verifier=name,
                paths=k,
                depth=length,
                draft_sampling=sampling,
                draft_temperature=hotter,
                draft_width=base.draft_width,
            )
            settings.append(Setting(plan=plan, temperature=heat))
    kept, left_out = lossless(settings)
    who = _baseline_names(backend, baselines)
    kept += tuple(Setting(who=name, temperature=heat) for heat, name in product(temperature, who))
    if left_out:
        typer.echo(f"left out, not lossless: {', '.join(left_out)}", err=True)
    arguments: dict[str, Scalar] = {}
    if backend_arguments is not None:
        arguments = decode_json(
            backend_arguments.encode(),
            dict[str, Scalar],
            argument="backend-arguments",
            place=backend_arguments,
            expected="a JSON object of strings and numbers",
        )
    _check_backend(backend, models, arguments, who)
    place, precision = _place(backend, models)
    setup = opts.setup(
        chosen,
        models,
        dtype=precision,
        template=_template(models),
        system=system,
        max_tokens=max_tokens,
        seed=seed,
        repeats=repeats,
        backend=str(backend),
        backend_arguments=arguments,
    )
    sittings = _sittings(backend, models, kept, arguments)
    environment = describe_environment(place, ("sglang",) if backend is BackendName.SGLANG else ())
    experiment = benches.bench("mt-bench", kept)
    folder = out or Path("runs") / chosen.suite
    with Conversations(sittings, chosen.questions, max_tokens, seed, repeats, system) as way:
        run = _measured(experiment, {SHEET: way}, setup, environment, folder)
    _print(experiment, run, plots=plots)


def _template(models: Models) -> str:
    """Return the target's chat template."""
    target = str(models.named.target)
    check_model(target)
    template = load_tokenizer(target).chat_template
    if template is None:
        expected = "a model whose tokenizer has a chat template"
        raise InvalidArgument("model", models.named.name, expected)
    # Some tokenizers have several templates, by name.
    return template if isinstance(template, str) else str(template["default"])


def _verifiers(backend: BackendName, text: str | None, models: Models) -> list[str]:
    if backend is BackendName.TRANSFORMERS:
        if text is not None:
            raise InvalidArgument("verifiers", text, f"no one with --backend {backend}")
        return []
    usual = "none,otbv" if models.drafter == opts.LOOKUP else "none,token,block,gbv,otbv"
    return opts.verifier_names(usual if text is None else text)


def _baseline_names(backend: BackendName, text: str | None) -> list[str]:
    if text is None:
        return ["transformers"] if backend is BackendName.TRANSFORMERS else []
    names = entries("baselines", text, str)
    for name in names:
        baseline(name)  # raises an error if there is no baseline with this name
    return names


def _check_backend(
    kind: BackendName, models: Models, arguments: Mapping[str, Scalar], baselines: Sequence[str]
) -> None:
    """Raise InvalidArgument where something is asked for that the backend does not take."""
    if arguments and kind is not BackendName.SGLANG:
        expected = "none but with --backend sglang"
        raise InvalidArgument("backend-arguments", dict(arguments), expected)
    if models.compile_backend is not None and kind is not BackendName.LOCAL:
        expected = f"none: --backend {kind} compiles its own way"
        raise InvalidArgument("compile", models.compile_backend, expected)
    if baselines and kind is BackendName.SGLANG:
        expected = "none with --backend sglang: its engines run one at a time"
        raise InvalidArgument("baselines", list(baselines), expected)


def _sittings(
    kind: BackendName,
    models: Models,
    settings: Sequence[Setting],
    arguments: Mapping[str, Scalar],
) -> list[Sitting]:
    """Return what answers in all settings; those of different sittings do not take turns."""
    if kind is BackendName.SGLANG:
        # One engine for each plan, one after another.
        return [
            Sitting(group, partial(_sglang_engine, models, group[0].plan, arguments))
            for group in _by_plan(settings)
        ]
    generate: Generate | None = None
    if kind is BackendName.LOCAL:
        plans = (setting.plan for setting in settings)
        drafting = next((plan for plan in plans if plan.speculative), PLAIN)
        generate = models.load(drafting, opts.UNCACHED).generate
    baselines = _baselines(models, settings)
    answer = generate or next(iter(baselines.values()))
    return [Sitting(tuple(settings), lambda: nullcontext(answer), baselines)]


def _place(kind: BackendName, models: Models) -> tuple[str, str]:
    """Return the device and the dtype of the target, in words."""
    if kind is not BackendName.SGLANG:
        place, precision = place_of(models.device, models.dtype)
        return str(place), dtype_name(precision)
    chosen = "SGLang's choice"
    return models.device or chosen, chosen if models.dtype == AUTO_DTYPE else models.dtype


def _by_plan(settings: Sequence[Setting]) -> list[tuple[Setting, ...]]:
    """Group the settings that one engine answers: those of one plan, at all temperatures."""
    return list(map(tuple, grouped(settings, lambda one: (one.who, one.plan)).values()))


@contextmanager
def _sglang_engine(
    models: Models, plan: Plan, arguments: Mapping[str, Scalar]
) -> Iterator[Generate]:
    from eaglegbv.backends.sglang.llm import SGLangLLM

    # Every setting and repeat must read its prompts itself.
    named: dict[str, Any] = {"disable_radix_cache": True, **arguments}
    named["dtype"] = models.dtype
    if models.device is not None:
        named["device"] = models.device
    llm = SGLangLLM(models.model, models.drafter, plan=plan, **named)
    try:
        yield partial(streamed, llm.stream)
    finally:
        llm.shutdown()


def _baselines(models: Models, settings: Sequence[Setting]) -> dict[str, Generate]:
    names = dict.fromkeys(setting.who for setting in settings if setting.who)
    if not names:
        return {}
    disable_progress_bar()
    set_verbosity_error()  # its assisted generation warns about its own arguments
    device, dtype = place_of(models.device, models.dtype)
    target = str(models.named.target)
    library = Library(target, dtype=dtype, device=device)
    tokenizer = load_tokenizer(target)
    return {
        name: partial(chat, library.generation(baseline(name), ends=True), tokenizer)
        for name in names
    }


@app.command(
    short_help="Compare verifiers through a server of SGLang's.", context_settings=opts.PASSED_ON
)
def served(
    context: typer.Context,
    asked: Questions,
    verifiers: Annotated[
        str, opt("Verifiers of sampled trees, as in generate; 'none' is plain decoding.")
    ] = "block,gbv,otbv,spectr,specinfer,traversal",
    eagle: Annotated[
        tuple[float, ...] | None,
        opt("Temperatures of SGLang's own EAGLE trees; on a CPU only 0.", shown="none"),
    ] = None,
    temperature: opts.Temperatures = (1.0,),
    *,
    tree: Annotated[PlanChoices, Fields("draft_width", paths=3, depth=4)],
    max_tokens: opts.MaxTokens = 128,
    seed: opts.Seed = 0,
    at_once: Annotated[int, opt("Number of conversations at a time.")] = 16,
    models: Annotated[Models, Fields("model", "drafter")],
    out: Annotated[
        Path | None, opt("Folder; a run in it is resumed.", shown="runs/served-SET")
    ] = None,
) -> None:
    """Serve the pair with SGLang, one server per verifier, and hold all conversations in each.

    Other options are passed on to SGLang. SGLang's own EAGLE drafts trees with the same head and
    the same number of nodes. To continue an interrupted run, give the same command again.
    """
    from eaglegbv.backends.sglang.ready import check_ready

    check_ready(context.args)
    from eaglegbv.backends.sglang.launch import running
    from eaglegbv.backends.sglang.llm import Endpoint

    require_integer("at-once", at_once, 1, 1024)
    chosen = asked.load()
    shape = chosen_plan(tree)
    kept, _ = lossless(
        Setting(plan=_with_verifier(shape, name), temperature=heat)
        for heat, name in product(temperature, opts.verifier_names(verifiers))
    )
    # SGLang's own trees.
    own = f"eagle {shape.paths}x{shape.depth}"
    kept += tuple(Setting(who=own, temperature=heat) for heat in eagle or ())
    setup = opts.setup(
        chosen,
        models,
        max_tokens=max_tokens,
        seed=seed,
        backend="sglang server",
        backend_arguments={"arguments": " ".join(context.args), "at_once": at_once},
    )
    folder = out or Path("runs") / f"served-{chosen.suite}"

    @contextmanager
    def server(group: tuple[Setting, ...]) -> Iterator[Generate]:
        setting = group[0]
        trees = shape if setting.who else setting.plan
        log = folder / "logs" / f"{setting.name}.txt"
        with running(_launch(setting, trees, models, context.args), log) as url:
            yield Endpoint(url, trees)

    sittings = [Sitting(group, partial(server, group)) for group in _by_plan(kept)]
    experiment = benches.bench("served", kept)
    environment = describe_environment("SGLang's", ("sglang",))
    with Conversations(sittings, chosen.questions, max_tokens, seed, at_once=at_once) as way:
        run = _measured(experiment, {SHEET: way}, setup, environment, folder)
    _print(experiment, run)
    text = report(experiment, run).tables[0].text
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")


def _with_verifier(plan: Plan, name: str) -> Plan:
    if name == PLAIN.verifier:
        return PLAIN
    return msgspec.structs.replace(plan, verifier=name)


def _launch(setting: Setting, trees: Plan, models: Models, others: Sequence[str]) -> "Launch":
    """Return the command that starts the server of a setting; ``trees`` have this shape."""
    from eaglegbv.backends.sglang.launch import launch
    from eaglegbv.backends.sglang.settings import Settings

    head = models.named.drafter
    settings: Settings | None = None
    if not setting.who:
        settings = Settings()
        if trees.speculative:
            settings = Settings(verifier=trees.verifier, draft_width=trees.draft_width)
        else:
            head = None
    elif head is None:
        expected = "folder or hub name of an EAGLE head, for --eagle"
        raise InvalidArgument("drafter", None, expected)
    target, (K, L) = str(models.named.target), (trees.paths, trees.depth)
    return launch(target, head, paths=K, depth=L, settings=settings, others=others)


@app.command(short_help="Compare the acceptance length of drafters.")
def drafters(
    drafter: Annotated[list[str], opt(f"{_NAMED}; the others are compared with the first.")],
    paths: Annotated[tuple[int, ...], opt("Numbers of drafted paths, K.")] = (1, 3),
    temperature: Annotated[float, opt("Sampling temperature; 0 is greedy.")] = 1.0,
    *,
    tree: Annotated[PlanChoices, Fields(without=("paths", "widths"), verifier="otbv", depth=5)],
    asked: Questions,
    max_tokens: opts.MaxTokens = 128,
    seed: opts.Seed = 0,
    batch: Annotated[int, opt("Number of conversations held together.")] = 16,
    models: Annotated[Models, Fields("model", "device", "dtype")],
    as_json: opts.AsJson = False,
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="none")] = None,
) -> None:
    """Compare the acceptance length of drafters on the same questions, by position and category.

    Acceptance length is tokens per verification, pooled. Its 95% interval, and that of the ratio to
    the first drafter, is over questions. 'd or more' is the share of forwards that accept at least
    d tokens; these shares add up to the length, but for the token that every forward adds.
    """
    plans = [chosen_plan(replace(tree, paths=count)) for count in paths]
    chosen = asked.load()
    # Refused before anything is loaded.
    SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    named = _by_name(drafter)
    model = models.model or default_model(*(where for _, where in named))
    models = replace(models, model=model)
    groups = {
        where: tuple(Setting(plan=plan, temperature=temperature, who=name) for plan in plans)
        for name, where in named
    }

    @contextmanager
    def loaded(where: str) -> Iterator[Generate]:
        with replace(models, drafter=where).load(plans[0], opts.UNCACHED) as llm:
            yield llm.generate

    sittings = [Sitting(group, partial(loaded, where)) for where, group in groups.items()]
    settings = [setting for group in groups.values() for setting in group]
    place, precision = _place(BackendName.LOCAL, models)
    setup = opts.setup(chosen, models, max_tokens=max_tokens, seed=seed)
    setup |= {"drafter": ", ".join(groups), "dtype": precision}
    experiment = benches.bench("drafters", settings)
    with Conversations(sittings, chosen.questions, max_tokens, seed, at_once=batch) as way:
        run = _measured(experiment, {SHEET: way}, setup, describe_environment(place), out)
    _print(experiment, run, tables=2, as_json=as_json)


# The same drafts: the study and the papers.


@app.command(short_help="Compare sampled with deterministic trees.")
def study(
    drafter: Annotated[
        list[str] | None,
        opt(f"{_NAMED}.", shown="eagle3 and eagle1; of another --model than tiny, its own"),
    ] = None,
    *,
    settings: Annotated[StudySettings, Fields(without=("beam", "draft_width"))],
    asked: Questions,
    models: Annotated[Models, Fields("model", "device", "dtype")],
    out: Annotated[Path, opt("Folder of the results; a run in it is resumed.")] = Path(
        "runs/study"
    ),
) -> None:
    """Compare sampled with deterministic trees of as many nodes, at every draft temperature.

    Sampled trees (K paths, otbv) are compared with mixtures of two best-first fixed trees
    (target_only) of the same mean number of nodes, at places of plainly decoded texts. Draws a
    picture (matplotlib comes with '.[bench]') into --out; with --shapes there is none.
    """
    if not settings.shapes:
        pictures.check_matplotlib()
    chosen = asked.load()
    named: list[tuple[str, str | None]] = [*_by_name(drafter or ("eagle3", "eagle1"))]
    model = models.model or default_model(*(where for _, where in named))
    if drafter is None and model != TINY_NAME:
        named = [(model, None)]
    # Texts are read once each, and all drafters share them.
    engine = EngineConfig(prefix_cache=False, max_batch=max(1, len(chosen.questions)))
    llms = {
        name: replace(models, model=model, drafter=where).load(Plan(), engine)
        for name, where in named
    }
    llm = next(iter(llms.values()))
    names = ("max_tokens", "seed", "places", "judgements")
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in names}
    way = AtPlaces(llms=llms, questions=chosen.questions, judge=same_drafts, folder=out, **sizes)
    setup = opts.setup(chosen, replace(models, model=model), dtype=dtype_name(llm.dtype), **sizes)
    setup["drafter"] = ", ".join(llms)
    experiment = benches.bench("study", settings.settings(list(llms)))
    run = _measured(experiment, {"trees": way}, setup, describe_environment(str(llm.device)), out)
    _print(experiment, run, plots=not settings.shapes, tables=2)


class PaperOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured of a paper; a run is resumed only with the same.

    Attributes:
        seed: Seed of texts, drafts and judgements.
        max_tokens: Most tokens of an answer.
        places: Places of a text at which all verifiers judge the same drafts.
        judgements: How many times each verifier judges each tree.
        engine_questions: Questions that the engine answers, for what one step cannot tell.
        engine: Measure whole answers instead of the same drafts.
    """

    seed: int = 0
    max_tokens: int = 128
    places: int = 5
    judgements: int = 4
    engine_questions: int = 16
    engine: bool = False


@app.command(short_help="Measure a paper's tables, beside its own figures.")
def paper(
    name: Annotated[str, typer.Argument(help="Name of the paper, such as bv, gbv or spectr-gbv.")],
    table: Annotated[
        str | None, opt("Tables to measure, such as 3,7 or figure3.", shown="all, and our claims")
    ] = None,
    listed: Annotated[
        bool, opt("List its tables instead, with --json their figures.", "--list")
    ] = (False),
    *,
    asked: Questions,
    options: PaperOptions,
    models: Annotated[Models, Fields("model", "drafter", "device", "dtype")],
    synthetic: SyntheticSettings,
    as_json: opts.AsJson = False,
    out: Annotated[
        Path | None, opt("Folder; a run in it is resumed.", shown="runs/paper-NAME")
    ] = None,
) -> None:
    """Measure a paper's tables: in each cell ours with its interval, and the paper's in brackets.

    Other models give other figures, but directions may be compared: those of the paper are computed
    from its own figures. Measurements are saved as they come: the same command continues where an
    earlier one stopped. 'synthetic' is no paper, but rules on trees of made logits.
    """
    tables = entries("table", table, str) if table else None
    if name == "synthetic":
        _synthetic(synthetic, options.seed, out, as_json=as_json)
        return
    chosen = papers.choose(name, tables, engine=options.engine)
    if listed:
        _list_tables(chosen, as_json=as_json)
        return
    experiment = papers.paper(name, tables, engine=options.engine)
    folder = out or Path("runs") / f"paper-{name}"
    if not experiment.sheets:  # nothing to measure: what it shows is exact
        typer.echo("\n\n".join(one.text for one in _exact(chosen)))
        return
    questions = asked.load()
    llm = models.load(Plan(), opts.UNCACHED)
    facts = {"dtype": dtype_name(llm.dtype), "tables": tables}
    setup = opts.setup(questions, models, **msgspec.structs.asdict(options), **facts)
    ways = _paper_ways(llm, questions, options, folder)
    environment = describe_environment(str(llm.device), ("scipy",))
    if not as_json:
        typer.echo(experiment.title)
    run = _measured(experiment, ways, setup, environment, folder)
    _print(experiment, run, tables=None, as_json=as_json)


def _exact(chosen: papers.Chosen) -> list[Table]:
    setup = {"model": "none", "drafter": "none", "dtype": "exact", "suite": "none"}
    facts: dict[str, Any] = {**setup, "question_ids": (), "hardware": "any machine"}
    return [papers.table_beside(chosen, one, {}, facts) for one in chosen.tables]


def _list_tables(chosen: papers.Chosen, *, as_json: bool) -> None:
    if as_json:
        opts.print_json({"paper": chosen.paper.name, "tables": chosen.tables})
        return
    rows = [["table", "cells", "with figures", "measured by", "shows"]]
    for one in chosen.tables:
        cells = [cell for row in one.cells for cell in row]
        ways = dict.fromkeys(chosen.way(at) for *_, at in one.places())
        count = sum(cell is not None for cell in cells)
        rows.append([one.name, str(len(cells)), str(count), ", ".join(ways), one.title])
    typer.echo(Table(title=chosen.paper.title, rows=rows).text)


def _paper_ways(
    llm: LLM, questions: QuestionSet, options: PaperOptions, folder: Path
) -> dict[str, Way]:
    """Return all ways in which papers are measured."""
    judges = {
        papers.DRAFTS: same_drafts,
        papers.NODE: node_acceptance,
        papers.SOLVE: timed_solvers,
    }
    names = ("max_tokens", "seed", "places", "judgements")
    sizes: dict[str, Any] = {name: getattr(options, name) for name in names}
    ways: dict[str, Way] = {
        name: AtPlaces(
            llms={"": llm}, questions=questions.questions, judge=judge, folder=folder, **sizes
        )
        for name, judge in judges.items()
    }
    count = min(options.engine_questions, len(questions.questions))
    answered = questions.first(count).questions
    first = [msgspec.structs.replace(one, turns=one.turns[:1]) for one in answered]

    def answers(usual: int | None, settings: Sequence[Setting]) -> Iterator[Part]:
        for batch, group in grouped(settings, lambda one: one.batch).items():
            sitting = Sitting(tuple(group), lambda: nullcontext(llm.generate))
            at_once = batch or usual
            way = Conversations([sitting], first, options.max_tokens, options.seed, at_once=at_once)
            yield from way(group)

    ways[papers.TIME], ways[papers.ENGINE] = partial(answers, None), partial(answers, AT_ONCE)
    return ways


def _synthetic(settings: SyntheticSettings, seed: int, out: Path | None, *, as_json: bool) -> None:
    if out is not None:
        pictures.check_matplotlib()
    experiment = benches.bench("synthetic", benches.SYNTHETIC)
    sizes = msgspec.structs.replace(settings, seed=seed)
    setup = {"model": "normal logits", "drafter": "the same with noise"}
    setup |= msgspec.structs.asdict(sizes)
    ways: dict[str, Way] = {"synthetic": SyntheticTrees(sizes)}
    run = _measured(experiment, ways, setup, describe_environment("cpu"), out)
    _print(experiment, run, plots=out is not None, tables=2, as_json=as_json)


@app.command(short_help="Compare the solvers of optimal transport.")
def solvers(
    vocab: Annotated[
        tuple[int, ...] | None, opt("Vocabulary sizes.", shown="the standard table")
    ] = None,
    drafts: Annotated[
        tuple[int, ...] | None, opt("Numbers of drafts, n.", shown="the standard table")
    ] = None,
    width: Annotated[str, opt("Tokens that draft distributions keep, or 'all'.")] = "all,64",
    solver: Annotated[
        str, opt("Solvers to compare.")
    ] = "exact,published_looser,published_tighter,max_flow,lp",
    instances: Annotated[int, opt("Number of random nodes of each size.")] = 10,
    time_limit: Annotated[float, opt("Milliseconds after which a solver fails.")] = 1000.0,
    seed: opts.Seed = 0,
    as_json: opts.AsJson = False,
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="none")] = None,
) -> None:
    """Compare the solvers of optimal transport for independent drafts at one node.

    Times are medians of processor time to the selected draft. A solver succeeds if it is in time
    and its bound on the lost acceptance is within 1e-3; docs/inside/solvers.md has the columns.
    By default the standard sizes are measured; with --vocab and --drafts, all pairs of theirs.
    """
    if (vocab is None) != (drafts is None):
        raise InvalidArgument("drafts", drafts, "given with --vocab, and neither without the other")
    sizes = list(STANDARD)
    if vocab is not None and drafts is not None:
        sizes = list(product(vocab, drafts))
    widths = [
        None if kept == "all" else entries("width", kept, int)[0]
        for kept in entries("width", width, str)
    ]
    chosen = [member("solver", name, Solver) for name in entries("solver", solver, str)]
    require_integer("instances", instances, 1)
    if not time_limit > 0:
        raise InvalidArgument("time_limit", time_limit, "a positive number")
    experiment = benches.bench("solvers", random_settings(chosen, sizes, widths))
    setup = {"model": "random nodes", "drafter": "", "seed": seed, "instances": instances}
    setup["time_limit"] = time_limit
    ways: dict[str, Way] = {"solvers": RandomNodes(instances, seed, time_limit / 1e3)}
    run = _measured(experiment, ways, setup, describe_environment("cpu", ("scipy",)), out)
    _print(experiment, run, as_json=as_json)


# Speed: calls by batch, phases of steps, a server by clients.


@app.command(short_help="Time ways to generate side by side, by batch.")
def batch(
    grid: Annotated[calls.Grid, Fields(prompts=8)],
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
    acceptance_length: Annotated[
        float | None,
        opt(
            "Commit so many tokens a step on average, whatever was drafted: steps cost what they "
            "cost, and texts mean nothing.",
            "--acceptance-length",
            "--efficiency",
            shown="what drafts are worth; 3.5 with --shape",
        ),
    ] = None,
    explain: Annotated[bool, opt("Also print what auto chose, and why.", "--explain")] = False,
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="none")] = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    Plain decoding is always among them. All answers have the same length. Ratios are computed
    within each repeat before the median. Where --acceptance-length is told, as with --shape, whose
    weights are random, verifiers are named after it, such as otbv~3.5.
    """
    # Check before loading models, which may take minutes.
    opts.check_verifier(verifier)
    where, precision = place_of(models.device, models.dtype)
    names = list(dict.fromkeys([*entries("ways", ways, str), PLAIN.verifier]))
    most = max(count * grid.calls(count) for count in grid.batches)
    length = MADE_LENGTH if shape and acceptance_length is None else acceptance_length
    plans = {name: AUTO if name == "auto" else _plan(name, verifier) for name in names}
    if shape is not None:
        sizes = _shape(shape, None)
        for name, plan in plans.items():
            if plan is None:
                raise InvalidArgument("ways", name, "auto, none or PATHSxDEPTH for made models")
    drafts = any(plan not in (None, PLAIN) for plan in plans.values())
    if length is not None:
        if not drafts:
            raise InvalidArgument("ways", ways, "a plan, PATHSxDEPTH, that commits so many")
        plans = {name: _told(length, plan) for name, plan in plans.items()}
    if shape is None:
        known = asked.load()
        questions = known.first(min(most, len(known.questions))).questions
        engines = _loaded(models, drafts)
        assert isinstance(engines.plain, LLM)
        texts = [engines.plain.encode(messages(question.turns[0])) for question in questions]
    else:
        engines = _made(shape, grid, models)
        texts = random_models.random_prompts(sizes.draft_vocab, most, MADE_PROMPT)
    callers = [_caller(engines, name, plan) for name, plan in plans.items()]
    setup = {
        "model": engines.names[0],
        "drafter": engines.names[1],
        "verifier": verifier,
        "suite": asked.questions_set if shape is None else "random tokens",
        "compile_backend": models.compile_backend or "",
        "dtype": dtype_name(precision),
        "acceptance_length": length,
        "tokens": grid.tokens,
        "repeats": grid.repeats,
        "prompts": grid.prompts,
        "seed": grid.seed,
    }
    experiment = benches.bench("batch", grid.settings(callers))
    ways_of: dict[str, Way] = {"batch": calls.Calls(callers, partial(make_prompts, texts), grid)}
    run = _measured(experiment, ways_of, setup, describe_environment(str(where)), out)
    _print(experiment, run, tables=2 if explain else 1)
    if length is not None:
        typer.echo(f"The acceptance length, {length:g}, is told: texts mean nothing.")


@dataclass(frozen=True)
class _Engines:
    plain: LLM | Engine  # decodes plainly, and need not keep anything for a drafter
    drafting: LLM | Engine | None  # with a drafter; None where no way drafts
    names: tuple[str, str]  # of target and drafter

    @cached_property
    def library(self) -> Library:
        """The target in transformers' own loop."""
        assert isinstance(self.plain, LLM)  # of made models such ways are refused
        llm = self.plain
        return Library(llm.model_name, dtype=llm.dtype, device=llm.device)


def _loaded(models: Models, drafts: bool) -> _Engines:
    """Load the models that are named, once plainly, and with the drafter if a way drafts."""
    models = models.or_lookup(AUTO) if drafts else models
    # Prompts recur in every repeat, and every way must read them.
    config = EngineConfig(prefix_cache=False, kv_slots=65_536, max_batch=256)
    plain = models.load(PLAIN, config)
    drafting = models.load(AUTO, config) if drafts else None
    return _Engines(plain, drafting, (models.named.name, models.named.drafter_name or ""))


def _made(shape: str, grid: calls.Grid, models: Models) -> _Engines:
    """Make models of a shape, with random weights."""
    device, dtype = place_of(models.device, models.dtype)
    length = max(*grid.contexts, MADE_PROMPT) + grid.tokens + MADE_PROMPT
    target, drafter = random_models.random_pair(
        _shape(shape, None),
        slots=max(*grid.batches, 16) * (length + 256),
        max_context=length,
        dtype=dtype,
        device=device,
        compile_backend=models.compile_backend,
        graphs=GraphMode.AUTO,
    )
    config = EngineConfig(prefix_cache=False, max_batch=max(grid.batches))
    plain, drafting = (Engine(target, one, config) for one in (None, drafter))
    return _Engines(plain, drafting, (shape, "random weights"))


def _told(length: float, plan: Planning | None) -> Planning | None:
    """Return a plan whose acceptance length is told; plain decoding as it is."""
    if plan in (None, PLAIN):
        return plan
    if isinstance(plan, Plan) and plan.depth + 1 < length:
        raise InvalidArgument(
            "acceptance_length", length, f"at most {plan.depth + 1} for {plan_name(plan)}"
        )
    return msgspec.structs.replace(plan, verifier=simulated(plan.verifier, length))


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


def _caller(engines: _Engines, name: str, plan: Planning | None) -> calls.Caller:
    if plan is not None:
        llm = engines.plain if plan == PLAIN else engines.drafting
        assert llm is not None
        return calls.engine_caller(llm, plan)
    try:
        chosen = baseline(name, argument="ways")
    except InvalidArgument:
        raise InvalidArgument("ways", name, f"auto, none, PATHSxDEPTH, {EXPECTED}") from None
    generation = engines.library.generation(chosen, ends=False)
    generates = partial(calls.run_library, generation)
    return calls.Caller(Setting(who=name), generates, chosen.max_batch)


@app.command(short_help="Time the phases of a step, with random weights.")
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
    count: Annotated[int, opt("Number of steps to time.", "--steps")] = 30,
    *,
    models: Annotated[Models, Fields("drafter", "device", "dtype", "compile_backend")],
    engine: Annotated[EngineConfig, Fields("cuda_graphs")],
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="none")] = None,
) -> None:
    """Time the phases of a step, in every setting, for a target and what drafts for it.

    The floor is the time of the products with weights alone. Random weights, and random prompts,
    accept little, but times do not depend on that. A setting that fails is reported, and the others
    are timed. Exit status 1 if any failed.
    """
    made = _shape(shape, sizes)
    opts.check_verifier(verifier)
    settings = []
    for requests, length, heat, name in product(
        batches, contexts, temperature, entries("plans", plans, str)
    ):
        plan = _plan(name, verifier)
        if plan is None:
            raise InvalidArgument("plans", name, "none, PATHSxDEPTH or VERIFIER:PATHSxDEPTH")
        settings.append(Setting(plan=plan, batch=requests, context=length, temperature=heat))
    require_integer("steps", count, 1)
    for name, values in (("batches", batches), ("contexts", contexts)):
        require_integer(name, min(values), 1)
    where, precision = place_of(models.device, models.dtype)
    how: dict[str, Any] = {
        "slots": max(steps.slots_of(setting, count) for setting in settings),
        "dtype": precision,
        "device": where,
        "compile_backend": models.compile_backend,
        "graphs": engine.cuda_graphs,
    }
    if model is None:
        longest = max(steps.positions_of(setting, count) for setting in settings)
        pair = Pair(*random_models.random_pair(made, max_context=longest, **how))
    else:
        named = Models(model=model, drafter=models.drafter).named
        pair = load_pair(named.target, named.drafter, **how)
    floors = steps.Floors(pair)
    setup = {
        "model": shape if model is None else model,
        "sizes": sizes,
        "drafter": models.drafter or "",
        "dtype": dtype_name(precision),
        "compile": models.compile_backend,
        "cuda_graphs": engine.cuda_graphs,
        "weights": floors.weights,
        "steps": count,
    }
    experiment = benches.bench("step", settings)
    ways: dict[str, Way] = {"step": steps.Steps(pair, floors, count)}
    run = _measured(experiment, ways, setup, describe_environment(str(where)), out)
    typer.echo(report(experiment, run).tables[0].text)
    typer.echo(f"{floors.weights / 1e9:.2f} GB of weights")
    failed = [one for one in run.observations("step") if one.error is not None]
    for one in failed:
        typer.echo(f"{one.setting}: {one.error}")
    if failed:
        raise typer.Exit(1)


@app.command(short_help="Time a server's answers, by clients.")
def endpoint(
    url: Annotated[str, typer.Argument(help="Address of the server, without /v1.")],
    load: Load,
    asked: Annotated[Questions, Fields(questions_set="builtin")],
    api_key: Annotated[
        str, typer.Option(help="The server's key.", envvar="EAGLEGBV_API_KEY")
    ] = "none",
    as_json: opts.AsJson = False,
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="none")] = None,
) -> None:
    """Measure time to first token and tokens a second of a server with OpenAI's endpoints.

    With each number of clients, every client asks one question that is not counted and then
    --each that are, one after another.
    """
    chosen = asked.load()
    conversations = [messages(question.turns[0]) for question in chosen.questions]
    experiment = benches.bench("endpoint", load.settings)
    setup = {"model": url, "drafter": "", "suite": chosen.suite, **msgspec.structs.asdict(load)}
    ways: dict[str, Way] = {"endpoint": Clients(url, api_key, conversations, load)}
    run = _measured(experiment, ways, setup, describe_environment("the server's"), out)
    _print(experiment, run, as_json=as_json)


# What is made of runs.


RunPath = Annotated[Path, typer.Argument(help="Folder of a run, or a compact file of one.")]
SettingName = Annotated[str | None, opt("Name of a setting, such as 'otbv 3x4'.", shown=False)]


@app.command(short_help="Compare two runs, or two settings of one.")
def compare(
    a: RunPath,
    b: Annotated[
        Path | None, typer.Argument(help="Another one to compare.", show_default="A itself")
    ] = None,
    setting_a: SettingName = None,
    setting_b: SettingName = None,
    out: Annotated[Path | None, opt("JSON file for the figures.")] = None,
) -> None:
    """Compare B with A: ratios of all figures, paired by question, with 95% intervals.

    Two runs are compared in the settings that both have, or in --setting-a of A and --setting-b of
    B; two settings of one run need both options. Speeds of two runs were measured at different
    times, which no interval covers: compare speeds within a run if they matter.
    """
    if b is None and (setting_a is None or setting_b is None):
        raise InvalidArgument("b", None, "another run, or --setting-a and --setting-b of this one")
    base = Run.read(a, "a")
    other = base if b is None else Run.read(b, "b")
    pairs = compared_runs(base, other, setting_a or setting_b, setting_b or setting_a)
    for one in pairs:
        typer.echo(f"A: {one.a}   B: {one.b}   questions: {one.questions}")
        typer.echo(one.table.text + "\n")
    notes = unlike(base, other)
    if notes:
        typer.echo("the runs also differ in:\n" + "\n".join(f"  {note}" for note in notes))
    if b is not None:
        typer.echo("speeds were measured in two sittings; the intervals do not cover that")
    if out is not None:
        out.write_bytes(pretty(pairs))
        opts.print_wrote(out)


@app.command(short_help="Draw a run, as PNG and SVG.")
def plot(
    run: RunPath,
    out: Annotated[Path | None, opt("Folder for the pictures.", shown="RUN/plots")] = None,
) -> None:
    """Draw a run, as its experiment is drawn, as PNG and SVG.

    Needs matplotlib: pip install -e '.[bench]' in a checkout.
    """
    pictures.check_matplotlib()
    loaded = Run.read(run, "run")
    experiment = benches.declared(loaded.head)
    drawn = page.Kept(run.stem, loaded, experiment, report(experiment, loaded)).pictures()
    if not drawn:
        expected = f"a run that pictures are made of, not {experiment.name}"
        raise InvalidArgument("run", str(run), expected)
    folder = out or (run if run.is_dir() else run.parent) / "plots"
    opts.print_wrote(*pictures.draw_all(drawn, folder, page.caption(loaded)))


@app.command(short_help="Write a page of results from runs.")
def results(
    folder: Annotated[Path, typer.Argument(help="Folder of the kept runs.")] = Path("docs/results"),
    to: Annotated[Path | None, opt("File to write.", "--page", shown="the folder's, .md")] = None,
    add: Annotated[
        list[str] | None,
        opt("NAME=PATH: first keep a run in the folder, without texts; may be repeated."),
    ] = None,
) -> None:
    """Write a page of results from runs: tables, pictures, and what to use when.

    Each run has a page of its own, with all tables, in the folder. The same files give the same
    pages.
    """
    pictures.check_matplotlib()
    for entry in add or ():
        name, equals, path = entry.partition("=")
        if not equals:
            raise InvalidArgument("add", entry, "NAME=PATH")
        opts.print_wrote(page.keep(folder, name, Path(path)))
    runs = page.kept(folder)
    written = page.draw(runs, folder)
    for one in runs:
        written.append(folder / f"{one.name}.md")
        written[-1].write_text(page.run_page(one.run, one.report), encoding="utf-8")
    target = to or folder.with_name(folder.name + ".md")
    target.write_text(page.page(runs, folder.name), encoding="utf-8")
    opts.print_wrote(*written, target)
