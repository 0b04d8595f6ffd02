"""Our verdicts on SGLang's trees and distributions, in SGLang's numbering."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.backends.sglang.topology import NumberedTree
from eaglegbv.tree import TargetProbs
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.target_only import GreedyWalkVerifier


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A verdict as SGLang's kernels report it; nodes are numbered through the batch.

    Attributes:
        nodes: ``[batch, length + 1]`` int64, the root and the accepted nodes, then -1.
        tokens: ``[batch * nodes]`` int64, at the root and each accepted node, the token after it.
        accepted: ``[batch]`` int64, number of accepted nodes without the root.
    """

    nodes: Tensor
    tokens: Tensor
    accepted: Tensor


def target_dist(target_probs: Tensor, numbered: NumberedTree) -> TargetProbs:
    """Wrap SGLang's warped distributions ``[batch, nodes, vocab]`` float32, normalising them again."""
    batch, nodes, _ = target_probs.shape
    first = nodes * torch.arange(batch, device=target_probs.device).unsqueeze(1)
    real = torch.arange(nodes, device=first.device) < numbered.tree.num_nodes.unsqueeze(1)
    rows = first + torch.where(real, numbered.numbers, 0)
    return TargetProbs.of_logits(target_probs.flatten(0, 1).log(), rows)


def walk_greedily(
    numbered: NumberedTree, target: TargetProbs, verdict: Verdict, rows: Tensor
) -> Verdict:
    """Return ``verdict``, with a greedy walk for the rows ``[batch]`` bool of greedy requests.

    Their paths are not drawn, but the drafter's most likely ones, so no other rule fits them.
    """
    walked = GreedyWalkVerifier().judge(numbered.tree, target, None)  # type: ignore[arg-type]
    return Verdict(
        path_nodes=torch.where(rows.unsqueeze(1), walked.path_nodes, verdict.path_nodes),
        accepted=torch.where(rows, walked.accepted, verdict.accepted),
        token_ids=torch.where(rows, walked.token_ids, verdict.token_ids),
    )


def acceptance(verdict: Verdict, numbered: NumberedTree) -> Acceptance:
    """Convert a verdict to SGLang's numbering."""
    tree = numbered.tree
    batch, nodes = tree.token_ids.shape
    steps = torch.arange(tree.length + 1, device=tree.token_ids.device)
    reached = steps <= verdict.accepted.unsqueeze(1)
    path = torch.nn.functional.pad(verdict.path_nodes, (1, 0))
    # Steps beyond the last accepted node repeat it, so that they write the same values.
    path = path.gather(1, torch.minimum(steps, verdict.accepted.unsqueeze(1)))
    following = torch.nn.functional.pad(tree.token_ids.gather(1, path)[:, 1:], (0, 1))
    following = torch.where(
        steps < verdict.accepted.unsqueeze(1), following, verdict.token_ids.unsqueeze(1)
    )
    first = nodes * torch.arange(batch, device=path.device).unsqueeze(1)
    at = first + numbered.numbers.gather(1, path)
    tokens = torch.zeros(batch * nodes, dtype=torch.int64, device=path.device)
    tokens.scatter_(0, at.flatten(), following.flatten())
    return Acceptance(torch.where(reached, at, -1), tokens, verdict.accepted)
