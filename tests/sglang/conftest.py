"""The models of these tests, which only read them."""

import pytest
from support.sglang_engine import GREEDY, PROMPTS, sglang_engine, token_ids
from support.sglang_pair import SGLangPair, save_sglang_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SGLangPair:
    return save_sglang_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def plain_greedy(pair: SGLangPair) -> list[list[int]]:
    """SGLang's greedy answers to ``PROMPTS`` without speculation; its engine has ended.

    Stopping an engine ends all child processes, those of others too: one at a time.
    """
    arguments = {"model_path": str(pair.target), "skip_tokenizer_init": True}
    with sglang_engine(**arguments, context_length=256) as engine:
        return token_ids(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY))
