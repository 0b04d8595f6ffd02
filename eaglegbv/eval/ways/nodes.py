"""Acceptance probabilities of the rules at one node of n drafts, for many nodes at once.

What is the chance that a rule accepts one of n drafts? Where it has a closed form it is computed.
Only recursive rejection sampling without replacement is averaged over drawn rejections, because its
residual depends on the very tokens that were rejected. The optimum (Hu et al., 2502.18779) is

    alpha* = 1 + min over H of P(H) - Q(H),   Q(H) = Pr(all n drafts lie in H),

and the minimum is at a prefix of the tokens in ascending order of p/q.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglegbv.config import Plan
from eaglegbv.devices import most_likely_first
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.ways.places import Bench, Sampling, Text, observed
from eaglegbv.loading import Pair
from eaglegbv.verifiers.spectr import k_seq
from eaglegbv.verifiers.transport import RankedProbs

STEP = 0.25
"""Step of the trapezoidal rule in log t. Its error is below 1e-15, because the integrand is
analytic where the real part of t is positive, a strip of half-width pi/2 in log t."""

TAIL = 42.0  # exp(-42) is below rounding
CHAINS = 32  # number of rejections drawn at each node where a rule has no closed form
NODES_AT_ONCE = 16
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class NodeProbs:
    """Draft and target distributions on the draft distributions' supports."""

    ids: Tensor  # [nodes, width] int64, most likely draft tokens first
    draft: Tensor  # [nodes, width] float64, q; 0 is padding
    target: Tensor  # [nodes, width] float64, p at `ids`

    @classmethod
    def of(cls, ids: Tensor, draft: Tensor, target: Tensor) -> Self:
        """Order the tokens by draft probability, ties by token id."""
        order = most_likely_first(ids, draft)
        return cls(*(x.gather(1, order) for x in (ids, draft, target)))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.draft.shape[0]

    def top(self, width: int) -> Self:
        """Keep the ``width`` most likely draft tokens, renormalised."""
        kept = self.draft[:, :width]
        return type(self)(
            self.ids[:, :width], kept / kept.sum(dim=1, keepdim=True), self.target[:, :width]
        )


def single(nodes: NodeProbs, drafts: int) -> Tensor:  # noqa: ARG001
    """Return the acceptance of a single draft, whatever n: sum min(p, q)."""
    return torch.minimum(nodes.target, nodes.draft).sum(dim=1)


def rejection_iid(nodes: NodeProbs, drafts: int) -> Tensor:
    """Recursive rejection sampling of independent drafts (SpecInfer): 1 - prod (1 - beta_k).

    beta_k = sum min(r, q), where r is p at first and then (r - q)+ normalised. It does not depend
    on what was rejected.
    """
    r = nodes.target
    rest = torch.ones_like(nodes.draft[:, 0])
    # The mass that p has off the support of q stays there, whatever is rejected.
    off = (1 - nodes.target.sum(dim=1)).clamp(min=0)
    for _ in range(drafts):
        beta = torch.minimum(r, nodes.draft).sum(dim=1)
        rest = rest * (1 - beta).clamp(min=0)
        r, off = _normalised((r - nodes.draft).clamp(min=0), off)
    return 1 - rest


