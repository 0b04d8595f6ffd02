"""EAGLE heads: one decoder layer that continues a target's features.

One definition serves training and inference: attention is passed in as a function, so the layer
knows neither masks nor caches. Tensor names and the forward follow the published checkpoints of
EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and EAGLE-3 (arXiv 2503.01840).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from eaglegbv.attention import Attend as AttendBatch
from eaglegbv.attention import AttentionCall, PackedBatch, PagedAttention, Segment, pack
from eaglegbv.devices import runs_kernels
from eaglegbv.errors import DrafterMismatch, one_of
from eaglegbv.fused_layers import fuse_layers, rotated_rows
from eaglegbv.fused_linears import prepare
from eaglegbv.native.model import NativeModel
from eaglegbv.output_layer import FINAL, OutputLayer

FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Arch(StrEnum):
    """Which published head."""

    EAGLE1 = "eagle1"  # EAGLE-1 and EAGLE-2, whose weights are the same
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes and settings that all kinds of heads have."""

    hidden_size: int  # width of the head's residual stream
    target_hidden_size: int  # width of the target's; EAGLE-1 needs both to be equal
    intermediate_size: int  # width of the feed-forward layer
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads
    head_dim: int  # width of a head
    vocab_size: int  # tokens of the target
    draft_vocab_size: int  # tokens the head can draft; EAGLE-1 drafts all
    # The target layers whose inputs are the features, low to high. EAGLE-1: empty, the feature
    # being the hidden state after the final norm.
    feature_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6  # added to the mean square in norms
    # Rotary embedding settings, as in transformers' configurations.
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    qkv_bias: bool = False  # whether the query, key and value projections have biases
    o_bias: bool = False  # whether the output projection of attention has a bias
    # Whether queries and keys are normed before they are rotated, as in Qwen3.
    qk_norm: bool = False

    def __post_init__(self) -> None:
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in FIXED_ROPE_TYPES:
            expected = one_of(sorted(FIXED_ROPE_TYPES), rope_type)
            raise DrafterMismatch("rope_type", rope_type, expected)
        rotated = self.rope_parameters.get("partial_rotary_factor") or 1.0
        if rotated != 1.0:
            raise DrafterMismatch("partial_rotary_factor", rotated, "1.0, the whole head rotated")
        if self.num_heads % self.num_kv_heads:
            raise DrafterMismatch("num_kv_heads", self.num_kv_heads, f"to divide {self.num_heads}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            expected = f"an integer in [1, {self.vocab_size}]"
            raise DrafterMismatch("draft_vocab_size", self.draft_vocab_size, expected)

    @property
    def kind(self) -> str:
        """What messages call such a head."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        """Layers of the head, which have keys and values of their own."""
        return 1

    @property
    def features(self) -> tuple[int, ...]:
        """The target's hidden states that are features, as targets number them."""
        return self.feature_layers or (FINAL,)

    @property
    def feature_size(self) -> int:
        """Width F of the target's features of a token."""
        return len(self.features) * self.target_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHeadConfig(HeadConfig):
    """Sizes and settings of an EAGLE head."""

    arch: Arch  # which published head
    fc_bias: bool = False  # whether `fc` has a bias
    # EAGLE-3: the features are normed together before `fc` (`input_norm`).
    norm_before_fc: bool = False
    fc_norm: bool = False  # EAGLE-3: each layer's features are normed on their own before `fc`
    norm_before_residual: bool = False  # EAGLE-3: the residual stream starts at the normed state
    # EAGLE-3: the recurrent state is the one the output layer reads, after the last norm, and not
    # the one before it.
    norm_output: bool = False

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.arch is Arch.EAGLE1:
            self._check_eagle1()

    @property
    def kind(self) -> str:
        """What messages call such a head."""
        return f"{self.arch} head"

    def _check_eagle1(self) -> None:
        for name, value, target in (
            ("hidden_size", self.hidden_size, self.target_hidden_size),
            ("draft_vocab_size", self.draft_vocab_size, self.vocab_size),
        ):
            if value != target:
                raise DrafterMismatch(name, value, f"the target's, {target}")
        if self.feature_layers:
            raise DrafterMismatch("feature_layers", self.feature_layers, "none for an EAGLE-1 head")
        for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
            if getattr(self, name):
                raise DrafterMismatch(name, True, "false for an EAGLE-1 head")


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the target layers whose inputs EAGLE-3 reads when a checkpoint names none."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary angles, for the half-split layout of Llama."""

    cos: Tensor  # [..., 1, head_dim], the cosines, twice
    sin: Tensor  # [..., 1, head_dim], the sines, negative and then positive

    def both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys; on a GPU by one kernel, unless they are trained."""
        if q.requires_grad or not runs_kernels(q.device):
            return self(q), self(k)
        angles = (part.squeeze(-2).flatten(0, -2) for part in (self.cos, self.sin))
        queries, keys = rotated_rows(q.flatten(0, -3), k.flatten(0, -3), *angles, signed=True)
        return queries.view_as(q), keys.view_as(k)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``x`` ``[..., heads, head_dim]``."""
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * self.cos, torch.cat((second, first), dim=-1), self.sin)


