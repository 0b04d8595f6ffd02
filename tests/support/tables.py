"""Tiny models as tables of distributions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import permutations
from typing import TypeAlias

import numpy as np

from eaglegbv.eval.audit import problems
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.proof import chooser
from eaglegbv.verifiers.proof.chooser import Number, Prefix, Probs, ProbsAt, support
from eaglegbv.verifiers.proof.enumeration import (
    Problem,
    Shape,
    deviation,
    states_by_step,
    target_joint,
)
from eaglegbv.verifiers.proof.lp import DraftSets, transport_plan
from eaglegbv.verifiers.proof.tree import Stop, never
from eaglegbv.verifiers.registry import REFERENCES
from eaglegbv.verifiers.stateful import ModifiedTarget, VerifyWithState
from eaglegbv.verifiers.transport import ranked
from support.references import inverse_cdf

Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
Draw: TypeAlias = Callable[[np.random.Generator, int], Pair]


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
            self.cache[prefix] = (problems.as_probs(p), problems.as_probs(q))
        return self.cache[prefix]


def both(weights: Callable[[np.random.Generator, int], np.ndarray]) -> Draw:
    """Target and draft distribution of one kind, independent of each other."""
    return lambda rng, vocab: (weights(rng, vocab), weights(rng, vocab))


_random, _zeros = both(problems.random_weights), both(problems.weights_with_zeros)


def _equal(rng: np.random.Generator, vocab: int) -> Pair:
    p = problems.random_weights(rng, vocab)
    return p, p


def _disjoint(rng: np.random.Generator, vocab: int) -> Pair:
    split = rng.permutation(vocab) < rng.integers(1, vocab)
    p, q = _random(rng, vocab)
    return p * split, q * ~split


def _one_hot(rng: np.random.Generator, vocab: int) -> Pair:
    p, q = _zeros(rng, vocab)
    hot = problems.point_mass(rng, vocab)
    return (hot, q) if rng.random() < 0.5 else (p, hot)


PAIRS = {
    "random": _random,
    "zeros": _zeros,
    "ties": both(problems.tied_weights),
    "equal": _equal,
    "disjoint": _disjoint,
    "one_hot": _one_hot,
}
KINDS = tuple(PAIRS)


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


def ideal_length(p: ProbsAt, q: ProbsAt, length: int) -> Number:
    """What one path can reach within one step: the sum of min(p, q) over prefixes."""
    joints = ((target_joint(p, n), target_joint(q, n)) for n in range(1, length + 1))
    return sum(min(a[prefix], b[prefix]) for a, b in joints for prefix in a)


def optimal_acceptance(p: Probs, q: Probs, inside: Callable[[Sequence[int]], Number]) -> Number:
    """Return alpha* = 1 + min_H [P(H) - Q(H)], Q(H) = Pr(all drafts lie in H) = ``inside(H)``.

    The minimum is reached on a prefix of the tokens by q/p descending (Hu et al., ICLR 2025).
    """
    order = ranked(p, q)
    least: Number = 0
    for size in range(1, len(order) + 1):
        H = order[:size]
        least = min(least, sum(p[x] for x in H) - inside(H))
    return 1 + least


def alpha_iid(p: Probs, q: Probs, drafts: int) -> Number:
    """Return alpha* for independent drafts."""
    return optimal_acceptance(p, q, lambda H: sum(q[x] for x in H) ** drafts)


def alpha_wor(p: Probs, q: Probs, drafts: int) -> Number:
    """Return alpha* for drafts without replacement (all of the support where it is smaller)."""
    count = min(drafts, len(support(q)))
    return optimal_acceptance(p, q, lambda H: inside_wor(q, H, count))


def alpha_greedy(p: Probs, q: Probs, drafts: int) -> Number:
    """Return the acceptance of the top n - 1 tokens with one drawn from the rest of q."""
    kept = chooser.most_likely(q, drafts - 1)
    covered = sum(p[x] for x in kept)
    if len(kept) == len(support(q)):
        return covered
    r = chooser.exact_tail_probs(q, kept)
    return covered + sum(min(p[x], r[x]) for x in range(len(p)) if x not in kept)


def inside_wor(q: Probs, H: Iterable[int], drafts: int) -> Number:
    """Return the probability that all of ``drafts`` draws without replacement lie in H.

    Successive sampling: the sum over ordered tuples in H of prod q_j / (1 - earlier).
    """
    total: Number = 0
    for drawn in permutations(H, drafts):
        mass: Number = 1
        left = sum(q)
        for x in drawn:
            mass *= chooser.share(q[x], left)
            left -= q[x]
        total += mass
    return total


def lp_acceptance(p: Probs, sets: DraftSets) -> float:
    """Return the value of :func:`transport_plan`: the optimal acceptance of one node."""
    return sum(transport_plan(p, sets).values())
