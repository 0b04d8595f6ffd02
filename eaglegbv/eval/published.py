"""Rules as published elsewhere that are biased, for comparison in ``bench`` and ``audit`` alone.

Nothing registers them but a benchmark that measures them: an engine of any other command refuses
their names. An audit takes them by name, and finds them out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Rule, Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.greedy_block import greedy_block
from eaglegbv.verifiers.paths import DraftedPath, Path, Residual, correction_token
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix, accepts
from eaglegbv.verifiers.proof.enumeration import stateless
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.registry import VERIFIERS, register_verifier
from eaglegbv.verifiers.stateful import ModifiedTarget, Step, VerifyWithState


def spectr_gbv_published(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Judge K paths as the authors' implementation of SpecTr-GBV does (Lin et al., 2604.25925).

    Source: src/engine.py of github.com/junemily/SpecTr-GBV at e399f44. With the products P and Q of
    p and q along a prefix, the mass P [1 - (1 - min(1, Q/P))^K] of it is to be kept. Path by path,
    prefixes longer than the longest accepted one are tested, unless they were rejected before; the
    correction has weights p [1 - min(1, Qq / Pp)^K]. The next step follows p, unmodified.
    """
    paths = _columns(tree)
    drafts = len(paths)
    rejected: set[Prefix] = set()
    best: Prefix = ()
    for number, path in enumerate(paths):
        for length in range(len(best) + 1, len(path) + 1):
            prefix = path[:length]
            whole = length == len(path)
            if prefix in rejected and not whole:
                continue
            index = (length - 1) * drafts + number
            if accepts(chooser, _chance(tree, prefix, drafts, whole), Purpose.ACCEPTANCE, index):
                best = prefix
            elif not whole:
                rejected.add(prefix)
        if best == path:
            bonus = chooser.choose(tree.target_probs(path), Purpose.CORRECTION, 0)
            return Outcome(path, bonus)
    P, Q = _products(tree, best)
    p = tree.target_probs(best)
    q = tree.draft_probs(best)
    weights = [a * (1 - _share(P * a, Q * b) ** drafts) for a, b in zip(p, q, strict=True)]
    token = chooser.choose(weights if sum(weights) > 0 else p, Purpose.CORRECTION, 0)
    return Outcome(best, token)


def _columns(tree: ReferenceTree) -> list[Prefix]:
    """Return the paths in the order drawn."""
    draws = tree.draws if tree.drawing is None else tree.drawing.draws()
    columns = zip(*draws, strict=True)
    return [max((own for own in column if own is not None), key=len) for column in columns]


def _products(tree: ReferenceTree, prefix: Prefix) -> tuple[Number, Number]:
    P: Number = 1
    Q: Number = 1
    for depth, token in enumerate(prefix):
        P *= tree.target_probs(prefix[:depth])[token]
        Q *= tree.draft_probs(prefix[:depth])[token]
    return P, Q


def _share(P: Number, Q: Number) -> Number:
    """Return min(1, Q/P)."""
    return 1 if P <= Q else Q / P


def _chance(tree: ReferenceTree, prefix: Prefix, drafts: int, whole: bool) -> Number:
    """Return the probability with which a prefix passes its test."""
    P, Q = _products(tree, prefix)
    mass = P * (1 - (1 - _share(P, Q)) ** drafts)
    drawn = 1 - (1 - Q) ** drafts
    if not whole:
        below = zip(tree.target_probs(prefix), tree.draft_probs(prefix), strict=True)
        kept = sum(P * p * (1 - (1 - _share(P * p, Q * q)) ** drafts) for p, q in below)
        mass -= kept
        drawn -= kept
    return min(1, max(0, mass / drawn)) if drawn > 0 else 0


