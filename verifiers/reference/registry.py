"""Every reference verifier by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.block import block
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.enumeration import Verify, VerifyWithState, stateless
from eaglegbv.verifiers.reference.gbv import gbv
from eaglegbv.verifiers.reference.global_resolution import GlobalResolution, Solver
from eaglegbv.verifiers.reference.greedy_block import greedy_block
from eaglegbv.verifiers.reference.greedy_draft import greedy_draft
from eaglegbv.verifiers.reference.otbv import otbv
from eaglegbv.verifiers.reference.spechub import spechub
from eaglegbv.verifiers.reference.specinfer import specinfer
from eaglegbv.verifiers.reference.spectr import spectr
from eaglegbv.verifiers.reference.spectr_gbv import spectr_gbv
from eaglegbv.verifiers.reference.target_only import target_only
from eaglegbv.verifiers.reference.tokenwise import token
from eaglegbv.verifiers.reference.traversal import traversal
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference verifier.

    Attributes:
        verify: The rule.
        laws: Draft laws it is lossless for.
        max_paths: Most paths it can use, ``None`` for any number.
        keeps_state: Whether it leaves a modified target behind.
    """

    verify: VerifyWithState
    laws: frozenset[Law]
    max_paths: int | None = None
    keeps_state: bool = False


def _plain(verify: Verify, *laws: Law, max_paths: int | None = None) -> Reference:
    return Reference(stateless(verify), frozenset(laws), max_paths)


def _stateful(verify: VerifyWithState, *laws: Law, max_paths: int | None = None) -> Reference:
    return Reference(verify, frozenset(laws), max_paths, keeps_state=True)


def _solved_by(solver: Solver) -> Verify:
    """Return global resolution with a solver; its counter starts anew at every call."""

    def verify(tree: ReferenceTree, chooser: Chooser) -> Outcome:
        return GlobalResolution(solver)(tree, chooser)

    return verify


REFERENCES: Mapping[str, Reference] = MappingProxyType(
    {
        "token": _plain(token, Law.IID, max_paths=1),
        "block": _plain(block, Law.IID, max_paths=1),
        "greedy_block": _stateful(greedy_block, Law.IID, max_paths=1),
        "gbv": _plain(gbv, Law.IID),
        "otbv": _plain(otbv, Law.IID, Law.GREEDY, Law.FIXED),
        "spectr": _plain(spectr, Law.IID),
        "specinfer": _plain(specinfer, Law.IID, Law.WOR),
        "spechub": _plain(spechub, Law.HUB),
        "greedy_draft": _plain(greedy_draft, Law.GREEDY),
        "target_only": _plain(target_only, *Law),
        "traversal": _plain(traversal, Law.IID, Law.WOR),
        "global_resolution": _plain(_solved_by(Solver.EXACT), Law.IID),
        "global_resolution_convex": _plain(_solved_by(Solver.CONVEX), Law.IID),
        "global_resolution_race": _plain(_solved_by(Solver.RACE), Law.IID),
        "global_resolution_max_flow": _plain(_solved_by(Solver.MAX_FLOW), Law.IID),
        "global_resolution_lp": _plain(_solved_by(Solver.LP), Law.IID),
        "spectr_gbv": _stateful(spectr_gbv, Law.IID),
    }
)
"""Verifiers by name; ``global_resolution`` once for each solver."""
