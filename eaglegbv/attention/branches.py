"""Attention of drafted rows: each sees the text of its request and its own path, nothing else.

    keys of a request | context | level 0: a slot for each branch | level 1: likewise | ...

A fixed number of branches of every request are drafted side by side. The slots of their rows are
known from the start. Whose path a branch continues (a chain of branches) becomes known only during
drafting.
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
    """Sizes that stay fixed.

    Attributes:
        requests: Number of requests, including those for padding.
        branches: Rows of each request.
        levels: Longest path of rows.
        max_context: Longest context.
        heads: Query heads.
        scale: Factor on the scores.
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
        slots: ``[requests, levels, branches]`` int64, slots of the rows, always in the same memory.
        most_keys: Most keys of all requests together, including those of their rows; None for no
            limit.
    """

    most_keys: int | None = None

    def __init__(self, pool: KVPool, shape: BranchShape) -> None:
        self.pool = pool
        self.shape = shape
        with torch.inference_mode(mode=False):
            self.slots = torch.zeros(
                (shape.requests, shape.levels, shape.branches),
                dtype=torch.int64,
                device=pool.keys.device,
            )

    @abstractmethod
    def plan(self, contexts: Sequence[Tensor], slots: Tensor) -> None:
        """Prepare for a step.

        Args:
            contexts: For each request, ``[c]`` int64 on the host with c >= 1, slots of its context.
            slots: ``[requests, levels, branches]`` int64 on the host, slots of the rows.
        """

    def _load(self, slots: Tensor) -> None:
        """Let the rows use ``slots``, shaped as in :meth:`plan`."""
        self.slots.copy_(send(slots, self.slots.device))

    @abstractmethod
    def attend(self, level: int, q: Tensor, k: Tensor, v: Tensor, chains: Tensor | None) -> Tensor:
        """Write the keys and values of a level's rows, then attend.

        Args:
            level: Counted from 0; all levels before it have run.
            q: ``[requests * branches, heads, head_dim]``.
            k: ``[requests * branches, kv_heads, head_dim]``.
            v: ``[requests * branches, kv_heads, head_dim]``.
            chains: ``[requests, branches, level + 1]`` int64, the branch of each row's path at
                every level, with its own last; None if every branch continues itself.

        Returns:
            ``[requests * branches, heads, head_dim]``.
        """


class TorchBranches(BranchAttention):
    """Attention in plain PyTorch; its sizes follow the longest context, so it is not recordable."""

    def plan(self, contexts: Sequence[Tensor], slots: Tensor) -> None:
        """See :meth:`BranchAttention.plan`."""
        self._load(slots)
        longest = max(len(context) for context in contexts)
        # Padding repeats a slot of the request itself, because it must not read another's slots.
        rows = [torch.cat((c, c[:1].expand(longest - len(c)))) for c in contexts]
        lengths = torch.tensor([len(context) for context in contexts])
        device = self.pool.keys.device
        self._contexts = send(torch.stack(rows), device)
        self._seen = send(torch.arange(longest) < lengths.unsqueeze(1), device)

    def attend(self, level: int, q: Tensor, k: Tensor, v: Tensor, chains: Tensor | None) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        keys, values = self.pool.write(0, self.slots[:, level].flatten(), k, v)
        batch, branches, levels = self.shape.requests, self.shape.branches, level + 1
        kv_heads, dim = keys.shape[1:]
        grouped = q.view(batch, branches, kv_heads, -1, dim)
        paths = self.slots[:, :levels].transpose(1, 2)
        if chains is not None:
            paths = paths.gather(1, chains)
        to_text = torch.einsum("bjhgd,bchd->bjhgc", grouped, keys[self._contexts])
        to_path = torch.einsum("bjhgd,bjthd->bjhgt", grouped, keys[paths])
        unseen = ~self._seen.view(batch, 1, 1, 1, -1)
        scores = torch.cat((to_text.masked_fill(unseen, -torch.inf), to_path), dim=-1)
        weights = (scores.float() * self.shape.scale).softmax(dim=-1).to(q.dtype)
        text, path = weights.split((to_text.shape[-1], levels), dim=-1)
        out = torch.einsum("bjhgc,bchd->bjhgd", text, values[self._contexts])
        out = out + torch.einsum("bjhgt,bjthd->bjhgd", path, values[paths])
        return out.reshape(q.shape)
