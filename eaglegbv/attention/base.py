"""Packed forwards over a paged KV pool: the segments of requests, and the attention interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.cuda_graphs import Bucket
from eaglegbv.devices import send
from eaglegbv.errors import InvalidArgument, ModelNotSupported


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One request's part of a packed forward: q new tokens, c committed and m pending ones.

    The keys a new token may see are the committed tokens and some of the pending ones:

        committed: positions 0 ... c - 1      pending: the tree, the last q of it new
        [ context_slots                 ]     [ tree_slots                     ]
          all visible                           ``visible``, one row per new token

    Slot tensors are on the host. The other tensors may be on the host or on the model's device, all
    of them on the same one.
    """

    token_ids: Tensor  # [q] int64, the new tokens
    positions: Tensor  # [q] int64, their positions in the sequence (siblings share one)
    context_slots: Tensor  # [c] int64, slots of the committed tokens at positions 0 ... c - 1.
    # [m] int64, m >= q: slots of the pending tokens, that is of those not yet committed. The last q
    # belong to the new tokens, whose keys and values are written there.
    tree_slots: Tensor
    tree_positions: Tensor  # [m] int64, positions of those tokens
    # [q, m] bool, which pending tokens each new token sees (itself included), or None for causal
    # order: each sees every pending token up to itself.
    visible: Tensor | None = None

    def __post_init__(self) -> None:
        q, m = self.num_new, self.num_pending
        if not 1 <= q <= m:
            raise InvalidArgument("token_ids", q, f"from 1 to len(tree_slots) = {m} new tokens")
        expected = {"positions": (q,), "tree_positions": (m,), "visible": (q, m)}
        for name, shape in expected.items():
            part: Tensor | None = getattr(self, name)
            if part is not None and part.shape != shape:
                raise InvalidArgument(name, tuple(part.shape), str(shape))

    @classmethod
    def causal(cls, token_ids: Tensor, context_slots: Tensor, new_slots: Tensor) -> Self:
        """Return new tokens ``[q]`` that follow the committed ones: prefill or plain decoding.

        All three are int64; ``context_slots`` are ``[c]``, ``new_slots`` ``[q]``.
        """
        start = context_slots.shape[0]
        positions = torch.arange(start, start + token_ids.shape[0], device=token_ids.device)
        return cls(token_ids, positions, context_slots, new_slots, positions)

    @property
    def num_new(self) -> int:
        """Number of new tokens, q."""
        return self.token_ids.shape[0]

    @property
    def num_context(self) -> int:
        """Number of committed tokens, c."""
        return self.context_slots.shape[0]

    @property
    def num_pending(self) -> int:
        """Number of tokens not committed yet, m."""
        return self.tree_slots.shape[0]

    @property
    def num_keys(self) -> int:
        """Number of keys attention may read, c + m."""
        return self.num_context + self.num_pending

    @property
    def new_slots(self) -> Tensor:
        """Slots of the new tokens, ``[q]`` int64."""
        return self.tree_slots[self.num_pending - self.num_new :]

    def key_slots(self) -> Tensor:
        """Return ``[c + m]`` int64: slots of all keys, committed ones first."""
        if self.num_context == 0:
            return self.tree_slots
        return torch.cat((self.context_slots, self.tree_slots))

    def pending_mask(self, device: torch.device | str | None = None) -> Tensor | None:
        """Return ``[q, m]`` bool, the pending tokens each new one sees; None if each sees all.

        A single new token sees all, whether in causal order or alone in its tree. A causal mask is
        made on ``device``, by default where the segment is.
        """
        q, m = self.num_new, self.num_pending
        if q == 1 and (self.visible is None or m == 1):
            return None
        if self.visible is not None:
            return self.visible
        device = self.token_ids.device if device is None else device
        return torch.ones((q, m), dtype=torch.bool, device=device).tril(m - q)

    def key_mask(
        self, window: int | None, device: torch.device | str | None = None
    ) -> Tensor | None:
        """Return ``[q, c + m]`` bool, the keys each new token sees; None if each sees all.

        Args:
            window: A key is seen if it is less than ``window`` positions back; None for no limit.
            device: Where the mask is made; by default where the segment is.
        """
        q, c, m = self.num_new, self.num_context, self.num_pending
        device = self.token_ids.device if device is None else device
        pending = self.pending_mask(device)
        # A window makes no difference to a sequence that is not longer.
        if pending is None and (window is None or c + m <= window):
            return None
        mask = torch.ones((q, c + m), dtype=torch.bool, device=device)
        if pending is not None:
            mask[:, c:] = send(pending, device)
        if window is not None:
            positions, others = send(self.positions, device), send(self.tree_positions, device)
            key_positions = torch.cat((torch.arange(c, device=device), others))
            mask &= positions.unsqueeze(1) - key_positions < window
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The new tokens of several segments in sequence: one row per token.

    Batches are compared by identity: an attention implementation plans once per batch object and
    layer type.
    """

    segments: tuple[Segment, ...]  # the parts, in order
    offsets: tuple[int, ...]  # first row of each segment, and the number of rows at the end
    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64, where each row's keys and values are written

    @property
    def rows(self) -> int:
        """Number of packed rows."""
        return self.offsets[-1]

    def effective_window(self, window: int | None) -> int | None:
        """Return ``window``, or None if no sequence is longer and so it makes no difference."""
        if window is not None and all(s.num_keys <= window for s in self.segments):
            return None
        return window


def pack(segments: Sequence[Segment], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack ``segments`` into one forward on ``device``.

    Raises:
        InvalidArgument: ``segments`` is empty.
    """
    if not segments:
        raise InvalidArgument("segments", segments, "at least one segment")
    return PackedBatch(
        segments=tuple(segments),
        offsets=offsets_of(segment.num_new for segment in segments),
        token_ids=joined([segment.token_ids for segment in segments], device),
        positions=joined([segment.positions for segment in segments], device),
        slots=joined([segment.new_slots for segment in segments], device),
    )


