"""How a request is sampled: its settings, and the probabilities that they make of logits.

No other module does this: penalties, temperature, top-k, top-p, min-p. The same functions warp the
target over its whole vocabulary and the drafter over its short list of candidates, because a row
may hold any list of tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
from torch import Tensor

from eaglegbv.arguments import refuse_unknown
from eaglegbv.devices import PIECE, runs_kernels, upload
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.logprobs import LogprobsMode
from eaglegbv.rng import request_seed
from eaglegbv.utils import make_numbers_plain, require_integer, require_integers, require_number

HOTTEST = 100.0  # the highest temperature of a distribution, a request's or a draft's
COLDEST, _LEAST_PENALTY = 1e-37, 1e-3  # logits divided by less overflow
LARGEST_BIAS = 100.0


class _NamedFields(type(msgspec.Struct)):  # type: ignore[misc]  # msgspec's metaclass
    """Answers a field that there is not with what is near it."""

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __call__(cls, *values: object, **named: object) -> object:
            refuse_unknown(named, cls.__struct_fields__)
            return super().__call__(*values, **named)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamedFields
):
    """Sampling settings of one request, with the names and defaults vLLM and SGLang users know.

    The target distribution of a token is ``softmax`` of the logits after, in this order, what
    forbids and favours tokens (:mod:`eaglegbv.token_rules`), penalties, temperature, top-k, top-p
    and min-p (:mod:`eaglegbv.sampling`). docs/sampling.md has vLLM's and SGLang's names beside.

    Attributes:
        temperature: Divides the logits; at least 1e-37, at most 100. 0 means greedy decoding.
        top_p: Keep the smallest set of most likely tokens whose mass reaches ``top_p``.
        top_k: Keep the ``top_k`` most likely tokens; ``None`` keeps all, as do 0 and -1.
        min_p: Drop tokens less likely than ``min_p`` times the most likely one.
        max_tokens: Number of tokens to generate at most; None for as many as the model's context
            and the engine's memory have room for.
        stop: Strings that end the text; the text is cut before the first of them.
        stop_token_ids: Token ids that end the text, besides the model's end-of-sequence tokens. The
            one that does is the last of ``token_ids``, and its text is left out.
        seed: Seed of this request. Under a fixed plan the same seed gives the same tokens whatever
            else runs. Where the engine chooses plans, as ``LLM()`` does, each request mixes in its
            running number, and a seed need not reproduce a text; its distribution is the same.
            ``None`` derives one from the engine's seed and the request's number.
        n: Number of answers to the prompt. The first has the ``seed``, others derive theirs of it.
        ignore_eos: Go on past end-of-sequence tokens.
        repetition_penalty: Divides positive and multiplies negative logits of every token that
            occurs in the prompt or the text so far; 1 is none.
        presence_penalty: Subtracted from the logit of every generated token; 0 is none.
        frequency_penalty: Subtracted once per occurrence in the generated text; 0 is none.
        min_tokens: Number of tokens to generate before an end-of-sequence token, a stop token or a
            stop string may end the text.
        logit_bias: Numbers within 100 of 0, added to the logits of tokens by their ids.
        bad_words: Texts that may not occur: their last token is forbidden after the others, which
            are looked for in the generated tokens. A word may also be a sequence of token ids.
        allowed_token_ids: The only tokens that may be generated; None for all.
        include_stop_str_in_output: Keep in the text the stop string, or the text of the stop token,
            that ended it.
        skip_special_tokens: Leave special tokens, such as an end of sequence, out of the text.
        json_schema: A JSON schema, as text or as a dictionary, that the text is an instance of. Of
            this and the next two at most one may be given; then an end-of-sequence token ends what
            is complete. They need the extra ``grammar``.
        regex: A regular expression that the whole text matches.
        grammar: A context-free grammar in Lark's notation, as llguidance reads it.
        logprobs: How many of the most likely tokens to give the log-probabilities of at each token
            of the answer, beside the token itself; -1 for all, None for no log-probabilities.
        prompt_logprobs: The same at each token of the prompt, but for the first; it is then read
            whole, also where another text began alike. They are always raw.
        logprobs_mode: Whether ``logprobs`` are of the target's distribution as it was computed,
            ``"raw_logprobs"``, or after these settings, ``"processed_logprobs"``.

    Raises:
        InvalidArgument: A value is out of range; the message says which and what is accepted.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._make_tuple("stop", stop, "non-empty strings")
        self._make_tuple("stop_token_ids", self.stop_token_ids, "a sequence of token ids")
        if type(self.top_k) is int and self.top_k in (0, -1):  # what other engines call all
            msgspec.structs.force_setattr(self, "top_k", None)
        require_number("temperature", self.temperature, 0.0, HOTTEST)
        if 0 < self.temperature < COLDEST:
            expected = f"0, or a number in [{COLDEST:g}, {HOTTEST:g}]"
            raise InvalidArgument("temperature", self.temperature, expected)
        require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_number("repetition_penalty", self.repetition_penalty, _LEAST_PENALTY, 100.0)
        require_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        require_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        optional = {
            "top_k": (1, None),
            "max_tokens": (1, None),
            "seed": (0, 2**64 - 1),
            "logprobs": (-1, None),
            "prompt_logprobs": (-1, None),
        }
        require_integers(self, optional, **optional, n=(1, None))
        if self.logprobs_mode not in list(LogprobsMode):
            expected = one_of(LogprobsMode, self.logprobs_mode)
            raise InvalidArgument("logprobs_mode", self.logprobs_mode, expected)
        msgspec.structs.force_setattr(self, "logprobs_mode", LogprobsMode(self.logprobs_mode))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(name, getattr(self, name), "true or false")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidArgument("stop", self.stop, "non-empty strings")
        for token in self.stop_token_ids:
            require_integer("stop_token_ids", token, 0)
        require_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        self._check_token_ids()
        if isinstance(self.json_schema, Mapping):
            schema = msgspec.json.encode(self.json_schema).decode()
            msgspec.structs.force_setattr(self, "json_schema", schema)
        given = [name for name in _STRUCTURES if getattr(self, name) is not None]
        for name in given:
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(name, getattr(self, name), "text")
        if len(given) > 1:
            raise InvalidArgument(given[1], getattr(self, given[1]), f"None beside {given[0]}")

    def _check_token_ids(self) -> None:
        """Check what names tokens, and make tuples of it."""
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        self._make_tuple("logit_bias", bias, "numbers by token ids")
        pairs = tuple(_token_bias(pair) for pair in self.logit_bias)
        msgspec.structs.force_setattr(self, "logit_bias", pairs)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        self._make_tuple("bad_words", words, _WORDS)
        msgspec.structs.force_setattr(self, "bad_words", tuple(map(_word, self.bad_words)))
        if self.allowed_token_ids is not None:
            self._make_tuple("allowed_token_ids", self.allowed_token_ids, "token ids, or None")
            if not self.allowed_token_ids:
                raise InvalidArgument("allowed_token_ids", (), "at least one token id, or None")
            for token in self.allowed_token_ids:
                require_integer("allowed_token_ids", token, 0)

    def _make_tuple(self, name: str, values: object, expected: str) -> None:
        if values is not None and not isinstance(values, Iterable):
            raise InvalidArgument(name, values, expected)
        msgspec.structs.force_setattr(self, name, () if values is None else tuple(values))

    def copies(self) -> list[Self]:
        """Return the settings of each of the ``n`` answers."""
        if self.n == 1:
            return [self]
        alone = msgspec.structs.replace(self, n=1)
        if self.seed is None:
            return [alone] * self.n
        seeds = [request_seed(self.seed, number) for number in range(1, self.n)]
        return [alone, *(msgspec.structs.replace(alone, seed=seed) for seed in seeds)]

    @property
    def greedy(self) -> bool:
        """Whether decoding is deterministic (temperature 0)."""
        return self.temperature == 0.0

    @property
    def structured(self) -> tuple[str, str] | None:
        """What the text must be, its setting's name and its source; None for any text."""
        for name in _STRUCTURES:
            source = getattr(self, name)
            if source is not None:
                return name, source
        return None

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        own = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return own != (1.0, 0.0, 0.0)


