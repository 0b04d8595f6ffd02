"""The modified target that greedy block rules leave behind, for batches.

A greedy rule accepts more than the target's law allows in one step and pays back later: after it
stopped at depth tau < L, the next L - tau - 1 tokens follow a modified law. That debt is a *layer*.
With ``M_0 = p``, layer k turns ``M_{k-1}`` into

    M_k in proportion to max(rho_k M_{k-1} - b_k, 0),

where b_k is the law by which the layer's own step would have selected its next draft. When a token
x is emitted, or a tree node entered, rho_k becomes ``rho_k M_{k-1}(x) / b_k(x)``, and n_k is drawn
from the law of the number of drafts on x.

:mod:`eaglegbv.verifiers.stateful` says what an engine keeps of this from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.verifiers.debts import Layers, SparseLaws, rho_after
from eaglegbv.verifiers.drafted_path import place_of
from eaglegbv.verifiers.multiplicity import draw_multiplicity
from eaglegbv.verifiers.transport import RankedLaws, Transport, transport


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
    ranked: RankedLaws
    plan: Transport
    mass: Tensor
    probs: Tensor

    @property
    def active(self) -> Tensor:
        """``[batch, layers]`` bool: the layers in force."""
        return self.layers.remaining > 0

    @classmethod
    def at(
        cls, target: TargetLaw, nodes: Tensor, layers: Layers, laws: SparseLaws, ids: Tensor
    ) -> Self:
        """Work out M at ``ids``.

        Args:
            target: The target's own laws.
            nodes: ``[batch]`` int64.
            layers: The layers that reach the nodes.
            laws: Their draft laws there; a layer without a law ends.
            ids: ``[batch, width]`` int64.
        """
        layers = _in_force(layers, laws)
        wanted = torch.cat((ids, laws.ids.flatten(1)), dim=1)
        rows = target.rows.gather(1, nodes.unsqueeze(1))
        logits = target.logits[rows, wanted].to(torch.float64)
        probs = torch.exp(logits - target.log_normaliser[rows])
        ranked, plans, masses = [], [], []
        width = laws.ids.shape[2]
        for k in range(layers.count):
            start = ids.shape[1] + k * width
            own = RankedLaws.of(laws.ids[:, k], laws.probs[:, k], probs[:, start : start + width])
            plan = transport(own, layers.drafts[:, k])
            rho = layers.rho[:, k : k + 1]
            mass = _mass(own, plan, rho) * (layers.remaining[:, k : k + 1] > 0)
            reduced = (rho * probs - _lookup(wanted, own, plan.law)).clamp(min=0) / mass
            probs = torch.where(mass > 0, reduced, probs)
            ranked.append(own)
            plans.append(plan)
            masses.append(mass)
        return cls(
            layers=layers,
            ranked=_stack_ranked(ranked, laws),
            plan=Transport(
                _stack([plan.law for plan in plans], laws.probs),
                _stack([plan.highest for plan in plans], laws.probs),
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
        b = self.plan.law.gather(2, at).squeeze(2)
        b = torch.where(ids.gather(2, at).squeeze(2) == tokens.unsqueeze(1), b, 0.0)
        # A layer whose law cannot produce the token has no further effect.
        lasts = self.active & (self.layers.remaining > 1) & (b > 0)
        rho = rho_after(self.layers.rho, self.ranked.target.gather(2, at).squeeze(2), b)
        turn = (self.active.to(torch.int64).cumsum(dim=1) - 1).clamp(min=0)
        drafts = draw_multiplicity(
            _flat(self.ranked),
            Transport(self.plan.law.flatten(0, 1), self.plan.highest.flatten(0, 1)),
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

    def whole(self, target: TargetLaw, nodes: Tensor) -> Tensor:
        """Return M over the whole vocabulary at ``nodes`` ``[batch]``: ``[batch, vocab]``."""
        probs = target.probs_of(nodes)
        for k in range(self.layers.count):
            mass = self.mass[:, k : k + 1]
            reduced = self.layers.rho[:, k : k + 1] * probs
            reduced.scatter_add_(1, self.ranked.ids[:, k], -self.plan.law[:, k])
            probs = torch.where(mass > 0, reduced.clamp_(min=0) / mass, probs)
        return probs


def _in_force(layers: Layers, laws: SparseLaws) -> Layers:
    going = laws.probs.sum(dim=2) > 0
    remaining = torch.where(going, layers.remaining, 0)
    return Layers(layers.rho, layers.drafts, remaining, layers.most_drafts)


def _mass(own: RankedLaws, plan: Transport, rho: Tensor) -> Tensor:
    """Return ``sum (rho M - b)+``, ``[batch, 1]``: on the support of b and off it."""
    inside = (rho * own.target - plan.law).clamp(min=0).sum(dim=1, keepdim=True)
    beside = (1 - own.target.sum(dim=1, keepdim=True)).clamp(min=0)
    return inside + rho * beside


def _lookup(wanted: Tensor, own: RankedLaws, values: Tensor) -> Tensor:
    """Return ``values`` ``[batch, width]`` over ``own.ids`` at ``wanted`` ids, 0 elsewhere."""
    found = (wanted.unsqueeze(2) == own.ids.unsqueeze(1)) & (own.draft > 0).unsqueeze(1)
    return (found * values.unsqueeze(1)).sum(dim=2)


def _stack(columns: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(tuple(columns), dim=1) if columns else torch.zeros_like(like)


def _stack_ranked(ranked: Sequence[RankedLaws], laws: SparseLaws) -> RankedLaws:
    return RankedLaws(
        ids=_stack([r.ids for r in ranked], laws.ids),
        draft=_stack([r.draft for r in ranked], laws.probs),
        target=_stack([r.target for r in ranked], laws.probs),
    )


def _flat(ranked: RankedLaws) -> RankedLaws:
    return RankedLaws(
        ranked.ids.flatten(0, 1), ranked.draft.flatten(0, 1), ranked.target.flatten(0, 1)
    )
