"""The study of sampled and deterministic trees as tables, findings and a picture."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eaglegbv.eval.estimates import Estimate, SideOfOne
from eaglegbv.eval.picture import (
    CAPTION,
    COLOURS,
    check_matplotlib,
    picture_style,
    plain_axes,
    save_pictures,
    whiskers,
)
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.study import SampledCell, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    SideOfOne.ABOVE: "more tokens",
    SideOfOne.BELOW: "fewer tokens",
    SideOfOne.OPEN: "not told apart",
}


def best(cells: Iterable[SampledCell]) -> SampledCell:
    """Return the cell with the most tokens a step."""
    return max(cells, key=lambda cell: cell.tokens.value)


def study_table(study: Study) -> list[list[str]]:
    """Return one row for each drafter, temperature and K, headings first."""
    rows = [
        [
            *("drafter", "T", "K", "nodes", "sampled", "fixed, as many nodes", "ratio"),
            *("best draft T", "sampled so", "over 1x", "over fixed, as many nodes"),
        ]
    ]
    for group in _groups(study):
        own, top = _equal(group), best(group)
        rows.append(
            [
                own.drafter,
                f"{own.temperature:g}",
                str(own.paths) if own.temperature > 0 else "any",
                f"{own.nodes:.1f}",
                f"{own.tokens.value:.3f}",
                f"{own.fixed:.3f}",
                with_interval(own.over_fixed, 3),
                f"{top.draft_temperature:g}x",
                f"{top.tokens.value:.3f}",
                with_interval(top.over_equal, 3),
                with_interval(top.over_fixed, 3),
            ]
        )
    return rows


def findings(study: Study) -> list[str]:
    """Return sentences on where sampled trees win, and which draft temperatures pay."""
    return [*tree_findings(study), *temperature_findings(study)]


def tree_findings(study: Study) -> list[str]:
    """Return sentences on where sampled trees win over deterministic ones of as many nodes."""
    found = []
    for drafter, k, groups in _by_paths(study):
        if k > 1:
            own = [_equal(group) for group in groups]
            found.append(
                f"{drafter}, K = {k}: sampled at the target's own temperature against fixed, "
                f"as many nodes: {_by_side([(c.temperature, c.over_fixed) for c in own])}"
            )
    return found


def temperature_findings(study: Study) -> list[str]:
    """Return sentences on which draft temperatures pay."""
    found = []
    for drafter, k, groups in _by_paths(study):
        for name, colder in (("hotter", False), ("colder", True)):
            turned = [_turned(group, colder=colder) for group in groups]
            ratios = [(c.temperature, c.over_equal) for c in turned if c is not None]
            if ratios:
                found.append(
                    f"{drafter}, K = {k}: sampled {name}, at the best such multiple, against "
                    f"at the target's own temperature: {_by_side(ratios)}"
                )
        multiples = [best(group) for group in groups]
        found.append(
            f"{drafter}, K = {k}: best of all multiples "
            + ", ".join(f"{c.draft_temperature:g} at T = {c.temperature:g}" for c in multiples)
        )
    return found


def _by_paths(study: Study) -> Iterator[tuple[str, int, list[list[SampledCell]]]]:
    """Yield the groups of each drafter and number of paths, without temperature 0."""
    for drafter in study.drafters:
        own = [g for g in _groups(study) if g[0].drafter == drafter and g[0].temperature > 0]
        for k in sorted({group[0].paths for group in own}):
            yield drafter, k, [group for group in own if group[0].paths == k]


def _by_side(ratios: Sequence[tuple[float, Estimate]]) -> str:
    parts = []
    for side, words in WORDS.items():
        at = [f"{temperature:g}" for temperature, ratio in ratios if ratio.side_of_one() is side]
        if at:
            parts.append(f"{words} at T = {', '.join(at)}")
    return "; ".join(parts)


def _groups(study: Study) -> list[list[SampledCell]]:
    """Group the cells that differ only in the draft temperature."""
    groups: dict[tuple[str, float, int], list[SampledCell]] = {}
    for cell in study.sampled:
        groups.setdefault((cell.drafter, cell.temperature, cell.paths), []).append(cell)
    return list(groups.values())


def _equal(group: Sequence[SampledCell]) -> SampledCell:
    return next(cell for cell in group if cell.draft_temperature == 1.0)


def _turned(group: Sequence[SampledCell], *, colder: bool) -> SampledCell | None:
    """Return the best cell drafted colder than the target, or hotter; None if there is none."""
    cells = [c for c in group if c.draft_temperature != 1 and (c.draft_temperature < 1) == colder]
    return best(cells) if cells else None


def draw_study(study: Study, folder: Path) -> list[Path]:
    """Draw the results of the most paths into ``folder``, as PNG and SVG; return the paths.

    Raises:
        NotInstalled: matplotlib is missing.
        InvalidArgument: A file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure as Canvas

    with picture_style():
        count = len(study.drafters)
        canvas = Canvas(figsize=(max(5.0, 3.6 * count), 7.0), layout="constrained")
        panels = canvas.subplots(2, count, squeeze=False, sharey="row")
        most = max(study.settings.paths)
        for column, drafter in enumerate(study.drafters):
            groups = [
                g
                for g in _groups(study)
                if g[0].drafter == drafter and (g[0].paths == most or g[0].temperature == 0)
            ]
            _by_temperature(panels[0][column], groups)
            _by_draft_temperature(panels[1][column], groups)
            panels[0][column].set_title(f"{drafter}, K = {most}", fontsize=9)
        for row in panels:
            row[0].set_ylabel("tokens a step")
        canvas.supxlabel(
            f"{study.suite}, {len(study.questions)} questions, L = {study.settings.depth}; "
            f"{study.model}; {study.environment.started[:10]}",
            fontsize=7,
            color=CAPTION,
        )
        return save_pictures(canvas, folder, "study")


def _by_temperature(axes: "Axes", groups: Sequence[Sequence[SampledCell]]) -> None:
    own, tops = [_equal(g) for g in groups], [best(g) for g in groups]
    heats = [cell.temperature for cell in own]
    axes.errorbar(
        heats,
        [cell.tokens.value for cell in own],
        yerr=whiskers([cell.tokens for cell in own]),
        color=COLOURS["otbv"],
        elinewidth=0.6,
        marker="o",
        markersize=3,
        label="sampled (otbv)",
    )
    axes.plot(
        heats,
        [cell.tokens.value for cell in tops],
        color=COLOURS["otbv"],
        linestyle=":",
        label="sampled, best draft temperature",
    )
    axes.plot(
        heats,
        [cell.fixed for cell in own],
        color=COLOURS["target_only"],
        marker="o",
        markersize=3,
        label="fixed, as many nodes",
    )
    axes.set_xlabel("temperature")
    axes.legend(frameon=False, fontsize=7)
    plain_axes(axes, "y")


def _by_draft_temperature(axes: "Axes", groups: Sequence[Sequence[SampledCell]]) -> None:
    from matplotlib import colormaps

    warm = [group for group in groups if group[0].temperature > 0]
    for number, group in enumerate(warm):
        cells = sorted(group, key=lambda cell: cell.draft_temperature)
        axes.plot(
            [cell.draft_temperature for cell in cells],
            [cell.tokens.value for cell in cells],
            color=colormaps["viridis"](number / max(1, len(warm))),
            marker="o",
            markersize=3,
            label=f"T = {group[0].temperature:g}",
        )
    axes.set_xlabel("draft temperature, multiple of the target's")
    axes.legend(frameon=False, fontsize=7)
    plain_axes(axes, "y")
