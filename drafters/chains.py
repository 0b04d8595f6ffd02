"""Drafts of one path each: every level is one forward that draws its own tokens.

    root --> draw --> token --> head --> draw --> token --> ...     no tree is grown on the host

The host prepares in advance what the levels need from it: slots, positions and random numbers. The
result equals a grown tree of one path, drawn with the same numbers.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.config import Plan
from eaglegbv.drafters.drawing import Drawing
from eaglegbv.drafters.growth import Roots, draft_temperature
from eaglegbv.drafters.head_forward import HeadForward, PathRows
from eaglegbv.request import Request
from eaglegbv.tree import DraftTree, Law
from eaglegbv.uniforms import Purpose


def drafts_chains(requests: Sequence[Request], plan: Plan, law: Law, vocab: int) -> bool:
    """Return whether trees are single paths whose tokens are drawn from all of ``vocab``."""
    if plan.law_width(vocab) < vocab or plan.min_confidence > 0:
        return False
    if law is Law.FIXED:
        return plan.fixed_beam == 1 and plan.fixed_nodes == plan.depth and not plan.shape
    single = plan.paths == law.min_paths == 1
    return single and not any(request.params.excludes_tokens for request in requests)


def draft_chains(
    requests: Sequence[Request],
    plan: Plan,
    law: Law,
    forward: HeadForward,
    roots: Roots,
) -> DraftTree:
    """Draft one path per request.

    Args:
        requests: The requests.
        plan: The plan they share.
        law: How children arise.
        forward: Forwards of the head.
        roots: What the drafts continue.
    """
    drawings = _drawings(requests, plan, law)
    last = plan.depth - 1  # no row reads the last token of a path
    slots = zip(roots.contexts, roots.tree_slots, strict=True)
    paths = [PathRows.of(context, own[:last]) for context, own in slots]
    follow = forward.along(paths)
    hidden, drawn = roots.hidden, forward.draw(roots.hidden, drawings[0])
    levels = [drawn]
    for level, drawing in enumerate(drawings[1:]):
        hidden, drawn = follow(level, drawn.token_ids, hidden, drawing)
        levels.append(drawn)
    tokens = torch.stack([level.token_ids for level in levels], dim=1)
    probs = [] if law is Law.FIXED else [level.probs for level in levels]
    ids = forward.every_id(len(requests), plan.depth + 1)
    root_ids = [r.token_ids[-1] for r in requests]
    return _tree(law, root_ids, tokens, probs, ids, drafts_all=forward.drafts_all)


def _drawings(requests: Sequence[Request], plan: Plan, law: Law) -> list[Drawing]:
    """Return how the tokens of each level are drawn; ``fixed`` takes the most likely ones."""
    batch, depth = len(requests), plan.depth
    if law is Law.FIXED:
        return [Drawing(torch.zeros(batch), torch.zeros(batch, dtype=torch.float64))] * depth
    temperature = torch.tensor([draft_temperature(r.params, plan) for r in requests])
    numbers = [r.stream.draw(r.step, Purpose.DRAFT, depth) for r in requests]
    uniforms = torch.stack([torch.from_numpy(own) for own in numbers], dim=1)
    return [Drawing(temperature, own) for own in uniforms.unbind()]


def _tree(
    law: Law,
    roots: list[int],
    tokens: Tensor,
    probs: list[Tensor],
    every_id: Tensor,
    *,
    drafts_all: bool,
) -> DraftTree:
    """Return the trees of paths of ``tokens`` ``[requests, depth]``.

    Args:
        law: How they arose.
        roots: Token ids of the roots.
        tokens: The paths.
        probs: ``[requests, draft_vocab]`` float64 each, the laws from which the tokens of each
            level were drawn; none for ``fixed``.
        every_id: ``[requests, depth + 1, draft_vocab]`` int64, the tokens of every node's law.
        drafts_all: Whether those are all tokens of the target, in its order.
    """
    batch, depth = tokens.shape
    shape = _shape(batch, depth)
    draft_ids = every_id if probs else every_id[:, :, :0]
    none = torch.zeros((batch, draft_ids.shape[2]), dtype=torch.float64)
    draft_probs = torch.stack([*(probs or [none] * depth), none], dim=1)  # none after a path's end
    return DraftTree(
        law=law,
        token_ids=torch.cat((torch.tensor(roots).unsqueeze(1), tokens), dim=1),
        parents=shape.parents,
        depth=shape.depth,
        num_nodes=shape.num_nodes,
        path_nodes=shape.path_nodes,
        path_lengths=shape.path_lengths,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        forks=0 if law is Law.IID else None,
        whole=bool(probs) and drafts_all,
    )


class _Shape(NamedTuple):
    """What trees of one path have in common; see :class:`DraftTree`."""

    parents: Tensor
    depth: Tensor
    num_nodes: Tensor
    path_nodes: Tensor
    path_lengths: Tensor


@lru_cache(maxsize=256)
def _shape(batch: int, depth: int) -> _Shape:
    """Return the shape of paths of ``depth`` tokens. It is shared, so nobody may write to it."""
    nodes = torch.arange(depth + 1).repeat(batch, 1)
    return _Shape(
        parents=pad(nodes[:, :-1], (1, 0)),
        depth=nodes,
        num_nodes=torch.full((batch,), depth + 1),
        # Not a view, as graphs are made for the strides of a tensor that is not one.
        path_nodes=torch.arange(1, depth + 1).repeat(batch, 1, 1),
        path_lengths=torch.full((batch, 1), depth),
    )
