"""``eaglegbv bench paper``: a paper's comparison on any pair, and whether its directions hold."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.cli.options import Device, Drafter, Dtype, Model
from eaglegbv.errors import InvalidArgument


def paper(
    name: Annotated[str, typer.Argument(help="bv, gbv-paths or gbv-temperatures.")],
    questions: Annotated[
        int | None, typer.Option(help="Number of questions.", show_default="all")
    ] = None,
    questions_set: Annotated[str, typer.Option(help="As of mt-bench.")] = "mt-bench",
    data: Annotated[Path | None, typer.Option(help="As of mt-bench.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Every request's seed derives from it.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 1,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default="runs/paper-NAME")
    ] = None,
) -> None:
    """Measure what a paper compares, and say in which direction each figure should differ.

    Other models give other figures: it is order and trend that should agree. Each is tested by a
    paired bootstrap interval of the ratio of block efficiencies.
    """
    from eaglegbv.cli.bench import mt_bench
    from eaglegbv.eval.papers import AGAINST, AGREES, PAPERS, findings, table
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.store import load_results

    if name not in PAPERS:
        raise InvalidArgument("name", name, f"one of {', '.join(sorted(PAPERS))}")
    chosen = PAPERS[name]
    folder = out or Path("runs") / f"paper-{name}"
    typer.echo(chosen.title)
    mt_bench(
        questions=questions,
        questions_set=questions_set,
        data=data,
        verifiers=",".join(chosen.verifiers),
        paths=_list(chosen.paths),
        depth=_list(chosen.depths),
        temperature=_list(chosen.temperatures),
        max_tokens=max_tokens,
        seed=seed,
        repeats=repeats,
        model=model,
        drafter=drafter,
        device=device,
        dtype=dtype,
        out=folder,
    )
    found = findings(chosen, load_results(folder))
    typer.echo("\n" + plain_text(table(found)))
    counts = [f"{sum(one.verdict == v for one in found)} {v}" for v in (AGREES, AGAINST)]
    typer.echo(f"of {len(found)} directions: {', '.join(counts)}, the rest not told apart")


def _list(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
