"""Block verification (Sun et al., ICLR 2025, Algorithm 2) along one path."""

from collections.abc import Sequence

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, accepts
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs, residual, residual_or_target
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


def block(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Verify the tree's one path with its draft law."""
    (path,) = tree.paths
    laws = [tree.draft_law(path[:i]) for i in range(len(path))]
    return block_verification(tree, path, laws, chooser)


def block_verification(
    tree: ReferenceTree, path: Prefix, laws: Sequence[Probs], chooser: Chooser
) -> Outcome:
    """Verify a path whose token i + 1 has law ``laws[i]`` given the tokens before it.

    w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / b(x_i)) is the probability that at least i tokens
    are accepted. The prefix of length i < L is accepted with h_i = R_i / (R_i + 1 - w_i),
    R_i = sum (w_i p - b)+, the whole path with w_L; the longest accepted prefix is kept, then
    Y ~ (w p - b)+, or Y ~ p after the whole path.
    """
    w = block_weights(tree, path, laws)
    length = len(path)
    for i in range(length, 0, -1):
        h = w[i]
        if i < length:
            h = acceptance(w[i], sum(residual(w[i], tree.target_law(path[:i]), laws[i])))
        if accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            return _commit(tree, path, laws, w, i, chooser)
    return _commit(tree, path, laws, w, 0, chooser)


def block_weights(tree: ReferenceTree, path: Prefix, laws: Sequence[Probs]) -> list[Number]:
    """Return w_0 ... w_L."""
    w: list[Number] = [1]
    for i, x in enumerate(path):
        p, b = tree.target_law(path[:i])[x], laws[i][x]
        # b = 0 marks a draft that the law cannot produce: it happens by rounding only.
        w.append(min(1, w[-1] * p / b) if b > 0 else min(1, w[-1]) if p > 0 else 0)
    return w


def acceptance(w: Number, mass: Number) -> Number:
    """Return R / (R + 1 - w), 1 where w = 1 (also if R = 0 there)."""
    return 1 if w == 1 else mass / (mass + 1 - w)


def _commit(
    tree: ReferenceTree,
    path: Prefix,
    laws: Sequence[Probs],
    w: Sequence[Number],
    tau: int,
    chooser: Chooser,
) -> Outcome:
    p = tree.target_law(path[:tau])
    weights = p if tau == len(path) else residual_or_target(w[tau], p, laws[tau])
    return Outcome(path[:tau], chooser.choose(weights, Purpose.CORRECTION, 0))
