"""Block verification (Sun et al., ICLR 2025, 2403.10444, Algorithm 2): optimal for one path.

block, gbv and otbv share it. They differ in the path they verify and in the distribution b that its
tokens have: the draft distribution itself, or that of a path selected among several.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeStats, Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.paths import DraftedPath, correction_token, drafted_nodes, rows_at
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
    probs = [tree.draft_probs(path[:i]) for i in range(len(path))]
    return block_verification(tree, path, probs, chooser)


def block_verification(
    tree: ReferenceTree, path: Prefix, probs: Sequence[Probs], chooser: Chooser
) -> Outcome:
    """Verify a path whose token i + 1 has distribution ``probs[i]`` given the tokens before it.

    w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / b(x_i)) is the probability that at least i tokens
    are accepted. The prefix of length i < L is accepted with h_i = R_i / (R_i + 1 - w_i),
    R_i = sum (w_i p - b)+, the whole path with w_L; the longest accepted prefix is kept, then
    Y ~ (w p - b)+, or Y ~ p after the whole path.
    """
    w = block_weights(tree, path, probs)
    tau = 0
    length = len(path)
    for i in range(length, 0, -1):
        h = w[i]
        if i < length:
            h = acceptance(w[i], sum(residual(w[i], tree.target_probs(path[:i]), probs[i])))
        if accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            tau = i
            break
    p = tree.target_probs(path[:tau])
    weights = p if tau == length else residual_or_target(w[tau], p, probs[tau])
    return Outcome(path[:tau], chooser.choose(weights, Purpose.CORRECTION, 0))


def block_weights(tree: ReferenceTree, path: Prefix, probs: Sequence[Probs]) -> list[Number]:
    """Return w_0 ... w_L."""
    w: list[Number] = [1]
    for i, x in enumerate(path):
        p = tree.target_probs(path[:i])[x]
        b = probs[i][x]
        # b = 0 marks a draft that the distribution cannot produce: it happens by rounding only.
        w.append(min(1, w[-1] * p / b) if b > 0 else min(1, w[-1]) if p > 0 else 0)
    return w


def acceptance(w: Number, mass: Number) -> Number:
    """Return R / (R + 1 - w), 1 where w = 1 (also if R = 0 there)."""
    return 1 if w == 1 else mass / (mass + 1 - w)


# The same for batches.
class BlockRule(Verifier):
    """Select a path, then test every prefix of it against the mass its residual needs."""

    @abstractmethod
    def path(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> DraftedPath:
        """Return the path to verify, with the distributions b of its selection as ``draft``."""

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Keep the longest prefix that passes its test; that of depth i uses number i - 1."""
        path = self.path(tree, target, uniforms)
        weights = prefix_weights(path.ratios())
        chances = acceptance_chances(path, weights)
        accepted = longest_passed(chances, path.lengths, uniforms.acceptance)
        stop = entry_at(weights, accepted)
        residual = path.residual(accepted, stop)
        token_ids = correction_token(residual, target, uniforms.correction)
        return Verdict(path.nodes[:, 1:], accepted, token_ids)

    def stats(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> NodeStats:
        """Return b at the path's nodes and their siblings, w and h along the path."""
        path = self.path(tree, target, uniforms)
        weights = prefix_weights(path.ratios())
        return {
            "b": at_children(tree, path, path.draft),
            "w": along_path(tree, path, weights[:, 1:]),
            "h": along_path(tree, path, acceptance_chances(path, weights)),
        }


class BlockVerifier(BlockRule):
    """Verify the only path. O(L W) and one row of the vocabulary."""

    name = "block"
    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset()
    max_paths = 1

    def path(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> DraftedPath:  # noqa: ARG002
        """Return the only path, where b = q."""
        return DraftedPath.drawn(tree, target)


_LARGEST = math.log(torch.finfo(torch.float64).max)  # logarithm of the largest number


def prefix_weights(ratios: Tensor) -> Tensor:
    """Return ``w_0 = 1, w_i = min(1, w_{i-1} p/q)``, ``[batch, length + 1]``: Pr(tau >= i | x^i).

    That is R_i, the product of the ``ratios`` ``[batch, length]`` so far, over the largest of
    R_0 = 1, R_1, ..., R_i.
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
    return with_whole_paths(tests, path, weights)


def with_whole_paths(tests: Tensor, path: DraftedPath, weights: Tensor) -> Tensor:
    """Return the chances ``[batch, length]`` of all tests: that of a whole path is its weight.

    ``tests`` ``[batch, length - 1]`` are of the prefixes that end inside a path, ``weights``
    ``[batch, length + 1]`` start at depth 0.
    """
    chances = torch.cat((tests, weights[:, -1:]), dim=1)
    depths = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return torch.where(depths == path.lengths.unsqueeze(1), weights[:, 1:], chances)


def longest_passed(chances: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
    """Return ``[batch]`` int64: the largest depth, at most its length, whose test passes, else 0.

    ``chances`` ``[batch, length]`` are of the tests at depths 1 ... length; a test passes iff its
    number is below its chance, so that a chance of zero never passes.
    """
    depths = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    passed = (uniforms[:, : chances.shape[1]] < chances) & (depths <= lengths.unsqueeze(1))
    return (passed * depths).amax(dim=1)


def along_path(tree: DraftTree, path: DraftedPath, values: Tensor) -> Tensor:
    """Return ``values`` ``[batch, length]`` at depths 1 ... length at the places of a path's nodes.

    The result is ``[batch, nodes]``, NaN at all other nodes.
    """
    nodes = torch.arange(tree.nodes, device=tree.depth.device)
    here = drafted_nodes(tree) & (path.nodes.gather(1, tree.depth) == nodes)
    here &= tree.depth <= path.lengths.unsqueeze(1)
    return values.gather(1, (tree.depth - 1).clamp(min=0)).masked_fill(~here, torch.nan)


def at_children(tree: DraftTree, path: DraftedPath, probs: Tensor) -> Tensor:
    """Return the probability of every child of a path's nodes, by the distribution at that node.

    ``probs`` is ``[batch, length, width]`` over the path's supports; the result ``[batch, nodes]``,
    NaN at all other nodes.
    """
    step = (tree.depth - 1).clamp(min=0)
    child = drafted_nodes(tree) & (path.nodes.gather(1, step) == tree.parents)
    child &= step < path.lengths.unsqueeze(1)
    same = rows_at(path.ids, step) == tree.token_ids.unsqueeze(2)
    probs_of_tokens = torch.where(same, rows_at(probs, step), 0.0).sum(dim=2)
    return probs_of_tokens.masked_fill(~child, torch.nan)
