"""Choice of the requests whose next drafts are looked up in their own texts.

A lookup takes no drafter's time, only rows of the target's forward. How far it gets can be judged
beforehand by how many tokens at the text's end occurred before: one token says little, while within
a loop the whole text matches and nearly all is accepted. So the choice is made anew in every step,
from the text as it is by then.

    If steps as chosen without lookups commit r tokens a second, a step is worth
    tokens - r seconds,    and a lookup of d nodes, added to that step, is worth
    tokens - r d node.

(r is not the rate of the step with its lookups: one long lookup would raise it so much that drafts
of other requests, worth their time in any other step, would seem to lower it.) A request looks up
where this is worth more than what it would do otherwise. The other requests then go on as chosen,
or all of them decode plainly, whichever is worth more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eaglegbv.config import PLAIN, Plan
from eaglegbv.scheduler.acceptance import Acceptance, Evidence
from eaglegbv.scheduler.choice import Choice
from eaglegbv.scheduler.costs import Array, Ints, StepCosts

_FADE_EVERY, _FADED = 64, 0.95
"""Steps after which what is known fades to this share, so that abandoned lookups are tried again.
"""


@dataclass(slots=True)
class Lookups:
    """How far lookups get, by the number of matched tokens at the text's end."""

    _by_match: dict[int, Acceptance] = field(default_factory=dict)
    _asked: int = 0

    def observe(self, *, matched: int, offered: int, accepted: int) -> None:
        """Learn from a decided step of one request.

        Args:
            matched: Tokens at the text's end that occurred before, at least 1.
            offered: Tokens looked up.
            accepted: How many of them were accepted.
        """
        self._acceptance(_kind(matched)).observe(
            Evidence(), paths=1, offered=offered, accepted=accepted
        )

    def expected_tokens(self, matched: Ints, limits: Ints, depths: Ints) -> Array:
        """Return ``[requests, depths]`` float64: tokens that a step should commit.

        Args:
            matched: ``[requests]`` int64, tokens at each text's end that occurred before; 0 for
                none.
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
        # After m repeated tokens, the prior chance that the next one repeats too is m / (m + 1).
        matched = 1 << (kind - 1)
        return self._by_match.setdefault(kind, Acceptance(first=matched / (matched + 1)))


def _kind(matched: int) -> int:
    """Return the class of a match: 1 for 1 token, 2 for 2-3, 3 for 4-7, ...; 0 for none."""
    return matched.bit_length()


def look_up(
    choice: Choice,
    plans: Sequence[Plan],
    tokens: Array,
    costs: StepCosts,
    *,
    context: int,
) -> Choice:
    """Return the choice, with lookups where they promise more; its time is estimated afresh.

    Args:
        choice: The step as chosen without lookups.
        plans: The D lookups to choose from, of one path each.
        tokens: ``[requests, D]`` float64, tokens expected of each; 1 where nothing was found.
        costs: What steps cost.
        context: KV slots that the requests attend to, all together.
    """

    def timed(option: Choice) -> Choice:
        seconds = costs.seconds(option.shape(context=context))
        return replace(option, seconds=max(1e-9, seconds))

    choice = timed(choice)
    # Other requests in the batch commit at least a token each, and wait for the lookups too.
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
        """Return ``base`` with lookups for the requests of ``where`` that found something."""
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
    if choice.drafting:  # otherwise the plain choice is the one just considered
        plainly = replace(choice, plan=PLAIN, drafting=frozenset(), each=np.ones(len(tokens)))
        options.append(instead(gained > 1, plainly))
    return max(
        [choice, *(option for option in options if option.lookups)],
        key=lambda option: option.tokens - rate * option.seconds,
    )
