"""Tiny models as tables of laws, and the exact output law of a verifier on them."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.chooser import Chooser, exact_law
from eaglegbv.verifiers.reference.drafting import (
    draft_iid,
    draft_tree,
    draw_fixed,
    draw_greedy,
    draw_hub,
    draw_wor,
)
from eaglegbv.verifiers.reference.probs import LawAt, Number, Prefix, Probs
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree

KINDS = ("random", "zeros", "ties", "equal", "disjoint", "one_hot")

Verify = Callable[[ReferenceTree, Chooser], Outcome]


@dataclass
class Model:
    """A pair of target and draft laws, drawn at every prefix on demand from ``seed``.

    ``kind``: what p and q look like; ``tilt`` mixes q towards p (1: equal).
    """

    vocab: int
    kind: str
    seed: int
    tilt: float = 0.0
    cache: dict[Prefix, tuple[Probs, Probs]] = field(default_factory=dict)

    def p(self, prefix: Prefix) -> Probs:
        return self._laws(prefix)[0]

    def q(self, prefix: Prefix) -> Probs:
        return self._laws(prefix)[1]

    def _laws(self, prefix: Prefix) -> tuple[Probs, Probs]:
        if prefix not in self.cache:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            p, q = PAIRS[self.kind](rng, self.vocab)
            q = self.tilt * p + (1 - self.tilt) * q
            self.cache[prefix] = (as_law(p), as_law(q))
        return self.cache[prefix]


def as_law(weights: np.ndarray) -> Probs:
    return tuple((weights / weights.sum()).tolist())


def _random(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab))


def _zeros(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    def law() -> np.ndarray:
        kept = rng.random(vocab) < 0.6
        kept[rng.integers(vocab)] = True
        return rng.dirichlet(np.ones(vocab)) * kept

    return law(), law()


def _ties(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Eighths: ratios p/q tie exactly, and are often 0, 1 or infinite."""

    def law() -> np.ndarray:
        return np.bincount(rng.integers(vocab, size=8), minlength=vocab) / 8

    return law(), law()


def _equal(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    p = rng.dirichlet(np.ones(vocab))
    return p, p


def _disjoint(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    split = rng.permutation(vocab) < rng.integers(1, vocab)
    p, q = _random(rng, vocab)
    return p * split, q * ~split


def _one_hot(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    p, q = _zeros(rng, vocab)
    hot = np.eye(vocab)[rng.integers(vocab)]
    return (hot, q) if rng.random() < 0.5 else (p, hot)


PAIRS = {
    "random": _random,
    "zeros": _zeros,
    "ties": _ties,
    "equal": _equal,
    "disjoint": _disjoint,
    "one_hot": _one_hot,
}


@dataclass(frozen=True)
class Shape:
    """``paths`` paths of ``length`` for iid; else ``paths`` children at every node."""

    vocab: int
    length: int
    paths: int


DRAWS = {
    Law.WOR: draw_wor,
    Law.GREEDY: draw_greedy,
    Law.FIXED: draw_fixed,
    Law.HUB: draw_hub,
}


def draft(
    law: Law, q: LawAt, shape: Shape, chooser: Chooser, stop: Callable[[Prefix], bool] | None = None
) -> tuple[Prefix, ...]:
    stop = stop or (lambda prefix: False)
    if law is Law.IID:
        return draft_iid(q, shape.paths, shape.length, chooser, stop)
    return draft_tree(DRAWS[law], q, (shape.paths,) * shape.length, chooser, stop)


def drafted_trees(
    law: Law,
    p: LawAt,
    q: LawAt,
    shape: Shape,
    stop: Callable[[Prefix], bool] | None = None,
) -> list[tuple[ReferenceTree, Number]]:
    """Every draft tree with its probability."""
    paths_law = exact_law(lambda chooser: draft(law, q, shape, chooser, stop))
    return [(ReferenceTree(law, paths, p, q), mass) for paths, mass in paths_law.items()]


def output_law(
    verify: Verify,
    law: Law,
    p: LawAt,
    q: LawAt,
    shape: Shape,
    stop: Callable[[Prefix], bool] | None = None,
) -> dict[Prefix, Number]:
    """The exact law of the tokens that one step commits."""
    total: dict[Prefix, Number] = {}
    for tree, mass in drafted_trees(law, p, q, shape, stop):
        for outcome, probability in exact_law(lambda chooser, t=tree: verify(t, chooser)).items():
            key = outcome.tokens
            total[key] = total.get(key, 0) + mass * probability
    return total


def completed(law: Mapping[Prefix, Number], p: LawAt, length: int) -> dict[Prefix, Number]:
    """Continue every output by p up to ``length`` tokens."""
    full: dict[Prefix, Number] = {}
    todo = list(law.items())
    while todo:
        tokens, mass = todo.pop()
        if len(tokens) >= length:
            full[tokens[:length]] = full.get(tokens[:length], 0) + mass
        else:
            todo.extend(((*tokens, x), mass * px) for x, px in enumerate(p(tokens)) if px > 0)
    return full


def target_joint(p: LawAt, vocab: int, length: int) -> dict[Prefix, Number]:
    joint: dict[Prefix, Number] = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        mass: Number = 1
        for i, x in enumerate(tokens):
            mass *= p(tokens[:i])[x]
        joint[tokens] = mass
    return joint


def law_error(law: Mapping[Prefix, Number], p: LawAt, vocab: int, length: int) -> float:
    """Largest deviation of the completed output law from the target's."""
    full = completed(law, p, length)
    joint = target_joint(p, vocab, length)
    return max(
        float(abs(full.get(tokens, 0) - joint.get(tokens, 0))) for tokens in full.keys() | joint
    )


def max_error(
    verify: Verify,
    law: Law,
    p: LawAt,
    q: LawAt,
    shape: Shape,
    stop: Callable[[Prefix], bool] | None = None,
) -> float:
    out = output_law(verify, law, p, q, shape, stop)
    return law_error(out, p, shape.vocab, shape.length + 1)


def acceptance_length(law: Mapping[Prefix, Number]) -> Number:
    """E[tau]: accepted draft tokens a step (committed tokens less one)."""
    return sum(mass * (len(tokens) - 1) for tokens, mass in law.items())


def constant(*weights: Number | str) -> LawAt:
    """A context-free law of exact fractions."""
    law = tuple(Fraction(w) for w in weights)
    return lambda prefix: law
