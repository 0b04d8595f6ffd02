"""Records of draft trees for observers that request them; other steps make none."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from eaglegbv.config import plan_name
from eaglegbv.devices import fetch
from eaglegbv.metrics import TreeRecord
from eaglegbv.request import Debt, Request
from eaglegbv.scheduler.batch import Group, Layout
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeStats, Verdict
from eaglegbv.verifiers.paths import rows_at, target_of_tokens


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a group's verdict rests on, kept until the end of the step if trees are recorded.

    Attributes:
        verifier: Name of the rule.
        target: The target's distributions.
        figures: Returns the other numbers on which the rule based its verdict.
        prefilling: Whether the group read prompts.
    """

    verifier: str
    target: TargetProbs
    figures: Callable[[], NodeStats]
    prefilling: bool


def tree_records(
    group: Group,
    verdict: Verdict,
    evidence: Evidence,
    kept: Mapping[int, Sequence[int]],
) -> list[TreeRecord]:
    """Return the records of a group's trees, once they are committed.

    Args:
        group: The trees.
        verdict: The verdict on them.
        evidence: What the verdict rests on.
        kept: The tokens that each request was given, by its number; requests without any, whose
            probabilities were faulty, have no record.
    """
    tree = group.tree
    table = _Table(
        token_ids=tree.token_ids.tolist(),
        parents=tree.parents.tolist(),
        multiplicity=tree.multiplicity().tolist(),
        target_probs=target_of_tokens(tree, evidence.target).tolist(),
        draft_probs=draft_of_tokens(tree).tolist(),
        figures={
            name: values.tolist()
            for name, values in (evidence.figures() if tree.length else {}).items()
        },
        path_nodes=verdict.path_nodes.tolist(),
        accepted=verdict.accepted.tolist(),
        next_tokens=verdict.token_ids.tolist(),
        next_probs=_next_probs(verdict, evidence.target),
    )
    counts = tree.num_nodes.tolist()
    return [
        table.record(b, count, request, group, evidence, tuple(kept[request.number]))
        for b, (request, count) in enumerate(zip(group.requests, counts, strict=True))
        if kept.get(request.number)
    ]


def draft_of_tokens(tree: DraftTree) -> Tensor:
    """Return q of each node's token given its parent, ``[batch, nodes]`` float64.

    The value is NaN where the tree's distribution draws nothing.
    """
    if tree.width == 0:
        return tree.draft_probs.new_full(tree.token_ids.shape, math.nan)
    ids, probs = rows_at(tree.draft_ids, tree.parents), rows_at(tree.draft_probs, tree.parents)
    return (probs * (ids == tree.token_ids.unsqueeze(2))).sum(dim=2)


def _next_probs(verdict: Verdict, target: TargetProbs) -> list[float]:
    """Return p of the token after the accepted nodes."""
    stops = verdict.accepted.new_zeros(verdict.accepted.shape)
    if verdict.path_nodes.shape[1]:
        last = (verdict.accepted - 1).clamp(min=0).unsqueeze(1)
        stops = verdict.path_nodes.gather(1, last).squeeze(1) * (verdict.accepted > 0)
    rows = target.rows.gather(1, stops.unsqueeze(1)).squeeze(1)
    logits = target.logits[rows, verdict.token_ids].double()
    probs: list[float] = (logits - target.log_normaliser[rows]).exp().tolist()
    return probs


@dataclass(frozen=True, slots=True)
class _Table:
    """The numbers of a batch of trees on the host, request by request, padding included."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    multiplicity: list[list[int]]
    target_probs: list[list[float]]
    draft_probs: list[list[float]]
    figures: Mapping[str, list[list[float]]]
    path_nodes: list[list[int]]
    accepted: list[int]
    next_tokens: list[int]
    next_probs: list[float]

    def record(
        self,
        b: int,
        count: int,
        request: Request,
        group: Group,
        evidence: Evidence,
        committed: tuple[int, ...],
    ) -> TreeRecord:
        """Return the record of request ``b``, whose tree has ``count`` nodes."""
        return TreeRecord(
            request=request.number,
            start=len(request.token_ids) - len(committed),
            prompt_ids=request.prompt_ids if evidence.prefilling else (),
            plan=plan_name(request.plan),
            verifier=evidence.verifier,
            draft_sampling=str(group.tree.draft_sampling),
            paths=group.tree.paths,
            token_ids=tuple(self.token_ids[b][:count]),
            parents=tuple(self.parents[b][:count]),
            multiplicity=tuple(self.multiplicity[b][:count]),
            target_probs=(None, *_known(self.target_probs[b][1:count])),
            draft_probs=(None, *_known(self.draft_probs[b][1:count])),
            figures={
                name: (None, *_known(values[b][1:count])) for name, values in self.figures.items()
            },
            accepted=tuple(self.path_nodes[b][: self.accepted[b]]),
            next_token=self.next_tokens[b],
            next_target_prob=self.next_probs[b],
            committed=committed,
            finish_reason=None if request.finish_reason is None else str(request.finish_reason),
        )


def _known(values: list[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


# Decisions of a step: judgements on its trees, copied to the host at once.


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


# A group of requests whose trees were judged in a step.


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """A group whose trees were judged, with the results.

    Attributes:
        group: The trees, on the device on which they were judged.
        layout: Layout of the group in the forward.
        judgement: The verdict on the trees.
        outcomes: The verdict for each request, on the host.
    """

    group: Group
    layout: Layout
    judgement: Judgement
    outcomes: list[Outcome]

    def tree_records(self, kept: Mapping[int, Sequence[int]]) -> list[TreeRecord]:
        """Return the records of the trees, once they are committed; none without evidence.

        Args:
            kept: The tokens that each request was given, by its number.
        """
        evidence = self.judgement.evidence
        if evidence is None:
            return []
        return tree_records(self.group, self.judgement.verdict, evidence, kept)
