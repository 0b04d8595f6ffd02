"""Sizes and settings of an EAGLE head, and which published head it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from eaglegbv.errors import DrafterMismatch, one_of

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Arch(StrEnum):
    """Which published head."""

    EAGLE1 = "eagle1"
    """EAGLE-1 and EAGLE-2, whose weights are the same."""
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHeadConfig:
    """Sizes and settings of a head.

    Attributes:
        arch: Which published head.
        hidden_size: Width of the head's residual stream.
        target_hidden_size: Width of the target's; EAGLE-1 needs both to be equal.
        intermediate_size: Width of the feed-forward layer.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        vocab_size: Tokens of the target.
        draft_vocab_size: Tokens the head can draft; EAGLE-1 drafts all.
        feature_layers: EAGLE-3: the target layers whose inputs are the features, low to high.
            EAGLE-1: empty, the feature being the hidden state after the final norm.
        rms_norm_eps: Added to the mean square in norms.
        rope_parameters: Rotary embedding settings, as in transformers' configurations.
        fc_bias: Whether ``fc`` has a bias.
        qkv_bias: Whether the query, key and value projections have biases.
        o_bias: Whether the output projection of attention has a bias.
        qk_norm: Whether queries and keys are normed before they are rotated, as in Qwen3.
        norm_before_fc: EAGLE-3: the features are normed together before ``fc`` (``input_norm``).
        fc_norm: EAGLE-3: each layer's features are normed on their own before ``fc``.
        norm_before_residual: EAGLE-3: the residual stream starts at the normed state.
        norm_output: EAGLE-3: the recurrent state is the one the output layer reads, after the last
            norm, and not the one before it.
    """

    arch: Arch
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in _FIXED_ROPE_TYPES:
            raise DrafterMismatch(
                "rope_type", rope_type, one_of(sorted(_FIXED_ROPE_TYPES), rope_type)
            )
        rotated = self.rope_parameters.get("partial_rotary_factor") or 1.0
        if rotated != 1.0:
            raise DrafterMismatch("partial_rotary_factor", rotated, "1.0, the whole head rotated")
        if self.num_heads % self.num_kv_heads:
            raise DrafterMismatch("num_kv_heads", self.num_kv_heads, f"to divide {self.num_heads}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DrafterMismatch(
                "draft_vocab_size", self.draft_vocab_size, f"an integer in [1, {self.vocab_size}]"
            )
        if self.arch is Arch.EAGLE1:
            self._check_eagle1()

    def _check_eagle1(self) -> None:
        if self.hidden_size != self.target_hidden_size:
            raise DrafterMismatch(
                "hidden_size", self.hidden_size, f"the target's, {self.target_hidden_size}"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise DrafterMismatch(
                "draft_vocab_size", self.draft_vocab_size, f"the target's, {self.vocab_size}"
            )
        if self.feature_layers:
            raise DrafterMismatch("feature_layers", self.feature_layers, "none for an EAGLE-1 head")
        for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
            if getattr(self, name):
                raise DrafterMismatch(name, True, "false for an EAGLE-1 head")

    @property
    def feature_size(self) -> int:
        """Width F of the target's features of a token."""
        return max(1, len(self.feature_layers)) * self.target_hidden_size


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the target layers whose inputs EAGLE-3 reads when a checkpoint names none."""
    return 2, num_layers // 2, num_layers - 3
