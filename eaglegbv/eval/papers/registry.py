"""Papers by name."""

from collections.abc import Mapping
from types import MappingProxyType

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval.papers.base import Paper
from eaglegbv.eval.papers.global_resolution import GR_SOLVERS
from eaglegbv.eval.papers.grids import BV, GBV, GR_STEPS, SPECTR_GBV
from eaglegbv.eval.papers.mdsd import MDSD

PAPERS: Mapping[str, Paper] = MappingProxyType(
    {paper.name: paper for paper in (BV, GBV, GR_SOLVERS, GR_STEPS, MDSD, SPECTR_GBV)}
)
"""Every comparison that ``eaglegbv bench paper`` makes."""


def paper_named(name: str) -> Paper:
    """Return a paper's comparison.

    Raises:
        InvalidArgument: There is none of that name.
    """
    if name not in PAPERS:
        raise InvalidArgument("name", name, one_of(sorted(PAPERS), name))
    return PAPERS[name]
