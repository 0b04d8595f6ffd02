"""Paged attention in plain PyTorch: the CPU's implementation, and the reference for any other.

A batch is planned once per forward and kind of layer: segments of similar size are padded together
into groups, each of which is one gather of keys and values, and one fused attention. What is
gathered goes into buffers that are reused, as fresh memory costs more than the copy.

A request never reads a slot it does not own, not even with weight zero: 0 * NaN is NaN.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

_MAX_GATHERED = 1 << 23
"""Most bytes of keys and values of a group: more would not stay in a CPU's caches."""

_MAX_SCORES = 1 << 24
"""Most scores of a group, padding included, which a mask is as large as."""

_FREE_KEYS, _FREE_QUERIES = 64, 8
"""Padding of a segment that takes no longer than the operations of a further group."""


class TorchPagedAttention(PagedAttention):
    """Attention by ``scaled_dot_product_attention`` over a pool on any device."""

    def __init__(self, pool: KVPool, *, instead: str | None = None) -> None:
        """Attend over ``pool``; ``instead`` says why faster attention does not, for counts."""
        self.pool = pool
        self._instead = instead
        self.fallbacks: Counter[str] = Counter()
        self._planned: PackedBatch | None = None
        self._plans: dict[int | None, _Plan] = {}
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
        attention = _attend_fused if fused else _attend_explicit
        plan = self._plan(batch, batch.effective_window(call.window))
        parts: list[Tensor] = []
        for group in plan.groups:
            queries = q if plan.places is None else q.index_select(0, group.rows)
            queries = _by_head(queries.view(group.segments, -1, *q.shape[1:]))
            attended = attention(queries, *self._read(layer, group), group, call)
            parts.append(_by_head(attended).reshape(-1, *q.shape[1:]))
        if plan.places is None:
            return parts[0]
        return torch.cat(parts).index_select(0, plan.places)

    def _plan(self, batch: PackedBatch, window: int | None) -> "_Plan":
        if batch is not self._planned:
            self._planned, self._plans = batch, {}
        if window not in self._plans:
            self._plans[window] = _plan(batch, window, self.pool)
        return self._plans[window]

    def _read(self, layer: tuple[Tensor, Tensor], group: "_Group") -> tuple[Tensor, Tensor]:
        """Return the group's keys and values, each ``[segments, kv_heads, keys, head_dim]``."""
        keys, values = layer
        count = len(group.key_slots)
        if count > len(self._key_buffer):
            # Buffers must not be inference tensors: those cannot be written outside that mode.
            with torch.inference_mode(mode=False):
                self._key_buffer = keys.new_empty((2 * count, *keys.shape[1:]))
                self._value_buffer = torch.empty_like(self._key_buffer)
        shape = (group.segments, -1, *keys.shape[1:])
        keys = torch.index_select(keys, 0, group.key_slots, out=self._key_buffer[:count])
        values = torch.index_select(values, 0, group.key_slots, out=self._value_buffer[:count])
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


class _Group(NamedTuple):
    """Segments that run as one attention call, padded to the largest of them."""

    segments: int  # number of segments
    rows: Tensor  # [segments * queries] int64, packed row of each query
    key_slots: Tensor  # [segments * keys] int64
    # [segments, 1, queries, keys] in the pool's dtype, 0 or -inf, added to the scores. None if
    # every key is seen, or in causal order.
    mask: Tensor | None
    causal: bool = False  # whether the order is plainly causal, without a mask


class _Plan(NamedTuple):
    """How the segments of a batch run."""

    groups: list[_Group]
    # [rows] int64, place of each packed row among the groups' queries; None if a single group has
    # them all in order.
    places: Tensor | None


def _plan(batch: PackedBatch, window: int | None, pool: KVPool) -> _Plan:
    _, _, kv_heads, head_dim = pool.keys.shape
    most_keys = _MAX_GATHERED // slot_bytes(1, kv_heads, head_dim, pool.keys.dtype)
    groups: list[_Group] = []
    places = [0] * batch.rows
    queries = 0
    for members in _by_size(batch.segments, most_keys):
        longest = max(batch.segments[number].num_new for number in members)
        for number in members:
            first, end = batch.offsets[number : number + 2]
            places[first:end] = range(queries, queries + end - first)
            queries += longest
        groups.append(_padded(batch, members, window, pool.keys))
    if places == list(range(queries)) and len(groups) == 1:
        return _Plan(groups, None)
    return _Plan(groups, upload(places, dtype=torch.int64, device=pool.keys.device))


