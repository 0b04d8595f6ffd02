"""Acceptance, from what SGLang counts."""

import pytest

from eaglegbv.backends.sglang.metrics import acceptance_length, corrected


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
