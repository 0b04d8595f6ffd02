"""Names of tensors: one set inside this package, several in files."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.errors import DrafterMismatch

EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
OFFSETS = "d2t"  # `[draft_vocab]` int64: target id minus draft id
MEMBERS = "t2d"  # `[vocab]` bool: which target ids the draft vocabulary holds
LAYER = "layer."  # what the decoder layer's tensors begin with inside this package
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_MODEL = "model."
_RENAMED = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
_LEFT_ASIDE = {
    "verifier_norm.weight": "the target's own is used",
    "verifier_lm_head.weight": "the target's own is used",
    "layer.self_attn.rotary_emb.inv_freq": "computed from config.json",
    "rotary_emb.inv_freq": "computed from config.json",
}


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors of a head by the names that are used inside this package."""

    tensors: dict[str, Tensor]  # those in use
    stored: dict[str, str]  # the names they have in the file
    layer_prefix: str  # what the names of the decoder layer begin with in the file
    left_aside: Mapping[str, str]  # names in the file that are known but not needed, and why

    @property
    def has_attention_norm(self) -> bool:
        """Whether queries or keys have a norm."""
        return any(
            name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight"))
            for name in self.tensors
        )

    def has_attention_bias(self, parts: str) -> bool:
        """Return whether one of the projections ``parts``, of "qkvo", has a bias."""
        return any(f"layer.self_attn.{part}_proj.bias" in self.tensors for part in parts)

    def shown(self, name: str) -> str:
        """Return what ``name`` is called, or would be called, in the file."""
        if name in self.stored:
            return self.stored[name]
        inner = name.removeprefix(LAYER)
        return name if inner == name else self.layer_prefix + inner


def name_tensors(tensors: Mapping[str, Tensor], file: str) -> NamedTensors:
    """Give tensors their names inside this package.

    Raises:
        DrafterMismatch: Two tensors mean the same, or they are not those of a head.
    """
    prefixes = {p for p in _LAYER_PREFIXES if any(_plain(n).startswith(p) for n in tensors)}
    if len(prefixes) != 1 or not any(_plain(name) == "fc.weight" for name in tensors):
        expected = "an EAGLE head: fc.weight and one layer, named midlayer.* or layers.0.*"
        raise DrafterMismatch(file, sorted(tensors)[:5], expected)
    [prefix] = prefixes
    kept: dict[str, Tensor] = {}
    stored: dict[str, str] = {}
    left_aside: dict[str, str] = {}
    for name, tensor in tensors.items():
        known = _RENAMED.get(_plain(name), _plain(name))
        if known.startswith(prefix):
            known = LAYER + known.removeprefix(prefix)
        if known in _LEFT_ASIDE:
            left_aside[name] = _LEFT_ASIDE[known]
            continue
        if known in kept:
            raise DrafterMismatch(name, stored[known], "a single tensor of this meaning")
        kept[known] = tensor
        stored[known] = name
    return NamedTensors(kept, stored, prefix, left_aside)


def detect_arch(named: NamedTensors) -> Arch:
    """Tell which head has these tensors.

    EAGLE-3's layer reads an embedding and a state side by side, EAGLE-1's their projection.
    """
    names = named.tensors
    marks = ("layer.hidden_norm.weight", "layer.input_layernorm.weight", OFFSETS)
    if named.layer_prefix == "midlayer." or any(mark in names for mark in marks):
        return Arch.EAGLE3
    query = names.get("layer.self_attn.q_proj.weight")
    fusion = names["fc.weight"]
    if query is not None and query.ndim == 2 and query.shape[1] == 2 * len(fusion):
        return Arch.EAGLE3
    return Arch.EAGLE1


def _plain(name: str) -> str:
    return name.removeprefix(_MODEL)


class RemarkKind(StrEnum):
    """What a remark is about."""

    NOTE = "note"  # nothing to worry about
    ASSUMED = "assumed"  # how the files were read where they leave something open
    WARNING = "warning"  # how another engine would read the files


@dataclass(frozen=True, slots=True)
class Remark:
    """Something a user should know about a head's files."""

    kind: RemarkKind
    text: str
