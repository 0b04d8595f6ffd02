"""Verifiers by name."""

from collections.abc import Mapping
from types import MappingProxyType

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.block import BlockVerifier
from eaglegbv.verifiers.gbv import GbvVerifier
from eaglegbv.verifiers.global_resolution import GlobalResolutionVerifier
from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier
from eaglegbv.verifiers.greedy_draft import GreedyDraftVerifier
from eaglegbv.verifiers.greedy_walk import GreedyWalkVerifier
from eaglegbv.verifiers.host_resolution import (
    ConvexResolutionVerifier,
    LinearResolutionVerifier,
    MaxFlowResolutionVerifier,
    RaceResolutionVerifier,
)
from eaglegbv.verifiers.otbv import OtbvVerifier
from eaglegbv.verifiers.spechub import SpecHubVerifier
from eaglegbv.verifiers.specinfer import SpecInferVerifier
from eaglegbv.verifiers.spectr import SpecTrVerifier
from eaglegbv.verifiers.spectr_gbv import SpecTrGbvVerifier
from eaglegbv.verifiers.stateful import StatefulVerifier
from eaglegbv.verifiers.target_only import TargetOnlyVerifier
from eaglegbv.verifiers.tokenwise import TokenVerifier
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
    RaceResolutionVerifier,
    MaxFlowResolutionVerifier,
    LinearResolutionVerifier,
    TargetOnlyVerifier,
)

_STATEFUL_CLASSES: tuple[type[StatefulVerifier], ...] = (GreedyBlockVerifier, SpecTrGbvVerifier)

VERIFIERS: Mapping[str, type[Verifier]] = MappingProxyType({cls.name: cls for cls in _CLASSES})
"""Every verifier whose steps are lossless by themselves, keyed by its name."""

STATEFUL_VERIFIERS: Mapping[str, type[StatefulVerifier]] = MappingProxyType(
    {cls.name: cls for cls in _STATEFUL_CLASSES}
)
"""Every verifier that leaves a modified target to the next step, keyed by its name."""


def make_verifier(name: str) -> Verifier:
    """Return the stateless verifier of that name, or the greedy walk.

    A plan cannot choose the walk: it is lossless at temperature 0 only, where the engine uses it
    whatever the plan's verifier is.

    Raises:
        InvalidArgument: No stateless verifier has that name.
    """
    if name == GreedyWalkVerifier.name:
        return GreedyWalkVerifier()
    if name not in VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(VERIFIERS), name))
    return VERIFIERS[name]()


def make_stateful_verifier(name: str) -> StatefulVerifier:
    """Return the verifier of that name, which keeps state from step to step.

    Raises:
        InvalidArgument: No verifier with state has that name.
    """
    if name not in STATEFUL_VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(STATEFUL_VERIFIERS), name))
    return STATEFUL_VERIFIERS[name]()


def make_any_verifier(name: str) -> Verifier | StatefulVerifier:
    """Return the verifier of that name, with state or without.

    Raises:
        InvalidArgument: No verifier has that name.
    """
    if name in VERIFIERS:
        return make_verifier(name)
    if name in STATEFUL_VERIFIERS:
        return make_stateful_verifier(name)
    raise InvalidArgument("verifier", name, one_of(sorted({*VERIFIERS, *STATEFUL_VERIFIERS}), name))