_STRUCTURES = ("json_schema", "regex", "grammar")
_WORDS = "non-empty texts, or sequences of token ids"


def _token_bias(pair: object) -> tuple[int, float]:
    """Return a token id and its number; an id may be text, as keys of JSON objects are."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InvalidArgument("logit_bias", pair, "numbers by token ids")
    token, value = pair
    if isinstance(token, str) and token.isdecimal():
        token = int(token)
    require_integer("logit_bias", token, 0)
    require_number("logit_bias", value, -LARGEST_BIAS, LARGEST_BIAS)
    return token, value


def _word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str) and word.strip():
        return word
    if isinstance(word, str) or not isinstance(word, Sequence) or not word:
        raise InvalidArgument("bad_words", word, _WORDS)
    for token in word:
        require_integer("bad_words", token, 0)
    return tuple(word)


@dataclass(frozen=True, slots=True)
class WarpSettings:
    """Per-row settings; ``None`` if no row uses a setting, so that its pass is skipped."""

    temperature: Tensor  # [rows] float32; 0 keeps only the most likely token
    greedy: Tensor | None = None  # [rows] bool, where the temperature is 0, or None
    top_k: Tensor | None = None  # [rows] integers, or None
    limits: frozenset[int] = frozenset()  # the finite values of `top_k`, known on the host
    top_p: Tensor | None = None  # [rows] float64, or None
    min_p: Tensor | None = None  # [rows] float64, or None
    tempered: bool = True  # whether some temperature may differ from 1, known on the host

    @property
    def columns(self) -> dict[str, Tensor]:
        """Its tensors by their names: the settings that some row uses."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the settings with ``change`` applied to every tensor."""
        changed: dict[str, Any] = {name: change(column) for name, column in self.columns.items()}
        return replace(self, **changed)

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
    temperature, greedy = settings.temperature, settings.greedy
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


