"""Trees grown from given distributions: by the tensors under test, and plainly, one at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_probs import DraftProbs
from eaglegbv.drafters.tree_growth import TreeGrowth, level_table
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.verifiers.paths import paths_of as paths_in
from eaglegbv.verifiers.proof.chooser import Prefix, Probs
from eaglegbv.verifiers.proof.tree import draw_greedy, draw_hub, draw_wor
from support.references import inverse_cdf


def check_tree(tree: DraftTree) -> None:
    """Assert that parents precede children, siblings differ, and draws lead to real nodes."""
    for b in range(tree.batch):
        _check_nodes(tree, b)
        _check_draws(tree, b)


def _check_nodes(tree: DraftTree, b: int) -> None:
    count = int(tree.num_nodes[b])
    assert 1 <= count <= tree.nodes, b
    tokens, parents, depth = (
        x[b, :count].tolist() for x in (tree.token_ids, tree.parents, tree.depth)
    )
    assert parents[0] == depth[0] == 0, b
    for node in range(1, count):
        assert 0 <= parents[node] < node, (b, node)
        assert depth[node] == depth[parents[node]] + 1, (b, node)
    children = list(zip(parents[1:], tokens[1:], strict=True))
    assert len(set(children)) == len(children), f"siblings of tree {b} share a token"


def _check_draws(tree: DraftTree, b: int) -> None:
    parents, count = tree.parents[b].tolist(), int(tree.num_nodes[b])
    levels = tree.draws[b].tolist()
    for depth, level in enumerate(levels, start=1):
        assert all(tree.depth[b, node] == depth for node in level if node), (b, level)
    assert {node for level in levels for node in level} | {0} == set(range(count)), b
    if tree.columns:
        for above, level in pairwise([[0] * tree.drafts, *levels]):
            for node, over in zip(level, above, strict=True):
                assert not node or parents[node] == over, (b, level)


Candidates = tuple[Sequence[int], Sequence[float]]
"""Token ids, and their probabilities; for ``fixed`` log-probabilities, the best first."""

ProbsAt = Callable[[Prefix], Candidates]

ROOT = 99


def grown(
    plan: Plan,
    draft_sampling: DraftSampling,
    probs_at: Sequence[ProbsAt],
    uniforms: NDArray[np.float64],
) -> DraftTree:
    """Grow a batch by uniforms ``[batch, paths, depth]``, with the distributions of every row."""
    batch = len(probs_at)
    numbers = None if draft_sampling is DraftSampling.FIXED else torch.from_numpy(uniforms)
    width = len(probs_at[0](())[0])
    table = level_table(plan, draft_sampling, torch.device("cpu"), width=width)
    growth = TreeGrowth(table, torch.full((batch,), ROOT), numbers)
    rows: list[list[Prefix]] = [[()] for _ in range(batch)]
    for level in range(plan.depth):
        found = [at(row) for at, own in zip(probs_at, rows, strict=True) for row in own]
        ids, values = zip(*found, strict=True)
        frontier = growth.grow(
            DraftProbs(
                torch.from_numpy(np.array(ids, dtype=np.int64)),
                torch.from_numpy(np.array(values, dtype=np.float64)),
            )
        )
        tokens = frontier.token_ids
        parents = torch.arange(tokens.shape[1]).expand_as(tokens) * (level > 0)
        if frontier.parents is not None:
            parents = frontier.parents
        rows = [
            [(*own[parent], token) for parent, token in zip(above, new, strict=True)]
            for own, above, new in zip(rows, parents.tolist(), tokens.tolist(), strict=True)
        ]
    return growth.finish()


@dataclass(frozen=True)
class Plain:
    """A tree as the prefixes of its nodes, in order; its paths; and the nodes with children."""

    nodes: list[Prefix]
    paths: list[Prefix]
    inner: list[Prefix]


def plain(
    plan: Plan, draft_sampling: DraftSampling, probs_at: ProbsAt, uniforms: NDArray[np.float64]
) -> Plain:
    """Grow one tree by uniforms ``[paths, depth]``, node by node, by the definitions."""
    fixed = draft_sampling is DraftSampling.FIXED
    iid = draft_sampling is DraftSampling.IID
    nodes, inner, frontier = [()], [], [()]
    scores: dict[Prefix, float] = {(): 0.0 if fixed else 1.0}
    paths: list[Prefix] = [()] * (plan.paths if iid else 1)
    ranks: dict[Prefix, Prefix] = {(): ()}
    for level in range(plan.depth):
        numbers, new = iter(uniforms[:, level]), []
        ends: list[list[Prefix]] = [[path] for path in paths]
        for node in frontier:
            ids, values = probs_at(node)
            for k, path in enumerate(paths):
                if path != node:
                    continue
                if fixed:
                    tokens = [ids[place] for place in _ranks(plan, ranks[node], len(ids))]
                else:
                    own = iter(uniforms[k, level:]) if iid else numbers
                    count = 1 if level or iid else plan.paths
                    tokens = _drawn(draft_sampling, count, Listed(ids, own), values)
                ends[k] = [(*node, token) for token in tokens]
                for child in ends[k]:
                    place = list(ids).index(child[-1])
                    ranks.setdefault(child, (*ranks[node], place))
                    score = scores[node] + values[place] if fixed else scores[node] * values[place]
                    scores.setdefault(child, score)
                new += [child for child in ends[k] if child not in new]
            inner.append(node)
        nodes += new
        paths = [end for own in ends for end in own]
        frontier = _continued(plan, draft_sampling, new, scores, ranks)
    if fixed and not plan.shape:
        kept = {(), *sorted(nodes[1:], key=lambda n: _rank(scores[n]))[: plan.fixed_nodes]}
        nodes = [node for node in nodes if node in kept]
    if fixed or draft_sampling is DraftSampling.HUB:
        paths = [n for n in nodes[1:] if not any(other[:-1] == n for other in nodes[1:])]
    return Plain(nodes, [path for path in paths if path], inner)


@dataclass(frozen=True)
class Listed:
    """Decides by numbers in turn, each used once, over tokens in the order that a list has."""

    ids: Sequence[int]
    numbers: Iterator[float]

    def choose(self, weights: Probs, purpose: Purpose, index: int) -> int:
        del purpose, index
        places = [weights[token] for token in self.ids]
        return self.ids[inverse_cdf(places, next(self.numbers))]


def _drawn(
    draft_sampling: DraftSampling, children: int, chooser: Listed, probs: Sequence[float]
) -> Sequence[int]:
    """Draw the children of a node as the verifiers' references have them drawn."""
    q = [0.0] * (1 + max(chooser.ids))
    for token, mass in zip(chooser.ids, probs, strict=True):
        q[token] = mass
    if draft_sampling is DraftSampling.HUB:
        return draw_hub(tuple(q), 2, chooser, count())
    draw = draw_greedy if draft_sampling is DraftSampling.GREEDY else draw_wor
    return draw(tuple(q), children, chooser, count())


