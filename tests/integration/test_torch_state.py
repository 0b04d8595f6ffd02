"""A caller's own torch state stays outside: models load, and requests are answered, as ever."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch

from eaglegbv import LLM, EngineConfig, Plan
from eaglegbv.sampling import SamplingParams

STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "default device": partial(torch.device, "meta"),
}
PARAMS = SamplingParams(max_tokens=10, seed=3)
ENGINE = EngineConfig(kv_slots=512, check_slots=True)


def load(pair: tuple[Path, Path]) -> LLM:
    return LLM(*pair, plan=Plan(verifier="otbv", paths=2, depth=3), engine=ENGINE)


@pytest.fixture(scope="module")
def llm(saved_pair: tuple[Path, Path]) -> LLM:
    return load(saved_pair)


@pytest.mark.parametrize("name", STATES)
def test_requests_are_answered_as_elsewhere(llm: LLM, name: str) -> None:
    expected = llm.generate("hello", PARAMS)
    with STATES[name]():
        answer = llm.generate("hello", PARAMS)
        streamed = "".join(piece.text for piece in llm.stream("hello", PARAMS))
        llm.reset_prefix_cache()
    assert answer.token_ids == expected.token_ids
    assert streamed == expected.text


@pytest.mark.parametrize("name", STATES)
def test_models_load_as_elsewhere(saved_pair: tuple[Path, Path], llm: LLM, name: str) -> None:
    with STATES[name]():
        loaded = load(saved_pair)
    answer = loaded.generate("hello", PARAMS)
    assert answer.token_ids == llm.generate("hello", PARAMS).token_ids
    weight = loaded.pair.target.input_embeddings
    assert weight.dtype is torch.float32
    assert not weight.is_inference()
