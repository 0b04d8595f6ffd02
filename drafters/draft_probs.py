"""Distributions of the next drafted token: of logits, and again for steps that are over."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.config import DraftSampling, Plan
from eaglegbv.devices import first_true
from eaglegbv.native.model import candidates, takes_rows
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.sampling_params import COLDEST, HOTTEST


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Distributions of the next drafted token, one per row."""

    # [rows, width] int64 target token ids: the most likely ones, in an order that depends on the
    # row alone, or the whole draft vocabulary in its order.
    ids: Tensor
    # [rows, width] float64, normalised once; these very numbers are sampled from and passed to the
    # verifier.
    probs: Tensor

    def at(self, rows: Tensor) -> Self:
        """Return those of ``rows`` ``[batch, n]`` int64; these are ``[batch, rows, width]``."""
        index = rows.unsqueeze(2).expand(-1, -1, self.ids.shape[2])
        return type(self)(self.ids.gather(1, index), self.probs.gather(1, index))


def draft_probs(
    logits: Tensor, settings: WarpSettings, *, width: int, draft_to_target: Tensor
) -> DraftProbs:
    """Keep the ``width`` most likely tokens of ``logits`` ``[rows, draft_vocab]``, warped.

    A vocabulary no larger is kept whole, and not sorted. ``settings`` have an entry per row;
    ``draft_to_target`` ``[draft_vocab]`` int64 is the target's id of each draft token.
    """
    if width >= logits.shape[1]:
        ids = draft_to_target.expand(logits.shape)
        return DraftProbs(ids, warp(logits, settings).softmax(dim=1, dtype=torch.float64))
    if takes_rows(logits, settings):
        likely, probs = candidates(logits, settings, width)
        return DraftProbs(draft_to_target.take(likely), probs)
    likely = _most_likely(logits, width)
    probs = warp(logits.gather(1, likely), settings).softmax(dim=1, dtype=torch.float64)
    return DraftProbs(draft_to_target.take(likely), probs)


def certain_where_broken(probs: Tensor) -> None:
    """Let a distribution that is none, as of a head's NaN, have its first token with certainty.

    That is what is drawn from ``probs`` ``[..., width]``, which are written to, and lossless.
    """
    broken = probs.sum(dim=-1, keepdim=True).isnan()
    probs.masked_fill_(broken, 0.0)
    probs[..., :1] += broken


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


def log_probs(logits: Tensor, *, width: int, draft_to_target: Tensor) -> DraftProbs:
    """Return the ``width`` best tokens with their log-probabilities (in ``probs``), untempered."""
    values, index = logits.float().log_softmax(dim=1).topk(min(width, logits.shape[1]), dim=1)
    return DraftProbs(draft_to_target[index], values.to(torch.float64))


def support(plan: Plan, draft_sampling: DraftSampling, vocab: int) -> int:
    """Return the number of candidates a row's distribution keeps of ``vocab`` draft tokens."""
    if draft_sampling is not DraftSampling.FIXED:
        return plan.list_width(vocab)
    if plan.shape:
        return min(1 + max(max(ranks) for ranks in plan.shape), vocab)
    return min(plan.fixed_beam, vocab)


def pick_places(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the places that ``uniforms`` ``[...]`` select in ``probs`` ``[..., width]``.

    By inverse CDF; never a place of probability 0, whatever the rounding of a parallel sum, unless
    there is no other.
    """
    cumulative = probs.cumsum(dim=-1) * (probs > 0)
    total = cumulative.amax(dim=-1)
    threshold = uniforms * total
    limit = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return first_true(cumulative > limit.unsqueeze(-1))


def draft_params(params: SamplingParams, plan: Plan) -> SamplingParams:
    """Return a request's own warping at the plan's draft temperature, a multiple of its own.

    It keeps within what logits can be divided by. Drafts may follow any distribution.
    """
    temperature = params.temperature * plan.draft_temperature
    kept = min(HOTTEST, max(COLDEST, temperature))
    return _warping(kept, params.top_k, params.top_p, params.min_p)


@lru_cache(maxsize=1024)
def _warping(temperature: float, top_k: int | None, top_p: float, min_p: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


# Steps that are over: a rule that keeps state needs the distributions they would have drawn from.
@dataclass(frozen=True, slots=True)
class ProbsSettings:
    """What turns the logits of a step into its draft distributions."""

    params: SamplingParams  # the request's own warping at the plan's draft temperature
    width: int  # candidates kept

    @classmethod
    def of(cls, request: Request, vocab: int) -> Self:
        """Return the settings of a request's steps; ``vocab`` tokens can be drafted."""
        return cls(draft_params(request.params, request.plan), request.plan.list_width(vocab))


def replayed_probs(
    logits: Tensor, settings: Sequence[ProbsSettings], draft_to_target: Tensor
) -> DraftProbs:
    """Return distributions of rows of different steps, padded with probability 0 to the widest.

    ``logits`` are ``[rows, draft_vocab]``, each row with its step's settings; ``draft_to_target``
    is ``[draft_vocab]`` int64.
    """
    widest = max(step.width for step in settings)
    ids = logits.new_zeros((len(settings), widest), dtype=torch.int64)
    probs = torch.zeros_like(ids, dtype=torch.float64)
    for width in {step.width for step in settings}:
        rows = [row for row, step in enumerate(settings) if step.width == width]
        params = [settings[row].params for row in rows]
        warping = WarpSettings.of(params, [1] * len(rows), device=logits.device)
        kept = draft_probs(logits[rows], warping, width=width, draft_to_target=draft_to_target)
        ids[rows, :width] = kept.ids
        probs[rows, :width] = kept.probs
    return DraftProbs(ids, probs)
