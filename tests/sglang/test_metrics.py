"""Acceptance, from what SGLang counts."""

import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli import PAGES

from eaglegbv.backends.sglang import metrics
from eaglegbv.backends.sglang.metrics import COUNTERS, GREEDY, Delivered, request_metrics
from eaglegbv.config import PLAIN, Plan

SAID = {"prompt_tokens": 7, "completion_tokens": 24, "spec_correct_drafts_histogram": [3, 5, 2, 1]}


def test_counts_of_a_request_as_the_local_engine_counts_them():
    counts = request_metrics(SAID, Plan(paths=2, depth=3))
    assert (counts.prompt_tokens, counts.committed_tokens) == (7, 23)
    assert (counts.target_forwards, counts.accepted_tokens, counts.drafted_nodes) == (11, 12, 66)
    assert (counts.offered_by_depth, counts.accepted_by_depth) == ([11, 11, 11], [8, 3, 1])
    assert counts.acceptance_length == pytest.approx((5 + 4 + 3) / 11)
    assert counts.block_efficiency == pytest.approx(23 / 11)


@pytest.mark.parametrize(
    ("completion", "retractions", "committed", "accepted"),
    [(23, 0, 22, 12), (22, 0, 21, 11), (21, 0, 20, 10), (24, 1, 22, 12), (25, 1, 23, 12)],
)
def test_tokens_beyond_the_end_are_not_counted(completion, retractions, committed, accepted):
    """The token that the target adds is the first to fall away."""
    said = SAID | {"completion_tokens": completion, "num_retractions": retractions}
    counts = request_metrics(said, Plan(paths=2, depth=3))
    assert (counts.committed_tokens, counts.accepted_tokens) == (committed, accepted)


def test_counts_without_speculation():
    counts = request_metrics({"prompt_tokens": 7, "completion_tokens": 24}, PLAIN)
    assert (counts.target_forwards, counts.committed_tokens) == (23, 23)
    assert (counts.block_efficiency, counts.offered_by_depth) == (1.0, [])


def req(*output_ids: int, finished_len: int | None = None, top_k: int = -1) -> SimpleNamespace:
    """What is read of SGLang's requests."""
    own = SimpleNamespace(output_ids=[*output_ids], finished_len=finished_len, is_retracted=False)
    own.finished = lambda: own.finished_len is not None
    own.sampling_params = SimpleNamespace(top_k=top_k)
    return own


def test_the_scheduler_counts_what_was_delivered(monkeypatch, caplog):
    monkeypatch.setattr(metrics, "ours", lambda: True)
    monkeypatch.setattr(metrics, "served_verifier", lambda: "gbv")
    reporter = SimpleNamespace(
        forward_ct_decode=0,
        decode_log_interval=2,
        is_stats_logging_rank=True,
        current_scheduler_metrics_enabled=True,
        metrics_collector=SimpleNamespace(labels={"model": "m"}),
    )
    rounds = Counter({("3x4", "held"): 3})
    worker = SimpleNamespace(adaptive_controller=SimpleNamespace(rounds=rounds))
    processor = SimpleNamespace(metrics_reporter=reporter, model_worker=worker)
    going, ending, ended = req(5), req(5, top_k=1), req(5, 6, finished_len=2)
    counted: Counter[tuple[str, str]] = Counter()

    def counter(name: str, said: str, *labels: str) -> SimpleNamespace:
        assert labels == ("model", "plan", "why") if name == "rounds" else ("model", "verifier")
        assert said

        def labelled(*, model: str, **by: str) -> SimpleNamespace:
            assert model == "m"
            return SimpleNamespace(inc=lambda n: counted.update({(name, *by.values()): n}))

        return SimpleNamespace(labels=labelled)

    monkeypatch.setattr(metrics, "counter", counter)
    delivered = Delivered()

    def process(_: object, batch: Any, result: Any) -> None:
        """Every request commits as many tokens; one ends with its second."""
        for req, correct in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
            req.output_ids += [9] * (correct + 1)
        ending.finished_len = 3
        reporter.forward_ct_decode += 1

    with caplog.at_level("INFO"):
        for _ in range(2):
            batch = SimpleNamespace(reqs=[going, ending, ended])
            result = SimpleNamespace(
                num_correct_drafts_per_req_cpu=[1, 3, 3], speculative_num_draft_tokens=7
            )
            delivered.process(process, processor, batch, result)
    # Rounds of 2 and 2 tokens by the first, and one by the second, of whose 4 tokens 2 count.
    assert counted == {
        ("verifications", "gbv"): 2,
        ("drafted_tokens", "gbv"): 12,
        ("accepted_tokens", "gbv"): 2,
        ("committed_tokens", "gbv"): 4,
        ("verifications", GREEDY): 1,
        ("drafted_tokens", GREEDY): 6,
        ("accepted_tokens", GREEDY): 2,
        ("committed_tokens", GREEDY): 2,
        ("rounds", "3x4", "held"): 3,
    }
    assert "acceptance length: 1.33, block efficiency: 2.00, verifications: 3" in caplog.text
    assert delivered.counts.target_forwards == 0


def test_the_panel_asks_for_what_is_counted_and_fits_one_screen():
    file = PAGES["sglang.md"].with_name("sglang_grafana.json")
    panel = json.loads(file.read_text(encoding="utf-8"))
    asked: set[str] = set()
    for box in panel["panels"]:
        place = box["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert place["y"] + place["h"] <= 20  # of 38 pixels: what a usual screen shows
        for target in box["targets"]:
            asked.update(re.findall(r"eaglegbv:(\w+)", target["expr"]))
            assert "[$__rate_interval]" in target["expr"]
    assert asked == {f"{name}_total" for name in COUNTERS}
    page = PAGES["sglang.md"].read_text(encoding="utf-8")
    assert all(f"`eaglegbv:{name}_total`" in page for name in COUNTERS)
