"""A part of a config.json, read with the expected types."""

import json
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig

from eaglegbv.devices import dtype_name
from eaglegbv.drafters.eagle_model import Arch, EagleHeadConfig, default_feature_layers
from eaglegbv.drafters.formats.names import FC_BIAS, LAYER, NamedTensors, Remark, RemarkKind
from eaglegbv.errors import DrafterMismatch, InvalidArgument, one_of


class Section:
    """Keys of a JSON object; a value of another type is an error that names its key.

    A missing key and a null one count as the same.
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
        """Return a positive integer or None."""
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.mismatch(key, "a positive integer")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return one or more integers from 0, or None."""
        value = self._content.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or not value
            or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in value)
        ):
            raise self.mismatch(key, "a list of integers from 0")
        return tuple(value)

    def flag(self, key: str) -> bool | None:
        """Return true, false or None."""
        value = self._content.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.mismatch(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """Return a string or None."""
        value = self._content.get(key)
        if value is not None and not isinstance(value, str):
            raise self.mismatch(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return strings; none where the key is missing."""
        value = self._content.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
            raise self.mismatch(key, "a list of strings")
        return tuple(value)

    def inner(self, key: str) -> "Section":
        """Return an object inside this one; an empty one where the key is missing."""
        return Section(self._object(key), f"{self._path}{key}.")

    def merged(self, key: str) -> "Section":
        """Return this section with the keys of the object ``key`` laid over it.

        Raises:
            DrafterMismatch: Both have a key, with different values.
        """
        over = self._object(key)
        for name, value in over.items():
            if value is not None and self._content.get(name) not in (None, value):
                raise self.mismatch(name, f"{value!r}, as in {key}")
        kept = {name: value for name, value in over.items() if value is not None}
        return Section({**self._content, **kept}, self._path)

    def picked(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return those of ``keys`` that are there, as they are."""
        return {key: value for key in keys if (value := self._content.get(key)) is not None}

    def mismatch(self, key: str, expected: str) -> DrafterMismatch:
        """Return the error that the value of ``key`` is not as expected."""
        return DrafterMismatch(
            f"config.json key {self._path}{key}", self._content.get(key), expected
        )

    def _object(self, key: str) -> Mapping[str, Any]:
        value = self._content.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.mismatch(key, "an object")
        return value


# The tensors of a folder, from safetensors or from what ``torch.save`` wrote, whole or sharded.


SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"


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
        for key, tensor in _read_file(folder / name).items():
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
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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


def _read_file(path: Path) -> dict[str, Tensor]:
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickled(path)


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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        expected = f"a complete file of tensors alone ({reason})"
        raise DrafterMismatch("drafter", str(path), expected) from error
    if not isinstance(content, dict):
        raise DrafterMismatch("drafter", str(path), "a dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DrafterMismatch(str(name), type(tensor).__name__, f"a tensor in {path.name}")
    return {name: tensor.detach() for name, tensor in content.items()}


# Which target layers EAGLE-3 reads: two ways to count them, off by one.
#
# EAGLE, vLLM and speculators number what a layer reads: id i is the *input* of layer i. SGLang and
# SpecForge number what it writes: id i is the *output* of layer i, which is the input of layer i + 1.
# Both write the same key, and nothing in a file says which is meant. Where the key is missing, all
# read the same layers, the inputs of 2, L // 2 and L - 3 of a target of L layers.


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUMBERING = "layer_ids_are"
"""A key of this package beside the ids, ``inputs`` or ``outputs``; other engines ignore it."""


class Numbering(StrEnum):
    """What a layer id stands for."""

    INPUTS = "inputs"
    """The input of the layer of that number (EAGLE, vLLM, speculators)."""
    OUTPUTS = "outputs"
    """The output of the layer of that number (SGLang, SpecForge)."""

    @property
    def engines(self) -> str:
        """The engines that count this way."""
        return _ENGINES[self]

    @property
    def shift(self) -> int:
        """The offset from an id to the number of the layer whose input is meant."""
        return 0 if self is Numbering.INPUTS else 1


_ENGINES = {
    Numbering.INPUTS: "EAGLE, vLLM and speculators",
    Numbering.OUTPUTS: "SGLang and SpecForge",
}


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """The layer ids of a file.

    Attributes:
        ids: As stored; None where there are none.
        stated: What :data:`NUMBERING` says; None where it is missing.
        fallback: The numbering assumed where nothing tells.
        engine: The engines that count by ``fallback``.
    """

    ids: tuple[int, ...] | None
    stated: Numbering | None
    fallback: Numbering
    engine: str

    def resolve(self, num_layers: int | None) -> "FeatureLayers | None":
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
        numbering = self.stated or recognised or self.fallback
        inputs = tuple(layer + numbering.shift for layer in self.ids)
        said = f"config.json says {list(self.ids)}"
        if self.stated is not None:
            reason = f"{said} and that these are {numbering}"
        elif recognised is not None:
            reason = f"{said}, the usual layers if these are {numbering}"
        else:
            reason = f"{said}, taken as {numbering}, the habit of {self.engine}"
        return FeatureLayers(inputs, reason, numbering, guessed=not (self.stated or recognised))


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
        for layer in self.inputs:
            if not 0 < layer < num_layers:
                expected = f"inputs of layers from 1 to {num_layers - 1} of the target"
                raise DrafterMismatch(LAYER_IDS, self.inputs, f"{expected} ({self.reason})")


def _recognise(ids: tuple[int, ...], num_layers: int | None) -> Numbering | None:
    """Return the numbering by which these are the usual layers; None if there is none.

    Where the target's depth is unknown, the last layer gives it away.
    """
    for numbering in Numbering:
        inputs = tuple(layer + numbering.shift for layer in ids)
        if inputs == default_feature_layers(num_layers or inputs[-1] + 3):
            return numbering
    return None


# The interface of formats: the layout of config.json, names of tensors, and their limits.


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


# A head's configuration from a config.json and the names of the tensors beside it.


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


# The format of the EAGLE repository (SafeAILab/EAGLE), which vLLM reads too.
#
# One flat config.json, whose ``architectures`` are ``LlamaForCausalLM`` for every head. EAGLE-1 and
# EAGLE-2 name their layer ``layers.0``, EAGLE-3 ``midlayer``.


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


# The format SGLang reads and SpecForge exports.
#
# Tensors as in the EAGLE repository; ``architectures`` say which head it is, layer ids number
# outputs, and norms of features and of the state handed on have keys.


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


# The format of speculators (vllm-project/speculators), class ``Eagle3Speculator``.
#
# The decoder layer's settings lie in ``transformer_layer_config``, a configuration of Llama, or of
# Qwen3 for a head that norms queries and keys; the head's own lie beside it. Tensors call the layer
# ``layers.0`` and include the embedding. There is no EAGLE-1.


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


# All formats, and which one a folder is in.


FORMATS: Mapping[FormatName, Format] = MappingProxyType(
    {f.name: f for f in (EagleFormat(), SGLangFormat(), SpeculatorsFormat())}
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

    The formats of SGLang and of the EAGLE repository share tensors and keys, and engines read
    either. They differ in what a layer id means where nothing else tells; the ``architectures``
    matter only for that.
    """
    if LAYER_SECTION in stored:
        return FORMATS[FormatName.SPECULATORS]
    architectures = Section(stored).texts("architectures")
    made_for_sglang = any(
        a.endswith(("ForCausalLMEagle", "ForCausalLMEagle3")) for a in architectures
    )
    own_names = any(
        name.removeprefix("model.").startswith("aux_norm_") for name in named.stored.values()
    )
    if made_for_sglang or own_names:
        return FORMATS[FormatName.SGLANG]
    return FORMATS[FormatName.EAGLE]
