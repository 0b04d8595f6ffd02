"""What the documentation shows starts on GPUs that are not here: its arguments."""

import pytest
from support.sglang_engine import NEEDS_SGLANG
from support.sglang_machines import MACHINES, resolved_on
from support.sglang_pair import SGLangPair

from eaglegbv.backends.sglang.launch import Launch, launch
from eaglegbv.backends.sglang.settings import Settings

pytestmark = NEEDS_SGLANG


def start(pair: SGLangPair, verifier: str, paths: int, depth: int, *others: str) -> Launch:
    settings = Settings(verifier=verifier)
    return launch(
        pair.target, pair.eagle3, paths=paths, depth=depth, settings=settings, others=others
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_trees_and_chains_start(machine, pair):
    options = [[], ["--tp", "2"], ["--mem-fraction-static", "0.8"], ["--page-size", "1"]]
    trees = resolved_on(machine, [start(pair, "otbv", 3, 4, *words) for words in options])
    chains = resolved_on(machine, [start(pair, "block", 1, 4, *words) for words in options])
    assert {tree.get("refused") for tree in trees} == {None}
    assert {chain.get("refused") for chain in chains} == {None}
    for tree, chain in zip(trees, chains, strict=True):
        assert tree["speculative_num_draft_tokens"] == 13
        assert chain["speculative_num_draft_tokens"] == 5
        assert tree["max_running_requests"] == chain["max_running_requests"] == 48
        assert tree["attention_backend"] == "flashinfer"
        assert not tree["disable_overlap_schedule"]
    backends = {"A100": "flashinfer", "H100": "fa3", "H200": "fa3", "B200": "trtllm_mha"}
    assert {chain["attention_backend"] for chain in chains} == {backends[machine]}


def test_what_is_refused_says_what_helps(pair):
    """On a B200 SGLang takes pages of 64 for chains, whatever is said of pages."""
    stateful = [
        start(pair, "greedy_block", 1, 4),
        start(pair, "greedy_block", 1, 4, "--attention-backend", "flashinfer"),
        start(pair, "otbv", 3, 4, "--attention-backend", "trtllm_mha"),
        start(pair, "otbv", 3, 4, "--attention-backend", "flashinfer"),
    ]
    refused, served, trees, flashinfer = resolved_on("B200", stateful)
    assert "--attention-backend flashinfer" in refused["refused"]
    assert "refused" not in served
    assert "use flashinfer" in trees["refused"]
    assert "refused" not in flashinfer
