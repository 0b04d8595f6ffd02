"""What all pictures share: colours, plain axes, files. They need matplotlib (extra ``bench``)."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
from msgspec.structs import replace as replaced

from eaglegbv.errors import InvalidArgument, NotInstalled
from eaglegbv.eval.figures import (
    ACCEPTANCE,
    SPEED,
    Estimate,
    Figure,
    Sums,
    phase_figures,
    position_figures,
)
from eaglegbv.eval.settings import Axis, Setting
from eaglegbv.eval.tables import over_plain
from eaglegbv.utils import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


COLOURS: Mapping[str, str] = {
    "otbv": "#0b5fa5",
    "global_resolution": "#d1495b",
    "traversal": "#00798c",
    "gbv": "#e08e1b",
    "spectr": "#7b5ea7",
    "specinfer": "#66a182",
    "block": "#3d3d3d",
    "token": "#8a8a8a",
    "target_only": "#b08968",
}
"""Colours by verifier, suited to the common colour deficiencies; every line has a label too."""

SPARE_COLOURS = ("#4c566a", "#a3752c", "#5b8c2a", "#8c3b5b")
PLAIN_COLOUR = "#8a8a8a"
Colour: TypeAlias = str | tuple[float, ...]

BACKEND_VARIABLE = "MPLBACKEND"  # environment variable that matplotlib reads
FORMATS = ("png", "svg")
DPI = 150
GRID = "#e6e6e6"
CAPTION = "#555555"
CHARACTERS_AN_INCH = 16  # characters of a caption per inch
PANELS_A_ROW = 3
LINE_STYLES = ("-", "--", ":", "-.")
ACCEPTANCE_LABEL = "acceptance length (tokens per target forward)"


def check_matplotlib() -> None:
    """Raise :class:`NotInstalled` unless matplotlib can be imported."""
    if find_spec("matplotlib") is None:
        raise NotInstalled("matplotlib", "bench")


def _import_matplotlib() -> ModuleType:
    """Import matplotlib, whichever backend a notebook names that starts this as a command.

    ``MPLBACKEND`` may name one that is not installed here, and matplotlib refuses to be imported
    then. Pictures are drawn to files, for which the backend does not matter.
    """
    backend = os.environ.pop(BACKEND_VARIABLE, None)
    try:
        matplotlib = import_module("matplotlib")
    finally:
        if backend is not None:
            os.environ[BACKEND_VARIABLE] = backend
    if backend is not None:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
    return matplotlib


@contextmanager
def picture_style() -> Iterator[None]:
    """Draw within this context: text stays text, and the same figures give the same file."""
    matplotlib = _import_matplotlib()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "eaglegbv", "font.size": 9}
    ):
        yield


def plain_axes(axes: "Axes", grid: Literal["x", "y"]) -> None:
    """Keep only the left and bottom of the frame, and draw pale lines across ``grid`` behind it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def whiskers(figures: Sequence[Estimate]) -> list[list[float]]:
    """Return how far intervals extend below and above their values, in matplotlib's format."""
    return [[one.value - one.low for one in figures], [one.high - one.value for one in figures]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel."""

    label: str
    points: Sequence[tuple[float, Estimate]]  # by ascending x
    colour: Colour | None = None  # None is the next of matplotlib's own
    style: str = ""  # the next of those that no line of this colour has yet, if it is empty
    width: float = 1.2

    @classmethod
    def of(cls, label: str, verifier: str, points: Sequence[tuple[float, Estimate]]) -> Self:
        """Return the line of a verifier."""
        return cls(label, points, colour_of(verifier), width=2.2 if verifier == "otbv" else 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines over one axis, which this label names."""

    lines: Sequence[Line]
    x: str
    title: str = ""
    ticks: Sequence[float] = ()  # matplotlib's own, if there are none
    doubling: bool = False  # whether x doubles from place to place


def draw_panels(panels: Sequence[Panel], y: str, *, columns: int = PANELS_A_ROW) -> "Canvas":
    """Draw panels side by side, so many in a row; ``y`` labels their common axis."""
    from matplotlib.figure import Figure as Canvas

    columns = min(columns, len(panels))
    rows = ceil(len(panels) / columns)
    canvas = Canvas(figsize=(max(5.0, 3.6 * columns), 3.6 * rows), layout="constrained")
    places = canvas.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for unused in places[len(panels) :]:
        unused.set_visible(False)
    for number, (axes, panel) in enumerate(zip(places[: len(panels)], panels, strict=True)):
        drawn: Counter[Colour] = Counter()
        for line in panel.lines:
            alike = line.colour or line.label
            figures = [figure for _, figure in line.points]
            axes.errorbar(
                [x for x, _ in line.points],
                [figure.value for figure in figures],
                yerr=whiskers(figures),
                label=line.label,
                color=line.colour,
                linestyle=line.style or LINE_STYLES[drawn[alike] % len(LINE_STYLES)],
                linewidth=line.width,
                elinewidth=0.6,
                marker="o",
                markersize=3,
            )
            drawn[alike] += 1
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.x)
        axes.set_ylabel("" if number % columns else y)
        if panel.doubling:
            axes.set_xscale("log", base=2)
        if panel.ticks:
            axes.set_xticks(panel.ticks, [f"{place:g}" for place in panel.ticks])
        # Its place is named because matplotlib's search for the best one takes seconds, then warns.
        axes.legend(frameon=False, fontsize=7, loc="lower right")
        plain_axes(axes, "y")
    return canvas


