"""The reference of each batched verifier that keeps no state."""

from collections.abc import Callable, Mapping

from eaglegbv.verifiers.proof.chooser import Chooser
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.registry import REFERENCES as ALL
from eaglegbv.verifiers.registry import Reference
from eaglegbv.verifiers.stateful import ModifiedTarget

Decide = Callable[[ReferenceTree, Chooser], Outcome]


def _plain(reference: Reference) -> Decide:
    return lambda tree, chooser: reference.verify(tree, ModifiedTarget(), chooser).outcome


REFERENCES: Mapping[str, Decide] = {
    name: _plain(reference) for name, reference in ALL.items() if not reference.keeps_state
}
