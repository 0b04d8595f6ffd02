"""Shapes are those of models."""

import msgspec
import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.random_models import SHAPES, Shape

SMALL = Shape(hidden=32, layers=4, heads=2, kv_heads=1, intermediate=48, vocab=64, draft_vocab=24)


def test_known_shapes_are_sound() -> None:
    assert {"tiny", "llama-3.1-8b"} <= set(SHAPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "layers=3"),
        ({"heads": 3}, "heads=3"),
        ({"vocab": 0}, "vocab=0"),
        ({"kv_heads": 4}, "heads=2"),
    ],
)
def test_sizes_that_fit_no_model_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        msgspec.structs.replace(SMALL, **changes).__post_init__()
