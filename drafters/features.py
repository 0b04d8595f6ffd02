"""What drafters with heads have in common: their files, their pools and what they remember."""

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from eaglegbv.attention.base import PagedAttention
from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.attention.kv_cache import KVPool, slot_bytes
from eaglegbv.config import DraftSampling, GraphMode, Plan
from eaglegbv.cuda_graphs import Recorder, make_recorder, spare_slots
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.checkpoint import fit, load_head, read_checkpoint
from eaglegbv.drafters.eagle_model import Head
from eaglegbv.drafters.files import DrafterFiles, LoadedTarget, Opening
from eaglegbv.drafters.graph_drafting import DeviceDrafting, LevelDrafter
from eaglegbv.drafters.tree_growth import LevelTable
from eaglegbv.errors import DrafterMismatch
from eaglegbv.request import DraftState, Request
from eaglegbv.sampling import SamplingParams

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
