"""Counts of a request and the figures made of them, by hand."""

import msgspec

from eaglegbv.metrics import Phase, RequestMetrics


def test_figures_of_a_request_that_did_nothing_are_zero():
    metrics = RequestMetrics()
    assert metrics.acceptance_length == 0
    assert metrics.block_efficiency == 0
    assert metrics.acceptance_by_depth == []
    assert metrics.decode_seconds == 0


def test_counts_of_forwards_that_offer_trees_of_different_depth():
    metrics = RequestMetrics()
    metrics.count_forward(offered=2, accepted=1, committed=2, nodes=5, plan="none")
    metrics.count_forward(offered=4, accepted=4, committed=5, nodes=9, plan="none")
    metrics.count_forward(offered=3, accepted=0, committed=1, nodes=6, plan="none")
    metrics.count_forward(offered=0, accepted=0, committed=1, nodes=0, plan="none")
    assert metrics.target_forwards == 4
    assert metrics.committed_tokens == 9
    assert metrics.accepted_tokens == 5
    assert metrics.drafted_nodes == 20
    assert metrics.offered_by_depth == [3, 3, 2, 1]
    assert metrics.accepted_by_depth == [2, 1, 1, 1]
    assert metrics.acceptance_by_depth == [2 / 3, 1 / 3, 1 / 2, 1.0]
    assert metrics.acceptance_length == 5 / 4
    assert metrics.block_efficiency == 9 / 4
    # Nothing was cut: every forward committed what it accepted and one token more.
    assert metrics.block_efficiency == metrics.acceptance_length + 1


def test_plain_decoding_has_block_efficiency_one():
    metrics = RequestMetrics()
    for _ in range(3):
        metrics.count_forward(offered=0, accepted=0, committed=1, nodes=0, plan="none")
    assert metrics.block_efficiency == 1
    assert metrics.acceptance_length == 0
    assert metrics.offered_by_depth == []


def test_requests_do_not_share_their_counts():
    first, second = RequestMetrics(), RequestMetrics()
    first.count_forward(offered=1, accepted=1, committed=2, nodes=1, plan="none")
    first.add_seconds(Phase.DRAFT, 1.0)
    assert second.offered_by_depth == []
    assert second.seconds == {}


def test_seconds_add_up_by_phase_and_prefill_is_not_decoding():
    metrics = RequestMetrics()
    for phase, seconds in [(Phase.PREFILL, 8.0), (Phase.DRAFT, 1.0), (Phase.FORWARD, 2.0)]:
        metrics.add_seconds(phase, seconds)
        metrics.add_seconds(phase, seconds / 2)
    assert metrics.seconds == {Phase.PREFILL: 12.0, Phase.DRAFT: 1.5, Phase.FORWARD: 3.0}
    assert metrics.decode_seconds == 4.5


def test_counts_survive_a_round_trip_through_json():
    metrics = RequestMetrics(prompt_tokens=3)
    metrics.count_forward(offered=2, accepted=1, committed=2, nodes=4, plan="none")
    metrics.add_seconds(Phase.VERIFY, 0.25)
    assert msgspec.json.decode(msgspec.json.encode(metrics), type=RequestMetrics) == metrics
