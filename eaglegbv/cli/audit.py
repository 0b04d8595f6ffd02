"""``eaglegbv audit``: check that verifiers are lossless."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.generate import messages
from eaglegbv.cli.options import (
    VERIFIERS,
    Device,
    Drafter,
    DraftTemperature,
    DraftWidth,
    Model,
    SamplingName,
    base_plan,
    fitting_paths,
    integers,
    names,
    numbers,
)
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.utils import DRAFT_WIDTH

if TYPE_CHECKING:
    from eaglegbv.eval.audit_exact import Result, Sizes, Subject
    from eaglegbv.tree import DraftSampling

FAILED = 1
PATHS = 2

app = typer.Typer(invoke_without_command=True)

PAIR_LEGEND = (
    "cells: texts compared, rare ones together; G: how far their counts are from the exact distribution; "
    "p-value:\nhow often chance alone goes as far; detects: how far from that distribution (in total "
    "variation) an engine may\nbe before this notices it nine times in ten."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object for each result.")]


@dataclass(frozen=True, slots=True)
class Job:
    """An audit to run.

    Attributes:
        subject: The verifier.
        draft_sampling: Draft distribution of its trees.
        sizes: Sizes of the problems.
    """

    subject: "Subject"
    draft_sampling: "DraftSampling"
    sizes: "Sizes"


@app.callback()
def audit(
    context: typer.Context,
    verifier: Annotated[
        str | None,
        typer.Option(help=f"Verifier to audit, not needed if a module has only one: {VERIFIERS}."),
    ] = None,
    draft_sampling: Annotated[
        str | None,
        typer.Option(
            help="Draft sampling: iid, wor, greedy, hub or fixed.",
            show_default="the verifier's own",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Audit every verifier with every distribution it accepts.")
    ] = False,
    module: Annotated[
        Path | None, typer.Option(help="Python file with verifiers of your own.")
    ] = None,
    vocab: Annotated[int, typer.Option(help="Number of tokens.")] = 3,
    depth: Annotated[int, typer.Option(help="Drafted tokens per path, L.")] = 2,
    paths: Annotated[
        int | None,
        typer.Option(help="Drafted paths, K.", show_default="2, or as many as the verifier takes"),
    ] = None,
    instances: Annotated[int, typer.Option(help="Number of random problems.")] = 50,
    iterations: Annotated[int, typer.Option(help="Verification steps in a row.")] = 2,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Test the batched implementation by this many samples of each problem, "
            "instead of enumerating the reference."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest error that passes.")] = 1e-12,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Check that verifiers are lossless.

    Enumerates every draft tree and every random decision on tiny random problems (including zeros,
    ties, p = q and disjoint supports), several steps in a row, and compares the distribution of the first
    depth + 1 tokens with the target's. Block efficiency is that of one step; the LP optimum is the
    largest that a lossless step can have (null where the linear program is too large).

    Exit status: 0 if all is well; 1 if an error exceeds the tolerance or, with samples, the G-test
    rejects; 2 for bad input.
    """
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return
    from eaglegbv.eval.audit_exact import Sizes

    if not tolerance >= 0:
        raise InvalidArgument("tolerance", tolerance, "a number of at least 0")
    sizes = Sizes(
        vocab=vocab,
        depth=depth,
        paths=PATHS if paths is None else paths,
        instances=instances,
        iterations=iterations,
        seed=seed,
    )
    subjects = _subjects(module, samples)
    if every:
        if verifier is not None or draft_sampling is not None:
            raise InvalidArgument("all", True, "neither --verifier nor --draft-sampling beside it")
        jobs = [job for subject in subjects.values() for job in _every_sampling(subject, sizes)]
    else:
        jobs = [_job(_choose(subjects, verifier), draft_sampling, sizes, clip=paths is None)]
    results = _run(jobs, tolerance, as_json=as_json)
    if not all(result.passed(tolerance) for result in results):
        raise typer.Exit(FAILED)


