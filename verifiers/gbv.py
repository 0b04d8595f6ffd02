"""Greedy multi-path block verification (Thomas & Pal 2026, Algorithm 1)."""

from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeFigures, Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block import block_figures, block_verification, verify_block
from eaglegbv.verifiers.paths import (
    DraftedPath,
    length_of,
    nodes_along,
    place_of,
    places_of_tokens,
    preferred_path,
    probs_along,
    rows_at,
    sibling_ranks,
)
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix, Probs
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.selection import target_of_tokens
from eaglegbv.verifiers.transport import RankedProbs, power_step, ranked


def gbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Verify the best-ranked path as a block, with the distribution that being the best gives it.

    The best path has the lexicographically largest tuple of ranks, where tokens are ranked by p/q,
    then token id. That total order is what the skewed distribution assumes: breaking ties of p/q by the
    order of drafting would be biased.
    """
    path = max(tree.paths, key=lambda path: _ranks(tree, path))
    return block_verification(tree, path, skewed_probs(tree, path), chooser)


def _ranks(tree: ReferenceTree, path: Prefix) -> tuple[int, ...]:
    return tuple(_order(tree, path[:i]).index(x) for i, x in enumerate(path))


def _order(tree: ReferenceTree, prefix: Prefix) -> tuple[int, ...]:
    return _ranked(tree.target_probs(prefix), tree.draft_probs(prefix))


_ranked = lru_cache(maxsize=1 << 16)(ranked)


def skewed_probs(tree: ReferenceTree, path: Prefix) -> list[Probs]:
    """Return the distribution of each next token of the best of K paths, along ``path``.

    Pr(best path starts with x^i) = (S + q)^K - S^K, with q = q(x^i) the joint draft distribution and S the
    probability that one path ranks below x^i; in factored form, since the plain difference loses
    all digits at depth ten. Conditional distributions follow by division.
    """
    paths = len(tree.paths)
    dists: list[Probs] = []
    S: Number = 0
    joint: Number = 1
    for i, x in enumerate(path):
        dist = tree.draft_probs(path[:i])
        whole = _best(S, joint, paths)
        below: Number = 0
        skewed: list[Number] = [0] * len(dist)
        beneath: dict[int, Number] = {}
        for y in _order(tree, path[:i]):
            beneath[y] = S + joint * below
            skewed[y] = _best(beneath[y], joint * dist[y], paths) / whole
            below += dist[y]
        dists.append(tuple(skewed))
        S, joint = beneath[x], joint * dist[x]
    return dists


def _best(S: Number, q: Number, paths: int) -> Number:
    return q * sum((S + q) ** k * S ** (paths - 1 - k) for k in range(paths))


# Greedy multi-path block verification: the best-ranked of K paths, verified as one block.


class GbvVerifier(Verifier):
    """Verify the path of lexicographically largest p/q ratios, with the distribution of being that path."""

    name: ClassVar[str] = "gbv"
    source: ClassVar[str] = "Thomas & Pal 2026 (2602.16961), Algorithm 1, with block verification"
    cost: ClassVar[str] = "O(N W + L W log W) and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent paths; a request's K is the number of its paths that are not empty."""
        return verify_block(_best_path(tree, target), target, uniforms)

    def figures(
        self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
    ) -> NodeFigures:
        """Return the distribution b of being the best path, w and h of that path."""
        return block_figures(tree, _best_path(tree, target))


def _best_path(tree: DraftTree, target: TargetProbs) -> DraftedPath:
    number = preferred_path(tree, sibling_ranks(tree, _ratios(tree, target)))
    nodes = nodes_along(tree, number)
    steps, tokens = nodes[:, :-1], tree.token_ids.gather(1, nodes[:, 1:])
    ids = rows_at(tree.draft_ids, steps)
    dists = RankedProbs.of(ids, rows_at(tree.draft_probs, steps), probs_along(target, steps, ids))
    path = DraftedPath(
        nodes=nodes,
        lengths=length_of(tree, number),
        ids=dists.ids,
        draft=dists.draft,
        target=dists.target,
        chosen=place_of(tokens, dists.ids, dists.draft),
    )
    return _skewed(path, (tree.path_lengths > 0).sum(dim=1))


def _ratios(tree: DraftTree, target: TargetProbs) -> Tensor:
    """Return p/q of each node's token, given its parent, ``[batch, nodes]`` float64."""
    places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
    at = tree.parents * tree.width + places
    return target_of_tokens(tree, target) / tree.draft_probs.flatten(1).gather(1, at)


def _skewed(path: DraftedPath, paths: Tensor) -> DraftedPath:
    """Replace q along the best of K paths by the distribution that being the best gives it.

    ``Pr(best path starts with x^i) = (S + q)^K - S^K``, with q the joint draft distribution of x^i and S
    the probability that one path ranks below x^i. Conditional distributions are quotients of two such terms.
    They only depend on ``S / (S + q)``, so nothing underflows.

    Args:
        path: The best path, over ranked ids.
        paths: ``[batch]`` int64, K.
    """
    at = path.chosen.unsqueeze(2)
    F = path.draft.cumsum(dim=2)
    own = path.draft.gather(2, at).squeeze(2)
    beneath = F.gather(2, at).squeeze(2) - own
    S, q = torch.zeros_like(own[:, 0]), torch.ones_like(own[:, 0])
    below, joint = [], []
    for step in range(own.shape[1]):
        below.append(S)
        joint.append(q)
        S, q = S + q * beneath[:, step], q * own[:, step]
        total = S + q
        S, q = S / total, q / total
    S, q = torch.stack(below, dim=1).unsqueeze(2), torch.stack(joint, dim=1).unsqueeze(2)
    K = paths.to(q.dtype).view(-1, 1, 1)
    upto, one = S + q * F, torch.ones_like(q)
    skewed = power_step(upto, q * path.draft, K, upto.pow(K)) / power_step(one, q, K, one)
    return path.with_draft(torch.where(K > 1, skewed, path.draft))
