"""``eaglegbv bench``: each command turns options into an experiment, measures and prints it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import StrEnum
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import messages
from eaglegbv.cli.options import LOOKUP, Models, Questions, opt
from eaglegbv.cli.structs import Fields, entries, member
from eaglegbv.cli.terminal import progress
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
from eaglegbv.eval.experiment import Experiment, Way, measure, one_by_one, open_run, report
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Run, describe_environment, pretty
from eaglegbv.eval.questions import QuestionSet, make_prompts
from eaglegbv.eval.settings import Setting, lossless
from eaglegbv.eval.simulated import simulated
from eaglegbv.eval.study import StudySettings
from eaglegbv.eval.ways import calls, steps
from eaglegbv.eval.ways.clients import Clients, Load
from eaglegbv.eval.ways.conversations import Conversations, Generate, Holding, Sitting
from eaglegbv.eval.ways.places import AtPlaces, Sampling, same_drafts
from eaglegbv.eval.ways.solvers import STANDARD, RandomNodes, Solver, random_settings
from eaglegbv.eval.ways.synthetic import SyntheticSettings, SyntheticTrees
from eaglegbv.llm import LLM, load_tokenizer
from eaglegbv.loading import TINY_NAME, Pair, check_model, default_model, load_pair
from eaglegbv.utils import decode_json, grouped, require_integer
from eaglegbv.verifiers.registry import chosen_plan

app = opts.make_app("Measure acceptance and speed.")
MADE_PROMPT = 64  # tokens of a prompt of made models, where none are asked for
MADE_LENGTH = 3.5  # acceptance length of made models, where none is told
SGLANGS = "SGLang's"  # device and dtype where it chooses
_NAMED = "A drafter, as in generate; 'NAME=DRAFTER' shows it as NAME. May be repeated"
Out = Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="none")]
Verifiers = Annotated[str, opt("Verifiers of sampled trees, as in generate; none is plain.")]


class BackendName(StrEnum):
    """What answers in a benchmark."""

    LOCAL = "local"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"


# What commands share: from an experiment and its ways to a run and what is printed.


def _run(
    experiment: Experiment,
    way: Way | Mapping[str, Way],
    setup: Mapping[str, Any],
    place: str = "cpu",
    out: Path | None = None,
    *,
    packages: Sequence[str] = (),
    plots: bool = False,
    tables: int | None = 1,
    as_json: bool = False,
) -> Run:
    """Measure what the run in a folder lacks, print its first tables, and write its page there."""
    run = open_run(experiment, setup, describe_environment(place, packages), out)
    if known := sum(len(run.observations(sheet)) for sheet in run.sheets):
        text = f"going on with the run in {out}: {known} observations of it are measured"
        typer.echo(text, err=True)
    names = [sheet.name for sheet in experiment.sheets]
    ways = way if isinstance(way, Mapping) else dict.fromkeys(names, way)
    measure(experiment, run, ways, lambda what, total: progress(total, what))
    came = report(experiment, run)
    if as_json:
        opts.print_json(came.content)
    else:
        typer.echo(page.report_text(came, tables))
    sums = Sums(one for sheet in run.sheets for one in run.observations(sheet))
    opts.print_broken(sums.errors)
    if run.folder is None:
        return run
    written = [run.folder / "results.md", run.folder / "report.json"]
    written[0].write_text(page.run_page(run, came), encoding="utf-8")
    written[1].write_bytes(pretty(came.content))
    if plots:
        drawn = page.Kept(run.folder.name, run, experiment, came).pictures()
        written += pictures.draw_all(drawn, run.folder / "plots", page.caption(run))
    if not as_json:
        opts.print_wrote(*written)
    return run


def _setup(questions: QuestionSet, models: Models, **facts: object) -> dict[str, Any]:
    """Return what determines a run's figures besides its settings."""
    named = models.named
    return {
        "suite": questions.suite,
        "origin": questions.origin,
        "question_ids": tuple(question.id for question in questions.questions),
        "questions_sha256": questions.sha256,
        "model": named.name,
        "drafter": named.drafter_name,
        "compile_backend": models.compile_backend or "",
        **facts,
    }


def _place(models: Models, kind: BackendName = BackendName.LOCAL) -> tuple[str, str]:
    """Return the device and the dtype of the target, in words."""
    if kind is BackendName.SGLANG:
        return models.device or SGLANGS, SGLANGS if models.dtype == AUTO_DTYPE else models.dtype
    place, precision = place_of(models.device, models.dtype)
    return str(place), dtype_name(precision)


