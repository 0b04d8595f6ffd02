"""The law of a place: what of a row a draw cannot change, and laws that follow from it.

The set of tokens that count and their order may not depend on the token drawn, but servers let it:
some list the drawn one beside the k most likely, some in place of the k-th, and all may put it
first among equals. The k - 1 most likely are there in any case. So a list is ordered by
log-probability and token, and cut at its last strict gap within them; what follows is the rest, one
outcome. Lumping tokens of a law yields a law: nothing is approximated.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from eaglegbv.eval.audit.served.rows import Row, Token, finite

SLACK = 1e-5  # mass that float32 may lose when probabilities are added
SHORT = 1e-3  # mass that may lack in a list of all that can be drawn
ALIKE = 1e-3  # log-probabilities of one token, told twice
FINEST = 6  # decimals of the finest grid that is told from float32
BFLOAT16_BITS = 8  # of a significand, the hidden one included
UNSHOWN = ("top_p", "min_p")  # limits that the law before temperature does not show


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is asked to sample.

    Attributes:
        temperature: Sampling temperature, more than 0.
        top_p: Smallest mass of most likely tokens to sample from.
        top_k: Number of most likely tokens to sample from.
        min_p: Smallest probability to sample, as a share of the most likely token's.
        presence_penalty: Taken from the logit of every token that the answer has already.
        frequency_penalty: The same, for every time.
        repetition_penalty: Divides or multiplies logits of tokens that the text has already.
        logit_bias: Added to logits, by token id: a JSON object.
    """

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that are set, by name."""
        given = msgspec.to_builtins(self)
        return {name: value for name, value in given.items() if value is not None}

    @property
    def limits(self) -> list[str]:
        """Those that leave tokens out."""
        return [name for name in ("top_k", *UNSHOWN) if name in self.asked]


class Grid(NamedTuple):
    """Which numbers a server writes: all float32, or rounded to bfloat16 or to some decimals."""

    bits: int | None = None
    decimals: int | None = None

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Self:
        """Recognise the grid of log-probabilities."""
        if not len(values):
            return cls()
        mantissa = np.frexp(values)[0] * 2**BFLOAT16_BITS
        if (mantissa == np.rint(mantissa)).all():
            return cls(bits=BFLOAT16_BITS)
        exact = (d for d in range(FINEST) if np.abs(values - values.round(d)).max() < 1e-9)
        return cls(decimals=next(exact, None))

    def error(self, value: float) -> float:
        """Return how far one may be from the number that was rounded: half a unit."""
        if self.bits is not None:
            return float(2.0 ** (math.frexp(value)[1] - self.bits - 1))
        return 0.0 if self.decimals is None else float(0.5 * 10.0**-self.decimals)


class Entry(NamedTuple):
    """A listed token."""

    token: Token
    logprob: float  # or what settings make of it, up to a constant
    error: float = 0.0  # how far it may be from the true one
    earlier: int = 0  # how often the token occurred before in its answer

    @property
    def prob(self) -> float:
        """Its probability."""
        return math.exp(self.logprob)


@dataclass(frozen=True, slots=True)
class Law:
    """Where a token was drawn: the listed ones that count, the most likely first, and the rest."""

    entries: list[Entry]
    drawn: Token | None  # None: one of the rest
    rest: float  # probability of all others; 0 where it is given that none of them is drawn
    closed: bool = False  # the list says that nothing else can be drawn
    over_one: bool = False  # probabilities add up to more than 1, whatever the rounding

    @property
    def impossible(self) -> bool:
        """Whether a token was drawn that cannot be."""
        return self.closed and self.drawn is None

    def given(self, entries: Iterable[Entry]) -> "Law | None":
        """Return the law given that one of some tokens is drawn; none where another was.

        To leave out such a place is sound: a feature that is constant on the other tokens, and
        equal there to its expectation on these, has the difference 0 there.
        """
        ranked = sorted(entries, key=_by_likelihood)
        if self.drawn not in [entry.token for entry in ranked]:
            return None
        return Law(ranked, self.drawn, 0.0)


def _by_likelihood(entry: Entry) -> tuple[float, str]:
    return -entry.logprob, str(entry.token)


def law_of(row: Row, k: int, grid: Grid, counts: Counter[Token]) -> Law | str:
    """Return the law of a row for which ``k`` tokens were asked, or why there is none.

    A row is left out by what the k - 1 most likely tokens show, never by the token drawn.
    """
    if row.listed is None:
        return "no list"
    told = [(token, finite(logprob)) for token, logprob in row.listed]
    if any(not logprob <= SLACK for _, logprob in told):
        return "no log-probabilities"
    entries = [
        Entry(token, value, grid.error(value), counts.get(token, 0)) for token, value in told
    ]
    likely = sorted(entries, key=_by_likelihood)[: k - 1]
    mass = math.fsum(entry.prob for entry in likely)
    if len({entry.token for entry in likely}) < len(likely):
        return "two tokens of one text"
    if len(likely) < k - 1:
        if mass < 1 - SHORT:
            return "a list shorter than asked"
        likely.append(Entry("", -math.inf))  # all that can be drawn is listed
    gaps = (c for c in range(1, len(likely)) if likely[c - 1].logprob > likely[c].logprob)
    cut = max(gaps, default=0)
    counted = likely[:cut]
    drawn = (entry.token for entry in counted if _is(row, entry))
    rest = 1 - math.fsum(entry.prob for entry in counted)
    return Law(
        counted,
        next(drawn, None),
        max(rest, SLACK / 10),
        closed=likely[cut].logprob == -math.inf,
        over_one=mass - 1 > _spread(likely) + 10 * SLACK,
    )


def _is(row: Row, entry: Entry) -> bool:
    """Whether a listed token is the one drawn, and not another of the same text."""
    alike = row.logprob is None or abs(row.logprob - entry.logprob) < ALIKE
    return row.token == entry.token and alike


def _spread(entries: Iterable[Entry]) -> float:
    """Return how much of the mass may be rounding."""
    return math.fsum(entry.prob * math.expm1(entry.error) for entry in entries)


class Reported(StrEnum):
    """Which law a server reports."""

    RAW = "before all settings"
    WARPED = "after temperature and penalties, and before limits"
    ALL = "after all settings"


@dataclass(frozen=True, slots=True)
class Rule:
    """Which law of tokens follows from the one that is reported."""

    settings: Settings
    reported: Reported = Reported.RAW
    ends: Collection[Token] = ()  # tokens that end answers without a row of their own
    grammar: bool = False

    @property
    def unknown(self) -> dict[str, str]:
        """Why nothing can be told of settings that are asked for, by their names."""
        settings = self.settings
        limits = [name for name in settings.limits if name in UNSHOWN]
        if self.reported is Reported.ALL:
            return {}
        why = f"the law is reported {self.reported}"
        if self.reported is Reported.WARPED:
            why = "several limits, of which each server has its own order"
            return dict.fromkeys(limits, why) if len(settings.limits) > 1 else {}
        told = {"grammar": why} if self.grammar else {}
        if settings.repetition_penalty is not None:
            told["repetition_penalty"] = why
        others = msgspec.structs.replace(settings, **dict.fromkeys(limits))
        if others != Settings() or len(limits) > 1:
            told |= dict.fromkeys(limits, why)
        return told

    def law(self, law: Law) -> Law | None:
        """Return the law that the settings make of a reported one; none if that cannot be told."""
        settings = self.settings
        if self.unknown:
            return None
        raw = self.reported is Reported.RAW
        if raw and not any(name in UNSHOWN for name in settings.limits):
            return among_listed(law, settings, self.ends)
        if self.reported is not Reported.ALL and settings.limits:
            return truncated(law, settings)
        return among_listed(law, Settings(), self.ends)

    def excluded(self, law: Law) -> bool:
        """Whether the settings exclude the token drawn beyond doubt: a proof by itself."""
        settings = self.settings
        if self.reported is Reported.RAW:
            alone = msgspec.structs.replace(settings, **dict.fromkeys(settings.limits))
            if msgspec.structs.replace(alone, temperature=1.0) != Settings():
                return False
            if settings.temperature != 1:
                settings = Settings(top_k=settings.top_k)
        return outside(law, settings)


def among_listed(law: Law, settings: Settings, ends: Collection[Token] = ()) -> Law | None:
    """Return the law given that a listed token is drawn, from a report before all settings.

    Temperature, penalties and biases change the odds of the listed tokens in a known way, whatever
    the rest does. Tokens count that are more likely after them than any in the rest may be, so the
    ``top_k`` first of them are the first of all. Tokens of ``ends`` are taken out: where the last
    row of an answer lacks, they were not drawn. Where nothing changes, the law stays as it is.
    """
    if settings == Settings() and not ends:
        return law
    temperature = settings.temperature
    bias = settings.logit_bias or {}
    presence = settings.presence_penalty or 0.0
    frequency = settings.frequency_penalty or 0.0

    def moved(entry: Entry) -> Entry:
        penalty = presence * (entry.earlier > 0) + frequency * entry.earlier
        logit = entry.logprob - penalty + bias.get(str(entry.token), 0.0)
        return entry._replace(logprob=logit / temperature, error=entry.error / temperature)

    entries = [moved(entry) for entry in law.entries if entry.token not in ends]
    if settings.top_k is not None and entries:
        gain = max(0.0, *bias.values(), 0.0)
        least = (law.entries[-1].logprob + gain) / temperature
        likely = [entry for entry in entries if entry.logprob >= least]
        likely.sort(key=_by_likelihood)
        # Ties are broken by the server, so tokens at the limit count only if none equals the next.
        limits = [entry.logprob for entry in likely[settings.top_k :]] or [-math.inf]
        entries = [entry for entry in likely if entry.logprob > limits[0]]
    return law.given(entries)


def truncated(law: Law, settings: Settings) -> Law | None:
    """Return the law after the one limit, from a report of the law before that.

    There is none where the list does not show which tokens are left, whatever its errors.
    """
    entries = law.entries
    if settings.top_k is not None:
        first, others = entries[: settings.top_k], entries[settings.top_k :]
        tied = bool(others) and first[-1].logprob == others[0].logprob
        return None if tied else law.given(first)
    if settings.top_p is not None:
        limit = settings.top_p
        values = list(accumulate((entry.prob for entry in entries), initial=0.0))
        spreads = [_spread(entries[: n + 1]) + SLACK for n in range(len(values))]
        clear = values[-1] > limit
        left = [value < limit for value in values]
    else:
        limit = settings.min_p or 0.0
        values = [entry.prob / entries[0].prob for entry in entries]
        spreads = [limit * (2 * entry.error + SLACK) for entry in entries]
        clear = bool(values) and values[-1] < limit
        left = [value >= limit for value in values]
    for value, spread in zip(values, spreads, strict=True):
        clear = clear and abs(value - limit) > spread
    return law.given(entries[: sum(left)]) if clear else None


def outside(law: Law, settings: Settings) -> bool:
    """Return whether limits of a law exclude the token drawn, whatever the errors of the report."""
    probs = {entry.token: entry.prob for entry in law.entries}
    own = law.rest if law.drawn is None else probs[law.drawn]
    # Tokens that tie with the drawn one count as less likely than it.
    ahead = [prob for prob in probs.values() if law.drawn is None or prob > own]
    if not ahead:
        return False
    proved = settings.top_k is not None and len(ahead) >= settings.top_k
    if settings.top_p is not None:
        proved |= math.fsum(ahead) > settings.top_p + _spread(law.entries) + SLACK
    if settings.min_p is not None:
        error = 2 * max(entry.error for entry in law.entries) + SLACK
        proved |= min(own, ahead[-1]) * math.exp(error) < settings.min_p * ahead[0]
    return proved
