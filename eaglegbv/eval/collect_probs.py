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
from eaglegbv.eval.statistics import Estimate, bootstrap_ratio
from eaglegbv.loading import Pair


@dataclass(frozen=True, slots=True)
class Harvest:
    """Distributions at one temperature, at places of texts that the target wrote at it."""

    # At every place, the drafter's distribution of the next token, which is the first level of its
    # trees, and the target's distribution on its support.
    probs: NodeProbs
    texts: NDArray[np.int64]  # [places], index of the text of each place

    def mean(self, values: Tensor) -> Estimate:
        """Return the mean of ``[places]`` with its bootstrap interval over texts."""
        return self.ratio(values, torch.ones_like(values))

    def ratio(self, above: Tensor, below: Tensor) -> Estimate:
        """Return a ratio of means over ``[places]``, paired by text."""
        used = np.bincount(self.texts) > 0
        return bootstrap_ratio(*(self.sums(values)[used].tolist() for values in (above, below)))

    def sums(self, values: Tensor, texts: int = 0) -> NDArray[np.float64]:
        """Return the sums of ``[places]`` by text, of ``texts`` texts or more."""
        sums = np.bincount(self.texts, weights=values.cpu().numpy(), minlength=texts)
        return np.asarray(sums, dtype=np.float64)

    def nodes(self, *, width: int, drafts: int, count: int, seed: int) -> list[Node]:
        """Return at most ``count`` nodes for the solvers, spread evenly over the places.

        Draft distributions keep the ``width`` most likely tokens; n ``drafts`` are drawn.
        """
        probs = self.probs.top(width)
        last = probs.count - 1
        places = np.unique(np.linspace(0, last, min(count, last + 1)).astype(np.int64))
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

    A lead is ``[places]`` values of a rule, and those of the one that it leads.
    """
    texts = 1 + int(max(harvest.texts.max(), other.texts.max()))
    mine = [harvest.sums(values, texts).tolist() for values in lead]
    return bootstrap_ratio(*mine, *(other.sums(values, texts).tolist() for values in others))


def harvest(
    pair: Pair,
    texts: Sequence[Text],
    *,
    temperature: float,
    width: int,
    sampling: Sampling,
) -> Harvest:
    """Return the distributions at places of texts that ``paired_comparison.collect`` wrote.

    Texts and distributions are of one ``temperature``; draft distributions keep ``width`` tokens.

    Raises:
        InvalidArgument: The temperature is 0, where distributions are points, or no text is long
            enough.
    """
    if not temperature > 0:
        raise InvalidArgument("temperature", temperature, "a positive number")
    plan = Plan(verifier="block", paths=1, depth=1, draft_width=width)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    numbers: list[int] = []
    for here, offer in offers(pair, texts, Setting(plan=plan, temperature=temperature), sampling):
        ids, q = offer.tree.draft_ids[:, :1], offer.tree.draft_probs[:, 0]
        p = offer.target.probs_at(ids)[:, 0] * (q > 0)
        found.append((ids[:, 0].cpu(), q.cpu(), p.cpu()))
        numbers += here
    if not found:
        raise InvalidArgument("texts", len(texts), "texts of two tokens or more")
    widest = max(q.shape[1] for _, q, _ in found)
    pad = torch.nn.functional.pad
    columns = [
        torch.cat([pad(part, (0, widest - part.shape[1])) for part in parts])
        for parts in zip(*found, strict=True)
    ]
    return Harvest(NodeProbs.of(*columns), np.array(numbers))
