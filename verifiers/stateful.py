"""The modified target that the greedy rules leave behind for the next tokens.

A greedy rule accepts more than the target's distribution allows in one step, and pays back later: after it
stopped at depth tau < L, the next L - tau - 1 tokens follow a modified distribution. That debt is a *layer*;
debts of several steps lie on top of each other. With M_0 = p, layer k turns M_{k-1} into

    M_k in proportion to max(rho_k M_{k-1} - b_k, 0),

where b_k is the distribution by which the layer's own step would have selected its next draft: its draft distribution
q_k for one draft, the exact transport of (M_{k-1}, q_k, n_k) for n_k drafts. When a token x is
emitted, or a tree node entered, rho_k becomes rho_k M_{k-1}(x) / b_k(x), and n_k is drawn from the
distribution of the number of drafts on x.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeFigures, Rule, Verdict, VerifyUniforms
from eaglegbv.verifiers.paths import place_of
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    ProbsAt,
    normalised,
    residual,
)
from eaglegbv.verifiers.proof.tree import ReferenceTree, Stop
from eaglegbv.verifiers.transport import (
    RankedProbs,
    Transport,
    draw_multiplicity,
    exact_transport,
    multiplicity_probs,
    transport,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The debt of one earlier step.

    Attributes:
        rho: Its factor at the current prefix.
        drafts: n, the drafts that would still be in play at the current prefix.
        remaining: Tokens the debt still covers.
        draft_dist: The draft distribution of *its own* step, by all tokens committed since the start.
        stop: The stopping rule of its own step, likewise: a path that would have ended owes
            nothing further.
    """

    rho: Number
    drafts: int
    remaining: int
    draft_dist: ProbsAt
    stop: Stop


@dataclass(frozen=True, slots=True)
class LayerAtNode:
    """A layer at one prefix: the distribution M_{k-1} it acts on and its b_k."""

    layer: Layer
    before: Probs
    draft_probs: Probs
    dist: Probs

    @property
    def after(self) -> Probs:
        """M_k; M_{k-1} where nothing is left: such a prefix is never emitted."""
        weights = residual(self.layer.rho, self.before, self.dist)
        return normalised(weights) if sum(weights) > 0 else self.before

    def entered(self, token: int, draw: Callable[[Probs], int]) -> Layer | None:
        """Return the layer after ``token``; ``None`` if it has no more effect."""
        if self.layer.remaining == 1 or not self.dist[token] > 0:
            return None
        drafts = drafts_on(self.before, self.draft_probs, self.layer.drafts, token, draw)
        return replace(
            self.layer,
            rho=self.layer.rho * self.before[token] / self.dist[token],
            drafts=drafts,
            remaining=self.layer.remaining - 1,
        )


def drafts_on(p: Probs, q: Probs, drafts: int, token: int, draw: Callable[[Probs], int]) -> int:
    """Draw how many of the drafts lie on the selected ``token``."""
    if drafts == 1:
        return 1
    return draw(multiplicity_probs(exact_transport(p, q, drafts), token)) + 1


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
        """Return the layers where the target's own distribution is ``p``."""
        nodes: list[LayerAtNode] = []
        dist = p
        for layer in self.layers:
            q = layer.draft_dist(self.context)
            b = q if layer.drafts == 1 else exact_transport(dist, q, layer.drafts).dist
            nodes.append(LayerAtNode(layer, dist, q, b))
            dist = nodes[-1].after
        return tuple(nodes)

    def dist(self, p: Probs) -> Probs:
        """Return the modified distribution where the target's own distribution is ``p``."""
        nodes = self.at_node(p)
        return nodes[-1].after if nodes else p

    def entered(self, p: Probs, token: int, draw: Callable[[int, Probs], int]) -> "ModifiedTarget":
        """Return the target after ``token`` is emitted or entered.

        Args:
            p: The target's own distribution before ``token``.
            token: The token.
            draw: ``draw(k, dist)`` draws from ``dist`` for layer number k.
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
    return lambda k, dist: chooser.choose(dist, Purpose.SELECTION, start + k)


def committing_draw(chooser: Chooser) -> Callable[[int, Probs], int]:
    """Return the draw of layer number k after the step's last token: ``CORRECTION`` 1 + k.

    Fresh numbers, even if that token is the child just rejected: what was drawn on entering the
    child went into its rejection.
    """
    return lambda k, dist: chooser.choose(dist, Purpose.CORRECTION, 1 + k)


# What the steps of greedy rules owe: layers, and the draft samplings of the steps they come from.
#
# See :mod:`eaglegbv.verifiers.stateful` for what a layer does to the target.


MOST_RHO = 1e100
"""Largest rho that is kept.