def colour_of(verifier: str) -> str:
    """Return the colour of a verifier, or of plain decoding."""
    spare = SPARE_COLOURS[sum(verifier.encode()) % len(SPARE_COLOURS)]
    return PLAIN_COLOUR if verifier == "none" else COLOURS.get(verifier, spare)


def add_caption(canvas: "Canvas", text: str) -> None:
    """Say below a picture what was measured."""
    lines = wrap(text, int(CHARACTERS_AN_INCH * canvas.get_figwidth()))
    canvas.supxlabel("\n".join(lines), fontsize=7, color=CAPTION)


def save_picture(canvas: "Canvas", path: Path) -> Path:
    """Write a picture in the format of its path's suffix; an SVG contains no date.

    Raises:
        InvalidArgument: The picture cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InvalidArgument("out", str(path), f"a picture to write ({error})") from error
    return path


def save_pictures(canvas: "Canvas", folder: Path, name: str) -> list[Path]:
    """Write ``folder/name`` in every format of :data:`FORMATS`, and return the paths."""
    return [save_picture(canvas, folder / f"{name}.{suffix}") for suffix in FORMATS]


# Pictures of settings.


PHASE_COLOURS: Mapping[str, str] = {
    "prefill": "#b9c6d2",
    "draft": "#e08e1b",
    "forward": "#0b5fa5",
    "verify": "#d1495b",
    "commit": "#66a182",
    "other": "#d9d9d9",
}
LABELS: Mapping[Axis, str] = {
    "paths": "paths K",
    "depth": "drafted tokens of a path L",
    "draft_width": "tokens of the draft distribution k",
    "draft_temperature": "draft temperature, multiple of the target's",
    "temperature": "temperature T",
    "batch": "batch, requests",
    "context": "prompt, tokens",
}
LINES_A_PANEL = 6
Draw: TypeAlias = "Callable[[], Canvas]"


def facets(
    sums: Sums,
    settings: Sequence[Setting],
    x: Axis,
    panels: Axis,
    figure: Figure = ACCEPTANCE,
    speed_up: str = "",
) -> "Canvas":
    """Draw a panel for each place on an axis: a line for each rule along another axis.

    With the label of a ``speed_up`` a figure is drawn over plain decoding's.
    """
    measured = [own for own in settings if sums.has(own.name)]
    drawn = []
    for place, own in sorted(grouped(measured, lambda one: one.at(panels)).items()):
        ticks = sorted({one.at(x) for one in own})
        lines = []
        for label, of_line in grouped(own, lambda one: _line(one, x, panels)).items():
            points = []
            for one in sorted(of_line, key=lambda one: one.at(x)):
                plain = over_plain(sums, figure, one)
                value = plain if speed_up else sums.estimate(figure, one.name)
                points += [] if value is None else [(one.at(x), value)]
            if points:
                line = Line.of(label, of_line[0].rule, points)
                lines.append(_held(line, ticks[-1]) if x == "paths" else line)
        title = f"{LABELS[panels]} = {place:g}"
        doubling = x in ("batch", "context")
        drawn += _panels(lines, title=title, x=LABELS[x], ticks=ticks, doubling=doubling)
    return draw_panels(drawn, speed_up or ACCEPTANCE_LABEL)


def _panels(lines: Sequence[Line], **how: Any) -> list[Panel]:  # noqa: ANN401  fields
    """Return panels of a few lines each."""
    starts = range(0, len(lines), LINES_A_PANEL)
    return [Panel(lines=lines[first : first + LINES_A_PANEL], **how) for first in starts]


def _line(setting: Setting, x: Axis, panels: Axis) -> str:
    """Return what tells a line from others: a setting's name without what differs along axes."""
    moved = setting.moved(x, 1).moved(panels, 1)
    name = replaced(moved, batch=0, context=0).name
    return re.sub(r" \d+x\d+", "", name) if "paths" in (x, panels) else name


