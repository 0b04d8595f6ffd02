"""The engine: plan, draft, forward, verify, commit."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from eaglegbv.auto_plan import AutoPlan, Planning, plan_name, plans_of
from eaglegbv.config import PLAIN, EngineConfig, Plan, Source
from eaglegbv.debts import recall_slots, settle
from eaglegbv.drafters.base import Drafter, RecallingDrafter
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.errors import InvalidArgument, OutOfSlots, StepFailed
from eaglegbv.metrics import (
    ATTENTION_FALLBACKS,
    CACHED,
    FINISHED,
    GRAPH_DRAFTS,
    GRAPH_FORWARDS,
    PREEMPTIONS,
    EngineMetrics,
    Phase,
    StepObserver,
    StepRecord,
    Stopwatch,
)
from eaglegbv.outcomes import Judged, Outcome, read_outcomes
from eaglegbv.params import SamplingParams
from eaglegbv.products import Quantization
from eaglegbv.recording import Evidence, tree_records
from eaglegbv.request import Debt, FinishReason, Request
from eaglegbv.scheduler.batch import Chunk, Group, Layout, by_plan, lay_out
from eaglegbv.scheduler.holdings import Holdings
from eaglegbv.scheduler.planner import Estimate, KnownCosts, Planner
from eaglegbv.scheduler.prefix_cache import CacheCounts, PrefixCache
from eaglegbv.scheduler.scheduler import Portion, Scheduler, StepBatch
from eaglegbv.scheduler.time_shares import share_seconds
from eaglegbv.target_law import TargetLaw
from eaglegbv.targets.base import Target, TargetOutput
from eaglegbv.transfer import send, upload
from eaglegbv.tree import DraftTree, Law
from eaglegbv.tree_record import TreeRecord
from eaglegbv.uniforms import Stream, request_seed
from eaglegbv.verifiers.base import Rule, Verifier, VerifyUniforms
from eaglegbv.verifiers.checked import CheckedVerifier, checked_verifier
from eaglegbv.verifiers.figures import NodeFigures
from eaglegbv.verifiers.inputs import fault_error, find_faults
from eaglegbv.verifiers.modified_target import StatefulVerifier
from eaglegbv.verifiers.registry import make_any_verifier
from eaglegbv.warp import PenaltySettings, WarpSettings, penalise, warp

GREEDY = "greedy"
PLAIN_VERIFIER = "target_only"

_KEPT, _MOST_KEPT = 64, 128
"""Positions that a drafter keeps of what it missed, and those from which on it skips the others.

Features of all that large batches decode plainly would fill memory, and who drafts again would
first have to read them. The tiny pair's head drafts as well as ever if it begins 64 positions back.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step added to a request.

    Attributes:
        request: The request; it is finished when ``request.finish_reason`` is set.
        token_ids: The new tokens, in order.
    """

    request: Request
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict on a group, and what goes with it.

    Attributes:
        judged: The trees, the verdict on them, and faults.
        debts: For each request, what it leaves to the next tokens.
        evidence: What the verdict rests on; None unless trees are recorded.
    """

    judged: Judged
    debts: list[tuple[Debt, ...]]
    evidence: Evidence | None


