"""``eaglegbv audit``: check that verifiers are lossless."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from msgspec.structs import replace as with_fields

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import messages
from eaglegbv.cli.options import Models, opt
from eaglegbv.cli.structs import Fields
from eaglegbv.cli.terminal import progress
from eaglegbv.config import PLAIN, DraftSampling, EngineConfig, PlanChoices
from eaglegbv.errors import InvalidArgument, SamplingMismatch, one_of
from eaglegbv.eval.audit.exact import Result, Subject, exact_subject, package_subjects
from eaglegbv.eval.audit.module import as_subject, load_verifiers
from eaglegbv.eval.audit.pair import audit_pair
from eaglegbv.eval.audit.problems import Sizes
from eaglegbv.eval.audit.sampled import sampled_subject
from eaglegbv.eval.published import BIASED
from eaglegbv.sampling import SamplingParams
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.registry import chosen_plan, make_any_verifier

FAILED = 1
DEPTH = 2  # of the paths that a pair drafts

app = opts.make_app()

PAIR_LEGEND = (
    "cells: texts compared, rare ones together; G: how far their counts are from what they are "
    "compared with; p-value:\nhow often chance alone goes as far; detects: how far from the right "
    "distribution (in total variation) an engine\nmay be before this notices it nine times in ten."
)


COLUMNS: dict[str, tuple[str, str]] = {
    "verifier": ("verifier", ""),
    "drafts": ("draft_sampling", ""),
    "K": ("paths", "d"),
    "widths": ("widths", ""),
    "T": ("temperature", "g"),
    "texts": ("samples", "d"),
    "cells": ("cells", "d"),
    "max error": ("max_abs_error", ".1e"),
    "G": ("statistic", ".1f"),
    "least p": ("min_p_value", ".1e"),
    "p-value": ("p_value", ".1e"),
    "detects": ("detectable_shift", ".3f"),
    "tokens/step": ("block_efficiency", ".4f"),
    "error": ("error", ".3f"),
    "optimum": ("lp_optimum", ".4f"),
    "seconds": ("seconds", ".1f"),
    "verdict": ("verdict", ""),
}
"""What tables of 100 columns show of an audit's results, of those that have it; JSON has all."""

Job: TypeAlias = tuple[Subject, DraftSampling, Sizes]
"""An audit to run: a verifier, the draft sampling of its trees, and sizes of the problems."""


@app.callback(invoke_without_command=True)
def audit(
    context: typer.Context,
    verifier: Annotated[
        str | None, opt("Verifier, as in generate; not needed if a module has only one.")
    ] = None,
    draft_sampling: Annotated[
        DraftSampling | None, opt("Draft sampling; by default the verifier's.")
    ] = None,
    every: Annotated[bool, opt("Every verifier on all it accepts.", "--all")] = False,
    module: Annotated[Path | None, opt("Python file with verifiers of your own.")] = None,
    *,
    sizes: Annotated[dict[str, Any], Fields(of=Sizes)],
    samples: Annotated[
        int | None, opt("Test the batched implementation by so many samples of each problem.")
    ] = None,
    as_json: opts.AsJson = False,
) -> None:
    """Check that verifiers are lossless.

    Enumerates every draft tree and every random decision on tiny random problems (including zeros,
    ties, p = q and disjoint supports), several steps in a row, and compares the distribution of the
    first depth + 1 tokens with the target's. Block efficiency is that of one step; the LP optimum
    is the largest that a lossless step can have (null where the linear program is too large).
    spectr_gbv_published and hsd, biased as published, are controls that an audit rejects.

    Exit status: 0 if all is well; 1 if an error is more than rounding or, with samples, the G-test
    rejects; 2 for bad input.

    \b
    Examples:
      eaglegbv audit --verifier otbv --paths 2 --depth 2
      eaglegbv audit --module my_verifier.py --all
    """
    if context.invoked_subcommand is not None:
        for name in opts.given_options(context):
            expected = f"no option of audit itself before {context.invoked_subcommand!r}"
            raise InvalidArgument(name, context.params[name], expected)
        return
    if "widths" in sizes:
        if "paths" in sizes or "depth" in sizes:
            expected = "neither --paths nor --depth beside it"
            raise InvalidArgument("widths", sizes["widths"], expected)
        sizes.setdefault("iterations", 1)  # no rule with state takes widths
        sizes.setdefault("instances", 5)  # such trees are many
    chosen = Sizes(**sizes)
    subjects = _subjects(module, samples)
    if not every:
        known = _controls(samples) if module is None and verifier in BIASED else subjects
        subject = _choose(known, verifier)
        jobs = [_job(subject, draft_sampling, chosen, clip="paths" not in sizes)]
    elif verifier is None and draft_sampling is None:
        jobs = _every_job(subjects, chosen)
    else:
        raise InvalidArgument("all", True, "neither --verifier nor --draft-sampling beside it")
    results = _run(jobs, as_json=as_json)
    if not as_json:
        opts.print_rows([result.facts for result in results], COLUMNS)
    if not all(result.passed for result in results):
        raise typer.Exit(FAILED)


def _subjects(module: Path | None, samples: int | None) -> dict[str, Subject]:
    if module is not None:
        return {v.name: as_subject(v, samples) for v in load_verifiers(module)}
    exact = package_subjects()
    if samples is None:
        return exact
    return {name: sampled_subject(make_any_verifier(name), samples) for name in exact}


def _controls(samples: int | None) -> dict[str, Subject]:
    """Return rules that are biased as published, which an audit should reject."""
    if samples is None:
        return {name: exact_subject(*rule) for name, rule in BIASED.items()}
    rules = [rule for rule, _ in BIASED.values() if isinstance(rule, Verifier)]
    return {rule.name: sampled_subject(rule, samples) for rule in rules}


