"""Drafters that are stored in folders: read before their target is loaded, made once it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eaglegbv.config import GraphMode
from eaglegbv.cuda_graphs import Recorder
from eaglegbv.drafters.base import Drafter
from eaglegbv.output_layer import OutputLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a target and its drafter are opened, as a user has it."""

    model: str | Path
    """The target's folder or hub name."""
    drafter: str
    """What the user calls the drafter, in errors."""
    read_config: Callable[[str | Path], PreTrainedConfig]
    """Reads a model's configuration."""
    dtype: torch.dtype
    device: torch.device
    graphs: GraphMode = GraphMode.OFF
    trust_remote_code: bool = False
    self_check: bool = True
    native: bool = True
    """Whether forwards may run in the native library."""


class LoadedTarget(Protocol):
    """What a drafter may take of its target."""

    vocab_size: int
    max_context: int
    recorder: Recorder | None

    @property
    def max_slots(self) -> int:
        """Number of slots of the KV pool, by which the drafter's own is numbered."""

    @property
    def input_embeddings(self) -> Tensor:
        """``[vocab, hidden]``."""

    def output_layer(self) -> OutputLayer:
        """Return the layer that makes logits; ModelNotSupported where it cannot be shared."""


class DrafterFiles(ABC):
    """The files of a drafter in a folder, checked against their target's configuration.

    Attributes:
        features: The hidden states of the target that the drafter reads: numbers of the layers
            whose inputs they are, or :data:`eaglegbv.output_layer.FINAL`.
        slot_bytes: Bytes that a token takes in a KV pool of the drafter's own.
    """

    name: ClassVar[str]
    """What a message calls such a folder: "a language model"."""
    drafter: ClassVar[type[Drafter]]
    features: tuple[int, ...] = ()
    slot_bytes: int = 0

    @classmethod
    @abstractmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        """Return whether the files in ``folder``, with this config.json, are of this kind."""

    @abstractmethod
    def __init__(self, folder: Path, opening: Opening) -> None:
        """Read what can be checked before the target is loaded.

        Raises:
            DrafterMismatch: The files are broken, or do not fit the target.
        """

    @abstractmethod
    def open(self, target: LoadedTarget) -> Drafter:
        """Load the drafter; errors are those of construction."""
