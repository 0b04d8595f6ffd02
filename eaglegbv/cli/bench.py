"""``eaglegbv bench``: benchmarks with a report; here ``mt-bench``, ``served``, and the demo."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from eaglegbv.cli import bench_papers, bench_results, bench_speed
from eaglegbv.cli import options as opts
from eaglegbv.cli.options import Models, Questions, opt
from eaglegbv.cli.structs import Fields, entries, member
from eaglegbv.config import AUTO, PLAIN, DraftSampling, Plan, PlanChoices
from eaglegbv.devices import AUTO_DTYPE, dtype_name, place_of
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import statistics
from eaglegbv.eval.baselines import Library, baseline, chat, streamed
from eaglegbv.eval.plots import check_matplotlib, draw_all
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Record, RunSettings, Setting, describe_environment, grid
from eaglegbv.eval.report import markdown, plain_text, served_table, table
from eaglegbv.eval.runner import Generate, RunFolder, run, write_results
from eaglegbv.llm import load_tokenizer
from eaglegbv.loading import check_model
from eaglegbv.utils import decode_json, grouped, require_integer

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.launch import Launch

Scalar = str | int | float | bool | None

app = opts.make_app("Measure block efficiency and speed.")

# Commands have short helps where their first sentences would not fit a line of the list.
app.command(short_help="Compare the solvers of optimal transport.")(bench_papers.solvers)
app.command(short_help="Compare sampled with deterministic trees.")(bench_papers.study)
app.command(short_help="Compare the acceptance length of drafters.")(bench_papers.drafters)
app.command(short_help="Measure what a paper compares.")(bench_papers.paper)
app.command(short_help="Time ways to generate side by side, by batch.")(bench_speed.batch)
app.command(short_help="Time a server's answers, by clients.")(bench_speed.endpoint)
app.command(short_help="Time the phases of a step, with random weights.")(bench_speed.step)
app.command(short_help="Compare two runs, or two settings of one.")(bench_results.compare)
app.command(short_help="Draw a run, as PNG and SVG.")(bench_results.plot)
app.command(short_help="Write a page of results from measured files.")(bench_results.results)


class BackendName(StrEnum):
    """What answers in a benchmark."""

    LOCAL = "local"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"


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
    run: Annotated[
        dict[str, Any], Fields("system", of=RunSettings, max_tokens=128, seed=0, repeats=3)
    ],
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
        check_matplotlib()
    chosen = asked.load()
    if backend is BackendName.LOCAL and verifiers != PLAIN.verifier:
        models = models.or_lookup(AUTO)
    samplings = entries("draft_sampling", draft_sampling, str)
    wanted = grid(
        _verifiers(backend, verifiers, models),
        paths,
        depth,
        temperature,
        base=Plan(draft_width=base.draft_width),
        draft_samplings=[
            None if name == "own" else member("draft_sampling", name, DraftSampling)
            for name in samplings
        ],
        draft_temperatures=draft_temperature,
        baselines=_baseline_names(backend, baselines),
    )
    arguments: dict[str, Scalar] = {}
    if backend_arguments is not None:
        arguments = decode_json(
            backend_arguments.encode(),
            dict[str, Scalar],
            argument="backend-arguments",
            place=backend_arguments,
            expected="a JSON object of strings and numbers",
        )
    settings = opts.run_settings(
        chosen, models, wanted.settings, backend=backend, backend_arguments=arguments, **run
    )
    if wanted.left_out:
        typer.echo(f"left out, not lossless: {', '.join(wanted.left_out)}", err=True)
    _check_backend(backend, models, settings)
    target = str(models.named.target)
    check_model(target)
    template = load_tokenizer(target).chat_template
    if template is None:
        expected = "a model whose tokenizer has a chat template"
        raise InvalidArgument("model", settings.model, expected)
    # Some tokenizers have several templates, by name.
    template = template if isinstance(template, str) else template["default"]
    place, precision = _place(backend, models)
    sittings = _sittings(backend, models, settings)
    folder = RunFolder(
        out or Path("runs") / chosen.suite,
        msgspec.structs.replace(settings, template=template, dtype=precision),
        describe_environment(place, ("sglang",) if backend is BackendName.SGLANG else ()),
    )
    _hold(sittings, chosen.questions, folder)
    _report(folder, plots=plots)


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


# Holding the conversations of a run, and reporting.


@contextmanager
def _watched(
    settings: RunSettings,
    add: Callable[[Record], None],
    records: Sequence[Record] = (),
    *,
    timed: bool = True,
) -> Iterator[Callable[[Record], None]]:
    """Keep every further record, and show progress, with the figures of the setting that ran last.

    ``records`` are those of earlier sittings; ``timed`` is whether they say what took how long.
    """
    figures = {
        statistics.BLOCK_EFFICIENCY: "{:.2f} tokens/forward",
        statistics.TOKENS_PER_SECOND: "{:.0f} tokens/s",
    }
    shown = list(figures.items())[: 2 if timed else 1]
    held: defaultdict[str, list[Record]] = defaultdict(list)
    for record in statistics.whole(records):
        held[record.setting].append(record)
    total = len(settings.question_ids) * len(settings.settings) * settings.repeats
    with opts.progress(total, "conversation", done=len(records)) as bar:

        def keep(record: Record) -> None:
            add(record)
            held[record.setting] += statistics.whole([record])
            records_of_setting = held[record.setting]
            if not records_of_setting:
                bar.update()
                return
            said = ", ".join(text.format(figure.of(records_of_setting)) for figure, text in shown)
            bar.update(note=f"{record.setting}: {said}")

        yield keep


def _hold(
    sittings: Sequence["Sitting"],
    questions: Sequence[Question],
    folder: RunFolder,
    at_once: int | None = None,
) -> None:
    if folder.records:
        total = sum(1 for _ in folder.settings.keys(folder.settings.settings))
        known = f"{len(folder.records)}/{total} conversations of it are measured"
        typer.echo(f"going on with the run in {folder.path}: {known}", err=True)
    timed = at_once is None
    with _watched(folder.settings, folder.add, folder.records, timed=timed) as keep:
        for sitting in sittings:
            if folder.done.issuperset(folder.settings.keys(sitting.settings)):
                continue
            with sitting.open() as generate:
                run(
                    generate,
                    questions,
                    msgspec.structs.replace(folder.settings, settings=sitting.settings),
                    baselines=sitting.baselines,
                    at_once=at_once,
                    done=folder.done,
                    on_record=keep,
                )


def _report(folder: RunFolder, *, plots: bool) -> None:
    results = folder.results()
    summaries = statistics.summarise(results)
    report = folder.path / "results.md"
    report.write_text(markdown(results, summaries), encoding="utf-8")
    written = [write_results(folder.path, results, summaries), report]
    if plots:
        written += draw_all(results, folder.path / "plots")
    typer.echo(plain_text(table(summaries)))
    opts.print_broken({summary.setting: summary.errors for summary in summaries})
    opts.print_wrote(*written)


# What answers: this engine, SGLang, or transformers.


@dataclass(frozen=True, slots=True)
class Sitting:
    """Settings that are run in turns, and what answers in them."""

    settings: tuple[Setting, ...]  # the settings
    # Returns a context with the function that answers by plans.
    open: Callable[[], AbstractContextManager[Generate]]
    # What answers in settings of a baseline, by name.
    baselines: Mapping[str, Generate] = field(default_factory=dict)


def _check_backend(kind: BackendName, models: Models, settings: RunSettings) -> None:
    """Raise InvalidArgument where something is asked for that the backend does not take."""
    arguments = settings.backend_arguments
    if arguments and kind is not BackendName.SGLANG:
        raise InvalidArgument("backend-arguments", arguments, "none but with --backend sglang")
    if models.compile_backend is not None and kind is not BackendName.LOCAL:
        expected = f"none: --backend {kind} compiles its own way"
        raise InvalidArgument("compile", models.compile_backend, expected)
    baselines = [one.name for one in settings.settings if one.baseline]
    if baselines and kind is BackendName.SGLANG:
        expected = "none with --backend sglang: its engines run one at a time"
        raise InvalidArgument("baselines", baselines, expected)


def _sittings(kind: BackendName, models: Models, settings: RunSettings) -> list[Sitting]:
    """Return what answers in all settings; those of different sittings do not take turns."""
    if kind is BackendName.SGLANG:
        # One engine for each plan, one after another.
        arguments = settings.backend_arguments
        return [
            Sitting(group, partial(_sglang_engine, models, group[0].plan, arguments))
            for group in _by_plan(settings.settings)
        ]
    generate: Generate | None = None
    if kind is BackendName.LOCAL:
        plans = (setting.plan for setting in settings.settings)
        drafting = next((plan for plan in plans if plan.speculative), PLAIN)
        generate = models.load(drafting, opts.UNCACHED).generate
    baselines = _baselines(models, settings.settings)
    answer = generate or next(iter(baselines.values()))
    return [Sitting(settings.settings, lambda: nullcontext(answer), baselines)]


def _place(kind: BackendName, models: Models) -> tuple[str, str]:
    """Return the device and the dtype of the target, in words."""
    if kind is not BackendName.SGLANG:
        place, precision = place_of(models.device, models.dtype)
        return str(place), dtype_name(precision)
    chosen = "SGLang's choice"
    return models.device or chosen, chosen if models.dtype == AUTO_DTYPE else models.dtype


def _by_plan(settings: Sequence[Setting]) -> list[tuple[Setting, ...]]:
    """Group the settings that one engine answers: those of one plan, at all temperatures."""
    return list(map(tuple, grouped(settings, lambda one: (one.baseline, one.plan)).values()))


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
    names = dict.fromkeys(s.baseline for s in settings if s.baseline is not None)
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


# Through SGLang's OpenAI endpoint.


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
    run: Annotated[dict[str, Any], Fields("seed", of=RunSettings, max_tokens=128, seed=0)],
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
    shape = tree.plan()
    sampled = grid(
        opts.verifier_names(verifiers),
        [shape.paths],
        [shape.depth],
        temperature,
        base=Plan(draft_width=shape.draft_width),
    )
    # SGLang's own trees.
    name = f"eagle K{shape.paths} L{shape.depth}"
    eagles = tuple(Setting(plan=PLAIN, temperature=heat, baseline=name) for heat in eagle or ())
    settings = opts.run_settings(
        chosen,
        models,
        sampled.settings + eagles,
        backend="sglang server",
        backend_arguments={"arguments": " ".join(context.args), "at_once": at_once},
        **run,
    )
    folder = RunFolder(
        out or Path("runs") / f"served-{chosen.suite}",
        settings,
        describe_environment("SGLang's", ("sglang",)),
    )

    @contextmanager
    def server(group: tuple[Setting, ...]) -> Iterator[Generate]:
        setting = group[0]
        trees = setting.plan if setting.baseline is None else shape
        log = folder.path / "logs" / f"{setting.name}.txt"
        with running(_launch(setting, trees, models, context.args), log) as url:
            yield Endpoint(url, trees)

    groups = _by_plan(settings.settings)
    sittings = [Sitting(group, partial(server, group)) for group in groups]
    _hold(sittings, chosen.questions, folder, at_once)
    text = plain_text(served_table(settings, folder.records))
    (folder.path / "table.txt").write_text(text + "\n", encoding="utf-8")
    typer.echo(text)


def _launch(setting: Setting, trees: Plan, models: Models, others: Sequence[str]) -> "Launch":
    """Return the command that starts the server of a setting; ``trees`` have this shape."""
    from eaglegbv.backends.sglang.launch import launch
    from eaglegbv.backends.sglang.settings import Settings

    head = models.named.drafter
    settings: Settings | None = None
    if setting.baseline is None:
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
