"""A drafter that gives all levels in one forward, as published ones do: the smallest there is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.cuda_graphs import Recorder
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.files import DrafterFiles, LoadedTarget, Opening
from eaglegbv.drafters.graph_drafting import DeviceDrafting
from eaglegbv.drafters.host_drafting import DraftCall, NewRows, draft_trees
from eaglegbv.drafters.tree_growth import Frontier, LevelTable
from eaglegbv.request import Request
from eaglegbv.tree import DraftTree

DEPTH = 4


class BlockDrafter(Drafter):
    """Logits of depth d: a row of the block that the last token gives, and a term of the parent."""

    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)

    def __init__(self, vocab: int, *, recorder: Recorder | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block = torch.randn((vocab, DEPTH, vocab), generator=generator)
        self.after = torch.randn((vocab, vocab), generator=generator)
        self.forwards = 0
        self.recorded: DeviceDrafting | None = None
        if recorder is not None:
            ids = torch.arange(vocab)
            self.recorded = DeviceDrafting(self._make_levels, ids, recorder)
            self.graph_counts = self.recorded.counts

    def _make_levels(self, requests: int, table: LevelTable) -> "BlockLevels":
        assert table.plan.depth <= DEPTH
        return BlockLevels(self, requests)

    def forward(self, roots: Tensor) -> Tensor:
        """The one forward: ``[requests, DEPTH, vocab]``."""
        self.forwards += 1
        return self.block[roots]

    def shareable(self, request: Request) -> int:
        return request.context

    def draft(self, call: DraftCall) -> DraftTree:
        if self.recorded is not None:
            tree = self.recorded.draft(call)
            if tree is not None:
                return tree
        roots = torch.tensor([request.token_ids[-1] for request in call.requests])
        levels = self.forward(roots).unbind(1)
        owners, depth = torch.arange(len(roots)), 0

        def follow(rows: NewRows) -> Tensor:
            nonlocal owners, depth
            owners, depth = owners[rows.parents], depth + 1
            return levels[depth][owners] + self.after[rows.token_ids]

        logits = levels[0] + self.after[roots]
        return draft_trees(call, torch.arange(logits.shape[1]), logits, follow)


class BlockLevels:
    """Its part in recorded drafts."""

    def __init__(self, drafter: BlockDrafter, requests: int) -> None:
        self._drafter = drafter
        self._roots = torch.zeros(requests, dtype=torch.int64)
        self._block = torch.empty(0)

    def load(self, call: DraftCall) -> None:
        tokens = [request.token_ids[-1] for request in call.requests]
        self._roots[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def start(self) -> Tensor:
        self._block = self._drafter.forward(self._roots)
        return self._block[:, 0] + self._drafter.after[self._roots]

    def step(self, depth: int, rows: Frontier) -> Tensor:
        logits = self._block[:, depth].unsqueeze(1) + self._drafter.after[rows.token_ids]
        return logits.flatten(0, 1)


class BlockFiles(DrafterFiles):
    """A folder whose configuration names it, and a seed in place of weights."""

    name = "a block drafter"
    drafter = BlockDrafter

    @classmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "test-block"

    def __init__(self, folder: Path, opening: Opening) -> None:
        self._seed = json.loads((folder / "config.json").read_text())["seed"]
        self.graphs = opening.graphs

    def open(self, target: LoadedTarget) -> BlockDrafter:
        return BlockDrafter(target.vocab_size, recorder=target.recorder, seed=self._seed)
