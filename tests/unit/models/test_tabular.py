"""The toy target's distributions are the table's, through whatever slots and trees."""

import pytest
import torch
from support.packed_trees import Text, random_parents, scattered
from support.tabular_target import TabularTarget

from eaglegbv.errors import InvalidArgument
from eaglegbv.models.target import FeatureSpec

VOCAB = 5


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_trees_read_their_own_path(order: int, seed: int) -> None:
    target = TabularTarget(
        vocab_size=VOCAB, order=order, features=FeatureSpec.final(), max_slots=64
    )
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    texts = [Text(tokens(1)), Text(tokens(6))]
    prefills = [t.prefill(scattered(target.allocator, len(t.tokens), generator)) for t in texts]
    out = target.forward(prefills, logit_rows=torch.tensor([0, 6]))
    for row, text in zip(out.logits, texts, strict=True):
        assert torch.equal(row, target.logits_after(text.tokens))
    for _ in range(3):
        segments = [
            text.tree(
                tokens(7),
                random_parents(7, generator),
                scattered(target.allocator, 7, generator),
            )
            for text in texts
        ]
        out = target.forward(segments)
        assert out.features is not None
        rows = iter(zip(out.logits, out.features, strict=True))
        for text in texts:
            for node in range(7):
                logits, features = next(rows)
                expected = target.logits_after(text.text_at(node))
                assert torch.equal(logits, expected)
                ratio = expected / (target.output_embeddings @ features)
                torch.testing.assert_close(ratio, ratio[:1].expand(VOCAB), rtol=1e-3, atol=1e-3)
            text.commit(int(torch.randint(7, (1,), generator=generator)), target.allocator)
    target.allocator.check(text.slots for text in texts)


def test_a_seed_fixes_the_tables() -> None:
    first, again, other = (
        TabularTarget(vocab_size=VOCAB, seed=seed).logits_after([1, 2]) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_order_is_what_matters() -> None:
    target = TabularTarget(vocab_size=VOCAB, order=2)
    assert torch.equal(target.logits_after([0, 1, 2]), target.logits_after([4, 1, 2]))
    assert not torch.equal(target.logits_after([0, 2]), target.logits_after([1, 2]))
    assert not torch.equal(target.logits_after([2]), target.logits_after([1, 2]))


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgument, match="vocab_size=1"):
        TabularTarget(vocab_size=1)
    with pytest.raises(InvalidArgument, match="order=0"):
        TabularTarget(vocab_size=4, order=0)
    with pytest.raises(InvalidArgument, match="order=9"):
        TabularTarget(vocab_size=16, order=9)
    with pytest.raises(InvalidArgument, match="layers"):
        TabularTarget(vocab_size=4, features=FeatureSpec.layer_inputs([1]))
