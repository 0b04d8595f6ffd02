"""Reading answers: the rows that servers list, and the laws in them that a draw cannot change.

The set of tokens that count and their order may not depend on the token drawn, but servers let it:
some list the drawn one beside the k most likely, some in place of the k-th, and all may put it
first among equals. The k - 1 most likely are there in any case. So a list is ordered by
log-probability and token, and cut at its last strict gap within them; what follows is the rest.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from zlib import crc32

import msgspec
import numpy as np

from eaglegbv.eval.audit.served.places import SLACK, Floats, Places

Token: TypeAlias = int | str
"""A token's id where a server tells it, else its text."""

NONE_BELOW = -9998.0  # what servers write for the logarithm of 0 is smaller
ALIKE = 1e-3  # log-probabilities of one token, told twice
SHORT = 1e-3  # mass that may lack in a list of all that can be drawn
FINEST = 6  # decimals of the finest grid that is told from float32
BFLOAT16_BITS = 8  # of a significand, the hidden one included
NAMED = "token_id:"  # what precedes ids in the place of texts


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of one token."""

    token: Token
    logprob: float | None
    listed: list[tuple[Token, float | None]] | None = None  # None: the server listed nothing


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as it is kept in a file: a line of JSON."""

    request: int  # number of the request in the plan
    choice: int = 0  # number of the answer among the request's
    part: str  # part of the plan
    prompt: str  # text of the prompt
    rows: list[Row]  # of its tokens, also of the last one
    text: str = ""
    finish: str | None = None  # why it ended; None where it was cut off
    error: str | None = None  # why nothing, or not all of it, came
    seed: int | None = None
    forwards: int | None = None  # of the target, where the server counts them
    accepted: int | None = None  # drafted tokens, where the server counts them
    said: int | None = None  # how many tokens the server says it has


def token_of(told: Mapping[str, Any]) -> Token:
    """Return what tells a listed token best: its id; its bytes, as texts may be alike; its text."""
    text = str(told.get("token", told.get("tok_str", "")))
    if isinstance(told.get("id"), int):
        return int(told["id"])
    if text.startswith(NAMED):
        return int(text.removeprefix(NAMED))
    return bytes(told["bytes"]).hex() if told.get("bytes") else text


def rows_of(logprobs: Mapping[str, Any] | Sequence[Any] | None) -> list[Row]:
    """Read the rows of a choice's ``logprobs``, or of llama.cpp's ``completion_probabilities``.

    Raises:
        KeyError, TypeError, ValueError: It has not the form of any known server.
    """
    if not logprobs:
        return []
    if isinstance(logprobs, Mapping) and "tokens" in logprobs:  # completions
        columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        return [
            Row(token_of({"token": text}), logprob, _listed(top))
            for text, logprob, top in zip(*columns, strict=True)
        ]
    content = logprobs["content"] if isinstance(logprobs, Mapping) else logprobs
    return [
        Row(
            token_of(told), _logprob(told), _listed(told.get("top_logprobs", told.get("top_probs")))
        )
        for told in content or ()
    ]


def _logprob(told: Mapping[str, Any]) -> float | None:
    if "prob" in told:  # after llama.cpp's whole chain
        return math.log(told["prob"]) if told["prob"] > 0 else -math.inf
    value: float | None = told["logprob"]
    return value


def _listed(top: Any) -> list[tuple[Token, float | None]] | None:  # noqa: ANN401  JSON
    if not top:
        return None
    if isinstance(top, Mapping):
        return [(token_of({"token": text}), logprob) for text, logprob in top.items()]
    return [(token_of(told), _logprob(told)) for told in top]


def sglang_rows(meta: Mapping[str, Any], which: str = "output") -> list[Row]:
    """Read the rows of ``meta_info`` of SGLang's own ``/generate``."""
    drawn = meta[f"{which}_token_logprobs"]
    tops = meta[f"{which}_top_logprobs"]
    return [
        Row(token, logprob, [(t, value) for value, t, *_ in top] if top else None)
        for (logprob, token, *_), top in zip(drawn, tops, strict=True)
    ]


@dataclass(slots=True)
class Grid:
    """Which numbers a server writes: all float32, or rounded to bfloat16 or to some decimals."""

    bits: int | None = None
    decimals: int | None = None

    @classmethod
    def of(cls, values: Floats) -> "Grid":
        """Recognise the grid of log-probabilities."""
        mantissa = np.frexp(values)[0] * 2**BFLOAT16_BITS
        if len(values) and (mantissa == np.rint(mantissa)).all():
            return cls(bits=BFLOAT16_BITS)
        for decimals in range(FINEST):
            if len(values) and (np.abs(values - values.round(decimals)) < 1e-9).all():
                return cls(decimals=decimals)
        return cls()

    def errors(self, values: Floats) -> Floats:
        """Return how far each may be from the number that was rounded: half a unit."""
        if self.bits is not None:
            return 2.0 ** (np.frexp(values)[1] - self.bits - 1)
        if self.decimals is not None:
            return np.full(values.shape, 0.5 * 10.0**-self.decimals)
        return np.zeros(values.shape)