class Engine:
    """Serves requests step by step; every step is one packed forward of the target."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig | None = None,
        *,
        barrier: Callable[[], None] | None = None,
        costs: KnownCosts | None = None,
        compile_backend: str | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            target: The model whose law the text follows.
            drafter: Proposes draft trees; None allows plain decoding only.
            config: Sizes and seed.
            barrier: Waits for the device at the end of every phase, so that its time is the
                phase's own; None lets work go on while the next phase is prepared.
            costs: What steps cost, if that is known; else the first steps teach it.
            compile_backend: On a CPU, compile the verifiers of plans, when first checked, by this
                backend of ``torch.compile``; None runs them as they are.
        """
        self._target = target
        self._drafter = drafter
        self._lookup = drafter if isinstance(drafter, NgramDrafter) else NgramDrafter()
        self._config = config or EngineConfig()
        self._cache = PrefixCache(target.allocator, enabled=self._config.prefix_cache)
        self._holdings = Holdings(target.allocator, self._cache)
        self._scheduler = Scheduler(
            max_batch=self._config.max_batch,
            prefill_tokens=self._config.prefill_tokens,
            cache=self._cache,
            vacate=self._vacate,
        )
        self._barrier = barrier
        self._planner = Planner(costs)
        self._compile_backend = compile_backend if target.device.type == "cpu" else None
        self._verifiers: dict[str, Verifier | StatefulVerifier] = {}
        self._sound_plans: set[Planning] = set()
        self._added = 0
        self._steps = 0
        self.metrics = EngineMetrics()
        self._observers: list[StepObserver] = [self.metrics]
        self._records_trees = False

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    def observe(self, observer: StepObserver, *, trees: bool = False) -> None:
        """Tell ``observer`` about every further step.

        Args:
            observer: Is told.
            trees: Have the records of steps say what became of every draft tree, from now on and
                for all observers. Recording begins after a step's clock has stopped, so that no
                time of a step includes it.
        """
        self._observers.append(observer)
        self._records_trees = self._records_trees or trees

    def explain_plans(self) -> list[Estimate]:
        """Return what the planner expects of each plan for the running requests, best first."""
        return self._planner.explain([r for r in self._scheduler.running if r.prefilled])

    @property
    def preemptions(self) -> int:
        """How often a running request had to give its slots to others."""
        return self._scheduler.preemptions

    @property
    def cache_counts(self) -> CacheCounts:
        """What the prefix cache did so far."""
        return self._cache.counts

    def reset_prefix_cache(self) -> None:
        """Forget the texts in the prefix cache that no running request uses."""
        self._cache.clear()

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        plan: Planning,
        *,
        priority: int = 0,
    ) -> Request:
        """Queue a request.

        Args:
            prompt_ids: The prompt.
            params: How it is sampled.
            plan: How it speculates, or limits within which the engine chooses step by step. In the
                latter case its random numbers derive from its running number too: the choice of a
                plan looks at what became of other requests' drafts, and these must be independent
                of its own even if the user gives both the same seed.
            priority: Lower numbers are served first; equal ones in order of arrival.

        Raises:
            InvalidArgument: The prompt is empty, too long or holds unknown ids, or the plan does
                not fit the engine.
            LawMismatch: The plan's verifier is not lossless for its law.
        """
        self.check_plan(plan)
        number, self._added = self._added, self._added + 1
        auto = plan if isinstance(plan, AutoPlan) else None
        seed = self._config.seed if params.seed is None else params.seed
        if auto is not None or params.seed is None:
            seed = request_seed(seed, number)
        plans = plans_of(plan, greedy=params.greedy)
        drafted = any(p.asks_drafter for p in plans)
        may_skip = self._drafter is not None and self._drafter.skips
        request = Request(
            number=number,
            prompt_ids=tuple(prompt_ids),
            params=params,
            plan=plans[0] if auto is None else PLAIN,
            auto=auto,
            stream=Stream(seed),
            max_tokens=self._token_limit(prompt_ids, params, plans),
            step_slots=max(p.tree_slots + self._recall_slots(params, p) for p in plans),
            drafted=drafted,
            skips=drafted and auto is not None and may_skip,
            priority=priority,
            slots=self._target.allocator.allocate(0),
            borrowed=self._target.allocator.allocate(0),
        )
        request.metrics.prompt_tokens = len(prompt_ids)
        self._scheduler.add(request)
        return request

    def check_plan(self, plan: Planning) -> None:
        """Raise unless this engine can run ``plan``."""
        if plan not in self._sound_plans:
            self._look_into(plan)
            self._sound_plans.add(plan)

    def _look_into(self, plan: Planning) -> None:
        if isinstance(plan, AutoPlan):
            # Lookups are for temperature 0, where no verifier is asked.
            for candidate in plan.candidates:
                self.check_plan(candidate)
            if isinstance(self._verifier(plan.verifier), StatefulVerifier):
                expected = "one without state over steps, where the engine chooses plans"
                raise InvalidArgument("verifier", plan.verifier, expected)
            return
        if not plan.speculative:
            return
        drafter, verifier = self._drafter_of(plan), self._verifier(plan.verifier)
        law = law_of(plan, verifier, drafter)
        verifier.check_law(law, plan.paths)
        if plan.paths < law.min_paths:
            expected = f"at least {law.min_paths} for draft law {str(law)!r}"
            raise InvalidArgument("paths", plan.paths, expected)
        if isinstance(verifier, StatefulVerifier):
            self._recalling(plan)
            if plan.min_confidence > 0:
                expected = f"0 for verifier {plan.verifier!r}, whose debts run to the full depth"
                raise InvalidArgument("min_confidence", plan.min_confidence, expected)
        for needed in (law, Law.FIXED):
            if needed not in drafter.laws:
                known = ", ".join(sorted(drafter.laws))
                raise InvalidArgument("law", str(needed), f"one the drafter draws: {known}")
        if isinstance(verifier, Verifier):
            self._checked(verifier, law)  # compiled now

    @torch.inference_mode()
    def step(self) -> list[Commit]:
        """Advance every running request by one forward of the target.

        A step that breaks off ends the requests it has not served, with an error that says why.
        """
        commits: list[Commit] = []
        batch = self._scheduler.next_batch()
        if batch.empty:
            return self._refuse_first()
        try:
            self._advance(batch, commits)
        except Exception as error:  # noqa: BLE001  whatever it is, it ends no other requests
            _log.exception("a step broke off")
            commits += self._fail(batch, commits, error)
        except BaseException as error:
            self._fail(batch, commits, error)
            raise
        if self._config.check_slots:
            self.check()
        return commits

    def cancel(self, request: Request) -> None:
        """End a request, waiting or running, between steps; one that has ended stays as it is."""
        if not request.finished:
            self.finish(request, FinishReason.CANCELLED)

    def preempt(self, request: Request) -> None:
        """Make a running request give up its slots; it waits, and goes on later where it was.

        Raises:
            InvalidArgument: It does not run.
        """
        self._scheduler.preempt(request)

    def check(self) -> None:
        """Check that every KV slot has one owner; between steps, on an engine alone on its pool.

        Raises:
            InvalidArgument: A slot has no owner, or two; the message says which.
        """
        self._holdings.check(self._scheduler.running)

    def finish(self, request: Request, reason: FinishReason, *, keep: int | None = None) -> None:
        """End a request, keeping its first ``keep`` tokens, and free what it holds."""
        if keep is not None and keep < len(request.token_ids):
            request.metrics.committed_tokens -= len(request.token_ids) - keep
            del request.token_ids[keep:]
        self._scheduler.remove(request)
        self._vacate(request)
        request.debts = ()
        request.finish_reason = reason
        self.metrics.add(FINISHED, label=reason)

    def _advance(self, batch: StepBatch, commits: list[Commit]) -> None:
        """Plan, draft, forward, verify, commit; ``commits`` grows as requests are served."""
        watch = Stopwatch(self._barrier)
        with watch.phase(Phase.DRAFT):
            self._skip(batch.requests)
            self._planner.assign(
                batch.decoding,
                others=len(batch.reading),
                waiting=self._scheduler.num_waiting,
                behind=self._behind,
                matched=self._lookup.matched,
            )
            groups = self._draft(batch.decoding)
        groups += self._prefill([p for p in batch.reading if p.brings_first_token])
        chunks = self._read([p for p in batch.reading if not p.brings_first_token])
        segments = [*(s for group in groups for s in group.segments), *(c.segment for c in chunks)]
        layouts, rows = lay_out(groups)
        with watch.phase(Phase.FORWARD if batch.decoding else Phase.PREFILL):
            output = self._target.forward(segments, logit_rows=rows)
        with watch.phase(Phase.VERIFY):
            groups = [group.on(output.logits.device) for group in groups]
            judgements = [
                self._verify(group, layout, output.logits)
                for group, layout in zip(groups, layouts, strict=True)
            ]
            outcomes = read_outcomes([judgement.judged for judgement in judgements])
        with watch.phase(Phase.COMMIT):
            for group, layout, judgement, own in zip(
                groups, layouts, judgements, outcomes, strict=True
            ):
                commits += self._commit(group, layout, own, judgement.debts, output)
            self._keep_chunks(chunks, output)
        if batch.reading:
            with watch.phase(Phase.PREFILL):
                self._index([portion.request for portion in batch.reading])
            with watch.phase(Phase.PREFILL):
                missed = self._end_reading([portion.request for portion in batch.reading])
            self._planner.observe_reading(missed, watch.spans[-1].seconds)
        share_seconds(batch, watch.seconds, sum(segment.num_new for segment in segments))
        self._planner.observe_step(watch.elapsed)
        every = [outcome for own in outcomes for outcome in own]
        self._record(batch, watch, every, commits, partial(_trees, groups, judgements, commits))

    def _record(
        self,
        batch: StepBatch,
        watch: Stopwatch,
        outcomes: list[Outcome],
        commits: list[Commit],
        trees: Callable[[], list[TreeRecord]],
    ) -> None:
        """Tell the observers about a step."""
        decoding = {id(request) for request in batch.decoding}
        allocator = self._target.allocator
        record = StepRecord(
            number=self._steps,
            started=watch.started,
            seconds=watch.elapsed,
            spans=tuple(watch.spans),
            requests=len(batch.decoding) + len(batch.reading),
            prefilling=len(batch.reading),
            waiting=self._scheduler.num_waiting,
            nodes=sum(outcome.drafted for outcome in outcomes),
            accepted=sum(len(outcome.nodes) for outcome in outcomes),
            committed=sum(len(c.token_ids) for c in commits if id(c.request) in decoding),
            plans=Counter(plan_name(request.plan) for request in batch.decoding),
            reasons=Counter(request.plan_reason for request in batch.decoding),
            kv_used=allocator.num_slots - allocator.num_free,
            kv_slots=allocator.num_slots,
            trees=trees(),
        )
        self._steps += 1
        self.metrics.set(PREEMPTIONS, self._scheduler.preemptions)
        self.metrics.set(CACHED, self._cache.counts.shared)
        for reason, count in self._target.attention_fallbacks.items():
            self.metrics.set(ATTENTION_FALLBACKS, count, label=reason)
        for outcome, count in self._target.graph_counts.items():
            self.metrics.set(GRAPH_FORWARDS, count, label=outcome)
        if self._drafter is not None:
            for outcome, count in self._drafter.graph_counts.items():
                self.metrics.set(GRAPH_DRAFTS, count, label=outcome)
        for observer in self._observers:
            observer.on_step(record)

    def _refuse_first(self) -> list[Commit]:
        """End the first request if nobody runs for want of slots: others on the pool hold them."""
        first, allocator = self._scheduler.first, self._target.allocator
        if first is None:
            return []
        first.error = OutOfSlots(first.slots_needed, allocator.num_free, allocator.num_slots)
        self.finish(first, FinishReason.ERROR)
        return [Commit(first, [])]

    def _fail(self, batch: StepBatch, commits: list[Commit], error: BaseException) -> list[Commit]:
        """End the requests of a step that broke off which it has not served."""
        reading = {id(portion.request) for portion in batch.reading}
        served = {id(c.request) for c in commits if id(c.request) not in reading}
        failed = [r for r in batch.requests if not r.finished and id(r) not in served]
        for request in failed:
            request.error = StepFailed(request.number, f"{type(error).__name__}: {error}")
            request.error.__cause__ = error
            self.finish(request, FinishReason.ERROR)
        return [Commit(request, []) for request in failed]

    def _vacate(self, request: Request) -> None:
        """Take all slots from a request, and what the drafter knows of it; its debts stay."""
        if request.error is None:
            self._share(request)
            if request.skips:  # its drafter looks at nothing any more
                self._cache.store(request, request.context, followed=False)
        self._holdings.vacate(request)
        self._lookup.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)

    def _share(self, request: Request) -> None:
        """Let later texts that begin like this one share its slots, as far as they are final."""
        if self._drafter is None or not request.drafted:
            self._cache.store(request, request.context, followed=False)
        elif request.skipped:
            self._cache.store(request, request.skipped, followed=False)
        else:
            self._cache.store(request, self._drafter.shareable(request), followed=True)

    def _draft(self, requests: list[Request]) -> list[Group]:
        """Draft a tree for each request; those of one plan together."""
        groups = []
        for members in by_plan(requests):
            slots = [self._holdings.borrow(r, r.plan.tree_slots) for r in members]
            groups.append(Group.decode(members, self._propose(members, slots), slots))
        return groups

    def _propose(self, requests: list[Request], slots: list[Tensor]) -> DraftTree:
        plan = requests[0].plan
        if not plan.speculative:
            return DraftTree.roots([request.token_ids[-1] for request in requests])
        drafter = self._drafter_of(plan)
        # At temperature 0 sampled paths all coincide; a fixed tree covers more.
        greedy = requests[0].params.greedy
        verifier = self._verifier(plan.verifier)
        law = Law.FIXED if greedy else law_of(plan, verifier, drafter)
        return drafter.draft(requests, plan, law, [s[:-1] for s in slots])

    def _prefill(self, portions: list[Portion]) -> list[Group]:
        """Read prompts to their ends."""
        counts = {id(portion.request): portion.count for portion in portions}
        groups = []
        for members in by_plan(portion.request for portion in portions):
            slots = [self._holdings.borrow(r, counts[id(r)]) for r in members]
            groups.append(Group.prefill(members, slots))
        return groups

    def _read(self, portions: list[Portion]) -> list[Chunk]:
        """Read parts of texts that bring no token."""
        return [Chunk.of(p.request, self._holdings.borrow(p.request, p.count)) for p in portions]

    def _verify(self, group: Group, layout: Layout, logits: Tensor) -> Judgement:
        """Judge a group's trees by the verifier of its plan."""
        plan, params = group.requests[0].plan, group.requests[0].params
        name = plan.verifier if plan.speculative else PLAIN_VERIFIER
        verifier = self._verifier(GREEDY if params.greedy else name)
        law = target_law(group, layout, logits)
        if isinstance(verifier, StatefulVerifier):
            faults = find_faults(group.tree, law)
            drafter, allocator = self._recalling(plan), self._target.allocator
            settled = settle(verifier, group.requests, group.tree, law, drafter, allocator)
            evidence = self._evidence(group, verifier, law, settled.figures)
            judged = Judged(group.tree, settled.verdict, faults | settled.faults)
            return Judgement(judged, settled.debts, evidence)
        uniforms = VerifyUniforms.draw(
            [request.stream for request in group.requests],
            [request.step for request in group.requests],
            paths=group.tree.paths,
            length=group.tree.length,
            device=logits.device,
        )
        checked = self._checked(verifier, group.tree.law)
        verdict, faults = checked.verify(group.tree, law, uniforms)
        figures = partial(verifier.figures, group.tree, law, uniforms)
        evidence = self._evidence(group, verifier, law, figures)
        judged = Judged(group.tree, verdict, faults)
        return Judgement(judged, [() for _ in group.requests], evidence)

    def _evidence(
        self, group: Group, rule: Rule, law: TargetLaw, figures: Callable[[], NodeFigures]
    ) -> Evidence | None:
        """Return what is to be kept of a verification until its trees are recorded, if they are."""
        if not self._records_trees:
            return None
        return Evidence(rule.name, law, figures, group.prefilling)

    def _commit(
        self,
        group: Group,
        layout: Layout,
        outcomes: list[Outcome],
        debts: list[tuple[Debt, ...]],
        output: TargetOutput,
    ) -> list[Commit]:
        """Keep what was accepted: tokens, KV slots and features; free the rest."""
        for b, (request, outcome) in enumerate(zip(group.requests, outcomes, strict=True)):
            if outcome.fault:
                request.error = fault_error(outcome.fault, request.number)
                self.finish(request, FinishReason.ERROR)
                continue
            request.debts = debts[b]
            self._keep(request, group, b, [0, *outcome.nodes])
        self._show_drafter(group.requests, layout, outcomes, output.features)
        return [
            Commit(request, []) if outcome.fault else self._extend(request, outcome)
            for request, outcome in zip(group.requests, outcomes, strict=True)
        ]

    def _keep(self, request: Request, group: Group, b: int, nodes: list[int]) -> None:
        """Move the slots of accepted nodes (and of a prompt) to the request; free the others."""
        before_root = group.segments[b].num_new - group.counts[b]
        self._holdings.keep(request, [*range(before_root), *(before_root + n for n in nodes)])

    def _keep_chunks(self, chunks: list[Chunk], output: TargetOutput) -> None:
        """Keep the slots of what was read; its features, the last rows, go to the drafter."""
        rows = 0 if output.features is None else len(output.features)
        first = rows - sum(chunk.segment.num_new for chunk in chunks)
        for chunk in chunks:
            request, count = chunk.request, chunk.segment.num_new
            self._holdings.keep(request, list(range(count)))
            if self._drafter is not None and output.features is not None and request.drafted:
                self._drafter.observe(request, output.features[first : first + count])
            first += count

    def _show_drafter(
        self,
        requests: Sequence[Request],
        layout: Layout,
        outcomes: list[Outcome],
        features: Tensor | None,
    ) -> None:
        """Hand the drafter the features of what was committed, all gathered at once."""
        if self._drafter is None or features is None:
            return
        shown = [
            b for b, outcome in enumerate(outcomes) if requests[b].drafted and not outcome.fault
        ]
        if not shown:
            return
        if len(features) == len(shown):  # all of them, a row each: as nobody drafted
            parts = features.clone().split(1)
        else:
            rows = [layout.committed_rows(b, outcomes[b].nodes) for b in shown]
            places = upload(list(chain(*rows)), dtype=torch.int64, device=features.device)
            parts = features.index_select(0, places).split([len(own) for own in rows])
        for b, part in zip(shown, parts, strict=True):
            self._drafter.observe(requests[b], part)

    def _extend(self, request: Request, outcome: Outcome) -> Commit:
        """Append new tokens, up to the first that ends the text."""
        prefilling = not request.prefilled
        kept = self._cut(request, outcome.token_ids)
        request.token_ids += kept
        request.step += 1
        if not prefilling:
            offered, accepted = outcome.offered, len(outcome.nodes)
            self._planner.observe_request(request, offered=offered, accepted=accepted)
            request.metrics.count_forward(
                offered=offered,
                accepted=accepted,
                committed=len(kept),
                nodes=outcome.drafted,
                plan=plan_name(request.plan),
            )
        if self._ends(request, kept[-1]):
            self.finish(request, FinishReason.STOP)
        elif len(request.token_ids) >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)
        return Commit(request, kept)

    def _cut(self, request: Request, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first that ends the text, within the request's limit."""
        tokens = tokens[: request.max_tokens - len(request.token_ids)]
        ends = (i for i, token in enumerate(tokens) if self._ends(request, token))
        return tokens[: next(ends, len(tokens) - 1) + 1]

    def _ends(self, request: Request, token: int) -> bool:
        if token in request.params.stop_token_ids:
            return True
        return token in self._target.eos_token_ids and not request.params.ignore_eos

    def _index(self, requests: list[Request]) -> None:
        """Index what was read, where drafts may be looked up, so that it counts as prefill."""
        self._lookup.catch_up([r for r in requests if r.looks_up and not r.finished])

    def _end_reading(self, requests: list[Request]) -> int:
        """Run the drafter over what was read, so that its cost counts as prefill, and share it.

        Where that does not pay at present it waits.

        Returns:
            For how many positions the drafter ran.
        """
        running = [request for request in requests if not request.finished]
        missed = 0
        if self._drafter is not None:
            drafted = [
                request for request in running if request.drafted and not self._can_wait(request)
            ]
            missed = sum(self._behind(request) for request in drafted)
            self._drafter.catch_up(drafted)
            self._skip(running)
            for request in running:
                if request.skips:  # what it waits for is kept by itself
                    self._drafter.skip(request, keep=_MOST_KEPT)
        for request in running:
            if not request.unread:
                self._share(request)
        return missed

    def _can_wait(self, request: Request) -> bool:
        """Return whether the drafter may read what was read of a prompt when somebody drafts."""
        if self._cache.enabled and not request.skips:
            return False  # what it has not run could not be shared
        if request.unread and request.skipped > request.shared:
            return True  # as it did when less was read: it will have the end
        # Those that wait will decode with it.
        batch = len(self._scheduler.running) + self._scheduler.num_waiting
        return not self._planner.worth_reading(
            request,
            rows=request.unread + self._behind(request),
            batch=min(batch, self._config.max_batch),
        )

    def _skip(self, requests: Sequence[Request]) -> None:
        """Have the drafter forget most of what it missed of texts that it may draft no more."""
        if self._drafter is None:
            return
        for request in requests:
            if request.skips and self._drafter.behind(request) > _MOST_KEPT:
                self._drafter.skip(request, keep=_KEPT)

    def _behind(self, request: Request) -> int:
        """Return for how many committed positions the drafter has not run yet."""
        return 0 if self._drafter is None else self._drafter.behind(request)

    def _verifier(self, name: str) -> Verifier | StatefulVerifier:
        if name not in self._verifiers:
            self._verifiers[name] = make_any_verifier(name)
        return self._verifiers[name]

    def _checked(self, verifier: Verifier, law: Law) -> CheckedVerifier:
        """Return a verifier with the check of what it is given; graphs take independent paths."""
        backend = self._compile_backend if law is Law.IID else None
        return checked_verifier(verifier.name, backend, self._target.vocab_size if backend else 0)

    def _drafter_of(self, plan: Plan) -> Drafter:
        """Return who drafts by a plan."""
        if plan.source is Source.LOOKUP:
            return self._lookup
        if self._drafter is None:
            raise InvalidArgument("drafter", None, f"a drafter, for verifier {plan.verifier!r}")
        return self._drafter

    def _recalling(self, plan: Plan) -> RecallingDrafter:
        """Return who drafts by a plan, and must be able to recall the laws of earlier steps."""
        drafter = self._drafter_of(plan)
        if not isinstance(drafter, RecallingDrafter):
            raise InvalidArgument(
                "drafter",
                type(drafter).__name__,
                f"one that recalls the draft laws of earlier steps, for verifier {plan.verifier!r}",
            )
        if drafter.quantization is not Quantization.NONE:
            # A law computed again, in other company, would not be the one that was drawn from.
            expected = f"none, verifier {plan.verifier!r} going by draft laws of earlier steps"
            raise InvalidArgument("draft_quantization", str(drafter.quantization), expected)
        return drafter

    def _recall_slots(self, params: SamplingParams, plan: Plan) -> int:
        if params.greedy or not plan.speculative:
            return 0
        stateful = isinstance(self._verifier(plan.verifier), StatefulVerifier)
        return recall_slots(plan) if stateful else 0

    def _token_limit(
        self, prompt_ids: Sequence[int], params: SamplingParams, plans: Sequence[Plan]
    ) -> int:
        if not prompt_ids:
            raise InvalidArgument("prompt", list(prompt_ids), "at least one token")
        vocab = self._target.vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocab:
                raise InvalidArgument("prompt", token, f"token ids in [0, {vocab})")
        # A tree reaches beyond the last token kept, and its positions must exist too.
        reach = max(plan.depth if plan.speculative else 0 for plan in plans)
        room = self._target.max_context - len(prompt_ids) - reach
        if room < 1:
            raise InvalidArgument(
                "prompt",
                f"{len(prompt_ids)} tokens",
                f"at most {self._target.max_context - reach - 1} tokens, by the model's context",
            )
        return min(params.max_tokens, room)


def _trees(
    groups: list[Group], judgements: list[Judgement], commits: list[Commit]
) -> list[TreeRecord]:
    """Return the records of a step's trees; none where no evidence was kept."""
    kept = {commit.request.number: commit.token_ids for commit in commits}
    return [
        record
        for group, judgement in zip(groups, judgements, strict=True)
        if judgement.evidence is not None
        for record in tree_records(group, judgement.judged.verdict, judgement.evidence, kept)
    ]


def check_verifier(plan: Plan) -> None:
    """Raise unless the plan's verifier exists and takes the law it names, whatever drafts.

    Raises:
        InvalidArgument: There is no such verifier.
        LawMismatch: It is not lossless for the plan's law, or for so many paths.
    """
    if plan.speculative:
        verifier = make_any_verifier(plan.verifier)
        if plan.law is not None:
            verifier.check_law(plan.law, plan.paths)


def law_of(plan: Plan, verifier: Rule, drafter: Drafter) -> Law:
    """Return the draft law of a plan: its own, else the verifier's, else the drafter's only one."""
    if plan.law is not None:
        return plan.law
    if verifier.default_law not in drafter.laws and drafter.laws <= {Law.FIXED}:
        return Law.FIXED
    return verifier.default_law


def target_law(group: Group, layout: Layout, logits: Tensor) -> TargetLaw:
    """Warp the logits of a group's nodes, each by its request's settings and its own path."""
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
    if logits.device.type != "cpu":  # rows of padding nodes may be there, and mean nothing
        real = torch.arange(group.tree.nodes, device=rows.device) < group.tree.num_nodes[:, None]
        rows = torch.where(real, rows, rows[:, :1])
    return TargetLaw.of_warped(warped, rows)


def _occurrences(group: Group, counts: list[int], vocab: int) -> tuple[Tensor, Tensor]:
    """Return what penalties look at, per node: tokens of the prompt, and counts of the rest.

    Both ``[rows, vocab]``; a node counts the generated tokens and the drafted ones on its path.
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
        seen = torch.tensor(request.token_ids, dtype=torch.int64)
        generated[own] = send(torch.bincount(seen, minlength=vocab), device)
        # The root is the last of the request's own tokens and is counted there.
        drafted = ancestors[b, :count, 1:count].to(torch.int64)
        tokens = group.tree.token_ids[b, 1:count].expand(count, -1)
        generated[own].scatter_add_(1, tokens, drafted)
        row += count
    return in_prompt, generated
