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

from eaglegbv.drafters.eagle_model import Attend, Attention, Head, HeadConfig, Rotation, as_llama
from eaglegbv.errors import DrafterMismatch
from eaglegbv.fused_linears import DenseProduct, Product, product_of
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
        group = self.conv_group_size
        if self.conv_kernel_size and (group < 1 or self.hidden_size % group):
            expected = f"a divisor of the hidden size, {self.hidden_size}"
            raise DrafterMismatch("conv_group_size", group, expected)
        if self.selector_rank and not 1 <= self.selector_top_k <= self.vocab_size:
            expected = f"from 1 to {self.vocab_size}, the candidates of a level"
            raise DrafterMismatch("selector_top_k", self.selector_top_k, expected)
        if self.selector_rank and self.markov_rank:
            expected = "0 beside a candidate selector"
            raise DrafterMismatch("markov_rank", self.markov_rank, expected)
        if self.selector_rank and self.draft_vocab_size < self.vocab_size:
            expected = f"the target's, {self.vocab_size}, beside a candidate selector"
            raise DrafterMismatch("draft_vocab_size", self.draft_vocab_size, expected)

    @property
    def kind(self) -> str:
        """What messages call such a head."""
        return "block drafter"

    @property
    def num_layers(self) -> int:
        """Layers of the head."""
        return len(self.sights)

    @property
    def first_row(self) -> int:
        """The row that says level 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def levels(self) -> int:
        """Most levels of a draft."""
        return self.block_size - self.first_row

    @property
    def facts(self) -> dict[str, str]:
        """What a report says of blocks."""
        links = "independent"
        if self.markov_rank:
            gate = "gated " if self.markov_gate else ""
            links = f"linked by a {gate}term of rank {self.markov_rank} of the token before"
        if self.selector_rank:
            links = f"linked by scores of the {self.selector_top_k} best candidates of each"
        causal = [str(n) for n, sight in enumerate(self.sights) if sight.causal]
        windows = {str(sight.window) for sight in self.sights if sight.window}
        return {
            "block": f"{self.block_size} rows, causal in layers: {', '.join(causal) or 'none'}",
            "levels": f"{self.levels}, {links}",
            "windows": ", ".join(sorted(windows)),
        }


class Unmixed(nn.Module):
    """What takes the place of convolutions where there are none."""

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Run ``part`` on ``x``."""
        return part(x)


class GroupedConv(nn.Module):
    """DFlash2's convolutions around a part of a layer: each row mixed with those before it.

    A row has kernels of its own: learnt ones, and a projection of the part's input, which entries
    of a group share.
    """

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        taps = config.conv_kernel_size
        self._shape = (2, taps, size // config.conv_group_size)
        self._group = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * self._shape[2], bias=False)

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Run ``part`` on ``x`` ``[..., rows, hidden]``, mixed before and after it."""
        projected = self.kernel_projection(x).unflatten(-1, self._shape)
        kernels = self.base_kernel + projected.repeat_interleave(self._group, dim=-1)
        before, after = kernels.unbind(-3)
        return _mixed(part(_mixed(x, before)), after)


def _mixed(x: Tensor, kernel: Tensor) -> Tensor:
    """Return the sum over taps t of row i - t times ``kernel`` ``[..., rows, taps, hidden]``."""
    taps = kernel.shape[-2]
    rows = functional.pad(x, (0, 0, taps - 1, 0)).unfold(-2, taps, 1)
    return (rows.flip(-1) * kernel.mT).sum(dim=-1)


class BlockLayer(nn.Module):
    """A decoder layer of a block's rows, as Qwen3's but for its attention."""

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = LlamaMLP(as_llama(config))
        self.attention_conv, self.mlp_conv = (
            GroupedConv(config) if config.conv_kernel_size else Unmixed() for _ in range(2)
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Run the rows of blocks ``[..., rows, hidden]``."""
        attention = partial(self.self_attn, rotation=rotation, attend=attend)
        x = x + self.attention_conv(self.input_layernorm(x), attention)
        result: Tensor = x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return result


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
        shape = (config.vocab_size, config.selector_rank)
        self._top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, levels: Levels, tokens: Tensor) -> Tensor:
        """See :meth:`ParallelHead.after`; what is no candidate has -inf."""
        best, candidates = levels.logits.topk(self._top_k, dim=-1)
        query = functional.embedding(tokens, self.predecessor_codebook)
        query = query * self.hidden_projection(levels.hidden)
        keys = functional.embedding(candidates, self.successor_codebook)
        scores = best + (keys @ query.unsqueeze(-1)).squeeze(-1)
        nothing = scores.new_full((*tokens.shape, levels.logits.shape[-1]), -torch.inf)
        logits: Tensor = nothing.scatter(-1, candidates.expand_as(scores), scores)
        return logits


