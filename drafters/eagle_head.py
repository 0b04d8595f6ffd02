"""EAGLE heads: one decoder layer that continues a target's features.

One definition serves training and inference: attention is passed in as a function, so the layer
knows neither masks nor caches. Tensor names and the forward follow the published checkpoints of
EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and EAGLE-3 (arXiv 2503.01840).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from eaglegbv.drafters.eagle_head_config import EagleHeadConfig
from eaglegbv.drafters.eagle_layers import Attend, FeedForward, NormEach, attention_of
from eaglegbv.drafters.rotary import RotaryEmbedding, Rotation
from eaglegbv.joining import prepare
from eaglegbv.products import PackedProduct, Product, product_of
from eaglegbv.quantization import Quantization


class EagleHead(nn.Module, ABC):
    """A head: :meth:`fuse` the target's features, then one :meth:`forward` per drafted level.

    Attributes:
        config: Sizes and settings.
        embedding: ``[vocab, hidden]``, the target's token embedding unless the checkpoint has one.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """

    embedding: Tensor
    draft_to_target: Tensor

    def __init__(
        self, config: EagleHeadConfig, embedding: Tensor, draft_to_target: Tensor | None = None
    ) -> None:
        """Build a head with fresh weights.

        Args:
            config: Sizes and settings.
            embedding: ``[vocab, hidden]``; shared, not copied, and not saved with the head.
            draft_to_target: ``[draft_vocab]`` int64; None for the full vocabulary.
        """
        super().__init__()
        self.config = config
        if draft_to_target is None:
            draft_to_target = torch.arange(config.draft_vocab_size, device=embedding.device)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)
        self.rotary = RotaryEmbedding(config)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Run the layer once and return the next hidden state, ``[..., hidden]``.

        Args:
            token_ids: ``[...]`` int64, the token *after* the position whose feature is ``hidden``.
            hidden: ``[..., hidden]``, a fused feature or this function's earlier result.
            positions: ``[...]`` int64, rotary positions.
            attend: Attention over whatever the caller keeps.
        """
        embedded = functional.embedding(token_ids, self.embedding)
        return self.step(embedded, hidden, self.rotary(positions, hidden.dtype), attend)

    @torch.no_grad()
    def prepare_products(
        self, quantization: Quantization, *, generated: bool = False
    ) -> list[PackedProduct]:
        """Make products of a draft's few rows fast; see :mod:`eaglegbv.joining`.

        Call it once, on the head's final device and in its final dtype; do not train it afterwards.

        Args:
            quantization: Quantization of the weights; not ``auto``.
            generated: Whether the products will be generated instead of packed.

        Returns:
            The packed products, which a compiled head calls back by number.
        """
        return prepare(self, self._run_once, quantization, generated=self if generated else None)

    def _run_once(self) -> None:
        """Run every layer once, on one row."""
        config, kind = self.config, self.embedding
        group = config.num_heads // config.num_kv_heads
        zero = torch.zeros(1, dtype=torch.int64, device=kind.device)
        features = kind.new_zeros((1, config.feature_size))

        def attend(_q: Tensor, _k: Tensor, v: Tensor) -> Tensor:
            return v.repeat_interleave(group, dim=-2)

        self.logits(self(zero, self.fuse(features), zero, attend))

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features ``[..., F]`` into a first hidden state, ``[..., hidden]``."""

    @abstractmethod
    def step(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Run the layer on embedded tokens ``[..., hidden]``; see :meth:`forward`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[..., draft_vocab]`` logits of the token after next."""


class Eagle1Head(EagleHead):
    """EAGLE-1 and EAGLE-2: the recurrent state is in the space the target's output layer reads.

    ``x = fc(cat(embedding, hidden)); x += attention(x); x += mlp(norm(x))``, without a norm before
    attention; logits are the target's own output layer on ``x``.
    """

    target_lm_head: Tensor

    def __init__(self, config: EagleHeadConfig, embedding: Tensor, target_lm_head: Tensor) -> None:
        """Build a head over the target's embedding and output layer, both ``[vocab, hidden]``."""
        super().__init__(config, embedding)
        self.register_buffer("target_lm_head", target_lm_head, persistent=False)
        self._output: Product | None = None
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layer = nn.ModuleDict(
            {
                "self_attn": attention_of(config, size),
                "post_attention_layernorm": nn.RMSNorm(size, config.rms_norm_eps),
                "mlp": FeedForward(config),
            }
        )

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's final hidden state as it is."""
        return features

    def step(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """See :class:`Eagle1Head`."""
        # Under autocast the residual stream keeps the type of the state it continues.
        x = self.fc(torch.cat((embedded, hidden), dim=-1)).to(hidden.dtype)
        x = x + self.layer["self_attn"](x, rotation, attend)
        result: Tensor = x + self.layer["mlp"](self.layer["post_attention_layernorm"](x))
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's output layer on ``hidden``."""
        if self._output is not None:
            return self._output(hidden)
        return functional.linear(hidden, self.target_lm_head)

    def prepare_products(
        self, quantization: Quantization, *, generated: bool = False
    ) -> list[PackedProduct]:
        """See :meth:`EagleHead.prepare_products`."""
        packed = super().prepare_products(quantization, generated=generated)
        weight = self.target_lm_head
        output = product_of(weight, None, quantization, generated=generated, index=len(packed))
        self._output = output
        return [*packed, output] if isinstance(output, PackedProduct) else packed


class Eagle3Head(EagleHead):
    """EAGLE-3: features of three target layers, and its own output layer.

    ``x = hidden + attention(cat(norm(embedding), norm(hidden))); x += mlp(norm(x))``; logits are
    ``lm_head(norm(x))``, the recurrent state is ``x`` before that norm. Variants: features normed
    before ``fc``, a residual that starts at ``norm(hidden)``, ``norm(x)`` as recurrent state; see
    :class:`EagleHeadConfig`.
    """

    def __init__(
        self, config: EagleHeadConfig, embedding: Tensor, draft_to_target: Tensor | None = None
    ) -> None:
        """See :class:`EagleHead`."""
        super().__init__(config, embedding, draft_to_target)
        size, eps = config.hidden_size, config.rms_norm_eps
        width, layers = config.feature_size, len(config.feature_layers)
        self.input_norm = nn.RMSNorm(width, eps) if config.norm_before_fc else nn.Identity()
        self.fc_norm = NormEach(layers, width, eps) if config.fc_norm else nn.Identity()
        self.fc = nn.Linear(width, size, bias=config.fc_bias)
        self.layer = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(size, eps),
                "hidden_norm": nn.RMSNorm(size, eps),
                "self_attn": attention_of(config, 2 * size),
                "post_attention_layernorm": nn.RMSNorm(size, eps),
                "mlp": FeedForward(config),
            }
        )
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self._norm_before_residual = config.norm_before_residual
        self._norm_output = config.norm_output

    def fuse(self, features: Tensor) -> Tensor:
        """Project the features of three layers, low, middle and high, onto the hidden size."""
        fused: Tensor = self.fc(self.fc_norm(self.input_norm(features)))
        return fused

    def step(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """See :class:`Eagle3Head`."""
        layer = self.layer
        normed = layer["hidden_norm"](hidden)
        both = torch.cat((layer["input_layernorm"](embedded), normed), dim=-1)
        residual = normed if self._norm_before_residual else hidden
        x = residual + layer["self_attn"](both, rotation, attend)
        result: Tensor = x + layer["mlp"](layer["post_attention_layernorm"](x))
        return self.norm(result) if self._norm_output else result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's own output layer on the normed ``hidden``."""
        normed = hidden if self._norm_output else self.norm(hidden)
        logits: Tensor = self.lm_head(normed)
        return logits
