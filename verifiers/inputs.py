"""Faulty probabilities: found on the device, reported before anything is committed.

:func:`find_faults` reads nothing on the host, so an engine reads its answer together with the
verdict it belongs to, and fails only the requests that are faulty.
"""

from enum import IntFlag

import torch
from torch import Tensor

from eaglegbv.errors import InvalidProbabilities
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.drafted_path import rows_at
from eaglegbv.verifiers.siblings import drafted_nodes

TOLERANCE = 1e-6
"""How far the sum of a law may be from one."""


class Fault(IntFlag):
    """What may be wrong with the probabilities of a request; flags combine."""

    TARGET_NOT_FINITE = 1
    DRAFT_NOT_NORMALISED = 2
    IMPOSSIBLE_DRAFT = 4


_MESSAGES = {
    Fault.TARGET_NOT_FINITE: ("target logits", "NaN or infinite", "logits with a finite logsumexp"),
    Fault.DRAFT_NOT_NORMALISED: (
        "draft_probs",
        "not a law",
        f"non-negative numbers that sum to 1 within {TOLERANCE:g}",
    ),
    Fault.IMPOSSIBLE_DRAFT: (
        "token_ids",
        "a token of draft probability 0",
        "tokens its draft law can draw",
    ),
}


def find_faults(tree: DraftTree, target: TargetLaw) -> Tensor:
    """Return ``[batch]`` int64: the :class:`Fault` flags of each request, 0 where all is well.

    Draft laws are checked only at nodes with children, and not at all in ``fixed`` trees, whose
    children follow no law.
    """
    normalisers = target.log_normaliser.take(target.rows)
    # A number minus itself is 0, or NaN where it is not finite.
    faults = ((normalisers - normalisers).sum(dim=1) != 0) * int(Fault.TARGET_NOT_FINITE)
    if tree.law is Law.FIXED:
        return faults
    laws = tree.draft_probs
    # Written so that NaN is a fault too.
    sound = ((laws.sum(dim=2) - 1).abs() <= TOLERANCE) & (laws.amin(dim=2) >= 0)
    needed = torch.stack((sound.gather(1, tree.parents), _possible(tree)), dim=1)
    # Greater than, of truth values: drafted but not sound, drafted but not possible.
    broken, impossible = (drafted_nodes(tree).unsqueeze(1) > needed).any(dim=2).unbind(1)
    faults = torch.add(faults, broken, alpha=int(Fault.DRAFT_NOT_NORMALISED))
    return torch.add(faults, impossible, alpha=int(Fault.IMPOSSIBLE_DRAFT))


def _possible(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` bool: whether the law of a node's parent can draw its token."""
    tokens = rows_at(torch.where(tree.draft_probs > 0, tree.draft_ids, -1), tree.parents)
    return (tokens == tree.token_ids.unsqueeze(2)).any(dim=2)


def fault_error(faults: int, request: int) -> InvalidProbabilities:
    """Return the error that describes the first of a request's ``faults``.

    Args:
        faults: Its flags from :func:`find_faults`, not 0.
        request: The request's number, for the message.
    """
    first = next(fault for fault in Fault if fault & faults)
    argument, value, expected = _MESSAGES[first]
    return InvalidProbabilities(f"{argument} of request {request}", value, expected)


def check_inputs(tree: DraftTree, target: TargetLaw) -> None:
    """Check a batch on the host, the sums of the target's laws included: one pass over the logits.

    Raises:
        InvalidProbabilities: A law does not sum to one or holds NaN, or a drafted token has draft
            probability zero.
    """
    for request, faults in enumerate(find_faults(tree, target).tolist()):
        if faults:
            raise fault_error(faults, request)
    sums = torch.logsumexp(target.logits.to(torch.float64), dim=1) - target.log_normaliser
    for row, total in enumerate(sums.exp().tolist()):
        if not abs(total - 1) <= TOLERANCE:
            raise InvalidProbabilities(
                f"target law of row {row}", f"sum {total}", f"a sum of 1 within {TOLERANCE:g}"
            )
