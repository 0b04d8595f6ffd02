"""The target's distribution kept as logits: the same numbers as a softmax, at the right nodes."""

import torch

from eaglegbv.tree import TargetProbs

BATCH, NODES, VOCAB = 3, 4, 50
# Padding nodes repeat the root's row.
ROWS = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6], [7, 7, 7, 7]])


def _logits():
    logits = 4 * torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[:, 10:20] = -torch.inf
    return logits


def test_probabilities_are_the_softmax_of_each_nodes_own_row():
    logits = _logits()
    dist = TargetProbs.of_logits(logits, ROWS)
    expected = logits.double().softmax(1)[ROWS]
    assert dist.vocab == VOCAB
    assert dist.log_normaliser.dtype == torch.float64
    ids = torch.randint(
        0, VOCAB, (BATCH, NODES, 7), generator=torch.Generator().manual_seed(1), dtype=torch.int64
    )
    got = dist.probs_at(ids)
    assert got.dtype == torch.float64
    # The normaliser is summed in float32 and of size 10: its rounding is 10 * 6e-8 relative.
    torch.testing.assert_close(got, expected.gather(2, ids), atol=0, rtol=1e-6)
    for node in range(NODES):
        whole = dist.probs_of(torch.full((BATCH,), node))
        torch.testing.assert_close(whole, expected[:, node], atol=0, rtol=1e-6)


def test_warped_rows_have_the_same_normaliser_and_are_broken_alike():
    logits = _logits()
    logits -= logits.amax(dim=1, keepdim=True)
    logits[4, 3] = torch.nan
    dist, expected = TargetProbs.of_warped(logits, ROWS), TargetProbs.of_logits(logits, ROWS)
    assert dist.log_normaliser.dtype == torch.float64
    torch.testing.assert_close(
        dist.log_normaliser, expected.log_normaliser, atol=1e-6, rtol=1e-6, equal_nan=True
    )
    assert dist.log_normaliser.isnan().nonzero().tolist() == [[4]]


def test_one_node_per_request_may_be_asked_for():
    dist = TargetProbs.of_logits(_logits(), ROWS)
    nodes = torch.tensor([2, 0, 3])
    expected = torch.stack([dist.probs_of(torch.full((BATCH,), n))[b] for b, n in enumerate(nodes)])
    assert torch.equal(dist.probs_of(nodes), expected)


def test_both_ways_to_ask_agree_to_the_bit():
    dist = TargetProbs.of_logits(_logits(), ROWS)
    ids = torch.arange(VOCAB).expand(BATCH, NODES, VOCAB)
    for node in range(NODES):
        whole = dist.probs_of(torch.full((BATCH,), node))
        assert torch.equal(dist.probs_at(ids)[:, node], whole)


def test_excluded_tokens_have_probability_zero_exactly():
    dist = TargetProbs.of_logits(_logits(), ROWS)
    assert (dist.probs_of(torch.zeros(BATCH, dtype=torch.int64))[:, 10:20] == 0).all()
    ids = torch.full((BATCH, NODES, 1), 15)
    assert (dist.probs_at(ids) == 0).all()


def test_probabilities_of_a_table_come_back_with_their_zeros():
    probs = torch.rand(
        (BATCH, NODES, VOCAB), generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    probs[:, :, :5] = 0
    probs /= probs.sum(2, keepdim=True)
    dist = TargetProbs.of_probs(probs)
    for node in range(NODES):
        whole = dist.probs_of(torch.full((BATCH,), node))
        # exp(log p) in float64: |log p| < 20 times 1e-16
        torch.testing.assert_close(whole, probs[:, node], atol=0, rtol=1e-14)
        assert (whole[:, :5] == 0).all()


def test_a_broken_row_breaks_its_own_node_alone():
    logits = _logits()
    logits[4, 3] = torch.nan
    dist = TargetProbs.of_logits(logits, ROWS)
    finite = dist.log_normaliser[ROWS].isfinite()
    assert finite.tolist() == [[True] * 4, [True, False, True, True], [True] * 4]
    assert dist.probs_of(torch.tensor([1, 1, 1])).isnan().any(1).tolist() == [False, True, False]
