"""Interface to FlashInfer's kernels: wrappers, their factory, and the pools they support."""

from typing import Any, Protocol

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer_buffers import TreeBuffers
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.errors import InvalidArgument

HEAD_DIMS = frozenset({64, 128, 256})
"""Head sizes with which the kernels are tested upstream."""

DTYPES = frozenset({torch.float16, torch.bfloat16})

_BACKEND = "fa2"
"""A backend whose kernels read masks. If it may choose, FlashInfer 0.7 sometimes decodes with
cuDNN, which has neither these plans nor this memory.
"""

_PLAN_BYTES = 1 << 18
"""Memory for a plan of fixed sizes, on the device and on the host each: about twelve bytes for a
tile of query rows. FlashInfer's own choice for any plan is 8 MiB, and there may be a hundred plans.
"""


class Wrapper(Protocol):
    """The part of FlashInfer's batch wrappers that is used."""

    _mask_indptr_buf: Tensor | None

    def plan(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  FlashInfer's own types
        """Prepare a batch."""

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Compute attention as planned."""

    def reset_workspace_buffer(self, partial_results: Tensor, plans: Tensor) -> None:
        """Use other memory from now on."""


class Kernels(Protocol):
    """Factory of wrappers: FlashInfer's, or a test's."""

    def processors(self, device: torch.device) -> int:
        """Return the number of multiprocessors that share the work."""

    def prefill(self, workspace: Tensor) -> Wrapper:
        """Return a new wrapper for requests of several queries."""

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """Return a new wrapper for requests of one query each."""

    def static_prefill(self, workspace: Tensor, buffers: TreeBuffers) -> Wrapper:
        """Return a new wrapper for masked requests of fixed sizes, planned into ``buffers``."""


class FlashInferKernels:
    """Factory of FlashInfer's wrappers."""

    def __init__(self) -> None:
        """Import FlashInfer.

        Raises:
            InvalidArgument: FlashInfer is not installed.
        """
        try:
            import flashinfer
        except ImportError as error:
            expected = "FlashInfer to be installed: pip install 'eaglegbv[gpu]'"
            raise InvalidArgument("attention", "flashinfer", expected) from error
        self._flashinfer = flashinfer

    def processors(self, device: torch.device) -> int:
        """See :meth:`Kernels.processors`."""
        return torch.cuda.get_device_properties(device).multi_processor_count

    def prefill(self, workspace: Tensor) -> Wrapper:
        """See :meth:`Kernels.prefill`."""
        wrapper: Wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=_BACKEND
        )
        return wrapper

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """See :meth:`Kernels.decode`."""
        wrapper: Wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores, backend=_BACKEND
        )
        return wrapper

    def static_prefill(self, workspace: Tensor, buffers: TreeBuffers) -> Wrapper:
        """See :meth:`Kernels.static_prefill`."""
        wrapper: Wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffers.query_offsets,
            paged_kv_indptr_buf=buffers.key_offsets,
            paged_kv_indices_buf=buffers.key_slots,
            paged_kv_last_page_len_buf=buffers.last_pages,
            custom_mask_buf=buffers.mask,
            mask_indptr_buf=buffers.mask_offsets,
            backend=_BACKEND,
        )
        wrapper.reset_workspace_buffer(workspace, workspace.new_empty(_PLAN_BYTES))
        return wrapper


def check_pool(pool: KVPool) -> None:
    """Check that FlashInfer supports a pool.

    Raises:
        InvalidArgument: The kernels do not support its head size or dtype.
    """
    head_dim, dtype = pool.keys.shape[3], pool.keys.dtype
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument("head_dim", head_dim, f"one of {sorted(HEAD_DIMS)} for FlashInfer")
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", str(dtype), "float16 or bfloat16 for FlashInfer")
