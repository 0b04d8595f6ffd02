"""Judging trees of independent drafts with three kernels instead of one for each operation.

What is computed, and how, stands in the rules themselves, which are the reference;
:mod:`eaglegbv.kernels` computes the same on a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import PIECE, PIECE_WARPS, WIDEST, runs_kernels
from eaglegbv.tree import DraftTree, TargetProbs, WarpedLogits
from eaglegbv.utils import power_of_two
from eaglegbv.verifiers.base import Fault, Verdict, Verifier, VerifyUniforms

RULES = frozenset({"token", "block", "otbv", "gbv"})  # names of the rules that the kernels know


def takes(verifier: Verifier, tree: DraftTree) -> bool:
    """Return whether the kernels can judge such a tree by ``verifier``, where kernels run."""
    if tree.length == 0:  # nothing to judge
        return True
    if verifier.name not in RULES:
        return False
    independent = tree.draft_sampling is DraftSampling.IID
    independent &= tree.columns or verifier.name == "otbv"
    return independent and 0 < tree.width <= WIDEST


def verdict(
    verifier: Verifier, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
) -> Verdict:
    """Return a verdict, by the kernels where they can judge, else as :meth:`Verifier.verify`."""
    if runs_kernels(tree.token_ids.device) and takes(verifier, tree):
        return judge(verifier, tree, target, uniforms)[0]
    return verifier.verify(tree, target, uniforms)


def judge(
    verifier: Verifier, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
) -> tuple[Verdict, Tensor]:
    """Return a verdict as :meth:`Verifier.verify` does, and the faults of :func:`find_faults`.

    Sums are taken in another order than by tensor operations, so chances differ by rounding
    (1e-12), and a verdict does where a random number is as close to its chance.
    """
    from eaglegbv import kernels  # where Triton is, and only when it is needed

    if tree.length == 0:
        return _sample_roots(tree, target, uniforms)
    batch, nodes, width = tree.draft_probs.shape
    block = max(16, power_of_two(width))
    warps = max(4, min(16, block // 128))
    draws = tree.draws.flatten(1).contiguous()
    # [batch, draws, 2]: two numbers for every draw, in the order of draws.
    labels = uniforms.selection.flatten(1, 2).contiguous()

    floats = tree.draft_probs
    ids = torch.empty_like(tree.draft_ids)
    draft = torch.empty_like(floats)
    probs = torch.empty_like(floats)
    scratch = floats.new_empty((batch, nodes, 2, width))
    child, place, drafts, node_faults = tree.parents.new_empty((4, batch, nodes), dtype=torch.int32)
    kernels.judge_nodes[(batch, nodes)](
        tree.token_ids,
        tree.parents,
        draws,
        tree.draft_ids,
        tree.draft_probs,
        *target.stored,
        target.rows.contiguous(),
        labels,
        ids,
        draft,
        probs,
        scratch,
        child,
        place,
        drafts,
        node_faults,
        nodes,
        draws.shape[1],
        width,
        target.vocab,
        RULE=verifier.name,
        IN_LOGS=isinstance(target, WarpedLogits),
        BLOCK=block,
        DRAWS=power_of_two(max(2, draws.shape[1])),
        num_warps=warps,
    )
    path_nodes = draws.new_empty((batch, tree.length))
    accepted, faults, token_ids = tree.num_nodes.new_empty((3, batch))
    stop, bonus = tree.num_nodes.new_empty((2, batch), dtype=torch.int32)
    weight = floats.new_empty(batch)
    tests = uniforms.acceptance
    kernels.judge_paths[(batch,)](
        draft,
        probs,
        child,
        place,
        drafts,
        node_faults,
        tests,
        path_nodes,
        accepted,
        stop,
        weight,
        bonus,
        faults,
        nodes,
        tree.length,
        width,
        tests.stride(0),
        RULE=verifier.name,
        BLOCK=block,
        NODES=power_of_two(max(2, nodes)),
        num_warps=warps,
    )
    _draw(_Stops(ids, draft, stop, weight, bonus), width, target, uniforms.correction, token_ids)
    return Verdict(path_nodes, accepted, token_ids), faults


def _sample_roots(
    tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
) -> tuple[Verdict, Tensor]:
    """Return a sample of the target for trees of a root alone, and their faults."""
    roots = torch.zeros_like(tree.num_nodes)
    weights = tree.draft_probs.new_ones(tree.batch)
    token_ids = torch.empty_like(roots)
    # No draft was judged, so there is no list of draft tokens: other tensors take its place.
    stops = _Stops(roots, weights, roots.to(torch.int32), weights, torch.ones_like(roots))
    _draw(stops, 0, target, uniforms.correction, token_ids)
    faults = target.broken * int(Fault.TARGET_NOT_FINITE)
    return Verdict(tree.token_ids.new_zeros((tree.batch, 0)), roots, token_ids), faults


class _Stops(NamedTuple):
    """Where acceptance ends in each tree, and what its last token is drawn from."""

    draft_ids: Tensor  # [batch, nodes, width] int64: lists of draft tokens of all nodes
    draft_probs: Tensor  # [batch, nodes, width] float64: what drafts have of each of them
    nodes: Tensor  # [batch] int32
    weights: Tensor  # [batch] float64: factor on p there
    bonus: Tensor  # [batch] int: not 0 where nothing was drafted, so that all of p is left


def _draw(
    stops: _Stops, width: int, target: TargetProbs, uniforms: Tensor, token_ids: Tensor
) -> None:
    """Write the last token of each request to ``token_ids``; lists have ``width`` entries."""
    from eaglegbv import kernels

    batch, nodes = target.rows.shape
    vocab = target.vocab
    kernels.draw_corrections[(batch,)](
        stops.draft_ids,
        stops.draft_probs,
        *target.stored,
        target.rows.contiguous(),
        stops.nodes,
        stops.weights,
        stops.bonus,
        uniforms,
        stops.draft_probs.new_empty((batch, vocab)),
        token_ids,
        nodes,
        width,
        vocab,
        uniforms.stride(0),
        IN_LOGS=isinstance(target, WarpedLogits),
        BLOCK=power_of_two(max(16, width)),
        PIECE=PIECE,
        PIECES=power_of_two(max(2, -(-vocab // PIECE))),
        num_warps=2 * PIECE_WARPS,  # a program a request: there are few
    )
