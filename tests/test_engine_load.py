"""The engine under load: crowds, pre-emption, cancellation, shared texts; nothing leaks or differs.

Where target and drafter are tables nothing is rounded, so that every answer must be what the same
seed gives alone, token for token.
"""

import numpy as np
import pytest
from support.exact_engine import PLANS, VOCAB, Spec, exact_engine

from eaglegbv.params import SamplingParams
from eaglegbv.request import FinishReason, Request

REQUESTS, KINDS = 2_000, 150


def random_specs(rng: np.random.Generator, count: int) -> list[Spec]:
    """Prompts of random length, many of which begin alike, with random settings."""
    stems = [tuple(rng.integers(VOCAB, size=60).tolist()) for _ in range(3)]

    def prompt() -> tuple[int, ...]:
        stem = stems[rng.integers(3)][: rng.integers(0, 60)] if rng.random() < 0.6 else ()
        return (*stem, *rng.integers(VOCAB, size=rng.integers(1, 20)).tolist())

    def params() -> SamplingParams:
        return SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.4])),
            top_p=float(rng.choice([1.0, 0.9])),
            max_tokens=int(rng.integers(1, 16)),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
            seed=int(rng.integers(2**40)),
        )

    return [Spec(prompt(), params(), PLANS[rng.integers(len(PLANS))]) for _ in range(count)]


@pytest.mark.timeout(900)
def test_crowds_cancelled_and_preempted_at_random_answer_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    exact = exact_engine(slots=640, max_batch=24, prefill_tokens=96)
    specs = random_specs(rng, KINDS)
    queue = [specs[i] for i in rng.integers(KINDS, size=REQUESTS)]
    served: list[tuple[Request, Spec]] = []
    alive: list[Request] = []
    while queue or exact.engine.has_work:
        for _ in range(min(len(queue), int(rng.integers(0, 12)))):
            spec = queue.pop()
            alive.append(exact.add(spec, priority=int(rng.integers(2))))
            served.append((alive[-1], spec))
        exact.engine.step()
        alive = [request for request in alive if not request.finished]
        running = [request for request in alive if request.context]
        if running and rng.random() < 0.1:
            exact.engine.preempt(running[rng.integers(len(running))])
        if alive and rng.random() < 0.08:
            exact.engine.cancel(alive[rng.integers(len(alive))])
        exact.engine.check()
    assert exact.target.allocator.num_free == exact.target.allocator.num_slots
    reasons = [request.finish_reason for request, _ in served]
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert reasons.count(FinishReason.LENGTH) > 0.8 * REQUESTS
    # All that is to be tested did happen.
    assert exact.engine.preemptions > 100
    assert exact.engine.cache_counts.shared > 5_000
    assert exact.engine.cache_counts.forgotten > 100
    assert sum(r.metrics.preemptions > 1 for r, _ in served) > 5
    for request, spec in served:
        alone = exact.alone(spec)
        if request.finish_reason is FinishReason.LENGTH:
            assert request.token_ids == alone, spec
        assert request.token_ids == alone[: len(request.token_ids)], spec
