"""What all pictures share: colours, plain axes, files. They need matplotlib (extra ``bench``)."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import msgspec

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, NotInstalled
from eaglegbv.eval.records import Results
from eaglegbv.eval.statistics import Estimate, Summary, summarise
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
EFFICIENCY = "block efficiency (tokens per target forward)"


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
    # A percentile interval need not contain the value itself, but whiskers cannot be negative.
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]


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
    # It is named because matplotlib's search for the best place may take seconds, then warns.
    legend: Literal["lower left", "lower right", "upper right"] = "lower right"


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
        axes.legend(frameon=False, fontsize=7, loc=panel.legend)
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


# Pictures of a run.


PHASE_COLOURS: Mapping[str, str] = {
    "prefill": "#b9c6d2",
    "draft": "#e08e1b",
    "forward": "#0b5fa5",
    "verify": "#d1495b",
    "commit": "#66a182",
    "other": "#d9d9d9",
}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Write every picture of a run into ``folder``, each as PNG and SVG; return their paths.

    Raises:
        NotInstalled: matplotlib is missing.
        InvalidArgument: Nothing was measured, or a file cannot be written.
    """
    check_matplotlib()
    measured = measured_of(results)
    settings, where = results.settings, results.environment
    caption = (
        f"{settings.suite}, {len(settings.question_ids)} questions, {settings.max_tokens} tokens, "
        f"{settings.model} + {settings.drafter or 'no drafter'}; {where.processor}, "
        f"{where.threads} threads; {where.started[:10]}"
    )
    written = []
    with picture_style():
        for name, draw in PICTURES.items():
            if draw in OF_DRAFTS and not _drafted(measured):
                continue
            canvas = draw(measured)
            add_caption(canvas, caption)
            written += save_pictures(canvas, folder, name)
    return written


def measured_of(results: Results) -> list[Summary]:
    """Return the figures of the settings of a run that have any.

    Raises:
        InvalidArgument: No setting has figures.
    """
    measured = [summary for summary in summarise(results) if summary.conversations]
    if not measured:
        raise InvalidArgument("results", results.settings.suite, "a run with whole conversations")
    return measured


def block_efficiency_by_paths(measured: Sequence[Summary]) -> "Canvas":
    """Draw one panel for each temperature: block efficiency against the number of paths."""
    panels = []
    for temperature, here in _by_temperature(measured).items():
        ticks = sorted({float(one.plan.paths) for one in here})
        lines = _lines(
            here,
            lambda one: float(one.plan.paths),
            alike=lambda one: msgspec.structs.replace(one.plan, paths=1),
        )
        held = [_held(line, ticks[-1]) for line in lines]
        title = f"temperature {temperature:g}"
        panels.append(Panel(title=title, lines=held, x="paths K", ticks=ticks))
    return draw_panels(panels, EFFICIENCY)


def block_efficiency_by_temperature(measured: Sequence[Summary]) -> "Canvas":
    """Draw one panel for each number of paths: block efficiency against temperature.

    Verifiers that ran with a single path only are dashed lines in every panel.
    """
    drafted = _drafted(measured)
    single = {m.plan.verifier for m in drafted}
    single -= {m.plan.verifier for m in drafted if m.plan.paths > 1}
    panels = []
    for paths in sorted({m.plan.paths for m in drafted if m.plan.verifier not in single}) or [1]:
        here = [m for m in drafted if m.plan.paths == paths or m.plan.verifier in single]
        lines = _lines(
            here,
            lambda one: one.temperature,
            alike=lambda one: one.plan,
            dashed=single if paths > 1 else (),
        )
        panels.append(
            Panel(title=f"K = {paths}", lines=lines, x="temperature", legend="lower left")
        )
    return draw_panels(panels, EFFICIENCY)


