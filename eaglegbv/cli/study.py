"""``eaglegbv bench study``: sampled against deterministic trees, and the draft temperature."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.drafters import split_name
from eaglegbv.cli.options import (
    Device,
    Dtype,
    MaxTokens,
    Model,
    QuestionData,
    Questions,
    QuestionsSet,
    integers,
    load_llm,
    numbers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eaglegbv.eval.questions import Question
    from eaglegbv.eval.study import Study
    from eaglegbv.llm import LLM


def study(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter, as in generate; 'NAME=DRAFTER' shows it as NAME. May be repeated.",
            show_default="eagle3 and eagle1",
        ),
    ] = None,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures of the target.")
    ] = "0,0.2,0.4,0.6,0.8,1.0,1.2",
    draft_temperatures: Annotated[
        str, typer.Option(help="Draft temperatures, as multiples of the target's, including 1.")
    ] = "0.5,1,1.5,2,3",
    paths: Annotated[str, typer.Option(help="Numbers of paths of sampled trees, K.")] = "1,2,4",
    depth: Annotated[int, typer.Option(help="Length of a path, and depth of fixed trees.")] = 4,
    sizes: Annotated[
        str, typer.Option(help="Numbers of nodes of fixed trees, up to K L or more.")
    ] = "1,2,4,6,8,12,16",
    questions: Questions = None,
    questions_set: QuestionsSet = "mt-bench",
    data: QuestionData = None,
    places: Annotated[int, typer.Option(help="Places per text at which trees are drafted.")] = 3,
    judgements: Annotated[int, typer.Option(help="How many times each tree is judged.")] = 3,
    max_tokens: MaxTokens = 64,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/study"),
) -> None:
    """Compare sampled with deterministic trees of as many nodes, at every draft temperature.

    The target writes texts by plain decoding at every temperature. At places of these texts,
    sampled trees (K paths, otbv) and best-first fixed trees (target_only, which is optimal for
    them) are drafted and judged. 'nodes' are those that the target scores; a sampled tree is
    compared with the mixture of two fixed trees with the same mean number of nodes. Writes
    study.json and a picture (matplotlib comes with eaglegbv[bench]) into --out; results are saved
    after every temperature.
    """
    from eaglegbv.config import EngineConfig, Plan
    from eaglegbv.eval.plots import check_matplotlib
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import describe_environment, name_of_model
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.study import Study, StudySettings, draw_study, findings, study_table

    check_matplotlib()
    settings = StudySettings(
        temperatures=tuple(numbers("temperatures", temperatures)),
        draft_temperatures=tuple(numbers("draft-temperatures", draft_temperatures)),
        paths=tuple(integers("paths", paths)),
        depth=depth,
        sizes=tuple(integers("sizes", sizes)),
        places=places,
        judgements=judgements,
        max_tokens=max_tokens,
        seed=seed,
    )
    chosen = load_questions(questions_set, data).first(questions)
    named = [split_name(text) for text in drafter or ("eagle3", "eagle1")]
    # Texts are read once each, and all drafters share them.
    engine = EngineConfig(prefix_cache=False, max_batch=max(1, len(chosen.questions)))
    llms = {
        name: load_llm(model, where, Plan(), device, dtype, engine=engine) for name, where in named
    }
    first = next(iter(llms.values()))
    result = Study(
        model=name_of_model(first.model_name),
        drafters=tuple(llms),
        questions=tuple(question.id for question in chosen.questions),
        suite=chosen.suite,
        settings=settings,
        environment=describe_environment(str(first.device)),
        sampled=(),
        fixed=(),
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "study.json"
    result = _measure(result, llms, chosen.questions, path)
    typer.echo(plain_text(study_table(result)))
    for finding in findings(result):
        typer.echo(f"- {finding}")
    for picture in draw_study(result, out):
        typer.echo(f"wrote {picture}", err=True)
    typer.echo(f"wrote {path}", err=True)


def _measure(
    study: "Study", llms: "Mapping[str, LLM]", questions: "Sequence[Question]", path: Path
) -> "Study":
    """Return the study with the drafters' results, which are saved after every temperature."""
    import msgspec
    from tqdm import tqdm

    from eaglegbv.eval.paired_comparison import collect
    from eaglegbv.eval.study import study_cells

    settings = study.settings
    first = next(iter(llms.values()))
    total = len(settings.temperatures) * len(llms) * len(questions)
    with tqdm(total=total, unit="text", file=sys.stderr, disable=None) as bar:
        for temperature in settings.temperatures:
            texts = collect(
                first,
                questions,
                temperature=temperature,
                max_tokens=settings.max_tokens,
                seed=settings.seed,
            )
            for name, llm in llms.items():
                bar.set_postfix_str(f"T {temperature:g}, {name}", refresh=False)
                cells = study_cells(
                    name, llm.pair, texts, temperature, settings, on_texts=bar.update
                )
                study = msgspec.structs.replace(
                    study,
                    sampled=(*study.sampled, *cells.sampled),
                    fixed=(*study.fixed, *cells.fixed),
                )
            path.write_bytes(msgspec.json.encode(study) + b"\n")
    return study
