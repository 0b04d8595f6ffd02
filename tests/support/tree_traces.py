"""Traces with draft trees, made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from eaglegbv.metrics import Phase, Span, StepRecord, TreeRecord
from eaglegbv.trace import Tracer

NASTY = "</script><script>alert(1)</script> <!-- \u2028 &amp; 'quoted' \"twice\" <b>"
LONG = "supercalifragilisticexpialidocious" * 9
TEXTS = {
    0: "<s>", 1: " the", 2: " cat", 3: NASTY, 4: LONG, 5: "\n", 6: "日本語日本語日本語", 7: "",
    8: " sat"
}  # fmt: skip
"""Texts of token ids; others are their digits."""


def decode(token_ids: list[int]) -> str:
    return "".join(TEXTS.get(token, f" {token}") for token in token_ids)


# A prompt was read to its end: a tree of a root alone. Then two of three paths go by node 1, which
# is accepted, and their child is not. At last a whole path is, and the bonus token comes after the
# end of the text.
PROMPT, TWICE, BONUS = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=tuple[TreeRecord, TreeRecord, TreeRecord]
)


def bush(nodes: int, *, request: int = 1) -> TreeRecord:
    """A tree of many nodes: a root of ``nodes // 2`` children with a child each."""
    half = nodes // 2
    return replace(
        PROMPT,
        request=request,
        prompt_ids=(),
        plan="otbv fixed",
        paths=half,
        token_ids=(0, *range(10, 10 + 2 * half)),
        parents=(0, *[0] * half, *range(1, half + 1)),
        multiplicity=(half, *[1] * (2 * half)),
        target_probs=(None, *[1 / (2 * half)] * (2 * half)),
        draft_probs=(None, *[None] * (2 * half)),
        accepted=(half, 2 * half),
        next_token=9,
        next_target_prob=0.25,
        committed=(9 + half, 9 + 2 * half, 9),
    )


def step(number: int, trees: Sequence[TreeRecord] = (), *, committed: int = 0) -> StepRecord:
    """A step of ten milliseconds, one second after the one before it."""
    committed = committed or sum(len(tree.committed) for tree in trees)
    return StepRecord(
        number=number,
        started=100.0 + number,
        seconds=0.010,
        spans=(Span(Phase.DRAFT, 0.0, 0.004), Span(Phase.FORWARD, 0.004, 0.005)),
        requests=1,
        prefilling=0,
        waiting=0,
        nodes=6,
        accepted=max(0, committed - 1),
        committed=committed,
        plans={"otbv 2x3": 1},
        reasons={"fixed": 1},
        kv_used=3,
        kv_slots=9,
        trees=trees,
    )


STEPS: tuple[tuple[TreeRecord, ...], ...] = ((PROMPT,), (TWICE, bush(120)), (BONUS,))


def write_trace(path: Path, steps: Sequence[Sequence[TreeRecord]] = STEPS) -> Path:
    with Tracer(path, decode=decode) as tracer:
        for number, trees in enumerate(steps):
            tracer.on_step(step(number, trees))
    return path
