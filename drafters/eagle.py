"""The EAGLE drafter: a one-layer head that continues the target's features.

Alignment (EAGLE, arXiv 2401.15077, section 3.1): the head's row at position t reads the target's
feature f_t and the *next* token x_{t+1}, and predicts x_{t+2}. With x_0 ... x_c known and features
f_0 ... f_{c-1}, the root of the tree is x_c:

    position   0    1   ...  c-1 |   c        c+1          true rows | rows of the draft
    feature   f_0  f_1  ... f_c-1|  h_c-1     h_c          (h: the head's own output)
    token     x_1  x_2  ... x_c  |  node at   node at
                            root |  depth 1   depth 2
    predicts                depth 1 depth 2   depth 3

Row t of the head and row t of the target share a KV slot number, so that what the target commits
and frees, the head commits and frees too. Rows on drafted features are scratch: after a commit the
same positions are run again on true features.

What drafters with heads have in common comes first: files, pools, memory of requests.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from eaglegbv.attention import KVPool, PagedAttention, Segment, paged_attention, slot_bytes
from eaglegbv.config import DraftSampling, GraphMode, Plan
from eaglegbv.cuda_graphs import Recorder, make_recorder, spare_slots
from eaglegbv.devices import send
from eaglegbv.drafters.base import Drafter, RowDrafter, RowSnapshot, own_snapshots
from eaglegbv.drafters.checkpoint import fit, is_head, load_head, read_checkpoint
from eaglegbv.drafters.draft_probs import DraftProbs, ProbsSettings, replayed_probs
from eaglegbv.drafters.eagle_levels import EagleLevels
from eaglegbv.drafters.eagle_model import EagleHead, Head, HeadForward
from eaglegbv.drafters.eagle_native import native_head
from eaglegbv.drafters.files import DrafterFiles, LoadedTarget, Opening
from eaglegbv.drafters.graph_drafting import DeviceDrafting, LevelDrafter
from eaglegbv.drafters.graph_reading import DeviceReading
from eaglegbv.drafters.host_drafting import DraftCall, DraftedRows, NewRows, draft_trees
from eaglegbv.drafters.tree_growth import LevelTable
from eaglegbv.errors import DrafterMismatch
from eaglegbv.request import DraftState, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftTree

Made = TypeVar("Made", bound="FeatureDrafter")


@dataclass(slots=True)
class FeatureState(DraftState):
    """A drafter's memory of one request."""

    context: int = 0  # positions whose true features have been run so far, or were skipped
    # [tokens, feature_size] each: true features of the following positions, not run yet, in the
    # parts in which they came. A request that decodes without drafts has many.
    pending: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None  # the drafter's output from which the last tree goes on

    def rows(self, request: Request) -> Tensor:
        """Return ``[rows]`` int64, the slots of the rows that were run on true features."""
        return request.slots[request.skipped : self.context]


