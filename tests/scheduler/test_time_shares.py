"""A step's time goes to those it was spent for."""

import pytest

from eaglegbv.config import PLAIN
from eaglegbv.metrics import Phase
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.scheduler import PrefillChunk, StepBatch
from eaglegbv.scheduler.time_shares import share_seconds

SECONDS = {
    Phase.DRAFT: 0.1,
    Phase.FORWARD: 1.0,
    Phase.VERIFY: 0.2,
    Phase.COMMIT: 0.4,
    Phase.PREFILL: 0.3,
}


def request(number):
    return Request(
        number=number,
        prompt_ids=(0,),
        params=SamplingParams(),
        plan=PLAIN,
        stream=RequestRng(number),
        max_tokens=9,
    )


def test_a_mixed_forward_is_prefill_for_those_who_read_and_forward_for_those_who_decode():
    decoding, reading = [request(0), request(1)], [request(2), request(3)]
    portions = [PrefillChunk(r, count) for r, count in zip(reading, (60, 20), strict=True)]
    # 80 rows are read, 20 are those of two trees.
    share_seconds(StepBatch(decoding, portions), SECONDS, 100)
    for r in decoding:
        assert r.metrics.seconds == pytest.approx(
            {Phase.DRAFT: 0.05, Phase.FORWARD: 0.1, Phase.VERIFY: 0.05, Phase.COMMIT: 0.1}
        )
    # The forward's 0.8, half of what is common, and the drafter's part, by tokens.
    prefill = 0.8 + 0.3 + 0.3
    for r, share in zip(reading, (0.75, 0.25), strict=True):
        assert r.metrics.seconds == pytest.approx({Phase.PREFILL: prefill * share})
        assert r.metrics.decode_seconds == 0
    total = sum(sum(r.metrics.seconds.values()) for r in [*decoding, *reading])
    assert total == pytest.approx(sum(SECONDS.values()))


def test_without_prompts_all_time_is_shared_equally():
    decoding = [request(0), request(1)]
    seconds = {phase: s for phase, s in SECONDS.items() if phase is not Phase.PREFILL}
    share_seconds(StepBatch(decoding, []), seconds, 26)
    for r in decoding:
        assert r.metrics.seconds == pytest.approx({p: s / 2 for p, s in seconds.items()})


def test_a_step_that_only_reads_is_prefill_by_tokens():
    reading = [request(0), request(1)]
    portions = [PrefillChunk(r, count) for r, count in zip(reading, (30, 10), strict=True)]
    share_seconds(StepBatch([], portions), {Phase.PREFILL: 1.0, Phase.VERIFY: 0.2}, 40)
    assert reading[0].metrics.seconds == pytest.approx({Phase.PREFILL: 0.9})
    assert reading[1].metrics.seconds == pytest.approx({Phase.PREFILL: 0.3})
