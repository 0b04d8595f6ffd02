"""Draft trees grown on the host: a forward runs the rows that go on, one for each node."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from eaglegbv.attention import Segment
from eaglegbv.config import DraftSampling, Plan
from eaglegbv.devices import fetch, send, upload
from eaglegbv.drafters.draft_probs import (
    DraftProbs,
    draft_params,
    draft_probs,
    log_probs,
    support,
)
from eaglegbv.drafters.tree_growth import TreeGrowth, fixed_tree, in_columns, level_table
from eaglegbv.request import Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import WarpSettings
from eaglegbv.token_rules import GrowingRows
from eaglegbv.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftCall:
    """What to draft: one tree for each of some requests."""

    requests: Sequence[Request]  # with at least one committed token each
    plan: Plan  # paths, depth, width and draft temperature, shared by all of them
    draft_sampling: DraftSampling  # how children arise
    tree_slots: Sequence[Tensor]  # for each request [plan.tree_slots] KV slots to overwrite

    @property
    def ruled(self) -> bool:
        """Whether drafts obey the requests' rules: all have some, and no step replays drafts."""
        return self.requests[0].rules is not None and not self.requests[0].replayed


@dataclass(frozen=True, slots=True)
class NewRows:
    """The new nodes of one level that a forward runs, request after request."""

    counts: list[int]  # rows of each request
    token_ids: Tensor  # [rows] int64, on the host
    # [rows] int64, on the host: the row of the level before that each continues; on the first
    # level, the number of its request.
    parents: Tensor


_Node: TypeAlias = tuple[int, int, int]  # token id, parent and depth

FollowRows: TypeAlias = Callable[[NewRows], Tensor]
"""Runs new rows; returns the logits ``[rows, draft_vocab]`` of what follows them."""


class _Distributions:
    """The draft distributions of a call, of logits that a drafter computes level by level."""

    def __init__(self, call: DraftCall, draft_to_target: Tensor, device: torch.device) -> None:
        self.width = support(call.plan, call.draft_sampling, len(draft_to_target))
        self._call = call
        self._ids = draft_to_target
        self._device = device
        self._params = [draft_params(request.params, call.plan) for request in call.requests]
        self._rules: GrowingRows | None = None
        if call.ruled:
            self._rules = GrowingRows([request.ruled_row() for request in call.requests])

    def extend(self, rows: NewRows) -> None:
        """Take the new rows, whose logits come next."""
        if self._rules is not None:
            self._rules.extend(rows.token_ids.tolist(), rows.parents.tolist())

    def of(self, logits: Tensor, counts: Sequence[int]) -> DraftProbs:
        """Return the distributions of so many rows of each request."""
        if self._rules is not None:
            logits = self._rules.obey(logits, self._ids)
        if self._call.draft_sampling is DraftSampling.FIXED:
            return log_probs(logits, width=self.width, draft_to_target=self._ids)
        settings = WarpSettings.of(self._params, counts, device=self._device)
        return draft_probs(logits, settings, width=self.width, draft_to_target=self._ids)


