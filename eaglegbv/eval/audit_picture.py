"""Block efficiency of verifiers on synthetic models, by temperature and number of paths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, sqrt
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from eaglegbv.config import MAX_PATHS, DraftSampling
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import plots
from eaglegbv.eval.audit.sampled import draw_trees, random_uniforms
from eaglegbv.eval.paired_comparison import Offer
from eaglegbv.eval.statistics import Estimate
from eaglegbv.tree import TargetProbs
from eaglegbv.utils import require_integer, require_integers
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.registry import make_verifier

CHUNK = 500  # number of trees drawn together
SHARPNESS, NOISE = 3.0, 1.0  # standard deviations of the target's logits, and the drafter's error


class SyntheticSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A synthetic pair of models, and what to measure on it.

    At every prefix the target's logits are newly drawn normal numbers with standard deviation
    :data:`SHARPNESS`. The drafter's are the target's plus normal numbers with :data:`NOISE`. Both
    are divided by the temperature.

    Attributes:
        vocab: Number of tokens.
        depth: Drafted tokens per path, L.
        trees: Number of trees for each figure.
        seed: Seed of all random numbers.
    """

    vocab: int = 64
    depth: int = 6
    trees: int = 3000
    seed: int = 0

    def __post_init__(self) -> None:
        require_integers(self, vocab=(2, 4096), depth=(1, 32), trees=(2, 10**6))


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
        require_integer("paths", count, 1, MAX_PATHS)
        fitting_paths = rule.fitting_paths(count)
        rule.check_sampling(DraftSampling.IID, fitting_paths)
        if rule not in fitting.setdefault(fitting_paths, []):
            fitting[fitting_paths].append(rule)
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
    logits = SHARPNESS * torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = NOISE * torch.randn(shape, generator=generator, dtype=torch.float64)
    p, q = (x.div(temperature).softmax(dim=2) for x in (logits, logits + noise))

    def probs_after(tokens: Tensor) -> Tensor:
        first = 1 + (tokens.shape[2] - 1) * paths
        return q[:, first : first + paths] if tokens.shape[2] else q[:, :1]

    tree = draw_trees(size, paths, settings.depth, probs_after, generator)
    # A node has the distributions of the first path through it.
    nodes = 1 + torch.arange(count).expand(size, -1)
    places = torch.zeros_like(tree.token_ids)
    places = places.scatter_reduce(1, tree.draws.flatten(1), nodes, "amin", include_self=False)
    rows = torch.arange(size).unsqueeze(1) * shape[1] + places
    return Offer(tree, TargetProbs.of_logits(p.flatten(0, 1).log(), rows))


# A picture of block efficiency against temperature and the number of paths.


INTERVAL = 1.96
SINGLE = frozenset({"token", "block"})  # verifiers that use a single path


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
        InvalidArgument: The file cannot be written.
    """
    most = max(figure.paths for figure in by_temperature)
    several = [figure for figure in by_paths if figure.verifier not in SINGLE]
    panels = [
        plots.Panel(
            lines=_lines(by_temperature, lambda one: one.temperature),
            x=f"temperature (K = {most}; dashed: one path)",
        ),
        plots.Panel(
            lines=_lines(several, lambda one: float(one.paths)),
            x=f"paths K (temperature {by_paths[0].temperature:g})",
        ),
    ]
    with plots.picture_style():
        canvas = plots.draw_panels(panels, plots.EFFICIENCY)
        plots.add_caption(canvas, caption)
        return plots.save_picture(canvas, path)


def _lines(figures: Sequence[Figure], x: Callable[[Figure], float]) -> list[plots.Line]:
    points: dict[str, list[tuple[float, Estimate]]] = {}
    for one in figures:
        value, half = one.block_efficiency, INTERVAL * one.error
        estimate = Estimate(value, value - half, value + half)
        points.setdefault(one.verifier, []).append((x(one), estimate))
    lines = [plots.Line.of(name, name, sorted(line)) for name, line in points.items()]
    return [replace(line, style="--" if line.label in SINGLE else "-") for line in lines]
