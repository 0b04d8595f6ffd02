"""Recursive rejection sampling (SpecInfer, 2305.09781; MDSD, 2502.18779, Appendix A.1)."""

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import Prefix, Probs, normalised, residual_or_target
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.reference.walk import Accepted, Rejected, accepts_draft, walk


def specinfer(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down by rejection sampling, draft after draft."""
    return walk(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
    """Accept x with min(1, r(x) / q(x)), r = p at first; on rejection r <- (r - q)+, normalised.

    Drawn without replacement (each child once), q also loses x and is renormalised. Drawn with
    replacement every copy of a token is tried: a copy counts like any other draft.
    """
    r, q = tree.target_law(prefix), tree.draft_law(prefix)
    for path, x in _drafts(tree, prefix).items():
        if accepts_draft(tree, prefix, path, min(1, r[x] / q[x]), chooser):
            return Accepted(x)
        r = normalised(residual_or_target(1, r, q))
        if tree.law is Law.WOR:
            q = without(q, x)
    return Rejected(r)


def _drafts(tree: ReferenceTree, prefix: Prefix) -> dict[int, int]:
    if tree.law is Law.WOR:
        return {path: token for token, path in tree.children(prefix).items()}
    return tree.drafts(prefix)


def without(q: Probs, x: int) -> Probs:
    """Return q restricted to the tokens other than x; ``q`` itself minus x if nothing is left."""
    rest = tuple(q[y] if y != x else q[y] - q[y] for y in range(len(q)))
    return normalised(rest) if sum(rest) > 0 else rest
