"""References on the trees and the numbers of a batch, to compare with batched verifiers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from eaglegbv.errors import InvalidProbabilities
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.proof.chooser import Number, Prefix, Probs
from eaglegbv.verifiers.proof.tree import Draws, ReferenceTree


def inverse_cdf(weights: Sequence[Number], u: float) -> int:
    """Return the first entry i with u * total < cumulative_i; never one of weight 0."""
    total = sum(weights)
    if not total > 0 or min(weights) < 0:
        raise InvalidProbabilities("weights", tuple(weights), "non-negative with a positive sum")
    cumulative: Number = 0
    chosen = 0
    for i, weight in enumerate(weights):
        if weight > 0:
            cumulative += weight
            chosen = i
            if u * total < cumulative:
                break
    return chosen


@dataclass(frozen=True, slots=True)
class UniformChooser:
    """Decides by the uniforms of one request of a batch."""

    uniforms: VerifyUniforms
    request: int = 0

    def choose(self, weights: Sequence[Number], purpose: Purpose, index: int) -> int:
        """Return the entry that the number (purpose, index) points at."""
        numbers = {
            Purpose.SELECTION: self.uniforms.selection,
            Purpose.ACCEPTANCE: self.uniforms.acceptance,
            Purpose.CORRECTION: self.uniforms.correction,
        }[purpose]
        return inverse_cdf(weights, float(numbers[self.request].flatten()[index]))


def draws_of_paths(paths: Sequence[Prefix]) -> Draws:
    """Return the draws of independent paths: draw k of every level belongs to path k."""
    length = max(map(len, paths), default=0)
    return tuple(
        tuple(path[:depth] if len(path) >= depth else None for path in paths)
        for depth in range(1, length + 1)
    )


def from_draft_tree(tree: DraftTree, target: TargetProbs, request: int) -> ReferenceTree:
    """Return request number ``request`` of a batch, with exactly the numbers the batch holds."""
    tokens = tree.token_ids[request].tolist()
    parents = tree.parents[request].tolist()
    prefixes: list[Prefix] = [()]
    for node in range(1, int(tree.num_nodes[request])):
        prefixes.append((*prefixes[parents[node]], tokens[node]))
    numbers = {prefix: node for node, prefix in enumerate(prefixes)}
    draws = tuple(
        tuple(prefixes[node] if node else None for node in level)
        for level in tree.draws[request].tolist()
    )

    @cache
    def target_probs(prefix: Prefix) -> Probs:
        node = tree.parents.new_full((tree.batch,), numbers[prefix])
        return tuple(target.probs_of(node)[request].tolist())

    @cache
    def draft_probs(prefix: Prefix) -> Probs:
        probs = [0.0] * target.vocab
        node = numbers[prefix]
        ids = tree.draft_ids[request, node].tolist()
        for token, mass in zip(ids, tree.draft_probs[request, node].tolist(), strict=True):
            if mass > 0:
                probs[token] = mass
        return tuple(probs)

    return ReferenceTree(tree.draft_sampling, draws, target_probs, draft_probs, numbers)
