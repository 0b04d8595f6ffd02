"""Choice of the requests of each step: first come, first served, within slots and a token budget.

Requests are served in order of precedence: by priority, a lower number first, then by arrival.

- A waiting request is admitted when the free slots hold its sequence, and a step and some growth
  of every request. No waiting request is overtaken.
- Every running request takes part in every step. A request that is prefilled decodes; the
  others share a budget of tokens, so that a long prompt does not hold up those that decode.
- Slots are not reserved for whole answers. When they run short, the request last in precedence is
  pre-empted: it gives up its slots, returns to its old place among the waiting requests, and later
  prefills its sequence again. The first in precedence fits the pool by itself, so it always makes
  progress.
- A waiting request of a better priority pre-empts running ones of a worse priority, if it can be
  admitted then.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import Phase
from eaglegbv.request import Request
from eaglegbv.scheduler.prefix_cache import BLOCK, Block, PrefixCache, idle_slots

GROWTH = 32
"""Tokens that every running request must have room for when another is admitted. Without this room
the new request would be pre-empted at once."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A part of a sequence to prefill."""

    request: Request  # the request whose sequence it is
    count: int  # number of tokens, from `request.context` on

    @property
    def brings_first_token(self) -> bool:
        """Whether this prefills a new prompt to its end, so that the first token follows."""
        return self.count == self.request.to_prefill and not self.request.prefilled


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The requests that take part in a step."""

    decoding: list[Request]  # requests that are prefilled
    prefilling: list[PrefillChunk]  # chunks of the sequences of others

    @property
    def empty(self) -> bool:
        """Whether no request takes part."""
        return not self.decoding and not self.prefilling

    @property
    def requests(self) -> list[Request]:
        """All requests that take part."""
        return [*self.decoding, *(chunk.request for chunk in self.prefilling)]

    def share_seconds(self, seconds: Mapping[Phase, float], rows: int) -> None:
        """Share a step's time by phase among the requests that took part.

        The time of a forward is shared by its ``rows``: those of tokens that requests prefill count
        for these requests, the others for the decoding ones. For a request that still prefills, all
        time counts as prefill.
        """
        prefilled = sum(chunk.count for chunk in self.prefilling)
        share = len(self.prefilling) / max(1, len(self.requests))
        shares = {Phase.FORWARD: prefilled / rows, Phase.VERIFY: share, Phase.COMMIT: share}
        prefill = {phase: seconds.get(phase, 0.0) * part for phase, part in shares.items()}
        total = seconds.get(Phase.PREFILL, 0.0) + sum(prefill.values())
        for chunk in self.prefilling:
            chunk.request.metrics.add_seconds(Phase.PREFILL, total * chunk.count / prefilled)
        for phase in (Phase.DRAFT, *shares):
            decoding_seconds = seconds.get(phase, 0.0) - prefill.get(phase, 0.0)
            for request in self.decoding:
                request.metrics.add_seconds(phase, decoding_seconds / len(self.decoding))


@dataclass(slots=True, kw_only=True, eq=False)
class Scheduler:
    """The waiting and the running requests."""

    max_batch: int  # most requests that run together
    prefill_tokens: int  # most tokens that a step prefills
    cache: PrefixCache  # blocks of sequences prefilled before, in the pool's slots
    vacate: Callable[[Request], None]  # makes a pre-empted request give back all it holds
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0
    _waiting: list[Request] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self.running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def first(self) -> Request | None:
        """The request first in precedence, or None."""
        firsts = [*self.running[:1], *self._waiting[:1]]
        return min(firsts, key=_precedence, default=None)

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidArgument where it can never fit the KV pool."""
        slots = self.cache.allocator.num_slots
        if request.slots_needed > slots:
            raise InvalidArgument(
                "prompt",
                f"{len(request.prompt_ids)} tokens + {request.max_tokens} to generate",
                f"at most {slots - request.least_slots} tokens, which the KV pool holds: "
                "a smaller max_tokens, or more kv_slots",
            )
        insort(self._waiting, request, key=_precedence)

    def next_batch(self) -> StepBatch:
        """Admit requests that fit, pre-empt those that no longer do, and return the next step's."""
        self._admit()
        return self._grant()

    def remove(self, request: Request) -> None:
        """Remove a request, waiting or running; the caller frees what it holds."""
        for requests in (self.running, self._waiting):
            place = bisect_left(requests, _precedence(request), key=_precedence)
            if place < len(requests) and requests[place] is request:
                del requests[place]

    def preempt(self, request: Request) -> None:
        """Make a running request wait again, without any slots; InvalidArgument for others."""
        if request not in self.running:
            raise InvalidArgument("request", request.number, "one that runs")
        self.running.remove(request)
        self.vacate(request)
        insort(self._waiting, request, key=_precedence)
        request.metrics.preemptions += 1
        self.preemptions += 1

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if (blocks := self._find_room(request)) is None:
                return
            self._waiting.pop(0)
            self.cache.lend(request, blocks)
            request.metrics.cached_tokens += request.shared
            insort(self.running, request, key=_precedence)

    def _find_room(self, request: Request) -> list[Block] | None:
        """Return the blocks that ``request`` begins with, or None if it must wait."""
        worse = [r for r in self.running if r.priority > request.priority]
        if worse and not self._fits_among(request, self.running[: -len(worse)]):
            worse = []
        while True:
            if len(self.running) < self.max_batch:
                blocks = self.cache.match(request)
                # Idle blocks are free slots until they are lent.
                needed = self._outlook(request) - BLOCK * len(blocks) + idle_slots(blocks)
                if needed + sum(map(self._outlook, self.running)) <= self.cache.allocator.num_free:
                    return blocks
            if not worse:
                return None
            self.preempt(worse.pop())

    def _fits_among(self, request: Request, others: list[Request]) -> bool:
        """Return whether ``request`` could run beside ``others`` and no one else."""
        held = sum(other.context + self._outlook(other) for other in others)
        room = held + self._outlook(request) <= self.cache.allocator.num_slots
        return room and len(others) < self.max_batch

    def _grant(self) -> StepBatch:
        """Grant running requests the slots and tokens of a step, in order of precedence."""
        batch = StepBatch([], [])
        free = self.cache.allocator.num_free
        budget = self.prefill_tokens
        place = 0
        while place < len(self.running):
            request = self.running[place]
            place += 1
            left = request.to_prefill
            if left and not budget:
                continue
            # A sequence is prefilled in parts of any size; a tree needs all its slots at once.
            least = 1 if left else self._step_slots(request)
            while free < least and place < len(self.running):
                before = self.cache.allocator.num_free
                self.preempt(self.running[-1])
                free += self.cache.allocator.num_free - before
            if free < least:
                continue
            if left:
                count = min(left, budget, free)
                batch.prefilling.append(PrefillChunk(request, count))
                budget -= count
                free -= count
            else:
                batch.decoding.append(request)
                free -= least
        return batch

    def _step_slots(self, request: Request) -> int:
        """Return the most slots of the request's next step: where the pool ends, fewer."""
        return min(request.step_slots, self.cache.allocator.num_slots - request.context)

    def _outlook(self, request: Request) -> int:
        """Return the slots a request should find free: to prefill, for a step, and to grow.

        It is alone in the pool if nobody else fits.
        """
        growth = min(GROWTH, request.max_tokens - len(request.token_ids))
        room = self.cache.allocator.num_slots - request.context
        return min(request.to_prefill + request.step_slots + growth, room)


def _precedence(request: Request) -> tuple[int, int]:
    return request.priority, request.number