def rejection_wor(nodes: NodeProbs, drafts: int, *, chains: int = CHAINS) -> Tensor:
    """Recursive rejection sampling without replacement, as an unbiased estimate.

    Along a chain of rejected tokens, drawn as the rule rejects them, the chance that none of the
    drafts is accepted is the mean of prod (1 - beta_k). At a node with fewer tokens than drafts,
    all tokens are drafted.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for part in _parts(nodes):
        q = part.draft.repeat_interleave(chains, dim=0)
        r = part.target.repeat_interleave(chains, dim=0)
        off = (1 - r.sum(dim=1)).clamp(min=0)
        rest = torch.ones_like(off)
        for k in range(drafts):
            if k > 0:
                refused = (q - r).clamp(min=0)
                # Where nothing is refused, the drawn token has no effect.
                any_refused = refused.sum(dim=1, keepdim=True) > 0
                weights = torch.where(any_refused, refused, torch.ones_like(refused))
                drawn = torch.multinomial(weights, 1, generator=generator)
                r, off = _normalised((r - q).clamp(min=0), off)
                q = _normalise(q.scatter(1, drawn, 0.0))
            rest = rest * (1 - torch.minimum(r, q).sum(dim=1)).clamp(min=0)
        found.append(1 - rest.view(part.count, chains).mean(dim=1))
    return torch.cat(found)


def k_seq_iid(nodes: NodeProbs, drafts: int) -> Tensor:
    """K-SEQ (SpecTr): 1 - (1 - beta)^n, all of p that its drafts serve."""
    n = torch.full((1, nodes.count), drafts)
    _, served = k_seq(nodes.target.unsqueeze(0), nodes.draft.unsqueeze(0), n)
    return served.sum(dim=2)[0]


def greedy(nodes: NodeProbs, drafts: int) -> Tensor:
    """The n - 1 most likely tokens and one drawn from the rest, r: p(A) + sum min(p, r) off A.

    It is this draft sampling's optimum, and what its verifier (MDSD, section 5) accepts.
    """
    covered = nodes.target[:, : drafts - 1].sum(dim=1)
    r = _normalise(nodes.draft[:, drafts - 1 :])
    return covered + torch.minimum(nodes.target[:, drafts - 1 :], r).sum(dim=1)


def optimum_iid(nodes: NodeProbs, drafts: int) -> Tensor:
    """alpha* of independent drafts, Q(H) = q(H)^n."""
    ranked = RankedProbs.of(nodes.ids, nodes.draft, nodes.target)
    return _optimum(ranked, ranked.draft.cumsum(dim=1) ** drafts)


def optimum_wor(nodes: NodeProbs, drafts: int) -> Tensor:
    """alpha* of drafts without replacement, Q(H) by an exponential race.

    Token x arrives at an Exp(q_x) time, and all n drafts lie in H iff n of H have arrived when the
    first token off H does, at rate lambda = q(off H):

        Q(H) = Integral lambda exp(-lambda t) Pr(at least n of H have arrived by t) dt.
    """
    return torch.cat([_optimum_wor(part, drafts) for part in _parts(nodes)])


def _optimum_wor(nodes: NodeProbs, drafts: int) -> Tensor:
    ranked = RankedProbs.of(nodes.ids, nodes.draft, nodes.target)
    q = ranked.draft
    real = ranked.draft > 0
    size = real.sum(dim=1)
    n = torch.minimum(size, torch.tensor(drafts))
    # The sums start at the end: 1 minus the sum before would lose a small rate.
    off = q.flip(1).cumsum(dim=1).flip(1)
    rate = torch.nn.functional.pad(off[:, 1:], (0, 1))
    low = -TAIL / 2
    high = log(TAIL / float(q[real].min()))
    t = (low + STEP * torch.arange(ceil((high - low) / STEP) + 1, dtype=torch.float64)).exp()
    inside = torch.zeros_like(q)
    # Entry k is Pr(k of the prefix have arrived by t); the last entry is for n or more.
    counts = torch.zeros((*q.shape[:1], len(t), drafts + 1), dtype=torch.float64)
    counts[..., 0] = 1.0
    # At a node with fewer tokens than drafts, all of them must arrive.
    enough = (torch.arange(drafts + 1) >= n.unsqueeze(1)).to(torch.float64).unsqueeze(1)
    for x in range(q.shape[1]):
        arrived = -torch.expm1(-q[:, x, None] * t)
        up = counts[..., :-1] * arrived.unsqueeze(2)
        counts[..., :-1] -= up
        counts[..., 1:] += up
        density = rate[:, x, None] * t * torch.exp(-rate[:, x, None] * t)
        inside[:, x] = STEP * (density * (counts * enough).sum(dim=2)).sum(dim=1)
    inside = torch.where(rate > 0, inside, 1.0)
    return _optimum(ranked, inside)


def optimum_wor_published(nodes: NodeProbs, drafts: int) -> Tensor:
    """alpha* with Q(H) as MDSD prints it (section 4.2.2): W_n(H) / W_n(all), where W_n sums the
    products of q over the sets of n tokens. That is the law of n draws that happen to differ, not
    of draws one after another.
    """
    ranked = RankedProbs.of(nodes.ids, nodes.draft, nodes.target)
    sums = torch.zeros((nodes.count, drafts + 1), dtype=torch.float64)
    sums[:, 0] = 1.0
    inside = []
    for q in ranked.draft.unbind(1):
        sums[:, 1:] = sums[:, 1:] + q.unsqueeze(1) * sums[:, :-1]
        inside.append(sums[:, -1].clone())
    return _optimum(ranked, torch.stack(inside, dim=1) / sums[:, -1:].clamp(min=_TINY))


def _optimum(ranked: RankedProbs, inside: Tensor) -> Tensor:
    """Return 1 + min of P(H) - Q(H) over prefixes H; ``inside`` is Q, ``[nodes, width]``."""
    excess = ranked.target.cumsum(dim=1) - inside
    return 1 + torch.where(ranked.draft > 0, excess, 0.0).amin(dim=1).clamp(max=0)


def _parts(nodes: NodeProbs) -> list[NodeProbs]:
    """Return a few nodes at a time, which limits the memory that a rule takes."""
    columns = (x.split(NODES_AT_ONCE) for x in (nodes.ids, nodes.draft, nodes.target))
    return [NodeProbs(*part) for part in zip(*columns, strict=True)]


def _normalise(weights: Tensor) -> Tensor:
    """Normalise ``[nodes, width]``; rows of zeros remain zeros."""
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=_TINY)


def _normalised(weights: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise weights on the support together with the mass off it; zeros remain zeros."""
    total = (weights.sum(dim=1) + off).clamp(min=_TINY)
    return weights / total.unsqueeze(1), off / total


