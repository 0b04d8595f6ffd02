"""Threads share an LLM: each gets what it would get alone, and nobody waits for the others' end."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from eaglegbv import LLM, Completion, EngineConfig, InvalidArgument, Plan, SamplingParams
from eaglegbv.metrics import STEPS, StepObserver, StepRecord
from eaglegbv.request import FinishReason

THREADS = 4


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(plan=Plan(paths=2, depth=3), engine=EngineConfig(max_batch=16, check_slots=True))


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


class Widest(StepObserver):
    """Counts the requests of the widest step."""

    requests = 0

    def on_step(self, record: StepRecord) -> None:
        self.requests = max(self.requests, record.requests)


def test_asyncio_serves_calls_by_threads_in_the_same_steps(llm: LLM) -> None:
    async def ask() -> list[str]:
        # Of its own, asyncio has four threads more than the machine has cores.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
        calls = [asyncio.to_thread(llm.generate, "Once", params(n)) for n in range(16)]
        return [answer.text for answer in await asyncio.gather(*calls)]

    widest = Widest()
    llm.observe(widest)
    try:
        assert len(set(asyncio.run(ask()))) == 1
    finally:
        llm.unobserve(widest)
    assert widest.requests == 16


def test_asyncio_serves_all_tasks_in_the_same_steps(llm: LLM) -> None:
    alone = llm.generate("Once", params(0))
    before = llm.metrics.value(STEPS)

    async def ask() -> list[Completion]:
        calls = [llm.generate_async("Once", params(n)) for n in range(8)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert [answer.text for answer in answers] == 8 * [alone.text]
    assert llm.metrics.value(STEPS) - before < 3 * alone.metrics.target_forwards
    assert idle(llm)


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["while it is added", "while it runs"])
def test_a_task_that_is_cancelled_ends_its_requests(llm: LLM, pause: float) -> None:
    long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)

    async def ask() -> None:
        task = asyncio.ensure_future(llm.generate_async(["A long story", "Another"], long))
        await asyncio.sleep(pause)
        task.cancel()
        steps = llm.metrics.value(STEPS)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.get_running_loop().shutdown_default_executor()
        assert llm.metrics.value(STEPS) - steps <= 1

    asyncio.run(ask())
    assert not llm._engine.has_work
    llm.generate("Once", params(1))
    assert idle(llm)


async def ask_wrongly(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="expected a text that is not empty"):
        await llm.generate_async("", params(1))
    good, bad = await llm.generate_async(["Once", ""], params(1))
    assert (good.error, bad.finish_reason) == (None, FinishReason.ERROR)


def test_errors_of_tasks_are_those_of_calls(llm: LLM) -> None:
    asyncio.run(ask_wrongly(llm))
    assert idle(llm)


def test_a_stream_may_be_open_when_the_interpreter_exits() -> None:
    code = "from eaglegbv import LLM, Plan\nstream = LLM(plan=Plan()).stream('Once')\nnext(stream)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
