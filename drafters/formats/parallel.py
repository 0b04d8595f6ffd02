"""The formats of block drafters: what their config.json says, and how it is written.

Three layouts are known, told by ``architectures`` and by speculators' section: z-lab's DFlash and
DFlash2 (z-lab/dflash), whose own keys are in ``dflash_config``; DeepSpec's DSpark
(deepseek-ai/DeepSpec), a flat configuration; and speculators' dflash and dspark, which nest the
layers' settings. All store a head's tensors under the names that :class:`ParallelHead` gives them.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from torch import Tensor

from eaglegbv.devices import dtype_name
from eaglegbv.drafters.eagle_model import HeadConfig
from eaglegbv.drafters.formats.names import NamedTensors, Remark, RemarkKind
from eaglegbv.drafters.formats.read import (
    LAYER_SECTION,
    PASSED_ON,
    Above,
    BlockLayers,
    FormatName,
    HeadSettings,
    Ids,
    LayerKeys,
    Positive,
    SpeculatorsKeys,
    check_layer,
    key_mismatch,
    layer_settings,
    merged_keys,
    section_of,
    typed_keys,
)
from eaglegbv.drafters.formats.write import (
    Contents,
    layer_keys,
    speculators_section,
    write_files,
)
from eaglegbv.drafters.parallel_model import ParallelHeadConfig, Sight
from eaglegbv.errors import DrafterMismatch, one_of

DFLASH_SECTION = "dflash_config"
MASK_EMBEDDING = "mask_embedding.pt"  # of some of z-lab's, in place of a token of the target
OUTPUT = "lm_head.weight"
CONTEXT_NORM = "hidden_norm.weight"  # a tensor that no other head has
_ALIASES = MappingProxyType(
    {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": CONTEXT_NORM}
)
_UNNEEDED = MappingProxyType(
    {
        "verifier_": "the target's own is used",
        "rotary_emb.": "computed from config.json",
        "confidence_head.": "drafts end by min_confidence alone",
    }
)
_TARGETS = MappingProxyType(
    {"embed_tokens.": "the target's own is used", "lm_head.": "the target's own is used"}
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SHARED = (
    "block_size",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "markov_rank",
)
"""Keys that settings of a head are called by."""


_ARCHITECTURES = MappingProxyType(
    {
        "DFlashDraftModel": FormatName.DFLASH,
        "DFlash2DraftModel": FormatName.DFLASH,
        "DFlash2BeamDraftModel": FormatName.DFLASH,
        "Qwen3DSparkModel": FormatName.DSPARK,
    }
)
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Keys(msgspec.Struct, kw_only=True):
    """The keys of a block drafter beside those of its layers; None alone is supported of some."""

    block_size: Positive
    mask_token_id: Count
    target_layer_ids: Ids | None = None
    aux_hidden_state_layer_ids: Ids | None = None
    target_hidden_size: Positive | None = None
    draft_vocab_size: Positive | None = None
    causal: bool | None = None
    is_causal: bool | None = None
    sample_from_anchor: bool | None = None
    sliding_window: Positive | None = None
    sliding_window_non_causal: bool = False
    conv_kernel_size: Count = 0
    conv_group_size: Count = 0
    selector_rank: Count = 0
    selector_top_k: Count = 0
    output_multiplier: Above = 1.0
    final_logit_softcapping: Above | None = None
    markov_rank: Count = 0
    markov_head_type: Literal["vanilla", "gated"] = "vanilla"
    attention_sink_bias: bool = False
    use_gemma_norm: bool = False
    attention_value_scale: None = None
    projector_type: None = None
    quantization_config: None = None
    speculators_config: SpeculatorsKeys | None = None


def is_parallel(tensors: Iterable[str]) -> bool:
    """Return whether tensors of these names are a block drafter's: no other head norms features."""
    names = {name.removeprefix("model.") for name in tensors}
    return bool({CONTEXT_NORM, *_ALIASES} & names)


def detect_parallel(stored: Mapping[str, Any]) -> FormatName:
    """Tell the format of a block drafter's config.json; DrafterMismatch names what is unknown."""
    if LAYER_SECTION in stored:
        return FormatName.SPECULATORS
    named = stored.get("architectures") or ["none"]
    if str(named[0]) not in _ARCHITECTURES:
        raise key_mismatch("architectures", named, one_of(_ARCHITECTURES))
    return _ARCHITECTURES[str(named[0])]


