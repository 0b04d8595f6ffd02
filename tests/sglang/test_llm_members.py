"""What ``LLM(..., backend="sglang")`` offers, beside a stand-in for SGLang's engine: no models."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli import documented

from eaglegbv import LLM, EngineConfig, InvalidArgument, Plan
from eaglegbv.backends.sglang import llm as sglang_llm
from eaglegbv.config import Source
from eaglegbv.llm import TextGenerator
from eaglegbv.tree import DraftSampling


class Engine:
    """Answers every prompt by the same two tokens; knows whether it was stopped."""

    server_args = SimpleNamespace(device="cpu")
    stopped = False
    arguments: dict[str, Any]
    loop: asyncio.AbstractEventLoop

    async def async_generate(self, **named: Any) -> dict[str, Any]:
        if named["input_ids"] == [5]:
            raise ValueError("not accepted")
        *_, whole = self.generate()
        return whole

    def generate(self, **named: Any) -> Iterator[dict[str, Any]]:
        about = {"finish_reason": {"type": "length"}, "prompt_tokens": 1, "completion_tokens": 2}
        yield {"text": "a", "output_ids": [5], "meta_info": about}
        yield {"text": "ab", "output_ids": [5, 6], "meta_info": about}

    def shutdown(self) -> None:
        self.stopped = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine()
    engine.loop = asyncio.new_event_loop()

    def start(*models: object, **named: Any) -> Engine:
        engine.arguments = named
        return engine

    monkeypatch.setattr(sglang_llm, "start_engine", start)
    yield engine
    engine.loop.close()


@pytest.fixture
def llm(engine: Engine) -> Any:
    return LLM(backend="sglang")


def test_a_backend_is_chosen_by_name(engine):
    llm: Any = LLM(None, "eagle1", backend="sglang", verifier="gbv", paths=2, seed=3)
    assert type(llm) is sglang_llm.SGLangLLM
    assert (llm.plan.verifier, llm.plan.paths, llm.drafter_name) == ("gbv", 2, "eagle1")
    llm.shutdown()
    assert engine.stopped
    with pytest.raises(InvalidArgument, match="backend='nope': expected one of local, sglang"):
        LLM(backend="nope")


def test_what_is_not_the_engines_is_offered_alike(llm):
    assert llm.decode(llm.encode("Once upon a time")) == "<|bos|>Once upon a time"
    assert llm.device.type == "cpu"
    first, second, last = llm.stream("Once")
    assert (first.text + second.text, first.token_ids + second.token_ids) == ("ab", [5, 6])
    assert last.completion.text == "ab"
    assert last.completion.prompt_token_ids == llm.encode("Once")


def test_many_prompts_are_answered_in_their_order(llm):
    answers = llm.generate(["Once", [5], [7, 8]], progress=True)
    assert [a.finish_reason for a in answers] == ["length", "error", "length"]
    assert [a.prompt_token_ids for a in answers][2] == [7, 8]
    assert "not accepted" in answers[1].error
    with pytest.raises(InvalidArgument, match="priority=1: expected 0"):
        llm.generate("Once", priority=1)
    with pytest.raises(InvalidArgument, match=r"plan=.*: expected None or the plan SGLang runs"):
        llm.generate("Once", plan=Plan(paths=5))


def test_documented_calls(engine):
    code = documented("sglang.md", "python")[1]
    exec(code.replace('"MODEL", "HEAD"', 'None, "eagle1"'), {})
    assert (engine.arguments["paths"], engine.arguments["depth"]) == (3, 4)
    assert engine.stopped


@pytest.mark.parametrize("name", sorted(sglang_llm.LOCAL_ALONE))
def test_what_is_the_local_engines_alone_says_so(llm, name):
    with pytest.raises(AttributeError, match=rf"^SGLangLLM has no '{name}': .*; .*'local'"):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_all_that_the_local_engine_has_besides_is_known():
    besides = {name for name in vars(LLM) if not name.startswith("_")} - {*dir(TextGenerator)}
    assert besides == {*sglang_llm.LOCAL_ALONE} - {"dtype", "pair"}


def test_other_names_are_missing_as_usual(llm):
    with pytest.raises(AttributeError, match=r"^'SGLangLLM' object has no attribute 'metric'$"):
        _ = llm.metric


def test_sizes_become_sglangs_arguments(engine):
    def arguments(**sizes: Any) -> dict[str, Any]:
        LLM(backend="sglang", engine=EngineConfig(**sizes), device="cuda:1")
        return engine.arguments

    plain = arguments()
    assert (plain["device"], plain["base_gpu_id"]) == ("cuda", 1)
    assert not plain["disable_radix_cache"]
    assert not plain["disable_cuda_graph"]
    assert "chunked_prefill_size" not in plain
    others = arguments(prefix_cache=False, cuda_graphs="off", prefill_tokens=512, max_batch=3)
    assert others["disable_radix_cache"]
    assert others["disable_cuda_graph"]
    assert (others["chunked_prefill_size"], others["max_running_requests"]) == (512, 3)
    LLM(backend="sglang", device="cuda")
    assert "base_gpu_id" not in engine.arguments


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (EngineConfig(kv_bytes=2**30), "kv_bytes=1073741824: expected None with SGLang: .*kv_slot"),
        (EngineConfig(check_slots=True), "check_slots=True: expected False with SGLang"),
        (EngineConfig(cuda_graphs="eager"), "cuda_graphs='eager': expected 'auto', 'on' or 'off'"),
        (Plan(paths=1, depth=4, source=Source.LOOKUP), "source='lookup': expected 'drafter'"),
        (Plan(draft_sampling=DraftSampling.WOR), "draft_sampling='wor': expected 'iid'"),
        (Plan(paths=1, whole_vocab=4096), "whole_vocab=4096: expected 0"),
        (Plan(min_confidence=0.1), "min_confidence=0.1: expected 0"),
    ],
)
@pytest.mark.usefixtures("engine")
def test_what_sglang_would_ignore_is_refused(asked, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        LLM(backend="sglang", **{"plan" if isinstance(asked, Plan) else "engine": asked})