def _by_name(texts: Sequence[str]) -> dict[str, str]:
    """Return the drafter of each ``NAME=DRAFTER`` or ``DRAFTER`` by its displayed name."""
    parts = [text.partition("=") for text in texts]
    return {name: where if equals else name for name, equals, where in parts}


# Conversations.


Opens = Callable[[Setting], AbstractContextManager[Generate]]
"""Opens what answers in a setting, and in those of its group."""


def _converse(
    name: str,
    questions: QuestionSet,
    settings: Sequence[Setting],
    sittings: Sequence[Sitting],
    holding: Holding,
    setup: Mapping[str, Any],
    place: str,
    out: Path | None,
    **shown: Any,  # noqa: ANN401  what _run takes
) -> None:
    """Hold conversations in all settings, which sittings answer."""
    held = msgspec.structs.asdict(holding)
    with Conversations(sittings, questions.questions, holding) as way:
        _run(benches.bench(name, settings), way, {**setup, **held}, place, out, **shown)


def _sittings(settings: Sequence[Setting], opens: Opens) -> list[Sitting]:
    """Return a sitting for those settings that one engine answers: a plan's, at any temperature."""
    groups = grouped(settings, lambda one: (one.who, one.plan)).values()
    return [Sitting(tuple(group), partial(opens, group[0])) for group in groups]


@app.command(short_help="Hold conversations of MT-Bench, or of another set.")
def mt_bench(
    asked: Questions,
    verifiers: Annotated[
        str | None,
        opt(
            "Verifiers to compare, as in generate; 'none' is plain decoding.",
            shown="none,block,otbv; of lookups, which are not drawn, none,otbv; "
            "with --backend transformers, no verifier",
        ),
    ] = None,
    backend: Annotated[
        BackendName, opt("What runs the plans: local, sglang, or transformers for none.")
    ] = BackendName.LOCAL,
    backend_arguments: Annotated[
        str, opt("SGLang's arguments, as a JSON object.", shown="none")
    ] = "{}",
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
    holding: Annotated[Holding, Fields("system", "seed", max_tokens=64, repeats=1)],
    models: Annotated[Models, Fields(without=("trust_remote_code", "generation_config"))],
    out: Annotated[Path | None, opt("Folder; a run in it is resumed.", shown="runs/SET")] = None,
    plots: Annotated[bool, opt("Also draw pictures, into plots/ of it.", "--plots")] = False,
) -> None:
    """Hold conversations of MT-Bench, or of another set, in every setting, in turns.

    Questions come from --data, otherwise from the folder named by EAGLEGBV_DATA, the local cache or
    the Hugging Face hub; --questions-set builtin is packaged. To continue an interrupted run, give
    the same command again.

    \b
    Examples:
      eaglegbv bench mt-bench
      eaglegbv bench mt-bench --questions 80 --verifiers none,block,otbv --paths 1,3 --out runs/mt
    """
    if plots:
        pictures.check_matplotlib()
    questions = asked.load(usual=8)
    if backend is BackendName.LOCAL and verifiers != PLAIN.verifier:
        models = models.or_lookup(AUTO)
    arguments = decode_json(
        backend_arguments.encode(),
        dict[str, str | int | float | bool | None],
        argument="backend-arguments",
        place=backend_arguments,
        expected="a JSON object of strings and numbers",
    )
    names = _verifiers(backend, verifiers, models)
    samplings = [
        None if name == "own" else member("draft_sampling", name, DraftSampling)
        for name in entries("draft_sampling", draft_sampling, str)
    ]
    plans = [PLAIN] if names else []
    for name, sampling, hotter, k, length in product(
        names, samplings, draft_temperature, paths, depth
    ):
        plan = Plan(
            verifier=name,
            paths=k,
            depth=length,
            draft_sampling=sampling,
            draft_temperature=hotter,
            draft_width=base.draft_width,
        )
        plans.append(plan if plan.speculative else PLAIN)
    settings, left_out = lossless(
        Setting(plan=plan, temperature=heat) for heat, plan in product(temperature, plans)
    )
    if left_out:
        typer.echo(f"left out, not lossless: {', '.join(left_out)}", err=True)
    others = _baselines(backend, models, arguments, baselines)
    settings += tuple(Setting(who=name, temperature=t) for t, name in product(temperature, others))
    place, precision = _place(models, backend)
    setup = _setup(
        questions,
        models,
        dtype=precision,
        template=_template(models),
        backend=str(backend),
        backend_arguments=arguments,
    )
    packages: Sequence[str] = ()
    if backend is BackendName.SGLANG:  # one engine for each plan, one after another
        packages = ("sglang",)
        sittings = _sittings(settings, partial(_sglang_engine, models, arguments))
    else:
        sittings = [_in_turns(backend, models, settings, others, questions, holding)]
    folder = out or Path("runs") / questions.suite
    shown = {"packages": packages, "plots": plots}
    _converse("mt-bench", questions, settings, sittings, holding, setup, place, folder, **shown)


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
    if backend is not BackendName.TRANSFORMERS:
        usual = "none,otbv" if models.drafter == LOOKUP else "none,block,otbv"
        return opts.verifier_names(usual if text is None else text)
    if text is not None:
        raise InvalidArgument("verifiers", text, f"no one with --backend {backend}")
    return []


