"""An EAGLE head's part in recorded drafts: a forward of the head for each level below the roots."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from eaglegbv.attention import BranchAttention, BranchShape
from eaglegbv.cuda_graphs import NotRecordable
from eaglegbv.devices import fill
from eaglegbv.drafters.eagle_model import EagleHead, HeadForward, Rotation
from eaglegbv.drafters.host_drafting import DraftCall
from eaglegbv.drafters.tree_growth import Frontier, LevelTable
from eaglegbv.request import Request

RootOf: TypeAlias = Callable[[Request], tuple[Tensor, Tensor]]
"""Returns the slots ``[rows]`` int64 of a request's true rows, and the head's output ``[hidden]``
at the last of them."""


class EagleLevels:
    """Static buffers of a draft's size; see :class:`eaglegbv.drafters.graph_drafting.LevelDrafter`.

    The last slot of the pool of ``forward`` is nobody's: padding writes to it.
    """

    def __init__(
        self,
        head: EagleHead,
        forward: HeadForward,
        root_of: RootOf,
        max_context: int,
        requests: int,
        table: LevelTable,
    ) -> None:
        pool = forward.attention.pool
        config = head.config
        self._head = head
        self._forward = forward
        self._root_of = root_of
        self._requests = requests
        self._table = table
        self._rows = table.most_rows
        self._scratch_slot = pool.num_slots - 1
        self._attention: BranchAttention | None = None
        if table.plan.depth > 1:
            shape = BranchShape(
                requests=requests,
                branches=self._rows,
                levels=table.plan.depth - 1,
                max_context=max_context,
                heads=config.num_heads,
                scale=config.head_dim**-0.5,
            )
            self._attention = forward.attention.branches(shape)
        device = pool.keys.device
        with torch.inference_mode(mode=False):
            self._contexts = torch.zeros(requests, dtype=torch.int64, device=device)
            self._roots = pool.keys.new_zeros((requests, config.hidden_size))
        # Of the level that was run last.
        self._hidden = self._roots.unsqueeze(1)  # [requests, rows, hidden]
        self._branches: Tensor | None = None
        self._rotations: list[Rotation] = []

    def load(self, call: DraftCall) -> None:
        """Copy a step's numbers, and plan attention; NotRecordable for too many keys."""
        roots = [self._root_of(request) for request in call.requests]
        missing = self._requests - len(roots)  # with one key each
        nobody = torch.tensor([self._scratch_slot])
        contexts = [*(slots for slots, _ in roots), *[nobody] * missing]
        if self._attention is not None:
            self._plan(self._attention, contexts, call.tree_slots)
        fill(self._contexts, torch.tensor([len(context) for context in contexts]))
        if roots:
            self._roots[: len(roots)].copy_(torch.stack([hidden for _, hidden in roots]))

    def _plan(
        self,
        attention: BranchAttention,
        contexts: Sequence[Tensor],
        tree_slots: Sequence[Tensor],
    ) -> None:
        slots = torch.full(attention.slots.shape, self._scratch_slot)
        keys = sum(len(context) for context in contexts) + slots.numel()
        if attention.most_keys is not None and keys > attention.most_keys:
            raise NotRecordable("too many keys", lasting=False)
        for slots_of_request, free in zip(slots, tree_slots, strict=False):
            first = 0
            for slots_of_level, level in zip(slots_of_request, self._table.levels, strict=False):
                end = first + level.next_rows
                slots_of_level[: level.next_rows] = free[first:end]
                first = end
        attention.plan(contexts, slots)

    def start(self) -> Tensor:
        """Return what follows the roots: the head has run at the last true rows."""
        self._hidden = self._roots.unsqueeze(1)
        self._branches = None
        self._rotations = self._rotations_of_levels()
        return self._head.logits(self._roots)

    def step(self, depth: int, rows: Frontier) -> Tensor:
        """Run the head on its own output at the rows' parents."""
        count = rows.token_ids.shape[1]
        self._branches = self._branches_of(depth, rows)
        hidden = self._hidden
        if rows.parents is not None:
            hidden = hidden.gather(1, rows.parents.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        elif depth == 1:  # all rows continue the root
            hidden = hidden.repeat_interleave(count, dim=1)
        token_ids = _padded(rows.token_ids, self._rows)
        following, logits = self._forward.level(
            token_ids.flatten(),
            self._rotations[depth - 1],
            _padded(hidden, self._rows).flatten(0, 1),
            self._attend(depth - 1),
        )
        shape = (self._requests, self._rows, -1)
        self._hidden = following.view(shape)[:, :count]
        return logits.view(shape)[:, :count].flatten(0, 1)

    def _branches_of(self, depth: int, rows: Frontier) -> Tensor | None:
        """Return the branches ``[requests, most rows, depth]`` of each row's path.

        None if each row continues that of its own number.
        """
        known = self._branches
        parents = rows.parents
        if depth == 1 or (known is None and parents is None):
            return None
        batch, count = rows.token_ids.shape
        every = torch.arange(self._rows, device=rows.token_ids.device)
        if known is None:
            known = every.view(1, -1, 1).expand(batch, -1, depth - 1)
        if parents is not None:
            known = known.gather(1, parents.unsqueeze(2).expand(-1, -1, depth - 1))
        latest = every[:count].expand(batch, -1).unsqueeze(2)
        return _padded(torch.cat((known[:, :count], latest), dim=2), self._rows)

    def _rotations_of_levels(self) -> list[Rotation]:
        """Return the angles of each level's rows, in as many operations as for one level."""
        levels = torch.arange(self._table.plan.depth - 1, device=self._contexts.device)
        positions = self._contexts.unsqueeze(1) + levels.view(-1, 1, 1)
        positions = positions.expand(-1, -1, self._rows).flatten(1)
        of_levels = self._head.rotary(positions, self._roots.dtype)
        return [Rotation(*angles) for angles in zip(of_levels.cos, of_levels.sin, strict=True)]

    def _attend(self, level: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        attention = self._attention
        branches = self._branches
        assert attention is not None  # this level exists
        return lambda q, k, v: attention.attend(level, q, k, v, branches)


def _padded(rows: Tensor, most: int) -> Tensor:
    """Return ``[requests, most, ...]``: as many rows, the missing ones 0."""
    missing = most - rows.shape[1]
    if not missing:
        return rows
    return torch.cat((rows, rows.new_zeros((len(rows), missing, *rows.shape[2:]))), dim=1)
