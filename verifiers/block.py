"""Block verification (Sun et al., ICLR 2025, Algorithm 2) along one path."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import (
    NodeFigures,
    Verdict,
    Verifier,
    VerifyUniforms,
    along_path,
    at_children,
)
from eaglegbv.verifiers.paths import DraftedPath, correction_token, counting_from_one
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    accepts,
    residual,
    residual_or_target,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree


def block(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Verify the tree's one path with its draft distribution."""
    (path,) = tree.paths
    dists = [tree.draft_probs(path[:i]) for i in range(len(path))]
    return block_verification(tree, path, dists, chooser)


def block_verification(
    tree: ReferenceTree, path: Prefix, dists: Sequence[Probs], chooser: Chooser
) -> Outcome:
    """Verify a path whose token i + 1 has distribution ``dists[i]`` given the tokens before it.

    w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / b(x_i)) is the probability that at least i tokens
    are accepted. The prefix of length i < L is accepted with h_i = R_i / (R_i + 1 - w_i),
    R_i = sum (w_i p - b)+, the whole path with w_L; the longest accepted prefix is kept, then
    Y ~ (w p - b)+, or Y ~ p after the whole path.
    """
    w = block_weights(tree, path, dists)
    length = len(path)
    for i in range(length, 0, -1):
        h = w[i]
        if i < length:
            h = acceptance(w[i], sum(residual(w[i], tree.target_probs(path[:i]), dists[i])))
        if accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            return _commit(tree, path, dists, w, i, chooser)
    return _commit(tree, path, dists, w, 0, chooser)


def block_weights(tree: ReferenceTree, path: Prefix, dists: Sequence[Probs]) -> list[Number]:
    """Return w_0 ... w_L."""
    w: list[Number] = [1]
    for i, x in enumerate(path):
        p, b = tree.target_probs(path[:i])[x], dists[i][x]
        # b = 0 marks a draft that the distribution cannot produce: it happens by rounding only.
        w.append(min(1, w[-1] * p / b) if b > 0 else min(1, w[-1]) if p > 0 else 0)
    return w


def acceptance(w: Number, mass: Number) -> Number:
    """Return R / (R + 1 - w), 1 where w = 1 (also if R = 0 there)."""
    return 1 if w == 1 else mass / (mass + 1 - w)


def _commit(
    tree: ReferenceTree,
    path: Prefix,
    dists: Sequence[Probs],
    w: Sequence[Number],
    tau: int,
    chooser: Chooser,
) -> Outcome:
    p = tree.target_probs(path[:tau])
    weights = p if tau == len(path) else residual_or_target(w[tau], p, dists[tau])
    return Outcome(path[:tau], chooser.choose(weights, Purpose.CORRECTION, 0))


# Block verification of one path: the rule that block, gbv and otbv share.
#
# The three differ in the path they verify and in the distribution that path has: the draft distribution itself, or the
# distribution of a path selected among several. Sun et al., Block Verification, ICLR 2025, Algorithm 2.


_LARGEST = math.log(torch.finfo(torch.float64).max)
"""Logarithm of the largest number."""


def verify_block(path: DraftedPath, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
    """Accept the longest prefix that passes its own test; the test of depth i uses number i - 1."""
    weights = prefix_weights(path.ratios())
    chances = acceptance_chances(path, weights)
    accepted = longest_passed(chances, path.lengths, uniforms.acceptance)
    stop = weights.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return Verdict(
        path_nodes=path.nodes[:, 1:],
        accepted=accepted,
        token_ids=correction_token(path.residual(accepted, stop), target, uniforms.correction),
    )


def block_figures(tree: DraftTree, path: DraftedPath) -> NodeFigures:
    """Return the numbers :func:`verify_block` decides by.

    They are b at the path's nodes and their siblings, and w and h along the path.

    Args:
        tree: The trees that ``path`` was selected from.
        path: What :func:`verify_block` judges.
    """
    weights = prefix_weights(path.ratios())
    return {
        "b": at_children(tree, path, path.draft),
        "w": along_path(tree, path, weights[:, 1:]),
        "h": along_path(tree, path, acceptance_chances(path, weights)),
    }


def prefix_weights(ratios: Tensor) -> Tensor:
    """Return ``w_0 = 1, w_i = min(1, w_{i-1} p/q)``, ``[batch, length + 1]``: Pr(tau >= i | x^i).

    That is R_i, the product of the ratios so far, over the largest of R_0 = 1, R_1, ..., R_i.

    Args:
        ratios: ``[batch, length]`` float64.
    """
    # Infinite ratios count as the largest number: differences of their logarithms would be NaN.
    logs = ratios.log().clamp_(max=_LARGEST).cumsum(dim=1)
    logs = torch.nn.functional.pad(logs, (1, 0))
    return (logs - logs.cummax(dim=1).values).exp_()


def acceptance_chances(path: DraftedPath, weights: Tensor) -> Tensor:
    """Return ``[batch, length]`` float64: the chance h_i of the test at depths 1 ... length.

    ``R = sum max(w p - q, 0) = w - sum_S min(w p, q)`` needs only the support S of q;
    ``h = R / (R + 1 - w)``, 1 where w is 1, and w itself at a path's end.
    """
    inner = weights[:, 1:-1]
    kept = torch.minimum(inner.unsqueeze(2) * path.target[:, 1:], path.draft[:, 1:]).sum(dim=2)
    residual = (inner - kept).clamp_(min=0.0)
    tests = (residual / (residual + (1 - inner))).masked_fill_(inner == 1, 1.0)
    chances = torch.cat((tests, weights[:, -1:]), dim=1)
    depths = counting_from_one(chances.shape[1], chances.device)
    return torch.where(depths == path.lengths.unsqueeze(1), weights[:, 1:], chances)


def longest_passed(chances: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
    """Return ``[batch]`` int64: the largest depth whose test passes, 0 if none does.

    Args:
        chances: ``[batch, length]`` float64, of the tests at depths 1 ... length.
        lengths: ``[batch]`` int64, depths past it are not tested.
        uniforms: ``[batch, at least length]`` float64; a test passes iff its number is below its
            chance, so that a chance of zero never passes.
    """
    depths = counting_from_one(chances.shape[1], chances.device)
    passed = (uniforms[:, : chances.shape[1]] < chances) & (depths <= lengths.unsqueeze(1))
    return (passed * depths).amax(dim=1)


# Block verification: the optimal rule for one path.


class BlockVerifier(Verifier):
    """Test every prefix of the path against the mass its residual needs; keep the longest."""

    name: ClassVar[str] = "block"
    source: ClassVar[str] = "Sun et al., Block Verification, ICLR 2025 (2403.10444), Algorithm 2"
    cost: ClassVar[str] = "O(L W) and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})
    max_paths: ClassVar[int | None] = 1
    one_graph: ClassVar[bool] = True

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge one path per request."""
        return verify_block(DraftedPath.only(tree, target), target, uniforms)

    def figures(
        self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
    ) -> NodeFigures:
        """Return b = q, w and h of the path."""
        return block_figures(tree, DraftedPath.only(tree, target))
