"""What a user sets once: how to speculate, and how large the engine is."""

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import Law

MAX_PATHS = 16
MAX_DEPTH = 32
MAX_WIDTH = 1024


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How one request speculates. Every plan gives the same law of the text; only speed differs.

    Attributes:
        verifier: Name of a verifier (see ``eaglegbv.verifiers.registry``), or ``"none"`` for plain
            autoregressive decoding.
        paths: Number of drafted paths, K.
        depth: Number of drafted tokens of a path, L.
        law: How the tree's children arise; ``None`` takes the verifier's own (``iid`` where it
            accepts sampled paths, else the one it is made for). A tree has at most
            ``paths * depth`` drafted nodes:
            ``iid``: K paths drawn independently from the root on.
            ``wor``: K paths whose first tokens are drawn without replacement, one path below each.
            ``greedy``: K paths whose first tokens are the K - 1 most likely ones and one drawn from
            the rest; below each, one path of drawn tokens.
            ``hub``: pairs of drafts below the ``K // 2`` most likely nodes of each level; K is at
            least 2.
            ``fixed``: the ``paths * depth`` most likely nodes that a beam of K finds.
        draft_width: Number of candidates a draft law keeps, most likely first; the law is
            renormalised on them.
        draft_temperature: Temperature of the draft law as a multiple of the request's own. A free
            choice: any value is lossless.

    At temperature 0 all sampled paths coincide, so a ``fixed`` tree of ``paths * depth`` nodes is
    drafted and judged by the greedy walk, whatever verifier is named.

    Raises:
        InvalidArgument: A value is out of range; the message says which and what is accepted.
    """

    verifier: str = "otbv"
    paths: int = 3
    depth: int = 4
    law: Law | None = None
    draft_width: int = 64
    draft_temperature: float = 1.0

    def __post_init__(self) -> None:
        _require_range("paths", self.paths, 1, MAX_PATHS)
        _require_range("depth", self.depth, 1, MAX_DEPTH)
        _require_range("draft_width", self.draft_width, 1, MAX_WIDTH)
        if not isinstance(self.verifier, str):
            raise InvalidArgument("verifier", self.verifier, "the name of a verifier, or 'none'")
        if self.law is not None and not isinstance(self.law, Law):
            if self.law not in list(Law):
                raise InvalidArgument("law", self.law, f"one of {', '.join(sorted(Law))}")
            msgspec.structs.force_setattr(self, "law", Law(self.law))
        temperature = self.draft_temperature
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise InvalidArgument("draft_temperature", temperature, "a number in [0.05, 20]")
        if not 0.05 <= temperature <= 20:
            raise InvalidArgument("draft_temperature", temperature, "a number in [0.05, 20]")

    @property
    def speculative(self) -> bool:
        """Whether anything is drafted at all."""
        return self.verifier != "none"

    @property
    def tree_nodes(self) -> int:
        """Most nodes a tree of this plan has, the root included."""
        return 1 + self.paths * self.depth if self.speculative else 1


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and the seed of an engine.

    Attributes:
        max_batch: Requests that decode together at most; others wait.
        kv_slots: Tokens the KV pool holds, all requests together.
        seed: Seed from which requests without one of their own derive theirs.
    """

    max_batch: int = 16
    kv_slots: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        _require_range("max_batch", self.max_batch, 1, 4096)
        _require_range("kv_slots", self.kv_slots, 16, 2**31 - 1)
        _require_range("seed", self.seed, 0, 2**64 - 1)


def _require_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(name, value, f"an integer in [{low}, {high}]")


PLAIN = Plan(verifier="none", paths=1, depth=1)
"""Plain autoregressive decoding."""