A debt may follow a text whose tokens its own step would hardly have drafted: b can be 1e-130 or
less at each of them, and the product of the M / b soon exceeds what float64 holds. At this limit
M_k is M_{k-1} already: where M_{k-1}(x) >= 1e-80, b is less than 1e-20 of rho M_{k-1}, and all
other tokens together have less than 1e-80 times the size of the vocabulary.
"""


@dataclass(frozen=True, slots=True)
class Layers:
    """The debts of earlier steps, ``[batch, layers]`` each, oldest first.

    Attributes:
        rho: float64.
        drafts: int64, n, the drafts that would still be in play.
        remaining: int64, tokens the debt still covers; 0 where there is no layer.
        most_drafts: A bound on ``drafts``: the most paths any of the steps had.
    """

    rho: Tensor
    drafts: Tensor
    remaining: Tensor
    most_drafts: int

    @classmethod
    def none(cls, batch: int, *, device: torch.device | str = "cpu") -> Self:
        """Return no layers: the state of new requests."""
        counts = torch.zeros((batch, 0), dtype=torch.int64, device=device)
        return cls(counts.to(torch.float64), counts, counts, 1)

    @property
    def count(self) -> int:
        """Padded number of layers."""
        return self.rho.shape[1]


def rho_after(rho: Tensor, target_prob: Tensor, plan_prob: Tensor) -> Tensor:
    """Return ``rho M(x) / b(x)`` once a token x is entered, at most :data:`MOST_RHO`.

    Args:
        rho: float64, of any shape, as are the others.
        target_prob: M(x), the distribution that the debt modifies.
        plan_prob: b(x) > 0, by which the debt's own step would have selected x.
    """
    factor = (target_prob / plan_prob).clamp(max=MOST_RHO)
    return (rho * factor).clamp(max=MOST_RHO)


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """Draft distributions as short lists.

    Attributes:
        ids: ``[batch, layers, width]`` int64.
        probs: ``[batch, layers, width]`` float64; padding entries are 0. All are 0 where there is
            no layer, or where the paths of the layer's own step would have ended.
    """

    ids: Tensor
    probs: Tensor


class LayerProbs(Protocol):
    """The draft distributions of layers, recalled along a path."""

    def after(self, tokens: Tensor) -> SparseProbs:
        """Return the distribution of every layer's own step after ``tokens``.

        Called once per depth, from the root down, each time with one token more.

        Args:
            tokens: ``[batch, depth]`` int64, the tokens entered below the root so far; depth is 0
                at the root. They are meaningless for requests whose path has already ended.
        """


@dataclass(frozen=True, slots=True)
class Debts:
    """What a verification needs to know about earlier steps."""

    layers: Layers
    dists: LayerProbs


# The modified target that greedy block rules leave behind, for batches.
#
# A greedy rule accepts more than the target's distribution allows in one step and pays back later: after it
# stopped at depth tau < L, the next L - tau - 1 tokens follow a modified distribution. That debt is a *layer*.
# With ``M_0 = p``, layer k turns ``M_{k-1}`` into
#
# M_k in proportion to max(rho_k M_{k-1} - b_k, 0),
#
# where b_k is the distribution by which the layer's own step would have selected its next draft. When a token
# x is emitted, or a tree node entered, rho_k becomes ``rho_k M_{k-1}(x) / b_k(x)``, and n_k is drawn
# from the distribution of the number of drafts on x.
#
# :mod:`eaglegbv.verifiers.stateful` says what an engine keeps of this from step to step.


@dataclass(frozen=True, slots=True)
class ModifiedNode:
    """The modified target at one node per request.

    Attributes:
        layers: The layers in force there.
        ranked: ``[batch, layers, width]``: M_{k-1} and q_k of each layer, ranked.
        plan: ``[batch, layers, width]``: b_k.
        mass: ``[batch, layers]`` float64, the sum of (rho_k M_{k-1} - b_k)+, the normaliser of M_k;
            0 where a layer has no effect.
        probs: ``[batch, width]`` float64, M at the tokens asked for.
    """

    layers: Layers
    ranked: RankedProbs
    plan: Transport
    mass: Tensor
    probs: Tensor

    @property
    def active(self) -> Tensor:
        """``[batch, layers]`` bool: the layers in force."""
        return self.layers.remaining > 0

    @classmethod
    def at(
        cls, target: TargetProbs, nodes: Tensor, layers: Layers, dists: SparseProbs, ids: Tensor
    ) -> Self:
        """Work out M at ``ids``.

        Args:
            target: The target's own distributions.
            nodes: ``[batch]`` int64.
            layers: The layers that reach the nodes.
            dists: Their draft distributions there; a layer without a distribution ends.
            ids: ``[batch, width]`` int64.
        """
        layers = _in_force(layers, dists)
        wanted = torch.cat((ids, dists.ids.flatten(1)), dim=1)
        rows = target.rows.gather(1, nodes.unsqueeze(1))
        logits = target.logits[rows, wanted].to(torch.float64)
        probs = torch.exp(logits - target.log_normaliser[rows])
        ranked, plans, masses = [], [], []
        width = dists.ids.shape[2]
        for k in range(layers.count):
            start = ids.shape[1] + k * width
            own = RankedProbs.of(
                dists.ids[:, k], dists.probs[:, k], probs[:, start : start + width]
            )
            plan = transport(own, layers.drafts[:, k])
            rho = layers.rho[:, k : k + 1]
            mass = _mass(own, plan, rho) * (layers.remaining[:, k : k + 1] > 0)
            reduced = (rho * probs - _lookup(wanted, own, plan.dist)).clamp(min=0) / mass
            probs = torch.where(mass > 0, reduced, probs)
            ranked.append(own)
            plans.append(plan)
            masses.append(mass)
        return cls(
            layers=layers,
            ranked=_stack_ranked(ranked, dists),
            plan=Transport(
                _stack([plan.dist for plan in plans], dists.probs),
                _stack([plan.highest for plan in plans], dists.probs),
            ),
            mass=torch.cat([*masses, layers.rho[:, :0]], dim=1),
            probs=probs[:, : ids.shape[1]],
        )

    def entered(self, tokens: Tensor, uniforms: Tensor) -> Layers:
        """Return the layers after ``tokens`` ``[batch]``.

        Args:
            tokens: int64.
            uniforms: ``[batch, layers]``, one for each layer in force, in their order.
        """
        if self.layers.count == 0:
            return self.layers
        ids, draft = self.ranked.ids, self.ranked.draft
        ranks = place_of(tokens.view(-1, 1).expand(-1, self.layers.count), ids, draft)
        at = ranks.unsqueeze(2)
        b = self.plan.dist.gather(2, at).squeeze(2)
        b = torch.where(ids.gather(2, at).squeeze(2) == tokens.unsqueeze(1), b, 0.0)
        # A layer whose distribution cannot produce the token has no further effect.
        lasts = self.active & (self.layers.remaining > 1) & (b > 0)
        rho = rho_after(self.layers.rho, self.ranked.target.gather(2, at).squeeze(2), b)
        turn = (self.active.to(torch.int64).cumsum(dim=1) - 1).clamp(min=0)
        drafts = draw_multiplicity(
            _flat(self.ranked),
            Transport(self.plan.dist.flatten(0, 1), self.plan.highest.flatten(0, 1)),
            self.layers.drafts.flatten(),
            ranks.flatten(),
            uniforms.gather(1, turn).flatten(),
            self.layers.most_drafts,
        ).view_as(ranks)
        return Layers(
            rho=torch.where(lasts, rho, 0.0),
            drafts=torch.where(lasts, drafts, 1),
            remaining=torch.where(lasts, self.layers.remaining - 1, 0),
            most_drafts=self.layers.most_drafts,
        )

    def whole(self, target: TargetProbs, nodes: Tensor) -> Tensor:
        """Return M over the whole vocabulary at ``nodes`` ``[batch]``: ``[batch, vocab]``."""
        probs = target.probs_of(nodes)
        for k in range(self.layers.count):
            mass = self.mass[:, k : k + 1]
            reduced = self.layers.rho[:, k : k + 1] * probs
            reduced.scatter_add_(1, self.ranked.ids[:, k], -self.plan.dist[:, k])
            probs = torch.where(mass > 0, reduced.clamp_(min=0) / mass, probs)
        return probs


def _in_force(layers: Layers, dists: SparseProbs) -> Layers:
    going = dists.probs.sum(dim=2) > 0
    remaining = torch.where(going, layers.remaining, 0)
    return Layers(layers.rho, layers.drafts, remaining, layers.most_drafts)


def _mass(own: RankedProbs, plan: Transport, rho: Tensor) -> Tensor:
    """Return ``sum (rho M - b)+``, ``[batch, 1]``: on the support of b and off it."""
    inside = (rho * own.target - plan.dist).clamp(min=0).sum(dim=1, keepdim=True)
    beside = (1 - own.target.sum(dim=1, keepdim=True)).clamp(min=0)
    return inside + rho * beside


def _lookup(wanted: Tensor, own: RankedProbs, values: Tensor) -> Tensor:
    """Return ``values`` ``[batch, width]`` over ``own.ids`` at ``wanted`` ids, 0 elsewhere."""
    found = (wanted.unsqueeze(2) == own.ids.unsqueeze(1)) & (own.draft > 0).unsqueeze(1)
    return (found * values.unsqueeze(1)).sum(dim=2)


def _stack(columns: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(tuple(columns), dim=1) if columns else torch.zeros_like(like)


def _stack_ranked(ranked: Sequence[RankedProbs], dists: SparseProbs) -> RankedProbs:
    return RankedProbs(
        ids=_stack([r.ids for r in ranked], dists.ids),
        draft=_stack([r.draft for r in ranked], dists.probs),
        target=_stack([r.target for r in ranked], dists.probs),
    )


def _flat(ranked: RankedProbs) -> RankedProbs:
    return RankedProbs(
        ranked.ids.flatten(0, 1), ranked.draft.flatten(0, 1), ranked.target.flatten(0, 1)
    )


# Verifiers with state: each step pays the debts of earlier ones and may leave one of its own.
#
# What an engine keeps for a request, from step to step:
#
# * The numbers of its layers, a column of :class:`eaglegbv.verifiers.stateful.Layers`, oldest first. A
# new request has none. After each verification take :attr:`StatefulVerdict.layers` and drop the
# columns whose ``remaining`` is 0. The last column, if it remains, is the layer of the step just
# done.
# * For each layer a *snapshot* of what its draft distribution needs: the drafter's settings and state at the
# root of the step that pushed the layer, and the tokens committed since that root. The distribution of a
# layer is that of its own step, not of the current one, so a drafter must be able to recall what
# that step would have drawn from (:class:`eaglegbv.drafters.base.ReplayingDrafter`).
# * Nothing else. Steps without drafts (a root alone) go through the same verifier, so that debts are
# paid there too; layers survive pre-emption with the request.
#
# At verification the engine passes ``Debts(layers, dists)``, where ``dists.after(tokens)`` recalls the
# distribution of every layer of every request, after the given tokens of the path being selected. Requests
# with fewer layers are padded by columns whose ``remaining`` is 0.


@dataclass(frozen=True, slots=True)
class StatefulUniforms:
    """The random numbers of a verification with state.

    Attributes:
        plain: Those every verification uses.
        entering: ``[batch, length, layers]`` float64: at a node of depth d, number (d, j) moves the
            j-th of the layers in force to the child entered.
        leaving: ``[batch, layers + 1]`` float64: likewise after the step's last token; the number
            after those of the layers in force belongs to the new layer.
    """

    plain: VerifyUniforms
    entering: Tensor
    leaving: Tensor

    @classmethod
    def draw(
        cls,
        streams: Sequence[RequestRng],
        steps: Sequence[int],
        layers: Sequence[int],
        *,
        paths: int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every request's numbers from its own stream at its own step counter.

        They continue the selection and correction numbers of the plain draw, so they do not depend
        on how many layers other requests have.

        Args:
            streams: The requests' streams.
            steps: Their step counters.
            layers: The number of layers of each request.
            paths: Paths of the tree.
            length: Length of the tree.
            device: Where the numbers are wanted.
        """
        plain = VerifyUniforms.draw(streams, steps, paths=paths, length=length, device=device)
        most = max(layers, default=0)
        entering = np.zeros((len(streams), length, most))
        leaving = np.zeros((len(streams), most + 1))
        start = 2 * paths * length
        for b, (stream, step, count) in enumerate(zip(streams, steps, layers, strict=True)):
            numbers = stream.draw(step, Purpose.SELECTION, start + length * count)[start:]
            entering[b, :, :count] = numbers.reshape(length, count)
            leaving[b, : count + 1] = stream.draw(step, Purpose.CORRECTION, count + 2)[1:]
        return cls(
            plain, torch.from_numpy(entering).to(device), torch.from_numpy(leaving).to(device)
        )


@dataclass(frozen=True, slots=True)
class StatefulVerdict:
    """What a verification commits, and what it leaves to the next.

    Attributes:
        verdict: The tokens.
        layers: The debts after the last of them: those passed in, and in the last column the one
            of this step; ``remaining`` is 0 where there is none.
        figures: Computes the numbers, beside p and q, by which the verification decided.
    """

    verdict: Verdict
    layers: Layers
    figures: Callable[[], NodeFigures]


class StatefulVerifier(Rule):
    """A rule whose steps are lossless only in sequence: each needs the debts of those before."""

    @abstractmethod
    def verify(
        self, tree: DraftTree, target: TargetProbs, uniforms: StatefulUniforms, debts: Debts
    ) -> StatefulVerdict:
        """Judge the drafts of a batch, given the debts of earlier steps.

        ``tree.length`` must be the length the paths were drawn to, even if all ended earlier: it
        determines how long a debt lasts. A tree of a root alone yields a token of the modified
        target.

        Raises:
            SamplingMismatch: The tree's draft sampling is not among :attr:`draft_samplings`.
        """
