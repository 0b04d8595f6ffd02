"""Draft trees: what a drafter proposes and a verifier judges.

Node 0 is the root, the request's last committed token; the drafter proposes nodes 1, 2, ...
A tree drawn with K = 2 paths of length L = 2 whose first tokens agree:

        0 (root)            token_ids     [root, a, b, c]
        |                   parents       [0, 0, 1, 1]
        1 (a)               depth         [0, 1, 2, 2]
       / \\                  draws         [[1, 1], [2, 3]]
      2   3                 draft_counts  [2, 2, 0, 0]
     (b) (c)

What a drafter draws at a node are its *drafts*. Equal ones lead to one child (same prefix, same p
and q), but each stays a draw of its own: both draws at the root led to node 1, and what verifiers
decide depends on that number. A path leads from the root to a leaf; paths follow from the draws.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling as DraftSampling
from eaglegbv.devices import TensorFields, entry_at, send


@dataclass(frozen=True, slots=True)
class DraftTree(TensorFields):
    """Draft trees of a batch of requests, padded to the largest.

    Padding nodes come after the real ones, with parent 0, depth 0 and token id 0.
    """

    draft_sampling: DraftSampling  # how children arise, the same for every request of the batch
    token_ids: Tensor  # [batch, nodes] int64; node 0 is the root
    # [batch, nodes] int64; a parent's index is below its child's; the root is its own parent.
    parents: Tensor
    depth: Tensor  # [batch, nodes] int64, 0 at the root
    num_nodes: Tensor  # [batch] int64, number of real nodes of each tree, with the root
    # [batch, length, drafts] int64, the child that each draw led to, level by level in the order
    # drawn; draws at depth d were made at nodes of that depth. 0 where nothing was drawn.
    draws: Tensor
    # [batch, nodes, width] int64, the tokens from which each node's children were drawn. The width
    # is 0 if nothing is drawn (`fixed`).
    draft_ids: Tensor
    # [batch, nodes, width] float64, their probabilities, normalised once; padding entries are 0.
    # These are exactly the numbers that were sampled from.
    draft_probs: Tensor
    # Whether the draws of equal number are a path: such trees fork at the root alone, by intent.
    columns: bool = field(default=False, kw_only=True)
    # Upper bound on the nodes of one tree with several drafts; None if they were not counted.
    forks: int | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> Self:
        """Return the trees on ``device``, without waiting for it."""
        if self.token_ids.device == device:
            return self
        return self.mapped(lambda tensor: send(tensor, device))

    @property
    def batch(self) -> int:
        """Number of requests."""
        return self.token_ids.shape[0]

    @property
    def nodes(self) -> int:
        """Padded number of nodes of a tree, with the root."""
        return self.token_ids.shape[1]

    @property
    def drafts(self) -> int:
        """Padded number of draws of a level; K where K paths were drawn."""
        return self.draws.shape[2]

    @property
    def length(self) -> int:
        """Padded number of levels, L."""
        return self.draws.shape[1]

    @property
    def width(self) -> int:
        """Padded size of a draft distribution's support, W."""
        return self.draft_probs.shape[2]

    @classmethod
    def roots(cls, token_ids: Sequence[int], *, device: torch.device | str = "cpu") -> Self:
        """Return trees with only a root: plain decoding, one token per target forward."""
        batch = len(token_ids)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=device).unsqueeze(1)
        zeros = torch.zeros_like(ids)
        return cls(
            draft_sampling=DraftSampling.FIXED,
            token_ids=ids,
            parents=zeros,
            depth=zeros,
            num_nodes=torch.ones_like(ids[:, 0]),
            draws=ids.new_zeros((batch, 0, 0)),
            draft_ids=ids.new_zeros((batch, 1, 0)),
            draft_probs=torch.zeros((batch, 1, 0), dtype=torch.float64, device=device),
        )

    def multiplicity(self) -> Tensor:
        """Return ``[batch, nodes]`` int64: the draws that led to each node; the root's drafts."""
        children = self.draws.flatten(1)
        drawn = (children > 0).to(torch.int64)
        counts = torch.zeros_like(self.token_ids).scatter_add_(1, children, drawn)
        counts[:, 0] = (self.draws[:, :1] > 0).sum(dim=(1, 2))
        return counts

    def draft_counts(self) -> Tensor:
        """Return ``[batch, nodes]`` int64, the drafts at each node, equal ones included."""
        children = self.draws.flatten(1)
        drawn = (children > 0).to(torch.int64)
        parents = self.parents.gather(1, children)
        return torch.zeros_like(self.parents).scatter_add_(1, parents, drawn)

    def ancestor_mask(self) -> Tensor:
        """Return ``[batch, nodes, nodes]`` bool: whether node i is node j or descends from it."""
        nodes = torch.arange(self.nodes, device=self.token_ids.device)
        mask = (nodes.unsqueeze(1) == nodes).expand(self.batch, -1, -1).clone()
        mask[:, :, 0] = True
        # The root is set already, so the deepest nodes have length - 1 ancestors left.
        node = self.parents
        for _ in range(self.length - 1):
            mask.scatter_(2, node.unsqueeze(2), value=True)
            node = self.parents.gather(1, node)
        return mask