def as_llama(config: HeadConfig) -> LlamaConfig:
    """Return a head's layer as transformers configures one."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope_parameters),
    )


class RotaryEmbedding(nn.Module):
    """Rotary angles with transformers' frequencies and scaling."""

    frequencies: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        # A head may be built on the meta device and filled from a file, which has no frequencies.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(as_llama(config))
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
        cos = angles.cos() * self.scaling
        sin = angles.sin() * self.scaling
        return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention: ``q [..., heads, head_dim]``, ``k`` and ``v`` ``[..., kv_heads, head_dim]``, ``q`` and
``k`` already rotated, to ``[..., heads, head_dim]``."""


class Attention(nn.Module):
    """Projections around an attention that is passed in."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(input_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
            for _ in "qk"
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Attend from ``x`` ``[..., input_size]``; return ``[..., hidden]``."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        attended = attend(*rotation.both(self.q_norm(q), self.k_norm(k)), v)
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out


class NormEach(nn.ModuleList):
    """One norm for the features of each layer."""

    def __init__(self, layers: int, width: int, eps: float) -> None:
        super().__init__(nn.RMSNorm(width // layers, eps) for _ in range(layers))

    def forward(self, features: Tensor) -> Tensor:
        """Norm ``features`` ``[..., width]``, those of each layer separately."""
        parts = features.chunk(len(self), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self, parts, strict=True)], dim=-1)


class Head(nn.Module, ABC):
    """What all kinds of heads have.

    Attributes:
        config: Sizes and settings.
        embedding: ``[vocab, hidden]``, the target's token embedding unless the checkpoint has one.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """

    config: HeadConfig
    embedding: Tensor
    draft_to_target: Tensor

    def __init__(
        self, config: HeadConfig, embedding: Tensor, draft_to_target: Tensor | None = None
    ) -> None:
        """Build a head with fresh weights; the embedding is shared, and not saved with the head.

        ``draft_to_target`` is None for the full vocabulary.
        """
        super().__init__()
        self.config = config
        if draft_to_target is None:
            draft_to_target = torch.arange(config.draft_vocab_size, device=embedding.device)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)
        self.rotary = RotaryEmbedding(config)

    @torch.no_grad()
    def prepare_products(self) -> None:
        """Make products of a draft's few rows fast; see :mod:`eaglegbv.fused_linears`.

        Call it once, on the head's final device and in its final dtype; do not train it afterwards.
        """
        prepare(self, self.run_once)
        for module in self.modules():
            if isinstance(module, OutputLayer):
                module.prepare_products()
        if runs_kernels(self.embedding.device):
            fuse_layers(self)

    @abstractmethod
    def run_once(self) -> None:
        """Run all of the head's layers, on any input."""


