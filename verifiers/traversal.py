"""Traversal verification (2505.12398): from the leaves to the root."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeStats, Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block import acceptance
from eaglegbv.verifiers.paths import (
    Residual,
    correction_token,
    drafted_nodes,
    first_draws,
    lexicographic_margins,
    paths_of,
    rooted,
)
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    accepts,
    normalised,
    residual,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.specinfer import RemainingProbs, without


@dataclass(slots=True)
class _Node:
    """A node on the way back to the root, with what its rejected children have changed."""

    prefix: Prefix  # tokens to the node
    w: Number  # weight of the node
    p: Probs  # target distribution left
    q: Probs  # draft distribution of the next child, given the children tried
    untried: list[int]  # children not yet tried, in draft order

    def reject(self, x: int) -> None:
        """Take the rejected child's mass out of the distributions and update the weight."""
        weights = residual(self.w, self.p, self.q)
        mass = sum(weights)
        if mass > 0:
            self.w = acceptance(self.w, mass)
            self.p = normalised(weights)
        else:
            self.w = 0  # nothing is left that a rejection could lead to
        self.q = without(self.q, x)


def traversal(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Descend first children to a leaf and test it; after a rejection, try the next child.

    A node is entered with w = min(1, w_parent p/q). Without untried children it is tested with its
    w; the root always accepts. A rejected child changes its parent: p <- (w p - q)+ normalised,
    w <- R / (R + 1 - w), R = sum (w p - q)+. Paths that carry the same tokens count once: given the
    children tried, a further *different* child follows q restricted to the tokens not yet tried.
    """
    numbers = tree.nodes()
    stack = [_node(tree, (), 1)]
    while True:
        node = stack[-1]
        if node.untried:
            x = node.untried.pop(0)
            stack.append(_node(tree, (*node.prefix, x), min(1, node.w * node.p[x] / node.q[x])))
        elif len(stack) == 1 or accepts(
            chooser, node.w, Purpose.ACCEPTANCE, numbers[node.prefix] - 1
        ):
            return Outcome(node.prefix, chooser.choose(node.p, Purpose.CORRECTION, 0))
        else:
            stack.pop()
            stack[-1].reject(node.prefix[-1])


def _node(tree: ReferenceTree, prefix: Prefix, w: Number) -> _Node:
    children = list(tree.children(prefix))
    q = tree.draft_probs(prefix) if children else ()
    return _Node(prefix, w, tree.target_probs(prefix), q, children)


# The same for batches.
class TraversalVerifier(Verifier):
    """Test the nodes from the leaves to the root.

    O(K L W), one test after the other, and one row of the vocabulary.
    """

    name = "traversal"
    draft_samplings = frozenset({DraftSampling.IID, DraftSampling.WOR})
    any_widths = frozenset({DraftSampling.IID, DraftSampling.WOR})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees drawn with or without replacement; node i uses acceptance number i - 1."""
        visit = _traverse(tree, target, uniforms)
        left = visit.left
        residual = Residual.at(visit.stop, left.scale, tree.draft_ids, left.taken)
        return Verdict(
            path_nodes=visit.path,
            accepted=entry_at(tree.depth, visit.stop),
            token_ids=correction_token(residual, target, uniforms.correction),
        )

    def stats(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> NodeStats:
        """Return w of every drafted node, the chance of its test once no child is left."""
        weights = _traverse(tree, target, uniforms).weights
        return {"w": weights.masked_fill(~drafted_nodes(tree), torch.nan)}


def _traverse(tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> "_Visit":
    visit = _Visit.of(tree, target)
    for leaf in _leaves(tree):
        visit.enter(leaf)
        for depth in range(tree.length - 1, -1, -1):
            visit.leave(leaf, depth, uniforms.acceptance)
    return visit


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The paths of all requests that come next in depth-first order, ``[batch, length]`` each."""

    parents: Tensor  # int64, the node above each of ``nodes``
    nodes: Tensor  # int64
    entered: Tensor  # bool: whether no earlier path has the node
    left: Tensor  # bool: whether no later path has the node


def _leaves(tree: DraftTree) -> Iterator[_Leaf]:
    """Yield the paths in depth-first order, children in the order of their first draws."""
    paths = paths_of(tree)
    first = first_draws(tree).gather(1, paths.flatten(1)).view(paths.shape)
    margins = lexicographic_margins(torch.where(paths > 0, first, -1))
    # Stable: equal paths stay in the order drawn.
    order = (margins > 0).sum(dim=2).argsort(dim=1, stable=True)
    nodes = paths.gather(1, order.unsqueeze(2).expand(paths.shape))
    real = nodes > 0
    changes = nodes[:, 1:] != nodes[:, :-1]
    ends = torch.ones_like(real[:, :1])
    entered = real & torch.cat((ends, changes), dim=1)
    left = real & torch.cat((changes, ends), dim=1)
    columns = (x.unbind(1) for x in (rooted(nodes)[:, :, :-1], nodes, entered, left))
    return (_Leaf(*column) for column in zip(*columns, strict=True))


@dataclass(slots=True)
class _Visit:
    """The state of the traversal."""

    left: RemainingProbs  # what is left of p and q at every node
    weights: Tensor  # [batch, nodes] float64, w of the nodes entered
    accepted: Tensor  # [batch, 1] bool: whether a node was accepted
    stop: Tensor  # [batch] int64, that node, else the root
    path: Tensor  # [batch, length] int64, a path through it

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs) -> Self:
        root = torch.zeros_like(tree.num_nodes)
        left = RemainingProbs.of(tree, target)
        weights = torch.ones_like(left.beside)
        none = root.bool().unsqueeze(1)
        return cls(left, weights, none, root, tree.draws[:, :, 0])

    def enter(self, leaf: _Leaf) -> None:
        """Set the weights of a path's new nodes, from the top down."""
        ratios = self.left.ratios(leaf.parents, leaf.nodes)
        known = self.weights.gather(1, leaf.nodes)
        weight = self.weights[:, 0]
        column = []
        for depth in range(leaf.nodes.shape[1]):
            fresh = (weight * ratios[:, depth]).clamp(max=1.0)
            weight = torch.where(leaf.entered[:, depth], fresh, known[:, depth])
            column.append(weight)
        # Add, because all levels past a path's end are the root. Nodes not entered have weight 1.
        change = torch.where(leaf.entered, torch.stack(column, dim=1) - known, 0.0)
        self.weights = self.weights.scatter_add(1, leaf.nodes, change)

    def leave(self, leaf: _Leaf, depth: int, uniforms: Tensor) -> None:
        """Test the node at ``depth`` (0 below the root) if none of its children is left."""
        at = slice(depth, depth + 1)
        node = leaf.nodes[:, at]
        parent = leaf.parents[:, at]
        weight = self.weights.gather(1, node)
        tested = leaf.left[:, at] & ~self.accepted
        passed = tested & (uniforms.gather(1, (node - 1).clamp(min=0)) < weight)
        self.stop = torch.where(passed.squeeze(1), node.squeeze(1), self.stop)
        self.path = torch.where(passed, leaf.nodes, self.path)
        self.accepted = self.accepted | passed
        rejected = tested & ~passed
        old = self.weights.gather(1, parent)
        mass = self.left.subtract(parent, old, rejected)
        self.left.lose(parent, node, rejected)
        new = torch.where(old < 1, mass / (mass + (1 - old)), 1.0)
        # Where nothing is left, nothing below or at the parent can be accepted.
        new = torch.where(mass > 0, new, 0.0)
        self.weights = self.weights.scatter(1, parent, torch.where(rejected, new, old))
