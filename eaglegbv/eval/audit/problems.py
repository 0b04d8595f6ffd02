"""Random tiny problems: made distributions of every kind, targets with drafters, and sizes."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from eaglegbv.config import MAX_LEAVES, DraftSampling
from eaglegbv.utils import require_integer, require_integers
from eaglegbv.verifiers.proof.chooser import Prefix, Probs, ProbsAt
from eaglegbv.verifiers.proof.enumeration import Problem, Shape

Weights = NDArray[np.float64]
Target = Callable[[np.random.Generator, int], Weights]
Draft = Callable[[np.random.Generator, Weights], Weights]
EIGHTHS = 8
NEARNESS = 0.9


def random_weights(rng: np.random.Generator, vocab: int) -> Weights:
    """Return a distribution drawn uniformly from all distributions."""
    return rng.dirichlet(np.ones(vocab))


def weights_with_zeros(rng: np.random.Generator, vocab: int) -> Weights:
    """Return weights of which two in five, but never all, are 0."""
    kept = rng.random(vocab) < 0.6
    kept[rng.integers(vocab)] = True
    return random_weights(rng, vocab) * kept


def tied_weights(rng: np.random.Generator, vocab: int) -> Weights:
    """Return multiples of 1/8: ratios p/q often tie exactly, and are often 0, 1 or infinite."""
    return rng.multinomial(EIGHTHS, np.full(vocab, 1 / vocab)) / EIGHTHS


def point_mass(rng: np.random.Generator, vocab: int) -> Weights:
    """Return weights with all mass on one token."""
    weights = np.zeros(vocab)
    weights[rng.integers(vocab)] = 1.0
    return weights


def _disjoint(rng: np.random.Generator, p: Weights) -> Weights:
    """Return weights off the target's support, or anywhere if that is the whole vocabulary."""
    off = random_weights(rng, len(p)) * (p == 0)
    return off if off.sum() > 0 else random_weights(rng, len(p))


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "random": random_weights,
        "zeros": weights_with_zeros,
        "ties": tied_weights,
        "one_hot": point_mass,
    }
)
"""Functions that draw a target's distribution at a prefix, by kind."""

DRAFTS: Mapping[str, Draft] = MappingProxyType(
    {
        "random": lambda rng, p: random_weights(rng, len(p)),
        "zeros": lambda rng, p: weights_with_zeros(rng, len(p)),
        "ties": lambda rng, p: tied_weights(rng, len(p)),
        "equal": lambda _, p: p,
        "disjoint": _disjoint,
        "near": lambda rng, p: NEARNESS * p + (1 - NEARNESS) * random_weights(rng, len(p)),
        "one_hot": lambda rng, p: point_mass(rng, len(p)),
    }
)
"""Functions that draw a draft distribution, given the target's at the same prefix, by kind."""

ROUND = ("random", "zeros", "random", "ties", "one_hot")
"""Order of target kinds in a round; two in five are positive everywhere."""


def _drawn(seed: tuple[int, ...], draw: Callable[[np.random.Generator, Prefix], Probs]) -> ProbsAt:
    """Return distributions by prefix, each drawn on demand as a function of seed and prefix."""

    @lru_cache(maxsize=1 << 14)
    def probs(prefix: Prefix) -> Probs:
        return draw(np.random.default_rng([*seed, len(prefix), *prefix]), prefix)

    return probs


def _random_draft(target: ProbsAt, kind: str, seed: tuple[int, ...]) -> ProbsAt:
    def draw(rng: np.random.Generator, prefix: Prefix) -> Probs:
        p = target(prefix)
        weights = np.array(p, dtype=np.float64)
        q = DRAFTS[kind](rng, weights)
        return p if q is weights else as_probs(q)  # a second division could break p = q

    return _drawn(seed, draw)


def as_probs(weights: Weights) -> Probs:
    """Return the distribution proportional to ``weights``."""
    return tuple((weights / weights.sum()).tolist())


def instance(
    draft_sampling: DraftSampling, shape: Shape, number: int, *, steps: int, seed: int
) -> Sequence[Problem]:
    """Return problem ``number``: one target, and a separate drafter for each of ``steps``.

    The kinds rotate so that every target kind meets every draft kind within 35 instances.

    Args:
        draft_sampling: How a tree's children arise.
        shape: Sizes of the problem.
        number: Number of the instance, from 0.
        steps: Number of steps in a row.
        seed: Seed of the whole audit.
    """
    kinds = list(DRAFTS)
    kind = TARGETS[ROUND[number % len(ROUND)]]
    target = _drawn((seed, number, 0), lambda rng, _: as_probs(kind(rng, shape.vocab)))
    drafts = (
        _random_draft(target, kinds[(number + step) % len(kinds)], (seed, number, 1 + step))
        for step in range(steps)
    )
    return [Problem(draft_sampling, target, draft, shape) for draft in drafts]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an audit.

    Attributes:
        vocab: Number of tokens.
        depth: Drafted tokens per path, L.
        paths: Drafted paths of an iid tree, K, or as many as the verifier takes; for the other
            distributions, children of every node.
        widths: Drafts of the nodes of each depth instead, such as 3x2x2x1.
        instances: Number of random problems; with widths five, where not said otherwise.
        iterations: Verification steps in a row, between which stateful verifiers keep their state;
            with widths one.
        seed: Seed of the problems.

    Raises:
        InvalidArgument: A value is out of range.
    """

    vocab: int = 3
    depth: int = 2
    paths: int = 2
    widths: tuple[int, ...] = ()  # `paths` and `depth` follow from them
    instances: int = 50
    iterations: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for width in self.widths:
            require_integer("widths", width, 1, 8)
        if self.widths:
            msgspec.structs.force_setattr(self, "depth", len(self.widths))
            msgspec.structs.force_setattr(self, "paths", prod(self.widths))
        require_integers(
            self,
            vocab=(2, 16),
            depth=(1, 8),
            paths=(1, MAX_LEAVES if self.widths else 8),
            instances=(1, 1_000_000),
            iterations=(1, 8),
            seed=(0, 2**63 - 1),
        )

    @property
    def shape(self) -> Shape:
        """Sizes of one problem."""
        return Shape(self.vocab, self.depth, self.paths, self.widths)
