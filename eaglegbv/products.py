"""Products of a few rows with a matrix of weights, which take most of the time of a decoding step.

On a CPU, weights are *packed* into the blocks that oneDNN's kernels read, once instead of in every
call: seven rows of a draft tree then cost little more than one. This is not done where it is
slower: a packed product takes longer to start, so small matrices are timed. Often packing is faster
for several rows and slower for one; such a matrix is kept in both forms. This changes nothing but
rounding.

*Quantised* weights of 8 bits change the numbers (:mod:`eaglegbv.quantization`), but are read from
memory in a quarter of the time. :mod:`eaglegbv.joining` decides which products a module has.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from eaglegbv.operations import define
from eaglegbv.quantization import Quantization

_PACKED_FOR = 16
"""Number of rows for which packed weights are laid out; kernels take any number."""

_LARGE = 1 << 20
"""Entries from which a matrix takes so long to read that packing pays without being timed."""

_LONE, _SEVERAL = (1,), (4, 8)
"""Rows of the products that are timed: one for a token, several for draft trees."""

_TIMED_ROUNDS, _TIMED_COPIES = 5, 64
"""Number of rounds, of which the fastest counts, and of calls in a round.

Each call uses another copy of the matrix. In a forward, too, every matrix is read once, after all
others, and few are still in a cache."""

_INT8 = torch.iinfo(torch.int8)

_BLOCK = 16
"""Columns that the kernel takes at once; with fewer, it would read past the end of the matrix."""

_LEAST_SCALE = 1e-30
"""Scale for a row of zeros."""

Product = Callable[[Tensor], Tensor]
"""Maps ``[..., in_features]`` to ``[..., out_features]``."""


def _constant(weight: Tensor) -> nn.Parameter:
    """Return a parameter, which a graph with generated products turns into a constant."""
    return nn.Parameter(weight, requires_grad=False)


def product_of(
    weight: Tensor,
    bias: Tensor | None,
    quantization: Quantization,
    *,
    generated: bool = False,
    index: int = 0,
) -> "DenseProduct | PackedProduct | QuantisedProduct":
    """Return the fastest product of few rows with ``weight`` ``[out_features, in_features]``.

    Args:
        weight: The matrix.
        bias: ``[out_features]``, or None.
        quantization: Any but ``auto``.
        generated: Whether its code will be generated; see :func:`eaglegbv.joining.prepare`.
        index: Its index among the packed products of a module that may be compiled.
    """
    if quantization is Quantization.INT8:
        return QuantisedProduct(weight, bias)
    if generated:
        return DenseProduct(_constant(weight), None if bias is None else _constant(bias))
    if can_pack(weight) and packing_pays(*weight.shape, weight.dtype, _SEVERAL):
        lone = packing_pays(*weight.shape, weight.dtype, _LONE)
        return PackedProduct(weight, bias, index=index, lone=lone)
    return DenseProduct(weight, bias)


@lru_cache(maxsize=256)
@torch.no_grad()
def packing_pays(outputs: int, inputs: int, dtype: torch.dtype, rows: tuple[int, ...]) -> bool:
    """Return whether packing makes products of ``rows`` with such a matrix faster on this machine.

    The products are timed once in a process, with all its threads, so that all its models compute
    alike.

    Args:
        outputs: Rows of the matrix.
        inputs: Columns of the matrix.
        dtype: A dtype that :func:`can_pack` accepts.
        rows: Numbers of rows, whose times are added up.
    """
    if outputs * inputs >= _LARGE:
        return True
    weight = torch.zeros((outputs, inputs), dtype=dtype, device="cpu")
    copies = range(_TIMED_COPIES)
    ways = (
        [PackedProduct(weight, None) for _ in copies],
        [DenseProduct(weight.clone(), None) for _ in copies],
    )
    times = [
        [[_time(products, x) for products in ways] for _ in range(_TIMED_ROUNDS)]
        for x in (weight.new_zeros((count, inputs)) for count in rows)
    ]
    packed, dense = np.min(times, axis=1).sum(axis=0)
    return bool(packed < dense)


def _time(products: Sequence["Product"], x: Tensor) -> float:
    """Return the seconds that this thread takes to call each product once."""
    start = time.thread_time()
    for product in products:
        product(x)
    return time.thread_time() - start


def can_pack(weight: Tensor) -> bool:
    """Return whether ``weight`` can be packed: on a CPU, and of a dtype that oneDNN packs."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class DenseProduct:
    """A product with an unpacked matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]``."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with ``x`` ``[..., in_features]``."""
        return functional.linear(x, self._weight, self._bias)


class PackedProduct:
    """A product with a packed matrix; for a single row, with the unpacked one if that is faster."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, index: int = 0, lone: bool = True
    ) -> None:
        """Pack ``weight`` ``[out_features, in_features]``.

        Args:
            weight: A matrix that :func:`can_pack` accepts.
            bias: ``[out_features]``, or None.
            index: Its index among the products of a module that may be compiled.
            lone: Whether the packed matrix is used for a single row too; if not, ``weight`` is kept
                for it.
        """
        self._lone = None if lone else DenseProduct(weight, bias)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        self._bias = bias
        self._index = index
        self._out_features = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with ``x`` ``[..., in_features]``."""
        if self._lone is not None and x.numel() == x.shape[-1]:
            return self._lone(x)
        if torch.compiler.is_compiling():  # the compiler does not know packed tensors
            opaque: Tensor = torch.ops.eaglegbv.product(x, self._index, self._out_features)
            return opaque
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """Return the product with the packed matrix, for any number of rows."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


class QuantisedProduct:
    """A product with a matrix of 8-bit integers and a scale for each of its rows.

    A row's result does not depend on the rows beside it: the kernel reads the weights once for a
    few rows, but sums each row separately.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise ``weight`` ``[out_features, in_features]``, floats on a CPU."""
        largest = weight.abs().amax(dim=1).float()
        scales = (largest / _INT8.max).clamp(min=_LEAST_SCALE).bfloat16()
        steps = (weight.float() / scales.float().unsqueeze(1)).round()
        self._padding = -weight.shape[1] % _BLOCK
        padded = functional.pad(steps.clamp(_INT8.min, _INT8.max), (0, self._padding))
        self._scales, self._weight = _constant(scales), _constant(padded.to(torch.int8))
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with ``x`` ``[..., in_features]``."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        if self._padding:
            rows = functional.pad(rows, (0, self._padding))
        out = torch._weight_int8pack_mm(rows, self._weight, self._scales).to(x.dtype)
        if self._bias is not None:
            out = out + self._bias
        return out.view(*x.shape[:-1], len(self._weight))


# Packed tensors cannot be part of a compiled graph, so the graph calls products by number. The
# products to which the numbers refer are set around the call.

_IN_USE: ContextVar[Sequence[PackedProduct]] = ContextVar("eaglegbv_products", default=())


@contextmanager
def in_use(products: Sequence[PackedProduct]) -> Iterator[None]:
    """Let compiled code find its products here within this context."""
    token = _IN_USE.set(products)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def _run_opaque(x: Tensor, index: int, out_features: int) -> Tensor:  # noqa: ARG001
    return _IN_USE.get()[index].run(x)


def _shape_opaque(x: Tensor, index: int, out_features: int) -> Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], out_features))


define("product", "(Tensor x, int index, int out_features) -> Tensor", _run_opaque, _shape_opaque)
