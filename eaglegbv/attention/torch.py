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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eaglegbv.attention.base import (
    AttentionCall,
    BranchAttention,
    BranchShape,
    PackedBatch,
    PagedAttention,
    Segment,
)
from eaglegbv.attention.kv_cache import KVPool, slot_bytes
from eaglegbv.devices import send, upload

_MAX_PADDED_SCORES = 1 << 24
"""Most padded scores (segments x queries x keys) of a group of segments, to bound its mask."""

_MAX_GATHERED = 1 << 23
"""Most bytes of keys and values of a group on a CPU: more would not stay in its caches."""

_KEY_SCORES = 4  # number of scores that take as long as gathering a key and its value
_FREE_PADDING = 1 << 12  # number of scores that take as long as the operations of a further group


class TorchPagedAttention(PagedAttention):
    """Attention by ``scaled_dot_product_attention`` over a pool on any device."""

    def __init__(self, pool: KVPool, *, instead: str | None = None) -> None:
        """Attend over ``pool``; ``instead`` says why faster attention does not, for counts."""
        self.pool = pool
        self._instead = instead
        self.fallbacks: Counter[str] = Counter()
        self._planned: PackedBatch | None = None
        self._plans: dict[int | None, list[_Group]] = {}
        self._key_buffer = pool.keys.new_empty((0, *pool.keys.shape[2:]))
        self._value_buffer = torch.empty_like(self._key_buffer)

    def branches(self, shape: BranchShape) -> "TorchBranches":
        """See :meth:`PagedAttention.branches`."""
        return TorchBranches(self.pool, shape)

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`."""
        if self._instead is not None:
            self.fallbacks[self._instead] += 1
        layer = self.pool.write(call.layer, batch.slots, k, v)
        fused = call.softcap is None and call.sinks is None
        out: Tensor | None = None
        for group in self._groups(batch, batch.effective_window(call.window)):
            rows = group.rows
            queries = q if rows is None else q.index_select(0, rows.gather)
            queries = _by_head(queries.view(group.segments, -1, *q.shape[1:]))
            read = self._read(layer, group)
            attended = (_attend_fused if fused else _attend_explicit)(queries, *read, group, call)
            attended = _by_head(attended).reshape(-1, *q.shape[1:])
            if rows is None:
                return attended
            if out is None:
                out = torch.empty_like(q)
            out.index_copy_(0, rows.packed, attended.index_select(0, rows.kept))
        assert out is not None  # a batch has segments, so it has groups
        return out

    def _groups(self, batch: PackedBatch, window: int | None) -> "list[_Group]":
        if batch is not self._planned:
            self._planned, self._plans = batch, {}
        groups = self._plans.get(window)
        if groups is None:
            groups = self._plans[window] = _plan(batch, window, self.pool)
        return groups

    def _read(self, layer: tuple[Tensor, Tensor], group: "_Group") -> tuple[Tensor, Tensor]:
        """Return the group's keys and values, each ``[segments, kv_heads, keys, head_dim]``."""
        keys, values = layer
        slots = group.key_slots
        if isinstance(slots, slice):
            return _by_head(keys[slots].unsqueeze(0)), _by_head(values[slots].unsqueeze(0))
        count = len(slots)
        if count > len(self._key_buffer):
            # Buffers must not be inference tensors: those cannot be written outside that mode.
            with torch.inference_mode(mode=False):
                self._key_buffer = keys.new_empty((2 * count, *keys.shape[1:]))
                self._value_buffer = torch.empty_like(self._key_buffer)
        shape = (group.segments, -1, *keys.shape[1:])
        keys = torch.index_select(keys, 0, slots, out=self._key_buffer[:count])
        values = torch.index_select(values, 0, slots, out=self._value_buffer[:count])
        return _by_head(keys.view(shape)), _by_head(values.view(shape))


def _by_head(part: Tensor) -> Tensor:
    """Return ``[segments, heads, rows, head_dim]`` of ``[segments, rows, heads, head_dim]``."""
    return part.transpose(1, 2)


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, group: "_Group", call: AttentionCall) -> Tensor:
    """Attend from ``[segments, heads, queries, head_dim]``."""
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=group.mask,
        is_causal=group.causal,
        scale=call.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, group: "_Group", call: AttentionCall
) -> Tensor:
    """Attend as ``_attend_fused`` does, with soft-capped scores or sinks, which that lacks."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [segments, kv_heads, sharing, queries, head_dim]
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    scores = (grouped @ k.transpose(-1, -2)).flatten(1, 2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if group.mask is not None:
        scores = scores + group.mask
    elif group.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    scores, keys = scores.float(), scores.shape[-1]
    if call.sinks is not None:
        sink = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., :keys].to(q.dtype)
    out: Tensor = weights.unflatten(1, grouped.shape[1:3]) @ v
    return out.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which packed rows the padded rectangle of a group's queries holds."""

    gather: Tensor  # [segments * queries] int64, packed row of each query; padding repeats a row
    kept: Tensor  # [real queries] int64, indices of the real queries in the rectangle
    packed: Tensor  # [real queries] int64, their packed rows


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that run as one attention call."""

    segments: int  # number of segments
    rows: _Rows | None  # packed rows of the queries; None if they are the whole batch in order
    # Slots of the keys: a range of the pool, or [segments * keys] int64 to gather.
    key_slots: slice | Tensor
    # [segments, 1, queries, keys] in the pool's dtype, 0 or -inf, added to the scores. None if
    # every key is seen, or in causal order.
    mask: Tensor | None
    causal: bool = False  # whether the order is plainly causal, without a mask


def _plan(batch: PackedBatch, window: int | None, pool: KVPool) -> list[_Group]:
    dtype = pool.keys.dtype
    if len(batch.segments) == 1:
        return [_plan_single(batch.segments[0], window, dtype, batch.slots.device)]
    most_keys = sys.maxsize
    if not pool.keys.is_cuda:
        _, _, kv_heads, head_dim = pool.keys.shape
        most_keys = _MAX_GATHERED // slot_bytes(1, kv_heads, head_dim, dtype)
    members = _group_segments(batch.segments, most_keys)
    return [_plan_padded(batch, group, window, dtype) for group in members]


def _plan_single(
    segment: Segment, window: int | None, dtype: torch.dtype, device: torch.device
) -> _Group:
    slots = segment.key_slots()
    keys = slots.shape[0]
    lowest, highest = slots.aminmax()
    start = int(lowest)
    dense = int(highest) - start + 1 == keys
    key_slots = slice(start, start + keys) if dense else send(slots, device)
    in_order = not dense or bool((slots[1:] > slots[:-1]).all())
    if segment.visible is None and window is None and segment.num_new == keys > 1 and in_order:
        return _Group(1, None, key_slots, None, causal=True)
    seen = segment.key_mask(window)
    if seen is None:
        return _Group(1, None, key_slots, None)
    mask = _added(send(seen, device), dtype)
    if dense:  # keys come in the pool's order
        mask = torch.empty_like(mask).index_copy_(1, send(slots - start, device), mask)
    return _Group(1, None, key_slots, mask[None, None])


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
    batch: PackedBatch, members: list[int], window: int | None, dtype: torch.dtype
) -> _Group:
    segments = [batch.segments[i] for i in members]
    queries = max(s.num_new for s in segments)
    counts = [s.num_keys for s in segments]
    keys = max(counts)
    device = batch.slots.device
    key_slots: list[Tensor] = []
    for segment, count in zip(segments, counts, strict=True):
        padding = segment.tree_slots[:1].expand(keys - count)  # any slot of the same request
        key_slots += (segment.context_slots, segment.tree_slots, padding)
    real = torch.arange(keys) < torch.tensor(counts).unsqueeze(1)
    seen = send(real, device).unsqueeze(1).repeat(1, queries, 1)
    for row, (segment, count) in enumerate(zip(segments, counts, strict=True)):
        # This covers the last keys: the pending ones, since only a window hides others, or all.
        last = segment.pending_mask() if window is None else segment.key_mask(window)
        if last is not None:
            seen[row, : segment.num_new, count - last.shape[1] : count] = send(last, device)
    return _Group(
        segments=len(segments),
        rows=_rows_of(batch, members, queries),
        key_slots=send(torch.cat(key_slots), device),
        mask=_added(seen, dtype).unsqueeze(1),
    )


def _rows_of(batch: PackedBatch, members: list[int], queries: int) -> _Rows | None:
    in_order = members == list(range(len(batch.segments)))
    if in_order and batch.rows == queries * len(members):
        return None
    gather: list[int] = []
    kept: list[int] = []
    packed: list[int] = []
    for place, i in enumerate(members):
        first, end = batch.offsets[i], batch.offsets[i + 1]
        rows = list(range(first, end))
        kept.extend(range(place * queries, place * queries + len(rows)))
        packed.extend(rows)
        gather.extend(rows + [first] * (queries - len(rows)))
    device = batch.slots.device
    return _Rows(*(upload(r, dtype=torch.int64, device=device) for r in (gather, kept, packed)))


class TorchBranches(BranchAttention):
    """Attention in plain PyTorch; its sizes follow the longest context, so it is not recordable."""

    def plan(self, contexts: Sequence[Tensor], slots: Tensor) -> None:
        """See :meth:`BranchAttention.plan`."""
        self._load(slots)
        longest = max(len(context) for context in contexts)
        # Padding repeats a slot of the request itself, because it must not read another's slots.
        rows = [torch.cat((c, c[:1].expand(longest - len(c)))) for c in contexts]
        lengths = torch.tensor([len(context) for context in contexts])
        device = self.pool.keys.device
        self._contexts = send(torch.stack(rows), device)
        self._seen = send(torch.arange(longest) < lengths.unsqueeze(1), device)

    def attend(self, level: int, q: Tensor, k: Tensor, v: Tensor, chains: Tensor | None) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        keys, values = self.pool.write(0, self.slots[:, level].flatten(), k, v)
        batch, branches, levels = self.shape.requests, self.shape.branches, level + 1
        kv_heads, dim = keys.shape[1:]
        grouped = q.view(batch, branches, kv_heads, -1, dim)
        paths = self.slots[:, :levels].transpose(1, 2)
        if chains is not None:
            paths = paths.gather(1, chains)
        to_text = torch.einsum("bjhgd,bchd->bjhgc", grouped, keys[self._contexts])
        to_path = torch.einsum("bjhgd,bjthd->bjhgt", grouped, keys[paths])
        unseen = ~self._seen.view(batch, 1, 1, 1, -1)
        scores = torch.cat((to_text.masked_fill(unseen, -torch.inf), to_path), dim=-1)
        weights = (scores.float() * self.shape.scale).softmax(dim=-1).to(q.dtype)
        text, path = weights.split((to_text.shape[-1], levels), dim=-1)
        out = torch.einsum("bjhgc,bchd->bjhgd", text, values[self._contexts])
        out = out + torch.einsum("bjhgt,bjthd->bjhgd", path, values[paths])
        return out.reshape(q.shape)
