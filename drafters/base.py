"""The interface of drafters: they watch what the target commits, and propose draft trees."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from eaglegbv.attention import Segment
from eaglegbv.config import DraftSampling, Plan
from eaglegbv.drafters.draft_probs import DraftProbs, ProbsSettings
from eaglegbv.drafters.host_drafting import DraftCall, NewRows, draft_trees
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftTree

SnapshotKind = TypeVar("SnapshotKind", bound=DraftSnapshot)


class Drafter(ABC):
    """Proposes a draft tree for each request.

    For each request, ``observe`` is called after parts of its prompt and after every commit,
    ``draft`` once per decoding step, and ``forget`` at its end. Between a commit and the next draft
    the accepted tokens are run again on the target's true features. What a drafter does not define
    does nothing: that serves one which reads tokens alone.

    A request may be pre-empted: it is forgotten, and later observed again from the start of its
    sequence, in other slots. Sequences that begin alike may share slots: when a drafter first meets
    a request, the rows of its first ``request.shared`` positions are already in its pool, unless
    they are ``request.skipped``. So only ``request.slots`` says where rows are, and it may change
    between steps.
    """

    draft_samplings: ClassVar[frozenset[DraftSampling]]
    skips: ClassVar[bool] = False
    """Whether it may start after positions that it has not run; see :meth:`skip`."""
    graph_counts: Mapping[str, int] = MappingProxyType({})
    """Counts of drafts whose recording was replayed, and of others by reason; may be empty."""
    max_context: int | None = None
    """Most positions of a sequence that it reads; longer ones are decoded plainly."""
    max_depth: int | None = None
    """Most levels of a tree that it drafts."""
    at_once: ClassVar[bool] = False
    """Whether one forward gives all levels: then more of them cost next to nothing."""

    def observe(self, request: Request, features: Tensor) -> None:  # noqa: B027
        """Take the target's features ``[tokens, feature_size]`` of newly committed positions.

        They belong to the last ``tokens`` positions of ``request.slots``. It is not called where
        the target has no features; the drafter then reads tokens alone.
        """

    def catch_up(self, requests: Sequence[Request]) -> None:  # noqa: B027
        """Run what was observed but not yet run; ``draft`` does so too."""

    @abstractmethod
    def draft(self, call: DraftCall) -> DraftTree:
        """Propose one tree per request, of one of :attr:`draft_samplings`.

        The tokens are drawn from exactly the distributions the tree carries, with the numbers of
        each request's own rng at its own step.
        """

    def forget(self, request: Request) -> None:  # noqa: B027
        """Drop all memory of a request that ended or is pre-empted."""

    def record(  # noqa: B027
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """Record now what drafts of up to ``requests`` requests with such settings would."""

    def shareable(self, request: Request) -> int:  # noqa: ARG002
        """Return how many leading positions have final rows in the drafter's pool.

        Sequences that begin alike, the next token included, may share their slots. 0 is always
        safe.
        """
        return 0

    def behind(self, request: Request) -> int:
        """Return how many positions :meth:`catch_up` would run; plans weigh what that costs."""
        return request.context - self.shareable(request)

    def skip(self, request: Request, *, keep: int) -> None:  # noqa: B027
        """Drop pending positions except the last ``keep`` (at least 1).

        Those are copied so that they do not keep their batch alive. If positions were lost, a
        drafter that :attr:`skips` restarts there as if the sequence began there, and sets
        ``request.skipped``. Its drafts may be worse but stay lossless, and are ready sooner. Not
        for verifiers that replay drafts.
        """


class SequenceDrafter(Drafter):
    """A drafter whose logits are a function of the sequence, and that keeps nothing."""

    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)
    order: int | None = None
    """Number of a sequence's last tokens that :meth:`logits` is given; None for all."""

    @abstractmethod
    def logits(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return ``[sequences, vocab]``, the logits of the token after each sequence."""

    def shareable(self, request: Request) -> int:
        """Return all positions: there are no rows."""
        return request.context

    def draft(self, call: DraftCall) -> DraftTree:
        """Propose one tree per request; see :meth:`Drafter.draft`."""
        sequences = [self.last_tokens(request) for request in call.requests]
        kept = slice(0 if self.order is None else -self.order, None)

        def follow(rows: NewRows) -> Tensor:
            nonlocal sequences
            pairs = zip(rows.parents.tolist(), rows.token_ids.tolist(), strict=True)
            sequences = [(*sequences[parent], token)[kept] for parent, token in pairs]
            return self.logits(sequences)

        logits = self.logits(sequences)
        ids = torch.arange(logits.shape[1], device=logits.device)
        return draft_trees(call, ids, logits, follow)

    def last_tokens(self, request: Request) -> tuple[int, ...]:
        """Return what :meth:`logits` is given of a request's sequence."""
        first = 0 if self.order is None else max(0, request.length - self.order)
        return tuple(request.tokens_from(first))


TextDrafter = SequenceDrafter  # its earlier name


class DraftReplay(ABC):
    """Replays the distributions from which an earlier step would have drawn after other tokens.

    Rules that keep state over steps need the distributions of the *very step* that modified the
    target. Those are not the current ones: by now the drafter knows true features where that step
    continued from its own output, and its draft temperature may have changed.
    """

    @abstractmethod
    def snapshot(self, request: Request) -> DraftSnapshot:
        """Return a snapshot at the root of the tree last drafted for ``request``.

        Call this before the next ``catch_up``. A snapshot holds no KV slots, and stays valid when
        the request is forgotten and its sequence read again.
        """

    @abstractmethod
    def advance(
        self,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        """Return the snapshots advanced by one token each.

        Args:
            requests: The request of each snapshot; a request may occur several times.
            snapshots: From :meth:`snapshot`, or from this method.
            tokens: ``[snapshots]`` int64, the next tokens, drafted or not.
            slots: ``[snapshots]`` int64, a KV slot for each, reserved for the drafter while the
                returned snapshots are in use.
        """

    @abstractmethod
    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """Return the distributions the snapshots' own steps would have drawn the next token from.

        Distributions of a smaller support than others are padded with probability 0.
        """


class ReplayingDrafter(Drafter, DraftReplay):
    """A drafter that can say what its earlier steps would have drawn."""


@dataclass(frozen=True, slots=True)
class RowSnapshot(DraftSnapshot):
    """A step of a drafter with KV rows: its root, and the tokens appended since."""

    context: int  # positions whose rows are in the request's own slots
    rows: Tensor  # [tokens] int64, KV slots of the rows appended since
    last: Tensor  # [size], the drafter's output at the last row
    settings: ProbsSettings  # the step's draft settings


class RowDrafter(ReplayingDrafter):
    """A drafter that has rows in a KV pool, and goes on from its output at the last of them."""

    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)

    @abstractmethod
    def next_outputs(self, segments: Sequence[Segment], last: Tensor) -> Tensor:
        """Run one row behind each of ``last`` ``[rows, size]``, and return its output like that."""

    @abstractmethod
    def probs_after(self, last: Tensor, settings: Sequence[ProbsSettings]) -> DraftProbs:
        """Return the distributions after such outputs, by the settings of their steps."""

    @torch.inference_mode()
    def advance(
        self,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        """Run one more row for each; see :meth:`DraftReplay.advance`."""
        steps = own_snapshots(snapshots, RowSnapshot)
        each = slots.split(1)
        contexts = [
            torch.cat((request.slots[: s.context], s.rows))
            for request, s in zip(requests, steps, strict=True)
        ]
        segments = [
            Segment.causal(*row) for row in zip(tokens.split(1), contexts, each, strict=True)
        ]
        outputs = self.next_outputs(segments, torch.stack([s.last for s in steps]))
        return [
            replace(s, rows=torch.cat((s.rows, slot)), last=row)
            for s, slot, row in zip(steps, each, outputs, strict=True)
        ]

    @torch.inference_mode()
    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """Return the distributions of the snapshots' steps; see :meth:`DraftReplay.probs_at`."""
        steps = own_snapshots(snapshots, RowSnapshot)
        last = torch.stack([step.last for step in steps])
        return self.probs_after(last, [step.settings for step in steps])


def own_snapshots(
    snapshots: Sequence[DraftSnapshot], kind: type[SnapshotKind]
) -> list[SnapshotKind]:
    """Return ``snapshots``, checked to be of a drafter's own kind.

    Raises:
        TypeError: One belongs to another drafter.
    """
    of_kind = [snapshot for snapshot in snapshots if isinstance(snapshot, kind)]
    if len(of_kind) < len(snapshots):
        raise TypeError("a snapshot belongs to another drafter")
    return of_kind
