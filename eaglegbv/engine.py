"""The engine: plan, draft, forward, verify, commit."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eaglegbv.config import (
    PLAIN,
    AutoPlan,
    DefaultPlan,
    EngineConfig,
    Plan,
    Planning,
    plan_name,
    plans_of,
)
from eaglegbv.devices import torch_as_usual
from eaglegbv.drafters import Drafter
from eaglegbv.drafting import Drafters
from eaglegbv.errors import EngineBusy, InvalidArgument, OutOfSlots, StepFailed
from eaglegbv.grammars import Grammars
from eaglegbv.metrics import (
    ATTENTION_FALLBACKS,
    CACHED,
    FAILED_OBSERVERS,
    FAILED_STEPS,
    FINISHED,
    GRAPH_DRAFTS,
    GRAPH_FORWARDS,
    KV_SLOTS,
    KV_USED,
    PREEMPTIONS,
    RUNNING,
    TARGET_FORWARDS,
    WAITING,
    EngineMetrics,
    Phase,
    StepObserver,
    StepRecord,
    Stopwatch,
)
from eaglegbv.models.target import Target
from eaglegbv.request import FinishReason, Request, RequestOutput
from eaglegbv.rng import RequestRng, request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler import (
    Chunk,
    Forward,
    Group,
    KVSlots,
    Planner,
    PrefixCache,
    Scheduler,
    StepBatch,
    by_plan,
)
from eaglegbv.token_rules import TokenRules
from eaglegbv.tree import DraftTree
from eaglegbv.tree_records import tree_records
from eaglegbv.utils import log_once, plain_numbers, require_integer
from eaglegbv.verification import (
    Verification,
    VerifyOutput,
    read_outputs,
    score_prompts,
)
from eaglegbv.verifiers import fault_error

_log = logging.getLogger(__name__)

_UNREPEATABLE = "automatic plans were asked for: a seed need not give the same text twice"


class GivenSequence(NamedTuple):
    """An answer that is given, and where it is visited."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    places: Sequence[int]  # numbers of tokens of the answer, ascending, each at least 1
    seed: int  # of the draws at the places


