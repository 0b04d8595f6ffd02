"""Reading a head's folder: its tensors, the formats of its config.json, the layers it reads.

Three formats are known, told by a few facts each (:data:`FORMATS`). Two are flat: that of the EAGLE
repository (SafeAILab/EAGLE), which vLLM reads too and whose ``architectures`` are
``LlamaForCausalLM`` for every head; and SGLang's, which SpecForge exports, whose ``architectures``
say which head it is and whose layer ids count outputs. In that of speculators
(vllm-project/speculators, ``Eagle3Speculator``) the decoder layer's settings are an object of their
own, a configuration of Llama, or of Qwen3 for a head that norms queries and keys; its tensors
include the embedding, and there is no EAGLE-1.
"""

import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig

from eaglegbv.drafters.eagle_model import (
    Arch,
    EagleHeadConfig,
    HeadConfig,
    default_feature_layers,
)
from eaglegbv.drafters.formats.names import FC_BIAS, NamedTensors, Remark, RemarkKind
from eaglegbv.errors import DrafterMismatch, first_line

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUMBERING = "layer_ids_are"
"""A key of this package beside the ids, ``inputs`` or ``outputs``; other engines ignore it."""
LAYER_SECTION = "transformer_layer_config"  # where speculators keeps the decoder layer's settings


# The tensors of a folder, from safetensors or from what ``torch.save`` wrote, whole or sharded.
@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by the names they are stored under."""

    files: tuple[str, ...]  # the files read
    ignored: tuple[str, ...]  # other files with weights in the folder, which repeat these
    # On the CPU; mapped from the file, so that they are read only when used.
    tensors: dict[str, Tensor]


def read_weights(folder: Path) -> Weights:
    """Read all tensors of ``folder``; safetensors come before pickled ones.

    Raises:
        DrafterMismatch: There is no weight file, or one is truncated, broken or holds anything
            but tensors; the message names it.
    """
    candidates = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLED, f"{PICKLED}.index.json")
    present = [name for name in candidates if (folder / name).is_file()]
    if not present:
        expected = f"{SAFETENSORS} or {PICKLED} in the folder"
        raise DrafterMismatch("drafter", str(folder), expected)
    files = _shards(folder / present[0]) if present[0].endswith(".json") else (present[0],)
    tensors: dict[str, Tensor] = {}
    for name in files:
        read = _read_safetensors if name.endswith(".safetensors") else _read_pickled
        for key, tensor in read(folder / name).items():
            if key in tensors:
                raise DrafterMismatch(key, f"in two files of {list(files)}", "in one of them")
            tensors[key] = tensor
    return Weights(files, tuple(present[1:]), tensors)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DrafterMismatch: It cannot be read or is something else.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DrafterMismatch("drafter", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise DrafterMismatch("drafter", str(path), "a JSON object")
    return content


def _shards(index: Path) -> tuple[str, ...]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise DrafterMismatch("drafter", str(index), "a weight_map from tensors to files")
    files = {str(name) for name in named.values()}
    for name in files:
        if Path(name).name != name:
            raise DrafterMismatch("drafter", str(index), f"files beside it, not {name!r}")
    return tuple(sorted(files))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        expected = f"a complete safetensors file ({error})"
        raise DrafterMismatch("drafter", str(path), expected) from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        # Only tensors: a pickle may run any code. Mapping needs the zip layout of today's files.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        expected = f"a complete file of tensors alone ({first_line(error)})"
        raise DrafterMismatch("drafter", str(path), expected) from error
    if not isinstance(content, dict):
        raise DrafterMismatch("drafter", str(path), "a dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DrafterMismatch(str(name), type(tensor).__name__, f"a tensor in {path.name}")
    return {name: tensor.detach() for name, tensor in content.items()}


class Numbering(StrEnum):
    """What a layer id stands for: two ways to count, off by one, in the same key.

    Where the key is missing, all engines read the same layers: the inputs of 2, L // 2 and L - 3 of
    a target of L layers.
    """

    INPUTS = "inputs"  # the input of the layer of that number
    OUTPUTS = "outputs"  # the output of the layer of that number, which is the input of the next

    @property
    def engines(self) -> str:
        """The engines that count this way."""
        inputs = self is Numbering.INPUTS
        return "EAGLE, vLLM and speculators" if inputs else "SGLang and SpecForge"

    @property
    def shift(self) -> int:
        """The offset from an id to the number of the layer whose input is meant."""
        return 0 if self is Numbering.INPUTS else 1


class FormatName(StrEnum):
    """Whose format it is."""

    EAGLE = "eagle"
    SGLANG = "sglang"
    SPECULATORS = "speculators"
    DFLASH = "dflash"  # z-lab's block drafters, DFlash2 among them
    DSPARK = "dspark"  # DeepSpec's block drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format."""

    name: FormatName  # its name
    engine: str  # who writes and reads it, for messages
    numbering: Numbering  # what its layer ids number
    eagle3_layer: str  # what the names of an EAGLE-3 head's layer begin with
    architectures: Mapping[Arch, str]  # the `architectures` it writes
    variants: Mapping[Arch, frozenset[str]]  # which of `VARIANTS` it can express when they are true
    # Whether the layer's settings are in `LAYER_SECTION`, and the token embedding in the file.
    nested: bool = False


