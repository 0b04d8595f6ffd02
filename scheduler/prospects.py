"""How many tokens requests are expected to commit: by a plan in the next step, and altogether."""

from dataclasses import dataclass, field

import numpy as np

from eaglegbv.request import PlanState, Request
from eaglegbv.scheduler.acceptance import Acceptance, Evidence, kind_of
from eaglegbv.scheduler.choice import Options
from eaglegbv.scheduler.costs import Array, Ints

_REQUEST_HOPE = 0.5
"""Standard errors by which a request's shift is raised, where the request decodes alone.

A text about which little is known may be an easy one, and a few steps show whether it is. Without
the raise, one hard text at the beginning could keep drafting off for the next twenty texts
(simulated).
"""

_HORIZON = 256
"""Most tokens that a request is expected to go on for, whatever its limit.

The time a drafter needs to read what it missed is spread over these tokens.
"""


@dataclass(slots=True)
class RequestMemory(PlanState):
    """What is known about one request.

    Attributes:
        drafts: How far its drafts got.
        matched: Tokens at the text's end that the latest lookup matched.
    """

    drafts: Evidence = field(default_factory=Evidence)
    matched: int = 0


class Prospects:
    """What is known about drafts: of each kind of request, and of each request."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._acceptance: dict[tuple[int, float], Acceptance] = {}

    def expected_tokens(self, members: list[Request], options: Options, *, batch: int) -> Array:
        """Return ``[requests, plans]`` float64: tokens each request should commit by each plan.

        The requests are all of a ``batch`` or a part of it.
        """
        tokens = np.ones((len(members), len(options.plans)))
        temperatures = np.array([plan.draft_temperature for plan in options.plans])
        kinds = np.array([kind_of(request.params.temperature) for request in members])
        drafts = [memory_of(request).drafts for request in members]
        # Only the request itself gains from what is learned about it, but the whole batch waits.
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
            # Greedy requests draft different trees than sampled ones.
            like = [k for k in self._acceptance if (k[0] == 0) == (kind == 0)]
            nearest = min(like, key=lambda k: _distance(k, key), default=None)
            known = None if nearest is None else self._acceptance[nearest]
            self._acceptance[key] = Acceptance() if known is None else known.hint()
        return self._acceptance[key]


def memory_of(request: Request) -> RequestMemory:
    """Return what is known about a request; nothing at first.

    Raises:
        TypeError: The request belongs to another planner.
    """
    if request.plan_state is None:
        request.plan_state = RequestMemory()
    if not isinstance(request.plan_state, RequestMemory):
        raise TypeError(f"request {request.number} belongs to another planner")
    return request.plan_state


def limits_of(members: list[Request]) -> Ints:
    """Return ``[requests]`` int64: how many tokens each may still commit."""
    return np.array([r.max_tokens - len(r.token_ids) for r in members])


def tokens_to_come(members: list[Request]) -> Array:
    """Return ``[requests]`` float64: how many tokens each is expected to commit until it ends."""
    left: Array = np.clip(limits_of(members), 1, _HORIZON).astype(np.float64)
    return left


def weights_of(members: list[Request]) -> Array:
    """Return ``[requests]`` float64: what a token of each is worth if no request waits.

    A batch takes as long as its last request, and runs less efficiently as it shrinks. So requests
    with more tokens to come should catch up. The weights are the squares of the tokens to come: of
    several powers, this one made simulated batches of 16 end first.
    """
    squares = tokens_to_come(members) ** 2
    weights: Array = squares / squares.mean()
    return weights


def _distance(a: tuple[int, float], b: tuple[int, float]) -> float:
    """Return how different two kinds of requests are, at their draft temperatures."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
