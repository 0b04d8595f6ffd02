"""Runs of the target that heads are trained on: kept ones are the fresh ones, rounded."""

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from eaglegbv.drafters.training.data import Corpus, Document, fill_rows, join_documents, pack
from eaglegbv.drafters.training.runs import FreshRuns, FrozenTarget, KeptRuns
from eaglegbv.errors import InvalidArgument

WINDOW = 16
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "granite":
        return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def corpus_of(*lengths: int) -> Corpus:
    """Texts whose tokens tell which text they are of; the last half of each is a response."""
    texts = [
        Document(0, [i % 32] * length, [j >= length // 2 for j in range(length)])
        for i, length in enumerate(lengths, start=1)
    ]
    return join_documents(texts, ("only",))


def test_rows_hold_every_document_whole() -> None:
    lengths = torch.randint(2, WINDOW + 1, (50,), generator=torch.Generator().manual_seed(1))
    rows = fill_rows(lengths, WINDOW, seed=0)
    whole = lengths[rows].cumsum(1) <= WINDOW
    assert set(rows[whole].tolist()) == set(range(50))
    # First fit of long ones first needs at most 11/9 of the fewest rows possible, plus one.
    assert len(rows) <= 11 / 9 * (int(lengths.sum()) / WINDOW + 1) + 1
    assert pack(corpus_of(*lengths.tolist()), rows, WINDOW).is_real.all()
    assert torch.equal(rows, fill_rows(lengths, WINDOW, seed=0))


@pytest.mark.parametrize("layers", [(), (1, 2, 3)])
def test_kept_runs_are_runs_of_the_target_rounded(layers: tuple[int, ...]) -> None:
    target = FrozenTarget(model_of("llama"), layers, WINDOW)
    corpus = corpus_of(9, 6, 12, 3, 16)
    kept = KeptRuns.over(target, corpus, batch=2, seed=0)
    fresh = target.run(corpus, fill_rows(corpus.lengths, WINDOW, seed=0))

    drawn = [kept.draw(seed) for seed in range(20)]

    seen = set()
    for run in drawn:
        assert run.token_ids.shape == (2, WINDOW)
        for i, token_ids in enumerate(run.token_ids):
            [row] = (fresh.token_ids == token_ids).all(dim=1).nonzero().squeeze(1).tolist()
            seen.add(row)
            assert torch.equal(run.is_response[i], fresh.is_response[row])
            for name in ("features", "final_hidden", "logits"):
                actual, expected = getattr(run, name)[i], getattr(fresh, name)[row]
                assert actual.dtype == torch.float32
                torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)  # bfloat16
    assert seen == set(range(len(fresh.token_ids)))
    assert torch.equal(kept.draw(3).token_ids, drawn[3].token_ids)


def test_rows_shorter_than_the_window() -> None:
    target = FrozenTarget(model_of("llama"), (), window=64)
    corpus = corpus_of(2)  # its row is filled up with itself, and still ends early
    run = KeptRuns.over(target, corpus, batch=4, seed=0).draw(0)
    assert run.token_ids.shape == (1, 64)
    real = (run.token_ids == 1).sum()
    assert 2 <= real < 64
    assert not run.is_response[0, real:].any()


def test_fresh_runs_are_a_function_of_the_seed() -> None:
    target = FrozenTarget(model_of("llama"), (1, 2, 3), WINDOW)
    corpus = corpus_of(9, 6, 12)
    runs = FreshRuns(target, corpus, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), batch=3)
    first, again, other = runs.draw(0), runs.draw(0), runs.draw(1)
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.token_ids, other.token_ids)
    assert 2 not in first.token_ids  # of weight 0


def test_logits_that_are_more_than_a_product_are_refused() -> None:
    target = FrozenTarget(model_of("granite"), (), WINDOW)
    with pytest.raises(InvalidArgument, match=r"^keep_runs=True"):
        KeptRuns.over(target, corpus_of(9, 6), batch=2, seed=0)
