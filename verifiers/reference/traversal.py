"""Traversal verification (2505.12398): from the leaves to the root."""

from dataclasses import dataclass

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.block import acceptance
from eaglegbv.verifiers.reference.chooser import Chooser, accepts
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs, normalised, residual
from eaglegbv.verifiers.reference.specinfer import without
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


@dataclass(slots=True)
class _Node:
    """A node on the way back to the root, with what its rejected children have changed.

    Attributes:
        prefix: Tokens to the node.
        w: Weight of the node.
        p: Target law left.
        q: Draft law of the next child, given the children tried.
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
        """Take the rejected child's mass out of the laws and update the weight."""
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
    the same tokens count once: given the children tried, a further *different* child has the law q
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
    q = tree.draft_law(prefix) if children else ()
    return _Node(prefix, w, tree.target_law(prefix), q, children)
