"""Block efficiency of verifiers on synthetic models, by temperature and number of paths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, sqrt

import msgspec
import torch
from torch import Tensor

from eaglegbv.config import MAX_PATHS
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.iid_trees import draw_trees, random_uniforms
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.registry import make_verifier

CHUNK = 500
"""Number of trees drawn together."""


class SyntheticSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A synthetic pair of models, and what to measure on it.

    At every prefix the target's logits are newly drawn normal numbers with standard deviation
    ``sharpness``. The drafter's are the target's plus normal noise. Both are divided by the
    temperature.

    Attributes:
        vocab: Number of tokens.
        depth: Length of a drafted path, L.
        sharpness: Standard deviation of the target's logits.
        noise: Standard deviation of the drafter's error.
        trees: Number of trees per figure.
        seed: Seed of all random numbers.
    """

    vocab: int = 64
    depth: int = 6
    sharpness: float = 3.0
    noise: float = 1.0
    trees: int = 3000
    seed: int = 0

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
    """One verifier's block efficiency in one setting.

    Attributes:
        verifier: Name of the verifier.
        paths: Number of paths, K.
        temperature: Temperature of both models.
        block_efficiency: Mean number of tokens committed by a step.
        error: Standard error of the block efficiency.
    """

    verifier: str
    paths: int
    temperature: float
    block_efficiency: float
    error: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees of independent paths with the target's laws at their nodes."""

    tree: DraftTree
    target: TargetLaw


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
        LawMismatch: A verifier does not accept independent paths.
    """
    rules = [make_verifier(name) for name in verifiers]
    fitting: dict[int, list[Verifier]] = {}
    for count, rule in product(paths, rules):
        if not 1 <= count <= MAX_PATHS:
            raise InvalidArgument("paths", count, f"an integer in [1, {MAX_PATHS}]")
        own = rule.fitting_paths(count)
        rule.check_law(Law.IID, own)
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
) -> Batch:
    """Draw ``size`` trees of ``paths`` independent paths, each from a separate pair of models."""
    shape = (size, 1 + paths * settings.depth, settings.vocab)
    logits = settings.sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = settings.noise * torch.randn(shape, generator=generator, dtype=torch.float64)
    p, q = (x.div(temperature).softmax(dim=2) for x in (logits, logits + noise))
    rows = torch.arange(size).unsqueeze(1)

    def draw(places: Tensor) -> Tensor:
        laws = q[rows, places].flatten(0, 1)
        return torch.multinomial(laws, 1, generator=generator).view(size, paths)

    trees = draw_trees(size, paths, settings.depth, draw)
    target = TargetLaw.of_logits(p.flatten(0, 1).log(), rows * shape[1] + trees.places)
    return Batch(trees.with_laws(q[rows, trees.places]), target)
