"""Rules that turn draft trees and the target's distributions into committed tokens."""

from eaglegbv.verifiers.base import (
    TOLERANCE,
    Fault,
    NodeStats,
    Rule,
    Verdict,
    Verifier,
    VerifyUniforms,
    fault_error,
    find_faults,
)
from eaglegbv.verifiers.paths import rows_at, target_of_tokens
from eaglegbv.verifiers.registry import (
    ALL_VERIFIERS,
    REFERENCES,
    STATEFUL_VERIFIERS,
    VERIFIERS,
    choose,
    chosen_plan,
    make_any_verifier,
    make_verifier,
    register_verifier,
    verify_checked,
)
from eaglegbv.verifiers.stateful import (
    Layers,
    SparseProbs,
    StatefulUniforms,
    StatefulVerdict,
    StatefulVerifier,
)
from eaglegbv.verifiers.target_only import GreedyWalkVerifier, TargetOnlyVerifier

__all__ = [
    "ALL_VERIFIERS",
    "REFERENCES",
    "STATEFUL_VERIFIERS",
    "TOLERANCE",
    "VERIFIERS",
    "Fault",
    "GreedyWalkVerifier",
    "Layers",
    "NodeStats",
    "Rule",
    "SparseProbs",
    "StatefulUniforms",
    "StatefulVerdict",
    "StatefulVerifier",
    "TargetOnlyVerifier",
    "Verdict",
    "Verifier",
    "VerifyUniforms",
    "choose",
    "chosen_plan",
    "fault_error",
    "find_faults",
    "make_any_verifier",
    "make_verifier",
    "register_verifier",
    "rows_at",
    "target_of_tokens",
    "verify_checked",
]
