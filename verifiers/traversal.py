"""Traversal verification (2505.12398): from the leaves to the root."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeFigures, RemainingProbs, Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block import acceptance
from eaglegbv.verifiers.paths import (
    Residual,
    correction_token,
    drafted_nodes,
    first_paths,
    lexicographic_margins,
    rooted,
    rows_at,
    steps_of,
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
from eaglegbv.verifiers.specinfer import without


@dataclass(slots=True)
class _Node:
    """A node on the way back to the root, with what its rejected children have changed.

    Attributes:
        prefix: Tokens to the node.
        w: Weight of the node.
        p: Target distribution left.
        q: Draft sampling of the next child, given the children tried.
        untried: Children not yet tried, in draft order.
    """

    prefix: Prefix
    w: Number
    p: Probs
    q: Probs
    untried: list[int]

    def child_weight(self, x: int) -> Number:
        """Return min(1, w p(x) / q(x))."""
        return min(1, self.w * self.p[x] / self.q[x])

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

    A node without untried children is tested with its w; the root always accepts. Paths that carry
    the same tokens count once: given the children tried, a further *different* child has the distribution q
    restricted to the tokens not yet tried.
    """
    numbers = tree.nodes()
    stack = [_node(tree, (), 1)]
    while True:
        node = stack[-1]
        if node.untried:
            x = node.untried.pop(0)
            stack.append(_node(tree, (*node.prefix, x), node.child_weight(x)))
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


# Traversal verification: from the leaves to the root.


class TraversalVerifier(Verifier):
    """Descend first children to a leaf and test it; after a rejection, try the next child.

    A node is entered with ``w = min(1, w_parent p/q)`` and tested with its w when no child is left;
    a rejected child changes its parent: ``p <- (w p - q)+``, ``w <- R / (R + 1 - w)``, and q loses
    the child. The root always accepts. Equal drafts count once.
    """

    name: ClassVar[str] = "traversal"
    source: ClassVar[str] = "Traversal Verification (2505.12398)"
    cost: ClassVar[str] = "O(K L W), one test after the other, and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.IID, DraftSampling.WOR}
    )

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees drawn with or without replacement; node i uses acceptance number i - 1."""
        return _traverse(tree, target, uniforms).verdict(tree, target, uniforms)

    def figures(
        self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
    ) -> NodeFigures:
        """Return w of every drafted node, the chance of its test once no child is left."""
        weights = _traverse(tree, target, uniforms).weights
        return {"w": weights.masked_fill(~drafted_nodes(tree), torch.nan)}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The paths of all requests that come next in depth-first order.

    Attributes:
        parents: ``[batch, length]`` int64, the node above each of ``nodes``.
        nodes: ``[batch, length]`` int64.
        entered: ``[batch, length]`` bool: whether no earlier path has the node.
        left: ``[batch, length]`` bool: whether no later path has the node.
    """

    parents: Tensor
    nodes: Tensor
    entered: Tensor
    left: Tensor


def _leaves(tree: DraftTree) -> list[_Leaf]:
    """Return the paths in depth-first order, children in the order of their first path."""
    real = steps_of(tree)
    first = first_paths(tree).gather(1, tree.path_nodes.flatten(1)).view_as(tree.path_nodes)
    margins = lexicographic_margins(torch.where(real, first, -1))
    # Stable: equal paths stay in the order drawn.
    order = (margins > 0).sum(dim=2).argsort(dim=1, stable=True)
    at = order.unsqueeze(2).expand_as(tree.path_nodes)
    nodes, real = tree.path_nodes.gather(1, at), real.gather(1, at)
    changes = nodes[:, 1:] != nodes[:, :-1]
    ends = torch.ones_like(real[:, :1])
    entered = real & torch.cat((ends, changes), dim=1)
    left = real & torch.cat((changes, ends), dim=1)
    parents = rooted(nodes)[:, :, :-1]
    return [_Leaf(parents[:, k], nodes[:, k], entered[:, k], left[:, k]) for k in range(tree.paths)]


