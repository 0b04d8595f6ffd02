"""The law of a place: what of a row a draw cannot change, and laws that follow from it.

The set of tokens that count and their order may not depend on the token drawn, but servers let it:
some list the drawn one beside the k most likely, some in place of the k-th, and all may put it
first among equals. The k - 1 most likely are there in any case. So a list is ordered by
log-probability and token, and cut at its last strict gap within them; what follows is the rest, one
outcome. Lumping tokens of a law yields a law: nothing is approximated.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import special

from eaglegbv.eval.audit.served.rows import NONE, SLACK, Answer

Array: TypeAlias = NDArray[Any]

SHORT = 1e-3  # mass that may lack in a list of all that can be drawn
ALIKE = 1e-3  # log-probabilities of one token, told twice
FINEST = 6  # decimals of the finest grid that is told from float32
BFLOAT16_BITS = 8  # of a significand, the hidden one included
NOTHING = -1  # in place of a token where a list has ended
TINY = 1e-300
TIE = 1e-9  # log-probabilities that are told apart differ by more
TO_REST = ((0, 0), (0, 1))  # pads listed tokens with the rest
LIMITS = ("top_k", "top_p", "min_p")


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
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }

    @property
    def limits(self) -> list[str]:
        """Those that leave tokens out."""
        return [name for name in LIMITS if name in self.asked]

    @property
    def moves(self) -> bool:
        """Whether there are others that change something."""
        return msgspec.structs.replace(self, **dict.fromkeys(LIMITS)) != Settings()


def rounding(logprobs: Array) -> Array:
    """Return how far each of a server's numbers may be from the one that was rounded.

    It is half a unit of the grid that all lie on: bfloat16's, or that of some decimals; else 0.
    """
    values = logprobs[logprobs > NONE]
    if (np.frexp(values)[0] * 2**BFLOAT16_BITS % 1 == 0).all():
        return np.exp2(np.frexp(logprobs)[1] - BFLOAT16_BITS - 1.0)
    exact = (d for d in range(FINEST) if np.abs(values - values.round(d)).max() < 1e-9)
    decimals = next(exact, math.inf)
    return np.full(logprobs.shape, 0.5 * 10.0**-decimals)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of answers, in order within each answer, with the laws there."""

    probs: Array  # [places, k + 1], most likely first, the rest last; rows sum to 1
    errors: Array  # [places, k]: how far each log-probability may be from the true one
    tokens: Array  # [places, k], -1 where fewer are listed
    counts: Array  # [places, k]: how often a listed token occurred before in its answer
    drawn: Array  # [places]: index of the outcome drawn, k for the rest
    answer: Array  # [places]: number of the answer
    position: Array  # [places]: how many tokens of its answer stand before
    context: Array  # [places]: number of the text before, prompt included

    def __len__(self) -> int:
        return len(self.drawn)

    @property
    def rest(self) -> int:
        """Index of the rest among the outcomes."""
        return int(self.probs.shape[1]) - 1

    @property
    def spread(self) -> Array:
        """How much of each listed token's probability may be rounding, ``[places, k]``."""
        return self.probs[:, :-1] * np.expm1(self.errors)

    def mean(self, values: Array) -> Array:
        """Return the expectation of values ``[places, k + 1]`` under each law, ``[places, 1]``."""
        mean: Array = np.einsum("nk,nk->n", self.probs, values)[:, None]
        return mean

    def at_drawn(self, values: Array) -> Array:
        """Return the values ``[places, k + 1]`` of what was drawn, ``[places, 1]``."""
        return np.take_along_axis(values, self.drawn[:, None], axis=1)

    def only(self, kept: Array) -> "Places":
        """Return some of the places."""
        return Places(*(getattr(self, column.name)[kept] for column in fields(self)))

    def given(self, kept: Array, logits: Array) -> "Places":
        """Return laws given that one of the tokens ``kept`` is drawn, whose odds ``logits`` give.

        Both are ``[places, k]``. Places where another was drawn are left out. That is sound: a
        feature that is constant on the other tokens, and equal there to its expectation on these,
        has the difference 0 there.
        """
        shown = self.at_drawn(np.pad(kept, TO_REST))[:, 0]
        places, logits = self.only(shown), np.where(kept, logits, -np.inf)[shown]
        order = np.argsort(-logits, axis=1, kind="stable")

        def ranked(values: Array) -> Array:
            return np.take_along_axis(values, order, axis=1)

        probs = ranked(special.softmax(logits, axis=1))
        return replace(
            places,
            probs=np.pad(probs, TO_REST),
            errors=ranked(places.errors),
            tokens=np.where(probs > 0, ranked(places.tokens), NOTHING),
            counts=ranked(places.counts),
            drawn=places.at_drawn(order.argsort(axis=1))[:, 0],
        )


