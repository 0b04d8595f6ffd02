"""Linear layers that cost less: fused where they read the same tensor, and packed."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

# Products of a few rows with a matrix of weights, which take most of the time of a decoding step.
#
# On a CPU, weights are *packed* into the blocks that oneDNN's kernels read, once instead of in
# every call: seven rows of a draft tree then cost little more than one. A packed product takes
# longer to start, so small matrices are not packed. This changes nothing but rounding.
#
# All numbers of rows take the packed weights. In float32 a single row is as fast either way; in
# bfloat16 even five packed rows are faster than one unpacked (164 against 218 microseconds with a
# matrix of 576 x 1536, on a Xeon with AMX).
#
# oneDNN makes a kernel for every number of rows it meets, and keeps what it generated for ever: all
# numbers up to 2,048 took 950 MB for one matrix of 960 x 192. So rows are padded to few numbers.


_PACKED_FOR = 16  # number of rows for which packed weights are laid out; kernels take any number
_PACKED_FROM = 1 << 18
"""Entries from which packing pays (measured on an EPYC: at 331,776 entries 4 rows take 0.97 of the
time, 8 rows 0.81; at 1,769,472 0.54 and 0.42)."""

Product = Callable[[Tensor], Tensor]  # maps `[..., in_features]` to `[..., out_features]`


def _constant(weight: Tensor) -> nn.Parameter:
    """Return a parameter, which a graph with generated products turns into a constant."""
    return nn.Parameter(weight, requires_grad=False)


def product_of(
    weight: Tensor, bias: Tensor | None, *, compiled: bool = False
) -> "DenseProduct | PackedProduct":
    """Return the fastest product of few rows with ``weight`` ``[out_features, in_features]``.

    A ``compiled`` graph cannot hold packed weights.
    """
    if compiled:
        return DenseProduct(_constant(weight), None if bias is None else _constant(bias))
    if can_pack(weight) and weight.numel() >= _PACKED_FROM:
        return PackedProduct(weight, bias)
    return DenseProduct(weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Return whether ``weight`` can be packed: on a CPU, and of a dtype that oneDNN packs."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def padded(rows: int) -> int:
    """Return the next number of rows that has a kernel: no more than an eighth above ``rows``.

    These are all up to 16, and behind every power of two eight in equal steps to the next.
    """
    step = max(1, 1 << (rows - 1).bit_length() >> 4)
    return -(-rows // step) * step


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
    """A product with a packed matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack ``weight`` ``[out_features, in_features]``; ``bias`` is ``[out_features]``."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with ``x`` ``[..., in_features]``."""
        rows = x.shape[:-1].numel()
        padding = padded(rows) - rows
        if not padding:
            return self._product(x)
        flat: Tensor = functional.pad(x.flatten(end_dim=-2), (0, 0, 0, padding))
        product: Tensor = self._product(flat)[:rows].unflatten(0, x.shape[:-1])
        return product

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


# Fused linears: layers that read the same tensor become one product.
#
# The first of them to run (of queries, keys and values; of gate and up) computes the product for
# all, and the others find their part of it. This changes nothing but rounding. Which layers read
# the same tensor is not guessed from names, but observed while the caller runs the module once.


def prepare(
    module: nn.Module, run: Callable[[], object], *, compiled: nn.Module | None = None
) -> None:
    """Join and pack the linear layers of ``module``, on its last device and in its last dtype.

    Weights loaded later are not used. The weights of replaced layers are removed from their modules
    (the products hold them), except those that an embedding shares and those of the last layer.

    ``run`` runs the module once, on any input, calling each layer as often as a real forward does.
    The part ``compiled`` later is joined but not packed.
    """
    groups = _groups(module, run)[::-1]
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                places.setdefault(child, []).append((parent, name))
    # Layers are listed by id, so that nothing keeps the layers themselves alive.
    of_graph = set() if compiled is None else {id(part) for part in compiled.modules()}
    looked_up = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    while groups:  # free each matrix before making the next: models may fit in memory only once
        group = groups.pop()
        weights = [layer.weight.data for layer in group]
        joint = weights[0] if len(group) == 1 else torch.cat(weights)
        biases = [layer.bias.data for layer in group if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        kept = group[0].weight in looked_up or not groups
        product = product_of(joint, bias, compiled=id(group[0]) in of_graph)
        del weights, joint
        if isinstance(product, DenseProduct) and len(group) == 1:
            continue
        sizes = [len(layer.weight) for layer in group]
        parts = [product] if len(group) == 1 else Joint(product, sizes).parts
        for layer, product_of_layer in zip(group, parts, strict=True):
            weight = layer.weight.data if kept else layer.weight.data.to("meta")
            prepared = _Prepared(layer, product_of_layer, weight)
            for parent, name in places.pop(layer):
                setattr(parent, name, prepared)


class Joint:
    """Layers that read the same tensor, as one product."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._product = product
        # What was computed last is held until the last layer has taken its part, and so is what it
        # was computed of: no other tensor can be mistaken for it.
        self._input: Tensor | None = None
        self._computed: tuple[Tensor, ...] = ()

    @property
    def parts(self) -> list[Product]:
        """The product of each layer."""
        return [partial(self._of, place=place) for place in range(len(self._sizes))]

    def _of(self, x: Tensor, place: int) -> Tensor:
        """Return a layer's part: the first layer that reads ``x`` computes it, others find it."""
        if self._input is not x:
            # torch.split would take 2% of a small forward with its Python code.
            self._input, parts = x, self._product(x).split_with_sizes(self._sizes, dim=-1)
            self._computed = tuple(parts)
        part = self._computed[place]
        if place == len(self._sizes) - 1:
            self._input = None
            self._computed = ()
        return part


class _Prepared(nn.Linear):
    """A linear layer that computes its product in another way; its weight may be a placeholder."""

    def __init__(self, layer: nn.Linear, product: Product, weight: Tensor) -> None:
        nn.Module.__init__(self)  # nn.Linear's own draws weights with the global generator
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias
        self._product = product

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name for it
        """Return the layer's product."""
        return self._product(input)


def _groups(module: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Return the layers that ran once, in order, successive ones with one input together."""
    calls: list[tuple[nn.Linear, Tensor]] = []  # inputs are kept so that they outlive the run

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
