"""Rotary position embeddings of an EAGLE head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eaglegbv.drafters.eagle_head_config import EagleHeadConfig


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary angles, for the half-split layout of Llama.

    It has no equality, and so no hash of its fields, because PyTorch before 2.13 hashes what is
    called while it traces.

    Attributes:
        cos: ``[..., 1, head_dim]``, the cosines, twice.
        sin: ``[..., 1, head_dim]``, the sines, negative and then positive.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``x`` ``[..., heads, head_dim]``."""
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * self.cos, torch.cat((second, first), dim=-1), self.sin)

    def at(self, positions: Tensor) -> "Rotation":
        """Return the rows of these angles that ``positions`` ``[rows]`` int64 select."""
        return Rotation(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


class RotaryEmbedding(nn.Module):
    """Rotary angles with transformers' frequencies and scaling."""

    frequencies: Tensor

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            rope_parameters=dict(config.rope_parameters),
        )
        # A head may be built on the meta device and filled from a file, which has no frequencies.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(llama)
        self.register_buffer("frequencies", rotary.inv_freq, persistent=False)
        self.scaling = float(rotary.attention_scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Frequencies rounded to half precision would misplace far positions.
        self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the angles of ``positions`` ``[...]`` int64, computed in float32, in ``dtype``."""
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(-2)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
