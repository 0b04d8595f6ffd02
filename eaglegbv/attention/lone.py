"""Attention of a single request as operations of a graph, so that compiled code need not leave it.

    q of a row     \
    keys[read]      >  scores + mask  ->  softmax  ->  values[read]
    rows' own k, v -> keys[written], values[written]

All that depends on the request is passed as tensors, so that one graph serves any text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_pool import KVPool

_LEAST_KEYS = 2
"""Least number of keys, because compiled graphs treat sizes of 0 and 1 as constants."""

_FEW_ROWS = 16
"""Most rows: the masks of a long prompt would take more memory than its keys."""


class LoneKeys(NamedTuple):
    """Where one request's rows find keys and values in a layer of a pool.

    Attributes:
        keys: ``[slots, kv_heads, head_dim]``, of the pool.
        values: ``[slots, kv_heads, head_dim]``, of the pool.
        written: ``[rows]`` int64, slots of the rows themselves.
        read: ``[keys]`` int64, slots of all keys that any row may see.
        mask: ``[rows, keys]`` in the pool's dtype, added to the scores: 0 where a row sees a key,
            -inf elsewhere.
    """

    keys: Tensor
    values: Tensor
    written: Tensor
    read: Tensor
    mask: Tensor


def attends_alone(segments: Sequence[Segment], pool: KVPool) -> bool:
    """Return whether this attention fits ``segments``: one token or one tree, on a CPU.

    On other devices, kernels read the pages in place, while this attention gathers the keys.
    """
    few = len(segments) == 1 and segments[0].num_new <= _FEW_ROWS
    return few and pool.keys.device.type == "cpu"


def lone_keys(segment: Segment, pool: KVPool, layer: int) -> LoneKeys:
    """Return what the rows of ``segment`` attend to, as tensors of the caller's inference mode."""
    keys, values = pool.layer(layer)
    read = segment.key_slots()
    mask = keys.new_zeros((segment.num_new, len(read)))
    seen = segment.key_mask(None)
    if seen is not None:
        mask.masked_fill_(~seen, -torch.inf)
    missing = _LEAST_KEYS - len(read)
    if missing > 0:  # repeat a slot, which is seen only once
        read, mask = read.repeat(_LEAST_KEYS), pad(mask, (0, missing), value=-torch.inf)
    return LoneKeys(keys, values, segment.new_slots.clone(), read.clone(), mask)


def path_keys(context: Tensor, slots: Tensor, pool: KVPool, layer: int) -> list[LoneKeys]:
    """Return what each row of a path attends to; rows run in sequence and see all earlier ones.

    Args:
        context: ``[c]`` int64, c >= 1, slots of the committed tokens.
        slots: ``[rows]`` int64, slots of the rows, in order.
        pool: Keys and values.
        layer: Index of the layer in the pool.
    """
    keys, values = pool.layer(layer)
    every = torch.cat((context, slots))
    mask = keys.new_zeros(len(every))
    return [
        LoneKeys(keys, values, every[end - 1 : end], every[:end], mask[:end].unsqueeze(0))
        for end in range(len(context) + 1, len(every) + 1)
    ]


def attend_lone(q: Tensor, k: Tensor, v: Tensor, *, over: LoneKeys, scale: float) -> Tensor:
    """Write the rows' keys and values, then attend; see :meth:`PagedAttention.attend`."""
    over.keys.index_copy_(0, over.written, k)
    over.values.index_copy_(0, over.written, v)
    rows, _, head_dim = q.shape
    kv_heads = k.shape[1]
    # The query heads that share a key head become its rows, so keys are read once for all of them.
    grouped = q.view(rows, kv_heads, -1, head_dim).transpose(0, 1)
    sharing = grouped.shape[2]
    out = scaled_dot_product_attention(
        grouped.reshape(1, kv_heads, rows * sharing, head_dim),
        over.keys.index_select(0, over.read).transpose(0, 1).unsqueeze(0),
        over.values.index_select(0, over.read).transpose(0, 1).unsqueeze(0),
        attn_mask=over.mask.repeat_interleave(sharing, dim=0),
        scale=scale,
    )
    return out.view(kv_heads, rows, sharing, head_dim).transpose(0, 1).reshape(q.shape)