def _traverse(tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> "_Visit":
    visit = _Visit.of(tree, target)
    for leaf in _leaves(tree):
        visit.enter(leaf)
        for depth in range(tree.length - 1, -1, -1):
            visit.leave(leaf, depth, uniforms.acceptance)
    return visit


@dataclass(slots=True)
class _Visit:
    """The state of the traversal.

    Attributes:
        dists: The distributions left at every node.
        weights: ``[batch, nodes]`` float64, w of the nodes entered.
        accepted: ``[batch]`` bool: whether a node was accepted.
        stop: ``[batch]`` int64, that node, else the root.
        path: ``[batch, length]`` int64, a path through it.
    """

    dists: RemainingProbs
    weights: Tensor
    accepted: Tensor
    stop: Tensor
    path: Tensor

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs) -> Self:
        root = torch.zeros_like(tree.num_nodes)
        dists = RemainingProbs.of(tree, target)
        weights = torch.ones_like(dists.beside)
        return cls(dists, weights, root.bool(), root, tree.path_nodes[:, 0])

    def enter(self, leaf: _Leaf) -> None:
        """Set the weights of a path's new nodes, from the top down."""
        ratios = self.dists.ratios(leaf.parents, leaf.nodes)
        known = self.weights.gather(1, leaf.nodes)
        weight, column = self.weights[:, 0], []
        for depth in range(leaf.nodes.shape[1]):
            fresh = (weight * ratios[:, depth]).clamp(max=1.0)
            weight = torch.where(leaf.entered[:, depth], fresh, known[:, depth])
            column.append(weight)
        values = torch.where(leaf.entered, torch.stack(column, dim=1), 0.0)
        # Add, because a path repeats a node past its end. Nodes not entered yet have weight 1.
        self.weights = self.weights.scatter_add(
            1, leaf.nodes, torch.where(leaf.entered, values - known, 0.0)
        )

    def leave(self, leaf: _Leaf, depth: int, uniforms: Tensor) -> None:
        """Test the node at ``depth`` (0 below the root) if none of its children is left."""
        node, parent = leaf.nodes[:, depth : depth + 1], leaf.parents[:, depth : depth + 1]
        weight = self.weights.gather(1, node)
        tested = leaf.left[:, depth : depth + 1] & ~self.accepted.unsqueeze(1)
        passed = tested & (uniforms.gather(1, (node - 1).clamp(min=0)) < weight)
        self.stop = torch.where(passed.squeeze(1), node.squeeze(1), self.stop)
        self.path = torch.where(passed, leaf.nodes, self.path)
        self.accepted = self.accepted | passed.squeeze(1)
        self._reject(parent, node, tested & ~passed)

    def _reject(self, parent: Tensor, node: Tensor, rejected: Tensor) -> None:
        old = self.weights.gather(1, parent)
        mass = self.dists.subtract(parent, old, rejected)
        self.dists.lose(parent, node, rejected)
        new = torch.where(old < 1, mass / (mass + (1 - old)), 1.0)
        # Where nothing is left, nothing below or at the parent can be accepted.
        new = torch.where(mass > 0, new, 0.0)
        self.weights = self.weights.scatter(1, parent, torch.where(rejected, new, old))

    def verdict(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Return the accepted node's path, and draw the token after it."""
        at = self.stop.unsqueeze(1)
        residual = Residual(
            nodes=self.stop,
            weight=self.dists.scale.gather(1, at).squeeze(1),
            ids=rows_at(self.dists.ids, at).squeeze(1),
            draft=rows_at(self.dists.taken, at).squeeze(1),
        )
        return Verdict(
            path_nodes=self.path,
            accepted=tree.depth.gather(1, at).squeeze(1),
            token_ids=correction_token(residual, target, uniforms.correction),
        )
