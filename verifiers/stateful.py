"""The modified target that the greedy rules leave behind for the next tokens.

A greedy rule accepts more than the target's distribution allows in one step, and makes up for it
later: after it stopped at depth tau < L, the next L - tau - 1 tokens follow a modified
distribution. What a step leaves is a *layer*; layers of several steps lie on top of each other.
With M_0 = p, layer k turns M_{k-1} into

    M_k in proportion to max(rho_k M_{k-1} - b_k, 0),

where b_k is the distribution by which the layer's own step would have selected its next draft: its
draft distribution q_k for one draft, the exact transport of (M_{k-1}, q_k, n_k) for n_k drafts.
When a token x is emitted, or a tree node entered, rho_k becomes rho_k M_{k-1}(x) / b_k(x), and n_k
is drawn from the distribution of the number of drafts on x.

An engine keeps for a request, from step to step, the numbers of its layers, a row of
:class:`Layers`, none at first: after each verification it takes :attr:`StatefulVerdict.layers` and
drops the columns whose ``remaining`` is 0; the last, if it remains, is that of the step just done.
And for each layer a *snapshot* of what its draft distribution needs, the drafter's settings and
state at the root of the step that left it and the tokens committed since, to replay what *that*
step would have drawn from. Steps without drafts (a root alone) go through the same verifier.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeStats, Rule, Verdict, VerifyUniforms
from eaglegbv.verifiers.paths import place_of
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    ProbsAt,
    T,
    normalised,
    residual,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree, Stop
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
    """What one earlier step left."""

    rho: Number  # its factor at the current prefix
    drafts: int  # n, the drafts that would still be in play at the current prefix
    remaining: int  # tokens it still covers
    # the draft distribution of *its own* step, by all tokens committed since the start
    draft_probs: ProbsAt
    # the stopping rule of its own step, likewise: beyond the end of a path there is nothing to make
    # up for
    stop: Stop


@dataclass(frozen=True, slots=True)
class LayerAtNode:
    """A layer at one prefix: the distribution M_{k-1} it acts on, its q_k and its b_k."""

    layer: Layer
    before: Probs
    q: Probs
    b: Probs

    @property
    def after(self) -> Probs:
        """M_k; M_{k-1} where nothing is left: such a prefix is never emitted."""
        weights = residual(self.layer.rho, self.before, self.b)
        return normalised(weights) if sum(weights) > 0 else self.before

    def entered(self, token: int, draw: Callable[[Probs], int]) -> Layer | None:
        """Return the layer after ``token``; ``None`` if it has no more effect."""
        if self.layer.remaining == 1 or not self.b[token] > 0:
            return None
        return replace(
            self.layer,
            rho=self.layer.rho * self.before[token] / self.b[token],
            drafts=drafts_on(self.before, self.q, self.layer.drafts, token, draw),
            remaining=self.layer.remaining - 1,
        )


def drafts_on(p: Probs, q: Probs, drafts: int, token: int, draw: Callable[[Probs], int]) -> int:
    """Draw how many of the drafts lie on the selected ``token``."""
    if drafts == 1:
        return 1
    return draw(multiplicity_probs(exact_transport(p, q, drafts), token)) + 1


@dataclass(frozen=True, slots=True)
class ModifiedTarget:
    """The target of one request after ``context``."""

    context: Prefix = ()  # all tokens committed since the start, and those on the way into a tree
    layers: tuple[Layer, ...] = ()  # oldest first

    def at_node(self, p: Probs) -> tuple[LayerAtNode, ...]:
        """Return the layers where the target's own distribution is ``p``."""
        nodes: list[LayerAtNode] = []
        M = p
        for layer in self.layers:
            q = layer.draft_probs(self.context)
            b = q if layer.drafts == 1 else exact_transport(M, q, layer.drafts).probs
            nodes.append(LayerAtNode(layer, M, q, b))
            M = nodes[-1].after
        return tuple(nodes)

    def probs(self, p: Probs) -> Probs:
        """Return the modified distribution where the target's own distribution is ``p``."""
        nodes = self.at_node(p)
        return nodes[-1].after if nodes else p

    def entered(self, p: Probs, token: int, draw: Callable[[int, Probs], int]) -> "ModifiedTarget":
        """Return the target after ``token`` is emitted or entered, where its own distribution is p.

        ``draw(k, probs)`` draws from ``probs`` for layer number k.
        """
        context = (*self.context, token)
        layers: list[Layer] = []
        for k, node in enumerate(self.at_node(p)):
            layer = node.entered(token, partial(draw, k))
            if layer is not None and not layer.stop(context):
                layers.append(layer)
        return ModifiedTarget(context, tuple(layers))