def _baselines(
    backend: BackendName, models: Models, arguments: Mapping[str, object], text: str | None
) -> list[str]:
    """Return the baselines that are asked for.

    Raises:
        InvalidArgument: There is no such one, or the backend does not take what is asked for.
    """
    usual = ["transformers"] if backend is BackendName.TRANSFORMERS else []
    names = usual if text is None else entries("baselines", text, str)
    for name in names:
        baseline(name)
    if arguments and backend is not BackendName.SGLANG:
        raise InvalidArgument("backend-arguments", arguments, "none but with --backend sglang")
    if models.compile_backend is not None and backend is not BackendName.LOCAL:
        expected = f"none: --backend {backend} compiles its own way"
        raise InvalidArgument("compile", models.compile_backend, expected)
    if names and backend is BackendName.SGLANG:
        expected = "none with --backend sglang: its engines run one at a time"
        raise InvalidArgument("baselines", names, expected)
    return names


def _in_turns(
    backend: BackendName,
    models: Models,
    settings: Sequence[Setting],
    baselines: Sequence[str],
    questions: QuestionSet,
    holding: Holding,
) -> Sitting:
    """Load what answers in all settings, which take turns."""
    answering: dict[str, Generate] = {}
    if baselines:
        disable_progress_bar()
        set_verbosity_error()  # its assisted generation warns about its own arguments
        library = _library(models)
        tokenizer = load_tokenizer(str(models.named.target))
        for name in baselines:
            generation = library.generation(baseline(name), ends=True)
            answering[name] = partial(chat, generation, tokenizer)
    if backend is BackendName.LOCAL:
        plans = (setting.plan for setting in settings)
        drafting = next((plan for plan in plans if plan.speculative), PLAIN)
        llm = models.load(drafting, opts.UNCACHED)
        answering[""] = llm.generate
        turns = [turn for question in questions.questions for turn in question.turns]
        tokens = len(turns) * len(settings) * holding.repeats * holding.max_tokens
        opts.print_expected(llm, tokens, [messages(turns[0])])
    first = next(iter(answering.values()))
    return Sitting(tuple(settings), lambda: nullcontext(answering.get("", first)), answering)


def _library(models: Models) -> Library:
    """Load the target in transformers' own loop."""
    device, dtype = place_of(models.device, models.dtype)
    return Library(str(models.named.target), dtype=dtype, device=device)


@contextmanager
def _sglang_engine(
    models: Models, arguments: Mapping[str, Any], setting: Setting
) -> Iterator[Generate]:
    from eaglegbv.backends.sglang.llm import SGLangLLM

    # Every setting and repeat must read its prompts itself.
    named = {"disable_radix_cache": True, **arguments, "dtype": models.dtype}
    if models.device is not None:
        named["device"] = models.device
    llm = SGLangLLM(models.model, models.drafter, plan=setting.plan, **named)
    try:
        yield partial(streamed, llm.stream)
    finally:
        llm.shutdown()