def _by_size(segments: Sequence[Segment], most_keys: int) -> Iterator[list[int]]:
    """Yield the numbers of segments in groups of similar size, in order of their sizes.

    A group of several segments has at most ``most_keys`` keys, and ``_MAX_SCORES`` scores, padding
    included.
    """
    members: list[int] = []
    fewest = most = 0  # keys of a member
    for number in sorted(range(len(segments)), key=lambda n: _size(segments[n])):
        queries, keys = _size(segments[number])
        if members:
            fewest, most = min(fewest, keys), max(most, keys)
            similar = queries <= segments[members[0]].num_new + _FREE_QUERIES
            similar &= most <= max(fewest + _FREE_KEYS, 3 * fewest // 2)
            room = min(most_keys, _MAX_SCORES // queries)
            if not similar or most * (len(members) + 1) > room:
                yield members
                members = []
        if not members:
            fewest = most = keys
        members.append(number)
    yield members


def _size(segment: Segment) -> tuple[int, int]:
    return segment.num_new, segment.num_keys


def _padded(batch: PackedBatch, members: Sequence[int], window: int | None, pool: Tensor) -> _Group:
    """Return a group; padding repeats a segment's last query, and a slot of the same request."""
    segments = [batch.segments[number] for number in members]
    queries = max(segment.num_new for segment in segments)
    keys = max(segment.num_keys for segment in segments)
    rows: list[Tensor] = []
    key_slots: list[Tensor] = []
    for number, segment in zip(members, segments, strict=True):
        row = torch.arange(queries).clamp(max=segment.num_new - 1)
        rows.append(batch.offsets[number] + row)
        padding = segment.tree_slots[:1].expand(keys - segment.num_keys)
        key_slots += (segment.context_slots, segment.tree_slots, padding)
    [first, *others] = segments
    # In causal order, attention of a single segment skips what is hidden.
    causal = not others and first.visible is None and window is None and queries == keys > 1
    return _Group(
        segments=len(segments),
        rows=send(torch.cat(rows), pool.device),
        key_slots=send(torch.cat(key_slots), pool.device),
        mask=None if causal else _mask(segments, queries, keys, window, pool),
        causal=causal,
    )


def _mask(
    segments: Sequence[Segment], queries: int, keys: int, window: int | None, pool: Tensor
) -> Tensor | None:
    """Return the mask of a group, see :class:`_Group`; None if every key is seen."""
    seen = torch.zeros((len(segments), queries, keys), dtype=torch.bool, device=pool.device)
    hides = False
    for place, segment in enumerate(segments):
        count = segment.num_keys
        seen[place, :, :count] = True
        # This covers the last keys: the pending ones, since only a window hides others, or all.
        last = segment.pending_mask() if window is None else segment.key_mask(window)
        if last is not None:
            seen[place, : segment.num_new, count - last.shape[1] : count] = send(last, pool.device)
        hides |= last is not None or count < keys
    if not hides:
        return None
    mask = torch.zeros(seen.shape, dtype=pool.dtype, device=pool.device)
    return mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)


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
        to_context = torch.einsum("bjhgd,bchd->bjhgc", grouped, keys[self._contexts])
        to_path = torch.einsum("bjhgd,bjthd->bjhgt", grouped, keys[paths])
        unseen = ~self._seen.view(batch, 1, 1, 1, -1)
        scores = torch.cat((to_context.masked_fill(unseen, -torch.inf), to_path), dim=-1)
        weights = (scores.float() * self.shape.scale).softmax(dim=-1).to(q.dtype)
        context, path = weights.split((to_context.shape[-1], levels), dim=-1)
        out = torch.einsum("bjhgc,bchd->bjhgd", context, values[self._contexts])
        out = out + torch.einsum("bjhgt,bjthd->bjhgd", path, values[paths])
        return out.reshape(q.shape)
