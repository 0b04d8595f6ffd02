"""The reference of each batched verifier that keeps no state."""

from collections.abc import Callable, Mapping

from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.modified_target import ModifiedTarget
from eaglegbv.verifiers.reference.registry import REFERENCES as ALL
from eaglegbv.verifiers.reference.registry import Reference
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree

Decide = Callable[[ReferenceTree, Chooser], Outcome]


def _plain(reference: Reference) -> Decide:
    return lambda tree, chooser: reference.verify(tree, ModifiedTarget(), chooser).outcome


REFERENCES: Mapping[str, Decide] = {
    name: _plain(reference) for name, reference in ALL.items() if not reference.keeps_state
}
