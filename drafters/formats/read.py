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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig

from eaglegbv.drafters.eagle_model import Arch, EagleHeadConfig, default_feature_layers
from eaglegbv.drafters.formats.names import FC_BIAS, NamedTensors, Remark, RemarkKind
from eaglegbv.errors import DrafterMismatch, InvalidArgument, one_of

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUMBERING = "layer_ids_are"
"""A key of this package beside the ids, ``inputs`` or ``outputs``; other engines ignore it."""
LAYER_SECTION = "transformer_layer_config"
"""Where speculators keeps the decoder layer's settings."""


# The tensors of a folder, from safetensors or from what ``torch.save`` wrote, whole or sharded.


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by the names they are stored under.

    Attributes:
        files: The files read.
        ignored: Other files with weights in the folder, which repeat these.
        tensors: On the CPU; mapped from the file, so that they are read only when used.
    """

    files: tuple[str, ...]
    ignored: tuple[str, ...]
    tensors: dict[str, Tensor]


def read_weights(folder: Path) -> Weights:
    """Read all tensors of ``folder``; safetensors come before pickled ones.

    Raises:
        DrafterMismatch: There is no weight file, or one is truncated, broken or holds anything
            but tensors; the message names it.
    """
    candidates = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLED, f"{PICKLED}.index.json")
    found = [name for name in candidates if (folder / name).is_file()]
    if not found:
        expected = f"{SAFETENSORS} or {PICKLED} in the folder"
        raise DrafterMismatch("drafter", str(folder), expected)
    files = _shards(folder / found[0]) if found[0].endswith(".json") else (found[0],)
    tensors: dict[str, Tensor] = {}
    for name in files:
        read = _read_safetensors if name.endswith(".safetensors") else _read_pickled
        for key, tensor in read(folder / name).items():
            if key in tensors:
                raise DrafterMismatch(key, f"in two files of {list(files)}", "in one of them")
            tensors[key] = tensor
    return Weights(files, tuple(found[1:]), tensors)


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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        expected = f"a complete file of tensors alone ({reason})"
        raise DrafterMismatch("drafter", str(path), expected) from error
    if not isinstance(content, dict):
        raise DrafterMismatch("drafter", str(path), "a dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DrafterMismatch(str(name), type(tensor).__name__, f"a tensor in {path.name}")
    return {name: tensor.detach() for name, tensor in content.items()}


class Section:
    """A part of a config.json; a value of another type than asked for is an error with its key.

    A missing key and a null one count as the same, and give None.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        """Wrap ``content``, found under ``path`` in the file."""
        self._content = content
        self._path = path

    def integer(self, key: str) -> int:
        """Return a required positive integer."""
        value = self.optional_integer(key)
        if value is None:
            raise self.mismatch(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return a positive integer."""
        found: int | None = self._get(key, "a positive integer", lambda v: _is_integer(v, 1))
        return found

    def number(self, key: str) -> float | None:
        """Return a positive number."""
        found: float | None = self._get(
            key, "a positive number", lambda v: _is_integer(v, 1) or (type(v) is float and v > 0)
        )
        return found

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return one or more integers from 0."""

        def valid(value: object) -> bool:
            return isinstance(value, list) and bool(value) and all(_is_integer(v, 0) for v in value)

        found = self._get(key, "a list of integers from 0", valid)
        return None if found is None else tuple(found)

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        found: bool | None = self._get(key, "true or false", lambda v: isinstance(v, bool))
        return found

    def text(self, key: str) -> str | None:
        """Return a string."""
        found: str | None = self._get(key, "a string", lambda v: isinstance(v, str))
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """Return strings; none where the key is missing."""

        def valid(value: object) -> bool:
            return isinstance(value, list) and all(isinstance(v, str) for v in value)

        return tuple(self._get(key, "a list of strings", valid) or ())

    def content(self, key: str) -> Mapping[str, Any]:
        """Return an object; an empty one where the key is missing."""
        found: Mapping[str, Any] = self._get(key, "an object", lambda v: isinstance(v, dict)) or {}
        return found

    def inner(self, key: str) -> "Section":
        """Return an object inside this one as a section."""
        return Section(self.content(key), f"{self._path}{key}.")

    def merged(self, key: str) -> "Section":
        """Return this section with the keys of the object ``key`` laid over it.

        Raises:
            DrafterMismatch: Both have a key, with different values.
        """
        over = {name: value for name, value in self.content(key).items() if value is not None}
        for name, value in over.items():
            if self._content.get(name) not in (None, value):
                raise self.mismatch(name, f"{value!r}, as in {key}")
        return Section({**self._content, **over}, self._path)

    def picked(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return those of ``keys`` that are there, as they are."""
        return {key: value for key in keys if (value := self._content.get(key)) is not None}

    def mismatch(self, key: str, expected: str) -> DrafterMismatch:
        """Return the error that the value of ``key`` is not as expected."""
        shown = f"config.json key {self._path}{key}"
        return DrafterMismatch(shown, self._content.get(key), expected)

    def _get(self, key: str, expected: str, valid: Callable[[Any], bool]) -> Any:  # noqa: ANN401
        value = self._content.get(key)
        if value is not None and not valid(value):
            raise self.mismatch(key, expected)
        return value


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# The formats.


class Numbering(StrEnum):
    """What a layer id stands for: two ways to count, off by one, in the same key.

    Where the key is missing, all engines read the same layers: the inputs of 2, L // 2 and L - 3 of
    a target of L layers.
    """

    INPUTS = "inputs"
    """The input of the layer of that number."""
    OUTPUTS = "outputs"
    """The output of the layer of that number, which is the input of the next."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format.

    Attributes:
        name: Its name.
        engine: Who writes and reads it, for messages.
        numbering: What its layer ids number.
        eagle3_layer: What the names of an EAGLE-3 head's layer begin with.
        architectures: The ``architectures`` it writes.
        variants: Which of :data:`VARIANTS` it can express when they are true.
        nested: Whether the layer's settings are in :data:`LAYER_SECTION`, and the token embedding
            in the file.
    """

    name: FormatName
    engine: str
    numbering: Numbering
    eagle3_layer: str
    architectures: Mapping[Arch, str]
    variants: Mapping[Arch, frozenset[str]]
    nested: bool = False


_NORMS = frozenset({"norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"})
VARIANTS = _NORMS | {"fc_bias", "qkv_bias", "o_bias", "qk_norm"}
"""Settings of a head, of :class:`EagleHeadConfig`, that not every format can express."""

_EAGLE1_VARIANTS = frozenset({"fc_bias", "qkv_bias"})

FORMATS: Mapping[FormatName, Format] = MappingProxyType(
    {
        FormatName.EAGLE: Format(
            name=FormatName.EAGLE,
            engine="EAGLE and vLLM",
            numbering=Numbering.INPUTS,
            eagle3_layer="midlayer.",
            architectures=dict.fromkeys(Arch, "LlamaForCausalLM"),
            variants={Arch.EAGLE1: _EAGLE1_VARIANTS, Arch.EAGLE3: frozenset()},
        ),
        FormatName.SGLANG: Format(
            name=FormatName.SGLANG,
            engine="SGLang and SpecForge",
            numbering=Numbering.OUTPUTS,
            eagle3_layer="midlayer.",
            architectures={
                Arch.EAGLE1: "LlamaForCausalLMEagle",
                Arch.EAGLE3: "LlamaForCausalLMEagle3",
            },
            variants={
                Arch.EAGLE1: _EAGLE1_VARIANTS,
                Arch.EAGLE3: _NORMS - {"norm_before_residual"},
            },
        ),
        FormatName.SPECULATORS: Format(
            name=FormatName.SPECULATORS,
            engine="speculators and vLLM",
            numbering=Numbering.INPUTS,
            eagle3_layer="layers.0.",
            architectures={Arch.EAGLE3: "Eagle3Speculator"},
            variants={Arch.EAGLE3: VARIANTS - {"fc_bias"}},
            nested=True,
        ),
    }
)


def find_format(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        InvalidArgument: There is none.
    """
    if name not in set(FormatName):
        raise InvalidArgument("format", name, one_of(FormatName, name))
    return FORMATS[FormatName(name)]


def detect_format(stored: Mapping[str, Any], named: NamedTensors) -> Format:
    """Tell the format of a config.json and its tensors.

    The flat formats share tensors and keys, and engines read either. They differ in what a layer id
    means where nothing else tells; the ``architectures`` matter only for that.
    """
    if LAYER_SECTION in stored:
        return FORMATS[FormatName.SPECULATORS]
    endings = ("ForCausalLMEagle", "ForCausalLMEagle3")
    theirs = any(a.endswith(endings) for a in Section(stored).texts("architectures"))
    theirs |= any(n.removeprefix("model.").startswith("aux_norm_") for n in named.stored.values())
    return FORMATS[FormatName.SGLANG if theirs else FormatName.EAGLE]


# Which target layers EAGLE-3 reads.


@dataclass(frozen=True, slots=True)
class FeatureLayers:
    """Target layers whose inputs are read, and why.

    Attributes:
        inputs: Layer numbers.
        reason: How they follow from the file.
        numbering: How the file's ids were read; None where there are none.
        guessed: Whether the numbering was assumed, as nothing told it.
    """

    inputs: tuple[int, ...]
    reason: str
    numbering: Numbering | None = None
    guessed: bool = False

    def remarks(self) -> list[Remark]:
        """Say who would read other layers, and what was guessed."""
        if self.numbering is None:
            return []
        [other] = set(Numbering) - {self.numbering}
        text = f"{other.engines} count {other} and would read the layers beside these"
        found = [Remark(RemarkKind.WARNING, f"{LAYER_IDS} count {self.numbering}; {text}")]
        if self.guessed:
            text = f"{LAYER_IDS}: {self.reason}; {NUMBERING} in eagle_config would settle it"
            found.append(Remark(RemarkKind.ASSUMED, text))
        return found

    def check(self, num_layers: int) -> None:
        """Raise :class:`DrafterMismatch` unless a target of ``num_layers`` has these inputs."""
        if not all(0 < layer < num_layers for layer in self.inputs):
            expected = f"inputs of layers from 1 to {num_layers - 1} of the target"
            raise DrafterMismatch(LAYER_IDS, self.inputs, f"{expected} ({self.reason})")


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """The layer ids of a file.

    Attributes:
        ids: As stored; None where there are none.
        stated: What :data:`NUMBERING` says; None where it is missing.
        format: The format, by whose numbering they are read where nothing tells.
    """

    ids: tuple[int, ...] | None
    stated: Numbering | None
    format: Format

    def resolve(self, num_layers: int | None) -> FeatureLayers | None:
        """Return the layers whose inputs are meant.

        Args:
            num_layers: Layers of the target; None where it is unknown.

        Returns:
            None where neither the file nor the target tells.
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


# A head's configuration from a config.json and the names of the tensors beside it.


_LLAMA_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_LLAMA_ROPE = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    head = Section(stored) if kind.nested else Section(stored).merged("eagle_config")
    layer = head.inner(LAYER_SECTION) if kind.nested else head
    _check_supported(layer, head)
    llama = _llama(layer)
    layers = None if arch is Arch.EAGLE1 else _stored_layers(layer, head, kind)
    norms, remarks = ({}, []) if arch is Arch.EAGLE1 else _norms(head, named)
    vocab, hidden = layer.integer("vocab_size"), layer.integer("hidden_size")
    draft_vocab = None if arch is Arch.EAGLE1 else head.optional_integer("draft_vocab_size")
    bias = head.flag("bias")
    if bias is None:  # EAGLE-1 has one unless its configuration says no
        bias = arch is Arch.EAGLE1 or FC_BIAS in named.tensors
    config = EagleHeadConfig(
        arch=arch,
        hidden_size=hidden,
        target_hidden_size=head.optional_integer("target_hidden_size") or hidden,
        intermediate_size=layer.integer("intermediate_size"),
        num_heads=layer.integer("num_attention_heads"),
        num_kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
        head_dim=llama.head_dim or hidden // llama.num_attention_heads,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab or vocab,
        feature_layers=() if layers is None else _stand_in(head, layers),
        rms_norm_eps=llama.rms_norm_eps,
        # In transformers' keys, without an older spelling beside the new one.
        rope_parameters={k: v for k, v in (llama.rope_parameters or {}).items() if k != "type"},
        fc_bias=bias,
        **_attention(layer, kind, named),
        **norms,
    )
    remarks += _disagreements(layer, head, kind, config, named)
    return Settings(
        config=config,
        layers=layers,
        passed_on=layer.picked(_PASSED_ON),
        verifier=head.inner("speculators_config").inner("verifier").text("name_or_path"),
        remarks=tuple(remarks),
    )


def _check_supported(layer: Section, head: Section) -> None:
    if layer.text("hidden_act") not in (None, "silu"):
        raise layer.mismatch("hidden_act", "'silu'")
    if layer.flag("mlp_bias"):
        raise layer.mismatch("mlp_bias", "false")
    if any(kind != "full_attention" for kind in layer.texts("layer_types")):
        raise layer.mismatch("layer_types", "full_attention alone")
    if head.flag("use_aux_hidden_state") is False:
        raise head.mismatch("use_aux_hidden_state", "true")
    for key in ("rope_parameters", "rope_scaling"):
        if any(isinstance(value, Mapping) for value in layer.content(key).values()):
            raise layer.mismatch(key, "settings of the one layer, not of kinds of layers")


def _llama(layer: Section) -> LlamaConfig:
    """Let transformers read the keys of a decoder layer and fill in its defaults."""
    for key in _LLAMA_SIZES:
        layer.optional_integer(key)
    for key in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        layer.integer(key)
    for key in ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "max_position_embeddings"):
        layer.number(key)
    try:
        return LlamaConfig(**layer.picked((*_LLAMA_SIZES, "rms_norm_eps", *_LLAMA_ROPE)))
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        keys = layer.picked(("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps"))
        expected = f"settings of a Llama layer ({error})"
        raise DrafterMismatch("config.json", keys, expected) from error


def _stored_layers(layer: Section, head: Section, kind: Format) -> StoredLayers:
    stated = layer.text(NUMBERING)
    if stated is not None and stated not in set(Numbering):
        raise layer.mismatch(NUMBERING, one_of(Numbering))
    return StoredLayers(
        head.integers(LAYER_IDS), None if stated is None else Numbering(stated), kind
    )


def _stand_in(head: Section, layers: StoredLayers) -> tuple[int, ...]:
    """Return as many layer numbers as the head reads, three where nothing says."""
    said = head.optional_integer("num_aux_hidden_states")
    number = len(layers.ids) if layers.ids is not None else said or 3
    if said not in (None, number):
        raise head.mismatch("num_aux_hidden_states", f"{number}, as {LAYER_IDS} has")
    return tuple(range(1, number + 1))


def _attention(layer: Section, kind: Format, named: NamedTensors) -> dict[str, bool]:
    """Read how attention departs from Llama's; the tensors decide where no key says.

    In speculators' format norms belong to a Qwen3 layer, and biases to any, for all its attention.
    """
    if not kind.nested:
        # Configurations copied from a target may say attention_bias, which means the target's.
        said = layer.flag("qkv_bias")
        return {
            "qkv_bias": named.has_attention_bias("qkv") if said is None else said,
            "o_bias": named.has_attention_bias("o"),
            "qk_norm": named.has_attention_norm,
        }
    biases = bool(layer.flag("attention_bias"))
    model_type = layer.text("model_type")
    if model_type not in (None, "llama", "qwen3"):
        # Qwen3-Next, say, counts the weights of its norms from zero.
        raise layer.mismatch("model_type", "'llama' or 'qwen3'")
    qk_norm = named.has_attention_norm if model_type is None else model_type == "qwen3"
    return {"qkv_bias": biases, "o_bias": biases, "qk_norm": qk_norm}


def _norms(head: Section, named: NamedTensors) -> tuple[dict[str, bool], list[Remark]]:
    """Read the norms of an EAGLE-3 head; tensors decide where config.json does not say."""
    fc_norm = head.flag("fc_norm")
    said = {
        "norm_before_fc": head.flag("norm_before_fc"),
        "fc_norm": head.flag("use_aux_norm") if fc_norm is None else fc_norm,
    }
    there = {
        "norm_before_fc": "input_norm.weight" in named.tensors,
        "fc_norm": any(name.startswith("fc_norm.") for name in named.tensors),
    }
    norms = {key: there[key] if value is None else value for key, value in said.items()}
    norms |= {key: bool(head.flag(key)) for key in ("norm_before_residual", "norm_output")}
    text = "{} is true, as its tensors are there; config.json does not say"
    assumed = [key for key, value in said.items() if value is None and there[key]]
    return norms, [Remark(RemarkKind.ASSUMED, text.format(key)) for key in assumed]


def _disagreements(
    layer: Section, head: Section, kind: Format, config: EagleHeadConfig, named: NamedTensors
) -> list[Remark]:
    """Return remarks on what the file leaves open, and on what other engines would make of it."""
    eagle1, eagle3 = config.arch is Arch.EAGLE1, config.arch is Arch.EAGLE3
    layers = layer.optional_integer("num_hidden_layers")
    found: dict[RemarkKind, dict[str, bool | None]] = {
        RemarkKind.ASSUMED: {
            "norm_output is true: the normed state is fed back, as SGLang does; SpecForge, whose "
            "key of that name concerns logits alone, trains with the state before the norm": (
                config.norm_output and not kind.nested
            ),
            "norm_before_residual is false, the default of speculators' configurations; "
            "config.json does not say, and vLLM would take it as true": (
                kind.nested and head.flag("norm_before_residual") is None
            ),
        },
        RemarkKind.WARNING: {
            "fc has a bias, which vLLM would not load": eagle1 and config.fc_bias,
            "fc has no bias; SGLang builds one all the same and leaves it as it starts (exports "
            "to sglang carry zeros)": eagle1 and FC_BIAS not in named.tensors,
            "bias is true, which SGLang and vLLM take for biases of attention too; these they "
            "leave unset": head.flag("bias"),
            "fc has a bias, which EAGLE and vLLM would not load": eagle3 and config.fc_bias,
            "tie_word_embeddings is true; the head's own lm_head.weight is used here, SGLang would "
            "use the embedding and draft noise": eagle3 and layer.flag("tie_word_embeddings"),
        },
        RemarkKind.NOTE: {
            f"num_hidden_layers is {layers}; the one layer there is counts": layers not in (None, 1)
        },
    }
    return [Remark(k, text) for k, texts in found.items() for text, holds in texts.items() if holds]
