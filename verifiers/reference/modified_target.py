"""The modified target that the greedy rules leave behind for the next tokens.

A greedy rule accepts more than the target's law allows in one step, and pays back later: after it
stopped at depth tau < L, the next L - tau - 1 tokens follow a modified law. That debt is a *layer*;
debts of several steps lie on top of each other. With M_0 = p, layer k turns M_{k-1} into

    M_k in proportion to max(rho_k M_{k-1} - b_k, 0),

where b_k is the law by which the layer's own step would have selected its next draft: its draft law
q_k for one draft, the exact transport of (M_{k-1}, q_k, n_k) for n_k drafts. When a token x is
emitted, or a tree node entered, rho_k becomes rho_k M_{k-1}(x) / b_k(x), and n_k is drawn from the
law of the number of drafts on x.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import (
    LawAt,
    Number,
    Prefix,
    Probs,
    normalised,
    residual,
)
from eaglegbv.verifiers.reference.transport import multiplicity_law, transport
from eaglegbv.verifiers.reference.tree import ReferenceTree, Stop


@dataclass(frozen=True, slots=True)
class Layer:
    """The debt of one earlier step.

    Attributes:
        rho: Its factor at the current prefix.
        drafts: n, the drafts that would still be in play at the current prefix.
        remaining: Tokens the debt still covers.
        draft_law: The draft law of *its own* step, by all tokens committed since the start.
        stop: The stopping rule of its own step, likewise: a path that would have ended owes
            nothing further.
    """

    rho: Number
    drafts: int
    remaining: int
    draft_law: LawAt
    stop: Stop


@dataclass(frozen=True, slots=True)
class LayerAtNode:
    """A layer at one prefix: the law M_{k-1} it acts on and its b_k."""

    layer: Layer
    before: Probs
    draft_probs: Probs
    law: Probs

    @property
    def after(self) -> Probs:
        """M_k; M_{k-1} where nothing is left: such a prefix is never emitted."""
        weights = residual(self.layer.rho, self.before, self.law)
        return normalised(weights) if sum(weights) > 0 else self.before

    def entered(self, token: int, draw: Callable[[Probs], int]) -> Layer | None:
        """Return the layer after ``token``; ``None`` if it has no more effect."""
        if self.layer.remaining == 1 or not self.law[token] > 0:
            return None
        drafts = drafts_on(self.before, self.draft_probs, self.layer.drafts, token, draw)
        return replace(
            self.layer,
            rho=self.layer.rho * self.before[token] / self.law[token],
            drafts=drafts,
            remaining=self.layer.remaining - 1,
        )


def drafts_on(p: Probs, q: Probs, drafts: int, token: int, draw: Callable[[Probs], int]) -> int:
    """Draw how many of the drafts lie on the selected ``token``."""
    if drafts == 1:
        return 1
    return draw(multiplicity_law(transport(p, q, drafts), token)) + 1


@dataclass(frozen=True, slots=True)
class ModifiedTarget:
    """The target of one request after ``context``.

    Attributes:
        context: All tokens committed since the start, and those on the way into a tree.
        layers: Debts, oldest first.
    """

    context: Prefix = ()
    layers: tuple[Layer, ...] = ()

    def at_node(self, p: Probs) -> tuple[LayerAtNode, ...]:
        """Return the layers where the target's own law is ``p``."""
        nodes: list[LayerAtNode] = []
        law = p
        for layer in self.layers:
            q = layer.draft_law(self.context)
            b = q if layer.drafts == 1 else transport(law, q, layer.drafts).law
            nodes.append(LayerAtNode(layer, law, q, b))
            law = nodes[-1].after
        return tuple(nodes)

    def law(self, p: Probs) -> Probs:
        """Return the modified law where the target's own law is ``p``."""
        nodes = self.at_node(p)
        return nodes[-1].after if nodes else p

    def entered(self, p: Probs, token: int, draw: Callable[[int, Probs], int]) -> "ModifiedTarget":
        """Return the target after ``token`` is emitted or entered.

        Args:
            p: The target's own law before ``token``.
            token: The token.
            draw: ``draw(k, law)`` draws from ``law`` for layer number k.
        """
        context = (*self.context, token)
        layers: list[Layer] = []
        for k, node in enumerate(self.at_node(p)):
            layer = node.entered(token, partial(draw, k))
            if layer is not None and not layer.stop(context):
                layers.append(layer)
        return ModifiedTarget(context, tuple(layers))


@dataclass(frozen=True, slots=True)
class Shifted:
    """A function of prefixes below a root as a function of all tokens since the start."""

    below: Callable[[Prefix], Probs]
    depth: int

    def __call__(self, prefix: Prefix) -> Probs:
        """Return ``below`` at the prefix's tail."""
        return self.below(prefix[self.depth :])


@dataclass(frozen=True, slots=True)
class ShiftedStop:
    """A stopping rule below a root as one of all tokens since the start."""

    below: Stop
    depth: int

    def __call__(self, prefix: Prefix) -> bool:
        """Return ``below`` at the prefix's tail."""
        return self.below(prefix[self.depth :])


def entering_draw(
    tree: ReferenceTree, chooser: Chooser, depth: int, layers: int
) -> Callable[[int, Probs], int]:
    """Return the draw of layer number k on entering a child of a tree node of ``depth``.

    Its numbers follow those of the path selection: ``SELECTION`` with index
    2 * paths * length + depth * layers + k, where ``layers`` counts the layers at the root.
    """
    start = 2 * len(tree.paths) * tree.length + depth * layers
    return lambda k, law: chooser.choose(law, Purpose.SELECTION, start + k)


def committing_draw(chooser: Chooser) -> Callable[[int, Probs], int]:
    """Return the draw of layer number k after the step's last token: ``CORRECTION`` 1 + k.

    Fresh numbers, even if that token is the child just rejected: what was drawn on entering the
    child went into its rejection.
    """
    return lambda k, law: chooser.choose(law, Purpose.CORRECTION, 1 + k)
