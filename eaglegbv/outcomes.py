"""Decisions of a step: judgements on its trees, copied to the host at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from eaglegbv.recording import Evidence
from eaglegbv.request import Debt
from eaglegbv.scheduler.batch import Group
from eaglegbv.transfer import fetch
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a group's trees, with related data.

    Attributes:
        verdict: What is accepted, and the token after it; meaningless where there are faults.
        faults: ``[batch]`` int64, faults of the probabilities on which the verdict rests, or 0.
        debts: For each request, what it leaves to the next tokens.
        evidence: What the verdict rests on; None unless trees are recorded.
    """

    verdict: Verdict
    faults: Tensor
    debts: list[tuple[Debt, ...]]
    evidence: Evidence | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Decision of a step for one request.

    Attributes:
        nodes: Accepted nodes of its tree, without the root.
        token_ids: Tokens of these nodes, and the correction or bonus token.
        fault: Faults of the probabilities on which this rests, or 0.
        offered: Depth of the tree.
        drafted: Number of nodes of the tree, without the root.
    """

    nodes: list[int]
    token_ids: list[int]
    fault: int
    offered: int
    drafted: int


def read_outcomes(groups: Sequence[Group], judgements: Sequence[Judgement]) -> list[list[Outcome]]:
    """Return the decision for every request of every group, with one copy to the host."""
    if not groups:  # the step only read parts of texts
        return []
    tables = [
        _table(group.tree, judgement) for group, judgement in zip(groups, judgements, strict=True)
    ]
    [fetched] = fetch(torch.cat([table.flatten() for table in tables]))
    numbers = iter(fetched.tolist())
    return [
        [_outcome(list(islice(numbers, width))) for _ in range(batch)]
        for batch, width in (table.shape for table in tables)
    ]


_COLUMNS = 5


def _table(tree: DraftTree, judgement: Judgement) -> Tensor:
    """Return ``[batch, 5 + 2 length]`` int64: five columns, the path's nodes, and their tokens."""
    verdict = judgement.verdict
    depth = tree.depth.amax(dim=1)
    columns = (verdict.accepted, verdict.token_ids, judgement.faults, depth, tree.num_nodes)
    tokens = tree.token_ids.gather(1, verdict.path_nodes)
    return torch.cat((*(c.unsqueeze(1) for c in columns), verdict.path_nodes, tokens), dim=1)


def _outcome(row: list[int]) -> Outcome:
    accepted, token, fault, offered, nodes = row[:_COLUMNS]
    path, tokens = row[_COLUMNS : (_COLUMNS + len(row)) // 2], row[(_COLUMNS + len(row)) // 2 :]
    return Outcome(path[:accepted], [*tokens[:accepted], token], fault, offered, nodes - 1)
