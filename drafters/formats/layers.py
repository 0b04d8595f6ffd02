"""Which target layers EAGLE-3 reads: two ways to count them, off by one.

EAGLE, vLLM and speculators number what a layer reads: id i is the *input* of layer i. SGLang and
SpecForge number what it writes: id i is the *output* of layer i, which is the input of layer i + 1.
Both write the same key, and nothing in a file says which is meant. Where the key is missing, all
read the same layers, the inputs of 2, L // 2 and L - 3 of a target of L layers.
"""

from dataclasses import dataclass
from enum import StrEnum

from eaglegbv.drafters.eagle_head_config import default_feature_layers
from eaglegbv.drafters.formats.remark import Remark, RemarkKind
from eaglegbv.errors import DrafterMismatch

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
