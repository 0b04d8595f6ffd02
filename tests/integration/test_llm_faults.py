"""What users do wrong, interrupts and threads: nothing touches the text of another prompt."""

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.cli import process

from eaglegbv import LLM, Completion, EngineConfig, InvalidArgument, Plan, SamplingParams
from eaglegbv.engine import Engine
from eaglegbv.metrics import FINISHED, STEPS, StepRecord
from eaglegbv.models.hf import HFTarget
from eaglegbv.request import FinishReason, RequestOutput

PARAMS = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    engine = EngineConfig(kv_slots=4096, max_batch=16, check_slots=True)
    return LLM(plan=Plan(paths=2, depth=3), engine=engine)


def unread(llm: LLM) -> bool:
    llm._engine.check()
    return not llm._open and not llm._left and not llm._engine.has_work


BAD = [
    (5, "prompt=5: expected text, token ids or chat messages"),
    (b"bytes", "prompt=b'bytes': expected text"),
    ("", "prompt='': expected a text that is not empty"),
    ("\ud83d", "expected text without halves of surrogate pairs"),
    ([1, 2.5], "expected text, token ids or chat messages"),
    ([True], "expected text, token ids or chat messages"),
    ([], r"prompt=[]: expected at least one token"),
    ([10**6], "prompt=1000000: expected token ids in [0, "),
    ([1] * 10**4, "prompt='10000 tokens': expected at most "),
    ([{"role": "robot", "content": "Hi"}], "expected messages that the chat template of"),
    ([{"content": "no role"}], "expected a message with role and content"),
    ([{"role": "user"}], "expected a message with role and content"),
    ([{"role": "user", "content": None}], "expected a message with role and content, both"),
    ([{"role": "user", "content": [{"type": "image"}]}], "expected a message with role and"),
]


def test_prompts_that_are_none_fail_alone(llm):
    good = llm.generate("good", PARAMS)
    first, *failed, last = llm.generate(["good", *(bad for bad, _ in BAD), "good"], PARAMS)
    assert first.token_ids == last.token_ids == good.token_ids
    assert first.error is None
    for answer, (_, message) in zip(failed, BAD, strict=True):
        assert answer.finish_reason is FinishReason.ERROR
        assert message in str(answer.error)
        assert answer.token_ids == []
    assert unread(llm)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [PARAMS, None], [PARAMS]])
def test_settings_that_are_none_are_named_and_nothing_is_begun(llm, params):
    with pytest.raises(InvalidArgument, match=r"sampling_params=.*: expected .*one per prompt"):
        llm.generate(["good", "good"], params)
    with pytest.raises(InvalidArgument, match="sampling_params="):
        next(llm.stream("good", {"temperature": 0}))
    assert unread(llm)


def test_parts_of_text_are_joined(llm):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert llm.encode([{"role": "user", "content": parts}]) == llm.encode(
        [{"role": "user", "content": "ab"}]
    )


def test_prompts_added_before_an_interrupt_do_not_stay(llm, monkeypatch):
    add, added = Engine.add, []

    def interrupted(*arguments: object, **named: object) -> object:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(add(*arguments, **named))
        return added[-1]

    monkeypatch.setattr(Engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], PARAMS)
    assert [request.finish_reason for request in added] == 2 * [FinishReason.CANCELLED]
    assert unread(llm)


def test_an_interrupt_behind_a_commit_loses_no_text_of_others(llm, monkeypatch):
    whole = llm.generate("a text", PARAMS)
    commit, seen = Engine._commit, []

    def interrupted(*arguments: object) -> list[RequestOutput]:
        commits = commit(*arguments)
        seen.append(commits)
        if len(seen) == 2:  # the stream's own group was committed; nobody hears of it
            raise KeyboardInterrupt
        return commits

    stream = llm.stream("a text", PARAMS)
    pieces = [next(stream), next(stream)]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("other", PARAMS, plan=Plan(verifier="token", paths=1, depth=2))
    pieces += stream
    text, completion = "".join(piece.text for piece in pieces), pieces[-1].completion
    assert [t for p in pieces for t in p.token_ids] == completion.token_ids
    if completion.finish_reason is FinishReason.LENGTH:
        assert completion.token_ids == whole.token_ids
    assert text == completion.text == whole.text[: len(text)]
    assert unread(llm)


