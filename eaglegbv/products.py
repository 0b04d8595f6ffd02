"""Products of a few rows with a model's weights: what a decoding step spends most of its time on.

Two things make them fast, and change nothing but rounding:

- linear layers that read the same tensor (queries, keys and values; gate and up) are *joined*: the
  first of them computes one product for all, the others find their part of it;
- on a CPU weights are *packed* into the blocks that oneDNN's kernels read, once and not in every
  call: seven rows of a draft tree then cost little more than one. Not where that is slower: a
  packed product takes longer to begin, which small matrices are timed for. Often it is faster for
  several rows and slower for one, and such a matrix is kept both ways.

A third changes the numbers, and is for drafters alone, whose laws the verifier is told whatever
they are: weights of 8 bits, *quantised*, are read from memory in a quarter of the time.

Which layers read the same tensor is seen, not guessed from names: the caller runs the module once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from eaglegbv.errors import InvalidArgument
from eaglegbv.operations import define

_PACKED_FOR = 16
"""Rows that packed weights are laid out for; kernels take any number."""

_LARGE = 1 << 20
"""Entries of a matrix from which on reading it takes so long that packing pays, untimed."""

_LONE, _SEVERAL = (1,), (4, 8)
"""Rows of the products that are timed: a token's, and those of draft trees."""

_TIMED_ROUNDS, _TIMED_COPIES = 5, 64
"""Rounds of which the fastest counts, and calls of a round.

Each of another copy: in a forward, too, every matrix is read once, behind all others, and few are
still in a cache."""

_FAST_INT8 = frozenset({"AVX2", "AVX512"})
"""Capabilities of a CPU for which PyTorch has fast kernels for weights of 8 bits."""

_INT8 = torch.iinfo(torch.int8)

_BLOCK = 16
"""Columns that the kernel takes at once: of a matrix of fewer it would read what lies behind."""

_LEAST_SCALE = 1e-30
"""Scale of a row of zeros."""


class Quantization(StrEnum):
    """How a drafter's weights are held."""

    AUTO = "auto"
    """As ``int8`` where that is fast, else as ``none``."""
    INT8 = "int8"
    """Integers of 8 bits and a scale for each row; rows to multiply are rounded to bfloat16."""
    NONE = "none"
    """As they are."""


Product = Callable[[Tensor], Tensor]
"""``[..., in_features]`` to ``[..., out_features]``."""


