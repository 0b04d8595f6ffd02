"""What all pictures share: colours, plain axes, files. They need matplotlib (extra ``bench``)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from eaglegbv.errors import InvalidArgument, NotInstalled
from eaglegbv.eval.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS: Mapping[str, str] = MappingProxyType(
    {
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
)
"""Colours by verifier, suited to the common colour deficiencies; every line has a label too."""

FORMATS = ("png", "svg")
DPI = 150
GRID = "#e6e6e6"
CAPTION = "#555555"


def check_matplotlib() -> None:
    """Raise :class:`NotInstalled` unless matplotlib can be imported."""
    if find_spec("matplotlib") is None:
        raise NotInstalled("matplotlib", "bench")


@contextmanager
def picture_style() -> Iterator[None]:
    """Draw within this context: text stays text, and the same figures give the same file."""
    import matplotlib

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


def save_picture(canvas: "Canvas", path: Path, *, dpi: int | Literal["figure"] = "figure") -> None:
    """Write a picture in the format of its path's suffix; an SVG contains no date.

    Raises:
        InvalidArgument: The picture cannot be written.
    """
    try:
        canvas.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InvalidArgument("out", str(path), f"a picture to write ({error})") from error


def save_pictures(canvas: "Canvas", folder: Path, name: str) -> list[Path]:
    """Write ``folder/name`` in every format of :data:`FORMATS`, and return the paths.

    Raises:
        InvalidArgument: A picture cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument("out", str(folder), f"a folder for pictures ({error})") from error
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    for path in paths:
        save_picture(canvas, path, dpi=DPI)
    return paths