def test_a_stream_that_is_collected_within_a_step_harms_no_other(llm, monkeypatch):
    expected = llm.generate(["a", "b"], PARAMS)
    left = llm.stream("left", PARAMS)
    next(left)
    cycle = [left]
    cycle.append(cycle)
    del left, cycle
    forward = HFTarget.forward

    def collecting(*arguments: object, **named: object) -> object:
        gc.collect()
        return forward(*arguments, **named)

    gc.disable()
    monkeypatch.setattr(HFTarget, "forward", collecting)
    try:
        answers = llm.generate(["a", "b"], PARAMS)
    finally:
        gc.enable()
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert unread(llm)


def test_a_stop_string_in_the_last_token_is_a_stop_and_counts_once(llm):
    full = llm.generate("stop", PARAMS)
    stop = full.text[-2:]
    at = full.text.index(stop)
    before = dict(llm.metrics.values[FINISHED])
    cut = llm.generate("stop", SamplingParams(max_tokens=16, seed=3, ignore_eos=True, stop=stop))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == full.text[:at]
    after = llm.metrics.values[FINISHED]
    assert sum(after.values()) == sum(before.values()) + 1
    assert after["stop"] == before.get("stop", 0) + 1


def test_an_observer_may_cancel_and_not_step(llm):
    def cancel_all(_: StepRecord) -> None:
        for answer in tuple(llm._open.values()):
            llm._engine.cancel(answer.request)

    observer = SimpleNamespace(on_step=cancel_all)
    llm.observe(observer)
    answer = llm.generate("a text", PARAMS)
    llm.unobserve(observer)
    assert answer.finish_reason is FinishReason.CANCELLED
    assert unread(llm)


# Threads share an LLM: each gets what it would get alone, and nobody waits for the others' end.

THREADS = 4


@pytest.fixture
def hasty() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0, seed=number, ignore_eos=True)


@pytest.mark.usefixtures("hasty")
def test_threads_get_the_texts_they_would_get_alone(llm):
    prompts = [f"The {word}" for word in ("dog", "sun", "old man", "river")]
    alone = [llm.generate(prompt, params(0)).text for prompt in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(3):
            answers = list(pool.map(lambda p: llm.generate(p, params(0)), prompts))
            assert [answer.text for answer in answers] == alone
    assert unread(llm)


@pytest.mark.usefixtures("hasty")
def test_streams_that_are_left_on_other_threads_free_their_slots(llm):
    def look_in(number: int) -> None:
        stream = llm.stream("Once", params(number))
        next(stream)  # and no more: the generator is closed where it is collected

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(look_in, range(3 * THREADS)))
    assert llm.generate("Once", params(1)).token_ids
    assert unread(llm)


def test_a_call_is_served_while_another_goes_on(llm):
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


def test_asyncio_serves_all_tasks_in_the_same_steps(llm):
    alone = llm.generate("Once", params(0))
    before = llm.metrics.value(STEPS)

    async def ask() -> list[Completion]:
        calls = [llm.generate_async("Once", params(n)) for n in range(8)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert [answer.text for answer in answers] == 8 * [alone.text]
    assert llm.metrics.value(STEPS) - before < 3 * alone.metrics.target_forwards
    assert unread(llm)


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["while it is added", "while it runs"])
def test_a_task_that_is_cancelled_ends_its_requests(llm, pause):
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
    assert unread(llm)


def test_errors_of_tasks_are_those_of_calls(llm):
    with pytest.raises(InvalidArgument, match="expected a text that is not empty"):
        asyncio.run(llm.generate_async("", params(1)))
    good, bad = asyncio.run(llm.generate_async(["Once", ""], params(1)))
    assert (good.error, bad.finish_reason) == (None, FinishReason.ERROR)
    assert unread(llm)


def test_a_stream_may_be_open_when_the_interpreter_exits():
    code = "from eaglegbv import LLM, Plan\nstream = LLM(plan=Plan()).stream('Once')\nnext(stream)"
    assert "Error" not in process(sys.executable, "-c", code).stderr