def prepare(
    module: nn.Module,
    run: Callable[[], object],
    quantization: Quantization = Quantization.NONE,
    *,
    generated: nn.Module | None = None,
) -> "list[PackedProduct]":
    """Join and pack the linear layers of ``module``, on its last device and in its last dtype.

    Weights loaded later are not used. Those of packed layers leave their modules (they are packed
    instead), but for those that an embedding shares and those of the last layer.

    Args:
        module: Its linear layers are replaced, under their names.
        run: Runs the module once, on any input, and every layer as often as any other forward does.
        quantization: Not ``auto``.
        generated: A part of it whose products will be generated (see
            :func:`eaglegbv.compiling.generating_products`): its layers are joined, and not packed.

    Returns:
        What was packed, in order; what was quantised is not.
    """
    groups = _groups(module, run)[::-1]
    places = _places(module)
    # By their numbers, so that nothing keeps the layers themselves.
    as_they_are = set() if generated is None else {id(part) for part in generated.modules()}
    looked_up = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    packed: list[PackedProduct] = []
    computed = Computed()
    while groups:  # each is let go before the next is made: no model fits into memory twice
        group = groups.pop()
        weights = [layer.weight.data for layer in group]
        joint = weights[0] if len(group) == 1 else torch.cat(weights)
        biases = [layer.bias.data for layer in group if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        ours = id(group[0]) in as_they_are
        product = product_of(joint, bias, quantization, generated=ours, index=len(packed))
        if isinstance(product, PackedProduct):
            packed.append(product)
        elif isinstance(product, DenseProduct) and len(group) == 1:
            continue
        kept = group[0].weight in looked_up or not groups
        sizes = [len(weight) for weight in weights]
        parts = [product] if len(group) == 1 else Joint(product, sizes, computed).parts
        for layer, own in zip(group, parts, strict=True):
            weight = layer.weight.data if kept else layer.weight.data.to("meta")
            prepared = _Prepared(layer, own, weight)
            for parent, name in places.pop(layer):
                setattr(parent, name, prepared)
        del layer, weights, joint
    return packed


def _places(module: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """Return under which names of which modules each linear layer stands."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                places.setdefault(child, []).append((parent, name))
    return places


def _constant(weight: Tensor) -> nn.Parameter:
    """Return what a graph whose products are generated takes for a constant of its own."""
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
        generated: Whether its code will be generated; see :func:`prepare`.
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
    """Return whether products of ``rows`` with such a matrix are faster packed, here.

    Timed once for a process, so that all models of it compute alike, on as many threads as it has.

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
    """Return the thread's seconds of a call of each."""
    start = time.thread_time()
    for product in products:
        product(x)
    return time.thread_time() - start


def settled(
    quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> Quantization:
    """Return what ``quantization`` comes to for weights of a type in a place: not ``auto``.

    Raises:
        InvalidArgument: It is ``int8`` where weights of 8 bits would be slower, or there are none.
    """
    fast = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _FAST_INT8
    able = fast and dtype in (torch.float32, torch.bfloat16)
    if quantization is Quantization.INT8 and not able:
        expected = "none, or auto: 8 bits take float32 or bfloat16 and a CPU with AVX2 or AVX-512"
        raise InvalidArgument("draft_quantization", str(quantization), expected)
    if quantization is Quantization.AUTO:
        return Quantization.INT8 if able else Quantization.NONE
    return quantization


def can_pack(weight: Tensor) -> bool:
    """Say whether ``weight`` can be packed: floats of a CPU that oneDNN knows."""
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
    """A product with a packed matrix, or of one row, where that is faster, with it as it is."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, index: int = 0, lone: bool = True
    ) -> None:
        """Pack ``weight`` ``[out_features, in_features]``.

        Args:
            weight: One that :func:`can_pack`.
            bias: ``[out_features]``, or None.
            index: Its place among the products of a module that may be compiled.
            lone: Whether one row is multiplied with the packed matrix too; else ``weight`` is kept.
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
        if torch.compiler.is_compiling():  # which knows no packed tensors
            opaque: Tensor = torch.ops.eaglegbv.product(x, self._index, self._out_features)
            return opaque
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """Compute it."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


class QuantisedProduct:
    """A product with a matrix of 8-bit integers, and a scale for each of its rows.

    What comes of a row does not depend on what else is multiplied: the kernel reads the weights
    once for a few rows, and adds up every row by itself.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise ``weight`` ``[out_features, in_features]``: a CPU's floats."""
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


@dataclass(slots=True)
class Computed:
    """What the joint product of a module that ran last came to, until its last layer has read it.

    One for all of them: every object that a compiled forward changes is changed once more behind
    it, which for two of every layer took 4% of a small forward.

    Attributes:
        of: The product.
        input: What it read: held on to, so that no other tensor can pass for it.
        parts: The layers' parts.
    """

    of: "Joint | None" = None
    input: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class Joint:
    """Layers that read the same tensor, as one product."""

    def __init__(self, product: Product, sizes: Sequence[int], computed: "Computed") -> None:
        """Take the product of all layers, their sizes in it, and where to keep what it computes."""
        self._sizes = list(sizes)
        self._product = product
        self._computed = computed

    @property
    def parts(self) -> list[Product]:
        """The product of each layer."""
        return [partial(self._of, place=place) for place in range(len(self._sizes))]

    def _of(self, x: Tensor, place: int) -> Tensor:
        """Return a layer's part: computed for the first that reads ``x``, found by the others."""
        computed = self._computed
        if computed.of is not self or computed.input is not x:
            computed.of, computed.input = self, x
            # Not torch.split, whose Python took 2% of a small forward.
            computed.parts = self._product(x).split_with_sizes(self._sizes, dim=-1)
        found = computed.parts[place]
        if place == len(self._sizes) - 1:
            computed.of, computed.input, computed.parts = None, None, ()
        return found


class _Prepared(nn.Linear):
    """A linear layer that computes another way; its weight may be a placeholder."""

    def __init__(self, layer: nn.Linear, product: Product, weight: Tensor) -> None:
        nn.Module.__init__(self)  # nn.Linear's own draws weights from the global generator
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias
        self._product = product

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that nn.Linear gives it
        """Return the layer's product."""
        return self._product(input)


def _groups(module: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Return the linear layers as they ran, those behind each other on one input together.

    A layer that ran twice, or not at all, is left out.
    """
    calls: list[tuple[nn.Linear, Tensor]] = []  # with the input, which so outlives the run

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, inputs[0]))

    layers = [m for m in module.modules() if type(m) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    ran = [layer for layer, _ in calls]
    groups: list[list[nn.Linear]] = []
    read: Tensor | None = None
    for layer, x in calls:
        if ran.count(layer) > 1:
            read = None
        elif x is read and _alike(groups[-1][0], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
            read = x
    return groups


def _alike(first: nn.Linear, second: nn.Linear) -> bool:
    return (
        first.weight.dtype is second.weight.dtype
        and first.weight.device == second.weight.device
        and (first.bias is None) == (second.bias is None)
    )


# Packed tensors cannot be part of a compiled graph, so one calls back, by number. Whose products
# are meant is said around the call.

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
