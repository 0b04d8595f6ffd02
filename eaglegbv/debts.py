"""Debts over steps: what a greedy rule leaves to the next tokens, request by request.

A stateful verifier works on padded columns, one for each earlier step that still has a debt, and
asks for the draft laws of those steps along the path it selects
(:mod:`eaglegbv.verifiers.stateful`). Here requests' debts become those columns, the drafter
recalls laws along the path, and the remaining debts are assigned to the requests again:

    step 1   root x_3  commits x_4      |  debt A: snapshot at x_3, 3 tokens left of depth 5
    step 2   root x_4  commits x_5 x_6  |  A has advanced by x_4 and continues along the path;
                                        |  debt A: 1 left    debt B: snapshot at x_4, 2 left
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eaglegbv.attention.kv_pool import SlotAllocator
from eaglegbv.config import Plan
from eaglegbv.drafters.base import Recaller
from eaglegbv.request import Debt, DraftSnapshot, Request
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.debts import Debts, Layers, SparseLaws
from eaglegbv.verifiers.figures import NodeFigures
from eaglegbv.verifiers.inputs import TOLERANCE, Fault
from eaglegbv.verifiers.stateful import StatefulUniforms, StatefulVerifier


@dataclass(frozen=True, slots=True)
class Settlement:
    """Result of a verification with state.

    Attributes:
        verdict: What is committed.
        debts: What each request owes afterwards.
        faults: ``[batch]`` int64, faults of the recalled draft laws, 0 if there are none.
        figures: Returns the numbers on which the verification was based.
    """

    verdict: Verdict
    debts: list[tuple[Debt, ...]]
    faults: Tensor
    figures: Callable[[], NodeFigures]


def recall_slots(plan: Plan) -> int:
    """Return the most KV slots the debts of a request can borrow during a verification.

    Every step commits at least one token, and its debt ends ``depth`` tokens after its root. So
    there are at most ``depth - 1`` debts, each advanced by at most ``depth - 1`` tokens.
    """
    return (plan.depth - 1) ** 2


def settle(
    verifier: StatefulVerifier,
    requests: Sequence[Request],
    tree: DraftTree,
    target: TargetLaw,
    drafter: Recaller,
    allocator: SlotAllocator,
) -> Settlement:
    """Judge the drafts of ``requests`` under their debts, and return the debts that remain."""
    uniforms = StatefulUniforms.draw(
        [request.stream for request in requests],
        [request.step for request in requests],
        [len(request.debts) for request in requests],
        paths=tree.paths,
        length=tree.length,
        device=tree.token_ids.device,
    )
    trails = _trails(requests)
    borrowed = allocator.allocate(sum(trail.length for trail in trails))
    try:
        device = tree.token_ids.device
        laws = RecalledLaws(drafter, trails, borrowed, batch=tree.batch, device=device)
        layers = _layers(requests, device=device)
        result = verifier.verify(tree, target, uniforms, Debts(layers, laws))
    finally:
        allocator.release(borrowed)
    debts = _owed(requests, result.layers, drafter)
    return Settlement(result.verdict, debts, laws.faults, result.figures)


@dataclass(slots=True)
class Trail:
    """A debt's step, continued along tokens that later steps committed.

    Attributes:
        row: Index of the request in the batch.
        column: Index of the debt among the request's.
        request: The request.
        debt: The debt.
        place: The step's snapshot, advanced by the tokens so far.
    """

    row: int
    column: int
    request: Request
    debt: Debt
    place: DraftSnapshot

    @property
    def committed(self) -> list[int]:
        """Tokens from the step's root (excluded) to the current root."""
        return self.request.token_ids[self.debt.since :]

    @property
    def length(self) -> int:
        """Most tokens to advance by; the debt's last token needs only the law before it."""
        return len(self.committed) + self.debt.remaining - 1


