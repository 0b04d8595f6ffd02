"""The probabilities that a request's settings make of logits.

No other module does this: penalties, temperature, top-k, top-p, min-p. The same functions warp the
target over its whole vocabulary and the drafter over its short list of candidates, because a row
may hold any list of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eaglegbv.devices import PIECE, PIECE_WARPS, TensorFields, runs_kernels, upload
from eaglegbv.sampling_params import SamplingParams as SamplingParams


@dataclass(frozen=True, slots=True)
class WarpSettings(TensorFields):
    """Per-row settings; ``None`` if no row uses a setting, so that its pass is skipped."""

    temperature: Tensor  # [rows] float32; 0 keeps only the most likely token
    greedy: Tensor | None = None  # [rows] bool, where the temperature is 0, or None
    top_k: Tensor | None = None  # [rows] integers, or None
    limits: frozenset[int] = frozenset()  # the finite values of `top_k`, known on the host
    top_p: Tensor | None = None  # [rows] float64, or None
    min_p: Tensor | None = None  # [rows] float64, or None
    tempered: bool = True  # whether some temperature may differ from 1, known on the host

    @property
    def only_tempered(self) -> bool:
        """Whether nothing but a temperature above 0 changes any row."""
        return self.greedy is self.top_k is self.top_p is self.min_p is None

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        rows_each: Sequence[int],
        *,
        device: torch.device | str = "cpu",
    ) -> "WarpSettings":
        """Gather the settings of requests that own ``rows_each`` consecutive rows.

        Other steps of the same requests share the result, so it must not be written to.
        """
        warping = tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params)
        return _settings_of(warping, tuple(rows_each), device)


@lru_cache(maxsize=256)
def _settings_of(
    warping: tuple[tuple[float, int | None, float, float], ...],
    rows_each: tuple[int, ...],
    device: torch.device | str,
) -> WarpSettings:
    temperatures, limits, top_p, min_p = zip(*warping, strict=True)

    def column(values: Sequence[float], dtype: torch.dtype, *, used: bool) -> Tensor | None:
        return _column(values, rows_each, dtype, device) if used else None

    no_limit = 2**31
    top_k = [no_limit if limit is None else min(limit, no_limit) for limit in limits]
    temperature = _column(temperatures, rows_each, torch.float32, device)
    return WarpSettings(
        temperature=temperature,
        greedy=temperature == 0 if min(temperatures) == 0 else None,
        top_k=column(top_k, torch.int64, used=min(top_k) < no_limit),
        limits=frozenset(k for k in top_k if k < no_limit),
        top_p=column(top_p, torch.float64, used=min(top_p) < 1),
        min_p=column(min_p, torch.float64, used=max(min_p) > 0),
        tempered=set(temperatures) != {1},
    )


def warp(logits: Tensor, settings: WarpSettings) -> Tensor:
    """Return warped logits ``[rows, tokens]`` in float32: -inf where a token is excluded.

    They are relative to the row's largest logit, which becomes 0. Otherwise, large logits divided
    by a low temperature would lose their differences to rounding, and then overflow.

    Order: temperature, top-k, top-p (on what top-k left, renormalised), min-p. Ties at the edge of
    top-k are all kept; ties at the edge of top-p are kept in order of their index. Rows of
    temperature 0 keep the first of their most likely tokens, with logit 0.

    ``logits`` are ``[rows, tokens]`` of any float type, and ``settings`` has an entry per row.
    """
    temperature = settings.temperature
    greedy = settings.greedy
    if greedy is not None:
        temperature = temperature.where(~greedy, 1.0)
    warped = logits.float()
    warped = warped - warped.amax(dim=1, keepdim=True)
    if settings.tempered:
        warped.div_(temperature.unsqueeze(1))
    if settings.top_k is not None:
        warped = _keep_top_k(warped, settings.top_k, settings.limits)
    if settings.top_p is not None:
        warped = _keep_top_p(warped, settings.top_p)
    if settings.min_p is not None:
        warped = _keep_min_p(warped, settings.min_p)
    if greedy is not None:
        warped = torch.where(greedy.unsqueeze(1), _keep_first_maximum(logits), warped)
    return warped


def warped_rows(logits: Tensor, settings: WarpSettings) -> tuple[Tensor, Tensor]:
    """Return warped logits as :func:`warp` does, and the logsumexp of each row.

    They are ``[rows, tokens]`` float32 and ``[rows]`` float64. On a GPU one kernel computes both
    (:func:`eaglegbv.kernels.warp_rows`); its sums are taken in float64 and in another order, so the
    edge of top-p may differ where a mass equals ``top_p`` within rounding.
    """
    if runs_kernels(logits.device):
        return _launch_warp(logits, settings)
    warped = warp(logits, settings)
    return warped, warped.exp().sum(dim=-1).log().to(torch.float64)


def _launch_warp(logits: Tensor, settings: WarpSettings) -> tuple[Tensor, Tensor]:
    from eaglegbv import kernels  # where Triton is, and only when it is needed

    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    warped = logits.new_empty((rows, vocab), dtype=torch.float32)
    normalisers = logits.new_empty(rows, dtype=torch.float64)
    unused = settings.temperature
    kernels.warp_rows[(rows,)](
        logits,
        settings.temperature,
        unused if settings.top_k is None else settings.top_k,
        unused if settings.top_p is None else settings.top_p,
        unused if settings.min_p is None else settings.min_p,
        warped,
        normalisers,
        vocab,
        logits.stride(0),
        TOP_K=settings.top_k is not None,
        TOP_P=settings.top_p is not None,
        MIN_P=settings.min_p is not None,
        PIECE=PIECE,
        num_warps=PIECE_WARPS,
    )
    return warped, normalisers


def _keep_top_k(logits: Tensor, top_k: Tensor, limits: frozenset[int]) -> Tensor:
    size = logits.shape[1]
    # Only the largest values need sorting, as many as the largest limit below the size.
    largest = max((limit for limit in limits if limit < size), default=0)
    if largest == 0:
        return logits
    values = logits.topk(largest, dim=1).values
    edge = values.gather(1, (top_k.clamp(max=largest) - 1).long().unsqueeze(1))
    return logits.masked_fill((logits < edge) & (top_k < size).unsqueeze(1), -torch.inf)


_SORTED = 4096  # most tokens of rows that top-p sorts whole on a CPU
_LARGEST = 1024
"""Number of the largest logits of a longer row that hold ``top_p`` of its mass in most cases."""


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most likely tokens up to ``top_p``; its largest logit is 0."""
    # A token stays if those before it, in order of logits and then of indices, have a mass below
    # `top_p`. So a row keeps what exceeds some *edge*, and the first few of what equals it.
    edge, ties = _top_p_edge(logits, top_p)
    equal = logits == edge
    kept = (logits > edge) | (equal & (equal.cumsum(dim=1) <= ties))
    # A row with a NaN is NaN throughout, and stays so, so that a broken model is noticed.
    kept |= (top_p >= 1).unsqueeze(1) | logits.isnan()
    return logits.masked_fill(~kept, -torch.inf)