RULES: Mapping[str, Callable[[NodeProbs, int], Tensor]] = {
    "one draft": single,
    "RRS": rejection_iid,
    "K-SEQ": k_seq_iid,
    "optimum": optimum_iid,
    "RRS w/o": rejection_wor,
    "optimum w/o": optimum_wor,
    "optimum w/o, as published": optimum_wor_published,
    "greedy": greedy,
}
"""Acceptance at ``[nodes]`` for n drafts, by name of the rule; "w/o" is without replacement."""


# At places of texts.


@dataclass(frozen=True, slots=True)
class Harvest:
    """Distributions at one temperature, at places of texts that the target wrote at it."""

    # At every place, the drafter's distribution of the next token, which is the first level of its
    # trees, and the target's distribution on its support.
    probs: NodeProbs
    texts: NDArray[np.int64]  # [places], index of the text of each place


def harvest(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> Harvest:
    """Return the distributions at places of texts that the target wrote.

    Texts and settings are of one temperature; draft distributions keep as many tokens as the widest
    of the settings'.

    Raises:
        InvalidArgument: The temperature is 0, where distributions are points, or no text is long
            enough.
    """
    width = max(s.plan.draft_width for s in settings)
    temperature = settings[0].temperature
    if not temperature > 0:
        raise InvalidArgument("temperature", temperature, "a positive number")
    plan = Plan(verifier="block", paths=1, depth=1, draft_width=width)
    parts_found: list[tuple[Tensor, Tensor, Tensor]] = []
    numbers: list[int] = []
    bench = Bench(pair, sampling)
    [drafting] = bench.draftings([Setting(plan=plan, temperature=temperature)])
    for readers in bench.visit(texts):
        offer = bench.draft(list(readers.values()), drafting)
        ids = offer.tree.draft_ids[:, :1]
        q = offer.tree.draft_probs[:, 0]
        p = offer.target.probs_in(offer.target.rows, ids)[:, 0] * (q > 0)
        parts_found.append((ids[:, 0].cpu(), q.cpu(), p.cpu()))
        numbers += readers
    if not parts_found:
        raise InvalidArgument("texts", len(texts), "texts of two tokens or more")
    columns = [
        pad_sequence([row for part in parts for row in part], batch_first=True)
        for parts in zip(*parts_found, strict=True)
    ]
    return Harvest(NodeProbs.of(*columns), np.array(numbers))


def node_acceptance(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> list[Observation]:
    """Compute the acceptance of rules at places of texts, summed over each text.

    The verifier of a setting names a rule of :data:`RULES`, its paths are the n drafts, and its
    draft width the tokens that draft distributions keep; all have one temperature. An accepted
    draft counts as a token, a place as a step. Errors are those of :func:`harvest`.
    """
    found = harvest(pair, texts, settings, sampling)
    steps = np.bincount(found.texts, minlength=len(texts)).astype(np.float64)
    tokens = np.zeros((len(settings), len(texts)))
    for number, setting in enumerate(settings):
        plan = setting.plan
        accepted = RULES[plan.verifier](found.probs.top(plan.draft_width), plan.paths)
        tokens[number] = np.bincount(found.texts, weights=accepted.numpy(), minlength=len(texts))
    return observed(
        settings, texts, {"tokens": tokens, "steps": np.broadcast_to(steps, tokens.shape)}
    )
