"""The target's distributions at the nodes of a step's trees: logits, penalised and warped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.config import AutoPlan, Plan, Planning
from eaglegbv.devices import send, upload
from eaglegbv.drafters.base import Drafter, Recaller
from eaglegbv.drafting import Drafting
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.target import Target
from eaglegbv.outcomes import Evidence, Judgement
from eaglegbv.request import Debt, DraftSnapshot, Request
from eaglegbv.sampling import PenaltySettings, SamplingParams, WarpSettings, penalise, warp
from eaglegbv.scheduler.batch import Group, Layout
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import (
    TOLERANCE,
    Fault,
    NodeStats,
    Rule,
    Verdict,
    Verifier,
    VerifyUniforms,
    find_faults,
)
from eaglegbv.verifiers.registry import (
    CheckedVerifier,
    checked_verifier,
    make_any_verifier,
    make_verifier,
)
from eaglegbv.verifiers.stateful import (
    Layers,
    SparseProbs,
    StatefulUniforms,
    StatefulVerifier,
)
from eaglegbv.verifiers.target_only import GreedyWalkVerifier, TargetOnlyVerifier


def probs_of_nodes(group: Group, layout: Layout, logits: Tensor) -> TargetProbs:
    """Warp the logits of a group's nodes, each with its request's settings and its own path.

    Args:
        group: The trees.
        layout: Positions of their nodes among the logits.
        logits: ``[rows, vocab]``, those of the whole forward.
    """
    params = [request.params for request in group.requests]
    counts = group.counts
    own = logits[layout.logits]
    if any(p.penalised for p in params):
        own = penalise(
            own,
            *_occurrences(group, counts, logits.shape[1]),
            PenaltySettings.of(params, counts, device=logits.device),
        )
    warped = warp(own, WarpSettings.of(params, counts, device=logits.device))
    rows = send(layout.node_rows, logits.device)
    if logits.device.type != "cpu":  # there may be rows of padding nodes, without meaning
        real = torch.arange(group.tree.nodes, device=rows.device) < group.tree.num_nodes[:, None]
        rows = torch.where(real, rows, rows[:, :1])
    return TargetProbs.of_warped(warped, rows)


def _occurrences(group: Group, counts: list[int], vocab: int) -> tuple[Tensor, Tensor]:
    """Return what penalties depend on, for each node: tokens of the prompt, and counts of the rest.

    Both are ``[rows, vocab]``; a node counts the generated tokens and the drafted ones on its path.
    """
    device = group.tree.token_ids.device
    in_prompt = torch.zeros((sum(counts), vocab), dtype=torch.bool, device=device)
    generated = torch.zeros((sum(counts), vocab), dtype=torch.int64, device=device)
    ancestors = group.tree.ancestor_mask()
    row = 0
    for b, (request, count) in enumerate(zip(group.requests, counts, strict=True)):
        own = slice(row, row + count)
        prompt = upload(request.prompt_ids, dtype=torch.int64, device=device)
        in_prompt[own].index_fill_(1, prompt, value=True)
        seen = upload(request.token_ids, dtype=torch.int64, device=device).expand(count, -1)
        generated[own].scatter_add_(1, seen, torch.ones_like(seen))
        # The root is the last of the request's own tokens, so it is counted among those.
        drafted = ancestors[b, :count, 1:count].to(torch.int64)
        tokens = group.tree.token_ids[b, 1:count].expand(count, -1)
        generated[own].scatter_add_(1, tokens, drafted)
        row += count
    return in_prompt, generated


# Debts over steps: what a greedy rule leaves to the next tokens, request by request.
#
# A stateful verifier works on padded columns, one for each earlier step that still has a debt, and
# asks for the draft distributions of those steps along the path it selects
# (:mod:`eaglegbv.verifiers.stateful`). Here requests' debts become those columns, the drafter
# recalls distributions along the path, and the remaining debts are assigned to the requests again:
#
# step 1   root x_3  commits x_4      |  debt A: snapshot at x_3, 3 tokens left of depth 5
# step 2   root x_4  commits x_5 x_6  |  A has advanced by x_4 and continues along the path;
# |  debt A: 1 left    debt B: snapshot at x_4, 2 left


@dataclass(frozen=True, slots=True)
class Settlement:
    """Result of a verification with state.

    Attributes:
        verdict: What is committed.
        debts: What each request owes afterwards.
        faults: ``[batch]`` int64, faults of the recalled draft distributions, 0 if there are none.
        figures: Returns the numbers on which the verification was based.
    """

    verdict: Verdict
    debts: list[tuple[Debt, ...]]
    faults: Tensor
    figures: Callable[[], NodeStats]


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
    target: TargetProbs,
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
        dists = ReplayedProbs(drafter, trails, borrowed, batch=tree.batch, device=device)
        layers = _layers(requests, device=device)
        result = verifier.verify(tree, target, uniforms, layers, dists)
    finally:
        allocator.release(borrowed)
    debts = _owed(requests, result.layers, drafter)
    return Settlement(result, debts, dists.faults, result.node_stats)


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
        """Most tokens to advance by; the debt's last token needs only the distribution before it."""
        return len(self.committed) + self.debt.remaining - 1


