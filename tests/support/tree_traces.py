"""Traces with draft trees, made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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


PROMPT = TreeRecord(
    request=0,
    start=0,
    prompt_ids=(0, 1),
    plan="otbv 3x2",
    verifier="target_only",
    draft_sampling="fixed",
    paths=0,
    token_ids=(1,),
    parents=(0,),
    multiplicity=(0,),
    target_probs=(None,),
    draft_probs=(None,),
    node_stats={},
    accepted=(),
    next_token=2,
    next_target_prob=0.5,
    committed=(2,),
    finish_reason=None,
)
"""A prompt was read to its end: a tree of a root alone."""

TWICE = replace(
    PROMPT,
    start=1,
    prompt_ids=(),
    verifier="otbv",
    draft_sampling="iid",
    paths=3,
    token_ids=(2, 8, 3, 4, 5),
    parents=(0, 0, 0, 1, 2),
    multiplicity=(3, 2, 1, 2, 1),
    target_probs=(None, 0.5, 0.25, 0.125, 1e-7),
    draft_probs=(None, 0.25, 0.5, 0.0625, 0.75),
    node_stats={
        "b": (None, 0.4375, 0.3, 0.5, None),
        "w": (None, 1.0, None, 0.25, None),
        "h": (None, 1.0, None, 0.25, None),
    },
    accepted=(1,),
    next_token=6,
    next_target_prob=0.0625,
    committed=(8, 6),
)
"""Two of three paths go by node 1, which is accepted; their child is not."""

BONUS = replace(
    TWICE,
    start=3,
    plan="token 1x2",
    verifier="token",
    paths=1,
    token_ids=(6, 5, 7),
    parents=(0, 0, 1),
    multiplicity=(1, 1, 1),
    target_probs=(None, 0.5, 0.5),
    draft_probs=(None, 0.5, 0.5),
    node_stats={},
    accepted=(1, 2),
    next_token=1,
    next_target_prob=0.75,
    committed=(5, 7),
    finish_reason="length",
)
"""A whole path is accepted; the bonus token comes after the end of the text."""


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
