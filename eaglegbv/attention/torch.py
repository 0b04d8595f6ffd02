"""Paged attention in plain PyTorch: the CPU's implementation, and the reference for any other.

The cost of a small forward is that of launching its operations. So a batch is planned once per
forward and kind of layer, and a layer runs two writes and one fused attention, plus two gathers
unless the keys are a slice of the pool:

- if the slots of a single segment fill a range exactly, they are read in place, in the pool's
  order;
- otherwise keys are gathered into buffers that are reused (fresh memory costs more than the copy),
  with segments of similar size padded together.

A request never reads a slot it does not own, not even with weight zero: 0 * NaN is NaN.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eaglegbv.attention.base import PackedBatch, PagedAttention, Segment
from eaglegbv.attention.kv_cache import KVPool, slot_bytes
from eaglegbv.devices import send, upload

_MAX_PADDED_SCORES = 1 << 24
"""Most padded scores (segments x queries x keys) of a group of segments, to bound its mask."""

_MAX_GATHERED = 1 << 23
"""Most bytes of keys and values of a group on a CPU: more would not stay in its caches."""

_KEY_SCORES = 4
"""Number of scores that take as long as gathering a key and its value."""

_FREE_PADDING = 1 << 12
"""Number of scores that take as long as the operations of a further group."""

_FEW_QUERIES = 16
"""Most queries of a segment for which query heads that share a key head are attended to jointly."""


@dataclass(frozen=True, slots=True)
class _RowMap:
    """Which packed rows the padded rectangle of a group's queries holds.

    Attributes:
        gather: ``[segments * queries]`` int64, packed row of each query; padding repeats a row.
        kept: ``[real queries]`` int64, indices of the real queries in the rectangle.
        packed: ``[real queries]`` int64, their packed rows.
    """

    gather: Tensor
    kept: Tensor
    packed: Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that run as one attention call.

    Attributes:
        segments: Number of segments.
        queries: Queries of a segment, including padding.
        row_map: Packed rows of the queries; None if they are the whole batch in order.
        key_slots: Slots of the keys: a range of the pool, or ``[segments * keys]`` int64 to gather.
        mask: ``[segments, 1, queries, keys]`` in the pool's dtype, 0 or -inf, added to the scores.
            None if every key is seen, or in causal order.
        causal: Whether the order is plainly causal, without a mask.
        row_mask: ``[segments, 1, queries * query heads of a key head, keys]``, ``mask`` for each of
            those heads; None if ``mask`` is None, the queries are many, or no heads share keys.
    """

    segments: int
    queries: int
    row_map: _RowMap | None
    key_slots: slice | Tensor
    mask: Tensor | None
    causal: bool
    row_mask: Tensor | None

    @property
    def few(self) -> bool:
        """Whether the queries are those of a token or a tree rather than of a prompt."""
        return self.queries <= _FEW_QUERIES and not self.causal


class _Layer(NamedTuple):
    """Views of a layer's keys and values, for writing and for reading.

    They are made once: selecting them in every call took a tenth of the time of a row's attention.

    Attributes:
        keys: ``[slots, kv_heads, head_dim]``.
        values: ``[slots, kv_heads, head_dim]``.
        keys_by_head: ``[1, kv_heads, slots, head_dim]``.
        values_by_head: ``[1, kv_heads, slots, head_dim]``.
    """

    keys: Tensor
    values: Tensor
    keys_by_head: Tensor
    values_by_head: Tensor

    @classmethod
    def of(cls, pool: KVPool, layer: int) -> "_Layer":
        keys, values = pool.layer(layer)
        return cls(keys, values, *(_by_head(part.unsqueeze(0)) for part in (keys, values)))


