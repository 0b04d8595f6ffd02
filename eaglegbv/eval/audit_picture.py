"""A picture of block efficiency against temperature and the number of paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from eaglegbv.eval.audit_synthetic import Figure
from eaglegbv.eval.picture import (
    CAPTION,
    COLOURS,
    check_matplotlib,
    picture_style,
    plain_axes,
    save_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTERVAL = 1.96
SINGLE = frozenset({"token", "block"})
"""Verifiers that use a single path."""

Axis: TypeAlias = Literal["temperature", "paths"]

LABEL_GAP = 0.04
"""Least distance of two labels, as a share of the height of the axis."""


def draw(
    by_temperature: Sequence[Figure], by_paths: Sequence[Figure], path: Path, *, caption: str
) -> Path:
    """Write the picture, in the format of the path's suffix.

    Args:
        by_temperature: Figures at several temperatures.
        by_paths: Figures with several numbers of paths.
        path: File to write.
        caption: What was measured, in a line or two.

    Raises:
        NotInstalled: matplotlib is missing.
        InvalidArgument: The file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure as Canvas

    with picture_style():
        canvas = Canvas(figsize=(10, 4.8), layout="constrained")
        left, right = canvas.subplots(1, 2, sharey=True)
        paths = max(figure.paths for figure in by_temperature)
        _lines(left, {name: _curve(by_temperature, name, "temperature") for name in COLOURS})
        left.set_xlabel(f"temperature (K = {paths}; dashed: one path)")
        left.set_ylabel("block efficiency (tokens per target forward)")
        several = [figure for figure in by_paths if figure.verifier not in SINGLE]
        _lines(right, {name: _curve(several, name, "paths") for name in COLOURS})
        right.set_xlabel(f"paths K (temperature {by_paths[0].temperature:g})")
        canvas.supxlabel(caption, fontsize=8, color=CAPTION)
        save_picture(canvas, path)
    return path


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve and half its interval."""

    x: float
    y: float
    half: float


def _curve(figures: Sequence[Figure], verifier: str, axis: Axis) -> list[Point]:
    own = (figure for figure in figures if figure.verifier == verifier)
    points = (
        Point(
            figure.temperature if axis == "temperature" else figure.paths,
            figure.block_efficiency,
            INTERVAL * figure.error,
        )
        for figure in own
    )
    return sorted(points, key=lambda point: point.x)


def _lines(axes: "Axes", curves: Mapping[str, list[Point]]) -> None:
    drawn = {name: curve for name, curve in curves.items() if curve}
    for name, curve in drawn.items():
        axes.errorbar(
            [point.x for point in curve],
            [point.y for point in curve],
            yerr=[point.half for point in curve],
            color=COLOURS[name],
            linestyle="--" if name in SINGLE else "-",
            linewidth=2.4 if name == "otbv" else 1.2,
            elinewidth=0.6,
            marker="o",
            markersize=3,
        )
    plain_axes(axes, "y")
    right = max(point.x for curve in drawn.values() for point in curve)
    low, high = axes.get_ylim()
    ends = {name: curve[-1].y for name, curve in drawn.items()}
    for name, y in _spread(ends, LABEL_GAP * (high - low)).items():
        axes.annotate(
            name,
            (right, y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[name],
            fontweight="bold" if name == "otbv" else "normal",
            annotation_clip=False,
        )


def _spread(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move labels apart, upwards from the lowest, then all back so that their mean is unchanged."""
    order = sorted(places, key=lambda name: places[name])
    moved: dict[str, float] = {}
    last = -float("inf")
    for name in order:
        last = max(places[name], last + gap)
        moved[name] = last
    shift = sum(moved[name] - places[name] for name in order) / max(1, len(order))
    return {name: y - shift for name, y in moved.items()}