@dataclass(frozen=True, slots=True)
class Step:
    """What a verification with state commits, and the target that follows."""

    outcome: Outcome
    target: ModifiedTarget


VerifyWithState: TypeAlias = Callable[[ReferenceTree, ModifiedTarget, Chooser], Step]
"""A rule that leaves a modified target to the next step: judges one tree."""


@dataclass(frozen=True, slots=True)
class Shifted(Generic[T]):
    """A function of prefixes below a root as a function of all tokens since the start."""

    below: Callable[[Prefix], T]
    depth: int

    def __call__(self, prefix: Prefix) -> T:
        """Return ``below`` at the prefix's tail."""
        return self.below(prefix[self.depth :])


def entering_draw(
    tree: ReferenceTree, chooser: Chooser, depth: int, layers: int
) -> Callable[[int, Probs], int]:
    """Return the draw of layer number k on entering a child of a tree node of ``depth``.

    Its numbers follow those of the path selection: ``SELECTION`` with index
    2 * drafts * length + depth * layers + k, where ``layers`` counts the layers at the root.
    """
    start = 2 * tree.most_draws * tree.length + depth * layers
    return lambda k, probs: chooser.choose(probs, Purpose.SELECTION, start + k)


def committing_draw(chooser: Chooser) -> Callable[[int, Probs], int]:
    """Return the draw of layer number k after the step's last token: ``CORRECTION`` 1 + k.

    Fresh numbers, as what was drawn on entering a child went into its rejection.
    """
    return lambda k, probs: chooser.choose(probs, Purpose.CORRECTION, 1 + k)


# The same for batches: what verifiers take and return.
@dataclass(frozen=True, slots=True)
class Layers:
    """What earlier steps left, ``[batch, layers]`` each, oldest first."""

    rho: Tensor  # float64
    drafts: Tensor  # int64, n, the drafts that would still be in play
    remaining: Tensor  # int64, tokens the layer still covers; 0 where there is none
    most_drafts: int  # A bound on ``drafts``: the most paths any of the steps had

    @classmethod
    def none(cls, batch: int) -> Self:
        """Return no layers: the state of new requests."""
        counts = torch.zeros((batch, 0), dtype=torch.int64)
        return cls(counts.to(torch.float64), counts, counts, 1)

    @property
    def count(self) -> int:
        """Padded number of layers."""
        return self.rho.shape[1]


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """Draft distributions as short lists, ``[batch, layers, width]``."""

    ids: Tensor  # int64
    # float64; 0 at padding entries, everywhere where there is no layer, and where the paths of the
    # layer's own step would have ended
    probs: Tensor


class LayerProbs(Protocol):
    """The draft distributions of layers, replayed along a path."""

    def after(self, tokens: Tensor) -> SparseProbs:
        """Return the distribution of every layer's own step after ``tokens``.

        Called once per depth, from the root down, each time with one token more: ``[batch, depth]``
        int64, those entered below the root, meaningless once a request's path has ended.
        """


