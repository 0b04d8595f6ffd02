"""Pictures for the page of results, as small SVG files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from eaglegbv.eval.estimates import Estimate
from eaglegbv.eval.evidence import AGAIN, BatchResults, Evidence
from eaglegbv.eval.picture import picture_style, plain_axes, save_picture, whiskers
from eaglegbv.eval.plots import PICTURES, measured_of
from eaglegbv.eval.ranking import over_plain
from eaglegbv.eval.records import Results
from eaglegbv.eval.study import Study
from eaglegbv.eval.study_report import draw_study
from eaglegbv.eval.timing import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


def picture_names(evidence: Mapping[str, Evidence]) -> dict[str, list[str]]:
    """Return the names of the pictures of each file, without suffix."""
    return {name: [f"{name}_{part}" for part in _parts(name, e)] for name, e in evidence.items()}


def draw(evidence: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw every picture into ``folder``, and return the paths.

    Raises:
        InvalidArgument: A file cannot be written.
    """
    written = []
    for name, content in evidence.items():
        for part in _parts(name, content):
            path = folder / f"{name}_{part}.svg"
            if isinstance(content, Study):
                _copy_study(content, path)
            else:
                with picture_style():
                    save_picture(_canvas(part, content), path)
            written.append(path)
    return written


def _parts(name: str, content: Evidence) -> Iterator[str]:
    if isinstance(content, Study):
        yield "trees"
    if isinstance(content, BatchResults):
        yield "speed"
    if isinstance(content, Results) and not name.endswith(AGAIN):
        plans = [s.plan for s in content.settings.settings if s.plan.speculative]
        yield "tokens_per_second"
        yield "seconds_by_phase"
        if plans:
            yield "acceptance_by_depth"
        if len({plan.paths for plan in plans if plan.paths > 1}) > 1:
            yield "block_efficiency_by_paths"
        if len({s.temperature for s in content.settings.settings}) > 1 and plans:
            yield "block_efficiency_by_temperature"


def _canvas(part: str, content: Evidence) -> "Canvas":
    if isinstance(content, BatchResults):
        return batch_canvas(over_plain(content.timings))
    assert isinstance(content, Results)
    picture = next(one for one in PICTURES if one.name == part)
    return picture.draw(measured_of(content))


def _copy_study(study: Study, path: Path) -> None:
    with TemporaryDirectory() as folder:
        drawn = [one for one in draw_study(study, Path(folder)) if one.suffix == ".svg"]
        path.write_bytes(drawn[0].read_bytes())


def batch_canvas(speeds: Mapping[Cell, Mapping[str, Estimate]]) -> "Canvas":
    """Draw one panel for each temperature and prompt length: each way's speed over plain's."""
    from matplotlib.figure import Figure as Canvas

    panels = list(dict.fromkeys((cell.temperature, cell.context) for cell in speeds))
    canvas = Canvas(figsize=(max(5.0, 3.8 * len(panels)), 3.6), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True).ravel()
    for panel, (temperature, context) in zip(axes, panels, strict=True):
        here = {
            cell.batch: ways
            for cell, ways in speeds.items()
            if (cell.temperature, cell.context) == (temperature, context)
        }
        _draw_batches(panel, here)
        prompt = f"{context} tokens" if context else "questions as they are"
        panel.set_title(f"temperature {temperature:g}, {prompt}", fontsize=9)
    axes[0].set_ylabel("speed over plain decoding (range over repeats)")
    return canvas


def _draw_batches(axes: "Axes", speeds: Mapping[int, Mapping[str, Estimate]]) -> None:
    for way in dict.fromkeys(way for ways in speeds.values() for way in ways):
        points = [(batch, ways[way]) for batch, ways in sorted(speeds.items()) if way in ways]
        figures = [figure for _, figure in points]
        axes.errorbar(
            [batch for batch, _ in points],
            [figure.value for figure in figures],
            yerr=whiskers(figures),
            label=way,
            marker="o",
            markersize=3,
            linewidth=1.2,
            elinewidth=0.6,
        )
    plain_axes(axes, "y")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(speeds), [str(batch) for batch in sorted(speeds)])
    axes.set_xlabel("batch")
    axes.legend(frameon=False, fontsize=7, loc="upper right")