class TorchPagedAttention(PagedAttention):
    """Attention by ``scaled_dot_product_attention`` over a pool on any device."""

    def __init__(self, pool: KVPool, *, instead: str | None = None) -> None:
        """Attend over ``pool``.

        Args:
            pool: Keys and values.
            instead: Why this runs instead of faster attention; its calls then count as fall-backs.
        """
        self.pool = pool
        self._instead = instead
        self._fallbacks: Counter[str] = Counter()
        self._planned: PackedBatch | None = None
        self._plans: dict[tuple[int | None, int], tuple[_Group, ...]] = {}
        self._layers = [_Layer.of(pool, layer) for layer in range(len(pool.keys))]
        self._key_buffer = pool.keys.new_empty((0, *pool.keys.shape[2:]))
        self._value_buffer = torch.empty_like(self._key_buffer)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`."""
        if self._instead is not None:
            self._fallbacks[self._instead] += 1
        own = self._layers[layer]
        own.keys.index_copy_(0, batch.slots, k)
        own.values.index_copy_(0, batch.slots, v)
        fused = softcap is None and sinks is None
        groups = self._plan(batch, window, heads=q.shape[1])
        out: Tensor | None = None
        for group in groups:
            row_map = group.row_map
            rows = q if row_map is None else q.index_select(0, row_map.gather)
            group_k, group_v = self._read(own, group)
            if fused:
                group_out = _attend_fused(rows, group_k, group_v, group, scale)
            else:
                group_out = _attend_explicit(rows, group_k, group_v, group, scale, softcap, sinks)
            if row_map is None:
                return group_out
            if out is None:
                out = torch.empty_like(q)
            out.index_copy_(0, row_map.packed, group_out.index_select(0, row_map.kept))
        assert out is not None  # a batch has segments, so it has groups
        return out

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """See :meth:`PagedAttention.fallbacks`."""
        return self._fallbacks

    def _plan(self, batch: PackedBatch, window: int | None, *, heads: int) -> tuple[_Group, ...]:
        if batch is not self._planned:
            self._planned, self._plans = batch, {}
        window = batch.effective_window(window)
        sharing = heads // self.pool.keys.shape[2]
        groups = self._plans.get((window, sharing))
        if groups is None:
            groups = _plan(batch, window, self.pool, sharing)
            self._plans[window, sharing] = groups
        return groups

    def _read(self, layer: _Layer, group: _Group) -> tuple[Tensor, Tensor]:
        """Return the group's keys and values, each ``[segments, kv_heads, keys, head_dim]``."""
        slots = group.key_slots
        if isinstance(slots, slice):
            first, count = slots.start, slots.stop - slots.start
            keys = layer.keys_by_head.narrow(2, first, count)
            return keys, layer.values_by_head.narrow(2, first, count)
        count = slots.shape[0]
        if count > self._key_buffer.shape[0]:
            self._grow_buffers(count)
        shape = (group.segments, -1, *layer.keys.shape[1:])
        keys = torch.index_select(layer.keys, 0, slots, out=self._key_buffer[:count])
        values = torch.index_select(layer.values, 0, slots, out=self._value_buffer[:count])
        return _by_head(keys.view(shape)), _by_head(values.view(shape))

    def _grow_buffers(self, count: int) -> None:
        # Buffers must not be inference tensors: those cannot be written outside inference mode.
        with torch.inference_mode(mode=False):
            self._key_buffer = self._key_buffer.new_empty((2 * count, *self._key_buffer.shape[1:]))
            self._value_buffer = torch.empty_like(self._key_buffer)


def _by_head(part: Tensor) -> Tensor:
    """Return ``[segments, heads, rows, head_dim]`` of ``[segments, rows, heads, head_dim]``."""
    return part.transpose(1, 2)


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float) -> Tensor:
    """Attend with a group's padded rectangle of queries, ``[segments * queries, heads, dim]``."""
    segments, queries = group.segments, group.queries
    heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    if group.few and heads > kv_heads:
        # Query heads that share a key head become its rows, so keys are read once for all of them.
        # With many queries the keys are read again for every 32 rows, and nothing is gained.
        if queries == 1:  # they are in that order already
            rows = q.view(segments, kv_heads, -1, head_dim)
        else:
            rows = _by_head(q.view(segments, queries, kv_heads, -1, head_dim)).flatten(2, 3)
        out = scaled_dot_product_attention(rows, k, v, attn_mask=group.row_mask, scale=scale)
        if queries > 1:
            out = _by_head(out.view(segments, kv_heads, queries, -1, head_dim))
        return out.reshape(q.shape)
    out = scaled_dot_product_attention(
        _by_head(q.view(segments, queries, heads, head_dim)),
        k,
        v,
        attn_mask=group.mask,
        is_causal=group.causal,
        scale=scale,
        enable_gqa=kv_heads != heads,
    )
    return _by_head(out).reshape(q.shape)


def _attend_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: _Group,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend as ``_attend_fused`` does, with soft-capped scores or sinks, which that lacks."""
    segments, queries = group.segments, group.queries
    heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    grouped = (segments, kv_heads, heads // kv_heads, queries, -1)
    grouped_q = _by_head(q.view(segments, queries, heads, head_dim)).reshape(grouped)
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    scores = (grouped_q @ k.transpose(-1, -2)).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if group.mask is not None:
        scores = scores + group.mask
    elif group.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    scores = scores.float()
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(segments, heads, queries, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    out: Tensor = weights.reshape(grouped) @ v
    return _by_head(out.flatten(1, 2)).reshape(q.shape)


def _plan(batch: PackedBatch, window: int | None, pool: KVPool, sharing: int) -> tuple[_Group, ...]:
    """Plan for layers in which ``sharing`` query heads share a key head."""
    dtype = pool.keys.dtype
    if len(batch.segments) == 1:
        return (_plan_single(batch.segments[0], window, dtype, batch.slots.device, sharing),)
    most_keys = sys.maxsize
    if not pool.keys.is_cuda:
        _, _, kv_heads, head_dim = pool.keys.shape
        most_keys = _MAX_GATHERED // slot_bytes(1, kv_heads, head_dim, dtype)
    members = _group_segments(batch.segments, most_keys)
    return tuple(_plan_padded(batch, group, window, dtype, sharing) for group in members)


def _plan_single(
    segment: Segment, window: int | None, dtype: torch.dtype, device: torch.device, sharing: int
) -> _Group:
    slots = segment.key_slots()
    keys = slots.shape[0]
    lowest, highest = slots.aminmax()
    start = int(lowest)
    dense = int(highest) - start + 1 == keys
    mask: Tensor | None = None
    causal = (
        segment.visible is None
        and window is None
        and segment.num_new == keys > 1
        and (not dense or bool((slots[1:] > slots[:-1]).all()))
    )
    seen = None if causal else segment.key_mask(window)
    if seen is not None:
        mask = _added(send(seen, device), dtype)
        if dense:  # keys come in the pool's order
            mask = torch.empty_like(mask).index_copy_(1, send(slots - start, device), mask)
        mask = mask.view(1, 1, *mask.shape)
    return _Group(
        segments=1,
        queries=segment.num_new,
        row_map=None,
        key_slots=slice(start, start + keys) if dense else send(slots, device),
        mask=mask,
        causal=causal,
        row_mask=_row_mask(mask, sharing),
    )


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to the scores: 0 where a key is seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _group_segments(segments: Sequence[Segment], most_keys: int) -> list[list[int]]:
    """Partition segments by similar size, so that padding a group costs no more than splitting it.

    A group of several segments has at most ``most_keys`` keys, padding included.
    """
    order = sorted(range(len(segments)), key=lambda i: (segments[i].num_new, segments[i].num_keys))
    groups: list[list[int]] = []
    real = queries = keys = 0
    for i in order:
        q, n = segments[i].num_new, segments[i].num_keys
        queries, keys, real = max(queries, q), max(keys, n), real + (q + _KEY_SCORES) * n
        members = len(groups[-1]) + 1 if groups else 1
        padding = (queries + _KEY_SCORES) * keys * members - real
        room = keys * members <= min(most_keys, _MAX_PADDED_SCORES // queries)
        if groups and padding <= _FREE_PADDING and room:
            groups[-1].append(i)
        else:
            groups.append([i])
            queries, keys, real = q, n, (q + _KEY_SCORES) * n
    return groups


def _plan_padded(
    batch: PackedBatch, members: list[int], window: int | None, dtype: torch.dtype, sharing: int
) -> _Group:
    segments = [batch.segments[i] for i in members]
    queries = max(s.num_new for s in segments)
    counts = [s.num_keys for s in segments]
    keys = max(counts)
    device = batch.slots.device
    key_slots: list[Tensor] = []
    for segment, own in zip(segments, counts, strict=True):
        padding = segment.tree_slots[:1].expand(keys - own)  # any slot of the same request
        key_slots += (segment.context_slots, segment.tree_slots, padding)
    real = torch.arange(keys) < torch.tensor(counts).unsqueeze(1)
    seen = send(real, device).unsqueeze(1).repeat(1, queries, 1)
    for row, (segment, own) in enumerate(zip(segments, counts, strict=True)):
        # This covers the last keys: the pending ones, since only a window hides others, or all.
        last = segment.pending_mask() if window is None else segment.key_mask(window)
        if last is not None:
            seen[row, : segment.num_new, own - last.shape[1] : own] = send(last, device)
    mask = _added(seen, dtype).unsqueeze(1)
    return _Group(
        segments=len(segments),
        queries=queries,
        row_map=_map_rows(batch, members, queries),
        key_slots=send(torch.cat(key_slots), device),
        mask=mask,
        causal=False,
        row_mask=_row_mask(mask, sharing),
    )


def _row_mask(mask: Tensor | None, sharing: int) -> Tensor | None:
    """Return a group's mask for the rows of the ``sharing`` query heads of each key head."""
    if mask is None or sharing == 1 or mask.shape[2] > _FEW_QUERIES:
        return None
    return mask.unsqueeze(3).expand(-1, -1, -1, sharing, -1).flatten(2, 3)


def _map_rows(batch: PackedBatch, members: list[int], queries: int) -> _RowMap | None:
    in_order = members == list(range(len(batch.segments)))
    if in_order and batch.rows == queries * len(members):
        return None
    gather: list[int] = []
    kept: list[int] = []
    packed: list[int] = []
    for place, i in enumerate(members):
        first, end = batch.offsets[i], batch.offsets[i + 1]
        own = list(range(first, end))
        kept.extend(range(place * queries, place * queries + len(own)))
        packed.extend(own)
        gather.extend(own + [first] * (queries - len(own)))
    rows, device = torch.int64, batch.slots.device
    return _RowMap(
        gather=upload(gather, dtype=rows, device=device),
        kept=upload(kept, dtype=rows, device=device),
        packed=upload(packed, dtype=rows, device=device),
    )
