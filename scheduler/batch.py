"""Contents of a step's packed forward: trees, ends of prompts, and other prefill chunks.

packed rows:  [ trees | ends of prompts ]  [ chunks ]
logits:         nodes   last tokens          none
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from eaglegbv.attention import Segment, offsets_of
from eaglegbv.config import Plan
from eaglegbv.request import Request
from eaglegbv.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Group:
    """Requests whose trees are judged by one call of one verifier."""

    requests: list[Request]  # the requests
    tree: DraftTree  # their trees, `batch` = number of requests
    # Rows of each tree in the forward. Where the trees were drawn on the host these are its nodes.
    # Where they were drawn on a device, padding is included: finding out how many nodes are real
    # would mean waiting for the device.
    counts: list[int]
    # The requests' parts of the target's packed forward. The last rows of a segment are its tree's
    # nodes in order; a prompt's other tokens come before its root.
    segments: list[Segment]
    first_token: int = 0  # packed row of its first token in the forward
    first_logit: int = 0  # the first of its rows of the forward's logits
    drawn: DraftTree | None = None  # the trees as they were drawn, if `tree` is a copy elsewhere

    @classmethod
    def prefill(cls, requests: list[Request], slots: list[Tensor]) -> Self:
        """Prefill prompts to their ends; each tree is only a root, the prompt's last token."""
        tree = DraftTree.roots([request.prompt_ids[-1] for request in requests])
        segments = [
            Segment.causal(torch.tensor(r.prompt_ids[r.context :]), r.slots, s)
            for r, s in zip(requests, slots, strict=True)
        ]
        return cls(requests, tree, [1] * len(requests), segments)

    @classmethod
    def decode(cls, requests: list[Request], tree: DraftTree, slots: list[Tensor]) -> Self:
        """Judge one tree for each request."""
        visible = tree.ancestor_mask()
        drawn_on_host = tree.token_ids.device.type == "cpu"
        counts = tree.num_nodes.tolist() if drawn_on_host else [tree.nodes] * tree.batch
        segments = []
        for b, (request, count) in enumerate(zip(requests, counts, strict=True)):
            positions = request.context + tree.depth[b, :count]
            segment = Segment(
                token_ids=tree.token_ids[b, :count],
                positions=positions,
                context_slots=request.slots,
                tree_slots=slots[b][:count],
                tree_positions=positions,
                visible=visible[b, :count, :count],
            )
            segments.append(segment)
        return cls(requests, tree, counts, segments)

    def on(self, device: torch.device) -> Self:
        """Return the group with its trees on ``device``."""
        tree = self.tree.to(device)
        return self if tree is self.tree else replace(self, tree=tree, drawn=self.tree)

    @property
    def logits(self) -> slice:
        """Its rows of the forward's logits."""
        return slice(self.first_logit, self.first_logit + sum(self.counts))

    def node_rows(self) -> Tensor:
        """Return ``[batch, nodes]`` int64, each node's row within :attr:`logits`.

        Padding nodes repeat the root's row.
        """
        rows = [
            [*range(root, root + count), *[root] * (self.tree.nodes - count)]
            for root, count in zip(offsets_of(self.counts), self.counts, strict=False)
        ]
        return torch.tensor(rows)

    def committed(self, b: int, nodes: Sequence[int]) -> list[int]:
        """Return the places in a request's segment down to its root, then those of ``nodes``."""
        root = self.segments[b].num_new - self.counts[b]  # a prompt's other tokens come before it
        return [*range(root + 1), *(root + node for node in nodes)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a sequence, prefilled only for its keys, values and features."""

    request: Request  # the request whose sequence it is
    segment: Segment  # the part

    @classmethod
    def of(cls, request: Request, slots: Tensor) -> Self:
        """Prefill as many tokens as there are ``slots``, from the first that is not yet."""
        tokens = request.tokens_from(request.context)[: len(slots)]
        return cls(request, Segment.causal(torch.tensor(tokens), request.slots, slots))


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A part of a prompt whose log-probabilities are asked for."""

    request: Request  # the request whose prompt it is
    position: int  # position of its first token that is scored
    count: int  # number of tokens that are scored, each by the row of the token before it
    first_logit: int  # the first of these rows of the forward's logits


@dataclass(frozen=True, slots=True)
class Forward:
    """A step's packed forward of the target."""

    groups: list[Group]  # trees and ends of prompts
    chunks: list[Chunk]  # other prefill chunks, after the groups
    logit_rows: Tensor  # [rows] int64, the packed rows whose logits are wanted
    prompts: list[ScoredPrompt]  # parts of prompts that are scored, by the last of those rows

    @classmethod
    def of(cls, groups: list[Group], chunks: list[Chunk]) -> Self:
        """Lay out the groups one after the other, followed by the chunks."""
        placed: list[Group] = []
        wanted: list[int] = []
        token = 0
        for group in groups:
            placed.append(replace(group, first_token=token, first_logit=len(wanted)))
            for segment, count in zip(group.segments, group.counts, strict=True):
                token += segment.num_new
                wanted.extend(range(token - count, token))
        forward = cls(placed, chunks, torch.tensor(wanted, dtype=torch.int64), [])
        requests = [request for group in groups for request in group.requests]
        requests += [chunk.request for chunk in chunks]
        if all(request.params.prompt_logprobs is None for request in requests):
            return forward
        return forward._with_prompts(requests)

    def _with_prompts(self, requests: list[Request]) -> Self:
        """Add the rows that score prompts; ``requests`` are those of the segments, in order."""
        prompts: list[ScoredPrompt] = []
        parts = [self.logit_rows]
        logits = len(self.logit_rows)
        first = 0
        for request, segment in zip(requests, self.segments, strict=True):
            if request.scores_prompt:
                position = request.context + 1
                count = min(segment.num_new, len(request.prompt_ids) - position)
                prompts.append(ScoredPrompt(request, position, count, logits))
                parts.append(torch.arange(first, first + count))
                logits += count
            first += segment.num_new
        return replace(self, logit_rows=torch.cat(parts), prompts=prompts)

    @property
    def segments(self) -> list[Segment]:
        """All segments, in order."""
        of_groups = [segment for group in self.groups for segment in group.segments]
        return of_groups + [chunk.segment for chunk in self.chunks]

    def chunk_features(self, features: Tensor) -> tuple[Tensor, ...]:
        """Split ``features``, ``[packed rows, feature_size]``, and return each chunk's part."""
        sizes = [chunk.segment.num_new for chunk in self.chunks]
        return features[len(features) - sum(sizes) :].split(sizes) if sizes else ()


def by_plan(requests: Iterable[Request]) -> list[list[Request]]:
    """Split requests into lists that share a plan, and are all greedy or not, with rules or not."""
    groups: dict[tuple[Plan, bool, bool], list[Request]] = {}
    for request in requests:
        kind = request.plan, request.params.greedy, request.rules is not None
        groups.setdefault(kind, []).append(request)
    return list(groups.values())