class ParallelHead(Head):
    """A head: :meth:`context` of committed tokens, a :meth:`block` for each draft."""

    config: ParallelHeadConfig

    def __init__(
        self,
        config: ParallelHeadConfig,
        embedding: Tensor,
        target_output: OutputLayer | None,
        draft_to_target: Tensor | None = None,
    ) -> None:
        """Build a head with fresh weights over the target's embedding and output layer.

        Neither is saved with the head; a head with an output layer of its own needs none.
        """
        super().__init__(config, embedding, draft_to_target)
        size = config.hidden_size
        eps = config.rms_norm_eps
        layers = [BlockLayer(config) for _ in config.sights]
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(size, eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.lm_head = _output(config, target_output)
        self._attentions = [layer.self_attn for layer in layers]
        self._context: Product | None = None  # of all layers' keys and values

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of committed tokens, ``[..., layers, kv_heads, head_dim]`` each.

        Args:
            features: ``[..., F]``, the target's.
            positions: ``[...]`` int64.
        """
        config = self.config
        state = self.hidden_norm(self.fc(features))
        product = self._context or DenseProduct(*self._context_weights())
        shape = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        keys, values = product(state).unflatten(-1, shape).unbind(-3)
        layers = zip(self._attentions, keys.unbind(-3), strict=True)
        normed = torch.cat([attention.k_norm(key) for attention, key in layers], dim=-2)
        rotation = self.rotary(positions, state.dtype)
        return rotation(normed).view_as(keys), values

    def _context_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the weights of all layers' keys and values as one matrix, and their biases."""
        linears = [part for layer in self._attentions for part in (layer.k_proj, layer.v_proj)]
        weights: list[Tensor] = [part.weight for part in linears]
        biases: list[Tensor] = [part.bias for part in linears if part.bias is not None]
        return torch.cat(weights), torch.cat(biases) if biases else None

    def block(self, token_ids: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Run blocks once, and return ``[..., levels, hidden]``, what they say of levels.

        Args:
            token_ids: ``[..., rows]`` int64, of each block the anchor and then mask tokens.
            positions: ``[..., rows]`` int64.
            attends: The attention of each layer.
        """
        x = functional.embedding(token_ids, self.embedding)
        rotation = self.rotary(positions, x.dtype)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        said: Tensor = self.norm(x)
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

    def prepare_products(self) -> None:
        """See :meth:`Head.prepare_products`."""
        with torch.no_grad():
            self._context = product_of(*self._context_weights())
        super().prepare_products()

    def run_once(self) -> None:
        """See :meth:`Head.run_once`."""
        zeros = torch.zeros((1, 2), dtype=torch.int64, device=self.embedding.device)
        self.context(self.embedding.new_zeros((1, 2, self.config.feature_size)), zeros)
        hidden = self.block(zeros, zeros, [lambda q, *_: torch.zeros_like(q)] * len(self.layers))
        self.after(self.levels(hidden[:, 0]), zeros[:, 0])


def _output(config: ParallelHeadConfig, target: OutputLayer | None) -> nn.Module:
    """Return the layer that makes a head's logits: its own, or the target's."""
    if config.own_output:
        return nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
    assert target is not None  # as callers read it then
    if not config.selector_rank:
        return target
    # DFlash2's configuration says what becomes of the product, whatever the target does with it.
    scale = config.output_multiplier
    softcap = config.final_logit_softcapping
    return OutputLayer(target.weight, target.bias, scale=scale, softcap=softcap)
