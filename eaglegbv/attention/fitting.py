"""Choice of the attention for a pool."""

import logging

from eaglegbv.attention.base import PagedAttention
from eaglegbv.attention.flashinfer_paged import FlashInferPagedAttention
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.torch_paged import TorchPagedAttention
from eaglegbv.errors import InvalidArgument

_log = logging.getLogger(__name__)


def paged_attention(pool: KVPool) -> PagedAttention:
    """Return the attention for a pool: FlashInfer on a GPU, PyTorch elsewhere.

    Where FlashInfer is not installed or does not support the pool, PyTorch is used on a GPU too. A
    warning says why, and its calls are counted as fall-backs by the argument that did not fit.
    """
    if not pool.keys.is_cuda:
        return TorchPagedAttention(pool)
    try:
        return FlashInferPagedAttention(pool)
    except InvalidArgument as error:
        _log.warning("PyTorch's attention on a GPU, which is slower: %s", error)
        return TorchPagedAttention(pool, instead=error.argument)
