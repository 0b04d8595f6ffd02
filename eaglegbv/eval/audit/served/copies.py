"""What follows the same text, counted over many short answers to few prompts.

Who comes to a text depends on earlier tokens alone, and the law after it is known: so the counts of
what follows are multinomial under the reported laws. Their chi-square sees what averages out over
different texts, and answers that share random numbers or are too even; but nothing beyond the
texts that many answers have in common.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
from scipy import optimize, stats

from eaglegbv.eval.audit.served.places import Floats, Places
from eaglegbv.eval.audit.served.statistics import POWER

NAME = "copies"
EXPECTED = 5.0  # least expected count of a cell of its own
LEAST = 0.5  # what a rarer cell's count is divided by
DRAWS = 4000  # of counts under the reported laws
TAIL = 20 / DRAWS  # p-value below which a gamma law of the same moments stands for the draws


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """The chi-square of what follows the same texts."""

    chi_square: float
    expected: float  # its mean under the reported laws
    z: float  # its distance from that, in standard deviations
    p_value: float  # two-sided: too far from the laws, or too near for independent answers
    texts: int
    cells: int
    places: int

    def smallest_shift(self, level: float) -> float:
        """Return the total variation after a text that is found with probability 0.9.

        It is taken to be the same, in chi-square, after all of them.
        """
        free = max(self.cells - self.texts, 1)
        least = float(stats.chi2.isf(level / 2, free))

        def power(noncentrality: float) -> float:
            return float(stats.ncx2.sf(least, free, noncentrality)) - POWER

        return float((optimize.brentq(power, 1e-9, 100 * least) / max(self.places, 1)) ** 0.5 / 2)


def copies_of(places: Places, seed: int = 0) -> Copies | None:
    """Compare what followed each repeated text with its law; None where no text is repeated."""
    rng = np.random.default_rng(seed)
    total, null, texts, cells, used = 0.0, np.zeros(DRAWS), 0, 0, 0
    for counts, probs in _repeated(places):
        size = int(counts.sum())
        expected = probs * size
        apart = expected >= EXPECTED
        if apart.sum() + (expected[~apart].sum() >= LEAST) < 2:
            continue
        means = np.append(expected[apart], expected[~apart].sum())
        seen = np.append(counts[apart], counts[~apart].sum())
        floor = np.maximum(means, LEAST)
        drawn = rng.multinomial(size, means / means.sum(), DRAWS)
        total += float(((seen - means) ** 2 / floor).sum())
        null += ((drawn - means) ** 2 / floor).sum(axis=1)
        texts, cells, used = texts + 1, cells + len(means), used + size
    if not texts:
        return None
    mean, deviation = float(null.mean()), float(null.std())
    return Copies(
        chi_square=total,
        expected=mean,
        z=(total - mean) / deviation,
        p_value=_p_value(total, null),
        texts=texts,
        cells=cells,
        places=used,
    )


def _p_value(total: float, null: Floats) -> float:
    tails = ((null >= total).sum(), (null <= total).sum())
    p_value = (1 + float(min(tails))) / (1 + DRAWS)
    if p_value < TAIL:
        shape = (null.mean() / null.std()) ** 2
        law = stats.gamma(shape, scale=null.mean() / shape)
        p_value = min(float(law.sf(total)), float(law.cdf(total)))
    return min(1.0, 2 * p_value)


def _repeated(places: Places) -> Iterator[tuple[Floats, Floats]]:
    """Yield the counts ``[outcomes]`` of what followed a text, and its law, rest last.

    Near ties may change places from one batch of a server to another: outcomes go by token.
    """
    order = np.argsort(places.context, kind="stable")
    ends = np.flatnonzero(np.diff(places.context[order])) + 1
    for rows in np.split(order, ends):
        if len(rows) < 2 * EXPECTED:
            continue
        tokens, probs = places.tokens[rows], places.probs[rows]
        listed = np.append(tokens, np.full((len(rows), 1), -1), axis=1)  # the rest is -1 too
        names, index = np.unique(listed, return_inverse=True)
        index = index.reshape(listed.shape)
        # A token that only some of the rows list belongs to the rest everywhere.
        shared = np.array([(listed == name).any(axis=1).all() for name in names])
        index = np.where(shared[index], index, 0)
        law = np.bincount(index.ravel(), probs.ravel(), len(names)) / len(rows)
        drawn = index[np.arange(len(rows)), places.drawn[rows]]
        yield np.bincount(drawn, minlength=len(names)).astype(float), law / law.sum()
