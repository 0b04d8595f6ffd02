"""Attention of drafted rows: each sees the text of its request and its own path, nothing else.

    keys of a row at level d   | context of its request | its path: d slots, its own the last |

So no mask is needed: a fixed number of branches of every request go on side by side, and which path
a branch continues is a matter of slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.transfer import send


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchShape:
    """Sizes that stay.

    Attributes:
        requests: Requests, those that pad included.
        branches: Rows of each request.
        levels: Longest path of rows.
        max_context: Longest context.
        heads: Query heads.
        scale: Of the scores.
    """

    requests: int
    branches: int
    levels: int
    max_context: int
    heads: int
    scale: float


class BranchAttention(ABC):
    """Attention of a fixed number of rows over the first layer of a pool.

    Attributes:
        pool: Keys and values.
        shape: The rows.
        most_keys: Most keys of all rows together; None for any number.
    """

    most_keys: int | None = None

    def __init__(self, pool: KVPool, shape: BranchShape) -> None:
        self.pool = pool
        self.shape = shape

    @abstractmethod
    def plan(self, contexts: Sequence[Tensor]) -> None:
        """Prepare for a step's contexts: for each request ``[c]`` int64 on the host, c >= 1."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, tails: Tensor) -> Tensor:
        """Write the rows' keys and values, then attend.

        Args:
            q: ``[requests * branches, heads, head_dim]``.
            k: ``[requests * branches, kv_heads, head_dim]``.
            v: ``[requests * branches, kv_heads, head_dim]``.
            tails: ``[requests * branches, level]`` int64, the slots of each row's path, its own the
                last.

        Returns:
            ``[requests * branches, heads, head_dim]``.
        """


class TorchBranches(BranchAttention):
    """In plain PyTorch; its sizes follow the longest context, so it cannot be recorded."""

    def plan(self, contexts: Sequence[Tensor]) -> None:
        """See :meth:`BranchAttention.plan`."""
        longest = max(len(context) for context in contexts)
        # Padding repeats a slot of the request itself: nobody else's may be read.
        rows = [torch.cat((c, c[:1].expand(longest - len(c)))) for c in contexts]
        lengths = torch.tensor([len(context) for context in contexts])
        device = self.pool.keys.device
        self._contexts = send(torch.stack(rows), device)
        self._seen = send(torch.arange(longest) < lengths.unsqueeze(1), device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tails: Tensor) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        keys, values = self.pool.write(0, tails[:, -1], k, v)
        batch, branches, levels = self.shape.requests, self.shape.branches, tails.shape[1]
        kv_heads, dim = keys.shape[1:]
        grouped = q.view(batch, branches, kv_heads, -1, dim)
        paths = tails.view(batch, branches, levels)
        to_text = torch.einsum("bjhgd,bchd->bjhgc", grouped, keys[self._contexts])
        to_path = torch.einsum("bjhgd,bjthd->bjhgt", grouped, keys[paths])
        unseen = ~self._seen.view(batch, 1, 1, 1, -1)
        scores = torch.cat((to_text.masked_fill(unseen, -torch.inf), to_path), dim=-1)
        weights = (scores.float() * self.shape.scale).softmax(dim=-1).to(q.dtype)
        text, path = weights.split((to_text.shape[-1], levels), dim=-1)
        out = torch.einsum("bjhgc,bchd->bjhgd", text, values[self._contexts])
        out = out + torch.einsum("bjhgt,bjthd->bjhgd", path, values[paths])
        return out.reshape(q.shape)