def offsets_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return where consecutive parts of these sizes begin, and where the last of them ends."""
    return (0, *accumulate(sizes))


def joined(parts: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """Concatenate tensors of the host or of ``device``, and return the result on ``device``."""
    if len(parts) == 1:
        return send(parts[0], device)
    if len({part.device for part in parts}) > 1:
        parts = [send(part, device) for part in parts]
    return send(torch.cat(list(parts)), device)


class AttentionCall(NamedTuple):
    """What a layer asks of attention."""

    layer: int  # index of the layer in the pool
    scale: float  # factor on q k
    # Sliding window: a key is seen if it is less than `window` positions back.
    window: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) before masking
    sinks: Tensor | None = None  # [heads], an additional score in the denominator of every softmax


Attend = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor]
""":meth:`PagedAttention.attend` over the batch of one forward."""


class PagedAttention(ABC):
    """Attention over a paged KV pool, called once per layer of a forward."""

    pool: KVPool  # keys and values
    # Whether `static` runs kernels only, so that it can be recorded.
    recordable: ClassVar[bool] = False

    fallbacks: Mapping[str, int] = MappingProxyType({})
    """Number of calls left to slower attention, by the feature the faster one lacks."""

    def static(self, bucket: Bucket, *, max_context: int) -> "PagedAttention":  # noqa: ARG002
        """Return attention over the same pool for fixed sizes, ``max_context`` keys each."""
        return self

    def plan(self, batch: PackedBatch) -> None:  # noqa: B027
        """Prepare for a batch of the fixed sizes; called before a forward over it is replayed."""

    @abstractmethod
    def branches(self, shape: "BranchShape") -> "BranchAttention":
        """Return attention of drafted rows over the first layer of the same pool."""

    @abstractmethod
    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Write the new keys and values into the pool, then attend.

        Args:
            call: What the layer asks.
            q: ``[rows, heads, head_dim]``; query head h reads key head h // (heads / kv_heads).
            k: ``[rows, kv_heads, head_dim]``.
            v: ``[rows, kv_heads, head_dim]``.
            batch: The packed segments the rows belong to.

        Returns:
            ``[rows, heads, head_dim]``.
        """


