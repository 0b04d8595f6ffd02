"""The paged KV pool: keys and values of every layer, one token a page, and who owns which slot.

Slots are numbers; pools are storage. One allocator serves the target's pool and the drafter's: the
token at position t of a request owns the same slot number in both. A committed tree node keeps its
slot, a rejected one gives it back, and nothing is ever copied.
"""

import heapq
from collections.abc import Iterable

import torch
from torch import Tensor

from eaglegbv.errors import InvalidArgument, OutOfSlots


class SlotAllocator:
    """Hands out slots 0 ... ``num_slots`` - 1, the lowest free ones first.

    Lowest first keeps the slots of few requests dense, so that attention may read its keys as one
    slice of the pool instead of gathering them.
    """

    def __init__(self, num_slots: int, *, device: torch.device | str = "cpu") -> None:
        """Start with every slot free.

        Args:
            num_slots: Number of slots, at least 1.
            device: Where the slot tensors handed out live.

        Raises:
            InvalidArgument: ``num_slots`` is below 1.
        """
        if num_slots < 1:
            raise InvalidArgument("num_slots", num_slots, "an integer of at least 1")
        self.num_slots = num_slots
        self.device = torch.device(device)
        self._free = list(range(num_slots))  # a heap: sorted lists are heaps
        self._taken = bytearray(num_slots)

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def allocate(self, count: int) -> Tensor:
        """Take ``count`` slots: ``[count]`` int64, ascending.

        Raises:
            OutOfSlots: Fewer than ``count`` are free; none is taken then.
            InvalidArgument: ``count`` is negative.
        """
        if count < 0:
            raise InvalidArgument("count", count, "an integer of at least 0")
        if count > len(self._free):
            raise OutOfSlots(count, len(self._free), self.num_slots)
        slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self._taken[slot] = 1
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def release(self, slots: Tensor) -> None:
        """Give ``slots`` ``[count]`` back.

        Raises:
            InvalidArgument: A slot is not taken (released twice, or never handed out); the slots
                before it in ``slots`` are free then.
        """
        for slot in slots.tolist():
            if not 0 <= slot < self.num_slots or not self._taken[slot]:
                raise InvalidArgument("slots", slot, "slots that are taken, each released once")
            self._taken[slot] = 0
            heapq.heappush(self._free, slot)

    def check(self, owned: Iterable[Tensor]) -> None:
        """Check that ``owned``, all owners' slots, and the free slots are every slot exactly once.

        Raises:
            InvalidArgument: A slot has two owners, an owner holds a free slot, or a taken slot has
                no owner (a leak).
        """
        owners = bytearray(self.num_slots)
        for slots in owned:
            for slot in slots.tolist():
                if not 0 <= slot < self.num_slots or not self._taken[slot]:
                    raise InvalidArgument("owned", slot, "slots that are taken")
                if owners[slot]:
                    raise InvalidArgument("owned", slot, "slots with one owner each")
                owners[slot] = 1
        if owners != self._taken:
            leaked = [s for s in range(self.num_slots) if self._taken[s] and not owners[s]]
            raise InvalidArgument("owned", leaked[:16], "an owner of every taken slot (leak)")
        if len(self._free) != self.num_slots - sum(self._taken):
            raise InvalidArgument("free", len(self._free), "every slot that is not taken, once")


class KVPool:
    """Keys and values, by layer and slot.

    Attributes:
        keys: ``[layers, slots, kv_heads, head_dim]``.
        values: ``[layers, slots, kv_heads, head_dim]``.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the pool, all zeros (memory is touched only as slots come into use).

        Raises:
            InvalidArgument: A size is below 1.
        """
        sizes = {"layers": layers, "slots": slots, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size < 1:
                raise InvalidArgument(name, size, "an integer of at least 1")
        shape = (layers, slots, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        # Views made once: indexing a tensor by layer costs as much as a small kernel.
        self._layers = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, each ``[slots, kv_heads, head_dim]``, as views."""
        return self._layers[index]

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.keys.shape[1]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.keys[:, 0].numel() * self.keys.element_size()
