"""KV slots that requests hold: borrowed for a step, owned by sequences, or in shared blocks."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.attention import SlotAllocator
from eaglegbv.request import Request
from eaglegbv.scheduler.prefix_cache import PrefixCache


@dataclass
class KVSlots:
    """Hands slots to requests and takes them back.

    pool --allocate--> request.borrowed --commit--> request.slots --free--> pool
                             |                                                  ^
                             +------------------- the rest -------------------+
    """

    allocator: SlotAllocator  # owner of the free slots
    cache: PrefixCache  # owner of the slots that sequences share

    def allocate(self, request: Request, count: int) -> Tensor:
        """Lend ``[count]`` int64 slots for a step, or raise OutOfSlots and lend none."""
        request.borrowed = self.allocator.allocate(count)
        return request.borrowed

    def commit(self, request: Request, places: list[int]) -> None:
        """Move the borrowed slots at ``places`` to the sequence; take the other ones back."""
        if len(places) == len(request.borrowed):  # as after every plain step
            request.slots = torch.cat((request.slots, request.borrowed))
            request.borrowed = request.borrowed[:0]
            return
        # A step lends few slots, and lists sort them faster than tensors do.
        lent = request.borrowed.tolist()
        chosen = set(places)
        kept = [slot for place, slot in enumerate(lent) if place in chosen]
        rest = [slot for place, slot in enumerate(lent) if place not in chosen]
        request.slots = torch.cat((request.slots, torch.tensor(kept, dtype=torch.int64)))
        request.borrowed = torch.tensor(rest, dtype=torch.int64)
        self._release(request)

    def free(self, request: Request) -> None:
        """Take back all that a request holds."""
        self.cache.give_back(request)
        self._release(request)
        released = request.slots
        request.slots = request.slots[:0]
        self.allocator.release(released)

    def check(self, requests: Iterable[Request]) -> None:
        """Check that every slot has one owner: the pool, one of all requests, or a block in use."""
        holders = list(requests)
        self.cache.check(holders)
        held = [request.slots[request.shared :] for request in holders]
        borrowed = [request.borrowed for request in holders]
        self.allocator.check([*self.cache.owned(), *held, *borrowed])

    def _release(self, request: Request) -> None:
        lent = request.borrowed
        request.borrowed = request.borrowed[:0]
        self.allocator.release(lent)