_SORTED = 4096  # most tokens of rows that top-p sorts whole
_LARGEST = 1024
"""Number of the largest logits of a longer row that hold ``top_p`` of its mass in most cases."""

_LEAST = 0x44400000  # bits of float32 768: the exponential of its negative is 0 in float64


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
    if logits.shape[1] <= _SORTED:
        return _edge_among(logits.sort(dim=1, descending=True).values, top_p)[:2]
    if logits.device.type != "cpu":
        return _searched_edge(logits, top_p)
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


def _searched_edge(logits: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Find the edge by bisection over the bits of floats, which never waits for the device."""
    weights = logits.double().exp()
    wanted = weights.sum(dim=1, keepdim=True) * top_p.unsqueeze(1)
    below_zero = logits.view(torch.int32) & 0x7FFFFFFF  # bits of -logits, in the same order

    def mass_above(bits: Tensor) -> Tensor:
        return weights.where(below_zero < bits, 0.0).sum(dim=1, keepdim=True)

    # The edge is the lowest logit that more likely tokens leave room for.
    low = torch.zeros_like(wanted, dtype=torch.int32)
    high = torch.full_like(low, _LEAST)
    for _ in range(_LEAST.bit_length()):
        middle = low + (high - low + 1) // 2
        room = mass_above(middle) < wanted
        low, high = middle.where(room, low), high.where(room, middle - 1)
    # ``low`` may lie between two logits: the edge is the nearest one that is not less likely.
    bits = below_zero.where(below_zero <= low, -1).amax(dim=1, keepdim=True)
    edge = -bits.view(torch.float32)
    weight = edge.double().exp()
    ties = ((wanted - mass_above(bits)) / weight).ceil().clamp(min=1)
    return edge, ties


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
    logits, occurred = logits.float(), generated > 0
    penalties = ((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params)
    repetition, presence, frequency = (
        _column(own, rows_each, torch.float32, logits.device).unsqueeze(1)
        for own in zip(*penalties, strict=True)
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
