"""A request on its way through the engine: the only mutable object."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor

from eaglegbv.config import AutoPlan, Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.logprobs import TokenLogprobs
from eaglegbv.metrics import RequestMetrics
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.token_rules import RuledRow, TokenRules


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"


class DraftState:
    """What a drafter remembers about a request between steps; each drafter has its own kind."""


StateKind = TypeVar("StateKind", bound=DraftState)


class PlanReason(StrEnum):
    """Why a request's next step follows its plan."""

    FIXED = "fixed"  # the user fixed the plan
    BEST = "best"  # by what is known, it commits the most tokens a second
    LEARNING = "learning"  # too little is known about steps like it
    PROBE = "probe"  # the step checks whether what is known still holds


class DraftSnapshot:
    """What a drafter needs to replay the drafts of a step; each drafter has its own kind."""


@dataclass(frozen=True, slots=True)
class TargetLayer:
    """What one step of a stateful verifier changed about the target of the next tokens."""

    # How much the step accepted beyond the target's distribution; see `verifiers.stateful`.
    rho: float
    drafts: int  # number of drafts of the step that would still be in play
    remaining: int  # number of tokens it still changes, at least 1
    since: int  # number of tokens generated before the step, the last of which is its root
    snapshot: DraftSnapshot  # source of the draft distributions of the step


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its settings and its progress."""

    number: int  # the engine's running number of the request
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    # How to speculate in the next step. It may change between steps, to plans that need no more
    # than `step_slots`.
    plan: Plan
    rng: RequestRng
    max_tokens: int  # most tokens to generate: the user's limit, or what the context leaves
    ends: frozenset[int] = frozenset()  # tokens that end the text and are no part of it
    # The plans from which the engine chooses before every step; None if the user fixed `plan`.
    auto: AutoPlan | None = None
    plan_reason: PlanReason = PlanReason.FIXED
    step_slots: int = 1  # most KV slots a step borrows: for a tree, and to replay earlier drafts
    replayed: bool = False  # whether verifications of later steps replay its drafts
    drafted: bool = False  # whether the drafter follows the request; it need not draft every step
    skips: bool = False  # whether the drafter may skip what it has missed, and begin after it
    rules: TokenRules | None = None  # what `params` forbid and favour, or None
    priority: int = 0  # lower numbers are served first; equal ones in order of arrival
    token_ids: list[int] = field(default_factory=list)  # tokens generated so far
    # Of each generated token, and of each token of the prompt (None at the first); empty where
    # nobody asked.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    # [context] int64, KV slots of the tokens that were forwarded; the last generated token has
    # none yet.
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    shared: int = 0  # number of leading positions of `slots` that belong to the prefix cache
    skipped: int = 0  # number of leading positions that the drafter skipped and does not attend to
    # [slots] int64, KV slots of the step in progress; none between steps.
    borrowed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    step: int = 0  # number of verifications so far; random numbers are keyed by it
    # The memories of drafters, by their kinds.
    draft_states: dict[type[DraftState], DraftState] = field(default_factory=dict)
    # How earlier steps changed the target, oldest first; none unless the verifier keeps state.
    target_layers: tuple[TargetLayer, ...] = ()
    finish_reason: FinishReason | None = None  # why the request ended, or None while it runs
    error: EagleGBVError | None = None  # what went wrong, if the reason is `error`
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def looks_up(self) -> bool:
        """Whether the engine may look up its drafts in its own sequence."""
        return self.auto is not None and bool(self.auto.lookups) and self.params.greedy

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of its prompt are still wanted: of all positions."""
        return self.params.prompt_logprobs is not None and not self.prefilled

    def ruled_row(self) -> RuledRow:
        """Return the row of the next token, of a request with rules."""
        assert self.rules is not None
        return self.rules.row_after(tuple(self.token_ids))

    @property
    def context(self) -> int:
        """Number of tokens that were forwarded through the target."""
        return self.slots.shape[0]

    @property
    def length(self) -> int:
        """Number of tokens of the sequence, prompt and generated."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def prefill_length(self) -> int:
        """Tokens to prefill before decoding: the prompt, or all but the last of a longer sequence.

        The last token of a prompt yields the first one of the answer; the last token of an answer
        is the root of the next tree.
        """
        return len(self.prompt_ids) + max(0, len(self.token_ids) - 1)

    @property
    def to_prefill(self) -> int:
        """Number of tokens to prefill before decoding; 0 if a tree comes next."""
        return self.prefill_length - self.context

    @property
    def prefilled(self) -> bool:
        """Whether the prompt was prefilled to its end once, which yielded the first token."""
        return bool(self.token_ids)

    @property
    def begun(self) -> bool:
        """Whether a step has read some of it."""
        return self.prefilled or self.context > 0

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    @property
    def least_slots(self) -> int:
        """Slots with which a step makes do where the pool ends; replays need theirs to the end."""
        return self.step_slots if self.replayed else 1

    @property
    def slots_needed(self) -> int:
        """Fewest KV slots of a pool in which the request can end."""
        return len(self.prompt_ids) + self.max_tokens + self.least_slots

    def draft_state(self, kind: type[StateKind], begin: Callable[[], StateKind]) -> StateKind:
        """Return what a drafter remembers; ``begin`` makes it where there is nothing yet."""
        state = self.draft_states.get(kind)
        if not isinstance(state, kind):
            state = begin()
            self.draft_states[kind] = state
        return state

    def give(self, token_ids: Sequence[int]) -> None:
        """Go on with given tokens, which the next steps read (teacher forcing).

        InvalidArgument if they leave none of ``max_tokens``, for the step after them.
        """
        left = self.max_tokens - len(self.token_ids)
        if len(token_ids) >= left:
            given = f"{len(token_ids)} tokens"
            raise InvalidArgument("token_ids", given, f"fewer than {left}")
        self.token_ids += token_ids
        self.step = len(self.token_ids)  # a place has the same numbers, however it was reached
        self.target_layers = ()  # what a verifier left was of its own tokens

    def tokens_from(self, position: int) -> list[int]:
        """Return prompt and generated tokens from ``position`` on."""
        prompt = len(self.prompt_ids)
        if position >= prompt:
            return self.token_ids[position - prompt :]
        return [*self.prompt_ids[position:], *self.token_ids]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step did for one request; it has ended if ``request.finish_reason`` is set."""

    request: Request
    # New tokens in order: the accepted nodes' and the correction or bonus token, up to the one
    # that ends the text. Empty if it failed.
    token_ids: list[int]
    nodes: Sequence[int] = ()  # accepted nodes of its tree, without the root
    depth: int = 0  # depth of the tree
    drafted: int = 0  # number of nodes of the tree, without the root
    fault: int = 0  # faults of the probabilities on which this rests, or 0
    logprobs: Sequence[TokenLogprobs] = ()  # those of its tokens, if asked for
