"""How weight matrices lie in memory: for the few rows that a decoding step multiplies."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def lay_out_for_few_rows(module: nn.Module) -> None:
    """Store the weights of linear layers input-major, where that is faster: float32 on a CPU.

    PyTorch's product of a few rows with an output-major matrix (the usual layout) first copies the
    matrix into the other order. Stored so from the start, the 13 rows of a small draft tree take
    0.6 of the time, one row 0.95. Shapes and values stay as they are, only strides change. Weights
    shared with an embedding keep their order, which looking up rows needs.

    Args:
        module: Changed in place; its parameters stay the same objects.
    """
    looked_up = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.weight in looked_up:
            continue
        layer.weight.data = _for_few_rows(layer.weight.data)


class SideBySide:
    """Linear layers that read the same input: one product once they are joined.

    Joined, their weights are parts of one matrix; the layers keep their names, shapes and values.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        """Name the layers; all have biases, or none has."""
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def join(self) -> None:
        """Move the weights into one matrix. To be called on their last device, in their dtype."""
        self._weight = _for_few_rows(torch.cat([layer.weight.data for layer in self._layers]))
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        self._bias = torch.cat([bias.data for bias in biases]) if biases else None
        for layer, weight in zip(self._layers, self._weight.split(self._sizes), strict=True):
            layer.weight.data = weight
        if self._bias is not None:
            for bias, part in zip(biases, self._bias.split(self._sizes), strict=True):
                bias.data = part

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return each layer's output on ``x`` ``[..., in_features]``."""
        if self._weight is None:
            return tuple(layer(x) for layer in self._layers)
        joint: Tensor = functional.linear(x, self._weight, self._bias)
        return torch.split(joint, self._sizes, dim=-1)


def _for_few_rows(weight: Tensor) -> Tensor:
    if weight.device.type == "cpu" and weight.dtype is torch.float32:
        return weight.t().contiguous().t()
    return weight
