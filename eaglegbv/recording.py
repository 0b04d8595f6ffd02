"""Records of draft trees for observers that request them; other steps make none."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from eaglegbv.auto_plan import plan_name
from eaglegbv.request import Request
from eaglegbv.scheduler.batch import Group
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.tree_record import TreeRecord
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.drafted_path import rows_at
from eaglegbv.verifiers.figures import NodeFigures
from eaglegbv.verifiers.fixed_selection import target_of_tokens


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a group's verdict rests on, kept until the end of the step if trees are recorded.

    Attributes:
        verifier: Name of the rule.
        target: The target's laws.
        figures: Returns the other numbers on which the rule based its verdict.
        prefilling: Whether the group read prompts.
    """

    verifier: str
    target: TargetLaw
    figures: Callable[[], NodeFigures]
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

    The value is NaN where the tree's law draws nothing.
    """
    if tree.width == 0:
        return tree.draft_probs.new_full(tree.token_ids.shape, math.nan)
    ids, probs = rows_at(tree.draft_ids, tree.parents), rows_at(tree.draft_probs, tree.parents)
    return (probs * (ids == tree.token_ids.unsqueeze(2))).sum(dim=2)


def _next_probs(verdict: Verdict, target: TargetLaw) -> list[float]:
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
            law=str(group.tree.law),
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
