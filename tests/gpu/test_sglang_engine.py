"""The distribution of the text with SGLang's compiled kernels and CUDA graphs."""

import pytest
import torch
from support.g_test import g_test, joint_probs
from support.sglang_engine import PROMPT, missing_sglang, pair_arguments, token_ids
from support.sglang_pair import VOCAB, SGLangPair, save_sglang_pair

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
def test_distribution_of_three_tokens(
    verifier: str, head: str, K: int, L: int, pair: SGLangPair
) -> None:
    from eaglegbv.backends.sglang import Settings, engine

    own = pair_arguments(pair, head, K, L)
    for name in list(own):
        if name.startswith(("speculative_", "model_path")):
            del own[name]
    settings = Settings(verifier=verifier)
    drafter = getattr(pair, head)
    # FlashInfer and FlashAttention have neither float32 nor heads of 16.
    own |= {"dtype": "float32", "attention_backend": "triton"}
    started = engine(pair.target, drafter, paths=K, depth=L, settings=settings, **own)
    try:
        for temperature, top_p in ((1.0, 1.0), (0.7, 0.9)):
            params = {"temperature": temperature, "top_p": top_p, "max_new_tokens": 5}
            texts: list[list[int]] = []
            while len(texts) < SAMPLES:
                texts += token_ids(
                    started.generate(
                        input_ids=[PROMPT] * 1000, sampling_params=params | {"ignore_eos": True}
                    )
                )
            dist = joint_probs(pair.next_probs(temperature, top_p), PROMPT, 3)
            cells = [(a * VOCAB + b) * VOCAB + c for a, b, c, *_ in texts]
            outcome = g_test(cells, dist)
            assert outcome.p_value > 1e-4, outcome
    finally:
        started.shutdown()