def _continued(
    plan: Plan,
    draft_sampling: DraftSampling,
    new: list[Prefix],
    scores: dict[Prefix, float],
    ranks: dict[Prefix, Prefix],
) -> list[Prefix]:
    fixed, best = draft_sampling is DraftSampling.FIXED, new
    if plan.shape and fixed:
        best = [n for n in new if any(other[:-1] == ranks[n] for other in plan.shape)]
    elif fixed:
        best = sorted(new, key=lambda n: _rank(scores[n]))[: plan.fixed_beam]
    elif draft_sampling is DraftSampling.HUB:
        best = sorted(new, key=lambda n: _rank(scores[n]))[: plan.paths // 2]
    floor = plan.min_confidence
    if fixed:
        floor = math.log(floor) if floor else -math.inf
    return [node for node in new if node in best and not scores[node] < floor]


def _rank(score: float) -> float:
    return math.inf if math.isnan(score) else -score


def _ranks(plan: Plan, node: Prefix, width: int) -> list[int]:
    if not plan.shape:
        return list(range(width))
    return [own[-1] for own in plan.shape if own[:-1] == node and own[-1] < width]


def prefixes(tree: DraftTree, b: int) -> list[Prefix]:
    """What was drafted down to each node of one tree."""
    found: list[Prefix] = [()]
    for node in range(1, int(tree.num_nodes[b])):
        found.append((*found[int(tree.parents[b, node])], int(tree.token_ids[b, node])))
    return found


def paths_of(tree: DraftTree, b: int) -> list[Prefix]:
    """The tokens of the paths of one tree, in order; there is none where a path is padding."""
    every = paths_in(tree)[b]
    return [tuple(tree.token_ids[b, nodes[nodes > 0]].tolist()) for nodes in every if nodes.any()]


def assert_grown(
    tree: DraftTree,
    plan: Plan,
    draft_sampling: DraftSampling,
    probs_at: Sequence[ProbsAt],
    uniforms: NDArray[np.float64],
) -> None:
    """Check that a batch is what plain growth gives, node for node and number for number."""
    check_tree(tree)
    assert tree.draft_sampling is draft_sampling
    for b, (at, numbers) in enumerate(zip(probs_at, uniforms, strict=True)):
        expected, number = plain(plan, draft_sampling, at, numbers), int(tree.num_nodes[b])
        assert prefixes(tree, b) == expected.nodes
        assert paths_of(tree, b) == expected.paths
        real = (tree.draws[b, 0] > 0).tolist()
        assert real == sorted(real, reverse=True)  # padding comes last
        for name in ("token_ids", "parents", "depth"):
            assert not getattr(tree, name)[b, number:].any()
        for node, prefix in enumerate(expected.nodes if tree.width else []):
            ids, probs = at(prefix) if prefix in expected.inner else ([0] * tree.width,) * 2
            assert tree.draft_ids[b, node].tolist() == list(ids)
            assert tree.draft_probs[b, node].tolist() == list(probs)
        assert not tree.draft_probs[b, number:].any()
