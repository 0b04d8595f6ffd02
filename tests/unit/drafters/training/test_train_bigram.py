import json
import shutil

import pytest
import torch
from scipy.sparse import csr_array
from support.examples import load_example
from support.tiny_pair import example

from eaglegbv.drafters.tabular import LookupTable
from eaglegbv.drafters.training.data import Document, Texts, join_documents
from eaglegbv.errors import InvalidArgument

VOCAB = 5
bigram = load_example("train_bigram")
count_pairs, cross_entropy, smoothed = bigram.count_pairs, bigram.cross_entropy, bigram.smoothed


def pairs() -> csr_array:
    chat = Document(0, [0, 1, 1, 2, 1, 2], [False, False, True, True, True, True])
    prose = Document(1, [3, 1, 2], [True] * 3)
    corpus = join_documents([chat, prose], ("a", "b"))
    return count_pairs(corpus, VOCAB)


def test_pairs_are_those_the_assistant_continued() -> None:
    counts = pairs().todok()
    # None across documents.
    assert dict(counts.items()) == {(1, 1): 1, (1, 2): 3, (2, 1): 1, (3, 1): 1}


@pytest.mark.parametrize("width", [2, VOCAB, 9])
def test_a_table_is_the_smoothed_distribution_cut_to_the_likeliest(width: int) -> None:
    found, prior = pairs(), 2.0
    table = smoothed(found, prior, width)
    dense = torch.from_numpy(found.toarray())
    unigram = (1 + dense.sum(0)) / (1 + dense.sum(0)).sum()
    expected = (dense + prior * unigram) / (dense.sum(1, keepdim=True) + prior)
    rows = [*expected, unigram]
    for state, dist in enumerate(rows):
        got = table.logits([state])[0].double().exp()
        kept = dist.topk(min(width, VOCAB)).values
        assert got.sort(descending=True).values[: len(kept)].tolist() == pytest.approx(
            kept.tolist(), rel=1e-6
        )
        listed = got > 0
        assert got[listed].tolist() == pytest.approx(dist[listed].tolist(), rel=1e-6)


def test_cross_entropy_is_that_of_the_smoothed_distribution() -> None:
    found, prior = pairs(), 2.0
    whole = smoothed(found, prior, VOCAB)
    dense = torch.from_numpy(found.toarray())
    logs = whole.logits(range(VOCAB)).double()
    expected = float(-(dense * logs).sum() / dense.sum())
    assert cross_entropy(found, prior, found) == pytest.approx(expected, rel=1e-6)


def test_it_writes_a_table_of_the_targets_vocabulary(target, chats, tmp_path):
    assert "held-out cross-entropy" in bigram.main(str(target), str(chats), str(tmp_path))
    facts = json.loads((tmp_path / "config.json").read_text())
    assert set(facts["tokens"]) == {"counting", "prose"}
    table = LookupTable.load(tmp_path, vocab_size=facts["vocab_size"])
    # The text is a fox and numbers: what follows a token is far from the unigram distribution.
    assert facts["held_out_cross_entropy"] < 3.5
    assert table.ids.shape == (facts["vocab_size"] + 1, 256)


def test_a_tokenizer_of_older_files(target, chats, tmp_path) -> None:
    folder = shutil.copytree(target, tmp_path / "target")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "chat_template": example.CHAT_TEMPLATE}
    settings |= {"bos_token": example.BOS, "eos_token": example.END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "held-out cross-entropy" in bigram.main(str(folder), str(chats), str(tmp_path))


def test_a_table_without_data_or_width_is_refused(target, chats, tmp_path) -> None:
    empty = join_documents([Document(0, [1, 2], [True, False])], ("a",))
    with pytest.raises(InvalidArgument, match=r"^data="):
        count_pairs(empty, VOCAB)
    with pytest.raises(InvalidArgument, match=r"^width=0"):
        bigram.train_bigram(Texts(empty, empty), tmp_path, vocab=VOCAB, width=0)
    with pytest.raises(InvalidArgument, match=r"^samples='nothing'"):
        bigram.main(str(target), str(chats), str(tmp_path), "nothing")
