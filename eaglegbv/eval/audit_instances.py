"""Random tiny problems for an audit: pairs of laws that cover all special cases of a verifier."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.enumeration import Problem, Shape
from eaglegbv.verifiers.reference.probs import Prefix, Probs

Weights = NDArray[np.float64]
Target = Callable[[np.random.Generator, int], Weights]
Draft = Callable[[np.random.Generator, Weights], Weights]

EIGHTHS = 8
NEARNESS = 0.9


def random_weights(rng: np.random.Generator, vocab: int) -> Weights:
    """Return a law drawn uniformly from all laws."""
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


def _equal(rng: np.random.Generator, p: Weights) -> Weights:
    del rng
    return p


def _near(rng: np.random.Generator, p: Weights) -> Weights:
    return NEARNESS * p + (1 - NEARNESS) * random_weights(rng, len(p))


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "random": random_weights,
        "zeros": weights_with_zeros,
        "ties": tied_weights,
        "one_hot": point_mass,
    }
)
"""Functions that draw a target's law at a prefix, by kind."""

DRAFTS: Mapping[str, Draft] = MappingProxyType(
    {
        "random": lambda rng, p: random_weights(rng, len(p)),
        "zeros": lambda rng, p: weights_with_zeros(rng, len(p)),
        "ties": lambda rng, p: tied_weights(rng, len(p)),
        "equal": _equal,
        "disjoint": _disjoint,
        "near": _near,
        "one_hot": lambda rng, p: point_mass(rng, len(p)),
    }
)
"""Functions that draw a draft law, given the target's law at the same prefix, by kind."""

ROUND = ("random", "zeros", "random", "ties", "one_hot")
"""Order of target kinds in a round; two in five are positive everywhere."""


@dataclass(frozen=True, slots=True)
class RandomTarget:
    """A target whose law at every prefix is drawn on demand, as a function of the fields."""

    vocab: int
    kind: str
    seed: tuple[int, ...]

    def __call__(self, prefix: Prefix) -> Probs:
        """Return p(. | prefix)."""
        return _target_law(self, prefix)


@dataclass(frozen=True, slots=True)
class RandomDraft:
    """A drafter for a target, whose law at every prefix is drawn in the same way."""

    target: RandomTarget
    kind: str
    seed: tuple[int, ...]

    def __call__(self, prefix: Prefix) -> Probs:
        """Return q(. | prefix)."""
        return _draft_law(self, prefix)


@lru_cache(maxsize=1 << 14)
def _target_law(target: RandomTarget, prefix: Prefix) -> Probs:
    rng = np.random.default_rng([*target.seed, len(prefix), *prefix])
    return as_law(TARGETS[target.kind](rng, target.vocab))


@lru_cache(maxsize=1 << 14)
def _draft_law(draft: RandomDraft, prefix: Prefix) -> Probs:
    rng = np.random.default_rng([*draft.seed, len(prefix), *prefix])
    p = draft.target(prefix)
    weights = np.array(p, dtype=np.float64)
    q = DRAFTS[draft.kind](rng, weights)
    return p if q is weights else as_law(q)  # a second division could break p = q


def as_law(weights: Weights) -> Probs:
    """Return the law proportional to ``weights``."""
    return tuple((weights / weights.sum()).tolist())


def instance(law: Law, shape: Shape, number: int, *, steps: int, seed: int) -> Sequence[Problem]:
    """Return problem ``number``: one target, and for each of ``steps`` a separate draft law.

    The kinds rotate so that every target kind meets every draft kind within 35 instances.

    Args:
        law: How a tree's children arise.
        shape: Sizes of the problem.
        number: Number of the instance, from 0.
        steps: Number of steps in a row.
        seed: Seed of the whole audit.
    """
    kinds = list(DRAFTS)
    target = RandomTarget(shape.vocab, ROUND[number % len(ROUND)], (seed, number, 0))
    return [
        Problem(
            law,
            target,
            RandomDraft(target, kinds[(number + step) % len(kinds)], (seed, number, 1 + step)),
            shape,
        )
        for step in range(steps)
    ]
