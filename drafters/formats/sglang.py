"""The format SGLang reads and SpecForge exports.

Tensors as in the EAGLE repository; ``architectures`` say which head it is, layer ids number
outputs, and norms of features and of the state handed on have keys.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig
from eaglegbv.drafters.formats.base import Contents, FormatName
from eaglegbv.drafters.formats.eagle import EagleFormat
from eaglegbv.drafters.formats.layers import Numbering
from eaglegbv.drafters.formats.names import FC_BIAS


class SGLangFormat(EagleFormat):
    """See the module."""

    name = FormatName.SGLANG
    engine = "SGLang and SpecForge"
    numbering = Numbering.OUTPUTS
    architectures: ClassVar[Mapping[Arch, str]] = {
        Arch.EAGLE1: "LlamaForCausalLMEagle",
        Arch.EAGLE3: "LlamaForCausalLMEagle3",
    }
    variants: ClassVar[Mapping[Arch, frozenset[str]]] = {
        Arch.EAGLE1: frozenset({"fc_bias", "qkv_bias"}),
        Arch.EAGLE3: frozenset({"norm_before_fc", "fc_norm", "norm_output"}),
    }

    def added(self, config: EagleHeadConfig) -> dict[str, Tensor]:
        """Return a bias of zeros where ``fc`` has none, as SGLang would start a random one."""
        if config.arch is Arch.EAGLE3 or config.fc_bias:
            return {}
        return {FC_BIAS: torch.zeros(config.hidden_size)}

    def config(self, contents: Contents) -> dict[str, Any]:
        """See :meth:`Format.config`."""
        stored = super().config(contents)
        config = contents.config
        if config.arch is Arch.EAGLE1 and config.qkv_bias:
            return stored | {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
        if config.arch is Arch.EAGLE3:
            stored |= {
                "norm_before_fc": config.norm_before_fc,
                "fc_norm": config.fc_norm,
                "norm_output": config.norm_output,
            }
        return stored