class Reported(StrEnum):
    """Which law a server reports."""

    RAW = "before all settings"
    WARPED = "after temperature and penalties, and before limits"
    ALL = "after all settings"


@dataclass(frozen=True, slots=True)
class Rule:
    """Which law of tokens follows from the one that is reported.

    Temperature, penalties and biases change the odds of the listed tokens in a known way, whatever
    the rest does; and a limit leaves tokens that are known, up to ties, which each server breaks
    in its own way, and rounding. So a law is the one given that a token is drawn that is left for
    certain, and more likely than any of the rest may be. Places where another was drawn are left
    out. That is sound: a feature that is constant on the other tokens, and equal there to its
    expectation on these, has the difference 0 there.
    """

    settings: Settings
    reported: Reported = Reported.RAW
    ends: Sequence[int] = ()  # tokens that end answers without a row of their own: never drawn
    grammar: bool = False

    @property
    def unknown(self) -> dict[str, str]:
        """Why nothing can be told of settings that are asked for, by their names."""
        settings, raw = self.settings, self.reported is Reported.RAW
        # Between limits servers renormalise, each in its own order.
        several = len(settings.limits) > 1 and self.reported is not Reported.ALL
        hidden = {
            "top_p": settings.top_p and (several or (raw and settings.moves)),
            "repetition_penalty": settings.repetition_penalty and raw,
            "grammar": self.grammar and raw,
        }
        names = [name for name, is_hidden in hidden.items() if is_hidden]
        return dict.fromkeys(names, f"the law is reported {self.reported}")

    def follow(self, places: Places) -> tuple[Places, Array]:
        """Return the laws after settings, and which draws they exclude beyond doubt, ``[places]``.

        Tokens that are excluded are proofs by themselves.
        """
        settings, limits = self.settings, self.settings.limits
        if self.reported is not Reported.RAW:
            limited = self.reported is Reported.WARPED
            settings = Settings(**{name: settings.asked[name] for name in limits * limited})
        if settings == Settings() and not self.ends:
            return places, np.zeros(len(places), bool)
        logits = _moved(places, settings)
        order = np.argsort(-logits[:, :-1], axis=1, kind="stable")
        order = np.pad(order, TO_REST, constant_values=places.rest)

        def ranked(values: Array) -> Array:
            return np.take_along_axis(values, order[:, : values.shape[1]], axis=1)

        tokens, logits = ranked(places.tokens), ranked(logits)
        errors = ranked(places.errors) / settings.temperature
        places = replace(
            places,
            errors=errors,
            tokens=tokens,
            counts=ranked(places.counts),
            drawn=places.at_drawn(order.argsort(axis=1))[:, 0],
        )
        above, masses = logits > logits[:, -1:], np.exp(logits.clip(max=0))
        masses[:, -1] = 0
        kept = above & np.pad(~np.isin(tokens, self.ends), TO_REST)
        out = np.zeros_like(kept)
        spread = (masses[:, :-1] * np.expm1(errors)).sum(axis=1, keepdims=True)
        for behind, limit, error in (
            (_ahead(above), (settings.top_k or 0) - 0.5, 0.0),
            (_ahead(masses), None if settings.moves else settings.top_p, spread + SLACK),
            (
                logits[:, :1] - logits,
                settings.min_p and -math.log(settings.min_p),
                2 * errors.max(axis=1, keepdims=True) + SLACK,
            ),
        ):
            if limit and limit > 0:
                worst = np.where(behind >= limit - error, logits, -np.inf).max(axis=1)
                best = np.where(behind <= limit + error, logits, np.inf).min(axis=1)
                kept &= logits > worst[:, None]
                out |= logits < best[:, None]
        excluded = places.at_drawn(out)[:, 0]
        shown = places.at_drawn(kept)[:, 0] & (not self.unknown)
        probs = special.softmax(np.where(kept, logits, -np.inf)[shown], axis=1)
        return replace(places.only(shown), probs=probs), excluded


