"""The target that earlier steps modified: verification under what a request's last steps left.

A stateful verifier goes on from what earlier steps left: its *target layers*, one for each step
that still changes the target of the next tokens (:mod:`eaglegbv.verifiers.stateful`). Requests keep
them, here they become the padded columns that the verifier works on, and the drafter replays the
draft distributions of those steps along the path that the verifier selects:

    step 1   root x_3  commits x_4      |  layer A: snapshot at x_3, 3 tokens left of depth 5
    step 2   root x_4  commits x_5 x_6  |  A has advanced by x_4 and continues along the path;
                                        |  layer A: 1 left    layer B: snapshot at x_4, 2 left
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglegbv.attention import SlotAllocator
from eaglegbv.config import Plan
from eaglegbv.drafters import DraftReplay
from eaglegbv.request import DraftSnapshot, Request, TargetLayer
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers import (
    TOLERANCE,
    Fault,
    Layers,
    SparseProbs,
    StatefulUniforms,
    StatefulVerdict,
    StatefulVerifier,
)


def replay_slots(plan: Plan) -> int:
    """Return the most KV slots a request's target layers take during a verification.

    Every step commits at least one token, and its layer ends ``depth`` tokens after its root. So
    there are at most ``depth - 1`` layers, each advanced by at most ``depth - 1`` tokens.
    """
    return (plan.depth - 1) ** 2


def verify_stateful(
    verifier: StatefulVerifier,
    requests: Sequence[Request],
    tree: DraftTree,
    target: TargetProbs,
    drafter: DraftReplay,
    allocator: SlotAllocator,
) -> tuple[StatefulVerdict, list[tuple[TargetLayer, ...]], Tensor]:
    """Verify trees under what earlier steps left.

    Returns:
        The verdict; the layers that each request has then; and ``[batch]`` int64, faults of the
        replayed draft distributions, 0 if there are none.
    """
    device = tree.token_ids.device
    uniforms = StatefulUniforms.draw(
        [request.rng for request in requests],
        [request.step for request in requests],
        [len(request.target_layers) for request in requests],
        drafts=tree.drafts,
        length=tree.length,
        device=device,
    )
    trails = _trails(requests)
    borrowed = allocator.allocate(sum(trail.length for trail in trails))
    try:
        replayed = _ReplayedProbs(drafter, trails, borrowed, batch=tree.batch, device=device)
        columns = _columns(requests, device=device)
        result = verifier.verify(tree, target, uniforms, columns, replayed)
    finally:
        allocator.release(borrowed)
    return result, _layers_after(requests, result.layers, drafter), replayed.faults


@dataclass(slots=True)
class _Trail:
    """An earlier step, continued along tokens that later steps committed."""

    row: int  # index of the request in the batch
    column: int  # index of the step's layer among the request's
    request: Request  # the request
    layer: TargetLayer  # what the step left
    place: DraftSnapshot  # the step's snapshot, advanced by the tokens so far

    @property
    def committed(self) -> list[int]:
        """Tokens from the step's root (excluded) to the current root."""
        return self.request.token_ids[self.layer.since :]

    @property
    def length(self) -> int:
        """Most tokens to advance by; for the last token only what is before it is needed."""
        return len(self.committed) + self.layer.remaining - 1


def _trails(requests: Sequence[Request]) -> list[_Trail]:
    return [
        _Trail(row, column, request, layer, layer.snapshot)
        for row, request in enumerate(requests)
        for column, layer in enumerate(request.target_layers)
    ]