@dataclass(frozen=True, slots=True)
class StatefulUniforms:
    """The random numbers of a verification with state."""

    plain: VerifyUniforms  # those every verification uses
    # [batch, length, layers] float64: at a node of depth d, number (d, j) moves the j-th of the
    # layers in force to the child entered
    entering: Tensor
    # [batch, layers + 1] float64: likewise after the step's last token; the number after those
    # of the layers in force belongs to the new layer
    leaving: Tensor

    @classmethod
    def draw(
        cls,
        rngs: Sequence[RequestRng],
        steps: Sequence[int],
        layers: Sequence[int],
        *,
        drafts: int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every request's numbers from its own rng at its own step counter.

        They continue the selection and correction numbers of the plain draw, so they do not depend
        on how many layers other requests have; ``layers`` counts those of each request.
        """
        plain = VerifyUniforms.draw(rngs, steps, drafts=drafts, length=length, device=device)
        most = max(layers, default=0)
        entering = np.zeros((len(rngs), length, most))
        leaving = np.zeros((len(rngs), most + 1))
        start = 2 * drafts * length
        for b, (rng, step, count) in enumerate(zip(rngs, steps, layers, strict=True)):
            numbers = rng.draw(step, Purpose.SELECTION, start + length * count)[start:]
            entering[b, :, :count] = numbers.reshape(length, count)
            leaving[b, : count + 1] = rng.draw(step, Purpose.CORRECTION, count + 2)[1:]
        return cls(plain, *(torch.from_numpy(x).to(device) for x in (entering, leaving)))


@dataclass(frozen=True, slots=True)
class StatefulVerdict(Verdict):
    """What a verification commits, and what it leaves to the next."""

    # the layers after the last token: those passed in, and in the last column the one of this step;
    # ``remaining`` is 0 where there is none
    layers: Layers
    # computes the numbers, beside p and q, by which the verification decided
    stats: Callable[[], NodeStats]


class StatefulVerifier(Rule):
    """A rule whose steps are lossless only in sequence: each needs the layers of those before."""

    @abstractmethod
    def verify(
        self,
        tree: DraftTree,
        target: TargetProbs,
        uniforms: StatefulUniforms,
        layers: Layers,
        layer_probs: LayerProbs,
    ) -> StatefulVerdict:
        """Judge the drafts of a batch, given what earlier steps left.

        ``tree.length`` must be the length the paths were drawn to, even if all ended earlier: it
        determines how long a layer lasts. A tree of a root alone yields a token of the modified
        target. Requests with fewer ``layers`` than others are padded by columns whose
        ``remaining`` is 0; ``layer_probs`` are their draft distributions.

        Raises:
            SamplingMismatch: The tree's draft sampling is not among :attr:`draft_samplings`.
        """


MOST_RHO = 1e100
"""Largest rho that is kept.

A layer may follow a sequence whose tokens its own step would hardly have drafted: b can be 1e-130
or less at each of them, and the product of the M / b soon exceeds what float64 holds. At this limit
M_k is M_{k-1} already: where M_{k-1}(x) >= 1e-80, b is less than 1e-20 of rho M_{k-1}, and all
other tokens together have less than 1e-80 times the size of the vocabulary.
"""


def rho_after(rho: Tensor, target_prob: Tensor, plan_prob: Tensor) -> Tensor:
    """Return ``rho M(x) / b(x)`` once a token x is entered, at most :data:`MOST_RHO`; float64.

    M is the distribution that the layer modifies, b > 0 that by which its own step would have
    selected x.
    """
    factor = (target_prob / plan_prob).clamp(max=MOST_RHO)
    return (rho * factor).clamp(max=MOST_RHO)


@dataclass(frozen=True, slots=True)
class ModifiedNode:
    """The modified target at one node per request."""

    layers: Layers  # the layers in force there
    plan: Transport  # [batch, layers, width]: M_{k-1} and q_k of each layer, ranked, and b_k
    # [batch, layers] float64, the sum of (rho_k M_{k-1} - b_k)+, the normaliser of M_k; 0 where
    # a layer has no effect
    mass: Tensor
    probs: Tensor  # [batch, width] float64, M at the tokens asked for

    @property
    def active(self) -> Tensor:
        """``[batch, layers]`` bool: the layers in force."""
        return self.layers.remaining > 0

    @classmethod
    def at(
        cls, target: TargetProbs, nodes: Tensor, layers: Layers, draft: SparseProbs, ids: Tensor
    ) -> Self:
        """Work out M at ``ids`` ``[batch, width]`` int64 of ``nodes`` ``[batch]`` int64.

        ``layers`` are those that reach the nodes, ``draft`` their draft distributions there; a
        layer without one ends.
        """
        remaining = torch.where(draft.probs.sum(dim=2) > 0, layers.remaining, 0)
        wanted = torch.cat((ids, draft.ids.flatten(1)), dim=1)
        probs = target.probs_in(entry_at(target.rows, nodes), wanted)
        plans = []
        masses = []
        width = draft.ids.shape[2]
        for k in range(layers.count):
            start = ids.shape[1] + k * width
            target_probs = probs[:, start : start + width]
            ranked = RankedProbs.of(draft.ids[:, k], draft.probs[:, k], target_probs)
            plan = transport(ranked, layers.drafts[:, k])
            rho = layers.rho[:, k : k + 1]
            mass = _mass(plan, rho) * (remaining[:, k : k + 1] > 0)
            reduced = (rho * probs - _selected_at(plan, wanted)).clamp(min=0) / mass
            probs = torch.where(mass > 0, reduced, probs)
            plans.append(plan)
            masses.append(mass)
        return cls(
            layers=replace(layers, remaining=remaining),
            plan=_stacked(plans) if plans else Transport(draft.ids, *(draft.probs,) * 4),
            mass=torch.cat([*masses, layers.rho[:, :0]], dim=1),
            probs=probs[:, : ids.shape[1]],
        )

    def entered(self, tokens: Tensor, uniforms: Tensor) -> Layers:
        """Return the layers after ``tokens`` ``[batch]`` int64.

        ``uniforms`` ``[batch, layers]``: one for each layer in force, in their order.
        """
        layers = self.layers
        plan = self.plan
        if layers.count == 0:
            return layers
        ranks = place_of(tokens.view(-1, 1).expand(-1, layers.count), plan.ids, plan.draft)
        drafted = entry_at(plan.ids, ranks) == tokens.unsqueeze(1)
        b = torch.where(drafted, entry_at(plan.selected, ranks), 0.0)
        # A layer whose distribution cannot produce the token has no further effect.
        lasts = self.active & (layers.remaining > 1) & (b > 0)
        rho = rho_after(layers.rho, entry_at(plan.target, ranks), b)
        turn = (self.active.to(torch.int64).cumsum(dim=1) - 1).clamp(min=0)
        drafts = draw_multiplicity(
            plan.mapped(lambda tensor: tensor.flatten(0, 1)),
            layers.drafts.flatten(),
            ranks.flatten(),
            uniforms.gather(1, turn).flatten(),
            layers.most_drafts,
        ).view_as(ranks)
        return Layers(
            rho=torch.where(lasts, rho, 0.0),
            drafts=torch.where(lasts, drafts, 1),
            remaining=torch.where(lasts, layers.remaining - 1, 0),
            most_drafts=layers.most_drafts,
        )

    def whole(self, target: TargetProbs, nodes: Tensor) -> Tensor:
        """Return M over the whole vocabulary at ``nodes`` ``[batch]``: ``[batch, vocab]``."""
        probs = target.probs_of(nodes)
        for k in range(self.layers.count):
            mass = self.mass[:, k : k + 1]
            reduced = self.layers.rho[:, k : k + 1] * probs
            reduced.scatter_add_(1, self.plan.ids[:, k], -self.plan.selected[:, k])
            probs = torch.where(mass > 0, reduced.clamp_(min=0) / mass, probs)
        return probs


def _mass(plan: Transport, rho: Tensor) -> Tensor:
    """Return ``sum (rho M - b)+``, ``[batch, 1]``: on the support of b and off it."""
    inside = (rho * plan.target - plan.selected).clamp(min=0).sum(dim=1, keepdim=True)
    beside = (1 - plan.target.sum(dim=1, keepdim=True)).clamp(min=0)
    return inside + rho * beside


def _selected_at(plan: Transport, wanted: Tensor) -> Tensor:
    """Return b at the ids ``wanted`` ``[batch, ids]``, 0 off its support."""
    matching = (wanted.unsqueeze(2) == plan.ids.unsqueeze(1)) & (plan.draft > 0).unsqueeze(1)
    return (matching * plan.selected.unsqueeze(1)).sum(dim=2)


def _stacked(plans: Sequence[Transport]) -> Transport:
    columns = zip(*(plan.tensors.values() for plan in plans), strict=True)
    return Transport(*(torch.stack(column, dim=1) for column in columns))