class Engine:
    """Serves requests step by step; every step is one packed forward of the target."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig | None = None,
        *,
        barrier: Callable[[], None] | None = None,
        planner: Planner | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            target: The model whose distribution the text follows.
            drafter: Proposes draft trees; None allows plain decoding only.
            config: Sizes and seed.
            barrier: Waits for the device at the end of every phase, so that its time is the
                phase's own; None lets work go on while the next phase is prepared.
            planner: Chooses plans, with what is known of the costs of steps; None has one begin
                with nothing.
            tokenizer: The target's, for settings that are texts, bad words and grammars; None
                where there are none.
        """
        self._target = target
        self._tokenizer = tokenizer
        self._ends = target.eos_token_ids or _ends_of(tokenizer)
        self._grammars = Grammars(tokenizer, vocab=target.vocab_size, eos_token_ids=self._ends)
        self._config = config or EngineConfig()
        self._cache = PrefixCache(target.allocator, enabled=self._config.prefix_cache)
        self._kv = KVSlots(target.allocator, self._cache)
        self._drafting = Drafters(drafter)
        # A method of the engine would make a cycle, and keep the models after its last user.
        self._vacate = partial(_vacate, self._cache, self._kv, self._drafting)
        self._scheduler = Scheduler(
            max_batch=self._config.max_batch,
            prefill_tokens=self._config.prefill_tokens,
            cache=self._cache,
            vacate=self._vacate,
        )
        self._barrier = barrier
        self._planner = planner or Planner(at_once=self._drafting.at_once)
        self._verification = Verification(target, self._drafting)
        self._added = 0
        self._steps = 0
        self._stepping = False
        self._leaving: list[Request] = []
        self.metrics = EngineMetrics()
        self._observers: list[tuple[StepObserver, bool]] = []

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    @torch_as_usual()
    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of requests with such settings, on any thread: it may take seconds.

        Raises:
            InvalidArgument: The grammar is none, or nothing here reads it.
        """
        self._grammars.of(params)

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
                of its own even if the user gives both the same seed. A :class:`DefaultPlan` gives
                sampled requests with a seed a fixed plan.
            priority: Lower numbers are served first; equal ones in order of arrival.

        Raises:
            InvalidArgument: The prompt is empty, too long or holds unknown ids, the priority is no
                integer, or the plan does not fit the engine.
            SamplingMismatch: The plan's verifier is not lossless for its draft sampling.
        """
        plan = self._drafting.within(plan)
        self.check_plan(plan)
        if isinstance(plan, AutoPlan) and params.seed is not None and not params.greedy:
            if isinstance(plan, DefaultPlan):
                plan = plan.seeded
                self.check_plan(plan)
            else:
                log_once(_log, logging.WARNING, _UNREPEATABLE)
        check_priority(priority)
        if params.n != 1:
            raise InvalidArgument("n", params.n, "1: a request is one answer, see params.copies()")
        plans = plans_of(plan, greedy=params.greedy)
        replay_slots = max(self._verification.replay_slots(p, params) for p in plans)
        step_slots = max(plan.tree_slots for plan in plans) + replay_slots
        max_tokens = self._token_limit(prompt_ids, params, step_slots if replay_slots else 1)
        rules = TokenRules.of(
            params,
            vocab=self._target.vocab_size,
            eos_token_ids=self._ends,
            tokenizer=self._tokenizer,
            grammar=self._grammars.of(params),
        )
        # Behind the checks: what is refused changes no other request's numbers.
        number = self._added
        self._added += 1
        auto = plan if isinstance(plan, AutoPlan) else None
        seed = self._config.seed if params.seed is None else params.seed
        if auto is not None or params.seed is None:
            seed = request_seed(seed, number)
        drafted = any(p.asks_drafter for p in plans)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self._ends
        request = Request(
            number=number,
            prompt_ids=tuple(prompt_ids),
            params=params,
            plan=plans[0] if auto is None else PLAIN,
            auto=auto,
            rng=RequestRng(seed),
            max_tokens=max_tokens,
            ends=ends,
            step_slots=step_slots,
            replayed=replay_slots > 0,
            drafted=drafted,
            skips=drafted and auto is not None and self._drafting.skips,
            rules=rules,
            priority=int(priority),
        )
        request.metrics.prompt_tokens = len(prompt_ids)
        self._scheduler.add(request)
        self._gauge()
        return request

    @torch_as_usual()
    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Advance every running request by one forward of the target.

        A step that breaks off ends the requests it has not served, with an error that says why.

        Raises:
            EngineBusy: The engine is within a step.
        """
        if self._stepping:
            raise EngineBusy("a step within a step: expected one after another")
        self._stepping = True
        try:
            batch = self._scheduler.next_batch()
            return self._refuse_first() if batch.empty else self._run(batch)
        finally:
            self._stepping = False
            leaving = self._leaving
            self._leaving = []
            for request in leaving:
                self.cancel(request)

    def _run(self, batch: StepBatch) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        try:
            self._advance(batch, outputs)
        except Exception as error:  # noqa: BLE001  whatever it is, it ends no other requests
            _log.exception("a step broke off")
            outputs += self._fail(batch, outputs, error)
        except BaseException as error:
            self._fail(batch, outputs, error)
            raise
        if self._config.check_slots:
            self.check()
        return outputs

    def _advance(self, batch: StepBatch, outputs: list[RequestOutput]) -> None:
        """Plan, draft, forward, verify, commit; ``outputs`` grows as requests are served."""
        watch = Stopwatch(self._barrier)
        with watch.phase(Phase.DRAFT):
            self._plan(batch)
            groups = self._draft(batch.decoding)
        forward = Forward.of(groups + self._last_chunks(batch), self._other_chunks(batch))
        with watch.phase(Phase.FORWARD if batch.decoding else Phase.PREFILL):
            output = self._target.forward(forward.segments, logit_rows=forward.logit_rows)
        with watch.phase(Phase.VERIFY):
            recording = any(trees for _, trees in self._observers)
            verified = self._verification.verify(forward, output.logits, record=recording)
            decided = read_outputs(verified)
            if forward.prompts:
                score_prompts(forward, output.logits)
        with watch.phase(Phase.COMMIT):
            for group, results in zip(verified, decided, strict=True):
                outputs += self._commit(group, results, output.features)
            self._keep_chunks(forward, output.features)
        if batch.prefilling:
            self._end_prefill(batch, watch)
        batch.share_seconds(watch.seconds, sum(s.num_new for s in forward.segments))
        self._planner.observe_step(watch.elapsed)
        self._record(batch, watch, verified, outputs)

    @torch_as_usual()
    @torch.inference_mode()
    def preview(self, requests: Sequence[Request]) -> list[VerifyOutput]:
        """Draft, forward and verify where requests stand, and keep nothing of it.

        The trees are the next step's, by plans that must fit context and pool. Requests of one plan
        share a result; its ``target`` is p at the nodes, and its faults end no request.

        Raises:
            InvalidArgument: A request was not read up to its last token, the root of its tree.
            OutOfSlots: The trees need more KV slots than are free.
        """
        for request in requests:
            if request.to_prefill or not request.prefilled:
                expected = "ones that steps have read to their ends; the KV pool must hold them"
                error = InvalidArgument("requests", request.number, expected)
                raise request.error or error
        try:
            groups = self._draft(requests)
            forward = Forward.of(groups, [])
            rows = forward.logit_rows
            output = self._target.forward(forward.segments, logit_rows=rows)
            return self._verification.verify(forward, output.logits, record=True)
        finally:
            for request in requests:
                self._kv.commit(request, [])

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        plan: Planning,
    ) -> list[Request]:
        """Answer prompts of token ids together, and return their requests when all have ended.

        Raises:
            EagleGBVError: A request broke off, or could not be added; see :meth:`add`.
        """
        each = zip(prompts, params, strict=True)
        requests = [self.add(prompt_ids, settings, plan) for prompt_ids, settings in each]
        while not all(request.finished for request in requests):
            self.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        return requests

    def visit(self, sequences: Sequence[GivenSequence]) -> Iterator[dict[int, Request]]:
        """Read given sequences together, place by place.

        Yields requests that stand at a place, by the numbers of their sequences, to preview drafts
        there; such a request may be given another plan and parameters. Nobody else may step
        meanwhile.
        """
        requests: dict[int, Request] = {}
        try:
            for number, given in enumerate(sequences):
                if given.places:
                    params = SamplingParams(max_tokens=len(given.token_ids), seed=given.seed)
                    requests[number] = self.add(given.prompt_ids, params, Plan())
            visits = 0
            while requests:
                for number, request in requests.items():
                    given = sequences[number]
                    known = len(request.token_ids)
                    request.give(given.token_ids[known : given.places[visits]])
                self.step()  # it reads what was given, up to the roots of the trees
                yield requests
                visits += 1
                for number in [*requests]:
                    if visits == len(sequences[number].places):
                        self.cancel(requests.pop(number))
        finally:
            for request in requests.values():
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End a request, waiting or running; one that has ended stays as it is.

        Within a step, where an observer or a finaliser may ask for it, it ends with the step.
        """
        if self._stepping:
            self._leaving.append(request)
        elif not request.finished:
            self.finish(request, FinishReason.CANCELLED)

    def check(self) -> None:
        """Raise InvalidArgument unless every KV slot of a pool of its own has one owner."""
        self._kv.check(self._scheduler.running)

    @torch_as_usual()
    def finish(self, request: Request, reason: FinishReason, *, keep: int | None = None) -> None:
        """End a request, keeping its first ``keep`` tokens, and free what it holds.

        One that has ended may still be cut, and ends for ``reason`` then.
        """
        if keep is not None and keep < len(request.token_ids):
            request.metrics.committed_tokens -= len(request.token_ids) - keep
            del request.token_ids[keep:]
            del request.logprobs[keep:]
        self._scheduler.remove(request)
        self._vacate(request)
        request.target_layers = ()
        if request.finish_reason is not None:
            self.metrics.add(FINISHED, -1, label=request.finish_reason)
        request.finish_reason = reason
        self.metrics.add(FINISHED, label=reason)
        self._gauge()

    def check_plan(self, plan: Planning) -> None:
        """Raise unless this engine can run ``plan``; see :meth:`Verification.check`."""
        self._verification.check(plan)

    @torch_as_usual()
    @torch.inference_mode()
    def record(self, plan: Plan, params: SamplingParams) -> None:
        """Record now the graphs that up to ``max_batch`` requests with such settings will replay.

        Otherwise they are recorded when first needed, also while a batch drains, which takes longer
        than many steps. Without graphs, nothing happens.
        """
        self.check_plan(plan)
        most = self._config.max_batch
        self._target.record(most, plan.tree_nodes if plan.speculative else 1)
        if plan.asks_drafter:
            sampling = self._verification.sampling_of(plan, greedy=params.greedy)
            self._drafting.by(plan).record(most, plan, sampling, params)

    def observe(self, observer: StepObserver, *, trees: bool = False) -> None:
        """See :meth:`eaglegbv.llm.LLM.observe`.

        While any observer asks for ``trees``, all see them. They are recorded after a step's clock
        has stopped, so that no time of a step includes that.
        """
        self._observers.append((observer, trees))

    def unobserve(self, observer: StepObserver) -> None:
        """Tell ``observer`` no more."""
        self._observers = [known for known in self._observers if known[0] is not observer]

    def explain_plans(self) -> str:
        """Return in words what the planner expects of the best plans for the running requests."""
        return self._planner.explain([r for r in self._scheduler.running if r.prefilled])

    @torch_as_usual()
    def reset_prefix_cache(self) -> None:
        """Forget the sequences in the prefix cache that no running request uses."""
        self._cache.clear()

    def _plan(self, batch: StepBatch) -> None:
        """Choose the plans of those who leave it to the engine."""
        self._drafting.skip(batch.requests)
        self._planner.assign(
            batch.decoding,
            others=len(batch.prefilling),
            behind=self._drafting.behind,
            matched=self._drafting.matched,
            fitted=self._fitted,
        )
        for request in batch.decoding:
            if request.auto is None:
                request.plan = self._fitted(request, request.plan)

    def _fitted(self, request: Request, plan: Plan) -> Plan:
        """Return ``plan`` with as deep trees as context and pool have room for, down to none."""
        if not plan.speculative:
            return plan
        context = self._drafting.max_context(plan, self._target.max_context)
        slots = self._target.allocator.num_slots - request.context
        # This follows from the sequence's length alone. Layers of earlier steps end before the last
        # token of the context, the only one for which nothing is drafted.
        deepest = min(plan.depth, context - request.length - 1)
        for depth in range(deepest, 0, -1):
            shorter = plan.up_to(depth)
            if shorter.tree_slots <= slots:
                return shorter
        return PLAIN

    def _draft(self, requests: Sequence[Request]) -> list[Group]:
        """Draft a tree for each request, those of one plan together; plain decoding has a root."""
        groups = []
        for members in by_plan(requests):
            plan = members[0].plan
            greedy = members[0].params.greedy
            slots = [self._kv.allocate(r, r.plan.tree_slots) for r in members]
            if plan.speculative:
                sampling = self._verification.sampling_of(plan, greedy=greedy)
                tree = self._drafting.draft(members, sampling, slots)
            else:
                tree = DraftTree.roots([request.token_ids[-1] for request in members])
            groups.append(Group.decode(members, tree, slots))
        return groups

    def _last_chunks(self, batch: StepBatch) -> list[Group]:
        """Prefill the last parts of prompts, which yield first tokens."""
        last = [chunk.request for chunk in batch.prefilling if chunk.brings_first_token]
        return [
            Group.prefill(members, [self._kv.allocate(r, r.to_prefill) for r in members])
            for members in by_plan(last)
        ]

    def _other_chunks(self, batch: StepBatch) -> list[Chunk]:
        """Prefill parts that yield no token."""
        return [
            Chunk.of(chunk.request, self._kv.allocate(chunk.request, chunk.count))
            for chunk in batch.prefilling
            if not chunk.brings_first_token
        ]

    def _commit(
        self, verified: VerifyOutput, decided: list[RequestOutput], features: Tensor | None
    ) -> list[RequestOutput]:
        """Keep what was accepted: tokens, KV slots and features; free the rest."""
        for b, output in enumerate(decided):
            request = output.request
            if output.fault:
                request.error = fault_error(output.fault, request.number)
                self.finish(request, FinishReason.ERROR)
                continue
            request.target_layers = verified.target_layers[b]
            self._kv.commit(request, verified.group.committed(b, output.nodes))
        self._drafting.observe_commit(decided, verified.group, features)
        return [
            replace(output, token_ids=[] if output.fault else self._extend(output))
            for output in decided
        ]

    def _extend(self, output: RequestOutput) -> list[int]:
        """Append new tokens, up to the first that ends the text, and return them."""
        request = output.request
        prefilling = not request.prefilled
        kept = self._cut(request, output.token_ids)
        request.token_ids += kept
        request.logprobs += output.logprobs[: len(kept)]
        request.step += 1
        if not prefilling:
            offered = output.depth
            accepted = len(output.nodes)
            self._planner.observe_request(request, offered=offered, accepted=accepted)
            request.metrics.count_forward(
                offered=offered,
                accepted=accepted,
                committed=len(kept),
                nodes=output.drafted,
                plan=plan_name(request.plan),
            )
        if kept[-1] in request.ends:
            self.finish(request, FinishReason.STOP)
        elif len(request.token_ids) >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)
        return kept

    def _cut(self, request: Request, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first that ends the text, within the request's limit."""
        tokens = tokens[: request.max_tokens - len(request.token_ids)]
        ends = (i for i, token in enumerate(tokens) if token in request.ends)
        return tokens[: next(ends, len(tokens) - 1) + 1]

    def _keep_chunks(self, forward: Forward, features: Tensor | None) -> None:
        """Keep the slots of parts that yield no token; their features go to the drafter."""
        for chunk in forward.chunks:
            self._kv.commit(chunk.request, list(range(chunk.segment.num_new)))
        if features is not None:
            requests = [chunk.request for chunk in forward.chunks]
            self._drafting.observe_prefill(requests, forward.chunk_features(features))

    def _end_prefill(self, batch: StepBatch, watch: Stopwatch) -> None:
        """Run the drafters over what was prefilled, where that pays at present, and share it."""
        running = [chunk.request for chunk in batch.prefilling if not chunk.request.finished]
        with watch.phase(Phase.PREFILL):
            missed, seconds = self._drafting.end_prefill(running, can_wait=self._can_wait)
            for request in running:
                if not request.to_prefill:
                    _share(self._cache, self._drafting, request)
        self._planner.observe_reading(missed, seconds)

    def _can_wait(self, request: Request) -> bool:
        """Return whether the drafter may run over a prefill when somebody drafts."""
        if self._cache.enabled and not request.skips:
            return False  # what it has not run could not be shared
        if request.to_prefill and request.skipped > request.shared:
            return True  # it has skipped an earlier part already, and will get the prompt's end
        # Those that wait will decode with it.
        batch = len(self._scheduler.running) + self._scheduler.num_waiting
        return not self._planner.worth_reading(
            request,
            rows=request.to_prefill + self._drafting.behind(request),
            batch=min(batch, self._config.max_batch),
        )

    def _refuse_first(self) -> list[RequestOutput]:
        """End the first request if nobody runs for want of slots: others on the pool hold them."""
        first = self._scheduler.first
        allocator = self._target.allocator
        if first is None:
            return []
        first.error = OutOfSlots(first.slots_needed, allocator.num_free, allocator.num_slots)
        self.finish(first, FinishReason.ERROR)
        return [RequestOutput(first, [])]

    def _fail(
        self, batch: StepBatch, outputs: list[RequestOutput], error: BaseException
    ) -> list[RequestOutput]:
        """End the requests of a step that broke off which it has not served."""
        self.metrics.add(FAILED_STEPS)
        prefilling = {id(chunk.request) for chunk in batch.prefilling}
        served = {id(output.request) for output in outputs} - prefilling
        failed = [r for r in batch.requests if not r.finished and id(r) not in served]
        for request in failed:
            request.error = StepFailed.of(request.number, error)
            self.finish(request, FinishReason.ERROR)
        return [RequestOutput(request, []) for request in failed]

    def _record(
        self,
        batch: StepBatch,
        watch: Stopwatch,
        verified: list[VerifyOutput],
        outputs: list[RequestOutput],
    ) -> None:
        """Count a step, and give the observers its record; one that raises is dropped."""
        decoding = {id(request) for request in batch.decoding}
        kept = {output.request.number: output.token_ids for output in outputs}
        recorded = [output for output in verified if output.target is not None]
        allocator = self._target.allocator
        record = StepRecord(
            number=self._steps,
            started=watch.started,
            seconds=watch.elapsed,
            spans=tuple(watch.spans),
            requests=len(batch.decoding) + len(batch.prefilling),
            prefilling=len(batch.prefilling),
            waiting=self._scheduler.num_waiting,
            nodes=sum(output.drafted for output in outputs),
            accepted=sum(len(output.nodes) for output in outputs),
            committed=sum(len(o.token_ids) for o in outputs if id(o.request) in decoding),
            plans=Counter(plan_name(request.plan) for request in batch.decoding),
            reasons=Counter(request.plan_reason for request in batch.decoding),
            why=self._planner.why,
            kv_used=allocator.num_used,
            kv_slots=allocator.num_slots,
            trees=[tree for output in recorded for tree in tree_records(output, kept)],
        )
        self._steps += 1
        self._gauge()
        self.metrics.on_step(record)
        for observer, _ in tuple(self._observers):
            try:
                observer.on_step(record)
            except Exception:  # noqa: BLE001  whatever the error is, no request is to blame
                _log.exception("an observer raised, and was dropped")
                self.metrics.add(FAILED_OBSERVERS)
                self.unobserve(observer)

    def _gauge(self) -> None:
        """Set what is counted elsewhere: requests, slots, and how forwards and drafts ran."""
        allocator = self._target.allocator
        for metric, value in (
            (RUNNING, len(self._scheduler.running)),
            (WAITING, self._scheduler.num_waiting),
            (KV_USED, allocator.num_used),
            (KV_SLOTS, allocator.num_slots),
            (PREEMPTIONS, self._scheduler.preemptions),
            (CACHED, self._cache.shared),
        ):
            self.metrics.set(metric, value)
        for metric, counts in (
            (TARGET_FORWARDS, self._target.forward_counts),
            (ATTENTION_FALLBACKS, self._target.attention_fallbacks),
            (GRAPH_FORWARDS, self._target.graph_counts),
            (GRAPH_DRAFTS, self._drafting.graph_counts),
        ):
            for label, count in counts.items():
                self.metrics.set(metric, count, label=label)

    def _token_limit(
        self, prompt_ids: Sequence[int], params: SamplingParams, least_slots: int
    ) -> int:
        if not prompt_ids:
            raise InvalidArgument("prompt", list(prompt_ids), "at least one token")
        vocab = self._target.vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocab:
                raise InvalidArgument("prompt", token, f"token ids in [0, {vocab})")
        room = self._target.max_context - len(prompt_ids)
        if params.prompt_logprobs is not None and room == 0:
            room = 1  # a text may fill the context that is scored: what follows it is never read
        if room < 1:
            expected = f"at most {self._target.max_context - 1} tokens, by the model's context"
            raise InvalidArgument("prompt", f"{len(prompt_ids)} tokens", expected)
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        # At least 1: a prompt that the pool has no room for is refused by the scheduler.
        slots = self._target.allocator.num_slots
        return min(room, max(1, slots - len(prompt_ids) - least_slots))


def _ends_of(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return what ends the texts of a model that names no end itself: the tokenizer's end."""
    end = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset() if end is None else frozenset((end,))


def check_priority(priority: int) -> None:
    """Raise InvalidArgument unless a request may have the priority: any integer of 64 bits."""
    require_integer("priority", plain_numbers(priority), -(2**63), 2**63 - 1)


def _vacate(cache: PrefixCache, kv: KVSlots, drafting: Drafters, request: Request) -> None:
    """Take all slots from a request, and what the drafter knows of it."""
    if request.error is None:
        _share(cache, drafting, request)
        if request.skips:  # its drafter looks at nothing any more
            cache.store(request, request.context, followed=False)
    kv.free(request)
    drafting.forget(request)


def _share(cache: PrefixCache, drafting: Drafters, request: Request) -> None:
    """Let later sequences that begin like this one share its slots, where they are final."""
    final = drafting.shareable(request)
    if final is None:
        cache.store(request, request.context, followed=False)
    elif request.skipped:
        cache.store(request, request.skipped, followed=False)
    else:
        cache.store(request, final, followed=True)
