"""Drafter logits to draft laws: short lists of candidates that sum to one."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.warp import WarpSettings, warp


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """Laws of the next drafted token, one per row.

    Attributes:
        ids: ``[rows, width]`` int64 target token ids: the most likely ones, in an order that
            depends on the row alone, or the whole draft vocabulary in its order.
        probs: ``[rows, width]`` float64, normalised once; these very numbers are sampled from and
            passed to the verifier.
    """

    ids: Tensor
    probs: Tensor


def draft_laws(
    logits: Tensor, settings: WarpSettings, *, width: int, draft_to_target: Tensor
) -> DraftLaws:
    """Keep the ``width`` most likely tokens, warp and normalise them.

    Args:
        logits: ``[rows, draft_vocab]``.
        settings: One entry per row.
        width: Candidates to keep; a vocabulary no larger is kept whole, and not sorted.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """
    if width >= logits.shape[1]:
        ids = draft_to_target.expand(logits.shape)
        return DraftLaws(ids, warp(logits, settings).softmax(dim=1, dtype=torch.float64))
    likely = _most_likely(logits, width)
    probs = warp(logits.gather(1, likely), settings).softmax(dim=1, dtype=torch.float64)
    return DraftLaws(draft_to_target.take(likely), probs)


def _most_likely(logits: Tensor, width: int) -> Tensor:
    """Return the places ``[rows, width]`` of each row's largest logits; NaN counts as largest.

    On a CPU a partition takes a third of the time of PyTorch's top-k.
    """
    if logits.device.type != "cpu":
        return logits.topk(width, dim=1).indices
    others = logits.shape[1] - width
    places = np.argpartition(logits.float().numpy(), others, axis=1)[:, others:]
    places.sort(axis=1)
    return torch.from_numpy(places)


def pick_index(probs: NDArray[np.float64], uniform: float) -> int:
    """Return the index ``uniform`` in [0, 1) selects by inverse CDF; never one of probability 0."""
    return pick_indices(probs, np.array([uniform]))[0]


def pick_indices(probs: NDArray[np.float64], uniforms: NDArray[np.float64]) -> list[int]:
    """Return the index that each of ``uniforms`` selects, as :func:`pick_index` does."""
    cumulative = probs.cumsum()
    indices: list[int] = cumulative.searchsorted(uniforms * cumulative[-1], side="right").tolist()
    if max(indices) < len(probs):
        return indices
    # Rounding can push u * total up to the total itself: take the last positive entry.
    last = int(np.flatnonzero(probs)[-1])
    return [min(index, last) for index in indices]


def log_laws(logits: Tensor, *, width: int, draft_to_target: Tensor) -> DraftLaws:
    """Return the ``width`` best tokens with their log-probabilities (in ``probs``), untempered."""
    values, index = logits.float().log_softmax(dim=1).topk(min(width, logits.shape[1]), dim=1)
    return DraftLaws(draft_to_target[index], values.to(torch.float64))