class FeatureDrafter(Drafter):
    """A drafter whose rows of committed tokens are made of true features, in its own pool.

    Its slots are numbered like the target's. Positions that were skipped are as if the text began
    after them.
    """

    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)
    skips: ClassVar[bool] = True

    def __init__(
        self,
        head: Head,
        attention: PagedAttention,
        *,
        graphs: GraphMode | Recorder = GraphMode.OFF,
        max_context: int | None = None,
        recorder: Recorder | None = None,
        native: bool = True,
    ) -> None:
        """Wrap a head.

        Args:
            head: The head, sharing the target's embedding.
            attention: Paged attention over a pool with as many layers as the head, whose slots are
                numbered like the target's. With ``graphs`` the pool has one more, which padding
                writes to.
            graphs: Whether the draft loop runs on the device, recorded and replayed.
            max_context: Most positions of a text; None for as many as the pool has slots.
            recorder: The target's, whose CUDA graphs lend theirs their memory.
            native: Whether forwards run in the native library, if it knows the head and nothing is
                padded or recorded.

        Raises:
            InvalidArgument: Graphs cannot be recorded.
        """
        pool = attention.pool
        self.head = head
        self._max_context = pool.num_slots if max_context is None else max_context
        self._recorder = make_recorder(
            graphs, cuda=pool.keys.is_cuda, recordable=attention.recordable, shared=recorder
        )
        self._native = native and self._recorder is None
        self._on_device: DeviceDrafting | None = None
        if self._recorder is not None:
            ids = head.draft_to_target
            self._on_device = DeviceDrafting(self._make_levels, ids, self._recorder)
            self.graph_counts = self._on_device.counts

    def observe(self, request: Request, features: Tensor) -> None:
        """Take true features; see :meth:`Drafter.observe`."""
        self._state(request).pending.append(features)

    def forget(self, request: Request) -> None:
        """Drop the request's memory; its KV slots are the engine's to free."""
        request.draft_states.pop(FeatureState, None)
        request.skipped = 0

    def shareable(self, request: Request) -> int:
        """Return how many positions were run on true features; see :meth:`Drafter.shareable`."""
        return 0 if request.skipped else self._state(request).context

    def behind(self, request: Request) -> int:
        """Return how many positions were not run yet; see :meth:`Drafter.behind`."""
        return request.context - self._state(request).context

    @torch.inference_mode()
    def skip(self, request: Request, *, keep: int) -> None:
        """Keep only the last ``keep`` pending positions; see :meth:`Drafter.skip`."""
        state = self._state(request)
        behind = self.behind(request)
        parts: list[Tensor] = []
        missing = min(keep, behind)
        while missing:
            part = state.pending.pop()
            # Most parts are single rows: slicing each would take longer than all the rest.
            parts.append(part if len(part) <= missing else part[-missing:])
            missing -= len(parts[-1])
        # A copy, as views would keep their whole batch alive.
        state.pending = [torch.cat(parts[::-1])] if parts else []
        if behind > keep:
            request.skipped = state.context = request.context - keep
            state.hidden = None

    def record(
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """See :meth:`Drafter.record`."""
        if self._on_device is not None:
            self._on_device.record(requests, plan, draft_sampling, params)

    @abstractmethod
    def _make_levels(self, requests: int, table: LevelTable) -> LevelDrafter:
        """Make the drafter's part in recorded drafts of so many requests."""

    def _state(self, request: Request) -> FeatureState:
        return request.draft_state(FeatureState, lambda: FeatureState(context=request.shared))


def head_drafter(
    kind: type[Made],
    head: Head,
    *,
    slots: int,
    graphs: GraphMode = GraphMode.OFF,
    **how: Any,  # noqa: ANN401  further arguments of FeatureDrafter
) -> Made:
    """Return a drafter around ``head`` with a KV pool of ``slots``, in the head's dtype."""
    weight = next(head.parameters())
    config = head.config
    # Where drafting is padded there is one slot more, which nobody owns: padding writes there.
    rows = slots + spare_slots(graphs, cuda=weight.is_cuda)
    sizes = (config.num_layers, rows, config.num_kv_heads, config.head_dim)
    attention = paged_attention(KVPool(*sizes, weight.dtype, weight.device))
    return kind(head, attention, graphs=graphs, **how)


class HeadFiles(DrafterFiles):
    """A head's folder, in any format of :mod:`eaglegbv.drafters.formats`."""

    drafter: ClassVar[type[FeatureDrafter]]

    def __init__(self, folder: Path, opening: Opening) -> None:
        self._folder = folder
        self._opening = opening
        self._target_config = opening.read_config(opening.model)
        try:
            config = fit(read_checkpoint(folder), self._target_config).config
        except DrafterMismatch as error:
            expected = f"{self.name} for {opening.model} ({error})"
            raise DrafterMismatch("drafter", opening.drafter, expected) from error
        self.features = config.features
        sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
        self.slot_bytes = slot_bytes(*sizes, opening.dtype)

    def open(self, target: LoadedTarget) -> FeatureDrafter:
        """Load the head; see :meth:`DrafterFiles.open`."""
        head = load_head(
            self._folder,
            target_config=self._target_config,
            target_embedding=target.input_embeddings,
            read_output=target.output_layer,
            dtype=self._opening.dtype,
            device=self._opening.device,
        )
        return head_drafter(
            self.drafter,
            head,
            slots=target.max_slots,
            graphs=self._opening.graphs,
            max_context=target.max_context,
            recorder=target.recorder,
            native=self._opening.native,
        )


class EagleDrafter(FeatureDrafter, RowDrafter):
    """Drafts with an EAGLE-1 or EAGLE-3 head.

    Attributes:
        head: The head.
        read_counts: Forwards on true features that were ``replayed``, or by why they were not.
    """

    head: EagleHead

    def __init__(
        self,
        head: EagleHead,
        attention: PagedAttention,
        **how: Any,  # noqa: ANN401  further arguments of FeatureDrafter
    ) -> None:
        """Wrap a head; see :class:`FeatureDrafter`."""
        super().__init__(head, attention, **how)
        self._forward = HeadForward(head, attention, native_head(head) if self._native else None)
        # Whether a row's numbers depend on what runs beside it.
        half = head.embedding.dtype.itemsize < torch.float32.itemsize
        self._rounds = half and not self._forward.exact
        self._reading: DeviceReading | None = None
        self.read_counts: Mapping[str, int] = {}
        if self._recorder is not None:
            most = self._max_context
            self._reading = DeviceReading(head, self._forward, self._recorder, max_context=most)
            self.read_counts = self._reading.counts

    def _make_levels(self, requests: int, table: LevelTable) -> EagleLevels:
        """See :meth:`FeatureDrafter._make_levels`."""
        most = self._max_context
        return EagleLevels(self.head, self._forward, self._root_of, most, requests, table)

    def record(
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """See :meth:`Drafter.record`."""
        super().record(requests, plan, draft_sampling, params)
        if self._reading is not None:
            self._reading.record(requests, plan.depth + 1)

    @torch.inference_mode()
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Run the pending true features of ``requests`` through the head, in one forward."""
        behind = [(r, s) for r in requests if (s := self._state(r)).pending]
        if not behind:
            return
        segments = [self._true_segment(request, state) for request, state in behind]
        features = [part for _, state in behind for part in state.pending]
        most = max(request.plan.depth for request, _ in behind) + 1  # rows after a step
        last = self._read(segments, features, most)
        for (request, state), hidden in zip(behind, last, strict=True):
            state.context = request.context
            state.pending = []
            state.hidden = hidden

    def _read(
        self, segments: Sequence[Segment], features: Sequence[Tensor], most: int
    ) -> Sequence[Tensor]:
        """Return the head's output at the last row of each segment; ``most`` rows are recorded."""
        if self._reading is not None:
            last = self._reading.read(segments, features, most)
            if last is not None:
                return last.unbind(0)
        hidden = self._forward.read(segments, torch.cat(list(features)))
        ends = accumulate(segment.num_new for segment in segments)
        return [hidden[end - 1] for end in ends]

    @torch.inference_mode()
    def draft(self, call: DraftCall) -> DraftTree:
        """Propose one tree per request; see :meth:`Drafter.draft`."""
        requests = call.requests
        self.catch_up(requests)
        if self._rounds and requests[0].replayed:
            return self._draft_as_replayed(call)
        if self._on_device is not None:
            tree = self._on_device.draft(call)
            if tree is not None:
                return tree
        contexts, outputs = zip(*map(self._root_of, requests), strict=True)
        hidden = torch.stack(outputs)
        drafted = DraftedRows(contexts, call.tree_slots)

        def follow(rows: NewRows) -> Tensor:
            # The head reads its own output for a node's parent.
            nonlocal hidden
            above = hidden.index_select(0, send(rows.parents, hidden.device))
            hidden, logits = self._forward.go_on(drafted.segments(rows), above)
            return logits

        logits = self._forward.logits(hidden)
        return draft_trees(call, self.head.draft_to_target, logits, follow)

    def _draft_as_replayed(self, call: DraftCall) -> DraftTree:
        """Draft a row at a time, as :meth:`advance` will find it again, to the last bit."""
        free = [iter(slots.split(1)) for slots in call.tree_slots]
        owners = list(range(len(call.requests)))
        known = [self.snapshot(request) for request in call.requests]

        def logits() -> Tensor:
            return self._logits(torch.stack([snapshot.last for snapshot in known]))

        def follow(rows: NewRows) -> Tensor:
            nonlocal owners, known
            above = rows.parents.tolist()
            owners = [owners[parent] for parent in above]
            advanced = self.advance(
                [call.requests[b] for b in owners],
                [known[parent] for parent in above],
                rows.token_ids,
                torch.cat([next(free[b]) for b in owners]),
            )
            known = own_snapshots(advanced, RowSnapshot)
            return logits()

        return draft_trees(call, self.head.draft_to_target, logits(), follow)

    def snapshot(self, request: Request) -> RowSnapshot:
        """Remember the last tree's root, behind the positions run on true features.

        Raises:
            RuntimeError: The head skipped the sequence's beginning, and would find other
                distributions once that is read again.
        """
        if request.skipped:
            raise RuntimeError(f"request {request.number} is recalled, its beginning skipped")
        settings = ProbsSettings.of(request, self.head.config.draft_vocab_size)
        # A copy, as the row would keep the output of its whole batch alive.
        hidden = self._root_hidden(request).clone()
        return RowSnapshot(self._state(request).context, request.slots[:0], hidden, settings)

    def next_outputs(self, segments: Sequence[Segment], last: Tensor) -> Tensor:
        """Run the head on its own features ``[rows, hidden]``."""
        if not self._rounds:
            return self._forward.step(segments, last)
        # In half precision a row's numbers depend on what runs beside it.
        alone = zip(segments, last.split(1), strict=True)
        return torch.cat([self._forward.step([segment], row) for segment, row in alone])

    def probs_after(self, last: Tensor, settings: Sequence[ProbsSettings]) -> DraftProbs:
        """See :meth:`RowDrafter.probs_after`."""
        return replayed_probs(self._logits(last), settings, self.head.draft_to_target)

    def _logits(self, last: Tensor) -> Tensor:
        rows = last.split(1 if self._rounds else len(last))
        return torch.cat([self._forward.logits(row) for row in rows])

    def _true_segment(self, request: Request, state: FeatureState) -> Segment:
        """Return the rows of positions committed since the head last ran on true features."""
        start = state.context
        end = request.context
        tokens = request.tokens_from(start + 1)[: end - start]
        return Segment.causal(torch.tensor(tokens), state.rows(request), request.slots[start:])

    def _root_of(self, request: Request) -> tuple[Tensor, Tensor]:
        return self._state(request).rows(request), self._root_hidden(request)

    def _root_hidden(self, request: Request) -> Tensor:
        hidden = self._state(request).hidden
        if hidden is None:
            raise RuntimeError(f"request {request.number} drafts before any feature was observed")
        return hidden


class EagleFiles(HeadFiles):
    """An EAGLE head's folder."""

    name = "an EAGLE head"
    drafter = EagleDrafter

    @classmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        """Return whether the tensors are a head's; see :func:`is_head`."""
        return is_head(folder, config)