def acceptance_by_depth(measured: Sequence[Summary]) -> "Canvas":
    """Draw one panel for each temperature: share of forwards that accept a token, by depth."""
    panels = []
    for temperature, here in _by_temperature(measured).items():
        labels = _labels(here, "T")
        lines = []
        for one in here:
            shares = enumerate(map(Estimate.exactly, one.acceptance_by_depth), start=1)
            lines.append(Line.of(labels[one.setting], one.plan.verifier, list(shares)))
        ticks = range(1, 1 + max(len(line.points) for line in lines))
        title = f"temperature {temperature:g}"
        panels.append(Panel(title=title, lines=lines, x="depth", ticks=ticks, legend="upper right"))
    canvas = draw_panels(panels, "share of forwards that accept so deep")
    canvas.axes[0].set_ylim(0, 1)
    return canvas


def tokens_per_second(measured: Sequence[Summary]) -> "Canvas":
    """Draw a bar for each setting: tokens per second of decoding, with intervals."""
    canvas, axes = _bars_canvas(measured)
    rates = [one.tokens_per_second for one in measured]
    axes.barh(
        range(len(measured)),
        [rate.value for rate in rates],
        xerr=whiskers(rates),
        color=[colour_of(one.plan.verifier) for one in measured],
        error_kw={"elinewidth": 0.8, "capsize": 2},
    )
    axes.set_xlabel("tokens/s, prefill not counted (95% interval over questions)")
    return canvas


def seconds_by_phase(measured: Sequence[Summary]) -> "Canvas":
    """Draw a bar for each setting: milliseconds per token by phase, including prefill."""
    canvas, axes = _bars_canvas(measured)
    starts = [0.0] * len(measured)
    for phase, colour in PHASE_COLOURS.items():
        widths = [one.milliseconds_by_phase.get(phase, 0.0) for one in measured]
        axes.barh(range(len(measured)), widths, left=starts, color=colour, label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_xlabel("milliseconds per token of the answers, prefill counted")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return canvas


OF_DRAFTS = (block_efficiency_by_paths, block_efficiency_by_temperature, acceptance_by_depth)
"""Pictures that show only settings that draft, so that at least one is needed."""
PICTURES: "Mapping[str, Callable[[Sequence[Summary]], Canvas]]" = {
    draw.__name__: draw for draw in (*OF_DRAFTS, tokens_per_second, seconds_by_phase)
}
"""All pictures, by the name of their files without suffix, in the order of drawing."""


def _drafted(measured: Sequence[Summary]) -> list[Summary]:
    return [one for one in measured if one.plan.speculative]


def _by_temperature(measured: Sequence[Summary]) -> dict[float, list[Summary]]:
    """Return the settings that draft, by temperature in ascending order."""
    ascending = sorted(_drafted(measured), key=lambda one: one.temperature)
    return grouped(ascending, lambda one: one.temperature)


def _lines(
    measured: Sequence[Summary],
    x: Callable[[Summary], float],
    *,
    alike: Callable[[Summary], Plan],
    dashed: Collection[str] = (),
) -> list[Line]:
    """Join settings that differ only in x; labels leave out paths and temperature."""
    labels = _labels(measured, "KT")
    lines = []
    for group in grouped(measured, alike).values():
        verifier = group[0].plan.verifier
        points = sorted((x(one), one.block_efficiency) for one in group)
        line = Line.of(labels[group[0].setting], verifier, points)
        lines.append(replace(line, style="--") if verifier in dashed else line)
    return lines


def _held(line: Line, widest: float) -> Line:
    (first, figure), *more = line.points
    if more or first == widest:
        return line
    return replace(line, points=[(first, figure), (widest, figure)], style="--")


def _labels(measured: Sequence[Summary], dropped: str) -> dict[str, str]:
    """Return settings' names without the entries in ``dropped``, or the same in all of them."""
    words = {one.setting: one.setting.split() for one in measured}
    common = set.intersection(*(set(entries[1:]) for entries in words.values()))
    if len(words) == 1:
        common = set()
    return {
        name: " ".join(
            [entries[0], *(e for e in entries[1:] if e[0] not in dropped and e not in common)]
        )
        for name, entries in words.items()
    }


def _bars_canvas(measured: Sequence[Summary]) -> "tuple[Canvas, Axes]":
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.5, 1.4 + 0.3 * len(measured)), layout="constrained")
    axes = canvas.subplots()
    axes.set_yticks(range(len(measured)), [one.setting for one in measured])
    axes.invert_yaxis()
    plain_axes(axes, "x")
    return canvas, axes
