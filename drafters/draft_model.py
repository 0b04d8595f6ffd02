"""A small language model as a drafter, with the target's tokenizer and its own KV pool.

It reads tokens, so its row at position t reads x_t and predicts x_{t+1}. With x_0 ... x_c known the
root of the tree is x_c, which the target has not read yet and neither has the model:

    position   0 ... c-1  |  c      c+1         c+2
    token      committed  | root    node at     node at
                          |         depth 1     depth 2
    predicts              | depth 1 depth 2     depth 3

The model's pool is numbered like the target's: rows of committed tokens are in their own slots,
those of the root and of drafted nodes in scratch slots. Nodes that are committed are run again at
their own slots, in the same forward as the next root.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eaglegbv.attention import Segment
from eaglegbv.drafters.base import RowDrafter, RowSnapshot
from eaglegbv.drafters.draft_probs import DraftProbs, ProbsSettings, replayed_probs
from eaglegbv.drafters.host_drafting import DraftCall, DraftedRows, NewRows, draft_trees
from eaglegbv.request import DraftState, Request
from eaglegbv.tree import DraftTree


class NextLogits(Protocol):
    """What a forward computes."""

    @property
    def logits(self) -> Tensor:
        """``[rows asked for, vocab]`` float32."""


class LanguageModel(Protocol):
    """A model that scores packed segments over its own paged KV pool, as targets do."""

    vocab_size: int
    max_context: int
    device: torch.device

    def forward(
        self, segments: Sequence[Segment], *, logit_rows: Tensor | None = None
    ) -> NextLogits:
        """Run the new tokens of ``segments``; return the logits of the packed rows asked for."""


@dataclass(slots=True)
class StandaloneState(DraftState):
    """The model's memory of one request."""

    context: int = 0  # committed tokens whose rows are in their own slots
    # [vocab], of what follows the root of the last tree; None before the first.
    logits: Tensor | None = None


class StandaloneDrafter(RowDrafter):
    """Drafts with a language model."""

    def __init__(self, model: LanguageModel, *, vocab_size: int) -> None:
        """Wrap a model.

        Args:
            model: The model; its slots are numbered like the target's.
            vocab_size: The target's number of tokens. If the two tables are padded differently,
                the model drafts the tokens that both have, and reads a token without a row as its
                last one.
        """
        self.model = model
        self.max_context = model.max_context
        self._ids = torch.arange(min(vocab_size, model.vocab_size), device=model.device)

    def forget(self, request: Request) -> None:
        """Drop the request's memory; its KV slots are the engine's to free."""
        request.draft_states.pop(StandaloneState, None)

    def shareable(self, request: Request) -> int:
        """Return how many tokens were run at their own slots; see :meth:`Drafter.shareable`."""
        return _state(request).context

    @torch.inference_mode()
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Run the committed tokens that have not been run, in one forward."""
        behind = [r for r in requests if _state(r).context < r.context]
        if not behind:
            return
        segments = [self._committed(request, request.slots) for request in behind]
        # A forward returns the logits of at least one row.
        self._run(segments, torch.zeros(1, dtype=torch.int64))
        for request in behind:
            _state(request).context = request.context

    @torch.inference_mode()
    def draft(self, call: DraftCall) -> DraftTree:
        """Propose one tree per request; see :meth:`Drafter.draft`."""
        requests = call.requests
        tree_slots = call.tree_slots
        known = [
            torch.cat((request.slots, slots[:1]))
            for request, slots in zip(requests, tree_slots, strict=True)
        ]
        segments = [
            self._committed(request, slots) for request, slots in zip(requests, known, strict=True)
        ]
        ends = torch.tensor([s.num_new for s in segments]).cumsum(0) - 1
        logits = self._run(segments, ends)
        for request, logits_of_request in zip(requests, logits, strict=True):
            state = _state(request)
            state.context = request.context
            state.logits = logits_of_request
        drafted = DraftedRows(known, [slots[1:] for slots in tree_slots])

        def follow(rows: NewRows) -> Tensor:
            return self._run(drafted.segments(rows), None)

        return draft_trees(call, self._ids, logits, follow)

    def snapshot(self, request: Request) -> RowSnapshot:
        """Remember the last tree's root; see :meth:`DraftReplay.snapshot`.

        The root is within its context: since committed, it is run at its own slot before the next
        tree is drawn.
        """
        state = _state(request)
        if state.logits is None:
            raise RuntimeError(f"request {request.number} has drafted no tree")
        # A copy, as the row would keep the output of its whole batch alive.
        settings = ProbsSettings.of(request, len(self._ids))
        logits = state.logits.clone()
        return RowSnapshot(state.context + 1, request.slots[:0], logits, settings)

    def next_outputs(self, segments: Sequence[Segment], last: Tensor) -> Tensor:  # noqa: ARG002
        """Return the logits ``[rows, vocab]`` of what follows."""
        return self._run(segments, None)

    def probs_after(self, last: Tensor, settings: Sequence[ProbsSettings]) -> DraftProbs:
        """See :meth:`RowDrafter.probs_after`."""
        return replayed_probs(last, settings, self._ids)

    def _committed(self, request: Request, slots: Tensor) -> Segment:
        """Return the rows of the tokens from the last one run to the last one with a slot."""
        start = _state(request).context
        tokens = request.tokens_from(start)[: len(slots) - start]
        return Segment.causal(torch.tensor(tokens), slots[:start], slots[start:])

    def _run(self, segments: Sequence[Segment], logit_rows: Tensor | None) -> Tensor:
        last = self.model.vocab_size - 1
        readable = [replace(s, token_ids=s.token_ids.clamp(max=last)) for s in segments]
        output = self.model.forward(readable, logit_rows=logit_rows)
        return output.logits[:, : len(self._ids)].clone()  # the next forward may overwrite them


def _state(request: Request) -> StandaloneState:
    return request.draft_state(StandaloneState, lambda: StandaloneState(context=request.shared))
