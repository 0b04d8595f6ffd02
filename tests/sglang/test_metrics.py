"""Acceptance, from what SGLang counts."""

import pytest

from eaglegbv.backends.sglang.metrics import (
    acceptance_length,
    corrected,
    corrected_rate,
    request_metrics,
)
from eaglegbv.config import PLAIN, Plan


def test_acceptance_length_is_accepted_tokens_per_forward() -> None:
    assert acceptance_length([3, 5, 2, 1]) == pytest.approx((5 + 4 + 3) / 11)
    assert acceptance_length([]) == 0.0


def test_what_sglang_says_is_put_right() -> None:
    said = {
        "spec_accept_rate": 12 / 99,
        "spec_accept_length": 24 / 11,
        "spec_verify_ct": 11,
        "spec_correct_drafts_histogram": [3, 5, 2, 1],
        "id": "a",
    }
    right = corrected(said, length=3)
    assert right["acceptance_length"] == pytest.approx(12 / 11)
    assert right["block_efficiency"] == right["spec_accept_length"] == pytest.approx(23 / 11)
    assert right["spec_accept_rate"] == pytest.approx(12 / 33)
    assert right["id"] == "a"
    assert said["spec_accept_length"] == 24 / 11


def test_requests_without_verification_are_left_alone() -> None:
    assert corrected({"id": "b"}, length=3) == {"id": "b"}


def test_counts_of_a_request_as_the_local_engine_counts_them() -> None:
    said = {
        "prompt_tokens": 7,
        "completion_tokens": 24,
        "spec_correct_drafts_histogram": [3, 5, 2, 1],
    }
    counts = request_metrics(said, Plan(paths=2, depth=3))
    assert (counts.prompt_tokens, counts.committed_tokens) == (7, 23)
    assert (counts.target_forwards, counts.accepted_tokens, counts.drafted_nodes) == (11, 12, 66)
    assert counts.offered_by_depth == [11, 11, 11]
    assert counts.accepted_by_depth == [8, 3, 1]
    assert counts.acceptance_length == acceptance_length([3, 5, 2, 1])


def test_counts_without_speculation() -> None:
    counts = request_metrics({"prompt_tokens": 7, "completion_tokens": 24}, PLAIN)
    assert (counts.target_forwards, counts.committed_tokens) == (23, 23)
    assert counts.block_efficiency == 1.0
    assert counts.offered_by_depth == []


def test_rate_of_the_gauges() -> None:
    assert corrected_rate(2.5, length=3) == pytest.approx(0.5)
    assert corrected_rate(0.0, length=3) == 0.0
