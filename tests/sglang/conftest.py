"""The models of these tests, which only read them."""

import pytest
from support.sglang_engine import plain_greedy_texts
from support.sglang_pair import SGLangPair, save_sglang_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SGLangPair:
    return save_sglang_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def plain_greedy(pair: SGLangPair) -> list[list[int]]:
    """SGLang's greedy answers to ``PROMPTS`` without speculation; its engine has ended."""
    return plain_greedy_texts(pair)
