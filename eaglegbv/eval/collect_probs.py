"""Draft and target distributions of a pair, collected at positions of plainly decoded texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.node_acceptance import NodeProbs
from eaglegbv.eval.paired_comparison import Sampling, Text, offers
from eaglegbv.eval.records import Setting
from eaglegbv.eval.solvers import Node
from eaglegbv.eval.statistics import Estimate, bootstrap_ratio, bootstrap_ratio_of_ratios
from eaglegbv.loading import Pair


@dataclass(frozen=True, slots=True)
class Harvest:
    """Distributions at one temperature, at places of texts that the target wrote at it.

    Attributes:
        probs: At every place, the drafter's distribution of the next token, which is the first
            level of its trees, and the target's distribution on its support.
        texts: ``[places]``, index of the text of each place.
    """

    probs: NodeProbs
    texts: NDArray[np.int64]

    def mean(self, values: Tensor) -> Estimate:
        """Return the mean of ``[places]`` with its bootstrap interval over texts."""
        return bootstrap_ratio(*self._by_text(values))

    def ratio(self, above: Tensor, below: Tensor) -> Estimate:
        """Return a ratio of means over ``[places]``, paired by text."""
        return bootstrap_ratio_of_ratios(*self._by_text(above), *self._by_text(below))

    def _by_text(self, values: Tensor) -> tuple[list[float], list[float]]:
        counts = np.bincount(self.texts)
        sums = np.bincount(self.texts, weights=values.cpu().numpy())
        own = counts > 0
        return sums[own].tolist(), counts[own].astype(np.float64).tolist()

    def nodes(self, *, width: int, drafts: int, count: int, seed: int) -> list[Node]:
        """Return nodes for the solvers, spread evenly over the places, with drawn drafts.

        Args:
            width: Number of most likely tokens that draft distributions keep.
            drafts: Number of drafts, n.
            count: Most nodes.
            seed: Seed of drafts and uniforms.
        """
        probs = self.probs.top(width)
        places = np.unique(
            np.linspace(0, probs.count - 1, min(count, probs.count)).astype(np.int64)
        )
        found = []
        for place in places.tolist():
            rng = np.random.default_rng((seed, place, width, drafts))
            q, p = probs.draft[place].numpy(), probs.target[place].numpy()
            kept = np.flatnonzero(q)
            q = q[kept]
            # One token at the end stands for all tokens that the drafter cannot propose.
            target = np.append(p[kept], max(0.0, 1 - p[kept].sum()))
            found.append(
                Node(
                    # The target's own sum is 1 except for the rounding of its logits.
                    target=target / target.sum(),
                    ids=np.arange(len(q)),
                    draft=q,
                    drawn=rng.choice(len(q), size=drafts, p=q / q.sum()),
                    uniforms=rng.random((drafts, 2)),
                )
            )
        return found


def lead_ratio(
    harvest: Harvest, lead: tuple[Tensor, Tensor], other: Harvest, others: tuple[Tensor, Tensor]
) -> Estimate:
    """Return the ratio of two leads, each a ratio of means, in harvests of the same questions.

    Args:
        harvest: Places.
        lead: ``[places]``, values of a rule, and of the one that it leads.
        other: Other places.
        others: The same there.
    """
    texts = 1 + int(max(harvest.texts.max(), other.texts.max()))
    sums = [
        np.bincount(places.texts, weights=values.cpu().numpy(), minlength=texts).tolist()
        for places, both in ((harvest, lead), (other, others))
        for values in both
    ]
    return bootstrap_ratio_of_ratios(*sums)


def harvest(
    pair: Pair,
    texts: Sequence[Text],
    *,
    temperature: float,
    width: int,
    sampling: Sampling,
) -> Harvest:
    """Return the distributions at places of texts that ``paired_comparison.collect`` wrote.

    Args:
        pair: Target and drafter.
        texts: Texts, written at ``temperature``.
        temperature: Temperature of both distributions.
        width: Number of most likely tokens that the draft distributions keep.
        sampling: How many places of each text to use.

    Raises:
        InvalidArgument: The temperature is 0, where distributions are points, or no text is long
            enough.
    """
    if not temperature > 0:
        raise InvalidArgument("temperature", temperature, "a positive number")
    plan = Plan(verifier="block", paths=1, depth=1, draft_width=width)
    found: list[NodeProbs] = []
    numbers: list[int] = []
    for here, offer in offers(pair, texts, Setting(plan=plan, temperature=temperature), sampling):
        ids, q = offer.tree.draft_ids[:, :1], offer.tree.draft_probs[:, 0]
        p = offer.target.probs_at(ids)[:, 0] * (q > 0)
        found.append(NodeProbs.of(ids[:, 0].cpu(), q.cpu(), p.cpu()))
        numbers += here
    if not found:
        raise InvalidArgument("texts", len(texts), "texts of two tokens or more")
    widest = max(probs.draft.shape[1] for probs in found)

    def joined(columns: Sequence[Tensor]) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(column, (0, widest - column.shape[1])) for column in columns])

    probs = NodeProbs(
        joined([probs.ids for probs in found]),
        joined([probs.draft for probs in found]),
        joined([probs.target for probs in found]),
    )
    return Harvest(probs, np.array(numbers))
