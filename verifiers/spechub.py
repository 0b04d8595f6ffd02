"""SpecHub: pairs of drafts, one of which is always the hub."""

from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.popularity import PopularTree, tail_law
from eaglegbv.verifiers.siblings import child_counts, drafted_nodes, first_paths
from eaglegbv.verifiers.top_down import Decisions, descend, numbers_of_children


class SpecHubVerifier(Verifier):
    """Serve p(x) from the pairs (x, a) first, then from (a, x); the hub a takes what is left.

    The hub is the most likely token of q. The pair is (x, a) with probability q(x) and (a, x) with
    probability q(a) q(x) / (1 - q(a)), for every other token x.
    """

    name: ClassVar[str] = "spechub"
    source: ClassVar[str] = "Sun et al., SpecHub, EMNLP 2024 (2411.05289)"
    cost: ClassVar[str] = "O(N W log W) and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.HUB})
    default_law: ClassVar[Law] = Law.HUB

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of pairs; each child uses the number of the first path through it."""
        popular = PopularTree.of(tree, target)
        children = child_counts(tree)
        hub = popular.first_places(children.clamp(max=1))
        paired = (children > 1).unsqueeze(2)
        tail = tail_law(popular.draft, hub)
        first = popular.draft.masked_fill(hub, 0.0)
        second = tail - first
        unserved = (popular.target - first).clamp(min=0)
        again = torch.minimum(unserved, second.clamp(min=0))
        served = (torch.minimum(popular.target, first) + again).masked_fill(hub | ~paired, 0.0)
        p_hub = popular.target[:, :, :1]
        left = 1 - served.sum(dim=2, keepdim=True)
        chances = torch.where(
            hub,
            torch.where(left > 0, p_hub / left, 1.0),
            torch.where(second > 0, again / second, 0.0),
        )
        chances = popular.at_tokens(chances)

        paths = first_paths(tree)
        is_hub = popular.places == 0
        # A token drawn before the hub is judged by the pairs (x, a).
        earliest = torch.full_like(paths, tree.paths).scatter_reduce(
            1, tree.parents, torch.where(drafted_nodes(tree), paths, tree.paths), "amin"
        )
        leads = ~is_hub & (paths == earliest.gather(1, tree.parents))
        ratio = popular.at_tokens(popular.target) / popular.at_tokens(popular.draft)
        chances = torch.where(leads, ratio, chances)
        numbers = numbers_of_children(tree, paths, uniforms.acceptance)
        passed = drafted_nodes(tree) & (numbers < chances)
        decisions = Decisions(
            children=_preferred(tree, passed, is_hub),
            weight=torch.ones_like(numbers),
            draft=torch.where(hub, popular.target, served),
            ids=popular.ids,
        )
        return descend(tree, decisions, target, uniforms)


def _preferred(tree: DraftTree, passed: Tensor, is_hub: Tensor) -> Tensor:
    """Return the accepted child of each node, 0 if none; the hub yields to the other token."""
    index = torch.arange(tree.nodes, device=passed.device)
    score = torch.where(passed, index + torch.where(is_hub, 0, tree.nodes), 0)
    best = torch.zeros_like(tree.parents).scatter_reduce(1, tree.parents, score, "amax")
    return best % tree.nodes
