"""Log-probabilities of tokens, as users ask for them: the chosen token's, and the largest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import msgspec
import torch
from torch import Tensor

_ROWS = 64  # rows of the vocabulary that are ranked at a time, as prompts have many


class Logprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token's log-probability.

    Attributes:
        logprob: Natural logarithm of its probability; -inf where that is 0.
        rank: Its place among all tokens, the most likely first, from 1.
        decoded_token: The text that it adds to the text before it. The last of the tokens that a
            character takes adds it; a part of another shows as U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""Log-probabilities at one place by token id: the chosen token first, then the most likely."""


@dataclass(frozen=True, slots=True)
class RankedRows:
    """Of each of some rows, the chosen token and the most likely ones."""

    ids: Tensor  # [rows, 1 + n] int64, the chosen token, then the n most likely
    logprobs: Tensor  # [rows, 1 + n] float32
    rank: Tensor  # [rows] int64, the chosen token's place from 1

    @classmethod
    def of(cls, logits: Tensor, chosen: Tensor, count: int) -> Self:
        """Rank the ``count`` most likely tokens of ``logits`` ``[rows, vocab]``, -1 for all.

        ``chosen`` is ``[rows]`` int64. Equal tokens count as more likely, as in vLLM.
        """
        most = logits.shape[1] if count < 0 else min(count, logits.shape[1])
        parts = zip(logits.split(_ROWS), chosen.unsqueeze(1).split(_ROWS), strict=True)
        ranked = [_ranked(rows, tokens, most) for rows, tokens in parts]
        return cls(*(torch.cat(columns) for columns in zip(*ranked, strict=True)))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Its tensors, in order."""
        return self.ids, self.logprobs, self.rank

    def table(self, count: int) -> list[TokenLogprobs]:
        """Return each row's chosen token and ``count`` most likely ones, -1 for all there are.

        The tensors must be on the host.
        """
        end = self.ids.shape[1] if count < 0 else 1 + count
        columns = (self.ids[:, :end], self.logprobs[:, :end], self.rank)
        return [_entry(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def _ranked(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(dim=1)
    of_chosen = logprobs.gather(1, chosen)
    rank = (logprobs >= of_chosen).sum(dim=1)
    values, ids = logprobs.topk(most, dim=1)
    return torch.cat((chosen, ids), dim=1), torch.cat((of_chosen, values), dim=1), rank


def _entry(ids: Sequence[int], logprobs: Sequence[float], rank: int) -> TokenLogprobs:
    entry = {ids[0]: Logprob(logprob=logprobs[0], rank=rank)}
    for place, (token, logprob) in enumerate(zip(ids[1:], logprobs[1:], strict=True), start=1):
        entry.setdefault(token, Logprob(logprob=logprob, rank=place))
    return entry
