"""The output layer of a target as a whole: its product, and what the model does with that.

Some families scale the product (Granite, Cohere), cap it softly (Gemma 2), or add a bias (Phi).
Whoever computes a target's logits from hidden states without the model asks this layer.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from eaglegbv.errors import ModelNotSupported
from eaglegbv.fused_linears import Product, product_of

FINAL = -1
"""Number of the hidden state that an output layer reads, after the final norm (EAGLE-1, EAGLE-2);
other features are inputs of layers (EAGLE-3)."""
_SMALLEST, _LARGEST = -3, 6  # powers of ten: products below every cap, and beyond it
_CLOSE = 1e-4  # relative difference between a scale and cap that are read off, and the model's own


class OutputLayer(nn.Module):
    """Logits of last hidden states h: ``s * (W h + b)``, or ``c * tanh(s * (W h + b) / c)``.

    Attributes:
        weight: W, ``[vocab, hidden]``; shared with the model, and saved with nothing.
        bias: b, ``[vocab]``, or None.
        scale: s.
        softcap: c, or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.scale = scale
        self.softcap = softcap
        self._product: Product | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, run: Callable[[], Tensor] | None = None) -> Self:
        """Return the output layer of ``model``, whose logits of one token ``run`` returns.

        None runs the model as it is. What the model does with the product is read off numbers that
        take the product's place, so no family's name for it need be known.

        Raises:
            ModelNotSupported: The layer does not read the last hidden state, or has no weight, or
                its product is not scaled or capped entry by entry.
        """
        name = type(model).__name__
        layer = model.get_output_embeddings()
        weight = None if layer is None else layer.weight
        if layer is None or not isinstance(weight, Tensor):
            raise ModelNotSupported("model", name, "an output layer with a weight")
        probe = _probe(len(weight)).to(weight.device)
        states: list[Tensor] = []
        read: list[Tensor] = []

        def note_state(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
            states.append(output[0])

        def replace_product(
            _layer: nn.Module, inputs: tuple[Tensor, ...], product: Tensor
        ) -> Tensor:
            read.append(inputs[0])
            return probe.expand_as(product)

        hooks = (
            model.base_model.register_forward_hook(note_state),
            layer.register_forward_hook(replace_product),
        )
        token = torch.zeros((1, 1), dtype=torch.int64, device=weight.device)
        try:
            out = model(input_ids=token, use_cache=False).logits if run is None else run()
            logits = out.flatten(0, -2)[-1].float()
        finally:
            for hook in hooks:
                hook.remove()
        if not read or not states or not torch.equal(read[-1], states[-1]):
            raise ModelNotSupported("model", name, "an output layer that reads the last state")
        scale = _rounded(logits[0] / probe[0])
        limit = _rounded(logits[-1].abs())
        softcap = limit if limit < abs(scale) * float(probe[-1]) / 2 else None
        bias = getattr(layer, "bias", None)
        made = cls(
            weight.detach(), None if bias is None else bias.detach(), scale=scale, softcap=softcap
        )
        if not torch.allclose(made.finished(probe), logits, rtol=_CLOSE, atol=0.0):
            expected = "logits that are its output layer's product, scaled or softly capped"
            raise ModelNotSupported("model", name, expected)
        return made

    @property
    def plain(self) -> bool:
        """Whether its logits are the product alone."""
        return self.scale == 1.0 and self.softcap is None

    def rows(self, token_ids: Tensor) -> "OutputLayer":
        """Return the layer of some tokens' logits alone, ``[tokens]`` int64."""
        bias = None if self.bias is None else self.bias[token_ids]
        return OutputLayer(self.weight[token_ids], bias, scale=self.scale, softcap=self.softcap)

    def prepare_products(self) -> None:
        """Make products of few rows fast; see :mod:`eaglegbv.fused_linears`."""
        self._product = product_of(self.weight, self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., vocab]`` of ``hidden`` ``[..., hidden]``, in its dtype."""
        if self._product is None:
            return self.finished(functional.linear(hidden, self.weight, self.bias))
        return self.finished(self._product(hidden))

    def finished(self, product: Tensor) -> Tensor:
        """Return the logits, given the product ``[..., vocab]``."""
        logits = product if self.scale == 1.0 else product * self.scale
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


def _probe(size: int) -> Tensor:
    """Return ``[size]`` float32 numbers in place of a product, from small to large."""
    numbers = torch.logspace(_SMALLEST, _LARGEST, size, dtype=torch.float32)
    numbers[1:-1:2] *= -1
    return numbers


def _rounded(number: Tensor) -> float:
    """Return a number without what float32's rounding has left of it."""
    return float(f"{float(number):.6g}")
