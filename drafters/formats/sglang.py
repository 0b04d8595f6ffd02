"""The format SGLang reads and SpecForge exports.

Tensors as in the EAGLE repository; ``architectures`` say which head it is, layer ids number
outputs, and EAGLE-3.1's norms (``fc_norm``, ``norm_output``) have keys.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from eaglegbv.drafters.eagle_head import Arch
from eaglegbv.drafters.formats.base import Contents, FormatName
from eaglegbv.drafters.formats.eagle import EagleFormat
from eaglegbv.drafters.formats.layers import Numbering


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
        Arch.EAGLE3: frozenset({"fc_bias", "fc_norm", "norm_output"}),
    }

    def config(self, contents: Contents) -> dict[str, Any]:
        """See :meth:`Format.config`."""
        stored = super().config(contents)
        config = contents.config
        if config.arch is Arch.EAGLE1 and config.qkv_bias:
            stored["architectures"] = ["Qwen2ForCausalLMEagle"]
        if config.arch is Arch.EAGLE3:
            stored |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
        return stored
