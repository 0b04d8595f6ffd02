"""Sequences with a common beginning share its KV slots.

A sequence is cut into blocks of ``BLOCK`` positions. A block is identified by the block before it,
its own tokens *and the token after them*: the row of an EAGLE head at a position also reads the
next token, so the last row of a block is valid only for sequences that have that token in common
too. Blocks are compared token by token; with a hash alone two sequences could collide.

    positions   0 ... 15 | 16 ... 31 | 32 ...
    key       (root, x_0 ... x_16)   |
                (block 1, x_16 ... x_32)

In some blocks the drafter's rows are final too; in others, which may follow those, only the
target's are. A block of each kind may hold the same sequence.

Blocks in use belong to the cache, and requests count as their users. The slots of a block without
users are free, but its contents are kept. A sequence that begins with it takes it back; when other
free slots run out, the least recently used blocks are forgotten first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from eaglegbv.attention import SlotAllocator
from eaglegbv.errors import InvalidArgument
from eaglegbv.request import Request

BLOCK = 16  # positions in a block
_FORGET_SHARE = 16
"""One part in this many of the pool is forgotten at once, so that its slots lie together."""

Key: TypeAlias = tuple[int, bool, tuple[int, ...]]
_ROOT = 0  # number that stands for the parent of a sequence's first block
_WORTH_SKIPPING = 64
"""How many positions longer a match of the target's rows alone must be to be preferred."""


@dataclass(slots=True, eq=False)
class Block:
    """KV slots of ``BLOCK`` positions."""

    # Number of the block before, whether the drafter's rows are final too, and the tokens from the
    # first position to the one after the last.
    key: Key
    number: int  # the block's own number, never used again
    slots: Tensor  # [BLOCK] int64
    users: int = 0  # number of requests whose sequences contain the block

    @property
    def followed(self) -> bool:
        """Whether the drafter's rows are final too, from the sequence's beginning on."""
        return self.key[1]


