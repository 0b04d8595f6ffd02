"""What a head is trained on: runs of the target over texts, made as needed or kept in memory."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from eaglegbv.drafters.training.data import (
    Corpus,
    documents_to_fill,
    draw_documents,
    fill_rows,
    pack,
)
from eaglegbv.drafters.training.unroll import TargetRun
from eaglegbv.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target, and what a head reads of it.

    Attributes:
        model: The target, not trained.
        feature_layers: Layers whose inputs are the features; empty for the last hidden state.
        window: Tokens of a row.
    """

    model: PreTrainedModel
    feature_layers: tuple[int, ...]
    window: int

    @torch.no_grad()
    def run(self, corpus: Corpus, documents: Tensor) -> TargetRun:
        """Run the target over ``documents`` ``[rows, number]``, each row's laid end to end.

        Rows are cut at the window, and are no longer than the longest one needs.
        """
        window = min(self.window, int(corpus.lengths[documents].sum(dim=1).max()))
        rows = pack(corpus, documents, window)
        out = self.model(input_ids=rows.token_ids, output_hidden_states=True, use_cache=False)
        final = out.hidden_states[-1]
        features = [out.hidden_states[i] for i in self.feature_layers] or [final]
        return TargetRun(
            token_ids=rows.token_ids,
            is_response=rows.is_response,
            features=torch.cat(features, dim=-1).float(),
            final_hidden=final,
            logits=out.logits,
        )

    @torch.no_grad()
    def logits(self, final_hidden: Tensor) -> Tensor:
        """Return what the output layer makes of last hidden states, ``[..., vocab]``."""
        weight = self.model.get_output_embeddings().get_parameter("weight")
        return functional.linear(final_hidden.to(weight.dtype), weight)


class Runs(ABC):
    """Batches of the target's runs over texts to train on."""

    @abstractmethod
    def draw(self, seed: int) -> TargetRun:
        """Return the batch of ``seed``."""


@dataclass(frozen=True, slots=True)
class FreshRuns(Runs):
    """The target's runs over texts that are drawn anew for every batch.

    Attributes:
        target: The target.
        corpus: The texts.
        weights: ``[documents]`` float64, how often a text is drawn.
        batch: Rows of a batch.
    """

    target: FrozenTarget
    corpus: Corpus
    weights: Tensor
    batch: int

    def draw(self, seed: int) -> TargetRun:
        """Draw texts and run the target over them."""
        shape = self.batch, documents_to_fill(self.target.window)
        return self.target.run(self.corpus, draw_documents(self.weights, shape, seed))


@dataclass(frozen=True, slots=True)
class KeptRuns(Runs):
    """One run over every text, kept in memory: a batch costs no forward of the target.

    Features and last hidden states are kept in bfloat16, ``2 * (F + target_hidden)`` bytes a token;
    logits are computed again from the latter.

    Attributes:
        target: The target.
        token_ids: ``[rows, window]`` int64.
        is_response: ``[rows, window]`` bool.
        features: ``[rows, window, F]`` bfloat16.
        final_hidden: ``[rows, window, target_hidden]`` bfloat16.
        batch: Rows of a batch.
    """

    target: FrozenTarget
    token_ids: Tensor
    is_response: Tensor
    features: Tensor
    final_hidden: Tensor
    batch: int

    @classmethod
    def over(cls, target: FrozenTarget, corpus: Corpus, *, batch: int, seed: int) -> Self:
        """Run the target over all of ``corpus``.

        Args:
            target: The target.
            corpus: Texts no longer than its window.
            batch: Rows of a batch.
            seed: Seed of which texts share a row.

        Raises:
            InvalidArgument: The target's logits are more than its output layer's product.
        """
        rows = fill_rows(corpus.lengths, target.window, seed)
        shape, device = (len(rows), target.window), corpus.lengths.device
        first = target.run(corpus, rows[:1])
        _check_output_layer(target, first)
        kept = cls(
            target=target,
            token_ids=torch.zeros(shape, dtype=torch.int64, device=device),
            is_response=torch.zeros(shape, dtype=torch.bool, device=device),
            features=_room(shape, first.features),
            final_hidden=_room(shape, first.final_hidden),
            batch=batch,
        )
        for start in tqdm(range(0, len(rows), batch), desc="target's runs", unit="batch"):
            kept._keep(slice(start, start + batch), target.run(corpus, rows[start : start + batch]))
        return kept

    def _keep(self, rows: slice, run: TargetRun) -> None:
        columns = slice(run.token_ids.shape[1])
        self.token_ids[rows, columns] = run.token_ids
        self.is_response[rows, columns] = run.is_response
        self.features[rows, columns] = run.features.to(self.features.dtype)
        self.final_hidden[rows, columns] = run.final_hidden.to(self.final_hidden.dtype)

    def draw(self, seed: int) -> TargetRun:
        """Draw rows, each at most once."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.token_ids), generator=generator)
        rows = order[: self.batch].to(self.token_ids.device)
        final_hidden = self.final_hidden[rows]
        return TargetRun(
            token_ids=self.token_ids[rows],
            is_response=self.is_response[rows],
            features=self.features[rows].float(),
            final_hidden=final_hidden.float(),
            logits=self.target.logits(final_hidden),
        )


def _room(shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.zeros((*shape, like.shape[-1]), dtype=torch.bfloat16, device=like.device)


def _check_output_layer(target: FrozenTarget, run: TargetRun) -> None:
    again = target.logits(run.final_hidden)
    if not torch.allclose(again, run.logits, rtol=1e-2, atol=1e-2):
        raise InvalidArgument(
            "keep_runs", True, "a target whose logits are its output layer's product, not capped"
        )