class _IndependentPaths:
    """The trees of a batch in the making, as :class:`TreeGrowth` grows them, node for node.

    In plain numbers: on a host, an operation of small tensors takes longer to start than to run.
    """

    def __init__(self, call: DraftCall) -> None:
        plan = call.plan
        batch = len(call.requests)
        self._floor = plan.min_confidence
        self._uniforms = draft_numbers(call.requests, plan).numpy()
        self._nodes = [[(request.token_ids[-1], 0, 0)] for request in call.requests]
        self._draws = np.zeros((batch, plan.depth, plan.paths), dtype=np.int64)
        # Paths that go on: request, node, path, and the product of draft probabilities down there.
        self._going = [(b, 0, path, 1.0) for b in range(batch) for path in range(plan.paths)]
        self._rows = {(b, 0): b for b in range(batch)}  # by request and node
        self._levels: list[tuple[dict[tuple[int, int], int], DraftProbs]] = []

    def grow(self, probs: DraftProbs) -> NewRows:
        """Draw a level from the distributions of the latest rows; return the next ones."""
        level = len(self._levels)
        above = self._rows
        self._levels.append((above, probs))
        self._rows = {}
        going: list[tuple[int, int, int, float]] = []
        for (b, node, path, score), (token, prob) in zip(self._going, self._drawn(), strict=True):
            nodes = self._nodes[b]
            drafted = (token, node, level + 1)
            if drafted not in nodes:
                nodes.append(drafted)
            child = nodes.index(drafted)
            self._draws[b, level, path] = child
            if not score * prob < self._floor:
                going.append((b, child, path, score * prob))
                self._rows.setdefault((b, child), len(self._rows))
        self._going = sorted(going)  # nodes come in the order of their parents
        owners = [b for b, _ in self._rows]
        counts = [owners.count(b) for b in range(len(self._nodes))]
        tokens = [self._nodes[b][node][0] for b, node in self._rows]
        parents = [above[b, self._nodes[b][node][1]] for b, node in self._rows]
        return NewRows(counts, torch.tensor(tokens), torch.tensor(parents))

    def _drawn(self) -> Iterator[tuple[int, float]]:
        """Draw a token for each path, with its probability; as :func:`pick_places` does."""
        rows, probs = self._levels[-1]
        requests, nodes, paths, _ = zip(*self._going, strict=True)
        at = [rows[place] for place in zip(requests, nodes, strict=True)]
        values = probs.probs.numpy()[at]
        cumulative = values.cumsum(axis=1) * (values > 0)
        total = cumulative.max(axis=1)
        uniforms = self._uniforms[requests, paths, len(self._levels) - 1]
        limit = np.minimum(uniforms * total, np.nextafter(total, 0))
        places = (cumulative > limit[:, None]).argmax(axis=1)
        drawn = values[range(len(at)), places]
        return zip(probs.ids.numpy()[at, places].tolist(), drawn.tolist(), strict=True)

    def finish(self) -> DraftTree:
        """Return the trees, padded to the largest."""
        nodes = _padded(self._nodes)
        shape = (*nodes[0].shape, self._levels[0][1].ids.shape[1])
        ids = np.zeros(shape, dtype=np.int64)
        probs = np.zeros(shape)
        for rows, drawn in self._levels:
            at = tuple(np.array([*rows]).T)
            ids[at], probs[at] = drawn.ids.numpy(), drawn.probs.numpy()
        parts = map(torch.from_numpy, (self._draws, ids, probs))
        return DraftTree(DraftSampling.IID, *nodes, *parts, columns=True)


def draft_trees(
    call: DraftCall, draft_to_target: Tensor, logits: Tensor, follow: FollowRows
) -> DraftTree:
    """Draft one tree per request; the trees are on the host, padded to the largest.

    ``draft_to_target`` ``[draft_vocab]`` int64 is the target's id of each draft token, ``logits``
    ``[requests, draft_vocab]`` are of what follows the roots, and ``follow`` runs new nodes.
    """
    batch = len(call.requests)
    device = logits.device
    distributions = _Distributions(call, draft_to_target, device)
    independent = call.draft_sampling is DraftSampling.IID
    if independent and in_columns(call.plan, call.draft_sampling) and device.type == "cpu":
        return _independent_paths(call, distributions, logits, follow)
    uniforms: Tensor | None = None
    if call.draft_sampling is not DraftSampling.FIXED:
        uniforms = send(draft_numbers(call.requests, call.plan), device)
    tokens = [request.token_ids[-1] for request in call.requests]
    roots = upload(tokens, dtype=torch.int64, device=device)
    table = level_table(call.plan, call.draft_sampling, device, width=distributions.width)
    growth = TreeGrowth(table, roots, uniforms)
    frontier = growth.grow(distributions.of(logits, [1] * batch))
    packed = torch.arange(batch).unsqueeze(1)  # the packed row of each frontier row's node
    for _ in range(call.plan.depth - 1):
        runs, token_ids = fetch(frontier.runs(), frontier.token_ids)
        counts = runs.sum(dim=1).tolist()
        if not any(counts):
            break
        if frontier.parents is not None:
            packed = packed.gather(1, *fetch(frontier.parents))
        rows = NewRows(counts, token_ids[runs], packed.expand_as(runs)[runs])
        distributions.extend(rows)
        probs = distributions.of(follow(rows), counts)
        packed = (runs.flatten().cumsum(0) - 1).clamp(min=0).view_as(runs)
        if frontier.leaders is not None:
            packed = packed.gather(1, *fetch(frontier.leaders))
        index = send(packed.flatten(), device)
        frontier = growth.grow(
            DraftProbs(probs.ids.index_select(0, index), probs.probs.index_select(0, index))
        )
    tree = growth.finish()
    on_host = zip(tree.tensors, fetch(*tree.tensors.values()), strict=True)
    return trimmed(replace(tree, **dict[str, Any](on_host)))