@dataclass(slots=True)
class PrefixCache:
    """Blocks, found by their tokens."""

    allocator: SlotAllocator  # owner of the slots
    enabled: bool = True  # whether sequences share blocks at all
    shared: int = 0  # tokens so far that requests found, and did not read again
    forgotten: int = 0  # blocks so far that were forgotten because their slots were needed
    _blocks: dict[Key, Block] = field(default_factory=dict)
    _idle: dict[int, Block] = field(default_factory=dict)
    _held: dict[int, list[Block]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(_ROOT + 1))

    def __post_init__(self) -> None:
        self.allocator.add_keeper(self._forget)

    def match(self, request: Request) -> list[Block]:
        """Return the blocks that ``request`` need not prefill; at least one token is left."""
        if not self.enabled or request.scores_prompt:
            return []
        tokens = request.tokens_from(0)[: request.prefill_length]
        if not request.drafted:
            return self._chain(tokens, [], followed=False)
        followed = self._chain(tokens, [], followed=True)
        if not request.skips:
            return followed
        skipped = self._chain(tokens, followed, followed=False)
        if not followed:
            return skipped
        alone = self._chain(tokens, [], followed=False)
        return alone if BLOCK * (len(alone) - len(skipped)) > _WORTH_SKIPPING else skipped

    def _chain(self, tokens: Sequence[int], before: list[Block], *, followed: bool) -> list[Block]:
        """Return ``before`` and the blocks of ``tokens`` that follow these."""
        blocks = list(before)
        for start in range(BLOCK * len(before), len(tokens) - BLOCK, BLOCK):
            parent = blocks[-1].number if blocks else _ROOT
            block = self._blocks.get(_key(parent, tokens, start, followed=followed))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def lend(self, request: Request, blocks: list[Block]) -> None:
        """Let ``request``, which holds nothing, begin with ``blocks`` found by :meth:`match`."""
        if not blocks:
            return
        for block in blocks:
            self._use(block)
        self._held[request.number] = blocks
        request.slots = torch.cat([block.slots for block in blocks])
        request.shared = len(request.slots)
        if request.drafted and not blocks[-1].followed:
            request.skipped = request.shared
        self.shared += request.shared

    def store(self, request: Request, positions: int, *, followed: bool) -> None:
        """Take over the full blocks among the first ``positions`` positions of ``request``.

        Where the cache already has a block of the same sequence, the request switches to that block
        and its own slots are freed: both hold the same values, up to rounding.

        Args:
            request: The request that holds the positions.
            positions: Leading positions whose rows are final in the target's pool, and in the
                drafter's too if ``followed``; otherwise the drafter must not look at them.
            followed: Whether the drafter has run these positions without skipping any before them.
                If it has skipped some, nothing after them is taken over.
        """
        # The token after a block is part of its key.
        end = min(positions, request.length - 1) // BLOCK * BLOCK
        if not self.enabled or end <= request.shared:
            return
        held = self._held.setdefault(request.number, [])
        if followed and held and not held[-1].followed:
            return
        tokens = request.tokens_from(0)
        parent = held[-1].number if held else _ROOT
        slots = [request.slots[: request.shared]]
        for start in range(request.shared, end, BLOCK):
            key = _key(parent, tokens, start, followed=followed)
            block_slots = request.slots[start : start + BLOCK]
            block = self._blocks.get(key)
            if block is None:
                block = Block(key, next(self._numbers), block_slots.clone(), users=1)
                self._blocks[key] = block
            else:
                self._use(block)
                self.allocator.release(block_slots)
            held.append(block)
            slots.append(block.slots)
            parent = block.number
        request.slots = torch.cat((*slots, request.slots[end:]))
        request.shared = end

    def give_back(self, request: Request) -> None:
        """End the request's use of its blocks; its other slots are left to the caller."""
        # Later blocks go first so that they are forgotten first: without the earlier blocks they
        # could not be found.
        for block in reversed(self._held.pop(request.number, [])):
            block.users -= 1
            if block.users == 0:
                self._idle[block.number] = block
                self.allocator.keep(block.slots)
        request.slots = request.slots[request.shared :]
        request.shared = 0

    def clear(self) -> None:
        """Forget all blocks that are not in use."""
        self._forget(BLOCK * len(self._idle))

    def owned(self) -> list[Tensor]:
        """Return the slots of the blocks in use, each block once."""
        return [block.slots for block in self._blocks.values() if block.users]

    def check(self, requests: Iterable[Request]) -> None:
        """Raise InvalidArgument unless users of blocks and shared slots are consistent."""
        users: dict[int, int] = {}
        for request in requests:
            held = self._held.get(request.number, [])
            for block in held:
                users[block.number] = users.get(block.number, 0) + 1
            expected = [slot for block in held for slot in block.slots.tolist()]
            if request.slots[: request.shared].tolist() != expected:
                raise InvalidArgument("shared", request.shared, f"the slots of {len(held)} blocks")
        for block in self._blocks.values():
            if block.users != users.get(block.number, 0):
                expected_users = f"{users.get(block.number, 0)}, the requests that hold the block"
                raise InvalidArgument("users", block.users, expected_users)
            if (block.users == 0) != (block.number in self._idle):
                raise InvalidArgument("idle", block.number, "the blocks without users")
        if self.allocator.num_kept < BLOCK * len(self._idle):
            raise InvalidArgument("num_kept", self.allocator.num_kept, "the slots of idle blocks")

    def _use(self, block: Block) -> None:
        if block.users == 0:
            del self._idle[block.number]
            self.allocator.take_back(block.slots)
        block.users += 1

    def _forget(self, slots: int) -> None:
        """Forget idle blocks of at least ``slots`` slots, the least recently used ones first."""
        wanted = max(slots, self.allocator.num_slots // _FORGET_SHARE)
        for number in list(self._idle)[: -(-wanted // BLOCK)]:
            block = self._idle.pop(number)
            del self._blocks[block.key]
            self.allocator.blank(block.slots)
            self.forgotten += 1


def idle_slots(blocks: Sequence[Block]) -> int:
    """Return how many slots of ``blocks`` count as free until the blocks are lent."""
    return BLOCK * sum(block.users == 0 for block in blocks)


def _key(parent: int, tokens: Sequence[int], start: int, *, followed: bool) -> Key:
    return parent, followed, tuple(tokens[start : start + BLOCK + 1])