@app.command(
    short_help="Compare verifiers through a server of SGLang's.", context_settings=opts.PASSED_ON
)
def served(
    context: typer.Context,
    asked: Questions,
    verifiers: Verifiers = "block,gbv,otbv,spectr,specinfer,traversal",
    eagle: Annotated[
        tuple[float, ...] | None,
        opt("Temperatures of SGLang's own EAGLE trees; on a CPU only 0.", shown="none"),
    ] = None,
    temperature: opts.Temperatures = (1.0,),
    *,
    tree: Annotated[PlanChoices, Fields("draft_width", paths=3, depth=4)],
    holding: Annotated[Holding, Fields("max_tokens", "seed", at_once=16)],
    models: Annotated[Models, Fields("model", "drafter")],
    out: Annotated[
        Path | None, opt("Folder; a run in it is resumed.", shown="runs/served-SET")
    ] = None,
) -> None:
    """Serve the pair with SGLang, one server per verifier, and hold all conversations in each.

    Other options are passed on to SGLang. SGLang's own EAGLE drafts trees with the same head and
    the same number of nodes. To continue an interrupted run, give the same command again.

    \b
    Examples:
      eaglegbv bench served --model MODEL --drafter HEAD --tp 2
      eaglegbv bench served --temperature 0,1 --eagle 0,1 --at-once 12
    """
    from eaglegbv.backends.sglang.ready import check_ready

    check_ready(context.args)
    from eaglegbv.backends.sglang.launch import launch, running
    from eaglegbv.backends.sglang.llm import Endpoint
    from eaglegbv.backends.sglang.settings import Settings

    questions = asked.load()
    shape = chosen_plan(tree)
    plans = [
        PLAIN if name == PLAIN.verifier else msgspec.structs.replace(shape, verifier=name)
        for name in opts.verifier_names(verifiers)
    ]
    settings, _ = lossless(
        Setting(plan=plan, temperature=heat) for heat, plan in product(temperature, plans)
    )
    # SGLang's own trees.
    own = f"eagle {shape.paths}x{shape.depth}"
    settings += tuple(Setting(who=own, temperature=heat) for heat in eagle or ())
    head = models.named.drafter
    if eagle and head is None:
        expected = "folder or hub name of an EAGLE head, for --eagle"
        raise InvalidArgument("drafter", None, expected)
    place, precision = _place(models, BackendName.SGLANG)
    backend = {"backend": "sglang server", "backend_arguments": " ".join(context.args)}
    setup = _setup(questions, models, dtype=precision, **backend)
    folder = out or Path("runs") / f"served-{questions.suite}"

    @contextmanager
    def server(setting: Setting) -> Iterator[Generate]:
        plan = shape if setting.who else setting.plan
        settings = None if setting.who else Settings()
        if plan.speculative and not setting.who:
            settings = Settings(verifier=plan.verifier, draft_width=plan.draft_width)
        command = launch(
            str(models.named.target),
            head if plan.speculative else None,
            paths=plan.paths,
            depth=plan.depth,
            settings=settings,
            others=context.args,
        )
        with running(command, folder / "logs" / f"{setting.name}.txt") as url:
            yield Endpoint(url, plan)

    sittings = _sittings(settings, server)
    packages = {"packages": ("sglang",)}
    _converse("served", questions, settings, sittings, holding, setup, place, folder, **packages)


@app.command(short_help="Compare the acceptance length of drafters.")
def drafters(
    drafter: Annotated[list[str], opt(f"{_NAMED}; the others are compared with the first.")],
    paths: Annotated[tuple[int, ...], opt("Numbers of drafted paths, K.")] = (1, 3),
    temperature: Annotated[float, opt("Sampling temperature; 0 is greedy.")] = 1.0,
    *,
    tree: Annotated[PlanChoices, Fields(without=("paths", "widths"), verifier="otbv", depth=5)],
    asked: Questions,
    holding: Annotated[Holding, Fields("max_tokens", "seed", at_once=16)],
    models: Annotated[Models, Fields("model", "device", "dtype")],
    as_json: opts.AsJson = False,
    out: Out = None,
) -> None:
    """Compare the acceptance length of drafters on the same questions, by position and category.

    Acceptance length is tokens per verification, pooled. Its 95% interval, and that of the ratio to
    the first drafter, is over questions. 'd or more' is the share of forwards that accept at least
    d tokens; these shares add up to the length, but for the token that every forward adds.

    \b
    Examples:
      eaglegbv bench drafters --drafter eagle3 --drafter eagle1
      eaglegbv bench drafters --drafter old=runs/old --drafter new=runs/new --questions 24
    """
    plans = [chosen_plan(replace(tree, paths=count)) for count in paths]
    questions = asked.load()
    named = _by_name(drafter)
    models = replace(models, model=models.model or default_model(*named.values()))
    groups = [
        tuple(Setting(plan=plan, temperature=temperature, who=name) for plan in plans)
        for name in named
    ]

    @contextmanager
    def loaded(name: str) -> Iterator[Generate]:
        with replace(models, drafter=named[name]).load(plans[0], opts.UNCACHED) as llm:
            yield llm.generate

    sittings = [Sitting(group, partial(loaded, group[0].who)) for group in groups]
    place, precision = _place(models)
    setup = _setup(questions, models, dtype=precision) | {"drafter": ", ".join(named.values())}
    settings = [setting for group in groups for setting in group]
    shown = {"tables": 2, "as_json": as_json}
    _converse("drafters", questions, settings, sittings, holding, setup, place, out, **shown)


