"""How many tokens requests are expected to commit: by a plan in the next step, and altogether."""

from dataclasses import dataclass, field

import numpy as np

from eaglegbv.request import PlanState, Request
from eaglegbv.scheduler.acceptance import Acceptance, Evidence, kind_of
from eaglegbv.scheduler.choice import Options
from eaglegbv.scheduler.costs import Array, Ints

_REQUEST_HOPE = 0.5
"""Standard errors by which what is known of a request is raised, where it decodes alone.

A text of which little is known may be an easy one, and a few steps tell. Without that, one hard
text in the beginning could keep drafting off for the next twenty texts (simulated).
"""

_HORIZON = 256
"""Tokens that a request is expected to go on for at most, whatever its limit.

What a drafter has to read is spread over them.
"""


@dataclass(slots=True)
class RequestMemory(PlanState):
    """What is known of one request.

    Attributes:
        drafts: How far its drafts got.
        matched: Of a lookup, how much of the text's end it had found.
    """

    drafts: Evidence = field(default_factory=Evidence)
    matched: int = 0


class Prospects:
    """What is known of drafts: of each kind of request, and of each request."""

    def __init__(self) -> None:
        """Begin knowing nothing."""
        self._acceptance: dict[tuple[int, float], Acceptance] = {}

    def expected_tokens(self, members: list[Request], options: Options, *, batch: int) -> Array:
        """Return ``[requests, plans]`` what each request is expected to commit by each plan.

        They are some of a ``batch``, or all.
        """
        tokens = np.ones((len(members), len(options.plans)))
        temperatures = np.array([plan.draft_temperature for plan in options.plans])
        kinds = np.array([kind_of(request.params.temperature) for request in members])
        drafts = [memory_of(request).drafts for request in members]
        # Only the request itself gains by what is learned of it, but the whole batch waits.
        hope = _REQUEST_HOPE / batch
        shifts = np.array([own.shift + hope * own.doubt for own in drafts])
        limits = limits_of(members)
        for kind in set(kinds.tolist()):
            rows = np.flatnonzero(kinds == kind)
            for temperature in set(temperatures.tolist()):
                columns = np.flatnonzero(temperatures == temperature)
                tokens[np.ix_(rows, columns)] = self._chances(kind, temperature).expected_tokens(
                    shifts[rows], limits[rows], options.paths[columns], options.depths[columns]
                )
        return tokens

    def observe(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        plan, kind = request.plan, kind_of(request.params.temperature)
        self._chances(kind, plan.draft_temperature).observe(
            memory_of(request).drafts, paths=plan.paths, offered=offered, accepted=accepted
        )

    def _chances(self, kind: int, draft_temperature: float) -> Acceptance:
        key = kind, draft_temperature
        if key not in self._acceptance:
            # Greedy requests draft other trees than sampled ones.
            like = [k for k in self._acceptance if (k[0] == 0) == (kind == 0)]
            nearest = min(like, key=lambda k: _distance(k, key), default=None)
            known = None if nearest is None else self._acceptance[nearest]
            self._acceptance[key] = Acceptance() if known is None else known.hint()
        return self._acceptance[key]


def memory_of(request: Request) -> RequestMemory:
    """Return what is known of a request; at first, nothing.

    Raises:
        TypeError: It belongs to another planner.
    """
    if request.plan_state is None:
        request.plan_state = RequestMemory()
    if not isinstance(request.plan_state, RequestMemory):
        raise TypeError(f"request {request.number} belongs to another planner")
    return request.plan_state


def limits_of(members: list[Request]) -> Ints:
    """Return ``[requests]`` how many tokens each may still commit."""
    return np.array([r.max_tokens - len(r.token_ids) for r in members])


def tokens_to_come(members: list[Request]) -> Array:
    """Return ``[requests]`` for how many tokens each is expected to go on."""
    left: Array = np.clip(limits_of(members), 1, _HORIZON).astype(np.float64)
    return left


def weights_of(members: list[Request]) -> Array:
    """Return ``[requests]`` float64: what a token of each is worth where nobody waits.

    A batch takes as long as its last request, and runs less efficiently as it shrinks; so those
    that have most to come are to catch up. The more so, the further they are behind: the square of
    what is to come, which among others of its powers made simulated batches of 16 end first.
    """
    squares = tokens_to_come(members) ** 2
    weights: Array = squares / squares.mean()
    return weights


def _distance(a: tuple[int, float], b: tuple[int, float]) -> float:
    """Return how different two kinds of requests are, at their draft temperatures."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
