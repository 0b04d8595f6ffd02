"""Walking down a tree: one accept-or-stop step at every node."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, accepts
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The walk goes on at the child ``token``, with every path through it."""

    token: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The walk stops; the correction token has these weights."""

    weights: Probs


Step: TypeAlias = Callable[[ReferenceTree, Prefix, Chooser], Accepted | Rejected]
"""Decides at an inner node."""


def walk(tree: ReferenceTree, chooser: Chooser, step: Step) -> Outcome:
    """Take ``step`` at every node until it rejects; after a leaf the bonus token follows p."""
    prefix: Prefix = ()
    while tree.children(prefix):
        match step(tree, prefix, chooser):
            case Accepted(token):
                prefix = (*prefix, token)
            case Rejected(weights):
                return Outcome(prefix, chooser.choose(weights, Purpose.CORRECTION, 0))
    return Outcome(prefix, chooser.choose(tree.target_law(prefix), Purpose.CORRECTION, 0))


def accepts_draft(
    tree: ReferenceTree, prefix: Prefix, path: int, h: Number, chooser: Chooser
) -> bool:
    """Accept the draft that path number ``path`` carries below ``prefix`` with probability h."""
    return accepts(chooser, h, Purpose.ACCEPTANCE, acceptance_index(tree, prefix, path))


def acceptance_index(tree: ReferenceTree, prefix: Prefix, path: int) -> int:
    """Return the ``ACCEPTANCE`` index of a draft below ``prefix``."""
    return len(prefix) * len(tree.paths) + path
