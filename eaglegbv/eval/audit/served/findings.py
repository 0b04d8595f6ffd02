"""What an audit found: every statistic against its share of the level."""

import msgspec

from eaglegbv.eval.audit.served.copies import NAME, Copies, copies_of
from eaglegbv.eval.audit.served.places import Places
from eaglegbv.eval.audit.served.statistics import WEIGHTS, Column, statistics_of

UNITS = {"surprise": "nats a token", "most likely": "of tokens", "order": "of the list a token"}
"""What differences are counted in, by how a column's name begins; rates are of tokens."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic, as it is reported."""

    name: str
    what: str  # the feature that showed most
    z: float  # standard deviations from the law
    p_value: float  # of all its features together
    level: float  # the finding fails the server below this
    shift: float | None  # difference a token; none where only a size is known
    smallest_shift: float  # that would have been found with probability 0.9
    unit: str
    places: int

    @property
    def fails(self) -> bool:
        """Whether chance alone would go as far less often than the level."""
        return self.p_value < self.level


def findings(places: Places, level: float) -> list[Finding]:
    """Test places at a level that all statistics share; the ones without information are left out.

    The places of one answer follow each other.
    """
    found = [
        _of_column(statistic.name, statistic.worst, len(statistic.columns), level)
        for statistic in statistics_of(places)
        if statistic.columns
    ]
    copies = copies_of(places)
    if copies is not None:
        found.append(_of_copies(copies, WEIGHTS[NAME] * level))
    return found


def _of_column(name: str, column: Column, columns: int, level: float) -> Finding:
    own = WEIGHTS[name] * level
    units = (unit for beginning, unit in UNITS.items() if column.name.startswith(beginning))
    return Finding(
        name=name,
        what=column.name,
        z=column.z,
        p_value=min(1.0, column.p_value * columns),
        level=own,
        shift=column.shift,
        smallest_shift=column.smallest_shift(own / columns),
        unit=next(units, "of tokens"),
        places=column.places,
    )


def _of_copies(copies: Copies, level: float) -> Finding:
    return Finding(
        name=NAME,
        what=f"what follows {copies.texts} texts, {copies.cells} tokens in all",
        z=copies.z,
        p_value=copies.p_value,
        level=level,
        shift=None,
        smallest_shift=copies.smallest_shift(level),
        unit="in total variation after a text",
        places=copies.places,
    )
