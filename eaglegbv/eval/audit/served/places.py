"""Places of answers, each with the law that a server reports there, and laws that follow from it.

A law is the list of tokens that counts, the most likely first, and one more outcome for all others,
the *rest*. Lumping tokens of a law yields a law, so nothing is approximated whatever the length of
the list; which tokens count must not depend on the token drawn (:mod:`reading`).
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

SLACK = 1e-5
"""Mass that float32 may lose when a server's probabilities are added."""


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


@dataclass(frozen=True, slots=True)
class Places:
    """Places of answers, in order within each answer, with the laws there."""

    probs: Floats  # [places, k + 1], most likely first, the rest last; rows sum to 1
    errors: Floats  # [places, k]: how far each listed log-probability may be from the true one
    tokens: Ints  # [places, k], -1 where fewer are listed
    counts: Ints  # [places, k]: how often a listed token occurred before in its answer
    drawn: Ints  # [places]: index of the outcome drawn, k for the rest
    answer: Ints  # [places]: number of the answer
    position: Ints  # [places]: how many tokens of its answer stand before
    context: Ints  # [places]: number of the text before, prompt included

    def __len__(self) -> int:
        return len(self.drawn)

    @property
    def rest(self) -> int:
        """Index of the rest among the outcomes."""
        return int(self.probs.shape[1]) - 1

    def take(self, index: Ints | Bools) -> Self:
        """Return some of the places."""
        columns = {field.name: getattr(self, field.name)[index] for field in fields(self)}
        return replace(self, **columns)

    def with_logits(self, logits: Floats, kept: Bools, errors: Floats) -> Self:
        """Return the ``kept`` places whose token has a finite logit, by the law given that.

        ``logits`` ``[places, k]`` are of the listed tokens, -inf for those that cannot be drawn.
        To leave out a place for the rest is sound: a function that is constant on what has no
        logit, and equal there to its expectation on what has one, has the difference 0 there.
        """
        probs = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-1e9))
        probs /= np.maximum(probs.sum(axis=1, keepdims=True), 1e-300)
        order = np.argsort(-probs, axis=1, kind="stable")
        rank = np.append(np.argsort(order, axis=1), np.full((len(self), 1), self.rest), axis=1)
        padded = np.append(probs, np.zeros((len(self), 1)), axis=1)
        drawable = padded[np.arange(len(self)), self.drawn] > 0

        def ranked(values: Any) -> Any:  # noqa: ANN401  an array of any kind
            return np.take_along_axis(values, order, axis=1)

        law = replace(
            self,
            probs=np.append(ranked(probs), padded[:, -1:], axis=1),
            errors=ranked(errors),
            tokens=np.where(ranked(probs) > 0, ranked(self.tokens), -1),
            counts=ranked(self.counts),
            drawn=rank[np.arange(len(self)), self.drawn],
        )
        return law.take(kept & drawable)


def log_probs(places: Places) -> Floats:
    """Return the log-probabilities of the listed tokens, ``[places, k]``, -inf where none is."""
    with np.errstate(divide="ignore"):
        return np.log(places.probs[:, :-1])


def among_listed(places: Places, settings: Settings, ends: Collection[int] = ()) -> Places:
    """Return the laws given that a listed token is drawn, from a report before all settings.

    Tokens of ``ends`` are taken out of it: where an answer's last row lacks, they were not drawn.

    Temperature, penalties and biases change the odds of the listed tokens in a known way, whatever
    the rest does. Tokens count that are more likely after them than any in the rest may be, so the
    ``top_k`` first of them are the first of all.
    """
    raw = log_probs(places)
    presence, frequency = settings.presence_penalty or 0.0, settings.frequency_penalty or 0.0
    logits = raw - presence * (places.counts > 0) - frequency * places.counts
    bias = settings.logit_bias or {}
    for token, value in bias.items():
        logits += value * (places.tokens == int(token))
    logits[np.isin(places.tokens, list(ends))] = -np.inf
    gain = max(0.0, *bias.values(), 0.0)
    if settings.top_k is not None:
        # Ties are broken by the server, so tokens at the limit count only if none equals the next.
        least = np.log(least_listed(places.probs[:, :-1]))
        logits[logits < least[:, None] + gain] = -np.inf
        ranked = -np.sort(-logits, axis=1)
        limit = ranked[:, settings.top_k] if settings.top_k < ranked.shape[1] else -np.inf
        logits[logits <= np.reshape(limit, (-1, 1))] = -np.inf
    kept = np.isfinite(logits).any(axis=1)
    return places.with_logits(
        logits / settings.temperature, kept, places.errors / settings.temperature
    )


def truncated(places: Places, settings: Settings) -> Places:
    """Return the laws after top-p, top-k and min-p, from a report of the law before these alone.

    A place counts where the list shows which tokens are left, whatever the errors of the report.
    """
    probs, raw = places.probs[:, :-1], log_probs(places)
    before = np.cumsum(probs, axis=1) - probs
    spread = np.cumsum(probs * np.expm1(places.errors), axis=1) + SLACK
    left, clear = np.ones(probs.shape, bool), np.ones(len(places), bool)
    if settings.top_p is not None:
        left &= before < settings.top_p
        clear &= (np.abs(before - settings.top_p) > spread).all(axis=1)
        clear &= probs.sum(axis=1) > settings.top_p + spread[:, -1]
    if settings.top_k is not None and settings.top_k < probs.shape[1]:
        left[:, settings.top_k :] = False
        clear &= raw[:, settings.top_k - 1] > raw[:, settings.top_k]
    if settings.min_p is not None:
        ratio = probs / probs[:, :1]
        left &= ratio >= settings.min_p
        error = 2 * places.errors.max(axis=1, keepdims=True) + SLACK
        clear &= (np.abs(ratio - settings.min_p) > settings.min_p * error).all(axis=1)
        clear &= least_listed(ratio) < settings.min_p
    logits = np.where(left & (probs > 0), raw, -np.inf)
    return places.with_logits(logits, clear, places.errors)


def outside(places: Places, settings: Settings, *, warped: bool) -> Bools:
    """Return which tokens the settings exclude beyond doubt, ``[places]``: each is a proof.

    ``warped`` says that the law is the one that top-p and min-p apply to.
    """
    probs = places.probs[:, :-1]
    rest = places.drawn == places.rest
    # Tokens that tie with the drawn one count as less likely than it.
    own = places.probs[np.arange(len(places)), places.drawn]
    ahead = (probs > own[:, None]) | (rest[:, None] & (probs > 0))
    spread = (probs * np.expm1(places.errors)).sum(axis=1) + SLACK
    proved = np.zeros(len(places), bool)
    if settings.top_k is not None:
        proved |= ahead.sum(axis=1) >= settings.top_k
    if warped and settings.top_p is not None:
        proved |= (probs * ahead).sum(axis=1) > settings.top_p + spread
    if warped and settings.min_p is not None:
        largest = np.where(rest, np.minimum(own, least_listed(probs)), own)
        error = 2 * places.errors.max(axis=1) + SLACK
        proved |= largest * np.exp(error) < settings.min_p * probs[:, 0]
    return proved


def least_listed(probs: Floats) -> Floats:
    """Return the smallest positive entry of each row, 1 where there is none."""
    least: Floats = probs.min(axis=1, where=probs > 0, initial=1.0)
    return least