def name_parallel(tensors: Mapping[str, Any], kind: FormatName) -> NamedTensors:
    """Give tensors their names inside this package; those that are not needed are left aside."""
    unneeded = {**_UNNEEDED, **({} if kind is FormatName.SPECULATORS else _TARGETS)}
    kept: dict[str, Any] = {}
    stored: dict[str, str] = {}
    left_aside: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        known = _ALIASES.get(plain, plain)
        reasons = [why for prefix, why in unneeded.items() if known.startswith(prefix)]
        if reasons:
            left_aside[name] = reasons[0]
        elif known in kept:
            raise DrafterMismatch(name, stored[known], "a single tensor of this meaning")
        else:
            kept[known] = tensor
            stored[known] = name
    return NamedTensors(kept, stored, "", left_aside)


def read_parallel_settings(
    stored: Mapping[str, Any], kind: FormatName, named: NamedTensors
) -> HeadSettings:
    """Read a block drafter's config.json.

    Raises:
        DrafterMismatch: A key is missing, of a wrong type, or asks for something unsupported; the
            message names it.
    """
    nested = kind is FormatName.SPECULATORS
    inner = section_of(stored, LAYER_SECTION) if nested else merged_keys(stored, DFLASH_SECTION)
    layer = typed_keys(inner, LayerKeys, f"{LAYER_SECTION}." if nested else "")
    keys = typed_keys({**stored, **inner}, _Keys)
    check_layer(layer, "")
    for name in ("attention_sink_bias", "use_gemma_norm"):
        if getattr(keys, name):
            raise key_mismatch(name, True, "false")
    sights = _sights(layer, keys, nested=nested)
    ids = keys.aux_hidden_state_layer_ids if nested else keys.target_layer_ids
    if nested and ids is None:
        raise key_mismatch("aux_hidden_state_layer_ids", None, "the layers whose inputs it reads")
    layers = BlockLayers(None if ids is None else tuple(ids), 0 if nested else 1, len(sights))
    anchored = keys.sample_from_anchor
    if anchored is None:  # as in all of DSpark
        anchored = "DSPARK" in (kind.name, str(stored.get("speculators_model_type")).upper())
    config = ParallelHeadConfig(
        target_hidden_size=keys.target_hidden_size or layer.hidden_size,
        draft_vocab_size=(nested and keys.draft_vocab_size) or layer.vocab_size,
        feature_layers=layers.ids or tuple(range(len(sights))),
        qkv_bias=bool(layer.attention_bias),
        o_bias=bool(layer.attention_bias),
        qk_norm=named.has_attention_norm,
        sights=sights,
        sample_from_anchor=anchored,
        own_output=OUTPUT in named.tensors,
        markov_gate=keys.markov_head_type == "gated",
        **{name: getattr(keys, name) for name in _SHARED},
        **layer_settings(layer, inner),
    )
    speculators = keys.speculators_config
    verifier = None if speculators is None else speculators.verifier
    return HeadSettings(
        architectures=tuple(stored.get("architectures") or ()),
        config=config,
        layers=layers,
        passed_on={key: inner[key] for key in PASSED_ON if inner.get(key) is not None},
        verifier=None if verifier is None else verifier.name_or_path,
        remarks=tuple(_remarks(keys, kind, config)),
    )


def _sights(layer: LayerKeys, keys: _Keys, *, nested: bool) -> tuple[Sight, ...]:
    """Return what each layer's rows see."""
    count = layer.num_hidden_layers or 1
    types = layer.layer_types or [_FULL] * count
    if len(types) != count or not {*types} <= {_FULL, _SLIDING}:
        raise key_mismatch("layer_types", types, f"{_FULL} or {_SLIDING} for each of {count}")
    if _SLIDING in types and keys.sliding_window is None:
        raise key_mismatch("sliding_window", None, f"a number, as layers are {_SLIDING}")
    said = keys.causal if keys.is_causal is None else keys.is_causal
    full = bool(said)
    sliding = said is not False
    if nested:
        full = False
        sliding = not keys.sliding_window_non_causal
    seen = {_FULL: Sight(None, full), _SLIDING: Sight(keys.sliding_window, sliding)}
    return tuple(seen[kind] for kind in types)


