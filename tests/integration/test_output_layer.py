"""A head that knows its target is accepted whole, whatever the family does with its logits."""

from pathlib import Path

import pytest
from support.output_layers import FAMILIES, save_with_perfect_head
from support.saved_pair import save_pair
from transformers import AutoTokenizer

from eaglegbv import LLM, EngineConfig, Plan
from eaglegbv.sampling import SamplingParams

DEPTH = 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_perfect_head_is_accepted_whole(name: str, tmp_path: Path) -> None:
    target, head = save_pair(tmp_path)
    vocab = len(AutoTokenizer.from_pretrained(target))
    save_with_perfect_head(name, vocab, target, head)
    plan = Plan(verifier="token", paths=1, depth=DEPTH, draft_width=vocab)
    llm = LLM(target, head, plan=plan, engine=EngineConfig(kv_slots=512))
    params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    metrics = llm.generate([5, 6, 7], params).metrics
    assert metrics.block_efficiency > DEPTH + 0.9
