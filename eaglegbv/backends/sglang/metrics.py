"""Acceptance in the usual terms of the field, counting only tokens that were delivered.

SGLang's own figures keep SGLang's meaning; ours stand beside them. They count per verification,
that is, per forward of the target over a request's tree: ``acceptance_length`` the drafted tokens
accepted, and ``block_efficiency`` all tokens committed. What the last verification of a request
commits beyond the end of the text counts in neither, nor do tokens from forwards over a prompt.

Prometheus gets counters only: rates and ratios of them are right over any time and any number of
servers, and nothing goes stale while a server is idle.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.config import Plan
from eaglegbv.metrics import RequestMetrics

_log = logging.getLogger(__name__)

TITLES = ("EAGLEGBV", "EAGLEGBV3")  # names of our algorithms
GREEDY = "greedy"
"""What judges greedy requests, in place of the verifier: SGLang's own kernel."""

COUNTERS: Mapping[str, tuple[str, str]] = {
    "verifications": ("target_forwards", "Forwards of the target over a request's tree."),
    "drafted_tokens": ("drafted_nodes", "Drafted tokens that were verified."),
    "accepted_tokens": ("accepted_tokens", "Drafted tokens accepted and delivered."),
    "committed_tokens": ("committed_tokens", "Tokens that verifications delivered."),
}
"""Prometheus' counters, after ``eaglegbv:``: what they count, and their help."""
ROUNDS = "Rounds, by the plan that they followed and why it was taken."


def request_metrics(meta_info: Mapping[str, Any], plan: Plan) -> RequestMetrics:
    """Return the counts of a request that was drafted for by ``plan``; no times of its phases.

    The histogram in ``meta_info`` has, at i, the number of verifications that accepted i drafted
    tokens, also those beyond the end of the text; so have the counts by depth.
    """
    histogram: list[int] = meta_info.get("spec_correct_drafts_histogram") or []
    forwards, accepted = sum(histogram), sum(i * count for i, count in enumerate(histogram))
    # A token comes from the forward over the prompt, and from each that reads a text again.
    read = 1 + int(meta_info.get("num_retractions", 0))
    committed = max(0, int(meta_info["completion_tokens"]) - read)
    # Of the tokens beyond the end, the last is the one that the target added.
    beyond = max(0, forwards + accepted - committed - 1)
    return RequestMetrics(
        prompt_tokens=int(meta_info["prompt_tokens"]),
        target_forwards=forwards if plan.speculative else committed,
        committed_tokens=committed,
        accepted_tokens=accepted - beyond,
        drafted_nodes=forwards * plan.paths * plan.depth,
        offered_by_depth=[forwards] * plan.depth if forwards else [],
        accepted_by_depth=[sum(histogram[d + 1 :]) for d in range(plan.depth if forwards else 0)],
    )


@dataclass(slots=True)
class Delivered:
    """Counts, in the scheduler's process, what verifications delivered, and reports it."""

    counts: RequestMetrics = field(default_factory=RequestMetrics)  # those since the last line

    def process(
        self, original: Callable[..., None], processor: Any, batch: Any, result: Any
    ) -> None:
        """Let SGLang process a round, and count it."""
        if not ours():
            original(processor, batch, result)
            return
        running = [
            None if req.finished() or req.is_retracted else _length(req) for req in batch.reqs
        ]
        original(processor, batch, result)
        nodes = int(result.speculative_num_draft_tokens) - 1
        rounds: dict[str, RequestMetrics] = {}  # by what judged
        drafts = result.num_correct_drafts_per_req_cpu
        for req, before, correct in zip(batch.reqs, running, drafts, strict=True):
            if before is None:  # it had ended when this round was under way
                continue
            new = _length(req) - before
            judge = GREEDY if req.sampling_params.top_k == 1 else served_verifier()
            for counts in (self.counts, rounds.setdefault(judge, RequestMetrics())):
                counts.target_forwards += 1
                counts.drafted_nodes += nodes
                counts.committed_tokens += new
                counts.accepted_tokens += min(new, correct)
        reporter = processor.metrics_reporter
        if reporter.current_scheduler_metrics_enabled:
            for judge, counts in rounds.items():
                _add(counts, {**reporter.metrics_collector.labels, "verifier": judge})
            _add_rounds(processor.model_worker, reporter.metrics_collector.labels)
        if reporter.forward_ct_decode % reporter.decode_log_interval == 0:
            self._report(reporter)

    def _report(self, reporter: Any) -> None:
        counts, self.counts = self.counts, RequestMetrics()
        if reporter.is_stats_logging_rank and counts.target_forwards:
            said = "acceptance length: %.2f, block efficiency: %.2f, verifications: %d"
            _log.info(said, *_figures(counts).values(), counts.target_forwards)


def _add(counts: RequestMetrics, labels: Mapping[str, str]) -> None:
    for name, (counted, said) in COUNTERS.items():
        counter(name, said, *labels).labels(**labels).inc(getattr(counts, counted))


def _add_rounds(worker: Any, labels: Mapping[str, str]) -> None:
    """Count the rounds since the last time, by plan and by why it was taken."""
    if (plans := worker.adaptive_controller) is None:
        return
    for (plan, why), rounds in plans.rounds.items():
        named = {**labels, "plan": plan, "why": str(why)}
        counter("rounds", ROUNDS, *named).labels(**named).inc(rounds)
    plans.rounds.clear()


@cache
def served_verifier() -> str:
    """Return the name of the verifier of this server."""
    return Settings.from_environment(os.environ).verifier


def add_figures(
    original: Callable[..., None], manager: Any, meta_info: dict[str, Any], received: Any, i: int
) -> None:
    """Add our figures to the ``meta_info`` of a finished request."""
    from sglang.srt.runtime_context import get_spec

    original(manager, meta_info, received, i)
    if ours() and meta_info.get("spec_correct_drafts_histogram"):
        spec = get_spec()
        shape = Plan(paths=spec.speculative_eagle_topk, depth=spec.speculative_num_steps)
        meta_info.update(_figures(request_metrics(meta_info, shape)))


def _figures(counts: RequestMetrics) -> dict[str, float]:
    """Return our figures by their names in ``meta_info``."""
    return {
        "acceptance_length": counts.acceptance_length,
        "block_efficiency": counts.block_efficiency,
    }


def ours() -> bool:
    """Return whether this process serves with one of our algorithms."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm in TITLES


def _length(req: Any) -> int:
    """Return the number of tokens that the client gets."""
    return len(req.output_ids) if req.finished_len is None else req.finished_len


@cache
def counter(name: str, said: str, *labels: str) -> Any:
    """Return our counter of Prometheus, made when it first counts."""
    from prometheus_client import Counter  # SGLang must have set its folder of files first

    return Counter(f"eaglegbv:{name}", said, labels)