def _remarks(keys: _Keys, kind: FormatName, config: ParallelHeadConfig) -> Iterator[Remark]:
    """Yield what the file leaves open, and what other engines make of it."""
    windows = any(sight.window for sight in config.sights)
    if windows and keys.causal is None and keys.is_causal is None:
        causal = "causal" if any(sight.causal for sight in config.sights) else "not causal"
        text = f"sliding layers are {causal} within a block, as SGLang and speculators take them"
        yield Remark(RemarkKind.ASSUMED, text)
    if kind is FormatName.DFLASH and keys.target_layer_ids is None:
        text = "no target_layer_ids: the layers that DFlash spreads evenly over the target"
        yield Remark(RemarkKind.ASSUMED, text)
    if config.sample_from_anchor and not config.markov_rank and kind is not FormatName.DSPARK:
        text = "the anchor's row is drafted from, which vLLM takes of DSpark alone"
        yield Remark(RemarkKind.WARNING, text)
    if kind is FormatName.DSPARK and not config.markov_rank:
        text = "markov_rank is 0, with which SGLang starts no DSpark drafter"
        yield Remark(RemarkKind.WARNING, text)
    if kind is FormatName.SPECULATORS:
        text = "layer ids count inputs: those of z-lab's and DeepSpec's files are one less"
        yield Remark(RemarkKind.NOTE, text)


def write_block(
    folder: Path, kind: FormatName, contents: Contents, tensors: Mapping[str, Tensor]
) -> None:
    """Write a block drafter's folder in a format, its tensors as they are.

    Raises:
        DrafterMismatch: The format cannot express the head.
    """
    config = contents.config
    inputs = contents.layers
    assert isinstance(config, ParallelHeadConfig)
    check_holds_block(kind, config)
    if inputs is None:
        raise DrafterMismatch("target_layer_ids", None, "the target's name, as the file names none")
    windows = [sight.window for sight in config.sights]
    keys: dict[str, Any] = {
        **layer_keys(config, contents.passed_on),
        "model_type": "qwen3",
        "num_hidden_layers": len(windows),
        "layer_types": [_SLIDING if window else _FULL for window in windows],
        "sliding_window": max((window for window in windows if window), default=None),
        "attention_bias": config.qkv_bias,
        "torch_dtype": dtype_name(contents.dtype),
    }
    own: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    own["sample_from_anchor"] = config.sample_from_anchor
    own["markov_head_type"] = "gated" if config.markov_gate else "vanilla"
    if kind is FormatName.SPECULATORS:
        algorithm = "dspark" if config.markov_rank else "dflash"
        sliding = [sight.causal for sight in config.sights if sight.window]
        keys = {
            **own,
            "architectures": ["DSparkSpeculator" if config.markov_rank else "DFlashSpeculator"],
            "model_type": "speculators",
            "speculators_model_type": algorithm,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "aux_hidden_state_layer_ids": list(inputs),
            "sliding_window_non_causal": not any(sliding),
            "enable_confidence_head": False,
            "speculators_config": speculators_section(algorithm, config.levels, contents),
            LAYER_SECTION: keys,
        }
    else:
        own |= {
            "target_layer_ids": [layer - 1 for layer in inputs],
            "causal": config.sights[0].causal,
        }
        named = "Qwen3DSparkModel"
        if kind is FormatName.DFLASH:
            named = "DFlash2DraftModel" if config.selector_rank else "DFlashDraftModel"
            own = {DFLASH_SECTION: own, "block_size": config.block_size}
        keys |= {"architectures": [named], **own}
    write_files(folder, keys, tensors)


def check_holds_block(kind: FormatName, config: HeadConfig) -> None:
    """Raise :class:`DrafterMismatch` where the format's readers would lose part of a head."""
    assert isinstance(config, ParallelHeadConfig)
    speculators = kind is FormatName.SPECULATORS
    dflash = kind is FormatName.DFLASH
    mixed = len({sight.causal for sight in config.sights}) > 1
    lost: dict[str, bool] = {
        "block drafters": kind not in set(_ARCHITECTURES.values()) | {FormatName.SPECULATORS},
        "a term of the token before": bool(config.markov_rank) and dflash,
        "a candidate selector": bool(config.selector_rank) and not dflash,
        "convolutions": bool(config.conv_kernel_size) and not dflash,
        "an output layer of its own": config.own_output and not speculators,
        "layers of which some are causal": mixed and not speculators,
        "causal layers without a window": speculators and Sight(None, True) in config.sights,
        "norms of neither queries nor keys": not config.qk_norm,
        "biases of a part of attention": config.qkv_bias != config.o_bias,
    }
    for what, is_lost in lost.items():
        if is_lost:
            raise DrafterMismatch("format", str(kind), f"a format that holds {what}")