def attend_for_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  what a token sees comes with the batch
    *,
    eaglegbv_attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend for a layer of transformers, which calls this by its ``AttentionInterface``.

    Takes queries, keys and values ``[1, heads, rows, dim]``, and returns ``[1, rows, heads, dim]``.

    Raises:
        ModelNotSupported: The layer does not hand on the forward's keywords, or has no number.
    """
    name = type(module).__name__
    if eaglegbv_attend is None:
        expected = "attention that is handed the forward's keywords"
        raise ModelNotSupported("model", name, expected)
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ModelNotSupported("model", name, "attention that knows its layer")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(layer, scale, sliding_window, softcap, s_aux)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    return eaglegbv_attend(call, q, k, v).unsqueeze(0), None


# Attention within a compiled graph, as one opaque operation. It plans a batch on the host, which a
# graph cannot contain. Operations take only tensors and numbers, so the forward's attention is set
# in a context variable around the call.

_ATTEND: ContextVar[Attend] = ContextVar("eaglegbv_attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let compiled code attend with ``attend``."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def attend_opaque(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within compiled code; see :meth:`PagedAttention.attend`."""
    out: Tensor = torch.ops.eaglegbv.attend(q, k, v, *call)
    return out


def _run(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Tensor:  # noqa: ANN401
    return _ATTEND.get()(AttentionCall(*call), q, k, v).contiguous()  # as the graph expects it


torch.library.define(
    "eaglegbv::attend",
    "(Tensor q, Tensor k, Tensor v, int layer, float scale,"
    " int? window, float? softcap, Tensor? sinks) -> Tensor",
)
torch.library.impl("eaglegbv::attend", "default", _run)
torch.library.register_fake("eaglegbv::attend", lambda q, *_: q.new_empty(q.shape))


# Attention of drafted rows: each sees the sequence of its request and its own path, nothing else.
#
# keys of a request | context | level 0: a slot for each branch | level 1: likewise | ...
#
# A fixed number of branches of every request are drafted side by side. The slots of their rows are
# known from the start. Whose path a branch continues (a chain of branches) becomes known only
# while drafting.


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchShape:
    """Sizes that stay fixed."""

    requests: int  # number of requests, including those for padding
    branches: int  # rows of each request
    levels: int  # longest path of rows
    max_context: int  # longest context
    heads: int  # query heads
    scale: float  # factor on the scores


class BranchAttention(ABC):
    """Attention of a fixed number of rows over the first layer of a pool.

    Attributes:
        pool: Keys and values.
        shape: The rows.
        slots: ``[requests, levels, branches]`` int64, slots of the rows, always in the same memory.
        most_keys: Most keys of all requests together, including those of their rows; None for no
            limit.
    """

    most_keys: int | None = None

    def __init__(self, pool: KVPool, shape: BranchShape) -> None:
        self.pool = pool
        self.shape = shape
        with torch.inference_mode(mode=False):
            self.slots = torch.zeros(
                (shape.requests, shape.levels, shape.branches),
                dtype=torch.int64,
                device=pool.keys.device,
            )

    @abstractmethod
    def plan(self, contexts: Sequence[Tensor], slots: Tensor) -> None:
        """Prepare for a step.

        Args:
            contexts: For each request, ``[c]`` int64 on the host with c >= 1, slots of its context.
            slots: ``[requests, levels, branches]`` int64 on the host, slots of the rows.
        """

    def _load(self, slots: Tensor) -> None:
        """Let the rows use ``slots``, shaped as in :meth:`plan`."""
        self.slots.copy_(send(slots, self.slots.device))

    @abstractmethod
    def attend(self, level: int, q: Tensor, k: Tensor, v: Tensor, chains: Tensor | None) -> Tensor:
        """Write the keys and values of a level's rows, then attend.

        Args:
            level: Counted from 0; all levels before it have run.
            q: ``[requests * branches, heads, head_dim]``.
            k: ``[requests * branches, kv_heads, head_dim]``.
            v: ``[requests * branches, kv_heads, head_dim]``.
            chains: ``[requests, branches, level + 1]`` int64, the branch of each row's path at
                every level, with its own last; None if every branch continues itself.

        Returns:
            ``[requests * branches, heads, head_dim]``.
        """