_NORMS = frozenset({"norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"})
VARIANTS = _NORMS | {"fc_bias", "qkv_bias", "o_bias", "qk_norm"}
"""Settings of a head, of :class:`EagleHeadConfig`, that not every format can express."""

_EAGLE1_VARIANTS = frozenset({"fc_bias", "qkv_bias"})

_FORMATS = (
    Format(
        name=FormatName.EAGLE,
        engine="EAGLE and vLLM",
        numbering=Numbering.INPUTS,
        eagle3_layer="midlayer.",
        architectures=dict.fromkeys(Arch, "LlamaForCausalLM"),
        variants={Arch.EAGLE1: _EAGLE1_VARIANTS, Arch.EAGLE3: frozenset()},
    ),
    Format(
        name=FormatName.SGLANG,
        engine="SGLang and SpecForge",
        numbering=Numbering.OUTPUTS,
        eagle3_layer="midlayer.",
        architectures={Arch.EAGLE1: "LlamaForCausalLMEagle", Arch.EAGLE3: "LlamaForCausalLMEagle3"},
        variants={Arch.EAGLE1: _EAGLE1_VARIANTS, Arch.EAGLE3: _NORMS - {"norm_before_residual"}},
    ),
    Format(
        name=FormatName.SPECULATORS,
        engine="speculators and vLLM",
        numbering=Numbering.INPUTS,
        eagle3_layer="layers.0.",
        architectures={Arch.EAGLE3: "Eagle3Speculator"},
        variants={Arch.EAGLE3: VARIANTS - {"fc_bias"}},
        nested=True,
    ),
)
FORMATS: Mapping[FormatName, Format] = MappingProxyType({each.name: each for each in _FORMATS})


def detect_format(stored: Mapping[str, Any], named: NamedTensors) -> Format:
    """Tell the format of a config.json and its tensors.

    The flat formats share tensors and keys, and engines read either. They differ in what a layer id
    means where nothing else tells; the ``architectures`` matter only for that.
    """
    if LAYER_SECTION in stored:
        return FORMATS[FormatName.SPECULATORS]
    said = stored.get("architectures")
    endings = ("ForCausalLMEagle", "ForCausalLMEagle3")
    sglang = isinstance(said, list) and any(str(a).endswith(endings) for a in said)
    sglang |= any(n.removeprefix("model.").startswith("aux_norm_") for n in named.stored.values())
    return FORMATS[FormatName.SGLANG if sglang else FormatName.EAGLE]


