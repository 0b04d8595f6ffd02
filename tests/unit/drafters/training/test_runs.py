import json
from pathlib import Path

import pytest
import torch
from support.output_layers import FAMILIES, family
from support.tiny_models import random_llama

from eaglegbv.drafters.training import train
from eaglegbv.drafters.training.data import Corpus, Document, fill_rows, join_documents, pack
from eaglegbv.drafters.training.unroll import FrozenTarget, KeptRuns, TargetRun
from eaglegbv.errors import InvalidArgument

WINDOW = 16
SIZES = {"num_hidden_layers": 4, "initializer_range": 0.3, "pad_token_id": 0}


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
def test_kept_runs_are_runs_of_the_target_rounded(layers: tuple[int, ...], tmp_path: Path) -> None:
    target = FrozenTarget(random_llama(32, seed=0, **SIZES), layers, WINDOW)
    corpus = corpus_of(9, 6, 12, 3, 16)
    kept = KeptRuns.over(target, corpus, tmp_path, seed=0)
    fresh = target.run(corpus, kept.rows)
    rows = kept.draw(2, seed=3)
    assert torch.equal(rows, kept.draw(2, seed=3))

    run = kept.of(rows)

    assert kept.done.nonzero().squeeze(1).tolist() == rows.sort().values.tolist()
    assert torch.equal(run.token_ids, fresh.token_ids[rows])
    assert torch.equal(run.is_response, fresh.is_response[rows])
    for name in ("features", "final_hidden"):
        actual, expected = getattr(run, name), getattr(fresh, name)[rows]
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)  # bfloat16
    drafted, position = torch.tensor([1, 4, 30]), torch.tensor([[0, 5, WINDOW - 1]] * 2)
    probs = run.probs_of(drafted)(position)
    names = ("token_ids", "is_response", "features", "final_hidden", "logits")
    some = TargetRun(**{name: getattr(fresh, name)[rows] for name in names})
    expected = some.probs_of(drafted)(position)
    torch.testing.assert_close(probs, expected, rtol=3e-2, atol=1e-3)

    # Another process, or a later one, reads the same files and runs the target over the rest.
    again = KeptRuns.over(target, corpus, tmp_path, seed=0)
    assert torch.equal(again.done, kept.done)
    again.of(torch.arange(len(kept.rows)))
    assert kept.done.all()
    assert torch.equal(again.features, kept.features)


def test_kept_runs_of_other_texts_are_refused(tmp_path: Path) -> None:
    target = FrozenTarget(random_llama(32, seed=0, **SIZES), (), WINDOW)
    KeptRuns.over(target, corpus_of(9, 6), tmp_path, seed=0)
    with pytest.raises(InvalidArgument, match=r"^keep_runs="):
        KeptRuns.over(target, corpus_of(9, 7), tmp_path, seed=0)


def test_rows_shorter_than_the_window(tmp_path: Path) -> None:
    target = FrozenTarget(random_llama(32, seed=0, **SIZES), (), window=64)
    corpus = corpus_of(2)  # its row is filled up with itself, and still ends early
    kept = KeptRuns.over(target, corpus, tmp_path, seed=0)
    run = kept.of(kept.draw(4, seed=0))
    assert run.token_ids.shape == (1, 64)
    real = (run.token_ids == 1).sum()
    assert 2 <= real < 64
    assert not run.is_response[0, real:].any()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_that_are_more_than_a_product_are_computed_again(name: str, tmp_path: Path) -> None:
    corpus = corpus_of(9, 6)
    target = FrozenTarget(family(name, 32), (), WINDOW)
    kept = KeptRuns.over(target, corpus, tmp_path, seed=0)
    rows = torch.arange(len(kept.rows))
    fresh = target.run(corpus, kept.rows)
    drafted = torch.tensor([1, 5, 30])
    read = torch.arange(fresh.token_ids.shape[1]).expand(len(rows), -1)
    again = kept.of(rows).probs_of(drafted)(read)
    # Last hidden states are kept in bfloat16.
    torch.testing.assert_close(again, fresh.probs_of(drafted)(read), atol=0.05, rtol=0.0)


@pytest.mark.parametrize(
    "damaged",
    [
        b"\0" * 40,
        b'{"step": 10, "lo{"step": 20, "loss": 1.0}',
        b"3",
        b"null",
        b'{"loss": 1.0}',
        b'{"step": "20"}',
        b"\xff\xfe\r\x85",
        b"",
    ],
)
def test_a_damaged_line_of_a_log_costs_no_other_line(damaged, tmp_path, caplog) -> None:
    sound = [
        {"step": 10, "loss": 2.0},
        {"step": 20, "score": float("nan"), "held_out": {"a": float("inf")}},
        {"step": 23, "score": 1.0},  # of the end of the run, which comes later now
        {"step": 30, "loss": 1.0},
        {"step": 40, "loss": 0.5},  # after the checkpoint
    ]
    lines = [json.dumps(entry).encode() for entry in sound]
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\n".join([lines[0], damaged, *lines[1:], b'{"step": 50, "lo']))
    train._drop_repeated(log, 30, 20)
    assert log.read_bytes() == b"".join(lines[n] + b"\n" for n in (0, 1, 3))
    assert f"1 damaged lines of {log} are left out" in caplog.text
    caplog.clear()
    train._drop_repeated(log, 0, 20)  # a run that begins anew
    assert log.read_bytes() == b""
    assert not caplog.text
