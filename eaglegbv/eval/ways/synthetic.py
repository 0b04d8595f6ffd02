"""Block efficiency of verifiers on synthetic models, by temperature and number of paths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import msgspec
import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.sampled import draw_trees, random_uniforms
from eaglegbv.eval.experiment import Part
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.ways.places import Offer
from eaglegbv.tree import WarpedLogits
from eaglegbv.utils import grouped, require_integers
from eaglegbv.verifiers.proof.enumeration import Shape
from eaglegbv.verifiers.registry import make_verifier

CHUNK = 500  # number of trees drawn together
UNIT = 50  # trees that are one unit of intervals
SHARPNESS = 3.0  # standard deviations of the target's logits, and the drafter's error
NOISE = 1.0


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


@dataclass(frozen=True, slots=True)
class SyntheticTrees:
    """Verifiers on trees of made logits; those of as many paths judge the same trees."""

    sizes: SyntheticSettings

    def __call__(self, settings: Sequence[Setting]) -> Iterator[Part]:
        """Yield a part for each temperature and number of paths."""
        for own in settings:
            if not 0 < own.temperature < inf:
                raise InvalidArgument("temperatures", own.temperature, "positive numbers")
            rule = make_verifier(own.rule)
            rule.check_sampling(DraftSampling.IID, own.plan.paths)
        groups = grouped(settings, lambda own: (own.temperature, own.plan.paths))
        for (temperature, paths), members in groups.items():
            measure = partial(self._measure, members)
            yield Part(f"K{paths} T{temperature:g}", len(members), measure)

    @torch.inference_mode()
    def _measure(self, settings: Sequence[Setting]) -> list[Observation]:
        sizes = self.sizes
        first = settings[0]
        generator = torch.Generator().manual_seed(sizes.seed)
        observations = []
        for begin in range(0, sizes.trees, CHUNK):
            size = min(CHUNK, sizes.trees - begin)
            batch = draw_batch(sizes, size, first.plan.paths, first.temperature, generator)
            uniforms = random_uniforms(batch.tree, generator)
            for own in settings:
                verdict = make_verifier(own.rule).verify(batch.tree, batch.target, uniforms)
                counts = verdict.accepted.double() + 1
                observations += [
                    Observation(
                        setting=own.name,
                        unit=f"{begin + place * UNIT}",
                        sums={"tokens": float(part.sum()), "steps": float(len(part))},
                    )
                    for place, part in enumerate(counts.split(UNIT))
                ]
        return observations


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

    tree = draw_trees(size, Shape(settings.vocab, settings.depth, paths), probs_after, generator)
    # A node has the distributions of the first path through it.
    nodes = 1 + torch.arange(count).expand(size, -1)
    places = torch.zeros_like(tree.token_ids)
    places = places.scatter_reduce(1, tree.draws.flatten(1), nodes, "amin", include_self=False)
    rows = torch.arange(size).unsqueeze(1) * shape[1] + places
    return Offer(tree, WarpedLogits.of(p.flatten(0, 1).log(), rows))
