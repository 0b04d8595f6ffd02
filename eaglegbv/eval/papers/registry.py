"""Papers by name."""

from collections.abc import Mapping
from types import MappingProxyType

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval.papers.base import Paper
from eaglegbv.eval.papers.bv import BV
from eaglegbv.eval.papers.gbv import GBV
from eaglegbv.eval.papers.global_resolution import GR_SOLVERS, GR_STEPS
from eaglegbv.eval.papers.mdsd import MDSD
from eaglegbv.eval.papers.spectr_gbv import SPECTR_GBV

PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "bv": BV,
        "gbv": GBV,
        "gr-solvers": GR_SOLVERS,
        "gr-steps": GR_STEPS,
        "mdsd": MDSD,
        "spectr-gbv": SPECTR_GBV,
    }
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
