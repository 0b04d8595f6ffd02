"""What a head's files say, what was assumed, and where engines would disagree about them."""

from collections import Counter
from dataclasses import dataclass

from eaglegbv.devices import dtype_name
from eaglegbv.drafters.checkpoint import Checkpoint, Fit
from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig
from eaglegbv.drafters.formats.base import VARIANTS
from eaglegbv.drafters.formats.layers import FeatureLayers
from eaglegbv.drafters.formats.names import EMBEDDING, MEMBERS, OFFSETS
from eaglegbv.drafters.formats.remark import Remark, RemarkKind

_WORDS = {
    RemarkKind.NOTE: "Notes",
    RemarkKind.ASSUMED: "Assumed, as the files leave it open",
    RemarkKind.WARNING: "Warnings: other engines read these files otherwise",
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """A report on a head.

    Attributes:
        facts: What was detected, by label.
        remarks: What was assumed, and what other engines would do otherwise.
    """

    facts: dict[str, str]
    remarks: tuple[Remark, ...]

    def text(self) -> str:
        """Return the report as lines."""
        width = max(map(len, self.facts)) + 2
        lines = [f"{label:<{width}}{fact}" for label, fact in self.facts.items()]
        for kind, words in _WORDS.items():
            own = [f"  - {remark.text}" for remark in self.remarks if remark.kind is kind]
            lines += ["", f"{words}:", *own] if own else []
        return "\n".join(lines)


def inspect_head(checkpoint: Checkpoint, fitted: Fit | None) -> Inspection:
    """Report on a checkpoint; ``fitted`` is None where no target is known."""
    config = checkpoint.config
    layers, remarks = _layers_alone(checkpoint), checkpoint.remarks
    if fitted is not None:
        layers, remarks = fitted.layers, fitted.remarks
    elif layers is not None:
        remarks = (*remarks, *layers.remarks())
    facts = {
        "drafter": f"{checkpoint.folder} ({', '.join(checkpoint.files)})",
        "head": _KINDS[config.arch],
        "format": f"{checkpoint.format}; architectures: {_list(checkpoint.architectures)}",
        "tensors": _tensors(checkpoint),
        "layer": _layer(config),
        "biases": _list(_variants(config, "bias")),
        "norms": _list(_variants(config, "norm")),
        "rope": _rope(config),
        "vocabulary": _vocabulary(config),
        "embedding": _embedding(checkpoint),
        "captures": _captures(checkpoint, layers),
    }
    if checkpoint.verifier is not None:
        facts["made for"] = checkpoint.verifier
    left = [f"{name} ({why})" for name, why in checkpoint.named.left_aside.items()]
    if left:
        facts["left aside"] = _list(left)
    facts["target"] = "not given: sizes and layers were not checked" if fitted is None else "fits"
    return Inspection(facts, remarks)


_KINDS = {
    Arch.EAGLE1: "EAGLE-1 (the weights of EAGLE-2 are the same)",
    Arch.EAGLE3: "EAGLE-3",
}


def _list(words: object) -> str:
    return ", ".join(words) or "none" if isinstance(words, list | tuple) else str(words)


def _variants(config: EagleHeadConfig, part: str) -> list[str]:
    return sorted(name for name in VARIANTS if part in name and getattr(config, name))


def _tensors(checkpoint: Checkpoint) -> str:
    maps = (OFFSETS, MEMBERS)
    weights = [t for name, t in checkpoint.named.tensors.items() if name not in maps]
    dtypes = Counter(dtype_name(t.dtype) for t in weights)
    own = sum(t.numel() for t in weights)
    return f"{len(checkpoint.named.tensors)}, {own:,} weights, {_list(sorted(dtypes))}"


def _layer(config: EagleHeadConfig) -> str:
    width = str(config.hidden_size)
    if config.hidden_size != config.target_hidden_size:
        width += f" (target {config.target_hidden_size})"
    return (
        f"width {width}, feed-forward {config.intermediate_size}, {config.num_heads} query heads "
        f"and {config.num_kv_heads} key heads of {config.head_dim}"
    )


def _rope(config: EagleHeadConfig) -> str:
    settings = dict(config.rope_parameters)
    kind, theta = settings.pop("rope_type"), settings.pop("rope_theta")
    rest = "".join(f", {key} {value}" for key, value in sorted(settings.items()))
    return f"{kind}, theta {theta:g}{rest}"


def _vocabulary(config: EagleHeadConfig) -> str:
    if config.draft_vocab_size == config.vocab_size:
        return f"{config.vocab_size}, all of which can be drafted"
    share = config.draft_vocab_size / config.vocab_size
    return f"{config.draft_vocab_size} of {config.vocab_size} can be drafted ({share:.0%})"


def _embedding(checkpoint: Checkpoint) -> str:
    if EMBEDDING in checkpoint.named.tensors:
        return "in the file; shared with the target where it is the same"
    return "the target's"


def _layers_alone(checkpoint: Checkpoint) -> FeatureLayers | None:
    """Return the layers that the file alone determines."""
    return None if checkpoint.layers is None else checkpoint.layers.resolve(None)


def _captures(checkpoint: Checkpoint, layers: FeatureLayers | None) -> str:
    if checkpoint.layers is None:
        return "the final hidden state, after the last norm"
    if layers is None:
        return "the inputs of layers 2, L // 2 and L - 3 of a target of L layers (no ids given)"
    return f"the inputs of layers {_list([str(i) for i in layers.inputs])} ({layers.reason})"
