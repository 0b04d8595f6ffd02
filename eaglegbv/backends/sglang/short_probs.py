"""Draft distributions as short lists, and draws from them, without reading anything on the host.

Everything here may run inside a CUDA graph.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShortProbs:
    """Distributions of the next drafted token.

    Attributes:
        ids: ``[..., width]`` int64 target token ids, most likely first.
        probs: ``[..., width]`` float64, normalised once; the same numbers are sampled from and
            passed to the verifier.
    """

    ids: Tensor
    probs: Tensor

    @classmethod
    def of_logits(
        cls, logits: Tensor, temperatures: Tensor, *, width: int, target_ids: Tensor | None
    ) -> Self:
        """Keep the ``width`` most likely tokens, apply the temperature, and normalise.

        Any distribution is lossless as long as it is the one that is sampled from. So a head whose logits
        are NaN drafts the first of its tokens with certainty, and decoding continues as if without
        speculation.

        Args:
            logits: ``[rows, draft_vocab]``.
            temperatures: ``[rows, 1]``, above 0.
            width: Number of candidates to keep; fewer if the vocabulary is smaller.
            target_ids: ``[draft_vocab]`` int64, the target's id of each draft token; None if both
                have the same vocabulary.
        """
        values, ids = logits.topk(min(width, logits.shape[-1]), dim=-1)
        values = values.double()
        probs = ((values - values[:, :1]) / temperatures).softmax(dim=-1)
        certain = torch.zeros_like(probs)
        certain[:, 0] = 1
        probs = torch.where(probs.isfinite().all(dim=-1, keepdim=True), probs, certain)
        return cls(ids if target_ids is None else target_ids[ids], probs)

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        """Undo :meth:`pack`."""
        return cls(packed[..., 0, :].to(torch.int64), packed[..., 1, :])

    def pack(self) -> Tensor:
        """Return ``[..., 2, width]`` float64: ids, which are exact there, and probabilities."""
        return torch.stack((self.ids.to(torch.float64), self.probs), dim=-2)

    def pick(self, uniforms: Tensor) -> Tensor:
        """Draw tokens ``[...]`` by inverse CDF, never one of probability 0.

        Args:
            uniforms: ``[...]`` float64 in [0, 1).
        """
        cumulative = self.probs.cumsum(dim=-1)
        # Entries of probability 0 are at the end, as the distributions are sorted; the sum stays constant.
        limit = torch.nextafter(cumulative[..., -1:], torch.zeros_like(cumulative[..., -1:]))
        threshold = torch.minimum(uniforms.unsqueeze(-1) * cumulative[..., -1:], limit)
        place = (cumulative <= threshold).sum(dim=-1, keepdim=True)
        return self.ids.gather(-1, place).squeeze(-1)

    def of_branches(self, branches: Tensor) -> Self:
        """Return ``[batch, paths, width]``: for each path, the distribution of the given branch.

        Args:
            branches: ``[batch, paths]`` int64; the dists' rows are ``batch * paths``.
        """
        ids, probs = (t.view(*branches.shape, -1) for t in (self.ids, self.probs))
        at = branches.unsqueeze(-1).expand_as(ids)
        return type(self)(ids.gather(1, at), probs.gather(1, at))
