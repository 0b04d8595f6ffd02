"""Block efficiency of verifiers on synthetic models, by temperature and number of paths."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import inf, sqrt
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from eaglegbv.config import MAX_PATHS
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit_sampled import draw_trees, random_uniforms
from eaglegbv.eval.paired_comparison import Offer
from eaglegbv.eval.plots import (
    CAPTION,
    COLOURS,
    check_matplotlib,
    picture_style,
    plain_axes,
    save_picture,
)
from eaglegbv.tree import DraftSampling, TargetProbs
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.registry import make_verifier

if TYPE_CHECKING:
    from matplotlib.axes import Axes


CHUNK = 500  # number of trees drawn together


class SyntheticSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A synthetic pair of models, and what to measure on it.

    At every prefix the target's logits are newly drawn normal numbers with standard deviation
    ``sharpness``. The drafter's are the target's plus normal noise. Both are divided by the
    temperature.
    """

    vocab: int = 64  # number of tokens
    depth: int = 6  # length of a drafted path, L
    sharpness: float = 3.0  # standard deviation of the target's logits
    noise: float = 1.0  # standard deviation of the drafter's error
    trees: int = 3000  # number of trees per figure
    seed: int = 0  # seed of all random numbers

    def __post_init__(self) -> None:
        for name, low, high in (("vocab", 2, 4096), ("depth", 1, 32), ("trees", 2, 10**6)):
            value = msgspec.structs.asdict(self)[name]
            if not low <= value <= high:
                raise InvalidArgument(name, value, f"an integer in [{low}, {high}]")
        for name in ("sharpness", "noise"):
            value = msgspec.structs.asdict(self)[name]
            if not 0 <= value <= 100:
                raise InvalidArgument(name, value, "a number in [0, 100]")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One verifier's block efficiency in one setting."""

    verifier: str  # name of the verifier
    paths: int  # number of paths, K
    temperature: float  # temperature of both models
    block_efficiency: float  # mean number of tokens committed by a step
    error: float  # standard error of the block efficiency


def measure(
    verifiers: Sequence[str],
    paths: Sequence[int],
    temperatures: Sequence[float],
    settings: SyntheticSettings,
) -> Iterator[Figure]:
    """Yield the figures of every verifier in every setting it can run in, as they are measured.

    Verifiers with the same number of paths judge the same trees with the same random numbers. A
    verifier of one path is measured with one path, whatever ``paths`` says.

    Raises:
        InvalidArgument: A verifier is unknown, or a number is out of range.
        SamplingMismatch: A verifier does not accept independent paths.
    """
    rules = [make_verifier(name) for name in verifiers]
    fitting: dict[int, list[Verifier]] = {}
    for count, rule in product(paths, rules):
        if not 1 <= count <= MAX_PATHS:
            raise InvalidArgument("paths", count, f"an integer in [1, {MAX_PATHS}]")
        own = rule.fitting_paths(count)
        rule.check_sampling(DraftSampling.IID, own)
        if rule not in fitting.setdefault(own, []):
            fitting[own].append(rule)
    for temperature in temperatures:
        if not 0 < temperature < inf:
            raise InvalidArgument("temperatures", temperature, "positive numbers")
    return (
        figure
        for temperature, (count, own_rules) in product(temperatures, fitting.items())
        for figure in _figures(own_rules, count, temperature, settings)
    )


@torch.inference_mode()
def _figures(
    rules: Sequence[Verifier], paths: int, temperature: float, settings: SyntheticSettings
) -> list[Figure]:
    generator = torch.Generator().manual_seed(settings.seed)
    committed: dict[str, list[Tensor]] = {rule.name: [] for rule in rules}
    for first in range(0, settings.trees, CHUNK):
        size = min(CHUNK, settings.trees - first)
        batch = draw_batch(settings, size, paths, temperature, generator)
        uniforms = random_uniforms(batch.tree, generator)
        for rule in rules:
            verdict = rule.verify(batch.tree, batch.target, uniforms)
            committed[rule.name].append(verdict.accepted.double() + 1)
    return [
        Figure(
            verifier=name,
            paths=paths,
            temperature=temperature,
            block_efficiency=float(torch.cat(counts).mean()),
            error=float(torch.cat(counts).std()) / sqrt(settings.trees),
        )
        for name, counts in committed.items()
    ]


def draw_batch(
    settings: SyntheticSettings,
    size: int,
    paths: int,
    temperature: float,
    generator: torch.Generator,
) -> Offer:
    """Draw ``size`` trees of ``paths`` independent paths, each from a separate pair of models."""
    count = paths * settings.depth
    shape = (size, 1 + count, settings.vocab)
    logits = settings.sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = settings.noise * torch.randn(shape, generator=generator, dtype=torch.float64)
    p, q = (x.div(temperature).softmax(dim=2) for x in (logits, logits + noise))

    def probs_after(tokens: Tensor) -> Tensor:
        first = 1 + (tokens.shape[2] - 1) * paths
        return q[:, first : first + paths] if tokens.shape[2] else q[:, :1]

    tree = draw_trees(size, paths, settings.depth, probs_after, generator)
    # A node has the distributions of the first path through it.
    own = 1 + torch.arange(count).view(-1, paths).T.flatten().expand(size, -1)
    nodes = tree.path_nodes.flatten(1)
    places = torch.zeros_like(tree.token_ids)
    places = places.scatter_reduce(1, nodes, own, "amin", include_self=False)
    rows = torch.arange(size).unsqueeze(1) * shape[1] + places
    return Offer(tree, TargetProbs.of_logits(p.flatten(0, 1).log(), rows))


# A picture of block efficiency against temperature and the number of paths.


INTERVAL = 1.96
SINGLE = frozenset({"token", "block"})  # verifiers that use a single path
Axis: TypeAlias = Literal["temperature", "paths"]


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


def _curve(figures: Sequence[Figure], verifier: str, axis: Axis) -> list[tuple[float, Figure]]:
    own = (figure for figure in figures if figure.verifier == verifier)
    places = ((one.temperature if axis == "temperature" else one.paths, one) for one in own)
    return sorted(places, key=itemgetter(0))


def _lines(axes: "Axes", curves: Mapping[str, list[tuple[float, Figure]]]) -> None:
    for name, curve in curves.items():
        if curve:
            axes.errorbar(
                [x for x, _ in curve],
                [figure.block_efficiency for _, figure in curve],
                yerr=[INTERVAL * figure.error for _, figure in curve],
                label=name,
                color=COLOURS[name],
                linestyle="--" if name in SINGLE else "-",
                linewidth=2.4 if name == "otbv" else 1.2,
                elinewidth=0.6,
                marker="o",
                markersize=3,
            )
    plain_axes(axes, "y")
    axes.legend(frameon=False, fontsize=7, loc="lower right")