class ReplayedProbs:
    """The draft distributions of debts, along the paths that a verifier selects."""

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
            drafter: Recalls the distributions.
            trails: One for each debt of the batch.
            slots: As many KV slots as the sum of the trails' lengths.
            batch: Number of requests.
            device: Device of the returned distributions.
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
        """``[batch]`` int64: :class:`Fault` flags of the distributions recalled so far."""
        return self._unsound.any(dim=1) * int(Fault.DRAFT_NOT_NORMALISED)

    def after(self, tokens: Tensor) -> SparseProbs:
        """Return the distributions after one more token; see :meth:`LayerProbs.after`."""
        depth = tokens.shape[1]
        trails = [trail for trail in self._trails if trail.debt.remaining > depth]
        if not trails:
            return self._blank()
        rows, columns = [trail.row for trail in trails], [trail.column for trail in trails]
        if depth > 0:
            self._advance(trails, tokens[rows, depth - 1])
        recalled = self._drafter.probs_at([trail.place for trail in trails])
        width = recalled.ids.shape[1]
        # The first distributions are those of all trails, so no later ones are wider.
        self._width = max(self._width, width)
        dists = self._blank()
        dists.ids[rows, columns, :width] = recalled.ids
        dists.probs[rows, columns, :width] = recalled.probs
        # With this comparison, NaN is unsound too.
        sound = (recalled.probs.sum(dim=1) - 1).abs() <= TOLERANCE
        self._unsound[rows, columns] |= ~sound
        return dists

    def _blank(self) -> SparseProbs:
        """Return distributions of probability 0, for debts that have ended and for padding."""
        ids = torch.zeros(
            (*self._unsound.shape, self._width), dtype=torch.int64, device=self._unsound.device
        )
        return SparseProbs(ids, torch.zeros_like(ids, dtype=torch.float64))

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


# Who judges an engine's drafts: the verifier of each plan, found by name, checked, and asked.