def _independent_paths(
    call: DraftCall, distributions: _Distributions, logits: Tensor, follow: FollowRows
) -> DraftTree:
    paths = _IndependentPaths(call)
    rows = paths.grow(distributions.of(logits, [1] * len(call.requests)))
    for _ in range(call.plan.depth - 1):
        if not any(rows.counts):
            break
        distributions.extend(rows)
        rows = paths.grow(distributions.of(follow(rows), rows.counts))
    tree = paths.finish()
    return replace(tree, forks=_forks(tree))


def draft_numbers(requests: Sequence[Request], plan: Plan) -> Tensor:
    """Return ``[requests, paths, depth]`` float64 on the host: each request's own numbers."""
    count = plan.paths * plan.depth
    rows = [request.rng.draw(request.step, Purpose.DRAFT, count) for request in requests]
    return torch.from_numpy(np.stack(rows)).view(len(requests), plan.paths, plan.depth)


def trimmed(tree: DraftTree) -> DraftTree:
    """Return trees of the host padded to the largest, and count the forks of independent drafts."""
    most = int(tree.num_nodes.max())
    forks = _forks(tree) if tree.draft_sampling is DraftSampling.IID else None
    names = ("token_ids", "parents", "depth", "draft_ids", "draft_probs")
    kept: dict[str, Any] = {name: tree.tensors[name][:, :most] for name in names}
    # Kernels judge contiguous trees.
    contiguous = torch.contiguous_format
    return replace(tree, **kept, forks=forks).mapped(lambda x: x.clone(memory_format=contiguous))


def _forks(tree: DraftTree) -> int:
    """Return the most nodes of a tree with several drafts."""
    return int((tree.draft_counts() > 1).sum(dim=1).max()) if tree.drafts > 1 else 0


def given_trees(
    trees: Sequence[tuple[Sequence[int], Sequence[int]]], *, drafts: int, length: int
) -> DraftTree:
    """Return ``fixed`` trees on the host, of each request's tokens, root first, and parents."""
    nodes: list[list[_Node]] = []
    for tokens, parents in trees:
        depth = [0]
        for parent in parents[1:]:
            depth.append(depth[parent] + 1)
        nodes.append([*zip(tokens, parents, depth, strict=True)])
    return fixed_tree(*_padded(nodes), drafts, length)


def _padded(trees: Sequence[Sequence[_Node]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token ids, parents and depths ``[batch, nodes]`` int64, and sizes ``[batch]``."""
    sizes = [len(tree) for tree in trees]
    table = np.zeros((3, len(sizes), max(sizes)), dtype=np.int64)
    for b, tree in enumerate(trees):
        table[:, b, : len(tree)] = np.array(tree).T
    token_ids, parents, depth = torch.from_numpy(table)
    return token_ids, parents, depth, torch.tensor(sizes)


class DraftedRows:
    """The drafted rows of a batch: their slots, and which rows each one sees."""

    def __init__(self, contexts: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Start without rows.

        ``contexts`` are the slots of what all rows of a request see, positions 0 ... c - 1;
        ``slots`` are those that its rows take, in order.
        """
        self._contexts = contexts
        self._slots = slots
        self._positions: list[list[int]] = [[] for _ in contexts]
        self._seen = np.zeros((len(contexts), max(map(len, slots))), dtype=np.bool_)
        self._levels = 0

    def segments(self, rows: NewRows) -> list[Segment]:
        """Add new rows; return the segments of the requests that have any."""
        self._seen = self._seen[rows.parents.numpy()]
        segments: list[Segment] = []
        spans = pairwise(accumulate(rows.counts, initial=0))
        for request, (first, end) in enumerate(spans):
            known = len(self._positions[request])
            count = end - first
            if not count:
                continue
            context = self._contexts[request]
            self._positions[request] += [len(context) + self._levels] * count
            every = known + count
            seen = self._seen[first:end]
            seen[:, known:every] |= np.eye(count, dtype=np.bool_)
            positions = torch.tensor(self._positions[request])
            segment = Segment(
                token_ids=rows.token_ids[first:end],
                positions=positions[known:],
                context_slots=context,
                tree_slots=self._slots[request][:every],
                tree_positions=positions,
                visible=torch.from_numpy(seen[:, :every]),
            )
            segments.append(segment)
        self._levels += 1
        return segments
