"""Verification of greedy drafts: optimal for the law that fixes the most likely children."""

from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.correction import Residual, correction_token
from eaglegbv.verifiers.drafted_path import rows_at
from eaglegbv.verifiers.popularity import PopularTree, tail_law
from eaglegbv.verifiers.siblings import child_counts, drafted_nodes, first_paths
from eaglegbv.verifiers.top_down import numbers_of_children
from eaglegbv.verifiers.walk import walk


class GreedyDraftVerifier(Verifier):
    """Accept the drawn child t with min(1, p/r), else sample from (p - r)+.

    r is the draft law off the fixed children A. A sample that falls on A is a child as well, so the
    walk stops with probability ``sum (p - min(p, r))`` over the tail only.
    """

    name: ClassVar[str] = "greedy_draft"
    source: ClassVar[str] = "Hu et al., MDSD, ICLR 2025 (2502.18779), Section 5"
    cost: ClassVar[str] = "O(N W log W) and L + 1 rows of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.GREEDY})
    default_law: ClassVar[Law] = Law.GREEDY

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge greedy trees.

        t uses the acceptance number of its first path, the sample that of the first path to A, or
        the correction number where A is empty.
        """
        popular = PopularTree.of(tree, target)
        children = child_counts(tree)
        kept = popular.first_places(children - 1)
        # At a leaf nothing is drawn, and the sample is the bonus token.
        tail = tail_law(popular.draft, kept) * (children > 0).unsqueeze(2)
        first = first_paths(tree)
        drafted = drafted_nodes(tree)
        fixed = drafted & (popular.at_tokens(kept.to(torch.int64)) > 0)
        chances = popular.at_tokens(popular.target) / popular.at_tokens(tail)
        passed = (
            drafted & ~fixed & (numbers_of_children(tree, first, uniforms.acceptance) < chances)
        )
        index = torch.arange(tree.nodes, device=passed.device)
        taken = _over_children(tree, torch.where(passed, index, 0), "amax", 0)
        sampler = _over_children(tree, torch.where(fixed, first, tree.paths), "amin", tree.paths)

        def next_token(nodes: Tensor, depth: int) -> Tensor:
            at = nodes.unsqueeze(1)
            path = sampler.gather(1, at).squeeze(1)
            number = uniforms.correction
            if depth < tree.length:
                column = (depth * tree.paths + path.clamp(max=tree.paths - 1)).unsqueeze(1)
                own = uniforms.acceptance.gather(1, column).squeeze(1)
                number = torch.where(path < tree.paths, own, number)
            residual = Residual(
                nodes=nodes,
                weight=torch.ones_like(number),
                ids=rows_at(popular.ids, at).squeeze(1),
                draft=rows_at(tail, at).squeeze(1),
            )
            sampled = correction_token(residual, target, number)
            child = taken.gather(1, at)
            return torch.where(
                child.squeeze(1) > 0, tree.token_ids.gather(1, child).squeeze(1), sampled
            )

        return walk(tree, next_token)


def _over_children(tree: DraftTree, values: Tensor, reduce: str, start: int) -> Tensor:
    """Reduce ``values`` ``[batch, nodes]`` of the children of every node."""
    return torch.full_like(tree.parents, start).scatter_reduce(1, tree.parents, values, reduce)
