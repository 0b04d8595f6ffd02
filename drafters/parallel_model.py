"""Heads of block drafters: one forward gives the distributions of all levels of a draft.

A committed token is a *context entry*: keys and values of its projected target features, in every
layer. A *block* is the anchor, which is the last committed token, and mask tokens, all embedded by
the target. Its rows attend to all context entries and to the block, and one row's output says what
is drafted at one level:

    position     0 ... c-1  |   c       c+1     c+2
    row          context    | anchor    mask    mask
    level        (DSpark)   |   1        2       3
    level        (DFlash)   |            1       2

DFlash (arXiv 2602.06036) draws levels independently of each other. DSpark (arXiv 2607.05147) adds a
low-rank term of the token before, so that levels are a Markov chain; DFlash2 scores the transitions
to the likeliest candidates of each level, and its layers mix neighbouring rows. Given the block,
the distribution after any drafted token is exactly known, without another forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

from eaglegbv.devices import runs_kernels
from eaglegbv.drafters.eagle_model import (
    Attend,
    Attention,
    HeadConfig,
    RotaryEmbedding,
    Rotation,
    as_llama,
)
from eaglegbv.errors import DrafterMismatch
from eaglegbv.fused_layers import fuse_layers
from eaglegbv.fused_linears import DenseProduct, Product, prepare, product_of
from eaglegbv.output_layer import OutputLayer


class Sight(NamedTuple):
    """What the rows of a block see in one layer."""

    window: int | None = None  # positions back, itself included; None for all
    causal: bool = False  # of the block: the rows up to itself, or all


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelHeadConfig(HeadConfig):
    """Sizes and settings of a block drafter's head.

    A configuration has Markov terms (``markov_rank``), a selector (``selector_rank``), or neither.
    """

    block_size: int  # most rows of a block
    sights: tuple[Sight, ...]  # by layer, the first one first
    mask_token_id: int  # the token whose embedding mask tokens have
    sample_from_anchor: bool  # whether the anchor's row says level 1
    own_output: bool = False  # whether the head has an output layer, and does not use the target's
    markov_rank: int = 0  # DSpark: rank of the term of the token before
    markov_gate: bool = False  # DSpark: whether the row's output gates that term
    selector_rank: int = 0  # DFlash2: width of the vectors that transitions are scored by
    selector_top_k: int = 0  # DFlash2: candidates of a level
    output_multiplier: float = 1.0  # DFlash2: factor on the target's output layer
    final_logit_softcapping: float | None = None  # DFlash2: cap on its logits
    conv_kernel_size: int = 0  # DFlash2: rows that convolutions mix; 0 for no convolutions
    conv_group_size: int = 0  # DFlash2: entries of a row with a common kernel

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.levels < 1:
            raise DrafterMismatch("block_size", self.block_size, "a block with rows to draft from")
        if not 0 <= self.mask_token_id < self.vocab_size:
            expected = f"a token of the target, below {self.vocab_size}"
            raise DrafterMismatch("mask_token_id", self.mask_token_id, expected)
        if self.conv_kernel_size and self.hidden_size % max(1, self.conv_group_size):
            expected = f"a divisor of the hidden size, {self.hidden_size}"
            raise DrafterMismatch("conv_group_size", self.conv_group_size, expected)
        if self.selector_rank and self.draft_vocab_size < self.vocab_size:
            expected = f"the target's, {self.vocab_size}, beside a candidate selector"
            raise DrafterMismatch("draft_vocab_size", self.draft_vocab_size, expected)

    @property
    def kind(self) -> str:
        """What messages call such a head."""
        return "a block drafter"

    @property
    def num_layers(self) -> int:
        """Layers of the head."""
        return len(self.sights)

    @property
    def causal(self) -> bool | None:
        """Whether all layers see a block causally; None where they differ."""
        kinds = {sight.causal for sight in self.sights}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def facts(self) -> dict[str, str]:
        """What a report says of blocks."""
        links = "independent"
        if self.markov_rank:
            gate = "gated " if self.markov_gate else ""
            links = f"linked by a {gate}term of rank {self.markov_rank} of the token before"
        if self.selector_rank:
            links = f"linked by scores of the {self.selector_top_k} best candidates of each"
        seen = {None: "causal in some layers", True: "causal", False: "seen whole"}[self.causal]
        windows = sorted({str(sight.window) for sight in self.sights if sight.window})
        return {
            "block": f"{self.block_size} rows, {seen}",
            "levels": f"{self.levels}, {links}",
            "windows": ", ".join(windows),
        }

    @property
    def first_row(self) -> int:
        """The row that says level 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def levels(self) -> int:
        """Most levels of a draft."""
        return self.block_size - self.first_row