def _refuse_own_options(context: typer.Context) -> None:
    """Refuse options before a subcommand, which would have no effect."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            expected = f"no option of audit itself before {context.invoked_subcommand!r}"
            raise InvalidArgument(name, context.params[name], expected)


def _subjects(module: Path | None, samples: int | None) -> "dict[str, Subject]":
    """Return the available verifiers by name."""
    from eaglegbv.eval.audit_exact import package_subjects
    from eaglegbv.eval.audit_module import as_subject, load_verifiers
    from eaglegbv.eval.audit_sampled import sampled_subject
    from eaglegbv.verifiers.registry import make_any_verifier

    if module is not None:
        return {v.name: as_subject(v, samples) for v in load_verifiers(module)}
    exact = package_subjects()
    if samples is None:
        return dict(exact)
    return {name: sampled_subject(make_any_verifier(name), samples) for name in exact}


def _choose(subjects: "dict[str, Subject]", name: str | None) -> "Subject":
    if name is None and len(subjects) == 1:
        return next(iter(subjects.values()))
    if name is None or name not in subjects:
        raise InvalidArgument("verifier", name, one_of(sorted(subjects), name))
    return subjects[name]


def _job(subject: "Subject", draft_sampling: str | None, sizes: "Sizes", *, clip: bool) -> Job:
    import msgspec

    from eaglegbv.tree import DraftSampling

    if draft_sampling is not None and draft_sampling not in set(DraftSampling):
        raise InvalidArgument(
            "draft_sampling", draft_sampling, one_of(DraftSampling, draft_sampling)
        )
    chosen = subject.default_sampling if draft_sampling is None else DraftSampling(draft_sampling)
    if clip:
        paths = subject.fitting_paths(chosen, sizes.paths)
        sizes = msgspec.structs.replace(sizes, paths=paths)
    return Job(subject, chosen, sizes)


def _every_sampling(subject: "Subject", sizes: "Sizes") -> list[Job]:
    """Return one job per distribution, with as many paths as the verifier and the distribution take."""
    return [
        _job(subject, str(draft_sampling), sizes, clip=True)
        for draft_sampling in sorted(subject.draft_samplings)
    ]


def _run(jobs: Sequence[Job], tolerance: float, *, as_json: bool) -> "list[Result]":
    """Run audits, and print results as they come, or a table at the end if there are many."""
    import msgspec

    from eaglegbv.eval.report import plain_text

    for job in jobs:
        job.subject.check(job.draft_sampling, job.sizes.shape)
    results: list[Result] = []
    for job in jobs:
        with _progress(f"{job.subject.name} on {job.draft_sampling}", job.sizes.instances) as show:
            result = job.subject.audit(job.draft_sampling, job.sizes, show)
        results.append(result)
        if as_json:
            typer.echo(msgspec.json.encode(result).decode())
    if not as_json:
        rows = [_row(job, result, tolerance) for job, result in zip(jobs, results, strict=True)]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        typer.echo(plain_text([columns, *([row.get(c, "-") for c in columns] for row in rows)]))
    return results


def _row(job: Job, result: "Result", tolerance: float) -> dict[str, str]:
    return {
        "verifier": result.verifier,
        "draft_sampling": result.draft_sampling,
        "K": str(job.sizes.paths),
        **result.figures(),
        "verdict": "lossless" if result.passed(tolerance) else "NOT LOSSLESS",
    }


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error if that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit="problem", leave=False, disable=None) as bar:

        def show(figure: float) -> None:
            bar.set_postfix_str(f"{figure:.1e}", refresh=False)
            bar.update()

        yield show


@app.command(short_help="Test the whole engine on real models.")
def pair(
    prompt: Annotated[
        str, typer.Option(help="The prompt of all texts.")
    ] = "Name three kinds of fruit.",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    verifier: Annotated[
        str, typer.Option(help="Verifier to run, as for audit itself; or none.")
    ] = "otbv",
    paths: Annotated[
        int | None,
        typer.Option(help="Drafted paths, K.", show_default="3, or as many as the verifier takes"),
    ] = None,
    depth: Annotated[int, typer.Option(help="Drafted tokens per path, L.")] = 2,
    draft_sampling: SamplingName = None,
    draft_width: DraftWidth = DRAFT_WIDTH,
    draft_temperature: DraftTemperature = 1.0,
    tokens: Annotated[
        int, typer.Option(help="How many first tokens to test, by their joint distribution.")
    ] = 4,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens the target may choose from.")] = 6,
    samples: Annotated[int, typer.Option(help="Number of texts to generate.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the first text.")] = 0,
    batch: Annotated[int, typer.Option(help="Number of texts generated together.")] = 64,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Test the whole engine on real models: the joint distribution of a text's first tokens.

    Generates the same few tokens many times. A G-test compares how often each text occurred with
    its exact probability under the plain transformers model. A small top-k leaves few enough texts
    to list; the models run in float32. Exit status 1 if the test rejects at level 1e-4.
    """
    import msgspec
    import torch
    from transformers.utils.logging import disable_progress_bar

    from eaglegbv.config import EngineConfig
    from eaglegbv.eval.audit_engine import audit_pair
    from eaglegbv.eval.report import plain_text
    from eaglegbv.llm import LLM
    from eaglegbv.sampling import SamplingParams

    plan = base_plan(draft_sampling, draft_width, draft_temperature)
    fitting = fitting_paths(verifier, plan.paths)
    plan = msgspec.structs.replace(
        plan, verifier=verifier, paths=fitting if paths is None else paths, depth=depth
    )
    params = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=tokens, seed=seed)
    disable_progress_bar()
    llm = LLM(
        model,
        drafter,
        plan=plan,
        device=device,
        dtype=torch.float32,
        engine=EngineConfig(max_batch=batch),
    )
    result = audit_pair(
        llm,
        prompt if raw else messages(prompt),
        params,
        samples=samples,
        progress=not as_json and sys.stderr.isatty(),
        tell=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        row = {**result.figures(), "verdict": "lossless" if result.passed else "NOT LOSSLESS"}
        typer.echo(plain_text([list(row), list(row.values())]))
        typer.echo(PAIR_LEGEND)
    if not result.passed:
        raise typer.Exit(FAILED)


@app.command(short_help="Measure block efficiency on synthetic models.")
def picture(
    out: Annotated[
        Path | None, typer.Option(help="Picture to write (.svg, .png, ...).", show_default="none")
    ] = None,
    verifiers: Annotated[
        str, typer.Option(help="Verifiers to compare.")
    ] = "token,block,specinfer,spectr,global_resolution,traversal,gbv,otbv",
    temperatures: Annotated[
        str, typer.Option(help="Temperatures of both models, compared at --at-paths.")
    ] = "0.2,0.4,0.6,0.8,1.0,1.25,1.5",
    at_paths: Annotated[int, typer.Option(help="Paths, K, for comparing temperatures.")] = 4,
    paths: Annotated[str, typer.Option(help="Numbers of paths.")] = "1,2,3,4,6,8",
    at_temperature: Annotated[
        float, typer.Option(help="Temperature at which numbers of paths are compared.")
    ] = 1.0,
    vocab: Annotated[int, typer.Option(help="Number of tokens.")] = 64,
    depth: Annotated[int, typer.Option(help="Drafted tokens per path, L.")] = 6,
    sharpness: Annotated[
        float, typer.Option(help="Standard deviation of the target's logits.")
    ] = 3.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the drafter's error.")] = 1.0,
    trees: Annotated[int, typer.Option(help="Number of trees for each figure.")] = 3000,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure block efficiency on synthetic models, by temperature and by number of paths.

    Prints a table and, with --out, draws a picture (matplotlib comes with eaglegbv[bench]). At
    every prefix, the target's logits are newly drawn normal numbers, and the drafter's are the
    target's plus normal noise. Verifiers that leave a modified target need a whole text, so they
    are left out.
    """
    import msgspec

    from eaglegbv.eval.audit_picture import SyntheticSettings, draw, measure
    from eaglegbv.eval.plots import check_matplotlib
    from eaglegbv.eval.report import plain_text

    if out is not None:
        check_matplotlib()
    settings = SyntheticSettings(
        vocab=vocab, depth=depth, sharpness=sharpness, noise=noise, trees=trees, seed=seed
    )
    chosen = names("verifiers", verifiers)
    ks, ts = integers("paths", paths), numbers("temperatures", temperatures)
    measuring = [
        measure(chosen, [at_paths], ts, settings),
        measure(chosen, ks, [at_temperature], settings),
    ]
    by_temperature, by_paths = (list(figures) for figures in measuring)
    figures = list(dict.fromkeys([*by_temperature, *by_paths]))
    if as_json:
        for figure in figures:
            typer.echo(msgspec.json.encode(figure).decode())
    else:
        rows = [
            [
                f.verifier,
                str(f.paths),
                f"{f.temperature:g}",
                f"{f.block_efficiency:.2f}",
                f"{f.error:.3f}",
            ]
            for f in figures
        ]
        typer.echo(
            plain_text([["verifier", "K", "T", "block efficiency", "standard error"], *rows])
        )
    if out is not None:
        caption = (
            f"Synthetic models: V = {vocab}, L = {depth}, target logits N(0, {sharpness:g}\u00b2), "
            f"drafter's error N(0, {noise:g}\u00b2); {trees} trees a point; bars: 95%"
        )
        typer.echo(f"wrote {draw(by_temperature, by_paths, out, caption=caption)}", err=True)
