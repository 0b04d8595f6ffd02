"""What follows the same text, counted over many short answers to few prompts.

Who comes to a text depends on earlier tokens alone, and the law after it is known: so the counts of
what follows are multinomial under the reported laws. Their chi-square sees what averages out over
different texts, and answers that share random numbers or are too even; but nothing beyond the
texts that many answers have in common.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from eaglegbv.eval.audit.served.places import Floats, Places

EXPECTED = 5.0  # least expected count of a cell of its own
LEAST = 0.5  # what a rarer cell's count is divided by
DRAWS = 4000  # of counts under the reported laws


@dataclass(frozen=True, slots=True)
class Copies:
    """The chi-square of what follows the same texts."""

    chi_square: float
    expected: float  # its mean under the reported laws
    deviation: float
    texts: int
    cells: int
    places: int
    shift: None = None  # only a size is known

    @classmethod
    def of(cls, places: Places, seed: int = 0) -> "Copies | None":
        """Compare what followed each repeated text with its law; None where no text is repeated."""
        rng = np.random.default_rng(seed)
        null, total, texts, cells, used = np.zeros(DRAWS), 0.0, 0, 0, 0
        for counts, law in _repeated(places):
            size = int(counts.sum())
            expected = law * size
            apart = expected >= EXPECTED
            means = np.append(expected[apart], expected[~apart].sum())
            seen = np.append(counts[apart], counts[~apart].sum())
            if len(means) < 2 + (means[-1] < LEAST):
                continue
            draws = rng.multinomial(size, means / means.sum(), DRAWS)
            squares = (np.vstack((seen, draws)) - means) ** 2
            values = (squares / np.maximum(means, LEAST)).sum(axis=1)
            total += float(values[0])
            null += values[1:]
            texts += 1
            cells += len(means)
            used += size
        if not texts:
            return None
        return cls(total, float(null.mean()), float(null.std()), texts, cells, used)

    @property
    def what(self) -> str:
        """What was counted."""
        return f"what follows {self.texts} texts, {self.cells} tokens in all"

    @property
    def z(self) -> float:
        """Standard deviations from its mean."""
        return (self.chi_square - self.expected) / self.deviation

    @property
    def p_value(self) -> float:
        """Two-sided, too far from the laws or too near: by a gamma law of the same moments."""
        shape = (self.expected / self.deviation) ** 2
        law = stats.gamma(shape, scale=self.expected / shape)
        return float(2 * min(law.sf(self.chi_square), law.cdf(self.chi_square)))

    def smallest_shift(self, level: float, power: float) -> float:
        """Return the total variation after a text that is found with so much power.

        It is taken to be the same, in chi-square, after all of them.
        """
        free = max(self.cells - self.texts, 1)
        least = special.chdtri(free, level / 2)
        noncentrality = special.chndtrinc(least, free, 1 - power)
        return float((noncentrality / self.places) ** 0.5 / 2)


def _repeated(places: Places) -> Iterator[tuple[Floats, Floats]]:
    """Yield the counts of what followed a text, and its law, both ``[outcomes]`` with the rest.

    Near ties may change places from one batch of a server to another: outcomes go by token, and a
    token that only some of the places list belongs to the rest everywhere.
    """
    order = np.argsort(places.context, kind="stable")
    starts = np.flatnonzero(np.diff(places.context[order])) + 1
    for rows in np.split(order, starts):
        if len(rows) < 2 * EXPECTED:
            continue
        rest = np.full((len(rows), 1), -1)
        listed = np.append(places.tokens[rows], rest, axis=1)
        names = sorted(set.intersection(*map(set, listed.tolist())))  # the rest first
        index = np.searchsorted(names, listed)
        index[~np.isin(listed, names)] = 0
        probs = places.probs[rows]
        law = np.bincount(index.ravel(), probs.ravel(), len(names)) / len(rows)
        drawn = np.take_along_axis(index, places.drawn[rows][:, None], axis=1)
        counts = np.bincount(drawn.ravel(), minlength=len(names))
        yield counts.astype(float), law