class Verification:
    """The verifiers of an engine.

    Attributes:
        keeps_evidence: Whether judgements say what they rest on, for trees to be recorded.
    """

    def __init__(
        self, target: Target, drafting: Drafting, *, compile_backend: str | None = None
    ) -> None:
        """Put the parts together.

        Args:
            target: Whose distribution is kept.
            drafting: Who drafts; verifiers with state ask it for the distributions of earlier steps.
            compile_backend: Compile the verifiers of plans, when first checked, by this backend of
                ``torch.compile``; None runs them as they are.
        """
        self._target, self._drafting = target, drafting
        self._compile_backend = compile_backend
        self._verifiers: dict[str, Verifier | StatefulVerifier] = {}
        self._sound_plans: set[Planning] = set()
        self.keeps_evidence = False

    def check(self, plan: Planning) -> None:
        """Raise unless the engine can run ``plan``, once for each.

        Raises:
            InvalidArgument: There is no such verifier, nobody drafts, or not as the plan asks.
            SamplingMismatch: The verifier is not lossless for the plan's draft sampling.
        """
        if plan in self._sound_plans:
            return
        if isinstance(plan, AutoPlan):
            self._check_candidates(plan)
        elif plan.speculative:
            self._check_speculation(plan)
        self._sound_plans.add(plan)

    def sampling_of(self, plan: Plan, *, greedy: bool) -> DraftSampling:
        """Return how children arise in the trees of a plan that speculates."""
        verifier, drafter = self._verifier(plan.verifier), self._drafting.by(plan)
        return sampling_of(plan, verifier, drafter, greedy=greedy)

    def slots_to_recall(self, plan: Plan, params: SamplingParams) -> int:
        """Return the most KV slots a request borrows to recall the draft distributions of earlier steps."""
        if params.greedy or not plan.speculative:
            return 0
        stateful = isinstance(self._verifier(plan.verifier), StatefulVerifier)
        return recall_slots(plan) if stateful else 0

    def judge(self, group: Group, layout: Layout, logits: Tensor) -> Judgement:
        """Judge a group's trees by the verifier of its plan.

        Args:
            group: The trees, on the device of the logits.
            layout: Where their nodes stand among the logits.
            logits: ``[rows, vocab]``, those of the whole forward.
        """
        plan, greedy = group.requests[0].plan, group.requests[0].params.greedy
        name = judge_name(plan, greedy=greedy)
        verifier = make_verifier(name) if greedy else self._verifier(name)
        dist = probs_of_nodes(group, layout, logits)
        if isinstance(verifier, StatefulVerifier):
            return self._settle(verifier, group, dist)
        uniforms = VerifyUniforms.draw(
            [request.stream for request in group.requests],
            [request.step for request in group.requests],
            paths=group.tree.paths,
            length=group.tree.length,
            device=logits.device,
        )
        verdict, faults = self._checked(verifier, group.tree.draft_sampling).verify(
            group.tree, dist, uniforms
        )
        figures = partial(verifier.node_stats, group.tree, dist, uniforms)
        evidence = self._evidence(group, verifier, dist, figures)
        return Judgement(verdict, faults, [() for _ in group.requests], evidence)

    def _settle(self, verifier: StatefulVerifier, group: Group, dist: TargetProbs) -> Judgement:
        """Judge a group's trees under the debts of its requests."""
        faults = find_faults(group.tree, dist)
        drafter = self._drafting.recalling(group.requests[0].plan)
        allocator = self._target.allocator
        settled = settle(verifier, group.requests, group.tree, dist, drafter, allocator)
        evidence = self._evidence(group, verifier, dist, settled.figures)
        return Judgement(settled.verdict, faults | settled.faults, settled.debts, evidence)

    def _evidence(
        self, group: Group, rule: Rule, dist: TargetProbs, figures: Callable[[], NodeStats]
    ) -> Evidence | None:
        """Return what is to be kept of a verification until its trees are recorded, if they are."""
        if not self.keeps_evidence:
            return None
        return Evidence(rule.name, dist, figures, group.prefilling)

    def _check_candidates(self, auto: AutoPlan) -> None:
        # Lookups are for temperature 0, where no verifier is asked.
        for candidate in auto.candidates:
            self.check(candidate)
        if isinstance(self._verifier(auto.verifier), StatefulVerifier):
            expected = "one without state over steps, where the engine chooses plans"
            raise InvalidArgument("verifier", auto.verifier, expected)

    def _check_speculation(self, plan: Plan) -> None:
        drafter, verifier = self._drafting.by(plan), self._verifier(plan.verifier)
        dist = self.sampling_of(plan, greedy=False)
        verifier.check_sampling(dist, plan.paths)
        if plan.paths < dist.min_paths:
            expected = f"at least {dist.min_paths} for draft distribution {str(dist)!r}"
            raise InvalidArgument("paths", plan.paths, expected)
        if isinstance(verifier, StatefulVerifier):
            self._drafting.recalling(plan)
            if plan.min_confidence > 0:
                expected = f"0 for verifier {plan.verifier!r}, whose debts run to the full depth"
                raise InvalidArgument("min_confidence", plan.min_confidence, expected)
        for needed in (dist, DraftSampling.FIXED):
            if needed not in drafter.draft_samplings:
                known = ", ".join(sorted(drafter.draft_samplings))
                raise InvalidArgument(
                    "draft_sampling", str(needed), f"one the drafter draws: {known}"
                )
        if isinstance(verifier, Verifier):
            self._checked(verifier, dist)  # compiled now

    def _verifier(self, name: str) -> Verifier | StatefulVerifier:
        if name not in self._verifiers:
            self._verifiers[name] = make_any_verifier(name)
        return self._verifiers[name]

    def _checked(self, verifier: Verifier, draft_sampling: DraftSampling) -> CheckedVerifier:
        """Return a verifier with the check of what it is given; graphs take independent paths."""
        backend = self._compile_backend if draft_sampling is DraftSampling.IID else None
        if backend is None:
            return checked_verifier(verifier.name)
        target = self._target
        return checked_verifier(verifier.name, backend, target.vocab_size, target.device)


def check_verifier(plan: Plan) -> None:
    """Raise unless the plan's verifier exists and takes the distribution it names, whatever drafts.

    Raises:
        InvalidArgument: There is no such verifier.
        SamplingMismatch: It is not lossless for the plan's draft sampling, or for so many paths.
    """
    if plan.speculative:
        verifier = make_any_verifier(plan.verifier)
        if plan.draft_sampling is not None:
            verifier.check_sampling(plan.draft_sampling, plan.paths)


def judge_name(plan: Plan, *, greedy: bool) -> str:
    """Return the name of the verifier of a step: the plan's, unless nothing is left to decide.

    At temperature 0 the target's distribution is one token, which the greedy walk follows through any tree;
    without drafts the next token is drawn from the target.
    """
    if greedy:
        return GreedyWalkVerifier.name
    return plan.verifier if plan.speculative else TargetOnlyVerifier.name


def sampling_of(plan: Plan, verifier: Rule, drafter: Drafter, *, greedy: bool) -> DraftSampling:
    """Return the draft distribution of a plan: its own, else the verifier's, else the drafter's only one.

    At temperature 0 sampled paths all coincide, and a fixed tree covers more.
    """
    if greedy:
        return DraftSampling.FIXED
    if plan.draft_sampling is not None:
        return plan.draft_sampling
    if verifier.default_sampling not in drafter.draft_samplings and drafter.draft_samplings <= {
        DraftSampling.FIXED
    }:
        return DraftSampling.FIXED
    return verifier.default_sampling
