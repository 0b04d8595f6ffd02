"""The target's law at every node of a batch of draft trees, kept as logits and a normaliser."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetLaw:
    """Next-token laws p(. | node), already warped (see :mod:`eaglegbv.warp`).

    Verifiers need p only at a few drafted tokens of every node, and over the whole vocabulary at
    one node per request. So the law stays in logits: ``p = exp(logits - log_normaliser)``. Rows are
    packed; ``rows`` says which row belongs to which node, so a batch of trees is never copied into
    padding.

    Attributes:
        logits: ``[rows, vocab]`` float32 or float64, -inf where warping excluded a token.
        log_normaliser: ``[rows]`` float64, logsumexp of each row.
        rows: ``[batch, nodes]`` int64, the row of each node; padding nodes repeat the root's.
    """

    logits: Tensor
    log_normaliser: Tensor
    rows: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, rows: Tensor) -> Self:
        """Normalise warped ``logits`` with one pass over the vocabulary."""
        return cls(logits, torch.logsumexp(logits, dim=-1).to(torch.float64), rows)

    @classmethod
    def of_warped(cls, logits: Tensor, rows: Tensor) -> Self:
        """Normalise rows whose largest entry is 0, as returned by :func:`eaglegbv.warp.warp`."""
        return cls(logits, logits.exp().sum(dim=-1).log().to(torch.float64), rows)

    @classmethod
    def of_probs(cls, probs: Tensor) -> Self:
        """Wrap ``probs`` ``[batch, nodes, vocab]`` float64, for tests and tables."""
        batch, nodes, _ = probs.shape
        rows = torch.arange(batch * nodes, device=probs.device).view(batch, nodes)
        return cls(probs.flatten(0, 1).log(), probs.new_zeros(batch * nodes), rows)

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.logits.shape[-1]

    def probs_at(self, token_ids: Tensor) -> Tensor:
        """Return p at ``token_ids`` ``[batch, nodes, width]`` of every node, float64."""
        return self.probs_in(self.rows, token_ids)

    def probs_in(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return p at ``token_ids`` ``[..., width]`` of ``rows`` ``[...]``, float64."""
        return self._normalised(self.logits.take(rows.unsqueeze(-1) * self.vocab + token_ids), rows)

    def probs_of(self, nodes: Tensor) -> Tensor:
        """Return the whole law at one node per request, ``[batch, vocab]`` float64.

        Args:
            nodes: ``[batch]`` int64.
        """
        rows = self.rows.gather(1, nodes.unsqueeze(1)).squeeze(1)
        return self._normalised(self.logits.index_select(0, rows), rows)

    def _normalised(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return p for ``logits`` ``[..., width]`` that belong to ``rows`` ``[...]``, float64."""
        return torch.sub(logits, self.log_normaliser.take(rows).unsqueeze(-1)).exp_()