class GroupedConv(nn.Module):
    """DFlash2's convolutions around a part of a layer: each row mixed with those before it.

    A row has kernels of its own: learnt ones, and a projection of the part's input, which entries
    of a group share.
    """

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self._shape = (2, taps, size // config.conv_group_size)
        self._group = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(
            size, 2 * taps * (size // config.conv_group_size), bias=False
        )

    def forward(self, x: Tensor, rows: int, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Run ``part`` on ``x`` ``[..., blocks * rows, hidden]``, mixed before and after it."""
        projected = self.kernel_projection(x).unflatten(-1, self._shape)
        kernels = self.base_kernel + projected.repeat_interleave(self._group, dim=-1)
        before, after = kernels.unbind(-3)
        out: Tensor = _mixed(part(_mixed(x, before, rows)), after, rows)
        return out


def _mixed(x: Tensor, kernel: Tensor, rows: int) -> Tensor:
    """Return the sum over taps t of each block's row i - t, times ``kernel`` ``[..., taps, h]``."""
    blocks = x.unflatten(-2, (-1, rows))
    weights = kernel.unflatten(-3, (-1, rows)).unbind(-2)
    mixed = weights[0] * blocks
    for tap, weight in enumerate(weights[1:], start=1):
        earlier = functional.pad(blocks, (0, 0, tap, 0))[..., :rows, :]
        mixed = mixed + weight * earlier
    flat: Tensor = mixed.flatten(-3, -2)
    return flat


class BlockLayer(nn.Module):
    """A decoder layer of a block's rows, as Qwen3's but for its attention."""

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = LlamaMLP(as_llama(config))
        self.attention_conv, self.mlp_conv = (
            GroupedConv(config) if config.conv_kernel_size else None for _ in range(2)
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, rows: int) -> Tensor:
        """Run rows ``[..., blocks * rows, hidden]``."""

        attention = partial(self.self_attn, rotation=rotation, attend=attend)
        x = x + _around(attention, self.attention_conv, self.input_layernorm(x), rows)
        return x + _around(self.mlp, self.mlp_conv, self.post_attention_layernorm(x), rows)


def _around(
    part: Callable[[Tensor], Tensor], conv: GroupedConv | None, x: Tensor, rows: int
) -> Tensor:
    out: Tensor = part(x) if conv is None else conv(x, rows, part)
    return out


class Levels(NamedTuple):
    """What one forward says of drafts: of all levels, or of some."""

    hidden: Tensor  # [..., levels, hidden]
    logits: Tensor  # [..., levels, draft_vocab], before what the token before adds


class MarkovHead(nn.Module):
    """DSpark's term of the token before: ``W2 (g * W1[token])``, g = 1 or a gate of the row."""

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        if config.markov_gate:
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, levels: Levels, tokens: Tensor) -> Tensor:
        """See :meth:`ParallelHead.after`."""
        latent = self.markov_w1(tokens)
        if self.gate_proj is not None:
            rows = levels.hidden.expand(*latent.shape[:-1], -1)
            latent = latent * self.gate_proj(torch.cat((rows, latent), dim=-1)).sigmoid()
        term: Tensor = self.markov_w2(latent)
        return levels.logits + term


class CandidateSelector(nn.Module):
    """DFlash2's transitions: ``logits[c] + <A[token] * (P hidden), B[c]>`` for the best c alone."""

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        vocab, rank = config.vocab_size, config.selector_rank
        self._top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, levels: Levels, tokens: Tensor) -> Tensor:
        """See :meth:`ParallelHead.after`; what is no candidate has -inf."""
        best, candidates = levels.logits.topk(self._top_k, dim=-1)
        query = functional.embedding(tokens, self.predecessor_codebook)
        query = query * self.hidden_projection(levels.hidden)
        keys = functional.embedding(candidates, self.successor_codebook)
        scores = best + (keys @ query.unsqueeze(-1)).squeeze(-1)
        nothing = scores.new_full((*scores.shape[:-1], levels.logits.shape[-1]), -torch.inf)
        logits: Tensor = nothing.scatter(-1, candidates.expand_as(scores), scores)
        return logits


class ParallelHead(nn.Module):
    """A head: :meth:`context` of committed tokens, a :meth:`block` for each draft.

    Attributes:
        config: Sizes and settings.
        embedding: ``[vocab, hidden]``, the target's token embedding unless the checkpoint has one.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """

    embedding: Tensor
    draft_to_target: Tensor

    def __init__(
        self,
        config: ParallelHeadConfig,
        embedding: Tensor,
        target_output: OutputLayer | None,
        draft_to_target: Tensor | None = None,
    ) -> None:
        """Build a head with fresh weights over the target's embedding and output layer.

        Neither is saved with the head; a head with an output layer of its own needs none.
        ``draft_to_target`` is None for the full vocabulary.
        """
        super().__init__()
        self.config = config
        if draft_to_target is None:
            draft_to_target = torch.arange(config.draft_vocab_size, device=embedding.device)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)
        self.rotary = RotaryEmbedding(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        layers = [BlockLayer(config) for _ in config.sights]
        self.layers = nn.ModuleList(layers)
        self._attentions = [layer.self_attn for layer in layers]
        self.norm = nn.RMSNorm(size, eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.lm_head: nn.Module = _output(config, target_output)
        self._context: Product | None = None  # of all layers' keys and values

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of committed tokens, ``[..., layers, kv_heads, head_dim]`` each.

        Args:
            features: ``[..., F]``, the target's.
            positions: ``[...]`` int64.
        """
        config, state = self.config, self.hidden_norm(self.fc(features))
        product = self._context
        if product is None:
            product = DenseProduct(*_weights_of_context(self._attentions))
        shape = (len(self._attentions), 2, config.num_kv_heads, config.head_dim)
        keys, values = product(state).unflatten(-1, shape).unbind(-3)
        layers = zip(self._attentions, keys.unbind(-3), strict=True)
        normed = torch.cat([attention.k_norm(key) for attention, key in layers], dim=-2)
        rotated = self.rotary(positions, state.dtype)(normed)
        return rotated.unflatten(-2, keys.shape[-3:-1]), values

    def block(
        self, anchors: Tensor, rows: int, positions: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """Run blocks once, and return ``[..., blocks, levels, hidden]``, what they say of levels.

        Args:
            anchors: ``[..., blocks]`` int64, token ids.
            rows: Rows of a block, the anchor among them.
            positions: ``[..., blocks * rows]`` int64.
            attends: The attention of each layer.
        """
        embedded = functional.embedding(anchors, self.embedding).unsqueeze(-2)
        mask = self.embedding[self.config.mask_token_id]
        masks = mask.expand(*embedded.shape[:-2], rows - 1, -1)
        x = torch.cat((embedded, masks), dim=-2).flatten(-3, -2)
        rotation = self.rotary(positions, x.dtype)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend, rows)
        said: Tensor = self.norm(x).unflatten(-2, (-1, rows))
        return said[..., self.config.first_row :, :]

    def levels(self, hidden: Tensor) -> Levels:
        """Return what :meth:`block` says of levels, with its logits."""
        return Levels(hidden, self.lm_head(hidden))

    def after(self, levels: Levels, tokens: Tensor) -> Tensor:
        """Return ``[..., draft_vocab]``, the logits of what follows ``tokens`` at their levels.

        ``tokens`` ``[...]`` int64 are the target's ids, at level 1 the anchors; the ``levels`` are
        of as many rows, or of sizes that expand to theirs.
        """
        follow = self.markov_head or self.candidate_selector
        if follow is None:
            return levels.logits.expand(*tokens.shape, -1)
        logits: Tensor = follow(levels, tokens)
        return logits

    @torch.no_grad()
    def prepare_products(self) -> None:
        """Make products of a draft's few rows fast; see :mod:`eaglegbv.fused_linears`.

        Call it once, on the head's final device and in its final dtype; do not train it afterwards.
        """
        kind = self.embedding
        zeros = torch.zeros(2, dtype=torch.int64, device=kind.device)
        features = kind.new_zeros((2, self.config.feature_size))
        self._context = product_of(*_weights_of_context(self._attentions))
        attends = [lambda q, *_: torch.zeros_like(q)] * len(self.layers)

        def run_once() -> None:
            self.context(features, zeros)
            hidden = self.block(zeros[:1], 2, zeros, attends)
            self.after(self.levels(hidden[:, 0]), zeros[:1])

        prepare(self, run_once)
        if isinstance(self.lm_head, OutputLayer):
            self.lm_head.prepare_products()
        if runs_kernels(kind.device):
            fuse_layers(self)


def _output(config: ParallelHeadConfig, target: OutputLayer | None) -> nn.Module:
    """Return the layer that makes a head's logits: its own, or the target's."""
    if target is None or config.own_output:
        return nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
    if not config.selector_rank:
        return target
    # DFlash2's configuration says what becomes of the product, whatever the target does with it.
    scale, softcap = config.output_multiplier, config.final_logit_softcapping
    return OutputLayer(target.weight, target.bias, scale=scale, softcap=softcap)


def _weights_of_context(attentions: Sequence[Attention]) -> tuple[Tensor, Tensor | None]:
    """Return the weights of all layers' keys and values as one matrix, and their biases."""
    linears = [part for layer in attentions for part in (layer.k_proj, layer.v_proj)]
    weights: list[Tensor] = [part.weight for part in linears]
    biases: list[Tensor] = [part.bias for part in linears if part.bias is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None