# The same drafts: the study and the papers.


@app.command(short_help="Compare sampled with deterministic trees.")
def study(
    drafter: Annotated[
        list[str] | None,
        opt(f"{_NAMED}.", shown="eagle3 and eagle1; of another --model than tiny, its own"),
    ] = None,
    *,
    settings: Annotated[StudySettings, Fields(without=("beam", "draft_width"))],
    sampling: Annotated[Sampling, Fields("seed", max_tokens=64, places=3, judgements=3)],
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

    \b
    Examples:
      eaglegbv bench study --questions 24
      eaglegbv bench study --temperatures 0.5,1 --shapes 3x2x2x1,eagle1 --drafter eagle3
    """
    if not settings.shapes:
        pictures.check_matplotlib()
    questions = asked.load()
    named: Mapping[str, str | None] = _by_name(drafter or ("eagle3", "eagle1"))
    models = replace(models, model=models.model or default_model(*_by_name(drafter or ()).values()))
    if drafter is None and models.model != TINY_NAME:
        named = {str(models.model): None}
    # Texts are read once each, and all drafters share them.
    engine = EngineConfig(prefix_cache=False, max_batch=max(1, len(questions.questions)))
    llms = {
        name: replace(models, drafter=where).load(Plan(), engine) for name, where in named.items()
    }
    place, precision = _place(models)
    way = AtPlaces(llms, questions.questions, same_drafts, sampling, out)
    setup = _setup(questions, models, dtype=precision, **msgspec.structs.asdict(sampling))
    setup["drafter"] = ", ".join(llms)
    experiment = benches.bench("study", settings.settings(list(llms)))
    _run(experiment, way, setup, place, out, plots=not settings.shapes, tables=2)


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
    sampling: Annotated[Sampling, Fields(without=("batch",))],
    engine_questions: Annotated[
        int, opt("Questions that the engine answers, for what one step cannot tell.")
    ] = 16,
    engine: Annotated[
        bool, opt("Measure whole answers instead of the same drafts.", "--engine")
    ] = (False),
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

    \b
    Examples:
      eaglegbv bench paper gbv --list
      eaglegbv bench paper bv --table 1 --model MODEL --drafter HEAD
    """
    tables = entries("table", table, str) if table else None
    if name == "synthetic":
        made = msgspec.structs.replace(synthetic, seed=sampling.seed)
        _synthetic(made, out, as_json=as_json)
        return
    chosen = papers.choose(name, tables, engine=engine)
    if listed and as_json:
        opts.print_json({"paper": chosen.paper.name, "tables": chosen.tables})
        return
    if listed:
        typer.echo(papers.contents(chosen).text)
        return
    experiment = papers.paper(name, tables, engine=engine)
    if not experiment.sheets:  # nothing to measure: what it shows is exact
        exact = papers.exact_tables(chosen)
        if as_json:
            opts.print_json(exact)
        else:
            typer.echo("\n\n".join(table.text for table in exact))
        return
    questions = asked.load()
    place, precision = _place(models)
    sizes = msgspec.structs.asdict(sampling)
    how = {**sizes, "engine_questions": engine_questions, "engine": engine}
    how["category"] = asked.category
    setup = _setup(questions, models, dtype=precision, tables=tables, **how)
    folder = out or Path("runs") / f"paper-{name}"
    llm = models.load(Plan(), opts.UNCACHED)
    ways = papers.ways(llm, questions, sampling, engine_questions, folder)
    if not as_json:
        typer.echo(experiment.title)
    shown: dict[str, Any] = {"packages": ("scipy",), "tables": None, "as_json": as_json}
    _run(experiment, ways, setup, place, folder, **shown)


def _synthetic(sizes: SyntheticSettings, out: Path | None, *, as_json: bool) -> None:
    if out is not None:
        pictures.check_matplotlib()
    experiment = benches.bench("synthetic", benches.SYNTHETIC)
    setup = {"model": "normal logits", "drafter": "the same with noise"}
    setup |= msgspec.structs.asdict(sizes)
    plots = out is not None
    way = SyntheticTrees(sizes)
    _run(experiment, way, setup, out=out, plots=plots, tables=2, as_json=as_json)


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
    *,
    nodes: RandomNodes,
    as_json: opts.AsJson = False,
    out: Out = None,
) -> None:
    """Compare the solvers of optimal transport for independent drafts at one node.

    Times are medians of processor time to the selected draft. A solver succeeds if it is in time
    and its bound on the lost acceptance is within 1e-3; docs/inside/solvers.md has the columns.
    By default the standard sizes are measured; with --vocab and --drafts, all pairs of theirs.

    \b
    Examples:
      eaglegbv bench solvers
      eaglegbv bench solvers --vocab 1000 --drafts 2,3 --width all,64
    """
    if (vocab is None) != (drafts is None):
        raise InvalidArgument("drafts", drafts, "given with --vocab, and neither without the other")
    sizes = list(product(vocab, drafts)) if vocab and drafts else STANDARD
    kept = (text.strip() for text in width.split(","))
    widths = [None if text == "all" else entries("width", text, int)[0] for text in kept]
    chosen = [member("solver", name, Solver) for name in entries("solver", solver, str)]
    experiment = benches.bench("solvers", random_settings(chosen, sizes, widths))
    setup = {"model": "random nodes", "drafter": "", **msgspec.structs.asdict(nodes)}
    way = one_by_one(nodes.measure)
    _run(experiment, way, setup, out=out, packages=("scipy",), as_json=as_json)