@dataclass(frozen=True, slots=True)
class Law:
    """The tokens of a row that count, as a row of :class:`Places`."""

    counted: list[tuple[Token, float]]
    drawn: int  # index of the token drawn, or the number of tokens for the rest
    excess: float  # by how much the most likely tokens' probabilities add up to more than 1
    closed: bool  # the list says that nothing else can be drawn


class Unusable(msgspec.Struct, frozen=True):
    """Why a row has no law."""

    why: str


def law_of(row: Row, k: int) -> Law | Unusable:
    """Return the law of a row for which ``k`` tokens were asked.

    A row is left out by what the k - 1 most likely tokens show, never by the token drawn.
    """
    if row.listed is None:
        return Unusable("no list")
    entries = [(token, finite(logprob)) for token, logprob in row.listed]
    if any(not logprob <= SLACK for _, logprob in entries):
        return Unusable("no log-probabilities")
    likely = sorted(entries, key=lambda entry: (-entry[1], str(entry[0])))[: k - 1]
    mass = math.fsum(math.exp(logprob) for _, logprob in likely)
    if len({token for token, _ in likely}) < len(likely):
        return Unusable("two tokens of one text")
    if len(likely) < k - 1:
        if mass < 1 - SHORT:
            return Unusable("a list shorter than asked")
        likely.append(("", -math.inf))  # all that can be drawn is listed
    gaps = (c for c in range(len(likely) - 1, 0, -1) if likely[c - 1][1] > likely[c][1])
    cut = next(gaps, 0)
    drawn = next((i for i, entry in enumerate(likely[:cut]) if _is(row, entry)), cut)
    return Law(likely[:cut], drawn, mass - 1, closed=likely[cut][1] == -math.inf)


def finite(logprob: float | None) -> float:
    """Return a log-probability as a number: NaN for none, -inf for what stands for it."""
    if logprob is None:
        return math.nan
    return -math.inf if logprob <= NONE_BELOW else logprob


def _is(row: Row, entry: tuple[Token, float]) -> bool:
    """Whether a listed token is the one drawn, and not another of the same text."""
    alike = row.logprob is None or abs(row.logprob - entry[1]) < ALIKE
    return row.token == entry[0] and alike


@dataclass(slots=True)
class Notes:
    """What was met while answers were read."""

    answers: int = 0
    places: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    without_end: int = 0  # answers that ended by a token that has no row
    impossible: int = 0  # tokens drawn although all that can be drawn is listed without them
    over_one: int = 0  # rows whose probabilities add up to more than 1
    grid: Grid = field(default_factory=Grid)


def read(answers: Iterable[Answer], k: int) -> tuple[Places, Notes]:
    """Return the places of answers to which lists of ``k`` tokens were asked, and notes."""
    notes, contexts = Notes(), dict[Any, int]()
    laws: list[Law] = []
    columns: list[tuple[int, int, int]] = []
    before: list[list[int]] = []
    for number, answer in enumerate(answers):
        notes.answers += 1
        notes.without_end += answer.said is not None and answer.said > len(answer.rows) > 0
        context: Any = answer.prompt
        counts = Counter[Token]()
        for position, row in enumerate(answer.rows):
            notes.places += 1
            here = contexts.setdefault(context, len(contexts))
            law = law_of(row, k)
            if isinstance(law, Law):
                laws.append(law)
                columns.append((number, position, here))
                before.append([counts[token] for token, _ in law.counted])
                notes.impossible += law.closed and law.drawn == len(law.counted)
            else:
                notes.unusable[law.why] += 1
            counts[row.token] += 1
            context = (here, row.token)
    return _places(laws, columns, before, k, notes), notes


def _places(
    laws: Sequence[Law],
    columns: Sequence[tuple[int, int, int]],
    before: Sequence[Sequence[int]],
    k: int,
    notes: Notes,
) -> Places:
    shape = (len(laws), max(k - 1, 1))
    logprobs, tokens = np.full(shape, -np.inf), np.full(shape, -1, np.int64)
    counts, drawn = np.zeros(shape, np.int64), np.zeros(len(laws), np.int64)
    for row, (law, seen) in enumerate(zip(laws, before, strict=True)):
        count = len(law.counted)
        logprobs[row, :count] = [logprob for _, logprob in law.counted]
        tokens[row, :count] = [number_of(token) for token, _ in law.counted]
        counts[row, :count] = seen
        drawn[row] = law.drawn if law.drawn < count else shape[1]
    listed = np.isfinite(logprobs)
    notes.grid = Grid.of(logprobs[listed])
    errors = np.where(listed, notes.grid.errors(np.where(listed, logprobs, 0.0)), 0.0)
    probs = np.exp(logprobs)
    total = probs.sum(axis=1)
    allowed = (probs * np.expm1(errors)).sum(axis=1) + 10 * SLACK
    notes.over_one = int((np.array([law.excess for law in laws]) > allowed).sum())
    rest = np.maximum(1 - total, SLACK / 10)
    full = np.append(probs, rest[:, None], axis=1)
    full /= full.sum(axis=1, keepdims=True)
    number, position, context = np.array(columns, np.int64).reshape(-1, 3).T
    return Places(full, errors, tokens, counts, drawn, number, position, context)


def number_of(token: Token) -> int:
    """Return a number for a token that does not depend on when it was first met."""
    return token if isinstance(token, int) else crc32(token.encode())