@dataclass(frozen=True, slots=True)
class FeatureLayers:
    """Target layers whose inputs are read, and why."""

    inputs: tuple[int, ...]  # layer numbers
    reason: str  # how they follow from the file
    numbering: Numbering | None = None  # how the file's ids were read; None where there are none
    guessed: bool = False  # whether the numbering was assumed, as nothing told it

    def remarks(self) -> list[Remark]:
        """Say who would read other layers, and what was guessed."""
        if self.numbering is None:
            return []
        [other] = set(Numbering) - {self.numbering}
        text = f"{other.engines} count {other} and would read the layers beside these"
        remarks = [Remark(RemarkKind.WARNING, f"{LAYER_IDS} count {self.numbering}; {text}")]
        if self.guessed:
            text = f"{LAYER_IDS}: {self.reason}; {NUMBERING} in eagle_config would settle it"
            remarks.append(Remark(RemarkKind.ASSUMED, text))
        return remarks

    def check(self, num_layers: int) -> None:
        """Raise :class:`DrafterMismatch` unless a target of ``num_layers`` has these inputs."""
        if not all(0 < layer < num_layers for layer in self.inputs):
            expected = f"inputs of layers from 1 to {num_layers - 1} of the target"
            raise DrafterMismatch(LAYER_IDS, self.inputs, f"{expected} ({self.reason})")


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """The layer ids of an EAGLE-3 head's file."""

    ids: tuple[int, ...] | None  # as stored; None where there are none
    stated: Numbering | None  # what `NUMBERING` says; None where it is missing
    format: Format  # the format, by whose numbering they are read where nothing tells
    default: ClassVar[str] = "2, L // 2 and L - 3 of a target of L layers"

    def resolve(self, num_layers: int | None) -> FeatureLayers | None:
        """Return the layers whose inputs are meant, None if neither file nor target tells.

        ``num_layers`` of the target is None where it is unknown.
        """
        if self.ids is None:
            if num_layers is None:
                return None
            reason = "no ids in config.json: the default of all engines"
            return FeatureLayers(default_feature_layers(num_layers), reason)
        recognised = _recognise(self.ids, num_layers)
        numbering = self.stated or recognised or self.format.numbering
        if self.stated is not None:
            reason = f" and that these are {numbering}"
        elif recognised is not None:
            reason = f", the usual layers if these are {numbering}"
        else:
            reason = f", taken as {numbering}, the habit of {self.format.engine}"
        return FeatureLayers(
            tuple(layer + numbering.shift for layer in self.ids),
            f"config.json says {list(self.ids)}{reason}",
            numbering,
            guessed=not (self.stated or recognised),
        )


def _recognise(ids: tuple[int, ...], num_layers: int | None) -> Numbering | None:
    """Return the numbering by which these are the usual layers; None if there is none.

    Where the target's depth is unknown, the last layer gives it away.
    """
    for numbering in Numbering:
        inputs = tuple(layer + numbering.shift for layer in ids)
        if inputs == default_feature_layers(num_layers or inputs[-1] + 3):
            return numbering
    return None


@dataclass(frozen=True, slots=True)
class BlockLayers:
    """The layer ids of a block drafter's file."""

    ids: tuple[int, ...] | None  # as stored; None where there are none
    shift: int  # what an id lacks to the number of the layer whose input is meant
    drafter_layers: int  # layers of the drafter, over which DFlash spreads them
    default: ClassVar[str] = "that DFlash spreads over the target"

    def resolve(self, num_layers: int | None) -> FeatureLayers | None:
        """Return the layers whose inputs are meant; see :meth:`StoredLayers.resolve`."""
        ids = self.ids
        reason = "as config.json says"
        if ids is None:
            if num_layers is None:
                return None
            ids = _spread(num_layers, self.drafter_layers)
            reason = "as DFlash spreads them"
        return FeatureLayers(tuple(layer + self.shift for layer in ids), reason)