def _choose(subjects: dict[str, Subject], name: str | None) -> Subject:
    if name is None and len(subjects) == 1:
        return next(iter(subjects.values()))
    if name is None or name not in subjects:
        raise InvalidArgument("verifier", name, one_of(sorted(subjects), name))
    return subjects[name]


def _job(subject: Subject, chosen: DraftSampling | None, sizes: Sizes, *, clip: bool) -> Job:
    """Return an audit, if ``clip`` with only as many paths as verifier and draft sampling take."""
    chosen = chosen or subject.default_sampling
    if sizes.widths or not clip:
        return subject, chosen, sizes
    paths = subject.fitting_paths(chosen, sizes.paths)
    return subject, chosen, with_fields(sizes, paths=paths)


def _every_job(subjects: dict[str, Subject], sizes: Sizes) -> list[Job]:
    """Return the audits of all rules on all they take; say which take no trees of the widths."""
    jobs = []
    for subject in subjects.values():
        for chosen in sorted(subject.rule.draft_samplings):
            try:
                if sizes.widths:
                    subject.check(chosen, sizes.shape)
            except SamplingMismatch as error:
                typer.echo(f"{subject.rule.name} on {chosen} is left out: {error}", err=True)
            else:
                jobs.append(_job(subject, chosen, sizes, clip=True))
    return jobs


def _run(jobs: Sequence[Job], *, as_json: bool) -> list[Result]:
    """Run audits, and print JSON of them as they come."""
    for subject, chosen, sizes in jobs:
        subject.check(chosen, sizes.shape)
    results: list[Result] = []
    for subject, chosen, sizes in jobs:
        what = f"{subject.rule.name} on {chosen}"
        with progress(sizes.instances, "problem", what, leave=False) as bar:
            result = subject.audit(chosen, sizes, lambda f: bar.update(note=f"{f:.1e}"))
        results.append(result)
        if as_json:
            opts.print_json(result)
    return results


@app.command(short_help="Test the whole engine on real models.")
def pair(
    prompt: Annotated[
        list[str] | None, opt("A prompt of the texts; may be repeated.", shown="about fruit")
    ] = None,
    raw: Annotated[bool, opt("Read prompts as they are, without chat template.", "--raw")] = False,
    verifier: Annotated[
        str, opt("Verifiers to run, as for audit itself, with the same models; or none.")
    ] = "otbv",
    *,
    tree: Annotated[PlanChoices, Fields(without=("verifier",), depth=None)],
    tokens: Annotated[int, opt("How many first tokens to test, by their joint distribution.")] = 4,
    sampling: Annotated[SamplingParams, Fields("temperature", top_k=6, seed=0)],
    samples: Annotated[int, opt("Number of texts to generate.")] = 1_500,
    batch: Annotated[int, opt("Number of texts generated together.")] = 64,
    models: Annotated[Models, Fields("model", "drafter", "device", dtype="float32")],
    against: Annotated[
        str | None,
        opt("What to compare with, exact or plain.", shown="exact in float32, else plain"),
    ] = None,
    as_json: opts.AsJson = False,
) -> None:
    """Test the whole engine on real models: the joint distribution of a text's first tokens.

    Generates the same few tokens many times. A G-test compares how often each text occurred with
    its exact probability under the plain transformers model, in float32; or, in any precision, with
    as many texts of plain decoding. A small top-k leaves few enough texts to list. Drafted paths
    have 2 tokens unless --depth or --widths says otherwise. Exit status 1 if the test rejects at
    level 1e-4.

    \b
    Examples:
      eaglegbv audit pair --model tiny
      eaglegbv audit pair --model MODEL --drafter HEAD --verifier none,otbv --dtype bfloat16
    """
    if tree.depth is None and tree.widths is None:
        tree = replace(tree, depth=DEPTH)
    plans = [
        # With none, the tree is that of the others.
        PLAIN if name == PLAIN.verifier else chosen_plan(replace(tree, verifier=name))
        for name in opts.verifier_names(verifier)
    ]
    exact = models.dtype == "float32" if against is None else against == "exact"
    if against not in (None, "exact", "plain"):
        raise InvalidArgument("against", against, one_of(("exact", "plain"), against))
    params = with_fields(sampling, max_tokens=tokens)
    drafted = next((plan for plan in plans if plan.speculative), PLAIN)
    prompts = prompt or ["Name three kinds of fruit."]
    other = "their exact distribution" if exact else "as many of plain decoding"
    typer.echo(f"{samples:,} texts of {tokens} tokens, against {other}", err=True)
    passed = True
    llm = models.load(drafted, EngineConfig(max_batch=batch))
    asked = [llm.encode(text if raw else messages(text)) for text in prompts]
    runs = len(plans) + (not exact)
    opts.print_expected(llm, samples * tokens * runs, asked[:1] * batch)
    for result in audit_pair(
        llm,
        asked,
        params,
        plans,
        samples=samples,
        exact=exact,
        bar=lambda unit, total: progress(total, unit),
    ):
        passed &= result.passed
        opts.print_results([result], COLUMNS, as_json=as_json, rows=[result.facts])
    if not as_json:
        typer.echo(PAIR_LEGEND)
    if not passed:
        raise typer.Exit(FAILED)


@app.command(
    "served",
    short_help="Test a running server's sampling.",
    add_help_option=False,
    context_settings=opts.PASSED_ON,
)
def audit_served() -> None:
    """Stand in the list of commands; :mod:`eaglegbv.cli.main` runs it without torch."""
