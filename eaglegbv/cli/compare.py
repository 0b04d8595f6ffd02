"""``eaglegbv bench compare``: two runs, or two settings of a run, with paired intervals."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.errors import InvalidArgument

SettingName = Annotated[
    str | None, typer.Option(help="Name of a setting, such as 'otbv K3 L4'.", show_default=False)
]


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of a run, or a results.json.")],
    b: Annotated[
        Path | None, typer.Argument(help="Another one to compare.", show_default="A itself")
    ] = None,
    setting_a: SettingName = None,
    setting_b: SettingName = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Compare B with A: ratios of all figures, with paired bootstrap intervals over questions.

    Two runs are compared in the settings that both have, or in --setting-a of A and --setting-b of
    B; two settings of one run need both options. Speeds of two runs were measured at different
    times, which no interval covers: compare speeds within a run if they matter.
    """
    import msgspec

    from eaglegbv.eval.comparison import compare as compare_sides
    from eaglegbv.eval.comparison import compare_runs, side, table, unlike
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.runner import load_results

    if b is None and (setting_a is None or setting_b is None):
        raise InvalidArgument("b", None, "another run, or --setting-a and --setting-b of this one")
    base = load_results(a, "a")
    other = base if b is None else load_results(b, "b")
    if setting_a is None and setting_b is None:
        comparisons = compare_runs(base, other)
    else:
        names = setting_a or setting_b or "", setting_b or setting_a or ""
        comparisons = [compare_sides(side(base, names[0]), side(other, names[1]))]
    for one in comparisons:
        questions = one.differences[0].questions
        typer.echo(f"A: {one.a}   B: {one.b}   questions: {questions}")
        typer.echo(plain_text(table(one)) + "\n")
    notes = unlike(base, other)
    if notes:
        typer.echo("the runs also differ in:\n" + "\n".join(f"  {note}" for note in notes))
    if b is not None:
        typer.echo("speeds were measured in two sittings; the intervals do not cover that")
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(comparisons), indent=1) + b"\n")
        typer.echo(f"wrote {out}", err=True)
