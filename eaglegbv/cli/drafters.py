"""``eaglegbv bench drafters``: comparison of what a verifier accepts of several drafters."""

import sys
from typing import Annotated

import typer

from eaglegbv.cli.options import (
    AsJson,
    Device,
    DraftTemperature,
    DraftWidth,
    Dtype,
    MaxTokens,
    Model,
    QuestionData,
    Questions,
    QuestionsSet,
    SamplingName,
    base_plan,
    check_verifier,
    integers,
    load_llm,
)
from eaglegbv.utils import DRAFT_WIDTH


def drafters(
    drafter: Annotated[
        list[str],
        typer.Option(
            help="A drafter, as in generate; 'NAME=DRAFTER' shows it as NAME. May be repeated; the "
            "others are compared with the first."
        ),
    ],
    depth: Annotated[int, typer.Option(help="Length of a drafted path, L.")] = 5,
    paths: Annotated[str, typer.Option(help="Numbers of drafted paths, K.")] = "1,3",
    verifier: Annotated[str, typer.Option(help="Verifier, as in generate.")] = "otbv",
    draft_sampling: SamplingName = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    draft_width: DraftWidth = DRAFT_WIDTH,
    draft_temperature: DraftTemperature = 1.0,
    questions: Questions = None,
    questions_set: QuestionsSet = "mt-bench",
    data: QuestionData = None,
    max_tokens: MaxTokens = 128,
    batch: Annotated[int, typer.Option(help="Number of conversations held together.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed from which every answer's seed is derived.")] = 0,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Compare the acceptance length of drafters on the same questions, by depth and category.

    Acceptance length is accepted tokens per target forward, pooled. Its 95% interval, and that of
    the ratio to the first drafter, is a bootstrap over questions. 'd or more' is the share of
    forwards that accept at least d tokens; these shares add up to the length.
    """
    import msgspec
    from tqdm import tqdm

    from eaglegbv.config import EngineConfig
    from eaglegbv.eval.drafters import (
        Conversations,
        DrafterReport,
        category_table,
        depth_table,
        measure_drafter,
    )
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import describe_environment
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.results import DrafterResults, NamedReport

    check_verifier(verifier)
    base = base_plan(draft_sampling, draft_width, draft_temperature)
    plans = [
        msgspec.structs.replace(base, verifier=verifier, paths=k, depth=depth)
        for k in integers("paths", paths)
    ]
    chosen = load_questions(questions_set, data).first(questions)
    conversations = Conversations(
        chosen.questions, temperature=temperature, max_tokens=max_tokens, seed=seed, batch=batch
    )
    named = [split_name(text) for text in drafter]
    reports: list[DrafterReport] = []
    names: list[str] = []
    total = len(named) * len(plans) * len(chosen.questions)
    # Every drafter and plan answers the same prompts, and must read them itself.
    engine = EngineConfig(prefix_cache=False)
    with tqdm(total=total, unit="conversation", file=sys.stderr, disable=None) as bar:
        for name, where in named:
            llm = load_llm(model, where, plans[0], device, dtype, engine=engine)
            for number, plan in enumerate(plans):
                bar.set_postfix_str(f"{name}, {plan.paths} paths", refresh=False)
                first = reports[number] if len(reports) >= len(plans) else None
                report = measure_drafter(llm, plan, conversations, first=first, on_batch=bar.update)
                reports.append(report)
                names.append(name)
    if as_json:
        results = DrafterResults(
            origin=chosen.origin,
            environment=describe_environment(str(llm.device)),
            drafters=tuple(
                NamedReport(name=name, report=report)
                for name, report in zip(names, reports, strict=True)
            ),
        )
        typer.echo(msgspec.json.encode(results).decode())
        return
    typer.echo(plain_text(depth_table(reports, names)))
    typer.echo()
    typer.echo(plain_text(category_table(reports, names)))
    broken = sum(report.errors for report in reports)
    if broken:
        typer.echo(f"conversations that broke off, counted in no figure: {broken}", err=True)


def split_name(text: str) -> tuple[str, str]:
    """Return the displayed name and the drafter, given ``NAME=DRAFTER`` or ``DRAFTER``."""
    name, equals, where = text.partition("=")
    return (name, where) if equals else (text, text)
