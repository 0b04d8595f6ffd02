"""Whose drafts are looked up in their own texts instead, in a step that was chosen.

A lookup costs no drafter's time, only rows of the target's forward, and how far it gets is told
beforehand by how much of the text's end stood before where it looks: one token says little, and
the whole of a loop nearly all. So it is settled in every step anew, from what the text is by then.

    where steps as they were chosen commit r tokens a second, a step is worth
    tokens - r seconds    and a lookup of d nodes, beside those that go on as they are,
    tokens - r d node

(Not the rate of the step itself: one long lookup would raise it so much that drafts of others,
worth their time in any other step, would seem to lower it.) Those whose lookups are worth more than
what they do otherwise look up, beside the others or with nobody drafting, whichever is worth more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eaglegbv.config import PLAIN, Plan
from eaglegbv.scheduler.acceptance import Acceptance, Evidence
from eaglegbv.scheduler.choice import Choice
from eaglegbv.scheduler.costs import Array, Ints, StepCosts

_FADE_EVERY, _FADED = 64, 0.95
"""Steps after which what is known fades to so much, that lookups given up are tried again."""


@dataclass(slots=True)
class Lookups:
    """How far lookups get, by how much of the text's end they found before."""

    _by_match: dict[int, Acceptance] = field(default_factory=dict)
    _asked: int = 0

    def observe(self, *, matched: int, offered: int, accepted: int) -> None:
        """Learn from a decided step of one request.

        Args:
            matched: Tokens of the text's end that stood before, at least 1.
            offered: Tokens looked up.
            accepted: Those of them that were accepted.
        """
        self._acceptance(_kind(matched)).observe(
            Evidence(), paths=1, offered=offered, accepted=accepted
        )

    def expected_tokens(self, matched: Ints, limits: Ints, depths: Ints) -> Array:
        """Return ``[requests, depths]`` float64: tokens that a step may commit.

        Args:
            matched: ``[requests]`` int64, tokens of each text's end that stood before; 0 for none.
            limits: ``[requests]`` int64, most tokens each may still commit.
            depths: ``[depths]`` int64.
        """
        self._asked += 1
        if self._asked % _FADE_EVERY == 0:
            for acceptance in self._by_match.values():
                acceptance.fade(_FADED)
        tokens = np.ones((len(matched), len(depths)))
        kinds = np.array([_kind(count) for count in matched.tolist()])
        for kind in set(kinds.tolist()) - {0}:
            rows = np.flatnonzero(kinds == kind)
            tokens[rows] = self._acceptance(kind).expected_tokens(
                np.zeros(len(rows)), limits[rows], np.ones_like(depths), depths
            )
        return tokens

    def _acceptance(self, kind: int) -> Acceptance:
        # What repeated m tokens is taken to end with one of the next m + 1.
        matched = 1 << (kind - 1)
        return self._by_match.setdefault(kind, Acceptance(first=matched / (matched + 1)))


def _kind(matched: int) -> int:
    """Return the class of a match: of 1, 2-3, 4-7, ... tokens; 0 for none."""
    return matched.bit_length()


def look_up(
    choice: Choice,
    plans: Sequence[Plan],
    tokens: Array,
    costs: StepCosts,
    *,
    context: int,
) -> Choice:
    """Return the choice with lookups where they promise more, or without; timed as of now.

    Args:
        choice: What the step would be.
        plans: The lookups, D of them, of one path each.
        tokens: ``[requests, D]`` float64, expected of each; 1 where nothing was found.
        costs: Of steps.
        context: KV slots they attend to.
    """

    def timed(option: Choice) -> Choice:
        seconds = costs.seconds(option.shape(context=context))
        return replace(option, seconds=max(1e-9, seconds))

    choice = timed(choice)
    # Others in the batch commit at least a token each, and wait for the lookups too.
    rate = (choice.tokens + choice.others) / choice.seconds
    depths = np.array([plan.depth for plan in plans])
    node = costs.node_seconds(context / choice.batch)
    worth = tokens - rate * node * depths
    best = worth.argmax(axis=1)
    rows = np.arange(len(tokens))
    found, gained = tokens[rows, best], worth[rows, best]
    drafting = np.isin(rows, list(choice.drafting))
    nodes = choice.plan.paths * choice.plan.depth
    saved = drafting * rate * (costs.request_seconds + nodes * node)

    def instead(where: Array, base: Choice) -> Choice:
        """Return ``base`` with lookups at some places."""
        taken = where & (found > 1)
        lookups = {place: plans[best[place]] for place in np.flatnonzero(taken).tolist()}
        return timed(
            replace(
                base,
                drafting=base.drafting - lookups.keys(),
                each=np.where(taken, found, base.each),
                lookups=lookups,
            )
        )

    options = [instead(gained > choice.each - saved, choice)]
    if choice.drafting:  # else this is what was just looked at
        plainly = replace(choice, plan=PLAIN, drafting=frozenset(), each=np.ones(len(tokens)))
        options.append(instead(gained > 1, plainly))
    return max(
        [choice, *(option for option in options if option.lookups)],
        key=lambda option: option.tokens - rate * option.seconds,
    )