class RecalledLaws:
    """The draft laws of debts, along the paths that a verifier selects."""

    def __init__(
        self,
        drafter: Recaller,
        trails: Sequence[Trail],
        slots: Tensor,
        *,
        batch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Advance the trails to the current roots.

        Args:
            drafter: Recalls the laws.
            trails: One for each debt of the batch.
            slots: As many KV slots as the sum of the trails' lengths.
            batch: Number of requests.
            device: Device of the returned laws.
        """
        self._drafter = drafter
        self._trails = trails
        self._slots = slots
        self._width = 1
        columns = max((trail.column + 1 for trail in trails), default=0)
        self._unsound = torch.zeros((batch, columns), dtype=torch.bool, device=device)
        for i in range(max((len(trail.committed) for trail in trails), default=0)):
            behind = [trail for trail in trails if len(trail.committed) > i]
            tokens = [trail.committed[i] for trail in behind]
            self._advance(behind, torch.tensor(tokens))

    @property
    def faults(self) -> Tensor:
        """``[batch]`` int64: :class:`Fault` flags of the laws recalled so far."""
        return self._unsound.any(dim=1) * int(Fault.DRAFT_NOT_NORMALISED)

    def after(self, tokens: Tensor) -> SparseLaws:
        """Return the laws after one more token; see :meth:`LayerLaws.after`."""
        depth = tokens.shape[1]
        trails = [trail for trail in self._trails if trail.debt.remaining > depth]
        if not trails:
            return self._blank()
        rows, columns = [trail.row for trail in trails], [trail.column for trail in trails]
        if depth > 0:
            self._advance(trails, tokens[rows, depth - 1])
        recalled = self._drafter.laws_at([trail.place for trail in trails])
        width = recalled.ids.shape[1]
        # The first laws are those of all trails, so no later ones are wider.
        self._width = max(self._width, width)
        laws = self._blank()
        laws.ids[rows, columns, :width] = recalled.ids
        laws.probs[rows, columns, :width] = recalled.probs
        # With this comparison, NaN is unsound too.
        sound = (recalled.probs.sum(dim=1) - 1).abs() <= TOLERANCE
        self._unsound[rows, columns] |= ~sound
        return laws

    def _blank(self) -> SparseLaws:
        """Return laws of probability 0, for debts that have ended and for padding."""
        ids = torch.zeros(
            (*self._unsound.shape, self._width), dtype=torch.int64, device=self._unsound.device
        )
        return SparseLaws(ids, torch.zeros_like(ids, dtype=torch.float64))

    def _advance(self, trails: Sequence[Trail], tokens: Tensor) -> None:
        """Advance trails by one token each."""
        slots, self._slots = self._slots[: len(trails)], self._slots[len(trails) :]
        requests = [trail.request for trail in trails]
        places = self._drafter.advance(requests, [t.place for t in trails], tokens, slots)
        for trail, place in zip(trails, places, strict=True):
            trail.place = place


def _trails(requests: Sequence[Request]) -> list[Trail]:
    return [
        Trail(row, column, request, debt, debt.snapshot)
        for row, request in enumerate(requests)
        for column, debt in enumerate(request.debts)
    ]


def _layers(requests: Sequence[Request], *, device: torch.device) -> Layers:
    """Return the requests' debts as columns, padded with columns without effect."""
    columns = max(len(request.debts) for request in requests)

    def table(values: list[list[float]] | list[list[int]], dtype: torch.dtype) -> Tensor:
        padded = [[*row, *[0] * (columns - len(row))] for row in values]
        return torch.tensor(padded, dtype=dtype, device=device).view(len(requests), columns)

    return Layers(
        rho=table([[debt.rho for debt in r.debts] for r in requests], torch.float64),
        drafts=table([[debt.drafts for debt in r.debts] for r in requests], torch.int64),
        remaining=table([[debt.remaining for debt in r.debts] for r in requests], torch.int64),
        most_drafts=max((debt.drafts for r in requests for debt in r.debts), default=1),
    )


def _owed(requests: Sequence[Request], layers: Layers, drafter: Recaller) -> list[tuple[Debt, ...]]:
    """Return what each request owes by ``layers``, whose last column is the latest step."""
    owed = []
    numbers = zip(
        layers.rho.tolist(), layers.drafts.tolist(), layers.remaining.tolist(), strict=True
    )
    for request, (rho, drafts, remaining) in zip(requests, numbers, strict=True):
        debts = [
            replace(debt, rho=rho[k], drafts=drafts[k], remaining=remaining[k])
            for k, debt in enumerate(request.debts)
            if remaining[k] > 0
        ]
        if remaining[-1] > 0:
            since = len(request.token_ids)
            snapshot = drafter.snapshot(request)
            debts.append(Debt(rho[-1], drafts[-1], remaining[-1], since, snapshot))
        owed.append(tuple(debts))
    return owed
