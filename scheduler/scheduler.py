"""Who decodes next: first come, first served, within a budget of requests and KV slots."""

from collections import deque

from eaglegbv.errors import InvalidArgument
from eaglegbv.request import Request


class Scheduler:
    """A queue of waiting requests and the batch that runs.

    A request is admitted when the slots it can come to need are free of other requests' claims, so
    that no running request is ever short of slots.
    """

    def __init__(self, *, max_batch: int, slots: int) -> None:
        """Start empty.

        Args:
            max_batch: Requests that run together at most.
            slots: KV slots there are.
        """
        self.running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._max_batch = max_batch
        self._slots = slots
        self._claimed = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidArgument: It can never fit the KV pool.
        """
        if request.slots_needed > self._slots:
            text = len(request.prompt_ids) + request.max_tokens
            room = self._slots - (request.slots_needed - text)
            raise InvalidArgument(
                "prompt",
                f"{len(request.prompt_ids)} tokens + {request.max_tokens} to generate",
                f"at most {room} tokens, which the KV pool holds",
            )
        self._waiting.append(request)

    def next_batch(self) -> list[Request]:
        """Admit what fits, in order of arrival, and return the requests of the next step."""
        while self._waiting and len(self.running) < self._max_batch:
            if self._claimed + self._waiting[0].slots_needed > self._slots:
                break
            request = self._waiting.popleft()
            self._claimed += request.slots_needed
            self.running.append(request)
        return list(self.running)

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running, and give its claim back."""
        if request in self.running:
            self.running.remove(request)
            self._claimed -= request.slots_needed
        elif request in self._waiting:
            self._waiting.remove(request)
