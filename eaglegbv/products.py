"""Products of a few rows with a matrix of weights: what most of a decoding step is spent on.

On a CPU weights are *packed* into the blocks that oneDNN's kernels read, once and not in every
call: seven rows of a draft tree then cost little more than one. Not where that is slower: a packed
product takes longer to begin, which small matrices are timed for. Often it is faster for several
rows and slower for one, and such a matrix is kept both ways. This changes nothing but rounding.

Weights of 8 bits, *quantised*, change the numbers (:mod:`eaglegbv.quantization`): they are read
from memory in a quarter of the time. Which products a module has is for :mod:`eaglegbv.joining`.
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
"""Rows that packed weights are laid out for; kernels take any number."""

_LARGE = 1 << 20
"""Entries from which on a matrix takes so long to read that packing pays without being timed."""

_LONE, _SEVERAL = (1,), (4, 8)
"""Rows of the products that are timed: a token's, and those of draft trees."""

_TIMED_ROUNDS, _TIMED_COPIES = 5, 64
"""Rounds, of which the fastest counts, and calls in a round.

Each call is with another copy: in a forward, too, every matrix is read once, after all others, and
few are still in a cache."""

_INT8 = torch.iinfo(torch.int8)

_BLOCK = 16
"""Columns that the kernel takes at once: of fewer, it would read past the end of the matrix."""

_LEAST_SCALE = 1e-30
"""Scale of a row of zeros."""

Product = Callable[[Tensor], Tensor]
"""``[..., in_features]`` to ``[..., out_features]``."""


def _constant(weight: Tensor) -> nn.Parameter:
    """Return a parameter: a graph whose products are generated makes it a constant of its own."""
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
        quantization: Not ``auto``.
        generated: Whether its code will be generated; see :func:`eaglegbv.joining.prepare`.
        index: Its place among the packed products of a module that may be compiled.
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
    """Return whether products of ``rows`` with such a matrix are faster packed, on this machine.

    Timed once in a process, on as many threads as it has, so that all its models compute alike.

    Args:
        outputs: Rows of the matrix.
        inputs: Columns of the matrix.
        dtype: A type that :func:`can_pack`.
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
    """Return the seconds that this thread takes to call each once."""
    start = time.thread_time()
    for product in products:
        product(x)
    return time.thread_time() - start


def can_pack(weight: Tensor) -> bool:
    """Return whether ``weight`` can be packed: floats on a CPU, of a type that oneDNN packs."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class DenseProduct:
    """A product with a matrix as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]``."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with ``x`` ``[..., in_features]``."""
        return functional.linear(x, self._weight, self._bias)


class PackedProduct:
    """A product with a packed matrix; a single row's with it as it is, where that is faster."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, index: int = 0, lone: bool = True
    ) -> None:
        """Pack ``weight`` ``[out_features, in_features]``.

        Args:
            weight: One that :func:`can_pack`.
            bias: ``[out_features]``, or None.
            index: Its place among the products of a module that may be compiled.
            lone: Whether a single row is multiplied with the packed matrix, too; if not, ``weight``
                is kept for it.
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
        if torch.compiler.is_compiling():  # the compiler knows no packed tensors
            opaque: Tensor = torch.ops.eaglegbv.product(x, self._index, self._out_features)
            return opaque
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """Return the product with the packed matrix, whatever the number of rows."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


class QuantisedProduct:
    """A product with a matrix of 8-bit integers, and a scale for each of its rows.

    A row's result does not depend on the rows beside it: the kernel reads the weights once for a
    few rows, but adds up each row by itself.
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


# Packed tensors cannot be part of a compiled graph, so it calls products back by their numbers.
# Whose products the numbers mean is set around the call.

_IN_USE: ContextVar[Sequence[PackedProduct]] = ContextVar("eaglegbv_products", default=())


@contextmanager
def in_use(products: Sequence[PackedProduct]) -> Iterator[None]:
    """Have compiled code find its products here."""
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