class _ReplayedProbs:
    """The draft distributions of earlier steps, along the paths that a verifier selects."""

    def __init__(
        self,
        drafter: DraftReplay,
        trails: Sequence[_Trail],
        slots: Tensor,
        *,
        batch: int,
        device: torch.device,
    ) -> None:
        """Advance the trails to the current roots, in KV slots as many as all their lengths."""
        self._drafter = drafter
        self._trails = trails
        self._slots = slots
        self._width = 1
        columns = max((trail.column + 1 for trail in trails), default=0)
        self._unsound = torch.zeros((batch, columns), dtype=torch.bool, device=device)
        for i in range(max((len(trail.committed) for trail in trails), default=0)):
            behind = [trail for trail in trails if len(trail.committed) > i]
            self._advance(behind, torch.tensor([trail.committed[i] for trail in behind]))

    @property
    def faults(self) -> Tensor:
        """``[batch]`` int64: :class:`Fault` flags of the distributions replayed so far."""
        return self._unsound.any(dim=1) * int(Fault.DRAFT_NOT_NORMALISED)

    def after(self, tokens: Tensor) -> SparseProbs:
        """Return the distributions after one more token; see :meth:`LayerProbs.after`."""
        depth = tokens.shape[1]
        trails = [trail for trail in self._trails if trail.layer.remaining > depth]
        if not trails:
            return self._blank()
        rows = [trail.row for trail in trails]
        columns = [trail.column for trail in trails]
        if depth > 0:
            self._advance(trails, tokens[rows, depth - 1])
        replayed = self._drafter.probs_at([trail.place for trail in trails])
        width = replayed.ids.shape[1]
        # The first distributions are those of all trails, so no later ones are wider.
        self._width = max(self._width, width)
        probs = self._blank()
        probs.ids[rows, columns, :width] = replayed.ids
        probs.probs[rows, columns, :width] = replayed.probs
        # With this comparison, NaN is unsound too.
        sound = (replayed.probs.sum(dim=1) - 1).abs() <= TOLERANCE
        self._unsound[rows, columns] |= ~sound
        return probs

    def _blank(self) -> SparseProbs:
        """Return distributions of probability 0, for layers that have ended and for padding."""
        ids = torch.zeros(
            (*self._unsound.shape, self._width), dtype=torch.int64, device=self._unsound.device
        )
        return SparseProbs(ids, torch.zeros_like(ids, dtype=torch.float64))

    def _advance(self, trails: Sequence[_Trail], tokens: Tensor) -> None:
        slots = self._slots[: len(trails)]
        self._slots = self._slots[len(trails) :]
        requests = [trail.request for trail in trails]
        places = self._drafter.advance(requests, [t.place for t in trails], tokens, slots)
        for trail, place in zip(trails, places, strict=True):
            trail.place = place


def _columns(requests: Sequence[Request], *, device: torch.device) -> Layers:
    """Return the requests' layers as columns, padded with columns without effect."""
    layers = [request.target_layers for request in requests]

    def table(name: str, dtype: torch.dtype) -> Tensor:
        values = [[getattr(layer, name) for layer in each] for each in layers]
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        return pad_sequence(rows, batch_first=True).to(device)

    return Layers(
        rho=table("rho", torch.float64),
        drafts=table("drafts", torch.int64),
        remaining=table("remaining", torch.int64),
        most_drafts=max((layer.drafts for each in layers for layer in each), default=1),
    )


def _layers_after(
    requests: Sequence[Request], columns: Layers, drafter: DraftReplay
) -> list[tuple[TargetLayer, ...]]:
    """Return each request's layers by ``columns``, the last of which is the latest step."""
    layers_by_request = []
    numbers = (part.tolist() for part in (columns.rho, columns.drafts, columns.remaining))
    for request, rho, drafts, remaining in zip(requests, *numbers, strict=True):
        layers = [
            replace(layer, rho=rho[k], drafts=drafts[k], remaining=remaining[k])
            for k, layer in enumerate(request.target_layers)
            if remaining[k] > 0
        ]
        if remaining[-1] > 0:
            since = len(request.token_ids)
            snapshot = drafter.snapshot(request)
            layers.append(TargetLayer(rho[-1], drafts[-1], remaining[-1], since, snapshot))
        layers_by_request.append(tuple(layers))
    return layers_by_request
