"""Joining a module's linear layers: those that read the same tensor become one product.

The first of them to run (of queries, keys and values; of gate and up) computes the product for all,
and the others find their part of it. This changes nothing but rounding. Which layers read the same
tensor is not guessed from names, but observed while the caller runs the module once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from eaglegbv.products import DenseProduct, PackedProduct, Product, QuantisedProduct, product_of
from eaglegbv.quantization import Quantization


def prepare(
    module: nn.Module,
    run: Callable[[], object],
    quantization: Quantization = Quantization.NONE,
    *,
    generated: nn.Module | None = None,
) -> list[PackedProduct]:
    """Join and pack the linear layers of ``module``, on its last device and in its last dtype.

    Weights loaded later are not used. The weights of replaced layers are removed from their modules
    (the products hold them), except those that an embedding shares and those of the last layer.

    Args:
        module: Its linear layers are replaced, under their names.
        run: Runs the module once, on any input, calling each layer as often as a real forward does.
        quantization: Any but ``auto``.
        generated: A part of the module whose products will be generated (see
            :func:`eaglegbv.compiling.generating_products`): its layers are joined but not packed.

    Returns:
        The packed products, in order, without quantised ones.
    """
    groups = _groups(module, run)[::-1]
    places = _places(module)
    # Layers are listed by id, so that nothing keeps the layers themselves alive.
    as_they_are = set() if generated is None else {id(part) for part in generated.modules()}
    looked_up = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    packed: list[PackedProduct] = []
    computed = Computed()
    while groups:  # free each matrix before making the next: models may fit in memory only once
        group = groups.pop()
        ours = id(group[0]) in as_they_are
        product = _product_of_all(group, quantization, generated=ours, index=len(packed))
        if isinstance(product, PackedProduct):
            packed.append(product)
        elif isinstance(product, DenseProduct) and len(group) == 1:
            continue
        sizes = [len(layer.weight) for layer in group]
        parts = [product] if len(group) == 1 else Joint(product, sizes, computed).parts
        kept = group[0].weight in looked_up or not groups
        _replace(group, parts, places, kept=kept)
    return packed


def _product_of_all(
    group: Sequence[nn.Linear], quantization: Quantization, *, generated: bool, index: int
) -> DenseProduct | PackedProduct | QuantisedProduct:
    """Return one product for all layers of a group; see :func:`product_of`."""
    weights = [layer.weight.data for layer in group]
    joint = weights[0] if len(group) == 1 else torch.cat(weights)
    biases = [layer.bias.data for layer in group if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    return product_of(joint, bias, quantization, generated=generated, index=index)


def _replace(
    group: Sequence[nn.Linear],
    parts: Sequence[Product],
    places: dict[nn.Linear, list[tuple[nn.Module, str]]],
    *,
    kept: bool,
) -> None:
    """Replace the layers of a group by layers that compute ``parts``.

    Args:
        group: The layers.
        parts: The product of each layer.
        places: Modules and names of the layers; those of the group are removed.
        kept: Whether their weights stay in their modules.
    """
    for layer, own in zip(group, parts, strict=True):
        weight = layer.weight.data if kept else layer.weight.data.to("meta")
        prepared = _Prepared(layer, own, weight)
        for parent, name in places.pop(layer):
            setattr(parent, name, prepared)


def _places(module: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """Return the modules that hold each linear layer, and its names in them."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                places.setdefault(child, []).append((parent, name))
    return places


@dataclass(slots=True)
class Computed:
    """Result of the most recent joint product, held until its last layer has taken its part.

    All joint products of a module share one object: what a compiled forward changes in an object is
    set again after its graph, which took 4% of a small forward with two objects in every layer.

    Attributes:
        of: The product.
        input: The tensor it read, kept alive so that no other tensor can be mistaken for it.
        parts: The layers' parts of the result.
    """

    of: "Joint | None" = None
    input: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class Joint:
    """Layers that read the same tensor, as one product."""

    def __init__(self, product: Product, sizes: Sequence[int], computed: Computed) -> None:
        """Take the product of all layers, their sizes in it, and where to keep its result."""
        self._sizes = list(sizes)
        self._product = product
        self._computed = computed

    @property
    def parts(self) -> list[Product]:
        """The product of each layer."""
        return [partial(self._of, place=place) for place in range(len(self._sizes))]

    def _of(self, x: Tensor, place: int) -> Tensor:
        """Return a layer's part: the first layer that reads ``x`` computes it, others find it."""
        computed = self._computed
        if computed.of is not self or computed.input is not x:
            computed.of, computed.input = self, x
            # torch.split would take 2% of a small forward with its Python code.
            computed.parts = self._product(x).split_with_sizes(self._sizes, dim=-1)
        found = computed.parts[place]
        if place == len(self._sizes) - 1:
            computed.of, computed.input, computed.parts = None, None, ()
        return found


class _Prepared(nn.Linear):
    """A linear layer that computes its product in another way; its weight may be a placeholder."""

    def __init__(self, layer: nn.Linear, product: Product, weight: Tensor) -> None:
        nn.Module.__init__(self)  # nn.Linear's own draws weights with the global generator
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias
        self._product = product

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name for it
        """Return the layer's product."""
        return self._product(input)


def _groups(module: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Return the linear layers in the order they ran, grouping successive ones with one input.

    A layer that ran twice, or not at all, is left out.
    """
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
