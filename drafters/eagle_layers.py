"""The parts of an EAGLE head's decoder layer: attention, feed-forward layer, norms."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from eaglegbv.drafters.eagle_head_config import EagleHeadConfig
from eaglegbv.drafters.rotary import Rotation

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention: ``q [..., heads, head_dim]``, ``k`` and ``v`` ``[..., kv_heads, head_dim]``, ``q`` and
``k`` already rotated, to ``[..., heads, head_dim]``."""


class Attention(nn.Module):
    """Projections around an attention that is passed in."""

    def __init__(self, config: EagleHeadConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(input_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Attend from ``x`` ``[..., input_size]``; return ``[..., hidden]``."""
        q, k, v = self.heads(x)
        out: Tensor = self.o_proj(attend(rotation(q), rotation(k), v).flatten(-2))
        return out

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[..., heads, head_dim]``, not rotated."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        return q, k, v


class _NormedAttention(Attention):
    """Attention whose queries and keys are normed head by head (Qwen3)."""

    def __init__(self, config: EagleHeadConfig, input_size: int) -> None:
        super().__init__(config, input_size)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


def attention_of(config: EagleHeadConfig, input_size: int) -> Attention:
    """Return the attention of a head of ``config`` that reads rows of ``input_size`` numbers."""
    return (_NormedAttention if config.qk_norm else Attention)(config, input_size)


class NormEach(nn.ModuleList):
    """One norm for the features of each layer."""

    def __init__(self, layers: int, width: int, eps: float) -> None:
        super().__init__(nn.RMSNorm(width // layers, eps) for _ in range(layers))

    def forward(self, features: Tensor) -> Tensor:
        """Norm ``features`` ``[..., width]``, those of each layer separately."""
        parts = features.chunk(len(self), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self, parts, strict=True)], dim=-1)


class FeedForward(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        size, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, wide, bias=False)
        self.up_proj = nn.Linear(size, wide, bias=False)
        self.down_proj = nn.Linear(wide, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., hidden]`` of ``x`` ``[..., hidden]``."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
