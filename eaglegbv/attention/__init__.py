"""Attention over a paged KV pool, and the packed batches that it is of."""

from eaglegbv.attention.base import (
    Attend,
    AttentionCall,
    BranchAttention,
    BranchShape,
    PackedBatch,
    PagedAttention,
    Segment,
    attend_for_layer,
    attend_opaque,
    attending,
    offsets_of,
    pack,
)
from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.attention.kv_cache import KVPool, PoolSize, SlotAllocator, slot_bytes
from eaglegbv.attention.static import StaticBatch

__all__ = [
    "Attend",
    "AttentionCall",
    "BranchAttention",
    "BranchShape",
    "KVPool",
    "PackedBatch",
    "PagedAttention",
    "PoolSize",
    "Segment",
    "SlotAllocator",
    "StaticBatch",
    "attend_for_layer",
    "attend_opaque",
    "attending",
    "offsets_of",
    "pack",
    "paged_attention",
    "slot_bytes",
]
