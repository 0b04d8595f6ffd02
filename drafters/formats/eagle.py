"""The format of the EAGLE repository (SafeAILab/EAGLE), which vLLM reads too.

One flat config.json, whose ``architectures`` are ``LlamaForCausalLM`` for every head. EAGLE-1 and
EAGLE-2 name their layer ``layers.0``, EAGLE-3 ``midlayer``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from eaglegbv.devices import dtype_name
from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig
from eaglegbv.drafters.formats.base import (
    AttentionVariants,
    Contents,
    Format,
    FormatName,
    Sections,
    layer_keys,
)
from eaglegbv.drafters.formats.layers import LAYER_IDS, NUMBERING, Numbering
from eaglegbv.drafters.formats.names import NamedTensors
from eaglegbv.drafters.formats.section import Section


class EagleFormat(Format):
    """See the module."""

    name = FormatName.EAGLE
    engine = "EAGLE and vLLM"
    numbering = Numbering.INPUTS
    eagle3_layer = "midlayer."
    architectures: ClassVar[Mapping[Arch, str]] = {
        Arch.EAGLE1: "LlamaForCausalLM",
        Arch.EAGLE3: "LlamaForCausalLM",
    }
    variants: ClassVar[Mapping[Arch, frozenset[str]]] = {
        Arch.EAGLE1: frozenset({"fc_bias", "qkv_bias"}),
        Arch.EAGLE3: frozenset(),
    }

    def sections(self, stored: Mapping[str, Any]) -> Sections:
        """See :meth:`Format.sections`."""
        flat = Section(stored).merged("eagle_config")
        return Sections(layer=flat, head=flat)

    def attention(self, layer: Section, named: NamedTensors) -> AttentionVariants:
        """See :meth:`Format.attention`; the tensors decide where ``qkv_bias`` is missing."""
        # Configurations copied from a target may say attention_bias, which means the target's.
        said = layer.flag("qkv_bias")
        return AttentionVariants(
            qkv_bias=named.has_attention_bias("qkv") if said is None else said,
            o_bias=named.has_attention_bias("o"),
            qk_norm=named.has_attention_norm,
        )

    def assumptions(self, head: Section, config: EagleHeadConfig) -> list[str]:  # noqa: ARG002
        """See :meth:`Format.assumptions`."""
        if not config.norm_output:
            return []
        return [
            "norm_output is true: the normed state is fed back, as SGLang does; SpecForge, whose "
            "key of that name concerns logits alone, trains with the state before the norm"
        ]

    def config(self, contents: Contents) -> dict[str, Any]:
        """See :meth:`Format.config`."""
        config = contents.config
        stored: dict[str, Any] = {
            "architectures": [self.architectures[config.arch]],
            "model_type": "llama",
            **layer_keys(contents),
            "torch_dtype": dtype_name(contents.dtype),
        }
        if config.arch is Arch.EAGLE1:
            # Left out where true, as in the published files: SGLang and vLLM would take a true
            # one for biases of attention too, and leave those unset.
            bias = {} if config.fc_bias else {"bias": False}
            return stored | bias | {"qkv_bias": config.qkv_bias}
        stored["draft_vocab_size"] = config.draft_vocab_size
        if config.hidden_size != config.target_hidden_size:
            stored["target_hidden_size"] = config.target_hidden_size
        if contents.layers is not None:
            stored["num_aux_hidden_states"] = len(contents.layers)
            stored["eagle_config"] = {
                "use_aux_hidden_state": True,
                LAYER_IDS: [layer - self.numbering.shift for layer in contents.layers],
                NUMBERING: str(self.numbering),
            }
        return stored
