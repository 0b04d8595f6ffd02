"""Recursive rejection sampling (SpecInfer, 2305.09781; MDSD, 2502.18779, Appendix A.1)."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, descend, drafts_in_order
from eaglegbv.verifiers.paths import first_draws, places_of_tokens, rows_at
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix, Probs, normalised, residual_or_target
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree, Rejected, accepts_draft, walk_down


def specinfer(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down by rejection sampling, draft after draft."""
    return walk_down(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> int | Rejected:
    """Accept x with min(1, r(x) / q(x)), r = p at first; on rejection r <- (r - q)+, normalised.

    Drawn without replacement (each child once), q also loses x and is renormalised. Drawn with
    replacement every copy of a token is tried: a copy counts like any other draft.
    """
    r = tree.target_probs(prefix)
    q = tree.draft_probs(prefix)
    wor = tree.draft_sampling is DraftSampling.WOR
    drafts = {k: x for x, k in tree.children(prefix).items()} if wor else tree.drafts(prefix)
    for number, x in drafts.items():
        if accepts_draft(tree, prefix, number, min(1, r[x] / q[x]), chooser):
            return x
        r = normalised(residual_or_target(1, r, q))
        if wor:
            q = without(q, x)
    return Rejected(r)


def without(q: Probs, x: int) -> Probs:
    """Return q restricted to the tokens other than x; ``q`` itself minus x if nothing is left."""
    rest = tuple(q[y] if y != x else q[y] - q[y] for y in range(len(q)))
    return normalised(rest) if sum(rest) > 0 else rest


# The same for batches.
class SpecInferVerifier(Verifier):
    """Try the drafts in order. O(K L W) and one row of the vocabulary."""

    name = "specinfer"
    draft_samplings = frozenset({DraftSampling.IID, DraftSampling.WOR})
    any_widths = frozenset({DraftSampling.IID, DraftSampling.WOR})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees drawn with (``iid``) or without (``wor``) replacement."""
        left = RemainingProbs.of(tree, target)
        first = first_draws(tree)
        wor = tree.draft_sampling is DraftSampling.WOR
        chosen = torch.zeros_like(tree.parents)
        drafts = drafts_in_order(tree, uniforms.acceptance)
        for k, (parents, children, real, numbers) in enumerate(drafts):
            tried = real & (chosen.gather(1, parents) == 0)
            if wor:  # columns share their children: each is one draft, that of its first draw
                tried &= first.gather(1, children) == k
            passed = tried & (numbers < left.ratios(parents, children))
            chosen = chosen.scatter_add(1, parents, children * passed)
            rejected = tried & ~passed
            left.subtract(parents, torch.ones_like(numbers), rejected)
            if wor:
                left.lose(parents, children, rejected)
        return descend(tree, target, uniforms, chosen, left.scale, tree.draft_ids, left.taken)


@dataclass(slots=True)
class RemainingProbs:
    """What rejections leave of p and q at each node: of p on the support of q, and off it."""

    probs: Tensor  # [batch, nodes, width] float64, p at the draft ids as it was
    left: Tensor  # [batch, nodes, width] float64, what is left of it, normalised
    beside: Tensor  # [batch, nodes] float64, the mass left off the support
    scale: Tensor  # [batch, nodes] float64, what is left of a token off the support, over its p
    draft: Tensor  # [batch, nodes, width] float64, q given the tokens lost
    places: Tensor  # [batch, nodes] int64, the place of each node's token in its parent's ids

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs) -> Self:
        """Start with p and q themselves."""
        probs = target.probs_in(target.rows, tree.draft_ids) * (tree.draft_probs > 0)
        beside = (1 - probs.sum(dim=2)).clamp(min=0)
        places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
        return cls(probs, probs, beside, torch.ones_like(beside), tree.draft_probs, places)

    @property
    def taken(self) -> Tensor:
        """``[batch, nodes, width]``: what is left of p is ``scale * p`` minus this."""
        return self.scale.unsqueeze(2) * self.probs - self.left

    def ratios(self, parents: Tensor, children: Tensor) -> Tensor:
        """Return (what is left of p) / q of the tokens of ``children``, ``[batch, steps]``."""
        at = parents * self.left.shape[2] + self.places.gather(1, children)
        return self.left.flatten(1).gather(1, at) / self.draft.flatten(1).gather(1, at)

    def subtract(self, nodes: Tensor, weights: Tensor, where: Tensor) -> Tensor:
        """Replace what is left of p by ``(w left - q)+``, normalised, at ``nodes`` if ``where``.

        Those are different nodes; one at which nothing would be left stays as it is. All arguments,
        and the mass before normalising that is returned, are ``[batch, steps]``.
        """
        left = rows_at(self.left, nodes)
        draft = rows_at(self.draft, nodes)
        beside = self.beside.gather(1, nodes)
        scale = self.scale.gather(1, nodes)
        rest = (weights.unsqueeze(2) * left - draft).clamp(min=0)
        mass = rest.sum(dim=2) + weights * beside
        changed = where & (mass > 0)
        rows = torch.where(changed.unsqueeze(2), rest / mass.unsqueeze(2), left)
        self.left = _replaced(self.left, nodes, rows)
        beside = torch.where(changed, weights * beside / mass, beside)
        self.beside = self.beside.scatter(1, nodes, beside)
        scale = torch.where(changed, weights * scale / mass, scale)
        self.scale = self.scale.scatter(1, nodes, scale)
        return mass

    def lose(self, parents: Tensor, children: Tensor, where: Tensor) -> None:
        """Restrict q to the tokens other than those of ``children``, at some ``parents``."""
        draft = rows_at(self.draft, parents)
        rest = draft.scatter(2, self.places.gather(1, children).unsqueeze(2), 0.0)
        total = rest.sum(dim=2, keepdim=True)
        rest = torch.where(total > 0, rest / total, rest)
        rows = torch.where(where.unsqueeze(2), rest, draft)
        self.draft = _replaced(self.draft, parents, rows)


def _replaced(table: Tensor, nodes: Tensor, rows: Tensor) -> Tensor:
    return table.scatter(1, nodes.unsqueeze(2).expand_as(rows), rows)