class SpecTrGbvPublished(Verifier):
    """The same for batches."""

    name = "spectr_gbv_published"
    draft_samplings = frozenset({DraftSampling.IID})  # which it claims
    any_widths = frozenset()

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge the paths one after another; number (depth - 1) * K + path tests a prefix."""
        numbers = uniforms.acceptance.view(tree.batch, tree.length, tree.drafts)
        depths = torch.arange(1, tree.length + 1, device=numbers.device)
        rejected = torch.zeros_like(tree.parents)
        accepted = torch.zeros_like(tree.num_nodes)
        done = torch.zeros_like(accepted, dtype=torch.bool)
        nodes = tree.draws[:, :, 0]
        for number in range(tree.drafts):
            path = DraftedPath.drawn(tree, target, Path.of(tree.draws[:, :, number]))
            here = path.nodes[:, 1:]
            whole = depths == path.lengths.unsqueeze(1)
            tested = (depths > accepted.unsqueeze(1)) & (depths <= path.lengths.unsqueeze(1))
            tested &= (whole | (rejected.gather(1, here) == 0)) & ~done.unsqueeze(1)
            passed = tested & (numbers[:, :, number] < _chances(path, tree.drafts))
            failed = tested & ~passed & ~whole
            rejected = rejected.scatter_reduce(1, here, failed.to(rejected.dtype), "amax")
            longest = (passed * depths).amax(dim=1)
            nodes = torch.where((longest > 0).unsqueeze(1), here, nodes)
            accepted = torch.maximum(accepted, longest)
            done |= (longest > 0) & (longest == path.lengths)
        path = DraftedPath.drawn(tree, target, Path.of(nodes))
        P, Q = (entry_at(product, accepted).unsqueeze(1) for product in _along(path))
        residual = path.residual(accepted, torch.ones_like(uniforms.correction))
        rows = target.rows.gather(1, residual.nodes.unsqueeze(1))
        p = target.probs_in(rows, residual.ids.unsqueeze(1)).squeeze(1)
        kept = p * (Q * residual.draft / (P * p)).clamp(max=1).nan_to_num(0.0) ** tree.drafts
        residual = Residual(residual.nodes, residual.weight, residual.ids, kept)
        token_ids = correction_token(residual, target, uniforms.correction)
        return Verdict(nodes, accepted, token_ids)


def _along(path: DraftedPath) -> tuple[Tensor, Tensor]:
    """Return P and Q of the prefixes of 0 ... length tokens, ``[batch, length + 1]`` float64."""
    products = (entry_at(probs, path.chosen).cumprod(dim=1) for probs in (path.target, path.draft))
    P, Q = (torch.nn.functional.pad(product, (1, 0), value=1.0) for product in products)
    return P, Q


def _chances(path: DraftedPath, drafts: int) -> Tensor:
    """Return the chances of the tests at depths 1 ... length, ``[batch, length]`` float64."""
    P, Q = _along(path)
    kept = _mass(P, Q, drafts)[:, 1:]
    below_P = P[:, 1:-1].unsqueeze(2) * path.target[:, 1:]
    below_Q = Q[:, 1:-1].unsqueeze(2) * path.draft[:, 1:]
    below = _mass(below_P, below_Q, drafts).sum(dim=2)
    below = torch.nn.functional.pad(below, (0, 1))
    depths = torch.arange(1, P.shape[1], device=P.device)
    whole = depths == path.lengths.unsqueeze(1)
    below = below.masked_fill(whole, 0.0)
    drawn = 1 - (1 - Q[:, 1:]) ** drafts - below
    return torch.where(drawn > 0, (kept - below) / drawn, 0.0)


def _mass(P: Tensor, Q: Tensor, drafts: int) -> Tensor:
    """Return P [1 - (1 - min(1, Q/P))^K], 0 where P is 0."""
    share = (Q / P).clamp(max=1)
    return torch.where(P > 0, P * (1 - (1 - share) ** drafts), 0.0)


class Hsd(Rule):
    """Hierarchical speculative decoding of one path as released (2601.05724), a control."""

    name = "hsd"
    draft_samplings = frozenset({DraftSampling.IID})  # which it claims
    any_widths = frozenset()
    max_paths = 1


def hsd(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Judge a path by greedy block verification, and forget the target that it modified."""
    step = greedy_block(tree, ModifiedTarget(target.context), chooser)
    return Step(step.outcome, ModifiedTarget(step.target.context))


BIASED: Mapping[str, tuple[Rule, VerifyWithState]] = {
    SpecTrGbvPublished.name: (SpecTrGbvPublished(), stateless(spectr_gbv_published)),
    Hsd.name: (Hsd(), hsd),
}
"""What an audit takes by name as a control, and should reject: its claims, and its reference."""


def register_published() -> None:
    """Let this process's engines take what benchmarks compare."""
    if SpecTrGbvPublished.name not in VERIFIERS:
        register_verifier(SpecTrGbvPublished)
