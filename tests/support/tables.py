"""Tiny models as tables of distributions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from eaglegbv.eval.audit_exact import (
    as_probs,
    point_mass,
    random_weights,
    tied_weights,
    weights_with_zeros,
)
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.proof.chooser import Number, Prefix, Probs, ProbsAt, inverse_cdf
from eaglegbv.verifiers.proof.enumeration import (
    Problem,
    Shape,
    deviation,
    draft,
    states_by_step,
)
from eaglegbv.verifiers.proof.tree import Stop, never
from eaglegbv.verifiers.registry import REFERENCES
from eaglegbv.verifiers.stateful import ModifiedTarget, VerifyWithState

__all__ = ["KINDS", "PAIRS", "Model", "Shape", "as_probs", "constant", "draft", "problem"]

Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
Draw: TypeAlias = Callable[[np.random.Generator, int], Pair]

KINDS = ("random", "zeros", "ties", "equal", "disjoint", "one_hot")


@dataclass(eq=False)
class Model:
    """A pair of target and draft distributions, drawn at every prefix on demand from ``seed``.

    ``kind``: what p and q look like; ``tilt`` mixes q towards p (1: equal).
    """

    vocab: int
    kind: str
    seed: int
    tilt: float = 0.0
    cache: dict[Prefix, tuple[Probs, Probs]] = field(default_factory=dict)

    def p(self, prefix: Prefix) -> Probs:
        return self._dists(prefix)[0]

    def q(self, prefix: Prefix) -> Probs:
        return self._dists(prefix)[1]

    def _dists(self, prefix: Prefix) -> tuple[Probs, Probs]:
        if prefix not in self.cache:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            p, q = PAIRS[self.kind](rng, self.vocab)
            q = self.tilt * p + (1 - self.tilt) * q
            self.cache[prefix] = (as_probs(p), as_probs(q))
        return self.cache[prefix]


def logits(noise: float) -> Draw:
    """A language model in small: normal logits, and the drafter's are off by ``noise``."""

    def pair(rng: np.random.Generator, vocab: int) -> Pair:
        z = rng.normal(size=vocab)
        return np.exp(z), np.exp(z + noise * rng.normal(size=vocab))

    return pair


def _mixed(rng: np.random.Generator, vocab: int) -> Pair:
    """The drafter is half right: q is p mixed with noise."""
    p, q = _random(rng, vocab)
    return p, (p + q) / 2


def both(weights: Callable[[np.random.Generator, int], np.ndarray]) -> Draw:
    """Target and draft distribution of one kind, independent of each other."""
    return lambda rng, vocab: (weights(rng, vocab), weights(rng, vocab))


_random, _zeros = both(random_weights), both(weights_with_zeros)


def _equal(rng: np.random.Generator, vocab: int) -> Pair:
    p = random_weights(rng, vocab)
    return p, p


def _disjoint(rng: np.random.Generator, vocab: int) -> Pair:
    split = rng.permutation(vocab) < rng.integers(1, vocab)
    p, q = _random(rng, vocab)
    return p * split, q * ~split


def _one_hot(rng: np.random.Generator, vocab: int) -> Pair:
    p, q = _zeros(rng, vocab)
    hot = point_mass(rng, vocab)
    return (hot, q) if rng.random() < 0.5 else (p, hot)


PAIRS = {
    "random": _random,
    "zeros": _zeros,
    "ties": both(tied_weights),
    "equal": _equal,
    "disjoint": _disjoint,
    "one_hot": _one_hot,
    "good": logits(0.5),
    "middling": logits(1.0),
    "weak": logits(2.0),
    "mixed": _mixed,
}


def problem(
    draft_sampling: DraftSampling, model: Model, shape: Shape, stop: Stop = never
) -> Problem:
    return Problem(draft_sampling, model.p, model.q, shape, stop)


def constant(*weights: Number | str) -> ProbsAt:
    """A context-free distribution of exact fractions."""
    dist = tuple(Fraction(w) for w in weights)
    return lambda prefix: dist


@dataclass(frozen=True, slots=True)
class GeneratorChooser:
    """Samples: every decision takes a fresh number from ``generator``."""

    generator: np.random.Generator

    def choose(self, weights: Sequence[Number], purpose: Purpose, index: int) -> int:
        """Return a random entry."""
        del purpose, index
        return inverse_cdf(weights, self.generator.random())


def accepted_length(name: str, problem: Problem) -> Number:
    """Return E[tau] of a rule's reference: the tokens that a step commits, less one."""
    states = iterate(REFERENCES[name], [problem], problem.shape.length + 1)
    return sum(mass * (len(state.context) - 1) for state, mass in states.items())


def max_error(verify: VerifyWithState, problems: Sequence[Problem], total: int) -> float:
    """Return :func:`deviation` after one step for each of ``problems``."""
    return deviation(iterate(verify, problems, total), problems[0].target_probs, total)


def iterate(
    verify: VerifyWithState, problems: Sequence[Problem], total: int
) -> dict[ModifiedTarget, Number]:
    """Return the exact distribution of the state after one step for each of ``problems``."""
    return list(states_by_step(verify, problems, total))[-1]