def _spread(num_layers: int, drafter_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs DFlash reads where a file names none, from 0 on."""
    if drafter_layers == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (drafter_layers - 1)
    return tuple(round(1 + place * step) for place in range(drafter_layers))


Positive = Annotated[int, msgspec.Meta(ge=1)]
Above = Annotated[float, msgspec.Meta(gt=0)]
Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class LayerKeys(msgspec.Struct, kw_only=True):
    """The decoder layer's keys, those of Llama; a missing key and a null one mean the same."""

    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    vocab_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    num_hidden_layers: Positive | None = None
    max_position_embeddings: Positive | None = None
    rms_norm_eps: Above | None = None
    rope_theta: Above | None = None
    partial_rotary_factor: Above | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    model_type: str | None = None
    hidden_act: str | None = None
    layer_types: list[str] | None = None
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    layer_ids_are: Numbering | None = None


class _Verifier(msgspec.Struct):
    name_or_path: str | None = None


class SpeculatorsKeys(msgspec.Struct):
    """What speculators says of a whole head."""

    verifier: _Verifier | None = None


class _Head(msgspec.Struct, kw_only=True):
    """The other keys of an EAGLE head."""

    architectures: list[str] | None = None
    target_hidden_size: Positive | None = None
    draft_vocab_size: Positive | None = None
    eagle_aux_hidden_state_layer_ids: Ids | None = None
    num_aux_hidden_states: Positive | None = None
    use_aux_hidden_state: bool | None = None
    bias: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    speculators_config: SpeculatorsKeys | None = None


Keys = TypeVar("Keys", bound=msgspec.Struct)

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
PASSED_ON = (
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What a config.json says of a head."""

    architectures: tuple[str, ...]  # its `architectures`, for reports
    # The head's configuration. Its layer numbers are placeholders of the right count; the true ones
    # follow from `layers` and the target.
    config: HeadConfig
    layers: StoredLayers | BlockLayers | None  # the layer ids of the file; None of EAGLE-1
    passed_on: Mapping[str, Any]  # keys that only other engines use
    verifier: str | None  # name of the target, where the file names one
    remarks: tuple[Remark, ...]  # what was assumed, and what other engines would do otherwise


def read_settings(
    stored: Mapping[str, Any], arch: Arch, kind: Format, named: NamedTensors
) -> HeadSettings:
    """Read a config.json.

    Raises:
        DrafterMismatch: A key is missing, of a wrong type, or asks for something unsupported; the
            message names it.
    """
    if kind.nested:
        whole = stored
        inner = section_of(stored, LAYER_SECTION)
        section = f"{LAYER_SECTION}."
    else:
        whole = inner = merged_keys(stored, "eagle_config")
        section = ""
    layer = typed_keys(inner, LayerKeys, section)
    head = typed_keys(whole, _Head)
    _check_supported(layer, head, section)
    layers = None
    norms = dict[str, Any]()
    remarks = list[Remark]()
    if arch is Arch.EAGLE3:
        ids = head.eagle_aux_hidden_state_layer_ids
        layers = StoredLayers(None if ids is None else tuple(ids), layer.layer_ids_are, kind)
        norms, remarks = _norms(head, named)
    # EAGLE-1 has one unless its configuration says no.
    has_fc_bias = arch is Arch.EAGLE1 or FC_BIAS in named.tensors
    config = EagleHeadConfig(
        arch=arch,
        target_hidden_size=head.target_hidden_size or layer.hidden_size,
        draft_vocab_size=(arch is Arch.EAGLE3 and head.draft_vocab_size) or layer.vocab_size,
        feature_layers=() if layers is None else _stand_in(head),
        **layer_settings(layer, inner),
        fc_bias=has_fc_bias if head.bias is None else head.bias,
        **_attention(layer, kind, named),
        **norms,
    )
    speculators = head.speculators_config
    verifier = None if speculators is None else speculators.verifier
    return HeadSettings(
        architectures=tuple(head.architectures or ()),
        config=config,
        layers=layers,
        passed_on={key: inner[key] for key in PASSED_ON if inner.get(key) is not None},
        verifier=None if verifier is None else verifier.name_or_path,
        remarks=(*remarks, *_disagreements(layer, head, kind, config, named)),
    )


def section_of(stored: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object that a key has, an empty one where it is missing."""
    value = stored.get(key)
    if not isinstance(value, dict | None):
        raise key_mismatch(key, value, "an object")
    return value or {}


def merged_keys(stored: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the keys of the file with those of the object ``key`` laid over them."""
    over = {name: value for name, value in section_of(stored, key).items() if value is not None}
    for name, value in over.items():
        if stored.get(name) not in (None, value):
            raise key_mismatch(name, stored[name], f"{value!r}, as in {key}")
    return {**stored, **over}


def typed_keys(content: Mapping[str, Any], kind: type[Keys], section: str = "") -> Keys:
    """Return the keys of a kind; DrafterMismatch names one of a wrong type."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        key = place.rstrip("`") or said.split("`")[1]
        value = content.get(key.partition("[")[0])
        expected = said.removeprefix("Expected ").replace("`", "")
        raise key_mismatch(section + key, value, expected) from error


def key_mismatch(key: str, value: object, expected: str) -> DrafterMismatch:
    """Return the error for a key of config.json and its value."""
    return DrafterMismatch(f"config.json key {key}", value, expected)


def _check_supported(layer: LayerKeys, head: _Head, section: str) -> None:
    check_layer(layer, section)
    if any(kind != "full_attention" for kind in layer.layer_types or ()):
        raise key_mismatch(f"{section}layer_types", layer.layer_types, "full_attention alone")
    if head.use_aux_hidden_state is False:
        raise key_mismatch("use_aux_hidden_state", False, "true")


def check_layer(layer: LayerKeys, section: str) -> None:
    """Raise DrafterMismatch where a layer has parts that no head here has."""
    if layer.hidden_act not in (None, "silu"):
        raise key_mismatch(f"{section}hidden_act", layer.hidden_act, "'silu'")
    if layer.mlp_bias:
        raise key_mismatch(f"{section}mlp_bias", True, "false")
    for key in ("rope_parameters", "rope_scaling"):
        settings = getattr(layer, key) or {}
        if any(isinstance(value, dict) for value in settings.values()):
            expected = "settings of the one layer, not of kinds of layers"
            raise key_mismatch(f"{section}{key}", settings, expected)


def layer_settings(layer: LayerKeys, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a head's configuration takes of its layers' keys, as they are ``stored``."""
    llama, heads = _llama(stored), layer.num_attention_heads
    return {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": layer.num_key_value_heads or heads,
        "head_dim": layer.head_dim or layer.hidden_size // heads,
        "vocab_size": layer.vocab_size,
        "rms_norm_eps": llama.rms_norm_eps,
        # In transformers' keys, without an older spelling beside the new one.
        "rope_parameters": {k: v for k, v in (llama.rope_parameters or {}).items() if k != "type"},
    }


def _llama(layer: Mapping[str, Any]) -> LlamaConfig:
    """Let transformers read the keys of a decoder layer and fill in its defaults."""
    keys = {key: layer[key] for key in _LLAMA_KEYS if layer.get(key) is not None}
    try:
        return LlamaConfig(**keys)
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        shown = {key: value for key, value in keys.items() if key.startswith(("rope", "rms"))}
        expected = f"settings of a Llama layer ({error})"
        raise DrafterMismatch("config.json", shown, expected) from error


def _stand_in(head: _Head) -> tuple[int, ...]:
    """Return as many layer numbers as the head reads, three where nothing says."""
    ids = head.eagle_aux_hidden_state_layer_ids
    said = head.num_aux_hidden_states
    number = said or 3 if ids is None else len(ids)
    if said not in (None, number):
        raise key_mismatch("num_aux_hidden_states", said, f"{number}, as {LAYER_IDS} has")
    return tuple(range(1, number + 1))


def _attention(layer: LayerKeys, kind: Format, named: NamedTensors) -> dict[str, Any]:
    """Read how attention departs from Llama's; the tensors decide where no key says.

    In speculators' format norms belong to a Qwen3 layer, and biases to any, for all its attention.
    """
    if not kind.nested:
        # Configurations copied from a target may say attention_bias, which means the target's.
        has_bias = named.has_attention_bias("qkv")
        said = layer.qkv_bias
        return {
            "qkv_bias": has_bias if said is None else said,
            "o_bias": named.has_attention_bias("o"),
            "qk_norm": named.has_attention_norm,
        }
    if layer.model_type not in (None, "llama", "qwen3"):
        # Qwen3-Next, say, counts the weights of its norms from zero.
        raise key_mismatch(f"{LAYER_SECTION}.model_type", layer.model_type, "'llama' or 'qwen3'")
    biases = bool(layer.attention_bias)
    by_type = layer.model_type == "qwen3"
    qk_norm = named.has_attention_norm if layer.model_type is None else by_type
    return {"qkv_bias": biases, "o_bias": biases, "qk_norm": qk_norm}


def _norms(head: _Head, named: NamedTensors) -> tuple[dict[str, Any], list[Remark]]:
    """Read the norms of an EAGLE-3 head; tensors decide where config.json does not say."""
    said = {
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.use_aux_norm if head.fc_norm is None else head.fc_norm,
    }
    has_tensors = {
        "norm_before_fc": "input_norm.weight" in named.tensors,
        "fc_norm": any(name.startswith("fc_norm.") for name in named.tensors),
    }
    norms: dict[str, Any] = {
        key: has_tensors[key] if value is None else value for key, value in said.items()
    }
    norms["norm_before_residual"] = bool(head.norm_before_residual)
    norms["norm_output"] = bool(head.norm_output)
    text = "{} is true, as its tensors are there; config.json does not say"
    assumed = [key for key, value in said.items() if value is None and has_tensors[key]]
    return norms, [Remark(RemarkKind.ASSUMED, text.format(key)) for key in assumed]


def _disagreements(
    layer: LayerKeys, head: _Head, kind: Format, config: EagleHeadConfig, named: NamedTensors
) -> list[Remark]:
    """Return remarks on what the file leaves open, and on what other engines would make of it."""
    eagle1 = config.arch is Arch.EAGLE1
    eagle3 = config.arch is Arch.EAGLE3
    layers = layer.num_hidden_layers
    facts: dict[RemarkKind, dict[str, bool | None]] = {
        RemarkKind.ASSUMED: {
            "norm_output is true: the normed state is fed back, as SGLang does; SpecForge, whose "
            "key of that name concerns logits alone, trains with the state before the norm": (
                config.norm_output and not kind.nested
            ),
            "norm_before_residual is false, the default of speculators' configurations; "
            "config.json does not say, and vLLM would take it as true": (
                kind.nested and head.norm_before_residual is None
            ),
        },
        RemarkKind.WARNING: {
            "fc has a bias, which vLLM would not load": eagle1 and config.fc_bias,
            "fc has no bias; SGLang builds one all the same and leaves it as it starts (exports "
            "to sglang carry zeros)": eagle1 and FC_BIAS not in named.tensors,
            "bias is true, which SGLang and vLLM take for biases of attention too; these they "
            "leave unset": head.bias,
            "fc has a bias, which EAGLE and vLLM would not load": eagle3 and config.fc_bias,
            "tie_word_embeddings is true; the head's own lm_head.weight is used here, SGLang would "
            "use the embedding and draft noise": eagle3 and layer.tie_word_embeddings,
        },
        RemarkKind.NOTE: {
            f"num_hidden_layers is {layers}; the one layer there is counts": layers not in (None, 1)
        },
    }
    return [Remark(k, text) for k, texts in facts.items() for text, holds in texts.items() if holds]
