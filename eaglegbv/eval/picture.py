"""What all pictures share: colours, plain axes, files; they need matplotlib, of extra ``bench``."""

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
"""By verifier, readable with the common colour deficiencies; every line is labelled as well."""

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
    """Draw within this: text stays text, and the same figures give the same file."""
    import matplotlib

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "eaglegbv", "font.size": 9}
    ):
        yield


def plain_axes(axes: "Axes", grid: Literal["x", "y"]) -> None:
    """Keep of a frame its left and bottom, and behind the figures pale lines across ``grid``."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def whiskers(figures: Sequence[Estimate]) -> list[list[float]]:
    """Return how far intervals reach below and above their figures, as matplotlib takes them."""
    # A percentile interval need not hold the value itself; whiskers cannot be negative.
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]


def save_picture(canvas: "Canvas", path: Path, *, dpi: int | Literal["figure"] = "figure") -> None:
    """Write a picture in the format of its path's suffix; an SVG bears no date.

    Raises:
        InvalidArgument: It cannot be written.
    """
    try:
        canvas.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InvalidArgument("out", str(path), f"a picture to write ({error})") from error


def save_pictures(canvas: "Canvas", folder: Path, name: str) -> list[Path]:
    """Write ``folder/name`` in every format of :data:`FORMATS`; return the paths.

    Raises:
        InvalidArgument: They cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument("out", str(folder), f"a folder for pictures ({error})") from error
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    for path in paths:
        save_picture(canvas, path, dpi=DPI)
    return paths
