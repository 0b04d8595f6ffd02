"""Threads share an LLM: each gets what it would get alone, and nobody waits for the others' end."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from eaglegbv import LLM, EngineConfig, Plan, SamplingParams

THREADS = 4


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(plan=Plan(paths=2, depth=3), engine=EngineConfig(max_batch=8, check_slots=True))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0, seed=number, ignore_eos=True)


def idle(llm: LLM) -> bool:
    return not llm._engine.has_work and not llm._open and not llm._left


@pytest.mark.usefixtures("hasty")
def test_threads_get_the_texts_they_would_get_alone(llm: LLM) -> None:
    prompts = [f"The {word}" for word in ("dog", "sun", "old man", "river")]
    alone = [llm.generate(prompt, params(0)).text for prompt in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(3):
            answers = list(pool.map(lambda p: llm.generate(p, params(0)), prompts))
            assert [answer.text for answer in answers] == alone
    assert idle(llm)


@pytest.mark.usefixtures("hasty")
def test_streams_that_are_left_on_other_threads_free_their_slots(llm: LLM) -> None:
    def look_in(number: int) -> None:
        stream = llm.stream("Once", params(number))
        next(stream)  # and no more: the generator is closed where it is collected

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(look_in, range(3 * THREADS)))
    assert llm.generate("Once", params(1)).token_ids
    assert idle(llm)
    llm._engine.check()


def test_a_call_is_served_while_another_goes_on(llm: LLM) -> None:
    """In the same batch: the short answer does not wait for the long one."""
    order: list[str] = []
    long = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    began = threading.Event()

    def take_long() -> None:
        for _ in llm.stream("A long story", long):
            began.set()
        order.append("long")

    thread = threading.Thread(target=take_long)
    thread.start()
    began.wait()
    llm.generate("A short one", SamplingParams(max_tokens=2))
    order.append("short")
    thread.join()
    assert order == ["short", "long"]


def test_asyncio_serves_calls_by_threads(llm: LLM) -> None:
    async def ask() -> list[str]:
        calls = [asyncio.to_thread(llm.generate, "Once", params(n)) for n in range(THREADS)]
        return [answer.text for answer in await asyncio.gather(*calls)]

    assert len(set(asyncio.run(ask()))) == 1
