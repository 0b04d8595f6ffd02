"""Greedy multi-path block verification (Thomas & Pal 2026, 2602.16961, Algorithm 1).

Among K independent paths the best-ranked is verified as one block, with the distribution that being
the best gives it. The best path has the lexicographically largest tuple of ranks, where tokens are
ranked by p/q, then token id. That total order is what the skewed distribution assumes: breaking
ties of p/q by the order of drafting would be biased.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.block import BlockRule, block_verification
from eaglegbv.verifiers.paths import (
    DraftedPath,
    place_of,
    places_of_tokens,
    preferred_path,
    siblings,
    target_of_tokens,
)
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix, Probs
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.transport import RankedProbs, power_step, ranked


def gbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Verify the best-ranked path as a block."""

    def ranks(path: Prefix) -> tuple[int, ...]:
        return tuple(_order(tree, path[:i]).index(x) for i, x in enumerate(path))

    path = max(tree.paths, key=ranks)
    return block_verification(tree, path, skewed_probs(tree, path), chooser)


_ranked = lru_cache(maxsize=1 << 16)(ranked)


def _order(tree: ReferenceTree, prefix: Prefix) -> tuple[int, ...]:
    return _ranked(tree.target_probs(prefix), tree.draft_probs(prefix))


def skewed_probs(tree: ReferenceTree, path: Prefix) -> list[Probs]:
    """Return the distribution of each next token of the best of K paths, along ``path``.

    Pr(best path starts with x^i) = (S + q)^K - S^K, with q = q(x^i) the joint draft probability and
    S the probability that one path ranks below x^i; in factored form, since the plain difference
    loses all digits at depth ten. Conditional distributions follow by division.
    """
    paths = len(tree.paths)
    probs: list[Probs] = []
    S: Number = 0
    joint: Number = 1
    for i, x in enumerate(path):
        q = tree.draft_probs(path[:i])
        whole = _best(S, joint, paths)
        below: Number = 0
        skewed: list[Number] = [0] * len(q)
        beneath: dict[int, Number] = {}
        for y in _order(tree, path[:i]):
            beneath[y] = S + joint * below
            skewed[y] = _best(beneath[y], joint * q[y], paths) / whole
            below += q[y]
        probs.append(tuple(skewed))
        S = beneath[x]
        joint = joint * q[x]
    return probs


def _best(S: Number, q: Number, paths: int) -> Number:
    return q * sum((S + q) ** k * S ** (paths - 1 - k) for k in range(paths))


# The same for batches.
class GbvVerifier(BlockRule):
    """Verify the best-ranked path. O(N W + L W log W) and one row of the vocabulary.

    A request's K is the number of its paths that are not empty.
    """

    name = "gbv"
    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset()

    def path(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> DraftedPath:  # noqa: ARG002
        """Return the best path, with the distributions that being the best gives it."""
        places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
        q = tree.draft_probs.flatten(1).gather(1, tree.parents * tree.width + places)
        ratios = target_of_tokens(tree, target) / q
        ratio = ratios.unsqueeze(2)
        other = ratios.unsqueeze(1)
        earlier = tree.token_ids.unsqueeze(1) < tree.token_ids.unsqueeze(2)
        # How many siblings rank below: those of smaller p/q, among equals of smaller token id.
        below = (other < ratio) | ((other == ratio) & earlier)
        ranks = (below & siblings(tree)).sum(dim=2)
        path = DraftedPath.drawn(tree, target, preferred_path(tree, ranks))
        probs = RankedProbs.of(path.ids, path.draft, path.target)
        tokens = tree.token_ids.gather(1, path.nodes[:, 1:])
        path = replace(
            path,
            ids=probs.ids,
            draft=probs.draft,
            target=probs.target,
            chosen=place_of(tokens, probs.ids, probs.draft),
        )
        return _skewed(path, (tree.draws[:, 0] > 0).sum(dim=1))


def _skewed(path: DraftedPath, paths: Tensor) -> DraftedPath:
    """Replace q along the best of K paths ``[batch]``, over ranked ids, as :func:`skewed_probs`.

    The quotients depend on ``S / (S + q)`` only, so nothing underflows.
    """
    F = path.draft.cumsum(dim=2)
    draft = entry_at(path.draft, path.chosen)
    beneath = entry_at(F, path.chosen) - draft
    S = torch.zeros_like(draft[:, 0])
    q = torch.ones_like(draft[:, 0])
    below = []
    joint = []
    for step in range(draft.shape[1]):
        below.append(S)
        joint.append(q)
        S = S + q * beneath[:, step]
        q = q * draft[:, step]
        total = S + q
        S = S / total
        q = q / total
    S = torch.stack(below, dim=1).unsqueeze(2)
    q = torch.stack(joint, dim=1).unsqueeze(2)
    K = paths.to(q.dtype).view(-1, 1, 1)
    upto = S + q * F
    one = torch.ones_like(q)
    skewed = power_step(upto, q * path.draft, K, upto.pow(K)) / power_step(one, q, K, one)
    return replace(path, draft=torch.where(K > 1, skewed, path.draft))
