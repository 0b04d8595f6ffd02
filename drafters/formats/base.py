"""The interface of formats: the layout of config.json, names of tensors, and their limits."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig
from eaglegbv.drafters.formats.layers import Numbering
from eaglegbv.drafters.formats.names import LAYER, NamedTensors
from eaglegbv.drafters.formats.section import Section
from eaglegbv.errors import DrafterMismatch


class FormatName(StrEnum):
    """Whose format it is."""

    EAGLE = "eagle"
    SGLANG = "sglang"
    SPECULATORS = "speculators"


@dataclass(frozen=True, slots=True)
class Sections:
    """The two parts of a config.json.

    Attributes:
        layer: The decoder layer's sizes and rotary settings, in Llama's keys.
        head: The other settings of an EAGLE head.
    """

    layer: Section
    head: Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a config.json is written from.

    Attributes:
        config: The head's configuration.
        layers: Target layers whose inputs an EAGLE-3 head reads; None where the file leaves them
            to the default.
        dtype: Type of the tensors.
        passed_on: Keys that only other engines use.
        verifier: Name or path of the target, where it is known.
        verifier_architectures: Its class names.
    """

    config: EagleHeadConfig
    layers: tuple[int, ...] | None
    dtype: torch.dtype
    passed_on: Mapping[str, Any]
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariants:
    """How the attention of a head departs from Llama's; see :class:`EagleHeadConfig`."""

    qkv_bias: bool
    o_bias: bool
    qk_norm: bool


class Format(ABC):
    """A format.

    Attributes:
        name: Its name.
        engine: Who writes and reads it, for messages.
        numbering: What its layer ids number.
        eagle3_layer: What the names of an EAGLE-3 head's layer begin with.
        carries_embedding: Whether its heads include the token embedding.
        variants: Settings of :class:`EagleHeadConfig` it can express when they are true.
    """

    name: ClassVar[FormatName]
    engine: ClassVar[str]
    numbering: ClassVar[Numbering]
    eagle3_layer: ClassVar[str]
    carries_embedding: ClassVar[bool] = False
    variants: ClassVar[Mapping[Arch, frozenset[str]]]

    @abstractmethod
    def sections(self, stored: Mapping[str, Any]) -> Sections:
        """Find the parts of a config.json."""

    @abstractmethod
    def attention(self, layer: Section, named: NamedTensors) -> AttentionVariants:
        """Read the variants of attention from the layer's section and the tensors' names."""

    @abstractmethod
    def assumptions(self, head: Section, config: EagleHeadConfig) -> list[str]:
        """Say how a head was read where this format's files leave that open.

        Args:
            head: The head's section.
            config: What was read.
        """

    @abstractmethod
    def config(self, contents: Contents) -> dict[str, Any]:
        """Return a config.json."""

    def added(self, config: EagleHeadConfig) -> dict[str, Tensor]:  # noqa: ARG002
        """Return tensors that readers need and that change nothing; reading drops them."""
        return {}

    def stored_name(self, name: str, arch: Arch) -> str:
        """Return what a tensor is called in this format."""
        inner = name.removeprefix(LAYER)
        prefix = "layers.0." if arch is Arch.EAGLE1 else self.eagle3_layer
        return name if inner == name else prefix + inner

    def check_holds(self, config: EagleHeadConfig) -> None:
        """Raise :class:`DrafterMismatch` where the format's readers would lose part of a head."""
        if config.arch not in self.variants:
            raise DrafterMismatch("format", str(self.name), f"a format that holds {config.arch}")
        for name in VARIANTS - self.variants[config.arch]:
            if getattr(config, name):
                expected = f"a format whose readers honour {name}, which this head needs"
                raise DrafterMismatch("format", str(self.name), expected)


VARIANTS = frozenset(
    {
        "fc_bias",
        "qkv_bias",
        "o_bias",
        "qk_norm",
        "norm_before_fc",
        "fc_norm",
        "norm_before_residual",
        "norm_output",
    }
)
"""Settings of a head that not every format can express."""


def layer_keys(contents: Contents) -> dict[str, Any]:
    """Return the decoder layer's keys, the same for all formats."""
    config = contents.config
    rope = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    return {
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        **contents.passed_on,
    }
