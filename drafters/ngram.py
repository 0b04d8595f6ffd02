"""Prompt lookup: drafts are what followed earlier occurrences of the sequence's last few tokens.

The drafts are a function of the sequence alone, so their draft sampling is ``fixed``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import ClassVar

from eaglegbv.config import DraftSampling, Plan
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.host_drafting import DraftCall, given_trees
from eaglegbv.errors import InvalidArgument
from eaglegbv.request import DraftState, Request
from eaglegbv.tree import DraftTree

_SIZES = range(4, 0, -1)  # tokens of the n-grams that are looked up, the longest first
_LOOK_BACK = 64  # how many of the latest places of an n-gram are looked at
LONGEST_MATCH = 16
"""Most tokens that are compared to find how much of a sequence's end occurred before."""


@dataclass(slots=True)
class NgramState(DraftState):
    """The places of a sequence's n-grams."""

    # The indexed tokens, kept so that a request's sequence is not copied at every step.
    token_ids: list[int] = field(default_factory=list)
    # For each n-gram the positions of the tokens that followed it, in order.
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """Drafts the continuations of earlier occurrences of the sequence's last tokens."""

    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.FIXED})

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Index the new tokens of the sequences."""
        for request in requests:
            self._index(request)

    def forget(self, request: Request) -> None:
        """Drop the request's index."""
        request.draft_states.pop(NgramState, None)

    def shareable(self, request: Request) -> int:
        """Return all positions: there are no rows."""
        return request.context

    def draft(self, call: DraftCall) -> DraftTree:
        """Propose one tree per request: the trie of up to K continuations, each of L tokens.

        Continuations of longer n-grams come first, and later ones among those of one n-gram; see
        :meth:`Drafter.draft`.

        Raises:
            InvalidArgument: The draft sampling is not ``fixed``.
        """
        if call.draft_sampling is not DraftSampling.FIXED:
            expected = "'fixed': a lookup draws nothing"
            raise InvalidArgument("draft_sampling", str(call.draft_sampling), expected)
        trees = [self._tree(request, call.plan) for request in call.requests]
        return given_trees(trees, drafts=call.plan.paths, length=call.plan.depth)

    def matched(self, request: Request) -> int:
        """Return how many of the sequence's last tokens also precede the place of the first draft.

        That is 0 where nothing is found, and at most :data:`LONGEST_MATCH`.
        """
        state = self._index(request)
        token_ids = state.token_ids
        place = next(self._places(state), None)
        if place is None:
            return 0
        most = min(LONGEST_MATCH, place)
        same = (token_ids[place - 1 - i] == token_ids[-1 - i] for i in range(most))
        return sum(takewhile(bool, same))

    def _tree(self, request: Request, plan: Plan) -> tuple[list[int], list[int]]:
        """Merge continuations into a trie, as far as the plan has nodes for them."""
        token_ids = [request.token_ids[-1]]
        parents = [0]
        children: dict[tuple[int, int], int] = {}
        continuations = dict.fromkeys(self._continuations(request, plan.depth))
        for continuation in islice(continuations, plan.paths):
            node = 0
            for token in continuation:
                key = node, token
                if key not in children:
                    if len(children) == plan.fixed_nodes:
                        break
                    children[key] = len(token_ids)
                    token_ids.append(token)
                    parents.append(node)
                node = children[key]
        return token_ids, parents

    def _continuations(self, request: Request, length: int) -> Iterator[tuple[int, ...]]:
        """Yield ``length`` tokens from each place where the sequence's end occurred before."""
        state = self._index(request)
        token_ids = state.token_ids
        for place in self._places(state):
            # A continuation may reach the sequence's end; from there it repeats itself.
            period = len(token_ids) - place
            yield tuple(token_ids[place + i % period] for i in range(length))

    def _places(self, state: NgramState) -> Iterator[int]:
        """Yield the places just after earlier occurrences of the sequence's end, the best first."""
        for size in _SIZES:
            if size <= len(state.token_ids):
                places = state.places.get(tuple(state.token_ids[-size:]), [])
                yield from reversed(places[-_LOOK_BACK:])

    def _index(self, request: Request) -> NgramState:
        """Note what followed every n-gram of the sequence; the last one was not followed yet."""
        state = request.draft_state(NgramState, NgramState)
        token_ids = state.token_ids
        known = len(token_ids)
        token_ids += request.tokens_from(known)
        for place in range(known, len(token_ids)):
            for size in _SIZES:
                if size <= place:
                    ngram = tuple(token_ids[place - size : place])
                    state.places.setdefault(ngram, []).append(place)
        return state
