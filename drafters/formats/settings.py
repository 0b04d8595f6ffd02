"""A head's configuration from a config.json and the names of the tensors beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig
from eaglegbv.drafters.formats.base import Format, Sections
from eaglegbv.drafters.formats.layers import LAYER_IDS, NUMBERING, Numbering, StoredLayers
from eaglegbv.drafters.formats.names import FC_BIAS, NamedTensors
from eaglegbv.drafters.formats.remark import Remark, RemarkKind
from eaglegbv.drafters.formats.section import Section
from eaglegbv.errors import DrafterMismatch, one_of

_LLAMA_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)
_PASSED_ON = (
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)
_DEFAULT_FEATURES = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config.json says of a head.

    Attributes:
        config: The head's configuration. The layer numbers of an EAGLE-3 head are placeholders of
            the right count; the true ones follow from :attr:`layers` and the target.
        layers: EAGLE-3: the layer ids of the file.
        passed_on: Keys that only other engines use.
        verifier: Name of the target, where the file names one.
        remarks: What was assumed, and what other engines would do otherwise.
    """

    config: EagleHeadConfig
    layers: StoredLayers | None
    passed_on: Mapping[str, Any]
    verifier: str | None
    remarks: tuple[Remark, ...]


def read_settings(
    stored: Mapping[str, Any], arch: Arch, kind: Format, named: NamedTensors
) -> Settings:
    """Read a config.json.

    Raises:
        DrafterMismatch: A key is missing, of a wrong type, or asks for something unsupported; the
            message names it.
    """
    sections = kind.sections(stored)
    _check_supported(sections)
    llama = _llama(sections.layer)
    layers = None if arch is Arch.EAGLE1 else _stored_layers(sections, kind)
    attention = kind.attention(sections.layer, named)
    norms = _NormVariants() if arch is Arch.EAGLE1 else _norm_variants(sections.head, named)
    vocab = sections.layer.integer("vocab_size")
    hidden = sections.layer.integer("hidden_size")
    config = EagleHeadConfig(
        arch=arch,
        hidden_size=hidden,
        target_hidden_size=sections.head.optional_integer("target_hidden_size") or hidden,
        intermediate_size=sections.layer.integer("intermediate_size"),
        num_heads=sections.layer.integer("num_attention_heads"),
        num_kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
        head_dim=llama.head_dim or hidden // llama.num_attention_heads,
        vocab_size=vocab,
        draft_vocab_size=_draft_vocab(sections, arch, vocab),
        feature_layers=() if layers is None else _stand_in(sections, layers),
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=_rope(llama),
        fc_bias=_fc_bias(sections, arch, named),
        qkv_bias=attention.qkv_bias,
        o_bias=attention.o_bias,
        qk_norm=attention.qk_norm,
        norm_before_fc=norms.norm_before_fc,
        fc_norm=norms.fc_norm,
        norm_before_residual=norms.norm_before_residual,
        norm_output=norms.norm_output,
    )
    assumed = [Remark(RemarkKind.ASSUMED, t) for t in kind.assumptions(sections.head, config)]
    remarks = (*norms.remarks, *assumed, *_disagreements(sections, config, named))
    passed_on = sections.layer.picked(_PASSED_ON)
    verifier = sections.head.inner("speculators_config").inner("verifier").text("name_or_path")
    return Settings(config, layers, passed_on, verifier, remarks)


def _check_supported(sections: Sections) -> None:
    layer, head = sections.layer, sections.head
    if layer.text("hidden_act") not in (None, "silu"):
        raise layer.mismatch("hidden_act", "'silu'")
    if layer.flag("mlp_bias"):
        raise layer.mismatch("mlp_bias", "false")
    if any(kind != "full_attention" for kind in layer.texts("layer_types")):
        raise layer.mismatch("layer_types", "full_attention alone")
    if head.flag("use_aux_hidden_state") is False:
        raise head.mismatch("use_aux_hidden_state", "true")


def _llama(layer: Section) -> LlamaConfig:
    """Let transformers read the keys of a decoder layer and fill in its defaults."""
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        layer.integer(key)
    for key in ("num_key_value_heads", "head_dim"):
        layer.optional_integer(key)
    try:
        return LlamaConfig(**layer.picked(_LLAMA_KEYS))
    except (KeyError, TypeError, ValueError) as error:
        keys = layer.picked(("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps"))
        expected = f"settings of a Llama layer ({error})"
        raise DrafterMismatch("config.json", keys, expected) from error


