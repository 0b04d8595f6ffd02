"""The places of answers in arrays, each with the law that its token was drawn from."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from eaglegbv.eval.audit.served.laws import Grid, Law, Rule, law_of
from eaglegbv.eval.audit.served.rows import Answer, Token, finite

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


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

    @classmethod
    def of(cls, laws: Sequence[Law], where: Sequence[tuple[int, int, int]]) -> Self:
        """Put laws into arrays; ``where`` are their answers, positions and contexts."""
        width = max((len(law.entries) for law in laws), default=1)
        nothing = (-np.inf, 0.0, -1.0, 0.0)
        table = np.tile(nothing, (len(laws), width, 1))
        drawn = np.full(len(laws), width)
        for row, law in enumerate(laws):
            for column, entry in enumerate(law.entries):
                number = number_of(entry.token)
                table[row, column] = (entry.logprob, entry.error, number, entry.earlier)
                if entry.token == law.drawn:
                    drawn[row] = column
        logits, errors, tokens, counts = table.transpose(2, 0, 1)
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        rest = np.array([[law.rest] for law in laws]).reshape(-1, 1)
        probs *= (1 - rest) / probs.sum(axis=1, keepdims=True)
        places = np.array(where, int).reshape(-1, 3).T
        probs = np.append(probs, rest, axis=1)
        return cls(probs, errors, tokens.astype(int), counts.astype(int), drawn, *places)

    def __len__(self) -> int:
        return len(self.drawn)

    @property
    def rest(self) -> int:
        """Index of the rest among the outcomes."""
        return int(self.probs.shape[1]) - 1

    def mean(self, values: Floats) -> Floats:
        """Return the expectation of values ``[places, k + 1]`` under each law, ``[places, 1]``."""
        mean: Floats = np.einsum("nk,nk->n", self.probs, values)[:, None]
        return mean

    def at_drawn(self, values: Floats) -> Floats:
        """Return the values ``[places, k + 1]`` of what was drawn, ``[places, 1]``."""
        return np.take_along_axis(values, self.drawn[:, None], axis=1)


def number_of(token: Token) -> int:
    """Return a number for a token that does not depend on when it was first met."""
    return token if isinstance(token, int) else crc32(token.encode())


@dataclass(slots=True)
class Notes:
    """What was met while answers were read."""

    answers: int = 0
    places: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    without_end: int = 0  # answers that ended by a token that has no row
    impossible: int = 0  # tokens drawn although they cannot be
    over_one: int = 0  # rows whose probabilities add up to more than 1
    grid: Grid = field(default_factory=Grid)


def read(answers: Sequence[Answer], k: int, rule: Rule) -> tuple[Places, Notes]:
    """Return the places of answers to which lists of ``k`` tokens were asked, and notes."""
    notes = Notes(grid=grid_of(answers))
    laws: list[Law] = []
    where: list[tuple[int, int, int]] = []
    contexts: dict[Any, int] = {}
    for number, answer in enumerate(answers):
        notes.answers += 1
        notes.without_end += answer.told is not None and answer.told > len(answer.rows) > 0
        context: Any = answer.ask.prompt
        counts = Counter[Token]()
        for position, row in enumerate(answer.rows):
            here = contexts.setdefault(context, len(contexts))
            law = law_of(row, k, notes.grid, counts)
            if isinstance(law, str):
                notes.unusable[law] += 1
            else:
                notes.impossible += law.impossible or rule.excluded(law)
                notes.over_one += law.over_one
                followed = rule.law(law)
                if followed is not None:
                    laws.append(followed)
                    where.append((number, position, here))
            notes.places += 1
            counts[row.token] += 1
            context = (here, row.token)
    return Places.of(laws, where), notes


def grid_of(answers: Iterable[Answer]) -> Grid:
    """Return which numbers a server writes in its lists."""
    rows = (row for answer in answers for row in answer.rows)
    values = np.array([finite(logprob) for row in rows for _, logprob in row.listed or ()])
    return Grid.of(values[np.isfinite(values)])