# Speed: calls by batch, phases of steps, a server by clients.


@app.command(short_help="Time ways to generate side by side, by batch.")
def batch(
    grid: Annotated[calls.Grid, Fields(batches=(1, 4), tokens=32, repeats=1, prompts=8)],
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
    out: Out = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    Plain decoding is always among them. All answers have the same length. Ratios are computed
    within each repeat before the median. Where --acceptance-length is told, as with --shape, whose
    weights are random, verifiers are named after it, such as otbv~3.5.

    \b
    Examples:
      eaglegbv bench batch
      eaglegbv bench batch --batches 1,4,16 --ways auto,3x4,none --explain
    """
    # Check before loading models, which may take minutes.
    opts.check_verifier(verifier)
    place, precision = _place(models)
    names = dict.fromkeys([*entries("ways", ways, str), PLAIN.verifier])
    plans = {name: AUTO if name == "auto" else _plan(name, verifier) for name in names}
    if shape is not None:
        _shape(shape)  # raises an error if there is no such one
        for name, plan in plans.items():
            if plan is None:
                raise InvalidArgument("ways", name, "auto, none or PATHSxDEPTH for made models")
    drafts = any(plan not in (None, PLAIN) for plan in plans.values())
    length = MADE_LENGTH if shape and acceptance_length is None else acceptance_length
    if length is not None:
        if not drafts:
            raise InvalidArgument("ways", ways, "a plan, PATHSxDEPTH, that commits so many")
        plans = {name: _told(length, plan) for name, plan in plans.items()}
    most = max(count * grid.calls(count) for count in grid.batches)
    plain: LLM | Engine
    drafting: LLM | Engine
    if shape is not None:
        plain, drafting = _made(shape, grid, models)
        texts = random_models.random_prompts(_shape(shape).draft_vocab, most, MADE_PROMPT)
        what = {"model": shape, "drafter": "random weights", "suite": "random tokens"}
    else:
        known = asked.load()
        questions = known.first(min(most, len(known.questions))).questions
        models = models.or_lookup(AUTO) if drafts else models
        # Prompts recur in every repeat, and every way must read them.
        config = EngineConfig(prefix_cache=False, kv_slots=65_536, max_batch=256)
        plain = llm = models.load(PLAIN, config)
        drafting = models.load(AUTO, config) if drafts else plain
        texts = [llm.encode(messages(question.turns[0])) for question in questions]
        named = models.named
        what = {"model": named.name, "drafter": named.drafter_name or ""}
        what |= {"suite": known.suite, "questions_sha256": known.sha256}
    library = cache(partial(_library, models))
    callers = [_caller(plain, drafting, library, name, plan) for name, plan in plans.items()]
    if isinstance(plain, LLM):
        answers = sum(count * grid.calls(count) for count in grid.batches) * len(plans)
        loads = len(grid.temperature) * len(grid.contexts) * grid.repeats
        longest = make_prompts(texts, 1, max(grid.contexts))
        opts.print_expected(plain, answers * loads * grid.tokens, longest)
    setup = {
        **what,
        "verifier": verifier,
        "compile_backend": models.compile_backend or "",
        "dtype": precision,
        "acceptance_length": length,
        **{name: getattr(grid, name) for name in ("tokens", "repeats", "prompts", "seed")},
    }
    experiment = benches.bench("batch", grid.settings(callers))
    way = calls.Calls(callers, partial(make_prompts, texts), grid)
    _run(experiment, way, setup, place, out, tables=2 if explain else 1)
    if length is not None:
        typer.echo(f"The acceptance length, {length:g}, is told: texts mean nothing.")


def _made(shape: str, grid: calls.Grid, models: Models) -> tuple[Engine, Engine]:
    """Make models with random weights; return an engine without a drafter, and one with it."""
    device, dtype = place_of(models.device, models.dtype)
    length = max(*grid.contexts, MADE_PROMPT) + grid.tokens + MADE_PROMPT
    target, drafter = random_models.random_pair(
        _shape(shape),
        slots=max(*grid.batches, 16) * (length + 256),
        max_context=length,
        dtype=dtype,
        device=device,
        compile_backend=models.compile_backend,
        graphs=GraphMode.AUTO,
    )
    config = EngineConfig(prefix_cache=False, max_batch=max(grid.batches))
    return Engine(target, None, config), Engine(target, drafter, config)


def _told(length: float, plan: Planning | None) -> Planning | None:
    """Return a plan whose acceptance length is told; plain decoding as it is."""
    if plan in (None, PLAIN):
        return plan
    if isinstance(plan, Plan) and plan.depth + 1 < length:
        expected = f"at most {plan.depth + 1} for {plan_name(plan)}"
        raise InvalidArgument("acceptance_length", length, expected)
    return msgspec.structs.replace(plan, verifier=simulated(plan.verifier, length))


def _shape(name: str, text: str = "") -> random_models.Shape:
    """Return the shape with a name, with other sizes where ``text`` gives them."""
    if name not in random_models.SHAPES:
        raise InvalidArgument("shape", name, one_of(random_models.SHAPES, name))
    shape = random_models.SHAPES[name]
    sizes = {}
    for part in filter(None, text.split(",")):
        key, _, size = part.partition("=")
        if key not in shape.__struct_fields__ or not size.isdecimal():
            expected = f"one such as layers=4, of {', '.join(shape.__struct_fields__)}"
            raise InvalidArgument("sizes", part, expected)
        sizes[key] = int(size)
    return msgspec.structs.replace(shape, **sizes)


def _plan(name: str, verifier: str) -> Plan | None:
    """Return the plan with a name, of ``verifier`` if it names none; None if it names no plan."""
    if name == PLAIN.verifier:
        return PLAIN
    judge, _, sizes = name.rpartition(":")
    if re.fullmatch(r"\d+(x\d+)+", sizes) is None:
        return None
    opts.check_verifier(judge or verifier)
    return Plan.parse(f"{judge or verifier} {sizes}")


def _caller(
    plain: LLM | Engine,
    drafting: LLM | Engine,
    library: Callable[[], Library],
    name: str,
    plan: Planning | None,
) -> calls.Caller:
    if plan is not None:
        return calls.engine_caller(plain if plan == PLAIN else drafting, plan)
    try:
        chosen = baseline(name, argument="ways")
    except InvalidArgument:
        raise InvalidArgument("ways", name, f"auto, none, PATHSxDEPTH, {EXPECTED}") from None
    generation = library().generation(chosen, ends=False)
    generates = partial(calls.run_library, generation)
    return calls.Caller(Setting(who=name), generates, chosen.max_batch)


@app.command(short_help="Time the phases of a step, with random weights.")
def step(
    shape: Annotated[str, opt("Random models of this shape: tiny or llama-3.1-8b.")] = "tiny",
    sizes: Annotated[
        str,
        opt(
            "Other sizes than the shape's, such as hidden=128,layers=4; also heads, kv_heads, "
            "intermediate, vocab, draft_vocab.",
            shown=False,
        ),
    ] = "",
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
    out: Out = None,
) -> None:
    """Time the phases of a step, in every setting, for a target and what drafts for it.

    The floor is the time of the products with weights alone. Random weights, and random prompts,
    accept little, but times do not depend on that. A setting that fails is reported, and the others
    are timed. Exit status 1 if any failed.

    \b
    Examples:
      eaglegbv bench step
      eaglegbv bench step --model MODEL --drafter HEAD --plans 3x4,block:1x4,none --batches 1,4
    """
    made = _shape(shape, sizes)
    opts.check_verifier(verifier)
    require_integer("steps", count, 1)
    for name, values in (("batches", batches), ("contexts", contexts)):
        require_integer(name, min(values), 1)
    chosen = {name: _plan(name, verifier) for name in entries("plans", plans, str)}
    if unknown := [name for name, plan in chosen.items() if plan is None]:
        raise InvalidArgument("plans", unknown[0], "none, PATHSxDEPTH or VERIFIER:PATHSxDEPTH")
    loads = product(batches, contexts, temperature, filter(None, chosen.values()))
    settings = [
        Setting(plan=plan, batch=requests, context=length, temperature=heat)
        for requests, length, heat, plan in loads
    ]
    device, dtype = place_of(models.device, models.dtype)
    how: dict[str, Any] = {
        "slots": max(steps.slots_of(setting, count) for setting in settings),
        "dtype": dtype,
        "device": device,
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
    place, precision = _place(models)
    setup = {
        "model": model or shape,
        "sizes": sizes,
        "drafter": models.drafter or "",
        "dtype": precision,
        "compile": models.compile_backend,
        "cuda_graphs": engine.cuda_graphs,
        "weights": floors.weights,
        "steps": count,
    }
    run = _run(benches.bench("step", settings), steps.steps(pair, floors, count), setup, place, out)
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
    out: Out = None,
) -> None:
    """Measure time to first token and tokens a second of a server with OpenAI's endpoints.

    With each number of clients, every client asks one question that is not counted and then
    --each that are, one after another.

    \b
    Examples:
      eaglegbv bench endpoint http://127.0.0.1:8000
      eaglegbv bench endpoint http://127.0.0.1:8000 --clients 1,8,32 --max-tokens 64
    """
    chosen = asked.load()
    conversations = [messages(question.turns[0]) for question in chosen.questions]
    setup = {"model": url, "drafter": "", "suite": chosen.suite, **msgspec.structs.asdict(load)}
    way = one_by_one(Clients(url, api_key, conversations, load).measure)
    experiment = benches.bench("endpoint", load.settings)
    _run(experiment, way, setup, "the server's", out, as_json=as_json)


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

    \b
    Examples:
      eaglegbv bench compare runs/before runs/after
      eaglegbv bench compare runs/mt-bench --setting-a "gbv 3x4" --setting-b "otbv 3x4"
    """
    if b is None and (setting_a is None or setting_b is None):
        raise InvalidArgument("b", None, "another run, or --setting-a and --setting-b of this one")
    base = Run.read(a, "a")
    other = base if b is None else Run.read(b, "b")
    pairs = compared_runs(base, other, setting_a or setting_b, setting_b or setting_a)
    for one in pairs:
        typer.echo(f"A: {one.a}   B: {one.b}   questions: {one.questions}")
        typer.echo(one.table.text + "\n")
    if notes := unlike(base, other):
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

    \b
    Examples:
      eaglegbv bench plot runs/mt-bench
      eaglegbv bench plot docs/results/mt-bench.json --out plots
    """
    pictures.check_matplotlib()
    kept = page.Kept.of(run.stem, Run.read(run))
    drawn = kept.pictures()
    if not drawn:
        expected = f"a run that pictures are made of, not {kept.experiment.name}"
        raise InvalidArgument("run", str(run), expected)
    folder = out or (run if run.is_dir() else run.parent) / "plots"
    opts.print_wrote(*pictures.draw_all(drawn, folder, page.caption(kept.run)))


@app.command(short_help="Write a page of results from runs.")
def results(
    folder: Annotated[Path, typer.Argument(help="Folder of the kept runs.")] = Path("docs/results"),
    to: Annotated[Path | None, opt("File to write.", "--page", shown="the folder's, .md")] = None,
    add: Annotated[
        list[str] | None,
        opt("NAME=PATH: first keep a run in the folder, without texts; may be repeated."),
    ] = None,
    fill: Annotated[
        Path | None, opt("Page whose blocks of runs are written anew instead.", shown="none")
    ] = None,
) -> None:
    """Write a page of results from runs: tables, pictures, and what to use when.

    Each run has a page of its own, with all tables, in the folder. The same files give the same
    pages.

    \b
    Examples:
      eaglegbv bench results docs/results
      eaglegbv bench results docs/results --add mt-bench=runs/mt-bench
    """
    pictures.check_matplotlib()
    for entry in add or ():
        name, equals, path = entry.partition("=")
        if not equals:
            raise InvalidArgument("add", entry, "NAME=PATH")
        opts.print_wrote(page.keep(folder, name, Path(path)))
    if fill is not None:
        opts.print_wrote(page.fill(fill, folder))
        return
    opts.print_wrote(*page.write(folder, to or folder.with_name(f"{folder.name}.md")))
