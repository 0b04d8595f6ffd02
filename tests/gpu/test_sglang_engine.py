"""The distribution of the text with SGLang's compiled kernels and CUDA graphs."""

import pytest
import torch
from support.sglang_engine import PROMPT, missing_sglang, three_tokens, token_ids
from support.sglang_pair import SGLangPair, save_sglang_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang())),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = 50_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SGLangPair:
    return save_sglang_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("verifier", "head", "K", "L"),
    [
        ("otbv", "eagle1", 3, 3),
        ("gbv", "eagle3", 3, 3),
        ("block", "eagle1", 1, 3),
        ("spectr_gbv", "eagle1", 2, 3),
    ],
)
def test_distribution_of_three_tokens(verifier, head, K, L, pair):
    from eaglegbv.backends.sglang import Settings, engine

    own = {"skip_tokenizer_init": True, "context_length": 256}
    # FlashInfer and FlashAttention have neither float32 nor heads of 16.
    own |= {"dtype": "float32", "attention_backend": "triton"}
    drafter, settings = getattr(pair, head), Settings(verifier=verifier)
    started = engine(pair.target, drafter, paths=K, depth=L, settings=settings, **own)
    try:
        for temperature, top_p in ((1.0, 1.0), (0.7, 0.9)):
            params = {"temperature": temperature, "top_p": top_p}
            same = params | {"max_new_tokens": 5, "ignore_eos": True}
            texts: list[list[int]] = []
            while len(texts) < SAMPLES:
                answers = started.generate(input_ids=[PROMPT] * 1000, sampling_params=same)
                texts += token_ids(answers)
            outcome = three_tokens(pair, texts, **params)
            assert outcome.p_value > 1e-4, outcome
    finally:
        started.shutdown()
