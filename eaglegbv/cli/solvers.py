"""``eaglegbv bench solvers``: comparison of the solvers of optimal transport at a node."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.options import AsJson, integers, names
from eaglegbv.errors import InvalidArgument, one_of

if TYPE_CHECKING:
    from eaglegbv.eval.solvers import Row, Setting
    from eaglegbv.verifiers.global_resolution import Solver

ALL = "all"


def solvers(
    vocab: Annotated[
        str | None, typer.Option(help="Sizes of the vocabulary.", show_default="the standard table")
    ] = None,
    drafts: Annotated[
        str | None, typer.Option(help="Numbers of drafts, n.", show_default="the standard table")
    ] = None,
    width: Annotated[
        str,
        typer.Option(
            help="Tokens that draft distributions keep; 'all' keeps the whole vocabulary."
        ),
    ] = "all,64",
    solver: Annotated[
        str, typer.Option(help="Solvers to compare.")
    ] = "exact,convex,race,max_flow,lp",
    instances: Annotated[int, typer.Option(help="Number of random nodes of each size.")] = 10,
    time_limit: Annotated[
        float, typer.Option(help="Milliseconds of processor time after which a solver has failed.")
    ] = 1000.0,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare the solvers of optimal transport for independent drafts at one node.

    Times are medians of processor time from the two distributions and the drafts to the selected draft. A
    solver succeeds if it is in time and its bound on the lost acceptance is within 1e-3. If the
    bound is larger, K-SEQ takes its place (a fall-back). A solver refuses nodes that are too large
    for it. The deviation is the largest L1 distance of the committed distribution from the target's.

    By default the standard sizes are measured; with --vocab and --drafts, all pairs of theirs.
    """
    import msgspec
    from tqdm import tqdm

    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.solvers import compare

    settings, chosen = _settings(vocab, drafts, width), _solvers(solver)
    with tqdm(total=len(settings) * len(chosen), unit="row", file=sys.stderr, disable=None) as bar:

        def show(row: "Row") -> None:
            bar.set_postfix_str(f"V {row.vocab}, n {row.drafts}: {row.solver}", refresh=False)
            bar.update()

        report = compare(
            settings,
            chosen,
            instances=instances,
            seed=seed,
            time_limit=time_limit / 1e3,
            on_row=show,
        )
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    rows = [_cells(row) for row in report.rows]
    typer.echo(plain_text([list(rows[0]), *(list(row.values()) for row in rows)]))


def _settings(vocab: str | None, drafts: str | None, width: str) -> "list[Setting]":
    from eaglegbv.eval.solvers import STANDARD, settings_of

    if (vocab is None) != (drafts is None):
        raise InvalidArgument("drafts", drafts, "given with --vocab, and neither without the other")
    sizes = list(STANDARD)
    if vocab is not None and drafts is not None:
        sizes = [(v, n) for v in integers("vocab", vocab) for n in integers("drafts", drafts)]
    widths = [None if w == ALL else integers("width", w)[0] for w in names("width", width)]
    return settings_of(sizes, widths)


def _solvers(text: str) -> "list[Solver]":
    from eaglegbv.verifiers.global_resolution import Solver

    chosen = names("solver", text)
    for name in chosen:
        if name not in set(Solver):
            raise InvalidArgument("solver", name, one_of(Solver, name))
    return [Solver(name) for name in chosen]


def _cells(row: "Row") -> dict[str, str]:
    def figure(value: float | None, layout: str) -> str:
        return "-" if value is None else format(value, layout)

    return {
        "V": str(row.vocab),
        "width": str(row.width),
        "n": str(row.drafts),
        "solver": row.solver,
        "ms/token": figure(row.median_ms, ".2f"),
        "success": f"{row.success:.0%}",
        "too large": str(row.refused),
        "fall-backs": str(row.fallbacks),
        "late": str(row.late),
        "L1 deviation": figure(row.deviation, ".1e"),
        "acceptance": figure(row.acceptance, ".4f"),
        "optimum": figure(row.optimum, ".4f"),
        "bound": figure(row.shortfall, ".1e"),
    }
