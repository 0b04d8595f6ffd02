"""Which tree a plan and a draft law ask for."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from eaglegbv.config import Plan
from eaglegbv.drafters.sampled_trees import (
    GreedyTree,
    HubTree,
    IidTree,
    SampledTree,
    WorTree,
)
from eaglegbv.drafters.tree_builder import BestFirstTree, GrowingTree, StaticTree
from eaglegbv.request import Request
from eaglegbv.tree import Law
from eaglegbv.uniforms import Purpose

_SAMPLED: Mapping[Law, type[SampledTree]] = MappingProxyType(
    {Law.IID: IidTree, Law.WOR: WorTree, Law.GREEDY: GreedyTree, Law.HUB: HubTree}
)

GROWN_LAWS = frozenset({*_SAMPLED, Law.FIXED})
"""Laws of the trees that are grown from laws of the next token."""


def start_trees(
    requests: Sequence[Request], plan: Plan, law: Law, vocab: int
) -> Sequence[GrowingTree]:
    """Start a tree at each request's last token.

    Args:
        requests: The requests, for their random numbers.
        plan: The plan they share.
        law: How children arise.
        vocab: Tokens that can be drafted.
    """
    return [_start(request, plan, law, support(plan, law, vocab)) for request in requests]


def support(plan: Plan, law: Law, vocab: int) -> int:
    """Return the number of candidates a level's laws keep."""
    if law is not Law.FIXED:
        return plan.law_width(vocab)
    if plan.shape:
        return min(1 + max(max(ranks) for ranks in plan.shape), vocab)
    return min(plan.fixed_beam, vocab)


def _start(request: Request, plan: Plan, law: Law, width: int) -> GrowingTree:
    root = request.token_ids[-1]
    if law is not Law.FIXED:
        numbers = request.stream.draw(request.step, Purpose.DRAFT, plan.paths * plan.depth)
        uniforms = numbers.reshape(plan.paths, plan.depth)
        return _SAMPLED[law](root, uniforms, width, min_confidence=plan.min_confidence)
    if plan.shape:
        return StaticTree(root, plan.shape, min_confidence=plan.min_confidence)
    return BestFirstTree(
        root,
        beam=plan.fixed_beam,
        budget=plan.fixed_nodes,
        min_confidence=plan.min_confidence,
    )
