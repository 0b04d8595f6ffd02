"""Greedy multi-path block verification: the best-ranked of K paths, verified as one block."""

from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block_rule import block_figures, verify_block
from eaglegbv.verifiers.correction import probs_along
from eaglegbv.verifiers.drafted_path import (
    DraftedPath,
    length_of,
    nodes_along,
    place_of,
    places_of_tokens,
    rows_at,
)
from eaglegbv.verifiers.figures import NodeFigures
from eaglegbv.verifiers.fixed_selection import target_of_tokens
from eaglegbv.verifiers.path_choice import preferred_path
from eaglegbv.verifiers.siblings import sibling_ranks
from eaglegbv.verifiers.transport import RankedLaws, power_step


class GbvVerifier(Verifier):
    """Verify the path of lexicographically largest p/q ratios, with the law of being that path."""

    name: ClassVar[str] = "gbv"
    source: ClassVar[str] = "Thomas & Pal 2026 (2602.16961), Algorithm 1, with block verification"
    cost: ClassVar[str] = "O(N W + L W log W) and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent paths; a request's K is the number of its paths that are not empty."""
        return verify_block(_best_path(tree, target), target, uniforms)

    def figures(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> NodeFigures:  # noqa: ARG002
        """Return the law b of being the best path, w and h of that path."""
        return block_figures(tree, _best_path(tree, target))


def _best_path(tree: DraftTree, target: TargetLaw) -> DraftedPath:
    number = preferred_path(tree, sibling_ranks(tree, _ratios(tree, target)))
    nodes = nodes_along(tree, number)
    steps, tokens = nodes[:, :-1], tree.token_ids.gather(1, nodes[:, 1:])
    ids = rows_at(tree.draft_ids, steps)
    laws = RankedLaws.of(ids, rows_at(tree.draft_probs, steps), probs_along(target, steps, ids))
    path = DraftedPath(
        nodes=nodes,
        lengths=length_of(tree, number),
        ids=laws.ids,
        draft=laws.draft,
        target=laws.target,
        chosen=place_of(tokens, laws.ids, laws.draft),
    )
    return _skewed(path, (tree.path_lengths > 0).sum(dim=1))


def _ratios(tree: DraftTree, target: TargetLaw) -> Tensor:
    """Return p/q of each node's token, given its parent, ``[batch, nodes]`` float64."""
    places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
    at = tree.parents * tree.width + places
    return target_of_tokens(tree, target) / tree.draft_probs.flatten(1).gather(1, at)


def _skewed(path: DraftedPath, paths: Tensor) -> DraftedPath:
    """Replace q along the best of K paths by the law that being the best gives it.

    ``Pr(best path starts with x^i) = (S + q)^K - S^K``, with q the joint draft law of x^i and S
    the probability that one path ranks below x^i. Conditional laws are quotients of two such terms.
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
