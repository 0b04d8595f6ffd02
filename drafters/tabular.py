"""A drafter that looks its distributions up in a table, by the last few tokens.

A table of order 1 is a bigram model: the yardstick that any head must beat, as it knows nothing but
the last token. The tensors in its file are called ``ids`` and ``log_probs``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from eaglegbv.drafters.base import ReplayingDrafter, SequenceDrafter, own_snapshots
from eaglegbv.drafters.draft_probs import DraftProbs, ProbsSettings, replayed_probs
from eaglegbv.drafters.files import DrafterFiles, LoadedTarget, Opening
from eaglegbv.drafters.formats.read import SAFETENSORS, read_json, read_weights
from eaglegbv.errors import DrafterMismatch
from eaglegbv.request import DraftSnapshot, Request

TABULAR = "eaglegbv-tabular"  # the `model_type` of a table's configuration


@dataclass(frozen=True, slots=True)
class LookupTable:
    """Distributions of the next token by state: the last ``order`` tokens, read as a number.

    The latest token is the least significant digit. In a sequence shorter than ``order``, token
    ``vocab_size`` stands for each missing one.
    """

    vocab_size: int  # number of tokens, V
    order: int  # tokens of a state
    ids: Tensor  # [(V + 1) ** order, width] int64
    # [(V + 1) ** order, width] float32, logarithms of probabilities or of weights; -inf at padding.
    # Ids that are not listed count as -inf.
    log_probs: Tensor

    def __post_init__(self) -> None:
        states = (self.vocab_size + 1) ** self.order
        for name, tensor in (("ids", self.ids), ("log_probs", self.log_probs)):
            if tensor.dim() != 2 or tensor.shape[0] != states or tensor.shape != self.ids.shape:
                raise DrafterMismatch(name, list(tensor.shape), f"{states} rows of one width")
        if not bool(((self.ids >= 0) & (self.ids < self.vocab_size)).all()):
            raise DrafterMismatch("ids", int(self.ids.max()), f"ids in [0, {self.vocab_size})")
        # Rows without any token, or with NaN, have no distribution.
        if not bool(self.log_probs.amax(dim=1).isfinite().all()):
            raise DrafterMismatch("log_probs", "no finite entry", "a finite entry in every row")

    def logits(self, states: Sequence[int]) -> Tensor:
        """Return ``[states, vocab_size]`` float32."""
        device = self.log_probs.device
        rows = torch.tensor(states, dtype=torch.int64, device=device)
        dense = torch.full((len(states), self.vocab_size), -torch.inf, device=device)
        # The largest, as padding may repeat an id that is listed.
        return dense.scatter_reduce(1, self.ids[rows], self.log_probs[rows], "amax")

    def state(self, tokens: Sequence[int]) -> int:
        """Return the state of a sequence, given its last ``order`` tokens or more."""
        known = list(tokens[-self.order :])
        state = 0
        for token in [self.vocab_size] * (self.order - len(known)) + known:
            state = state * (self.vocab_size + 1) + token
        return state

    def save(self, folder: Path, **facts: object) -> None:
        """Write the table to ``folder``, with ``facts`` about it in its configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"ids": self.ids.int().contiguous(), "log_probs": self.log_probs.contiguous()}
        save_file(tensors, folder / SAFETENSORS, metadata={"format": "pt"})
        config = {"model_type": TABULAR, "vocab_size": self.vocab_size, "order": self.order}
        (folder / "config.json").write_text(json.dumps(config | facts, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int, device: torch.device | str = "cpu") -> Self:
        """Read the table in ``folder``.

        Raises:
            DrafterMismatch: A file is missing or broken, or its vocabulary is not the target's,
                ``vocab_size``.
        """
        config = read_json(folder / "config.json")
        tensors = read_weights(folder).tensors
        if config.get("vocab_size") != vocab_size:
            expected = f"the target's, {vocab_size}"
            raise DrafterMismatch("config.json key vocab_size", config.get("vocab_size"), expected)
        order = config.get("order")
        if not isinstance(order, int) or order < 1:
            raise DrafterMismatch("config.json key order", order, "an integer of at least 1")
        for name, dtype in (("ids", torch.int32), ("log_probs", torch.float32)):
            if name not in tensors or tensors[name].dtype != dtype:
                dtype_stored = tensors[name].dtype if name in tensors else None
                raise DrafterMismatch(name, dtype_stored, f"a tensor of {dtype}")
        ids = tensors["ids"].long().to(device)
        log_probs = tensors["log_probs"].to(device)
        return cls(vocab_size, order, ids, log_probs)


@dataclass(frozen=True, slots=True)
class TabularSnapshot(DraftSnapshot):
    """A place in a sequence: its last tokens, and the settings of the step it belongs to."""

    tokens: tuple[int, ...]
    settings: ProbsSettings


class TabularDrafter(SequenceDrafter, ReplayingDrafter):
    """Drafts from a :class:`LookupTable`."""

    def __init__(self, table: LookupTable) -> None:
        self.table = table
        self.order = table.order

    def logits(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Look the sequences' last tokens up; see :meth:`SequenceDrafter.logits`."""
        return self.table.logits([self.table.state(sequence) for sequence in sequences])

    def snapshot(self, request: Request) -> TabularSnapshot:
        """Remember the root; see :meth:`DraftReplay.snapshot`."""
        settings = ProbsSettings.of(request, self.table.vocab_size)
        return TabularSnapshot(self.last_tokens(request), settings)

    def advance(
        self,
        requests: Sequence[Request],  # noqa: ARG002
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,  # noqa: ARG002
    ) -> list[DraftSnapshot]:
        """Append a token to each; see :meth:`DraftReplay.advance`."""
        steps = own_snapshots(snapshots, TabularSnapshot)
        return [
            replace(s, tokens=(*s.tokens, token)[-self.table.order :])
            for s, token in zip(steps, tokens.tolist(), strict=True)
        ]

    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """Return the distributions of the snapshots' steps; see :meth:`DraftReplay.probs_at`."""
        steps = own_snapshots(snapshots, TabularSnapshot)
        logits = self.logits([step.tokens for step in steps])
        ids = torch.arange(logits.shape[1], device=logits.device)
        return replayed_probs(logits, [step.settings for step in steps], ids)


class TabularFiles(DrafterFiles):
    """A folder with a :class:`LookupTable`."""

    name = "a table"
    drafter = TabularDrafter

    @classmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        """Return whether the configuration names a table."""
        del folder
        return config.get("model_type") == TABULAR

    def __init__(self, folder: Path, opening: Opening) -> None:
        self._folder = folder
        self._device = opening.device

    def open(self, target: LoadedTarget) -> TabularDrafter:
        """Read the table; see :meth:`DrafterFiles.open`."""
        table = LookupTable.load(self._folder, vocab_size=target.vocab_size, device=self._device)
        return TabularDrafter(table)
