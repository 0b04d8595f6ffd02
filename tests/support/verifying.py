"""The reference of each batched verifier."""

from collections.abc import Callable, Mapping

from eaglegbv.verifiers.reference.block import block
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.gbv import gbv
from eaglegbv.verifiers.reference.otbv import otbv
from eaglegbv.verifiers.reference.target_only import target_only
from eaglegbv.verifiers.reference.token import token
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree

REFERENCES: Mapping[str, Callable[[ReferenceTree, Chooser], Outcome]] = {
    "token": token,
    "block": block,
    "gbv": gbv,
    "otbv": otbv,
    "target_only": target_only,
}