def _top_p_edge(logits: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edge of each row, and how many tokens equal to it stay, both ``[rows, 1]``."""
    # Elsewhere than on a CPU, it would have to be waited for whether some rows need more.
    if logits.shape[1] <= _SORTED or logits.device.type != "cpu":
        return _edge_among(logits.sort(dim=1, descending=True).values, top_p)[:2]
    mass = logits.double().exp_().sum(dim=1, keepdim=True)
    edge, ties, beyond = _edge_among(logits.topk(_LARGEST, dim=1).values, top_p, mass)
    if beyond.any():
        whole = logits[beyond].sort(dim=1, descending=True).values
        edge[beyond], ties[beyond], _ = _edge_among(whole, top_p[beyond])
    return edge, ties


def _edge_among(
    values: Tensor, top_p: Tensor, mass: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edge and its ties, and which rows have it beyond their largest ``values``.

    These are ``[rows, largest]``, descending; ``mass`` ``[rows, 1]`` is the sum of a whole row's
    exponentials, None if ``values`` is whole.
    """
    probs = values.double().softmax(dim=1) if mass is None else values.double().exp_() / mass
    totals = probs.cumsum(dim=1)
    stays = totals - probs < top_p.unsqueeze(1)
    stays[:, 0] = True
    last = stays.sum(dim=1, keepdim=True) - 1
    edge = values.gather(1, last)
    ties = (stays & (values == edge)).sum(dim=1, keepdim=True)
    return edge, ties, totals[:, -1] < top_p


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    # This is p(x) < min_p * max p in logits; log 0 = -inf drops nothing.
    edge = logits.max(dim=1).values.double() + min_p.log()
    return logits.masked_fill(logits < edge.unsqueeze(1), -torch.inf)


def _keep_first_maximum(logits: Tensor) -> Tensor:
    best = logits.argmax(dim=1, keepdim=True)
    # NaN logits stay NaN, so that a broken model is noticed at temperature 0 too.
    kept = logits.gather(1, best).float()
    return torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(1, best, kept - kept)


def penalise(
    logits: Tensor,
    in_prompt: Tensor,
    generated: Tensor,
    params: Sequence[SamplingParams],
    rows_each: Sequence[int],
) -> Tensor:
    """Return penalised logits ``[rows, tokens]`` float32; penalties are in vLLM's order.

    ``in_prompt`` ``[rows, tokens]`` bool says whether a token occurs in the prompt, ``generated``
    int64 how often among the generated tokens *on the path of the row's node*, so that each node
    is judged by its own history. ``params`` are those of requests that own ``rows_each``
    consecutive rows.
    """
    logits = logits.float()
    occurred = generated > 0
    penalties = ((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params)
    repetition, presence, frequency = (
        _column(penalty, rows_each, torch.float32, logits.device).unsqueeze(1)
        for penalty in zip(*penalties, strict=True)
    )
    punished = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | occurred, punished, logits)
    return logits - frequency * generated - presence * occurred


def _column(
    values: Sequence[float],
    rows_each: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return ``[rows]``: each request's value in all its rows."""
    # The values are repeated on the host: a device would have to be asked for the number of rows.
    rows = [v for v, n in zip(values, rows_each, strict=True) for _ in range(n)]
    return upload(rows, dtype=dtype, device=device)
