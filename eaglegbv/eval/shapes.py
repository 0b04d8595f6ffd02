"""Sizes of models with random weights."""

from collections.abc import Mapping

import msgspec

from eaglegbv.errors import InvalidArgument


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-like target and of an EAGLE-3 head for it.

    Attributes:
        hidden: Width of a hidden state.
        layers: Number of decoder layers, at least 4.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        intermediate: Width of the feed-forward layers.
        vocab: Number of tokens.
        draft_vocab: Number of tokens the head can draft.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    draft_vocab: int

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")
        if self.layers < 4:
            raise InvalidArgument("layers", self.layers, "at least 4, of which a head reads three")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InvalidArgument(
                "heads", self.heads, f"a divisor of {self.hidden}, multiple of {self.kv_heads}"
            )


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        hidden=256, layers=12, heads=4, kv_heads=2, intermediate=640, vocab=4096, draft_vocab=4096
    ),
    "llama-3.1-8b": Shape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        intermediate=14336,
        vocab=128_256,
        draft_vocab=32_000,
    ),
}
"""Shapes by name."""
