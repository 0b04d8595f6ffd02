"""A request's bookkeeping."""

import pytest
import torch

from eaglegbv.config import PLAIN
from eaglegbv.request import FinishReason, Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams


def request(prompt=(4, 5, 6), generated=(), step_slots=1, replayed=False):
    made = Request(
        number=0,
        prompt_ids=tuple(prompt),
        params=SamplingParams(),
        plan=PLAIN,
        stream=RequestRng(0),
        max_tokens=20,
        step_slots=step_slots,
        replayed=replayed,
    )
    made.token_ids = list(generated)
    return made


@pytest.mark.parametrize("generated", [(), (7,), (7, 8, 9)])
def test_tokens_from_a_position_are_those_of_the_whole_text(generated):
    whole = [4, 5, 6, *generated]
    for position in range(len(whole) + 2):
        assert request(generated=generated).tokens_from(position) == whole[position:]


def test_tokens_handed_out_are_a_copy():
    made = request(generated=(7, 8))
    for position in (0, 3):
        made.tokens_from(position).clear()
    assert made.token_ids == [7, 8]


def test_a_request_goes_from_waiting_to_running_to_finished():
    made = request()
    assert (made.prefilled, made.finished, made.context) == (False, False, 0)
    made.slots = torch.arange(3)
    made.token_ids.append(9)
    assert (made.prefilled, made.finished, made.context) == (True, False, 3)
    made.finish_reason = FinishReason.LENGTH
    assert made.finished


def test_slots_needed_are_the_text_and_those_of_the_least_step():
    assert request().slots_needed == 3 + 20 + 1
    assert request(step_slots=11).slots_needed == 3 + 20 + 1
    assert request(step_slots=11, replayed=True).slots_needed == 3 + 20 + 11


def test_requests_share_nothing_and_are_equal_to_themselves_alone():
    one, other = request(), request()
    assert one != other
    one.token_ids.append(1)
    one.metrics.target_forwards += 1
    assert other.token_ids == []
    assert other.metrics.target_forwards == 0
