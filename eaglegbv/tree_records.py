"""Records of trees for observers: p, q and what the rule computed, once a step is committed."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from eaglegbv.config import plan_name
from eaglegbv.devices import entry_at
from eaglegbv.metrics import TreeRecord
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verification import VerifyOutput, verifier_name
from eaglegbv.verifiers import Verdict, rows_at, target_of_tokens


def tree_records(output: VerifyOutput, kept: Mapping[int, Sequence[int]]) -> list[TreeRecord]:
    """Return the records of a group's trees, once they are committed; none unless recorded.

    ``kept`` are the tokens that each request was given, by its number; requests without any, whose
    probabilities were faulty, have no record.
    """
    target = output.target
    tree = output.group.tree
    verdict = output.verdict
    if target is None:
        return []
    tokens = tree.token_ids.tolist()
    parents = tree.parents.tolist()
    multiplicity = tree.multiplicity().tolist()
    p = target_of_tokens(tree, target).tolist()
    q = draft_of_tokens(tree).tolist()
    node_stats = output.node_stats() if tree.length else {}
    stats = {name: values.tolist() for name, values in node_stats.items()}
    paths = verdict.path_nodes.tolist()
    accepted = verdict.accepted.tolist()
    next_tokens = verdict.token_ids.tolist()
    next_p = _next_probs(verdict, target)
    records = []
    for b, request in enumerate(output.group.requests):
        committed = kept.get(request.number)
        count = int(tree.num_nodes[b])
        if not committed:
            continue
        start = len(request.token_ids) - len(committed)
        record = TreeRecord(
            request=request.number,
            start=start,
            prompt_ids=() if start else request.prompt_ids,
            plan=plan_name(request.plan),
            verifier=verifier_name(request.plan, greedy=request.params.greedy),
            draft_sampling=str(tree.draft_sampling),
            paths=tree.drafts,
            token_ids=tuple(tokens[b][:count]),
            parents=tuple(parents[b][:count]),
            multiplicity=tuple(multiplicity[b][:count]),
            target_probs=_known(p[b][:count]),
            draft_probs=_known(q[b][:count]),
            node_stats={name: _known(values[b][:count]) for name, values in stats.items()},
            accepted=tuple(paths[b][: accepted[b]]),
            next_token=next_tokens[b],
            next_target_prob=next_p[b],
            committed=tuple(committed),
            finish_reason=None if request.finish_reason is None else str(request.finish_reason),
        )
        records.append(record)
    return records


def draft_of_tokens(tree: DraftTree) -> Tensor:
    """Return q of each node's token, ``[batch, nodes]`` float64; NaN where nothing is drawn."""
    if tree.width == 0:
        return tree.draft_probs.new_full(tree.token_ids.shape, math.nan)
    ids = rows_at(tree.draft_ids, tree.parents)
    probs = rows_at(tree.draft_probs, tree.parents)
    return (probs * (ids == tree.token_ids.unsqueeze(2))).sum(dim=2)


def _next_probs(verdict: Verdict, target: TargetProbs) -> list[float]:
    stops = verdict.accepted.new_zeros(verdict.accepted.shape)
    if verdict.path_nodes.shape[1]:
        last = (verdict.accepted - 1).clamp(min=0)
        stops = entry_at(verdict.path_nodes, last) * (verdict.accepted > 0)
    rows = target.rows.gather(1, stops.unsqueeze(1))
    probs: list[float] = target.probs_in(rows, verdict.token_ids[:, None, None]).flatten().tolist()
    return probs


def _known(values: list[float]) -> tuple[float | None, ...]:
    """Return the numbers of a tree's nodes; the root has none."""
    return (None, *(None if math.isnan(value) else value for value in values[1:]))