def _rope(llama: LlamaConfig) -> dict[str, Any]:
    """Return rotary settings in transformers' keys, without an older spelling beside the new."""
    settings = dict(llama.rope_parameters or {})
    settings.pop("type", None)
    return settings


def _draft_vocab(sections: Sections, arch: Arch, vocab: int) -> int:
    if arch is Arch.EAGLE1:
        return vocab
    return sections.head.optional_integer("draft_vocab_size") or vocab


def _stored_layers(sections: Sections, kind: Format) -> StoredLayers:
    stated = sections.layer.text(NUMBERING)
    if stated is not None and stated not in set(Numbering):
        raise sections.layer.mismatch(NUMBERING, one_of(Numbering))
    return StoredLayers(
        ids=sections.head.integers(LAYER_IDS),
        stated=None if stated is None else Numbering(stated),
        fallback=kind.numbering,
        engine=kind.engine,
    )


def _stand_in(sections: Sections, layers: StoredLayers) -> tuple[int, ...]:
    said = sections.head.optional_integer("num_aux_hidden_states")
    number = len(layers.ids) if layers.ids is not None else said or _DEFAULT_FEATURES
    if said not in (None, number):
        raise sections.head.mismatch("num_aux_hidden_states", f"{number}, as {LAYER_IDS} has")
    return tuple(range(1, number + 1))


def _fc_bias(sections: Sections, arch: Arch, named: NamedTensors) -> bool:
    said = sections.head.flag("bias")
    if said is None:
        # EAGLE-1 has one unless its configuration says no.
        return arch is Arch.EAGLE1 or FC_BIAS in named.tensors
    return said


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormVariants:
    """Norms of an EAGLE-3 head beyond the published one's; an EAGLE-1 head has none.

    Attributes:
        norm_before_fc: See :class:`EagleHeadConfig`, as for the next three.
        fc_norm: See there.
        norm_before_residual: See there.
        norm_output: See there.
        remarks: What was assumed.
    """

    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    remarks: tuple[Remark, ...] = ()


def _norm_variants(head: Section, named: NamedTensors) -> _NormVariants:
    """Read the norms of an EAGLE-3 head; tensors decide where config.json does not say."""
    fc_norm = head.flag("fc_norm")
    if fc_norm is None:
        fc_norm = head.flag("use_aux_norm")
    found = {
        "norm_before_fc": (head.flag("norm_before_fc"), "input_norm.weight" in named.tensors),
        "fc_norm": (fc_norm, any(name.startswith("fc_norm.") for name in named.tensors)),
    }
    texts = [
        f"{key} is true, as its tensors are there; config.json does not say"
        for key, (said, there) in found.items()
        if said is None and there
    ]
    return _NormVariants(
        **{key: there if said is None else said for key, (said, there) in found.items()},
        norm_before_residual=bool(head.flag("norm_before_residual")),
        norm_output=bool(head.flag("norm_output")),
        remarks=tuple(Remark(RemarkKind.ASSUMED, text) for text in texts),
    )


def _disagreements(
    sections: Sections, config: EagleHeadConfig, named: NamedTensors
) -> list[Remark]:
    """Return remarks on what other engines would make of this file."""
    texts = []
    if config.arch is Arch.EAGLE1 and config.fc_bias:
        texts.append("fc has a bias, which vLLM would not load")
    if config.arch is Arch.EAGLE1 and FC_BIAS not in named.tensors:
        texts.append(
            "fc has no bias; SGLang builds one all the same and leaves it as it starts (exports "
            "to sglang carry zeros)"
        )
    if sections.head.flag("bias"):
        texts.append(
            "bias is true, which SGLang and vLLM take for biases of attention too; these they "
            "leave unset"
        )
    if config.arch is Arch.EAGLE3 and config.fc_bias:
        texts.append("fc has a bias, which EAGLE and vLLM would not load")
    if sections.layer.flag("tie_word_embeddings") and config.arch is Arch.EAGLE3:
        texts.append(
            "tie_word_embeddings is true; the head's own lm_head.weight is used here, SGLang would "
            "use the embedding and draft noise"
        )
    remarks = [Remark(RemarkKind.WARNING, text) for text in texts]
    layers = sections.layer.optional_integer("num_hidden_layers")
    if layers not in (None, 1):
        text = f"num_hidden_layers is {layers}; the one layer there is counts"
        remarks.append(Remark(RemarkKind.NOTE, text))
    return remarks