def _held(line: Line, widest: float) -> Line:
    """Draw what has one place only, as rules of one path, as a dashed line over all."""
    (first, figure), *more = line.points
    if more or first == widest:
        return line
    return replace(line, points=[(first, figure), (widest, figure)], style="--")


def positions(sums: Sums, settings: Sequence[Setting]) -> "Canvas":
    """Draw a panel for each temperature: the share of trees that accept a token, by position."""
    panels = []
    for temperature, own in sorted(grouped(settings, lambda one: one.temperature).items()):
        lines = []
        for one in own:
            figures = enumerate(position_figures(len(sums.names("offered.", one.name))), start=1)
            points = [(float(at), sums.estimate(figure, one.name)) for at, figure in figures]
            lines.append(Line.of(replaced(one, temperature=1.0).name, one.rule, points))
        ticks = range(1, 1 + max(len(line.points) for line in lines))
        title = f"temperature T = {temperature:g}"
        panels += _panels(lines, title=title, x="position of the token", ticks=ticks)
    canvas = draw_panels(panels, "share of trees that accept it")
    canvas.axes[0].set_ylim(0, 1)
    return canvas


def rates(sums: Sums, settings: Sequence[Setting]) -> "Canvas":
    """Draw a bar for each setting: tokens per second of decoding, with intervals."""
    canvas, axes = _bars(settings, "tokens/s, prefill not counted (95% interval over questions)")
    figures = [sums.estimate(SPEED, own.name) for own in settings]
    axes.barh(
        range(len(settings)),
        [figure.value for figure in figures],
        xerr=whiskers(figures),
        color=[colour_of(own.rule) for own in settings],
        error_kw={"elinewidth": 0.8, "capsize": 2},
    )
    return canvas


def phases(sums: Sums, settings: Sequence[Setting]) -> "Canvas":
    """Draw a bar for each setting: milliseconds per token by phase, including prefill."""
    canvas, axes = _bars(settings, "milliseconds per token of the answers, prefill counted")
    starts = np.zeros(len(settings))
    for figure in phase_figures(PHASE_COLOURS):
        widths = np.array([sums.value(figure, own.name) for own in settings])
        colour = PHASE_COLOURS[figure.name]
        axes.barh(range(len(settings)), widths, left=starts, color=colour, label=figure.name)
        starts += widths
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return canvas


def _bars(settings: Sequence[Setting], x: str) -> "tuple[Canvas, Axes]":
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.5, 1.4 + 0.3 * len(settings)), layout="constrained")
    axes = canvas.subplots()
    axes.set_yticks(range(len(settings)), [one.name for one in settings])
    axes.invert_yaxis()
    axes.set_xlabel(x)
    plain_axes(axes, "x")
    return canvas, axes


def of_conversations(sums: Sums, settings: Sequence[Setting]) -> dict[str, Draw]:
    """Return the pictures that conversations in these settings allow, by name."""
    measured = [own for own in settings if sums.has(own.name)]
    drafted = [own for own in measured if own.plan.speculative]
    drawn: dict[str, Draw] = {
        "tokens_per_second": lambda: rates(sums, measured),
        "seconds_by_phase": lambda: phases(sums, measured),
    }
    with_positions = [own for own in drafted if sums.names("offered.", own.name)]
    if with_positions:
        drawn["acceptance_by_position"] = lambda: positions(sums, with_positions)
    axes: dict[Axis, Axis] = {"paths": "temperature", "temperature": "paths"}
    for x, panels in axes.items():
        by_rule = grouped(drafted, lambda one: one.rule).values()
        if any(len({one.at(x) for one in own}) > 1 for own in by_rule):
            drawn[f"acceptance_by_{x}"] = partial(facets, sums, drafted, x, panels)
    return drawn


def draw_all(drawn: Mapping[str, Draw], folder: Path, caption: str) -> list[Path]:
    """Write pictures into ``folder``, each as PNG and SVG; return their paths.

    Raises:
        NotInstalled: matplotlib is missing.
        InvalidArgument: A file cannot be written.
    """
    check_matplotlib()
    written = []
    with picture_style():
        for name, draw in drawn.items():
            canvas = draw()
            add_caption(canvas, caption)
            written += save_pictures(canvas, folder, name)
    return written