class EagleHead(Head):
    """A head: :meth:`fuse` the target's features, then one :meth:`forward` per drafted level."""

    config: EagleHeadConfig

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

    def run_once(self) -> None:
        """See :meth:`Head.run_once`."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.embedding.device)
        features = self.embedding.new_zeros((1, self.config.feature_size))
        attended = self(zero, self.fuse(features), zero, lambda q, *_: torch.zeros_like(q))
        self.logits(attended)

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

    def __init__(
        self, config: EagleHeadConfig, embedding: Tensor, target_output: OutputLayer
    ) -> None:
        """Build a head over the target's embedding ``[vocab, hidden]`` and output layer."""
        super().__init__(config, embedding)
        self.target_output = target_output
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layer = nn.ModuleDict(
            {
                "self_attn": Attention(config, size),
                "post_attention_layernorm": nn.RMSNorm(size, config.rms_norm_eps),
                "mlp": LlamaMLP(as_llama(config)),
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
        logits: Tensor = self.target_output(hidden)
        return logits


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
        super().__init__(config, embedding, draft_to_target)
        size = config.hidden_size
        eps = config.rms_norm_eps
        width = config.feature_size
        layers = len(config.feature_layers)
        self.input_norm = nn.RMSNorm(width, eps) if config.norm_before_fc else nn.Identity()
        self.fc_norm = NormEach(layers, width, eps) if config.fc_norm else nn.Identity()
        self.fc = nn.Linear(width, size, bias=config.fc_bias)
        self.layer = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(size, eps),
                "hidden_norm": nn.RMSNorm(size, eps),
                "self_attn": Attention(config, 2 * size),
                "post_attention_layernorm": nn.RMSNorm(size, eps),
                "mlp": LlamaMLP(as_llama(config)),
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


class Drafted(NamedTuple):
    """Result of rows that continue the head's own output."""

    hidden: Tensor  # [rows, hidden]
    logits: Tensor  # [rows, draft_vocab], of the token after next


class HeadForward:
    """Forwards of a head over a one-layer pool.

    Attributes:
        attention: Paged attention over the pool.
    """

    def __init__(
        self, head: EagleHead, attention: PagedAttention, native: NativeModel | None = None
    ) -> None:
        """Take a head on its final device and in its final dtype, and make its products ready.

        ``native`` is the same head in the native library, which then runs it.
        """
        self._native = native
        if native is None:
            head.prepare_products()
        self._head = head
        self.attention = attention
        self._call = AttentionCall(0, head.config.head_dim**-0.5)  # a head has one layer

    @property
    def exact(self) -> bool:
        """Whether a row's numbers are the same, to the last bit, whatever runs beside it."""
        return self._native is not None

    def step(self, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
        """Run rows on ``hidden`` ``[rows, hidden]``; return the next hidden states."""
        if self._native is not None:
            return self._native.level(self.attention.pool, segments, hidden)[0]
        batch = pack(segments, self._head.embedding.device)
        rotation = self._head.rotary(batch.positions, self._head.embedding.dtype)
        attend = partial(self.attention.attend, self._call, batch=batch)
        return self._run(batch.token_ids, rotation, hidden, attend)

    def read(self, segments: Sequence[Segment], features: Tensor) -> Tensor:
        """Run rows on the target's ``features`` ``[rows, F]``; return the next hidden states."""
        if self._native is not None:
            pool = self.attention.pool
            return self._native.level(pool, segments, features, reads_features=True)[0]
        return self.step(segments, self._head.fuse(features))

    def read_batch(self, batch: PackedBatch, features: Tensor, attend: AttendBatch) -> Tensor:
        """Run the rows of a batch on ``features`` ``[rows, F]`` with the caller's attention."""
        rotation = self._head.rotary(batch.positions, features.dtype)
        fused = self._head.fuse(features)
        return self._run(batch.token_ids, rotation, fused, partial(attend, self._call))

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """Run rows on the head's own output ``[rows, hidden]``, with logits."""
        if self._native is not None:
            pool = self.attention.pool
            following, logits = self._native.level(pool, segments, hidden, with_logits=True)
            assert logits is not None
            return Drafted(following, logits)
        hidden = self.step(segments, hidden)
        return Drafted(hidden, self._head.logits(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[rows, draft_vocab]`` logits of ``hidden`` ``[rows, hidden]``."""
        if self._native is not None:
            return self._native.logits(hidden)
        return self._head.logits(hidden)

    def level(
        self, token_ids: Tensor, rotation: Rotation, hidden: Tensor, attend: Attend
    ) -> Drafted:
        """Run rows as :meth:`go_on` does, with the caller's attention; all are ``[rows, ...]``."""
        hidden = self._run(token_ids, rotation, hidden, attend)
        return Drafted(hidden, self._head.logits(hidden))

    def _run(self, token_ids: Tensor, rotation: Rotation, hidden: Tensor, attend: Attend) -> Tensor:
        embedded = functional.embedding(token_ids, self._head.embedding)
        return self._head.step(embedded, hidden, rotation, attend)
