"""Random batches of draft trees over tiny vocabularies, for the batched verifiers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from eaglegbv.drafters.host_drafting import given_trees
from eaglegbv.tree import DraftSampling, DraftTree, WarpedLogits
from eaglegbv.verifiers.base import Verdict, VerifyUniforms, find_faults
from eaglegbv.verifiers.proof.chooser import Prefix, Probs
from eaglegbv.verifiers.proof.enumeration import draft
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.registry import REFERENCES
from eaglegbv.verifiers.stateful import ModifiedTarget
from support.grown_trees import check_tree
from support.references import UniformChooser, from_draft_tree
from support.tables import KINDS, GeneratorChooser, Model, Shape


@dataclass(frozen=True)
class Batch:
    tree: DraftTree
    target: WarpedLogits
    uniforms: VerifyUniforms


def random_trees(
    draft_sampling: DraftSampling, rng: np.random.Generator, count: int, shape: Shape
) -> list[ReferenceTree]:
    """Trees of all kinds of distributions; a third end their paths at a token of their own."""
    trees = []
    for _ in range(count):
        kind = KINDS[rng.integers(len(KINDS))]
        tilt = float(rng.choice([0.0, 0.5, 0.9]))
        model = Model(shape.vocab, kind, int(rng.integers(2**31)), tilt)
        end = int(rng.integers(shape.vocab)) if rng.random() < 1 / 3 else -1

        def stop(prefix: Prefix, end: int = end) -> bool:
            return prefix[-1:] == (end,)

        drawn = draft(draft_sampling, model.q, shape, GeneratorChooser(rng), stop)
        trees.append(ReferenceTree(draft_sampling, drawn, model.p, model.q))
    return trees


def random_batch(
    draft_sampling: DraftSampling, rng: np.random.Generator, count: int, shape: Shape
) -> Batch:
    """Random trees as one batch; one of independent paths has room for all that were asked for."""
    trees = random_trees(draft_sampling, rng, count, shape)
    room = {"drafts": shape.paths, "length": shape.length}
    return build_batch(
        trees, shape.vocab, rng, **(room if draft_sampling is DraftSampling.IID else {})
    )


def build_batch(
    trees: Sequence[ReferenceTree],
    vocab: int,
    rng: np.random.Generator,
    *,
    drafts: int | None = None,
    length: int | None = None,
) -> Batch:
    """Pad trees of one draft sampling into one batch, with uniforms drawn from ``rng``.

    Supports are listed in random order and padded with token 0. Rows of the target are packed;
    levels with fewer draws than the batch has room for are padded.
    """
    numbers = [{(): 0} | tree.nodes() for tree in trees]
    drafts = drafts or max(tree.most_draws for tree in trees)
    length = length or max(len(tree.draws) for tree in trees)
    nodes = [
        ([0, *(p[-1] for p in own if p)], [0, *(own[p[:-1]] for p in own if p)]) for own in numbers
    ]
    plain = given_trees(nodes, drafts=max(map(len, numbers)), length=length)
    size = len(trees)
    rows = torch.zeros_like(plain.parents)
    draws = torch.zeros((size, length, drafts), dtype=torch.int64)
    draft_ids = np.zeros((size, plain.nodes, vocab + 1), np.int64)
    draft_probs = np.zeros((size, plain.nodes, vocab + 1))
    packed: list[Probs] = []
    for b, (tree, own) in enumerate(zip(trees, numbers, strict=True)):
        inner = {prefix[:-1] for prefix in own if prefix}
        rows[b] = len(packed)
        for prefix, node in own.items():
            rows[b, node] = len(packed)
            packed.append(tree.target_probs(prefix))
            if prefix not in inner and b % 2:  # leaves need no distribution, and may have none
                continue
            q = tree.draft_probs(prefix)
            support = rng.permutation([x for x in range(vocab) if q[x] > 0])
            draft_ids[b, node, : len(support)] = support
            draft_probs[b, node, : len(support)] = [q[x] for x in support]
        for depth, level in enumerate(tree.draws):
            for k, child in enumerate(level):
                draws[b, depth, k] = 0 if child is None else own[child]
    as_tensor = torch.from_numpy
    batch = replace(
        plain,
        draft_sampling=trees[0].draft_sampling,
        draws=draws,
        columns=all(map(in_columns, trees)),
        draft_ids=as_tensor(draft_ids),
        draft_probs=as_tensor(draft_probs),
    )
    check_tree(batch)
    probs = torch.tensor(packed, dtype=torch.float64)
    target = WarpedLogits(probs.log(), probs.new_zeros(len(packed)), rows)
    uniforms = VerifyUniforms(
        selection=as_tensor(rng.random((size, length, drafts, 2))),
        acceptance=as_tensor(rng.random((size, max(1, drafts * length)))),
        correction=as_tensor(rng.random(size)),
    )
    return Batch(batch, target, uniforms)


def in_columns(tree: ReferenceTree) -> bool:
    """Whether draw k of every level was drawn below draw k of the level before."""
    return all(
        child is None or (k < len(above) and above[k] == child[:-1])
        for above, level in pairwise(tree.draws)
        for k, child in enumerate(level)
    )


def assert_sound(tree: DraftTree, target: WarpedLogits) -> None:
    """Trees are well formed, drafts can be drawn, and all distributions sum to one."""
    check_tree(tree)
    assert not find_faults(tree, target).any()
    sums = torch.logsumexp(target.logits.double(), dim=1) - target.log_normaliser
    assert sums.abs().max() < 1e-6


def forks(tree: DraftTree) -> list[int]:
    """Return how many nodes of each tree have several drafts."""
    counts: list[int] = (tree.draft_counts() > 1).sum(dim=1).tolist()
    return counts


def outcomes(tree: DraftTree, verdict: Verdict) -> list[Outcome]:
    result = []
    for b in range(tree.batch):
        nodes = verdict.path_nodes[b, : int(verdict.accepted[b])].tolist()
        tokens = tuple(tree.token_ids[b, nodes].tolist())
        result.append(Outcome(tokens, int(verdict.token_ids[b])))
    return result


def reference_outcomes(name: str, batch: Batch) -> list[Outcome]:
    """What the reference of that name decides on the batch's uniforms."""
    result = []
    for b in range(batch.tree.batch):
        tree = from_draft_tree(batch.tree, batch.target, b)
        chooser = UniformChooser(batch.uniforms, b)
        result.append(REFERENCES[name](tree, ModifiedTarget(), chooser).outcome)
    return result


def target_of(probs: torch.Tensor) -> WarpedLogits:
    """The target of ``probs`` ``[batch, nodes, vocab]`` float64."""
    rows = torch.arange(probs.shape[0] * probs.shape[1]).view(probs.shape[:2])
    return WarpedLogits(probs.flatten(0, 1).log(), probs.new_zeros(rows.numel()), rows)
