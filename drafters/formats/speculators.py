"""The format of speculators (vllm-project/speculators), class ``Eagle3Speculator``.

The decoder layer's settings lie in ``transformer_layer_config``, a configuration of Llama, or of
Qwen3 for a head that norms queries and keys; the head's own lie beside it. Tensors call the layer
``layers.0`` and include the embedding. There is no EAGLE-1.
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
from eaglegbv.errors import DrafterMismatch

LAYER_SECTION = "transformer_layer_config"


class SpeculatorsFormat(Format):
    """See the module."""

    name = FormatName.SPECULATORS
    engine = "speculators and vLLM"
    numbering = Numbering.INPUTS
    eagle3_layer = "layers.0."
    carries_embedding = True
    variants: ClassVar[Mapping[Arch, frozenset[str]]] = {
        Arch.EAGLE3: frozenset(
            {
                "qkv_bias",
                "o_bias",
                "qk_norm",
                "norm_before_fc",
                "fc_norm",
                "norm_before_residual",
                "norm_output",
            }
        )
    }

    def sections(self, stored: Mapping[str, Any]) -> Sections:
        """See :meth:`Format.sections`."""
        whole = Section(stored)
        return Sections(layer=whole.inner(LAYER_SECTION), head=whole)

    def attention(self, layer: Section, named: NamedTensors) -> AttentionVariants:
        """See :meth:`Format.attention`; norms belong to a Qwen3 layer, biases to any."""
        biases = bool(layer.flag("attention_bias"))
        model_type = layer.text("model_type")
        if model_type not in (None, "llama", "qwen3"):
            # Qwen3-Next, say, counts the weights of its norms from zero.
            raise layer.mismatch("model_type", "'llama' or 'qwen3'")
        qk_norm = named.has_attention_norm if model_type is None else model_type == "qwen3"
        return AttentionVariants(qkv_bias=biases, o_bias=biases, qk_norm=qk_norm)

    def assumptions(self, head: Section, config: EagleHeadConfig) -> list[str]:
        """See :meth:`Format.assumptions`."""
        if config.arch is Arch.EAGLE1 or head.flag("norm_before_residual") is not None:
            return []
        return [
            "norm_before_residual is false, the default of speculators' configurations; "
            "config.json does not say, and vLLM would take it as true"
        ]

    def check_holds(self, config: EagleHeadConfig) -> None:
        """See :meth:`Format.check_holds`; some variants go together, some exclude each other."""
        super().check_holds(config)
        if config.qkv_bias != config.o_bias:
            expected = "a format that tells biases of q, k, v from one of o, as this head needs"
            raise DrafterMismatch("format", str(self.name), expected)
        if config.norm_before_fc and config.fc_norm:
            expected = "a format that has both norm_before_fc and fc_norm, as this head needs"
            raise DrafterMismatch("format", str(self.name), expected)

    def config(self, contents: Contents) -> dict[str, Any]:
        """See :meth:`Format.config`."""
        config = contents.config
        layer = {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **layer_keys(contents),
            "attention_bias": config.qkv_bias,
            "mlp_bias": False,
            "torch_dtype": dtype_name(contents.dtype),
        }
        ids: list[int] | None = None
        if contents.layers is not None:
            ids = [layer_id - self.numbering.shift for layer_id in contents.layers]
            # The settings beside this section have a schema; a Llama configuration takes any key.
            layer[NUMBERING] = str(self.numbering)
        narrow = config.hidden_size != config.target_hidden_size
        return {
            "architectures": ["Eagle3Speculator"],
            "model_type": "speculators",
            "speculators_model_type": "eagle3",
            "torch_dtype": dtype_name(contents.dtype),
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "embed_requires_grad": False,
            "target_hidden_size": config.target_hidden_size if narrow else None,
            LAYER_IDS: ids,
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {
                    "name_or_path": contents.verifier,
                    "architectures": list(contents.verifier_architectures),
                },
            },
            LAYER_SECTION: layer,
        }