def _moved(places: Places, settings: Settings) -> Array:
    """Return log-probabilities after all but limits, up to a constant, ``[places, k + 1]``.

    That of the rest is one that none of its tokens reaches.
    """
    logits: Array = np.log(places.probs.clip(TINY))
    listed, biases = logits[:, :-1], settings.logit_bias or {}
    presence, frequency = settings.presence_penalty or 0.0, settings.frequency_penalty or 0.0
    last = np.where(places.tokens == NOTHING, 0, listed).min(axis=1) - TIE
    gain = max(0.0, *biases.values(), 0.0) - min(presence, 0)
    logits[:, -1] = last + gain - min(frequency, 0) * places.position
    listed -= presence * (places.counts > 0) + frequency * places.counts
    for token, bias in biases.items():
        listed += bias * (places.tokens == int(token))
    logits /= settings.temperature
    return logits


def _ahead(weights: Array) -> Array:
    """Return the sums of weights ``[places, outcomes]`` before each."""
    before: Array = weights.cumsum(axis=1) - weights
    return before


@dataclass(slots=True)
class Notes:
    """What was met while answers were read."""

    rounding: float = 0.0  # of log-probabilities, at most
    unusable: int = 0  # places without a whole list of log-probabilities of different tokens
    without_end: int = 0  # answers that ended by a token that has no row
    impossible: int = 0  # tokens drawn although they cannot be
    over_one: int = 0  # rows whose probabilities add up to more than 1, whatever the rounding


def read(answers: Sequence[Answer], k: int, rule: Rule) -> tuple[Places, Notes]:
    """Return the places of answers to which lists of ``k`` tokens were asked, and notes.

    A row is left out by what the k - 1 most likely tokens show, never by the token drawn.
    """
    notes = Notes()
    lists, where = [], []
    contexts: dict[Any, int] = {}
    for number, answer in enumerate(answers):
        told = answer.usage.get("completion_tokens", 0)
        notes.without_end += told > len(answer.rows) > 0
        context: Any = answer.ask.prompt
        counts = Counter[int]()
        for position, row in enumerate(answer.rows):
            here = contexts.setdefault(context, len(contexts))
            likely = sorted(row.listed or (), key=lambda entry: (-entry[1], entry[0]))[: k - 1]
            lacking = k - 1 - len(likely)
            whole = not lacking or math.fsum(math.exp(value) for _, value in likely) > 1 - SHORT
            if whole and len(dict(likely)) == len(likely):
                entries = [(value, token, counts[token]) for token, value in likely]
                lists.append(entries + [(NONE, NOTHING, 0)] * lacking)
                where.append((row.logprob, row.token, number, position, here))
            else:
                notes.unusable += 1
            counts[row.token] += 1
            context = (here, row.token)
    table = np.array(lists, float).reshape(-1, k - 1, 3)
    places = _reported(table, np.array(where, float).reshape(-1, 5), notes)
    places, excluded = rule.follow(places)
    notes.impossible += int(excluded.sum())
    return places, notes


def _reported(lists: Array, where: Array, notes: Notes) -> Places:
    """Return the laws that are reported, each cut at the last strict gap of its list.

    Args:
        lists: The k - 1 most likely tokens, ``[places, k - 1, 3]``: log-probability, token, count.
        where: The drawn token's, ``[places, 5]``: the first two, answer, position and context.
        notes: They get what rows show of themselves.
    """
    logprobs, tokens, counts = lists.transpose(2, 0, 1)
    own, drawn, *others = where.T
    gaps = logprobs[:, :-1] > logprobs[:, 1:]
    kept = np.pad(np.logical_or.accumulate(gaps[:, ::-1], axis=1)[:, ::-1], TO_REST)
    # Another token of the same text has another log-probability.
    other = np.abs(logprobs - own[:, None]) >= ALIKE
    is_drawn = kept & (tokens == drawn[:, None]) & ~other
    is_drawn[:, -1] = ~is_drawn.any(axis=1)
    probs, errors = np.exp(logprobs), rounding(logprobs)
    excess = (probs * (2 - np.exp(errors))).sum(axis=1) - 1
    notes.rounding = (errors * kept).max(initial=0)
    notes.over_one += int((excess > 10 * SLACK).sum())
    # Where the rest begins with what cannot be drawn, all of it cannot.
    begins = np.take_along_axis(logprobs, kept.sum(axis=1)[:, None], axis=1)
    notes.impossible += int((is_drawn[:, -1:] & (begins <= NONE)).sum())
    probs *= kept
    probs[:, -1] = (1 - probs.sum(axis=1)).clip(SLACK / 10)
    return Places(
        probs / probs.sum(axis=1, keepdims=True),
        (errors * kept)[:, :-1],
        np.where(kept, tokens, NOTHING)[:, :-1].astype(int),
        (counts * kept)[:, :-1].astype(int),
        is_drawn.argmax(axis=1),
        *(column.astype(int) for column in others),
    )