class TargetProbs(ABC):
    """Next-token distributions p(. | node), already warped (see :mod:`eaglegbv.sampling`).

    Verifiers need p only at a few drafted tokens of every node, and over the whole vocabulary at
    one node per request. So p stays as it was computed, in packed rows: a batch of trees is never
    copied into padding.
    """

    __slots__ = ()
    rows: Tensor  # [batch, nodes] int64, the row of each node; padding nodes repeat the root's

    @property
    @abstractmethod
    def stored(self) -> tuple[Tensor, Tensor]:
        """Numbers ``[rows, vocab]``, and what normalises each row of them, ``[rows]`` float64."""

    @abstractmethod
    def normalised(self, values: Tensor, normalisers: Tensor) -> Tensor:
        """Return p in float64, of such numbers and what normalises them."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.stored[0].shape[-1]

    @property
    def broken(self) -> Tensor:
        """``[batch]`` bool, whether a distribution of a request is NaN or infinite."""
        normalisers = self.stored[1].take(self.rows)
        # A number minus itself is 0, or NaN where it is not finite.
        return (normalisers - normalisers).sum(dim=1) != 0

    def probs_in(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return p at ``token_ids`` ``[..., width]`` of ``rows`` ``[...]``, float64."""
        values, normalisers = self.stored
        at = rows.unsqueeze(-1) * self.vocab + token_ids
        return self.normalised(values.take(at), normalisers.take(rows).unsqueeze(-1))

    def probs_of(self, nodes: Tensor) -> Tensor:
        """Return the distributions at ``nodes`` ``[batch]``, ``[batch, vocab]`` floats."""
        values, normalisers = self.stored
        rows = entry_at(self.rows, nodes)
        return self.normalised(values.index_select(0, rows), normalisers.take(rows).unsqueeze(-1))

    def most_likely(self, nodes: Tensor) -> Tensor:
        """Return the first of the most likely tokens at ``nodes`` ``[batch]``, ``[batch]``."""
        return self.stored[0][entry_at(self.rows, nodes)].argmax(dim=1)


@dataclass(frozen=True, slots=True)
class WarpedLogits(TargetProbs):
    """Target probabilities as logits: p is ``exp(logits - log_normaliser)``, in float64."""

    logits: Tensor  # [rows, vocab] float32 or float64, -inf where warping excluded a token
    log_normaliser: Tensor  # [rows] float64, logsumexp of each row
    rows: Tensor

    @classmethod
    def of(cls, logits: Tensor, rows: Tensor) -> Self:
        """Normalise warped ``logits`` with one pass over the vocabulary."""
        return cls(logits, torch.logsumexp(logits, dim=-1).to(torch.float64), rows)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Its logits and their normalisers."""
        return self.logits, self.log_normaliser

    def normalised(self, values: Tensor, normalisers: Tensor) -> Tensor:
        """Return p of logits."""
        return torch.sub(values, normalisers).exp_()


@dataclass(frozen=True, slots=True)
class NormalisedRows(TargetProbs):
    """Target probabilities as another engine computed them, divided by the sum of their row."""

    probs: Tensor  # [rows, vocab] float32
    sums: Tensor  # [rows] float64, the sum of each row
    rows: Tensor

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Its probabilities and their sums."""
        return self.probs, self.sums

    def normalised(self, values: Tensor, normalisers: Tensor) -> Tensor:
        """Return p of probabilities."""
        return values / normalisers

    def probs_of(self, nodes: Tensor) -> Tensor:
        """Return float32, which takes half the memory; see :meth:`TargetProbs.probs_of`."""
        rows = entry_at(self.rows, nodes)
        return self.probs.index_select(0, rows).div_(self.sums.take(rows).unsqueeze(1))
