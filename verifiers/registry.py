"""Verifiers by name."""

from collections.abc import Mapping
from types import MappingProxyType

from eaglegbv.errors import InvalidArgument
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.block import BlockVerifier
from eaglegbv.verifiers.gbv import GbvVerifier
from eaglegbv.verifiers.global_resolution import (
    ConvexResolutionVerifier,
    GlobalResolutionVerifier,
    LinearResolutionVerifier,
    MaxFlowResolutionVerifier,
)
from eaglegbv.verifiers.greedy_draft import GreedyDraftVerifier
from eaglegbv.verifiers.greedy_walk import GreedyWalkVerifier
from eaglegbv.verifiers.otbv import OtbvVerifier
from eaglegbv.verifiers.spechub import SpecHubVerifier
from eaglegbv.verifiers.specinfer import SpecInferVerifier
from eaglegbv.verifiers.spectr import SpecTrVerifier
from eaglegbv.verifiers.target_only import TargetOnlyVerifier
from eaglegbv.verifiers.token import TokenVerifier
from eaglegbv.verifiers.traversal import TraversalVerifier

_CLASSES: tuple[type[Verifier], ...] = (
    TokenVerifier,
    BlockVerifier,
    GbvVerifier,
    OtbvVerifier,
    SpecTrVerifier,
    SpecInferVerifier,
    SpecHubVerifier,
    GreedyDraftVerifier,
    TraversalVerifier,
    GlobalResolutionVerifier,
    ConvexResolutionVerifier,
    MaxFlowResolutionVerifier,
    LinearResolutionVerifier,
    TargetOnlyVerifier,
    GreedyWalkVerifier,
)

VERIFIERS: Mapping[str, type[Verifier]] = MappingProxyType({cls.name: cls for cls in _CLASSES})
"""Every verifier's class, keyed by its name."""


def make_verifier(name: str) -> Verifier:
    """Return the verifier of that name.

    Raises:
        InvalidArgument: No verifier has that name.
    """
    if name not in VERIFIERS:
        raise InvalidArgument("verifier", name, f"one of {{{', '.join(sorted(VERIFIERS))}}}")
    return VERIFIERS[name]()
