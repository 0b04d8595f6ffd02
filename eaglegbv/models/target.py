"""Interface of targets: next-token logits, and features for the drafter, of packed segments."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

from eaglegbv.attention import Segment, SlotAllocator
from eaglegbv.devices import send
from eaglegbv.output_layer import FINAL as FINAL


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Result of a forward. It is valid until the next forward, which may overwrite it."""

    logits: Tensor  # [rows asked for, vocab] float32, not warped
    # [packed rows, width] in the target's dtype, or None where the target was built with no
    # features.
    features: Tensor | None

    def of_rows(self, rows: Tensor) -> Self:
        """Keep the logits of some rows, ``[rows]`` int64 on the host."""
        if len(rows) == len(self.logits) and torch.equal(rows, torch.arange(len(rows))):
            return self
        return replace(self, logits=self.logits.index_select(0, send(rows, self.logits.device)))


class Target(ABC):
    """A language model that scores packed tree segments over a paged KV pool."""

    vocab_size: int  # number of logits
    max_context: int  # most positions the model handles
    dtype: torch.dtype  # dtype of weights, keys and features
    device: torch.device  # device of the model and its KV pool
    eos_token_ids: frozenset[int]  # tokens that end a sequence
    # Hidden states that `forward` captures for a drafter, concatenated: numbers of the layers whose
    # inputs they are, 1 ... num_layers - 1, or `FINAL`. The input of layer i is the output of layer
    # i - 1, before any final norm.
    features: tuple[int, ...]
    runs_by: str = ""  # what runs its forwards, if there is a choice
    forward_counts: Mapping[str, int] = MappingProxyType({})
    """Number of forwards by what ran them."""
    graph_counts: Mapping[str, int] = MappingProxyType({})
    """Number of forwards that replayed a recording, or by why not; empty without recordings."""
    attention_fallbacks: Mapping[str, int] = MappingProxyType({})
    """Attention calls that fell back to the slower backend, by what the faster one lacks."""
    allocator: SlotAllocator  # owner of the slots, shared with the drafter's pool

    def record(self, requests: int, nodes: int) -> None:
        """Record what steps of up to so many requests, and nodes of each, would record later."""
        del requests, nodes

    @property
    def max_slots(self) -> int:
        """Number of slots of the KV pool."""
        return self.allocator.num_slots

    @abstractmethod
    def forward(
        self, segments: Sequence[Segment], *, logit_rows: Tensor | None = None
    ) -> TargetOutput:
        """Score the new tokens of ``segments`` and write their keys and values to their slots.

        Args:
            segments: One per request; their slots must be taken from :attr:`allocator`.
            logit_rows: ``[rows]`` int64, the packed rows whose logits are wanted (a prefill needs
                only its last row); None for all rows.

        Raises:
            InvalidArgument: ``segments`` is empty.
        """
